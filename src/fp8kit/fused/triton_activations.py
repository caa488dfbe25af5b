"""SiLU and GELU, alone or times a second operand, that end in FP8: one launch, one pass.

    y = rn(rn(act(gate)) * up)   or   rn(act(gate))        then the quantizer, see ``reference``

    silu       gate / (1 + 2^(-gate * log2 e))
    gelu       gate * (1 + erf(gate / sqrt(2))) / 2
    gelu tanh  gate * (1 + tanh(z)) / 2     z = sqrt(2 / pi) (gate + c gate^3)
                                            tanh(z) = 2 / (1 + 2^(-2 z log2 e)) - 1

Torch takes the same steps with its own ``exp``, ``tanh`` and ``erf``. Here exponentials are the
hardware's ``ex2.approx``, reciprocals its ``rcp.approx`` and ``erf`` one polynomial, so that the
arithmetic takes less time than the memory. Their errors of a few ulp of ``float32`` move a result
only where it lies that close to the midpoint of two 16-bit numbers, which is measured by
``test_activations_agree_with_torch``.
"""

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.fused.triton_output import Output, Tile, narrow, rounded_product, row_cut, store_result
from fp8kit.quantizers.triton_encode import INTERPRETED, appended, existing, widen
from fp8kit.runtime.triton_launch import launch
from fp8kit.runtime.triton_overlap import join_stream, overlaps

MOST_TILES = 7  # of a row in registers
_CROWDED = 132 * 64  # warps' loads that fill a GPU
_CAPPED_ROWS = 4 * 132
_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


