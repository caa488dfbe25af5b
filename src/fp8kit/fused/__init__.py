"""Norms and activations that write FP8: the public functions."""

from fp8kit.fused.functional import add_rms_norm_quantize as add_rms_norm_quantize
from fp8kit.fused.functional import gelu_mul_quantize as gelu_mul_quantize
from fp8kit.fused.functional import gelu_quantize as gelu_quantize
from fp8kit.fused.functional import layer_norm_quantize as layer_norm_quantize
from fp8kit.fused.functional import rms_norm_quantize as rms_norm_quantize
from fp8kit.fused.functional import silu_mul_quantize as silu_mul_quantize
