"""``torch.nn.functional.scaled_mm`` on CUDA: cuBLASLt and CUTLASS behind torch's scaling recipes.

Tensor-wise and row-wise scales run on sm89 and later and on AMD from MI300 (not run on hardware),
1x128 by 128x128 blocks on sm90, MX on sm100 and later. Torch wants N and K in multiples of 16 (128
for blocks); blocks also want M and the number of weight scales along K in multiples of 4. Operands
are padded with zero codes and the result is cropped, so any shape works.
Row-wise kernels write ``bfloat16`` only: other output dtypes multiply the bare codes into
``float32`` and apply the scales afterwards. For few rows that is a configuration for ``bfloat16``
as well: cuBLAS has better kernels for it than CUTLASS for rows, and the result is small.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from fp8kit.dispatch.device import native_codes
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR
from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.swizzled_scales import swizzled_weight_scales
from fp8kit.matmul.tma_operands import aligned
from fp8kit.quantizers.scale_layout import swizzle_scales

_ROWWISE = (ROW, TENSOR)
_ALIGN = 16
_WEIGHT_ALIGN = {BLOCK: (128, 128), MX: (_ALIGN, 32)}  # of N and K, where it is another one
_BLOCK_M_ALIGN = 4
_BLOCK_SCALE_ALIGN = 4
_AMD_WITH_FP8 = ("gfx94", "gfx95", "gfx12")
SCALED_AFTER = "scaled_after"
_FEW_ROWS = 512  # up to so many rows a product takes only as long as reading its weight


def supports(problem: MatmulProblem) -> str | None:
    """Return which of torch's recipes is missing on this device, if any."""
    if problem.batch_invariant:
        return "cuBLASLt chooses its kernel, and so its K order, by M"
    if problem.x_group is None:
        return "torch has no FP8-weight by 16-bit recipe"
    pair = (problem.x_group, problem.w_group)
    if problem.architecture:
        return _of_amd(problem)
    if problem.w_dtype != torch.float8_e4m3fn or problem.x_dtype != torch.float8_e4m3fn:
        return f"codes are {problem.x_dtype} and {problem.w_dtype}, torch's recipes want e4m3fn"
    if problem.capability is None or problem.capability < (8, 9):
        return "FP8 tensor cores of NVIDIA GPUs start at sm89"
    if pair[0] in _ROWWISE and pair[1] in _ROWWISE:
        tensorwise = pair == (TENSOR, TENSOR)
        known = tensorwise or problem.capability[0] in (8, 9, 10)
        return None if known else "torch has no row-wise kernel for this device"
    if pair == (GROUP128, BLOCK):
        if problem.capability[0] != 9:
            return "cuBLASLt has 1x128 by 128x128 scales on sm90 only"
        return None
    if pair == (MX, MX):
        return None if problem.capability[0] >= 10 else "MX tensor cores start at sm100"
    return f"torch has no recipe for {pair[0]} by {pair[1]} scales"


def _of_amd(problem: MatmulProblem) -> str | None:
    """Return what torch lacks on a GPU of AMD, where hipBLASLt is behind its recipes."""
    known, wanted = problem.architecture, native_codes(problem.architecture)
    if not known.startswith(_AMD_WITH_FP8):
        return f"FP8 matrix cores of AMD are those of gfx94, gfx95 and gfx12, not of {known}"
    if problem.x_group not in _ROWWISE or problem.w_group not in _ROWWISE:
        return "on AMD torch's recipes are those per tensor and per row"
    if problem.w_dtype != wanted or problem.x_dtype != wanted:
        return (
            f"codes are {problem.x_dtype} and {problem.w_dtype}, {known} multiplies {wanted}: "
            "fp8kit.recode(model, dtype) changes them"
        )
    return None


def pads(problem: MatmulProblem) -> bool:
    """Return whether a weight is padded at every call, which no time of other shapes includes."""
    n_align, k_align = _WEIGHT_ALIGN.get(problem.w_group, (_ALIGN, _ALIGN))
    return problem.n % n_align > 0 or problem.k % k_align > 0


def yields_to(problem: MatmulProblem) -> str:
    """Name a backend that copies no weight: for few rows the copy takes longer than the rest."""
    return "triton_gemm" if pads(problem) and problem.m <= _FEW_ROWS else ""


def configurations(problem: MatmulProblem) -> tuple[str, ...]:
    """Offer to multiply bare codes and scale the result, beside torch's row-wise kernel."""
    pair = (problem.x_group, problem.w_group)
    rowwise = pair[0] in _ROWWISE and pair[1] in _ROWWISE and pair != (TENSOR, TENSOR)
    few = problem.m <= _FEW_ROWS and problem.out_dtype == torch.bfloat16
    return (SCALED_AFTER,) if rowwise and few else ()


