"""Device functions that the Triton quantizers share: amax, scales, division, the cast to FP8.

They agree bit for bit with ``reference.py``, which divides in IEEE ``float32``. A hardware division
costs about twelve instructions. ``float32`` is divided in three, by scales that are not too small:

    r = RN(1 / s)    q0 = RN(x * r)    e = RN(q0 * s - x)    q1 = RN(q0 - e * r)

16-bit numbers are divided in two, by a reciprocal of two parts; ``r`` and ``u`` are ``1 / s``
rounded toward zero and away from it, each by at most 2 ulp:

    rest = RN(RN(1 - r * s) * u)    q1 = RN(x * r + RN(x * rest))

Why both are exact after the cast: ``q1 = RN(x / s + d)`` with a small ``d``. In the first, ``q0``
is within 2 ulp of ``x / s`` (half an ulp of its own, one of ``r``, twice that across a power of
two), and ``e`` and ``r`` are each rounded to 24 bits, so ``|d| < 2^-21`` ulp. In the second,
``1 - r * s`` is at most 2^-22; three roundings and ``u`` leave its share wrong by less than 2^-21.1
of itself, so ``|d| < 2^-19`` ulp. ``q1`` can differ from ``RN(x / s)`` only so close to the
midpoint of two neighbouring floats, where it is the other neighbour; that moves a code only if one
neighbour is a tie between two codes. A tie has at most five significant bits, which leaves about a
thousand pairs of significands that come so close, and a single one if ``x`` has 16 bits: a power of
two over all ones, which is why ``u`` errs upwards. For each of them ``q1`` is right (enumerated by
``test_quotients_of_every_near_tie``). The first sequence divides by the format's maximum with no
error at all (every significand, ``test_division_by_the_maximum``).

Nothing may underflow or overflow on the way: scales of at least ``SAFE_SCALE``, and at most its
reciprocal if the quotient is not bounded by the format's maximum. Quotients under ``2^-18`` lose
that guarantee and keep their sign, which is all that is left of them: they are cast to zero.
``q0 * s - x`` is +0 for ``x = -0``, and ``q0 - e * r`` then keeps the sign of ``q0``; ``r`` and
``rest`` have one sign, and so have the two products, which also makes infinities of infinities.
Above ``1 / SAFE_SCALE`` ``rest`` may be subnormal and ``|d|`` reach 2^-6 ulp, but such a scale is a
maximum of bf16 numbers over that of the format: too few to come so close to a midpoint
(``test_quotients_by_the_largest_scales``).

``FP8_MAX`` names the format: 448 is e4m3fn, 224 e4m3fnuz, 57344 e5m2.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fp8kit.formats import MX, GroupShape

SAFE_SCALE = 2.0**-64
LOADS = 4  # 16-byte loads of a thread that keep enough bytes in flight, in few registers
_SAFE_SCALE = tl.constexpr(SAFE_SCALE)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MANTISSA_MASK = tl.constexpr(0x7FFFFF)
_EXPONENT_MASK = tl.constexpr(0x7F800000)
_QUIET_NAN = tl.constexpr(0x7FC00000)
_E8M0_NAN = tl.constexpr(255)


def missing_gpu(capability: tuple[int, int] | None, least: tuple[int, int]) -> str | None:
    """Return which GPU the kernels need, ``None`` if the device will do, or for the interpreter."""
    if INTERPRETED.value or (capability is not None and capability >= least):
        return None
    return f"needs an NVIDIA GPU from sm{least[0]}{least[1]}"


class ScaleRule(NamedTuple):
    """The numbers of one quantization, the same for every tile.

    ``static`` scales are given, not computed; ``division`` says what is known of the operands (see
    ``encode_quotient``).
    """

    min_scale: float
    static: bool
    division: str
    fp8_max: float


def division_of(
    group: GroupShape, min_scale: float, scale_ub: Tensor | None, scale_rounding: str
) -> str:
    """Return the ``DIVISION`` of ``encode_quotient`` that is right for dynamic scales."""
    if group == MX:
        return "mx floor" if scale_rounding == "floor" else "mx ceil"
    safe = SAFE_SCALE <= min_scale <= 1 / SAFE_SCALE
    if scale_rounding == "up":
        return "power" if safe else "ieee power"
    if not safe:
        return "ieee"
    return "corrected" if scale_ub is None else "clipped"


def few_warps(numel: int, lanes: int, processors: int) -> int:
    """Choose the warps of a program whose threads load one vector each, so that few programs start.

    More than four programs per multiprocessor take longer to start than they save. There are
    ``numel`` elements, and one warp loads ``lanes`` of them.
    """
    return next((w for w in (4, 8) if numel <= 4 * w * lanes * processors), 16)


@triton.jit
def appended(tiles, tile):
    """Return a longer tuple of tiles (the compiler knows no unpacking in a tuple)."""
    return tiles + (tile,)


@triton.jit
def existing(row, M):
    """Return which of a program's rows exist; the grid gives each program at least one."""
    if row.shape[0] == 1:
        return tl.full(row.shape, 1, tl.int1)  # a constant, which costs no predicates
    else:
        return row < M


