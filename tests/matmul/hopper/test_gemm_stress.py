"""Ten thousand launches of the Hopper GEMM on two streams; every result is compared.

A launch that starts too early, reads memory that the next one overwrites, or leaves a result
unwritten fails once in thousands of times. So results are poisoned before they are computed, inputs
alternate so that stale codes are wrong codes, and only this package's kernels run between the
launches of a chain: torch's own poisoning of memory would put a kernel between a quantizer and the
GEMM that is to start early.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, ROW, TENSOR, GroupShape
from fp8kit.matmul.hopper.device import H200, Device
from fp8kit.matmul.hopper.heuristics import choose, choose_quantizing
from fp8kit.matmul.hopper.tile_config import TileConfig
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.ops import bodies
from numerics import assert_matmul, bits
from tile_configs import tile_config

gemm = pytest.importorskip("fp8kit.matmul.hopper.gemm", reason="cuda-bindings is not installed")

LAUNCHES = 10_000
CHAIN = 4  # launches in a row, each with an input of its own
POISON = float("nan")
AHEAD = 1_000_000  # clock cycles that a chain waits while it is launched
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="the kernel is written for sm90",
)


class Kind(NamedTuple):
    """A GEMM, its configuration (``None``: as chosen), and whether blocks compute several tiles."""

    name: str
    shape: tuple[int, int, int]
    groups: tuple[GroupShape, GroupShape]
    config: TileConfig | None
    persistent: bool = False
    out: torch.dtype = torch.bfloat16
    quantizes: bool = False  # whether the GEMM quantizes its tokens


ROWS, BLOCKS, WHOLE = (ROW, ROW), (GROUP128, BLOCK), (TENSOR, TENSOR)
KINDS = (
    Kind("as a layer", (16, 4096, 7168), ROWS, None),
    Kind(
        "split in four",
        (13, 1000, 4112),
        ROWS,
        tile_config(16, 1, steps=2, stages=(8, 4), inflight=4, split_k=4),
    ),
    Kind(
        "split in three, blocks",
        (45, 1000, 4224),
        BLOCKS,
        tile_config(48, 2, steps=1, stages=(4, 4), inflight=3, split_k=3),
    ),
    Kind(
        "a split tail",
        (128, 10240, 1024),
        ROWS,
        tile_config(128, 2, steps=4, stages=(5, 5), split_k=2),
        True,
    ),
    Kind(
        "persistent",
        (33, 16400, 512),
        ROWS,
        tile_config(48, 1, steps=1, stages=(6, 4), inflight=4),
        True,
    ),
    Kind(
        "persistent, blocks",
        (150, 10000, 640),
        BLOCKS,
        tile_config(80, 2, steps=2, stages=(5, 5)),
        True,
        torch.float32,
    ),
    Kind(
        "stored, blocks",
        (700, 10000, 640),
        BLOCKS,
        tile_config(128, 3, steps=1, stages=(4, 4), swap_ab=False, buffers=2, cluster_sync_every=4),
        True,
    ),
    Kind(
        "stored",
        (300, 10000, 640),
        ROWS,
        tile_config(128, 2, steps=8, stages=(5, 5), buffers=2, cluster_sync_every=4),
        True,
    ),
    Kind(
        "stored in parts",
        (300, 10000, 640),
        ROWS,
        tile_config(144, 2, steps=1, stages=(5, 5), swap_ab=False, buffers=2, cluster_sync_every=4),
        True,
    ),
    Kind("whole tensors", (100, 1000, 4112), WHOLE, None),
    Kind("quantized inside", (2, 4096, 4096), ROWS, None, quantizes=True),
    Kind("quantized inside, blocks", (2, 1000, 2048), BLOCKS, None, quantizes=True),
    # slow stores stand before the reads of scales
    Kind(
        "written slowly, blocks",
        (1030, 4096, 512),
        BLOCKS,
        tile_config(128, 2, steps=4, stages=(6, 6), swap_ab=False, cluster_sync_every=4),
        True,
        torch.float32,
    ),
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_kinds_are_what_their_names_say(kind: Kind) -> None:
    m, n, k = kind.shape
    blocks = kind.groups == BLOCKS
    config = kind.config or choose(m, n, k, H200, blocks)
    assert ("split in" in kind.name) <= (config.launch.split_k > 1)
    assert is_persistent(kind, H200) == kind.persistent
    assert config.dynamic_smem_bytes(blocks) + config.static_smem_bytes <= 227 * 1024
    assert k % 16 == 0
    if kind.quantizes:
        assert choose_quantizing(m, n, k, H200, blocks) is not None
    stored = config.uses_tma_store(m, n, H200, blocks, kind.out.itemsize)
    assert stored == kind.name.startswith("stored")
    assert ("in parts" in kind.name) == (stored and config.layout.mma_n > 128)


def is_persistent(kind: Kind, device: Device) -> bool:
    """Return whether a block computes several tiles."""
    m, n, k = kind.shape
    config = kind.config or choose(m, n, k, device, kind.groups == BLOCKS)
    return config.grid(m, n, device) < config.tiles(m, n) * config.launch.split_k


class Given:
    """Replaces ``torch`` in the kernel's module: ``empty`` returns the poisoned result."""

    def __init__(self) -> None:
        self.result: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the poisoned result, once."""
        found, self.result = self.result, None
        assert found is not None
        assert (found.shape, found.dtype, found.device) == (shape, dtype, device)
        return found


class Product:
    """A quantized layer of one kind with ``CHAIN`` inputs, called by the number of the input."""

    def __init__(self, kind: Kind, after_quantizer: bool, given: Given) -> None:
        (m, n, k), self.groups = kind.shape, kind.groups
        sizes = torch.logspace(-1, 1, CHAIN, device="cuda")
        self.xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * s for s in sizes]
        self.w = fp8kit.quantize(torch.randn(n, k, device="cuda"), self.groups[1], role="weight")
        self.bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        self.codes = None if after_quantizer else [self.quantized(i) for i in range(CHAIN)]
        self.given, self.quantizes, self.config = given, kind.quantizes, kind.config
        self.problem = MatmulProblem.of(
            self.quantized(0)[0], self.w.data, self.groups, kind.out, self.bias, "precise", False
        )

    def quantized(self, i: int) -> tuple[Tensor, Tensor]:
        """Quantize input ``i`` as layers do."""
        group, dtype = self.groups[0], torch.float8_e4m3fn
        data, scale = bodies.quantize_input(self.xs[i], group, dtype, None, None, "exact")
        assert scale is not None
        return data, scale

    def __call__(self, i: int, y: Tensor) -> None:
        """Write the product of input ``i`` to ``y``, with no launches but ours."""
        if self.quantizes:
            self.given.result = y
            values = MatmulOperands(self.xs[i], None, self.w.data, self.w.scale, self.bias)
            assert gemm.quantize_in_gemm(values, self.problem, 1e-12) is y
            return
        self.multiply(self.quantized(i) if self.codes is None else self.codes[i], y)

    def multiply(self, codes: tuple[Tensor, Tensor], y: Tensor) -> None:
        """Write the product of quantized rows to ``y``."""
        self.given.result = y
        data, scale = codes
        operands = MatmulOperands(data, scale, self.w.data, self.w.scale, self.bias)
        gemm.run(operands, self.problem, self.config)

    def expected(self) -> Tensor:
        """Compute every result alone, and compare it with the exact product."""
        m, n = self.xs[0].shape[0], self.w.data.shape[0]
        results = torch.full((CHAIN, m, n), POISON, device="cuda", dtype=self.problem.out_dtype)
        w = fp8kit.dequantize(self.w)
        for i, y in enumerate(results):
            codes = self.quantized(i)
            torch.cuda.synchronize()
            self.multiply(codes, y)
            x = fp8kit.dequantize(fp8kit.QTensor(*codes, self.groups[0]))
            assert_matmul(y, x, w, self.bias, "hopper_gemm")
        return results


def wrong_values(
    launch: Callable[[int, Tensor], None],
    expected: Tensor,
    streams: Sequence[Any],
    launches: int = LAUNCHES,
) -> list[int]:
    """Launch chains on alternating streams and count, on the device, values with wrong bits.

    Args:
        launch: computes result ``i`` of a chain into a tensor.
        expected: the results of a chain, stacked.
        streams: CUDA streams; on a CPU any objects.
        launches: number of launches in all.

    Returns:
        The count of each stream.
    """
    outputs = [torch.empty_like(expected) for _ in streams]
    counts = [torch.zeros((), dtype=torch.int64, device=expected.device) for _ in streams]
    on: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if expected.is_cuda:
        on = torch.cuda.stream
        torch.cuda.synchronize()
    for _ in range(launches // (len(streams) * len(expected))):
        for stream, output, count in zip(streams, outputs, counts, strict=True):
            with on(stream):
                if expected.is_cuda:  # the host is slower than the kernels, which are to meet
                    torch.cuda._sleep(AHEAD)
                output.fill_(POISON)
                for i, y in enumerate(output):
                    launch(i, y)
                count += (bits(output) != bits(expected)).sum()
    if expected.is_cuda:
        torch.cuda.synchronize()
    return [int(count) for count in counts]


@pytest.mark.parametrize("fault", ["none", "unwritten", "last bit", "stale"])
def test_one_wrong_launch_of_ten_thousand_is_counted(fault: str) -> None:
    expected = torch.randn(CHAIN, 3, 5).bfloat16()
    calls = SimpleNamespace(count=0)

    def launch(i: int, y: Tensor) -> None:
        calls.count += 1
        last = calls.count == LAUNCHES
        if last and fault == "unwritten":
            y[:2] = expected[i, :2]
            return
        y.copy_(expected[i - 1] if last and fault == "stale" else expected[i])
        if last and fault == "last bit":
            y.view(torch.int16)[1, 1] ^= 1

    found = wrong_values(launch, expected, ["first", "second"])
    assert calls.count == LAUNCHES
    assert found[0] == 0
    assert found[1] == {"none": 0, "unwritten": 5, "last bit": 1, "stale": 15}[fault]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, unpoisoned: None) -> Given:
    """Let the test choose where results are written; torch launches no kernel of its own."""
    made = Given()
    monkeypatch.setattr(gemm, "torch", made)
    return made


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("after_quantizer", [False, True], ids=["alone", "after-quantizer"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_ten_thousand_launches_on_two_streams_are_right(
    kind: Kind, after_quantizer: bool, given: Given
) -> None:
    assert is_persistent(kind, gemm.device_record(0)) == kind.persistent
    product = Product(kind, after_quantizer, given)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    assert wrong_values(product, product.expected(), streams) == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [(ROW, ROW), (GROUP128, BLOCK), (None, ROW)], ids=str)
def test_ten_thousand_split_products_of_triton_on_two_streams_are_right(
    pair: tuple[GroupShape | None, GroupShape],
) -> None:
    """A quantizer, a split-K GEMM and the sum of its parts, all of which start early on Hopper."""
    triton_gemm = pytest.importorskip("fp8kit.matmul.triton_gemm")
    (group, w_group), (m, n, k) = pair, (16, 1024, 4096)
    sizes = torch.logspace(-1, 1, CHAIN, device="cuda")
    xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * s for s in sizes]
    w = fp8kit.quantize(torch.randn(n, k, device="cuda"), w_group, role="weight")
    codes = None if group is None else torch.float8_e4m3fn
    problem = MatmulProblem.of(xs[0], w.data, pair, torch.bfloat16, None, "precise", False, codes)
    device = triton_gemm.device_facts(xs[0].device)
    assert triton_gemm.choose_tile(problem, device).splits > 1

    def product(i: int) -> Tensor:
        x, scale = xs[i], None
        if group is not None:
            x, scale = bodies.quantize_input(x, group, torch.float8_e4m3fn, None, None, "exact")
        return triton_gemm.run(MatmulOperands(x, scale, w.data, w.scale), problem)

    exact_w = fp8kit.dequantize(w)
    expected = torch.stack([product(i) for i in range(CHAIN)])
    for i, y in enumerate(expected):
        x_value = xs[i].float()
        if group is not None:
            x_value = fp8kit.dequantize(fp8kit.quantize(xs[i], group))
        assert_matmul(y, x_value, exact_w, backend="triton_gemm")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    assert wrong_values(lambda i, y: y.copy_(product(i)), expected, streams) == [0, 0]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the kernel without its wait for the quantizer."""
    patient = gemm.source

    def source(*arguments: Any) -> str:
        text = patient(*arguments)
        assert text.count("griddepcontrol.wait;") == 2
        return text.replace("griddepcontrol.wait;", "")

    monkeypatch.setattr(gemm, "source", source)
    gemm._kernel.cache_clear()
    yield
    gemm._kernel.cache_clear()


@pytest.mark.gpu
@HOPPER
def test_a_gemm_that_does_not_wait_would_show(given: Given, impatient: None) -> None:
    # codes cannot be there before a whole row was read, which takes longer the longer it is
    kind = Kind("long rows", (32, 1024, 28672), (ROW, ROW), None)
    product = Product(kind, True, given)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = product.expected()
    assert sum(wrong_values(product, expected, streams, 2000)) > 0


@pytest.mark.gpu
@HOPPER
def test_threads_that_share_a_layer_get_their_own_results() -> None:
    # a bias that may be trained would keep the layer from being recorded
    dense = nn.Linear(4096, 4096, False, device="cuda", dtype=torch.bfloat16)
    layer = fp8kit.Fp8Linear.from_linear(dense)
    xs = [torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16) * s for s in (1, 2, 3, 4)]
    expected = torch.stack([layer(x) for x in xs])
    assert layer.replays.launches(xs[0].shape)

    def work(stream: torch.cuda.Stream) -> int:
        def launch(i: int, y: Tensor) -> None:
            y.copy_(layer(xs[i]))

        return wrong_values(launch, expected, [stream], LAUNCHES // 2)[0]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [torch.cuda.Stream(), torch.cuda.Stream()])) == [0, 0]
