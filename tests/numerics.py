"""Every tolerance of the test suite, each with its derivation.

Quantizers have none: codes and scales equal the reference bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

# A kernel may differ from the yardstick matmul only in the order and grouping of its sums: it may
# have twice the yardstick's error.
MATMUL_FACTOR = 2.0

# FP8 tensor cores align 32 products at a time and keep about 14 bits of them. On Hopper, promoting
# the sum every 128 of K leaves a bias of 6e-4 on same-sign data, every 256 of 2e-3; no promotion
# at all costs 6e-2 and more. 1e-3 lies between with room on both sides.
PRECISE_DRIFT = 1e-3

# Fast sums stay in the tensor core's accumulator from the first product to the last. On normal data
# Hopper's loses 5e-3 of a row's norm at K = 28672; the rest allows for other orders. The result
# is rounded once to bf16, by at most 2^-8.
FAST_ROW_ERROR = 8e-3 + 2**-8

# Relative error ||y - y_dense|| / ||y_dense|| for normal operands, as (lower, upper).
# One e4m3 rounding (3 mantissa bits) of values spread evenly over a binade [1, 2) has a mean square
# error of (2^-4)^2 / 3 and a mean square of 3 / (2 ln 2), hence 2.45 % per operand and
# sqrt(2) * 2.45 % = 3.5 % for two. The margin is a third of the value.
# A result under the lower bound was not computed in FP8 at all.
ONE_OPERAND = 2.45e-2
_TWO_OPERANDS = math.sqrt(2) * ONE_OPERAND
SCHEME_ERROR = {
    "FP8": (_TWO_OPERANDS / 1.5, _TWO_OPERANDS * 1.5),
    "FP8_DYNAMIC": (_TWO_OPERANDS / 1.5, _TWO_OPERANDS * 1.5),
    "FP8_TENSOR": (_TWO_OPERANDS / 1.5, _TWO_OPERANDS * 1.5),
    "FP8_BLOCK": (_TWO_OPERANDS / 1.5, _TWO_OPERANDS * 1.5),
    "MXFP8": (_TWO_OPERANDS / 1.5, _TWO_OPERANDS * 1.5),
    "FP8_WEIGHT_ONLY": (ONE_OPERAND / 1.5, ONE_OPERAND * 1.5),
}

# The same of a gated layer of experts. Gate and up each carry the error of two operands; rounding
# their product and the down weight adds that error once more. Independent errors add in quadrature:
# sqrt(3) of them. The upper bound allows MX half a percent more.
_GATED = math.sqrt(3) * _TWO_OPERANDS
EXPERTS_ERROR = (_GATED / 1.5, (_GATED + 0.5e-2) * 1.5)

# Relative errors that the tensor core's short accumulator may add to a layer of experts. A result
# of the first GEMM is wrong by up to 2^-10. Adjacent codes are 2^-4 of it apart or more, so it lies
# that close to a tie between two codes with a probability of at most 2^-6; then its code moves by a
# step of up to 2^-3. The root mean square of these steps is 2^-6. The second GEMM adds 2^-10 of its
# own, which is the whole error where the sums of the first GEMM are exact.
SHORT_SUM = 2**-10
SHORT_SUMS = 2**-6 + SHORT_SUM

# Attention of one token, relative to float64: weights of a softmax are rounded once to the dtype of
# the values, their weighted sum once more, each by half an ulp at most. Torch's own kernels do the
# same.
ATTENTION_ERROR = {torch.bfloat16: 2 * 2**-9 * 1.5, torch.float16: 2 * 2**-12 * 1.5}

# Mean loss (the logarithm of perplexity) against plain fake quantization of the same layers. The
# two differ only in the order of sums, but an ulp can move a code by one step, and the steps grow
# through the layers: the two models are two draws of one rounding noise. Per sequence their losses
# differ at random, so the mean is bounded by three of its standard errors, measured in the same
# run, and never by less than 0.05 %. A standard error over 0.1 % would say that the comparison has
# become useless, and fails too: quantization itself costs about 0.4 %.
LOSS_DIFFERENCE = 5e-4
LOSS_STANDARD_ERROR = 1e-3
# what FP8 linear layers may cost: more than twice the 0.4 % that they do
WHOLE_MODEL_COST = 1e-2

# LoRA training on an FP8 base against the same training on its bf16 weights, per step, as the mean
# over the steps: quantization costs about 0.4 % of the loss, and benchmarks/results/lora.json has
# 0.4 to 0.5 % for 200 steps and three seeds. Twice that allows for other text and fewer steps. An
# adapter without effect leaves the loss where it was, and is caught by the fall of the loss.
TRAINING_DIFFERENCE = 1e-2


def assert_trains_alike(losses: list[float], expected: list[float]) -> None:
    """Check that the losses of two trainings on the same batches fall, with about equal means."""
    found, wanted = (torch.tensor(x, dtype=torch.float64) for x in (losses, expected))
    third = len(losses) // 3
    for run in (found, wanted):
        assert run[-third:].mean() < run[:third].mean()
    difference = ((found - wanted).mean() / wanted.mean()).item()
    assert abs(difference) <= TRAINING_DIFFERENCE, f"{difference:+.3%}"


def assert_same_loss(losses: Tensor, expected: Tensor) -> None:
    """Check that two vectors of losses, one per sequence, have the same mean."""
    difference = losses.double() - expected.double()
    error = (difference.std() / math.sqrt(len(difference))).item()
    assert error <= LOSS_STANDARD_ERROR, f"the standard error is {error:.3%}"
    mean = difference.mean().item()
    assert abs(mean) <= max(LOSS_DIFFERENCE, 3 * error), f"{mean:+.3%}, standard error {error:.3%}"


def sums_in_fp32(backend: str) -> bool:
    """Say whether a backend sums exact products in fp32, so the output dtype is its yardstick."""
    return backend in ("reference", "dequantized")


def exact_product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x [M, K]`` by ``w [N, K]`` in float64."""
    y = x.double() @ w.double().t()
    return y if bias is None else y + bias.double()


