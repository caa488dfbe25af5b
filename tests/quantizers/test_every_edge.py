"""Every quantizer at every width where its tiling changes, bit for bit against the reference.

`make test-gpu` takes a sample of the widths; `make sweep` takes all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from edges import around, changes, dealt, sampled
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, min_scale
from fp8kit.fused import reference as fused_reference
from fp8kit.fused.problem import ACTIVATIONS, CodesFormat
from fp8kit.quantizers import reference
from numerics import assert_bits_equal

triton = pytest.importorskip("fp8kit.quantizers.triton")
from activated import applied  # noqa: E402
from fp8kit.fused import triton as fused_triton  # noqa: E402
from fp8kit.fused.triton_activations import activation_tile  # noqa: E402
from fp8kit.fused.triton_norms import norm_tile  # noqa: E402
from fp8kit.quantizers import hopper_rows  # noqa: E402
from fp8kit.quantizers.triton_groups import group_tile  # noqa: E402
from fp8kit.quantizers.triton_rows import row_tile  # noqa: E402
from fp8kit.quantizers.triton_tensor import tensor_tile  # noqa: E402

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FUSED_GROUPS = (ROW, GROUP128, MX, TENSOR)
EPS = 1e-5
PROCESSORS = 132
WIDEST = {2: 40960, 4: 20480}  # rows that a norm holds in registers, by bytes per element
HANDS = 16
SAMPLE = 96
NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "adaptive", "plain_rms_norm")


class Case(NamedTuple):
    """One kernel at one size; ``turn`` varies the options that do not affect its tiling."""

    kernel: str
    m: int
    k: int
    dtype: torch.dtype
    turn: int


def norm_cases() -> Iterator[Case]:
    for itemsize, dtypes in ((2, DTYPES[:2]), (4, DTYPES[2:])):
        edges = changes(lambda k, size=itemsize: norm_tile(k, size, 1), WIDEST[itemsize])
        for turn, k in enumerate(around(edges, WIDEST[itemsize])):
            for i, kernel in enumerate(NORMS):
                yield Case(kernel, 24, k, dtypes[(turn // 2 + i) % len(dtypes)], turn)


def activation_cases() -> Iterator[Case]:
    for itemsize, dtypes in ((2, DTYPES[:2]), (4, DTYPES[2:])):
        for m, most in ((12, 57344 * 2 // itemsize), (600, 16384))[: 3 - itemsize // 2]:
            for paired in (False, True):

                def choice(
                    k: int, m: int = m, size: int = itemsize, paired: bool = paired
                ) -> object:
                    return activation_tile(m, k, size, 1, True, paired, False)

                for turn, k in enumerate(around(changes(choice, most), most)):
                    kernel = "gated" if paired else "activation"
                    yield Case(kernel, m, k, dtypes[turn // 2 % len(dtypes)], turn)


def row_cases() -> Iterator[Case]:
    for itemsize, dtypes in ((2, DTYPES[:2]), (4, DTYPES[2:])):
        for m in (1, 40, 100, 300, 1200) if itemsize == 2 else (1, 300):
            most = 40000 if m < 600 else 16384
            edges = changes(lambda k, m=m, size=itemsize: row_tile(m, k, size, PROCESSORS), most)
            for turn, k in enumerate(around(edges, most)):
                yield Case("rows", m, k, dtypes[turn // 2 % len(dtypes)], turn)


def cluster_row_cases() -> Iterator[Case]:
    for m in (1, 2, 4, 8, 16, 32):
        edges = changes(lambda v, m=m: hopper_rows.row_cut(m, v, PROCESSORS), 8192)
        for turn, vectors in enumerate(around(edges, 8192)):
            dtype = DTYPES[turn % 3]
            yield Case("rows", m, vectors * 16 // dtype.itemsize, dtype, turn)


def group_cases() -> Iterator[Case]:
    for group in (128, 32):
        for m in (1, 70, 1100):
            for column in (False, True):

                def choice(k: int, m: int = m, group: int = group, column: bool = column) -> object:
                    return group_tile(m, k, group, 2, column, PROCESSORS)

                kernel = f"{'columns' if column else 'groups'} of {group}"
                for turn, k in enumerate(around(changes(choice, 16384), 16384)):
                    yield Case(kernel, m, k, DTYPES[turn // 2 % 3], turn)


def tensor_cases() -> Iterator[Case]:
    most = 1 << 23
    edges = changes(lambda n: tensor_tile(n * 256, 2, PROCESSORS)[:2], most // 256)
    for turn, size in enumerate(around([256 * n for n in edges], most)):
        yield Case("tensor", 1, size, DTYPES[turn // 2 % 3], turn)
    for turn, k in enumerate(around([256, 1024, 2048, 4096, 8192, 16384], 16400)):
        yield Case("tensor", 33, k, DTYPES[turn // 2 % 3], turn)


def block_cases() -> Iterator[Case]:
    for turn, k in enumerate(around([128, 256, 384, 1024, 4096], 4103)):
        yield Case("blocks", 128 * (turn % 3) + 121 + turn % 14, k, DTYPES[turn // 2 % 3], turn)


SWEEPS: dict[str, Callable[[], Iterator[Case]]] = {
    "norms": norm_cases,
    "activations": activation_cases,
    "rows": row_cases,
    "cluster-rows": cluster_row_cases,
    "groups": group_cases,
    "tensors": tensor_cases,
    "blocks": block_cases,
}


def guarded(m: int, k: int, dtype: torch.dtype, integers: bool) -> Tensor:
    """Return rows on the GPU surrounded by rows of NaN, which no kernel may read.

    With ``integers`` the sums of a row and of its squares are exact in any order.
    """
    room = torch.full((m + 2, k), torch.nan, dtype=dtype, device="cuda")
    x = room[1:-1]
    if integers:
        half = torch.randint(-8, 9, (m, k // 2), device="cuda")
        order = torch.randperm(k, device="cuda")
        x.copy_(torch.cat([half, -half, half.new_zeros(m, k % 2)], 1)[:, order])
    else:
        x.copy_(torch.randn(m, k, device="cuda") * 3)
    return x


def codes_format(group: GroupShape, dtype: torch.dtype = E4M3) -> CodesFormat:
    scale = torch.full((1, 1), 0.013, device="cuda") if group == TENSOR else None
    rounding = "floor" if group == MX else "exact"
    return CodesFormat(scale, group, dtype, min_scale(group, dtype, "activation"), None, rounding)


def run(case: Case) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Return the results of the kernel and of the reference on the same random data."""
    kernel, m, k, dtype, turn = case
    if "norm" in kernel or kernel == "adaptive":
        # the scale of a row needs all of its tiles: every width is tried with it
        t = codes_format(ROW if turn % 3 else FUSED_GROUPS[turn // 3 % 4])
        x, residual = (guarded(m, k, dtype, True) for _ in range(2))
        weight = torch.randn(k, device="cuda").to(dtype)
        if "plain" in kernel:  # heads, between which another's lie
            x = guarded(m, 2 * k, dtype, True)[:, k:].reshape(m // 6, 6, k)[:, 1:5]
            plain = (x, weight, EPS, turn % 2.0, ("stepwise", "once")[turn // 2 % 2])
            return (fused_triton.rms_normed(*plain),), (fused_reference.rms_normed(*plain),)
        if "rms" in kernel:
            arguments = (x, residual if "add" in kernel else None, weight, EPS, 0.0, "stepwise", t)
            return fused_triton.rms_norm(*arguments), fused_reference.rms_norm(*arguments)
        pair = None
        if kernel == "adaptive":
            pair = (torch.randn(2, k, device="cuda").to(dtype), guarded(2, k, dtype, False))
            x, weight = x.view(2, m // 2, k), None
        rounding = "once" if pair is None else "stepwise"
        arguments = (x, weight, None, pair, EPS, rounding, t)
        return fused_triton.layer_norm(*arguments), fused_reference.layer_norm(*arguments)
    x = guarded(m, k, dtype, False)
    if kernel in ("gated", "activation"):
        t = codes_format(ROW if turn % 3 else FUSED_GROUPS[turn // 3 % 4])
        kind = ACTIVATIONS[turn % len(ACTIVATIONS)]
        up = guarded(m, k, dtype, False) if kernel == "gated" else None
        act = applied(kind, x)
        expected = fused_reference.quantized(act if up is None else act * up, t)
        return fused_triton.activation(kind, x, up, t), expected
    name, _, size = kernel.partition(" of ")
    group = {"rows": ROW, "tensor": TENSOR, "blocks": BLOCK}.get(name) or GroupShape(1, int(size))
    rounding = "floor" if group == MX else "exact"
    options = (group, E4M3, min_scale(group, E4M3, "activation"), None, rounding)
    expected = reference.quantize(x, *options)
    return triton.quantize(x, *options, "column" if name == "columns" else "row"), expected


def differing(case: Case) -> str:
    """Return how a kernel differs from the reference; empty if it does not."""
    found, expected = run(case)
    for name, a, b in zip(("codes", "scales", "sum"), found, expected, strict=False):
        if a is None or b is None:
            if a is not b:
                return f"{case}: {name} of one alone"
            continue
        try:
            assert_bits_equal(a, b)
        except AssertionError:
            wrong = (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()
            return f"{case}: {int(wrong)} bytes of the {name}"
    return ""


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hand", range(HANDS))
@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_width_has_the_bits_of_the_reference(sweep: str, hand: int) -> None:
    cases = dealt(sampled(list(SWEEPS[sweep]()), SAMPLE, sweep), HANDS)[hand]
    wrong = [said for case in cases if (said := differing(case))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "sweep",
    # the others ask for the tile of every width
    [
        s if s in ("cluster-rows", "tensors", "blocks") else pytest.param(s, marks=pytest.mark.slow)
        for s in SWEEPS
    ],
)
def test_a_sweep_meets_widths_beside_every_edge(sweep: str) -> None:
    cases = list(SWEEPS[sweep]())
    assert len(cases) > 60
    widths = {case.k for case in cases}
    assert {k % 2 for k in widths} == {0, 1} or sweep == "cluster-rows"
    if sweep == "norms":  # a last tile that one to six columns reach
        assert set(range(1025 - 7, 1025 + 8)) <= widths