@triton.jit
def widen(x):
    """Convert a tile to ``float32`` exactly (the interpreter's own cast loses bf16 subnormals)."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    elif INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        # one instruction each; the compiler takes two for the upper half
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _magnitude_bits(x):
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def magnitude(x):
    """Return the bits of ``|x|`` as ``int32``: ordered like the numbers, with NaN above infinity.

    An integer maximum of them is exact and, unlike a floating one, never loses a NaN. Taken from
    the unconverted tile, so that 16-bit data stay packed in registers until they are divided.
    """
    return _magnitude_bits(x).to(tl.int32)


@triton.jit
def magnitudes(tiles, COUNT: tl.constexpr):
    """Return the largest magnitude of several tiles of one shape, element by element; NaN wins.

    Integers, two 16-bit ones per instruction: ptxas (12.9 and 13.0, every target) fuses
    ``max.xorsign.abs`` of a 16-bit product and a constant zero into ``fma.relu``, which loses the
    ``abs`` and with it every negative maximum. Masked columns are such zeros.
    """
    largest = _magnitude_bits(tiles[0])
    for i in tl.static_range(1, COUNT):
        largest = tl.maximum(largest, _magnitude_bits(tiles[i]))
    return largest.to(tl.int32)


@triton.jit
def amax_of(bits, scale_ub_ptr, DTYPE: tl.constexpr):
    """Turn a maximum of magnitudes of ``DTYPE`` into ``float32``, bounded by ``scale_ub``."""
    if DTYPE == tl.float32:
        amax = bits.to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        amax = (bits << 16).to(tl.float32, bitcast=True)
    else:
        amax = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if scale_ub_ptr is not None:
        amax = tl.minimum(amax, tl.load(scale_ub_ptr), propagate_nan=tl.PropagateNan.ALL)
    return amax


@triton.jit
def corrected_quotient(x, y, r):
    """Return ``x / y`` from ``r = RN(1 / y)``; see the head of this file for what is guaranteed."""
    if INTERPRETED:
        return x / y
    else:
        q = x * r
        # times -1 folds into the operand's sign, unary minus is a subtraction of its own
        return tl.fma(tl.fma(q, y, x * -1.0), r * -1.0, q)


@triton.jit
def reciprocal_pair(y):
    """Return ``r`` and ``rest``, whose sum is ``1 / y``; see the head of this file."""
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], tl.float32, is_pure=True, pack=1
    ).to(tl.int32, bitcast=True)  # documented to be within an ulp
    r = (near - 1).to(tl.float32, bitcast=True)
    above = (near + 1).to(tl.float32, bitcast=True)
    return r, tl.fma(r * -1.0, y, 1.0) * above


@triton.jit
def float_scale(amax, min_scale, DIVISION: tl.constexpr, FP8_MAX: tl.constexpr):
    """Return ``max(amax / fp8_max, min_scale)``, a power of two if asked.

    ``amax`` is ``float32``, one per group; one that is not finite makes NaN. ``DIVISION`` says how
    the elements will be divided, see ``encode_quotient``.
    """
    if DIVISION == "ieee" or DIVISION == "ieee power":
        scale = tl.div_rn(amax, FP8_MAX)
    else:
        scale = corrected_quotient(amax, FP8_MAX, 1.0 / FP8_MAX)
    scale = tl.maximum(scale, min_scale)
    if DIVISION == "power" or DIVISION == "ieee power":
        bits = (scale.to(tl.int32, bitcast=True) + _MANTISSA_MASK) & _EXPONENT_MASK
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(amax) < float("inf"), scale, float("nan"))


@triton.jit
def mx_exponent(amax, FLOOR: tl.constexpr, FP8_MAX: tl.constexpr):
    """Give the biased E8M0 exponent as ``int32``: rounded down or up, 255 if amax is not finite."""
    if FLOOR:
        MAX_EXPONENT: tl.constexpr = 8 if FP8_MAX == 448.0 else (7 if FP8_MAX == 224.0 else 15)
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - MAX_EXPONENT, 0)
    else:
        ratio = tl.div_rn(amax, FP8_MAX)
        exponent = (ratio.to(tl.int32, bitcast=True) + _MANTISSA_MASK) >> 23
        exponent = tl.where(ratio <= 2.0**-127, 0, exponent)
    return tl.where(tl.abs(amax) < float("inf"), exponent, _E8M0_NAN)


@triton.jit
def mx_inverse(exponent):
    """Return ``2^(127 - exponent)`` in ``float32`` for an E8M0 exponent, NaN for 255."""
    bits = tl.maximum((254 - exponent) << 23, 0x400000)
    return tl.where(exponent == _E8M0_NAN, _QUIET_NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_quotient(
    x, scale, DIVISION: tl.constexpr, FP8_MAX: tl.constexpr, NATIVE: tl.constexpr = True
):
    """Return the FP8 bytes of ``x / scale``.

    Args:
        x: tile of a floating dtype.
        scale: ``float32``, broadcastable against ``x``.
        DIVISION: what is known of the operands. ``"corrected"``: safe scale, ``|x|`` at most the
            group's amax; ``"clipped"``: scale not too small, any ``x``; ``"safe"``: as told by
            ``is_safe``, any ``x``; ``"power"``: the scale is a safe power of two; ``"ieee"`` and
            ``"ieee power"``: nothing.
        FP8_MAX: the format's maximum.
        NATIVE: the device converts to FP8 itself (sm89 and later).
    """
    PAIRED: tl.constexpr = x.dtype != tl.float32 and (DIVISION == "corrected" or DIVISION == "safe")
    x = widen(x)
    if DIVISION == "ieee" or DIVISION == "ieee power":
        q = tl.div_rn(x, scale)
    elif DIVISION == "power":
        q = x * tl.div_rn(1.0, scale)
    elif PAIRED and not INTERPRETED:
        r, rest = reciprocal_pair(scale)
        q = tl.fma(x, r, x * rest)
    else:
        r = tl.div_rn(1.0, scale)
        q = corrected_quotient(x, scale, r)
        if DIVISION != "corrected" and not INTERPRETED:
            # the correction of an infinite quotient is NaN, and far above the maximum has no effect
            rough = x * r
            q = tl.where(tl.abs(rough) < 1048576.0, q, rough)
    return encode(q, FP8_MAX, NATIVE)


@triton.jit
def is_safe(scale):
    """Return whether ``encode_quotient`` may divide by this scale as ``"safe"``."""
    return (scale >= _SAFE_SCALE) & (scale <= 1.0 / _SAFE_SCALE)


@triton.jit
def encode(q, FP8_MAX: tl.constexpr, NATIVE: tl.constexpr = True):
    """Round ``float32`` to FP8 bytes: nearest even, saturating, NaN as the canonical code."""
    if FP8_MAX == 224.0:
        # fnuz codes are those of e4m3fn for the doubled value, which never exceeds 0x7e; but NaN,
        # 0x7f there, is 0x80, and there is no negative zero
        codes = _cast(q * 2.0, 448.0, NATIVE).to(tl.int32)
        codes = tl.where(codes == 0x80, 0, codes)
        return tl.where(codes == 0x7F, 0x80, codes).to(tl.uint8)
    else:
        return _cast(q, FP8_MAX, NATIVE)


@triton.jit
def _cast(q, FP8_MAX: tl.constexpr, NATIVE: tl.constexpr):
    if INTERPRETED or not NATIVE:
        return _encode_with_integers(q, FP8_MAX)
    elif FP8_MAX == 57344.0:
        return q.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _encode_with_integers(q, FP8_MAX: tl.constexpr):
    # the interpreter's own cast to FP8 rounds neither ties nor carries as the hardware does
    MANTISSA: tl.constexpr = 2 if FP8_MAX == 57344.0 else 3
    BIAS: tl.constexpr = 15 if FP8_MAX == 57344.0 else 7
    LARGEST: tl.constexpr = 57344.0 if FP8_MAX == 57344.0 else 448.0
    DROPPED: tl.constexpr = 23 - MANTISSA
    # adding this puts the last bit of a subnormal code at the last bit of the sum
    MAGIC: tl.constexpr = 2.0 ** (1 - BIAS + DROPPED)
    size = tl.minimum(tl.abs(q), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    rounded = (bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    subnormal = (size + MAGIC).to(tl.int32, bitcast=True) & _MANTISSA_MASK
    sign = (q.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(size < 2.0 ** (1 - BIAS), subnormal, normal) | sign
    return tl.where(q == q, code, 0x7F).to(tl.uint8)