def matmul_bound(
    x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype, yardstick: torch.dtype
) -> Tensor:
    """Return the largest permitted error of each row of ``x @ w.T + bias``, in the 2-norm.

    The bound is twice the error of a plain matmul of the same dequantized operands in the dtype
    ``yardstick``, plus the rounding of the output. The yardstick's error is measured. In short rows
    it may be small by chance, so at least its expectation is used: each of the two operands of a
    product is rounded with a uniform relative error of at most u, so a product has sqrt(2 / 3) u,
    and independent errors add in quadrature. The output is rounded twice, as a sum in the yardstick
    and in the final conversion, each time by at most u of its dtype.
    """
    exact = exact_product(x, w, bias)
    plain = x.to(yardstick) @ w.to(yardstick).t()
    plain = (plain.float() if bias is None else plain.float() + bias.float()).to(yardstick)
    measured = (plain.double() - exact).norm(dim=1)
    unit = torch.finfo(yardstick).eps / 2
    squares = x.double().square() @ w.double().square().t()
    expected = math.sqrt(2 / 3) * unit * squares.sum(1).sqrt()
    rounding = torch.finfo(out_dtype).eps * exact.norm(dim=1)
    # below the smallest subnormal there is nothing to round to
    return MATMUL_FACTOR * torch.maximum(measured, expected) + rounding + 1e-30


def assert_matmul(
    y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, backend: str = "reference"
) -> None:
    """Check every row of ``y`` against the exact product of the dequantized operands.

    Rows are checked one by one: over a whole matrix a single wrong row would drown.
    """
    assert y.shape == (x.shape[0], w.shape[0])
    yardstick = y.dtype if sums_in_fp32(backend) else torch.bfloat16
    error = (y.double() - exact_product(x, w, bias)).norm(dim=1)
    bound = matmul_bound(x, w, bias, y.dtype, yardstick)
    wrong = (~(error <= bound)).nonzero().flatten().tolist()
    assert not wrong, (
        f"rows {wrong[:8]}: error {error[wrong][:8]} over the bound {bound[wrong][:8]}"
    )


def assert_no_drift(y: Tensor, exact: Tensor) -> None:
    """Check that sums of same-sign products are not systematically too small or too large."""
    bias = (y.double() / exact.double() - 1).mean().item()
    assert abs(bias) <= PRECISE_DRIFT, f"the sums are biased by {bias:+.2%}"