def run(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]``, choosing the recipe by the granularities."""
    groups = (problem.x_group, problem.w_group)
    if groups == (GROUP128, BLOCK):
        return _block(operands, problem)
    if groups == (MX, MX):
        return _mx(operands, problem)
    return _rowwise(operands, problem)


def _rowwise(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    x, x_scale, w, w_scale, bias = operands
    assert x_scale is not None
    rows, n, out_dtype = x.shape[0], w.shape[0], problem.out_dtype
    x, w = _padded(x, 1, _ALIGN), _padded(w, _ALIGN, _ALIGN)
    fast = problem.accum == "fast"
    tensorwise = problem.x_group == problem.w_group == TENSOR
    inside_kernel = out_dtype == torch.bfloat16 and problem.configuration != SCALED_AFTER
    if inside_kernel or tensorwise:
        kind = ScalingType.TensorWise if tensorwise else ScalingType.RowWise
        if not tensorwise:
            x_scale = x_scale.expand(rows, 1).contiguous()
            w_scale = _padded_scale(w_scale.expand(n, 1), w.shape[0]).contiguous().t()
        inside = bias is not None and bias.dtype == out_dtype == torch.bfloat16
        y = F.scaled_mm(
            x,
            w.t(),
            x_scale,
            kind,
            w_scale,
            kind,
            bias=F.pad(bias, (0, w.shape[0] - n)) if inside and bias is not None else None,
            output_dtype=out_dtype,
            use_fast_accum=fast,
        )[:, :n]
        bias = None if inside else bias
    else:
        one = torch.ones(1, 1, device=x.device)
        recipe = ScalingType.TensorWise
        y = F.scaled_mm(
            x, w.t(), one, recipe, one, recipe, output_dtype=torch.float32, use_fast_accum=fast
        )[:, :n]
        y = y * x_scale * w_scale.t()
    return _finish(y, bias, out_dtype)


def _block(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    x, x_scale, w, w_scale, bias = operands
    assert x_scale is not None
    rows, n = x.shape[0], w.shape[0]
    w = _padded(w, *_WEIGHT_ALIGN[BLOCK])
    x = _padded(x, _BLOCK_M_ALIGN, _WEIGHT_ALIGN[BLOCK][1])
    x_scale = _padded_scale(x_scale, x.shape[0]).t().contiguous().t()
    w_scale = F.pad(w_scale, (0, -w_scale.shape[1] % _BLOCK_SCALE_ALIGN))
    y = F.scaled_mm(
        x,
        w.t(),
        x_scale,
        ScalingType.BlockWise1x128,
        w_scale.t(),
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16 if problem.out_dtype == torch.bfloat16 else torch.float32,
    )[:rows, :n]
    return _finish(y, bias, problem.out_dtype)


def _mx(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
    x, x_scale, w, w_scale, bias = operands
    assert x_scale is not None
    n = w.shape[0]
    w = _padded(w, *_WEIGHT_ALIGN[MX])
    x = _padded(x, 1, _WEIGHT_ALIGN[MX][1])
    y = F.scaled_mm(
        x,
        w.t(),
        swizzle_scales(x_scale).view(torch.float8_e8m0fnu),
        ScalingType.BlockWise1x32,
        swizzled_weight_scales(w_scale, w.shape[0]),
        ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.bfloat16 if problem.out_dtype == torch.bfloat16 else torch.float32,
    )[:, :n]
    return _finish(y, bias, problem.out_dtype)


def _padded(codes: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    below, right = -codes.shape[0] % row_multiple, -codes.shape[1] % col_multiple
    if not below and not right:
        return aligned(codes)
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    places = (right, *codes.shape[1:], codes.stride(0), codes.storage_offset(), codes.data_ptr())
    # the time depends on the number of elements, not on their size
    kind, size = (torch.uint8, 1) if any(place % 8 for place in places) else (torch.int64, 8)
    return F.pad(codes.view(kind), (0, right // size, 0, below)).view(codes.dtype)


def _padded_scale(scale: Tensor, rows: int) -> Tensor:
    return F.pad(scale, (0, 0, 0, rows - scale.shape[0])) if rows != scale.shape[0] else scale


def _finish(y: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if bias is not None:
        y = y.float() + bias.float() if y.dtype != out_dtype else y + bias.to(y.dtype)
    return y.to(out_dtype).contiguous()


BACKEND = MatmulBackend(
    supports=supports, run=run, configurations=configurations, pads=pads, yields_to=yields_to
)
