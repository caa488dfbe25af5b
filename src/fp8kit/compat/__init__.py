"""The names people already call: vLLM's FP8 functions, LoRAX' layer, the copied ``fp8_gemm.py``.

Each behaves as published, and is built from this package's own functions; ``docs/compat.md`` has a
row for each, with the differences. Scales may have the shapes and dtypes that engines use.
"""

from fp8kit.compat.blocks import per_block_cast_to_fp8 as per_block_cast_to_fp8
from fp8kit.compat.blocks import per_token_cast_to_fp8 as per_token_cast_to_fp8
from fp8kit.compat.blocks import per_token_group_quant_fp8 as per_token_group_quant_fp8
from fp8kit.compat.blocks import w8a8_block_fp8_matmul as w8a8_block_fp8_matmul
from fp8kit.compat.blocks import w8a8_triton_block_scaled_mm as w8a8_triton_block_scaled_mm
from fp8kit.compat.capabilities import FLAGS as _FLAGS
from fp8kit.compat.capabilities import cutlass_block_fp8_supported as cutlass_block_fp8_supported
from fp8kit.compat.capabilities import cutlass_fp8_supported as cutlass_fp8_supported
from fp8kit.compat.capabilities import cutlass_group_gemm_supported as cutlass_group_gemm_supported
from fp8kit.compat.capabilities import sparse_cutlass_supported as sparse_cutlass_supported
from fp8kit.compat.capabilities import supports as supports
from fp8kit.compat.fused_weights import all_close_1d as all_close_1d
from fp8kit.compat.fused_weights import convert_to_channelwise as convert_to_channelwise
from fp8kit.compat.fused_weights import normalize_e4m3fn_to_e4m3fnuz as normalize_e4m3fn_to_e4m3fnuz
from fp8kit.compat.fused_weights import per_tensor_dequantize as per_tensor_dequantize
from fp8kit.compat.fused_weights import requantize_with_max_scale as requantize_with_max_scale
from fp8kit.compat.gemm import enable_fp8_gemm as enable_fp8_gemm
from fp8kit.compat.gemm import fp8_linear_forward_many as fp8_linear_forward_many
from fp8kit.compat.linear_op import Fp8LinearOp as Fp8LinearOp
from fp8kit.compat.lorax import Fp8Linear as Fp8Linear
from fp8kit.compat.lorax import apply_fp8_linear as apply_fp8_linear
from fp8kit.compat.lorax import get_linear as get_linear
from fp8kit.compat.mxfp8 import MXFP8_BLOCK_SIZE as MXFP8_BLOCK_SIZE
from fp8kit.compat.mxfp8 import MXFP8_SCALE_DTYPE as MXFP8_SCALE_DTYPE
from fp8kit.compat.mxfp8 import MXFP8_VALUE_DTYPE as MXFP8_VALUE_DTYPE
from fp8kit.compat.mxfp8 import Mxfp8LinearBackend as Mxfp8LinearBackend
from fp8kit.compat.mxfp8 import Mxfp8LinearOp as Mxfp8LinearOp
from fp8kit.compat.mxfp8 import dequant_mxfp8_to_bf16 as dequant_mxfp8_to_bf16
from fp8kit.compat.mxfp8 import mxfp8_e4m3_quantize as mxfp8_e4m3_quantize
from fp8kit.compat.mxfp8 import mxfp8_e4m3_quantize_fake as mxfp8_e4m3_quantize_fake
from fp8kit.compat.mxfp8 import select_mxfp8_linear_backend as select_mxfp8_linear_backend
from fp8kit.compat.mxfp8 import swizzle_mxfp8_scale as swizzle_mxfp8_scale
from fp8kit.compat.online_linear import (
    Fp8PerBlockOnlineLinearMethod as Fp8PerBlockOnlineLinearMethod,
)
from fp8kit.compat.online_linear import (
    Fp8PerTensorOnlineLinearMethod as Fp8PerTensorOnlineLinearMethod,
)
from fp8kit.compat.online_linear import Fp8PtpcOnlineLinearMethod as Fp8PtpcOnlineLinearMethod
from fp8kit.compat.online_linear import Mxfp8OnlineLinearMethod as Mxfp8OnlineLinearMethod
from fp8kit.compat.online_moe import Fp8PerBlockOnlineMoEMethod as Fp8PerBlockOnlineMoEMethod
from fp8kit.compat.online_moe import Fp8PerTensorOnlineMoEMethod as Fp8PerTensorOnlineMoEMethod
from fp8kit.compat.online_moe import Fp8PtpcOnlineMoEMethod as Fp8PtpcOnlineMoEMethod
from fp8kit.compat.online_moe import Mxfp8OnlineMoEMethod as Mxfp8OnlineMoEMethod
from fp8kit.compat.w8a8 import GroupShape as GroupShape
from fp8kit.compat.w8a8 import cutlass_scaled_mm as cutlass_scaled_mm
from fp8kit.compat.w8a8 import cutlass_w8a8_scaled_mm as cutlass_w8a8_scaled_mm
from fp8kit.compat.w8a8 import device_identity as _device_identity
from fp8kit.compat.w8a8 import dispatch_w8a8_scaled_mm as dispatch_w8a8_scaled_mm
from fp8kit.compat.w8a8 import flashinfer_w8a8_scaled_mm as flashinfer_w8a8_scaled_mm
from fp8kit.compat.w8a8 import maybe_create_device_identity as maybe_create_device_identity
from fp8kit.compat.w8a8 import rocm_per_tensor_w8a8_scaled_mm as rocm_per_tensor_w8a8_scaled_mm
from fp8kit.compat.w8a8 import scaled_fp8_quant as scaled_fp8_quant
from fp8kit.compat.w8a8 import torch_channelwise_w8a8_scaled_mm as torch_channelwise_w8a8_scaled_mm
from fp8kit.compat.w8a8 import torch_per_tensor_w8a8_scaled_mm as torch_per_tensor_w8a8_scaled_mm
from fp8kit.compat.w8a8 import torch_per_token_w8a8_scaled_mm as torch_per_token_w8a8_scaled_mm
from fp8kit.compat.wrapped_linear import FP8GemmOptions as FP8GemmOptions
from fp8kit.compat.wrapped_linear import FP8Linear as FP8Linear


def __getattr__(name: str) -> object:
    """Compute the capability flags on access, so that an import queries no device."""
    if name == "TORCH_DEVICE_IDENTITY":
        return _device_identity()
    if name in _FLAGS:
        return _FLAGS[name]()
    raise AttributeError(f"module 'fp8kit.compat' has no attribute {name!r}")