def assert_fast_sums(y: Tensor, exact: Tensor) -> None:
    """Check every row of a product with fast sums of normal data."""
    error = (y.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max().item() <= FAST_ROW_ERROR, f"a row is off by {error.max().item():.2e}"


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return ``||y - exact|| / ||exact||``."""
    return ((y.double() - exact.double()).norm() / exact.double().norm()).item()


def assert_scheme_error(y: Tensor, dense: Tensor, scheme: str) -> None:
    """Check that a quantized result is as far from the dense one as FP8 is: no more, no less."""
    lower, upper = SCHEME_ERROR[scheme]
    error = relative_error(y, dense)
    assert lower <= error <= upper, f"{scheme}: {error:.3%} outside [{lower:.3%}, {upper:.3%}]"


def sqnr_bounds(scheme: str) -> tuple[float, float]:
    """Return the bounds of ``SCHEME_ERROR`` as signal-to-noise ratios in dB, (lower, upper)."""
    lower, upper = SCHEME_ERROR[scheme]
    return -20 * math.log10(upper), -20 * math.log10(lower)


def bits(tensor: Tensor) -> Tensor:
    """View a tensor as integers, so that NaN equals NaN and -0 differs from 0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def assert_bits_equal(a: Tensor, b: Tensor) -> None:
    """Check that two tensors have one shape and dtype and the same bits."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(bits(a).cpu(), bits(b).cpu())


def assert_same_tensors(
    found: nn.Module | Mapping[str, Tensor], wanted: nn.Module | Mapping[str, Tensor]
) -> None:
    """Check that two modules or state dicts have the same names and bit-equal tensors."""
    ours, theirs = (s.state_dict() if isinstance(s, nn.Module) else s for s in (found, wanted))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert_bits_equal(tensor, theirs[name])


def assert_logits_of_one_checkpoint(ours: Tensor, other: Tensor, unrounded: Tensor) -> None:
    """Check that two programs compute the same FP8 function of one checkpoint.

    ``unrounded`` are the logits of the dequantized weights with activations in high precision, so
    its distance to ``ours`` is the noise that rounding activations to FP8 makes. Two programs whose
    16-bit arithmetic differs in the last place round some activations to different codes; every
    such flip is as large as the rounding error itself, and its effects grow through the layers. At
    worst the two noises end up independent and equally large, and their difference is sqrt(2) of
    one. A weight scale that is off by a factor, or a layer that is skipped, is far outside. The
    margin is a third of the value; noise below the lower bound means that the other program does
    not round its activations to FP8.
    """
    noise = relative_error(ours, unrounded)
    theirs = relative_error(other, unrounded)
    assert noise > 0
    assert noise / 1.5 <= theirs <= noise * 1.5, f"noise {theirs:.3%}, ours {noise:.3%}"
    difference = relative_error(ours, other)
    bound = math.sqrt(2) * noise * 1.5
    assert difference <= bound, f"logits differ by {difference:.3%}, over {bound:.3%}"


def activation_noise(layers: int) -> tuple[float, float]:
    """Bound what rounding activations to FP8 does to the logits of a decoder, as (lower, upper).

    A decoder layer rounds its activations four times on the way to its output: before q/k/v, before
    o, before gate/up and before down. Each adds a relative error of one operand to its branch. In
    the worst case the residual stream consists of branches alone; independent errors add in
    quadrature, and half as much again allows for the nonlinearities between them. An error under a
    third of one rounding means that nothing was rounded; every end-to-end result has a lower bound.
    """
    return ONE_OPERAND / 3, ONE_OPERAND * math.sqrt(4 * layers) * 1.5


def assert_cache_cost(losses: Tensor, dense: Tensor) -> None:
    """Check what an FP8 KV cache costs: mean losses per sequence against a cache in bf16.

    A block rounds fourteen operands of seven products if its linear layers are FP8, which costs
    0.4 % here and at most ``WHOLE_MODEL_COST``. A cache rounds two more, keys and values.
    """
    cost = (losses.double() - dense.double()).mean().item()
    assert cost <= WHOLE_MODEL_COST, f"the cache costs {cost:+.3%}"


# Experts in bf16 against exact sums of the same codes. The result is rounded once, by 2^-9 at most.
# Sums in another order sometimes move an intermediate value to the neighbouring code: one value in
# a thousand, by an eighth of itself, is a relative error of 2^-3 / 1000^0.5, about 2^-8.
EXPERTS_DIFFERENCE = 2**-9 + 2**-8


def assert_experts(y: Tensor, expected: Tensor) -> None:
    """Compare a layer of experts in bf16 with fp32 sums of the same codes."""
    assert relative_error(y, expected) < EXPERTS_DIFFERENCE