def activation_tile(
    m: int, k: int, itemsize: int, group: int, whole_rows: bool, paired: bool, heavy: bool
) -> Tile:
    """Choose a tile for ``m`` rows of ``k`` elements; no choice changes the result.

    A tile needs at least ``group`` columns, a power of two. With ``whole_rows`` a program needs all
    of a row, for its amax. Two operands are read if ``paired``. With ``heavy`` an element takes so
    many instructions that fewer, larger programs are faster.
    """
    lanes = 32 * 16 // itemsize  # elements that one warp loads with 16 bytes per thread
    whole = max(triton.next_power_of_2(k), 16, group)
    if whole <= 4 * lanes:
        rows = min(max(1, 4 * lanes // whole), triton.next_power_of_2(m))
        return Tile(rows, whole, 1, max(1, min(4, rows * whole // lanes)))
    crowded = m * k > _CROWDED * lanes
    if not (whole_rows or (heavy and crowded and k <= MOST_TILES * 32 * lanes)):
        return Tile(1, 4 * lanes, 2 if crowded else 1, 4)
    held = triton.cdiv(k, 16 * lanes)
    if paired and 2 < held <= MOST_TILES:
        # both rows fit in the registers of 32 warps that load 8 bytes at a time
        return Tile(1, 16 * lanes, held, 32)
    warps, held = row_cut(k, lanes, MOST_TILES)
    return Tile(1, warps * lanes, held, warps)


@triton.jit
def over_one_plus_exp2(x, t):
    """Return ``x / (1 + 2^t)``."""
    # an infinite denominator gives zero for finite x, NaN for infinite x
    denominator = 1.0 + tl.exp2(t)
    if INTERPRETED:
        return x / denominator
    else:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _erf(x):
    """Return ``erf(x / sqrt(2)) = 1 - 2 * tail(|x|)`` within ``2^-23``, with the sign of ``x``."""
    size = tl.abs(x)
    # log2 of the normal distribution's tail, fitted where its error weighs most; -inf at infinity
    log2_tail = tl.fma(size, -2.834864517353708e-06, 3.937712972401641e-05)
    log2_tail = tl.fma(log2_tail, size, -1.861776690930128e-04)
    log2_tail = tl.fma(log2_tail, size, -1.369422388961539e-04)
    log2_tail = tl.fma(log2_tail, size, 7.063427474349737e-03)
    log2_tail = tl.fma(log2_tail, size, -5.2496183663606644e-02)
    log2_tail = tl.fma(log2_tail, size, -0.4592081904411316)
    log2_tail = tl.fma(log2_tail, size, -1.1511051654815674)
    log2_tail = tl.fma(log2_tail, size, -1.0)
    positive = tl.fma(tl.exp2(log2_tail), -2.0, 1.0)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (positive.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Apply ``"silu"``, ``"gelu"`` or ``"gelu_tanh"`` to ``float32``."""
    if KIND == "silu":
        return over_one_plus_exp2(x, x * (-_LOG2_E))
    else:
        if KIND == "gelu":
            odd = _erf(x)
        else:
            LINEAR: tl.constexpr = -2.0 * _LOG2_E * _SQRT_2_OVER_PI
            power = x * tl.fma(x * x, LINEAR * _CUBIC, LINEAR)
            odd = tl.fma(over_one_plus_exp2(1.0, power), 2.0, -1.0)
        # halving is exact: this rounds 1 + odd, and cancels, as torch does
        return x * tl.fma(odd, 0.5, 0.5)


@triton.jit(do_not_specialize=["M"])
def _activation_kernel(
    gate_ptr,  # [M, K - K_LEFT]
    up_ptr,  # like gate_ptr, or None
    left_ptr,  # [M, K_LEFT] or None
    scale_ptr,
    scale_ub_ptr,
    data_ptr,  # [M, K] bytes, contiguous
    M,
    stride_gm,
    stride_um,
    stride_lm,
    min_scale,
    K: tl.constexpr,  # of the result: columns of left_ptr, then of gate_ptr
    K_LEFT: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    DIVISION: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    join_stream(OVERLAP)
    DTYPE: tl.constexpr = gate_ptr.dtype.element_ty
    ACROSS: tl.constexpr = (K + HELD * BLOCK_K - 1) // (HELD * BLOCK_K)
    program = tl.program_id(0)
    row = (program // ACROSS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = program % ACROSS * (HELD * BLOCK_K)
    gates, ups = (), ()
    given = tl.load(scale_ptr) if SCALES == "static" else None
    for i in tl.static_range(HELD):
        col = first + i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask = existing(row, M)[:, None] & (col < K)
        if left_ptr is None:
            gate = tl.load(gate_ptr + row[:, None] * stride_gm + col, mask=mask, other=0.0)
        else:
            behind = col >= K_LEFT
            left = tl.load(
                left_ptr + row[:, None] * stride_lm + col, mask=mask & ~behind, other=0.0
            )
            gate = tl.load(
                gate_ptr + row[:, None] * stride_gm + (col - K_LEFT), mask=mask & behind, other=0.0
            )
            gate = tl.where(behind, gate, left)
        gates = appended(gates, gate)
        if up_ptr is not None:
            mask = mask & (col >= K_LEFT)
            up = tl.load(up_ptr + row[:, None] * stride_um + (col - K_LEFT), mask=mask, other=0.0)
            ups = appended(ups, up)
    results = ()
    for i in tl.static_range(HELD):
        y = narrow(activate(widen(gates[i]), KIND), DTYPE)
        if up_ptr is not None:
            y = rounded_product(y, ups[i])
        if left_ptr is not None:
            col = first + i * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            y = tl.where(col >= K_LEFT, y, gates[i])
        results = appended(results, y)
    store_result(results, given, row, first, M, scale_ptr, scale_ub_ptr, data_ptr, min_scale,
                 K, SCALES, GROUP, DIVISION, FP8_MAX, HELD)  # fmt: skip


def quantize_activation(
    kind: str, gate: Tensor, up: Tensor | None, left: Tensor | None, output: Output
) -> None:
    """Activate the rows of ``gate``, multiply by ``up`` and quantize into ``output``.

    ``gate`` and ``up`` have the same shape; ``left [M, K1]`` gives the first columns of the result.
    All have unit stride along K.
    """
    m, k, k_left = gate.shape[0], output.data.shape[-1], 0 if left is None else left.shape[1]
    constants, overlap = output.constants, overlaps(output.data.device)
    whole_rows = constants["SCALES"] == "row"
    sizes = (gate.element_size(), constants["GROUP"])
    heavy = kind == "gelu" and up is None
    tile = activation_tile(m, k, *sizes, whole_rows, up is not None, heavy)
    # with 40 registers, six programs of 8 warps hold 7 tiles of 16 bits; few rows need no limit
    long = whole_rows and up is None and tile.held == MOST_TILES and gate.element_size() == 2
    capped = long and m > _CAPPED_ROWS
    across = triton.cdiv(k, tile.held * tile.cols)
    launch(
        _activation_kernel, triton.cdiv(m, tile.rows) * across,
        gate, up, left, *output.pointers(), m,
        *(0 if x is None else x.stride(0) for x in (gate, up, left)),
        output.min_scale, K=k, K_LEFT=k_left, KIND=kind, **constants,
        BLOCK_M=tile.rows, BLOCK_K=tile.cols, HELD=tile.held,
        OVERLAP=overlap, launch_pdl=overlap, num_warps=tile.warps,
        maxnreg=40 if capped else None, enable_fp_fusion=False,
    )  # fmt: skip
