"""Recordings: what is recorded, what cannot be, and to which stream the launches go."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.fused import triton as fused_triton
from fp8kit.fused.problem import CodesFormat
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.ops import bodies
from fp8kit.quantizers import triton
from fp8kit.runtime import launch_recording, triton_launch
from fp8kit.runtime.launch_recording import (
    AllocationWatch,
    Recording,
    is_recording,
    record,
    record_launch,
)
from recorded_calls import launch


def twice_plus(x: Tensor, constant: Tensor) -> Tensor:
    """Compute ``2 x + constant`` through a scratch tensor."""
    doubled, y = torch.empty_like(x), torch.empty_like(x)
    launch(lambda x, out: out.copy_(2 * x), x, doubled)
    launch(lambda a, b, out: out.copy_(a + b), doubled, constant, y)
    return y


def test_a_recording_repeats_with_another_input() -> None:
    x, constant = torch.randn(5, 7), torch.randn(5, 7)
    y, made = record(lambda: twice_plus(x, constant), [x], [constant, None])
    assert made is not None
    assert torch.equal(y, 2 * x + constant)
    other = torch.randn(5, 7)
    (again,) = made(other)
    assert torch.equal(again, 2 * other + constant)
    assert torch.equal(y, 2 * x + constant)
    constant.fill_(3.0)
    assert torch.equal(made(x)[0], 2 * x + 3)


def recorded(x: Tensor, constant: Tensor) -> Recording:
    made = record(lambda: twice_plus(x, constant), [x], [constant])[1]
    assert made is not None
    return made


def allocating(made: Recording, by: Callable[..., Tensor]) -> None:
    """Make a recording allocate by ``by``, which gets the original allocator as an argument.

    Callers cannot choose addresses of results, but these tests are about addresses that move.
    """
    empty = made._empty
    made._empty = lambda *layout: by(empty, *layout)


def test_all_but_the_result_share_one_allocation() -> None:
    x, constant = torch.randn(2, 200, 200)
    made = recorded(x, constant)
    allocated: list[Tensor] = []
    allocating(made, lambda empty, *a: (allocated.append(empty(*a)), allocated[-1])[1])
    (y,) = made(x)
    assert [t.nbytes for t in allocated] == [x.nbytes, -(-x.nbytes // 256) * 256]
    assert allocated[0] is y
    assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)


def test_another_shape_of_a_result_is_recorded() -> None:
    x, constant = torch.randn(6, 4), torch.randn(6, 4)
    y, made = record(
        lambda: bodies.reshaped(twice_plus(x, constant), (2, 3, 4)), [x], [constant, None]
    )
    assert made is not None
    assert torch.equal(made(x)[0], y)
    assert y.shape == (2, 3, 4)


def test_results_are_inference_tensors_where_the_caller_is_in_inference_mode() -> None:
    x = torch.randn(5, 7)
    made = recorded(x, torch.randn(5, 7))
    assert not made(x)[0].is_inference()
    with torch.inference_mode():
        assert made(x)[0].is_inference()


def on_blocks(made: Recording) -> dict[str, Tensor]:
    """Make a recording allocate these blocks; a test may replace them by others."""
    blocks = {"y": torch.empty(5, 7), "scratch": torch.empty(256, dtype=torch.uint8)}
    by_dtype = {torch.float32: "y", torch.uint8: "scratch"}
    allocating(made, lambda _, *layout: blocks[by_dtype[layout[-1]]])
    return blocks


def test_only_addresses_that_changed_are_moved() -> None:
    """The first launch takes input and scratch, the second one scratch, a constant and result."""
    x, constant = torch.randn(5, 7), torch.randn(5, 7)
    made = recorded(x, constant)
    recorded(x, constant)(x)  # this thread has scratch memory
    blocks = on_blocks(made)
    made(x)
    first, second = made.steps
    held = [x, *blocks.values()]  # so that no new block is at an old address
    for changed, moves in {
        "nothing": ([], []),
        "x": ([0], []),
        "y": ([], [2]),
        "scratch": ([], []),  # is that of the calls before
    }.items():
        first.moved.clear()
        second.moved.clear()
        if changed == "x":
            x = torch.randn(5, 7)
        elif changed in blocks:
            blocks[changed] = torch.empty_like(blocks[changed])
        held += [x, *blocks.values()]
        assert torch.equal(made(x)[0], 2 * x + constant)
        assert (first.moved, second.moved) == moves


class Immovable(list[int]):
    """Replaces the moves of a launch by ones that fail."""

    def append(self, position: int) -> None:
        raise RuntimeError("no such address")


def test_a_move_that_failed_is_made_again() -> None:
    x, other, constant = torch.randn(3, 5, 7)
    made = recorded(x, constant)
    blocks = on_blocks(made)
    made(x)
    before = blocks["y"]
    blocks["y"] = torch.empty(5, 7)
    second = made.steps[1]  # takes the result
    second.moved = Immovable()
    with pytest.raises(RuntimeError, match="no such address"):
        made(other)  # the input has moved by now
    second.moved = []
    blocks["y"] = before
    assert torch.equal(made(x)[0], 2 * x + constant)


def test_threads_share_a_recording() -> None:
    """Launches let other threads run, as CUDA's do; each thread must see its own addresses."""
    x, constant = torch.zeros(64), torch.ones(64)

    def slow(a: Tensor, out: Tensor) -> None:
        time.sleep(0.0005)
        out.copy_(2 * a)

    def call() -> Tensor:
        doubled, y = torch.empty_like(x), torch.empty_like(x)
        launch(slow, x, doubled)
        launch(lambda a, b, out: (time.sleep(0.0005), out.copy_(a + b)), doubled, constant, y)
        return y

    made = record(call, [x], [constant])[1]
    assert made is not None

    def many(start: int) -> list[tuple[Tensor, Tensor]]:
        inputs = [torch.full((64,), float(start + i)) for i in range(20)]
        return [(i, *made(i)) for i in inputs]

    with ThreadPoolExecutor(4) as pool:
        for pairs in pool.map(many, range(0, 400, 100)):
            for given, y in pairs:
                assert torch.equal(y, 2 * given + 1)


def test_views_are_followed_into_their_tensor() -> None:
    x = torch.randn(4, 6)

    def halves() -> Tensor:
        buffer, y = torch.empty(2, 4, 6), torch.empty(4, 6)
        launch(lambda x, out: out.copy_(x), x.view(6, 4), buffer[1].view(6, 4))
        launch(lambda a, out: out.copy_(a + 1), buffer[1], y.view(24).view(4, 6))
        return y.view(24)

    y, made = record(halves, [x], [])
    assert made is not None
    assert torch.equal(y, x.flatten() + 1)
    assert torch.equal(made(-x)[0], 1 - x.flatten())


def test_a_recording_has_as_many_results_as_its_call() -> None:
    x = torch.randn(5, 7)

    def both() -> tuple[Tensor, Tensor]:
        plus, columns = torch.empty(5, 7), torch.empty(7, 8)
        launch(lambda x, a, b: (a.copy_(x + 1), b.copy_(2 * x)), x, plus, columns.t()[:5])
        return plus, columns.t()[:5]

    y, made = record(both, [x], [])
    assert made is not None
    other = torch.randn(5, 7)
    plus, doubled = made(other)
    assert torch.equal(plus, other + 1)
    assert torch.equal(doubled, 2 * other)
    assert torch.equal(y[1], 2 * x)
    assert (doubled.shape, doubled.stride()) == (y[1].shape, y[1].stride())
    assert doubled.untyped_storage().nbytes() == 7 * 8 * 4


def test_inputs_may_be_interleaved_views_of_one_buffer() -> None:
    def sum_of_halves(gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty(5, 7)
        launch(lambda a, b, out: out.copy_(a + 2 * b), gate, up, y)
        return y

    halves = torch.randn(5, 14).chunk(2, 1)
    made = record(lambda: sum_of_halves(*halves), halves, [])[1]
    assert made is not None
    gate, up = (torch.randn(5, 14)[:, :7] for _ in range(2))
    assert torch.equal(made(gate, up)[0], gate + 2 * up)


def test_inputs_that_cannot_be_told_apart_are_not_recorded() -> None:
    x, other = torch.randn(2, 5, 7)
    assert record(lambda: twice_plus(x, x), [x, x], [])[1] is None
    assert record(lambda: twice_plus(x, x), [x], [x])[1] is None
    assert record(lambda: twice_plus(x, other), [x, other], [])[1] is not None


def test_an_address_in_two_inputs_is_not_recorded() -> None:
    buffer = torch.randn(40)
    a, b = buffer[:24], buffer[8:32]

    def tail() -> Tensor:
        y = torch.empty(8)
        launch(lambda part, out: out.copy_(part), a[16:], y)
        return y

    assert record(tail, [a], [])[1] is not None
    assert record(tail, [a, b], [])[1] is None


def test_an_input_ends_where_its_elements_end() -> None:
    buffer = torch.randn(2, 16)
    left, right = buffer.chunk(2, 1)
    row = buffer.flatten()[:8]

    def second_row() -> Tensor:
        y = torch.empty(8)
        launch(lambda part, out: out.copy_(part), left[1], y)
        return y

    def behind() -> Tensor:
        y = torch.empty(8)
        launch(lambda part, out: out.copy_(part), right[0], y)
        return y

    assert record(second_row, [left, right], [])[1] is None
    assert record(behind, [row.expand(4, 8)], [])[1] is None
    assert record(second_row, [left], [])[1] is not None


def test_a_recording_has_as_many_inputs_as_its_call() -> None:
    a, b = torch.randn(2, 5, 7)
    made = record(lambda: twice_plus(a, b), [a, b], [])[1]
    assert made is not None
    c, d = torch.randn(2, 5, 7)
    assert torch.equal(made(c, d)[0], 2 * c + d)
    assert torch.equal(made(c, a)[0], 2 * c + a)


def foreign(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(lambda x, out: out.copy_(x), x, y)
    return y.mul_(2)


def zeroed(x: Tensor) -> Tensor:
    total, y = torch.zeros(1), torch.empty_like(x)
    launch(lambda x, total, out: out.copy_(x + total), x, total, y)
    return y


def unknown(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(lambda x, hidden, out: out.copy_(x + hidden), x, HIDDEN, y)
    return y


def unrepeatable(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(lambda x, out: out.copy_(x), x, y)
    if is_recording():
        record_launch(None)
    return y


def inner(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0] + 1, x.shape[1])
    launch(lambda x, out: out[1:].copy_(x), x, y)
    return y[1:]


def halves(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(lambda x, out: out.copy_(x), x, y)
    return y.view(torch.bfloat16)[:, ::2]


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    launch(lambda x, out: out.copy_(x), x, y)
    return y, y


def given(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    launch(lambda x, out: out.copy_(x), x, y)
    return y, x


def half_noted(x: Tensor) -> tuple[Tensor, Tensor]:
    y, z = torch.empty_like(x), torch.empty_like(x)
    launch(lambda x, out: out.copy_(x), x, y)
    with _disable_current_modes():
        z.copy_(x)
    return y, z


def unnoted(x: Tensor) -> Tensor:
    """The last kernel is not recorded: a replay would return unwritten memory."""
    doubled, y = torch.empty_like(x), torch.empty_like(x)
    launch(lambda x, out: out.copy_(2 * x), x, doubled)
    with _disable_current_modes():
        y.copy_(doubled)
    return y


def nothing(x: Tensor) -> Tensor:
    return torch.empty_like(x)


HIDDEN = torch.ones(3, 4)


@pytest.mark.parametrize(
    "function",
    [
        foreign, zeroed, unknown, unrepeatable, inner, halves, unnoted, nothing, twice, given,
        half_noted,
    ],
)  # fmt: skip
def test_what_launches_do_not_tell_is_not_recorded(function: object) -> None:
    x = torch.randn(3, 4)
    y, made = record(lambda: function(x), [x], [])
    assert made is None
    if function is not nothing:
        for found, again in zip(results_of(y), results_of(function(x)), strict=True):
            assert torch.equal(found, again)


def test_a_copy_by_what_may_give_a_view_is_noticed() -> None:
    x = torch.randn(4, 6)
    for copies, call in (
        (False, lambda: x.contiguous().reshape(2, 12).chunk(2, -1)),
        (True, lambda: x.t().contiguous()),
        (True, lambda: x.t().reshape(24)),
        (True, lambda: x.expand(2, 4, 6).flatten()),
    ):
        # inside an operator of torch these are one operation, which is called a view
        with AllocationWatch() as watch, torch._C._AutoDispatchBelowAutograd():
            call()
        assert bool(watch.foreign) is copies


def results_of(found: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def test_recording_ends_with_an_error() -> None:
    def broken() -> Tensor:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        record(broken, [torch.ones(1)], [])
    assert not is_recording()


def fake_gpus(
    monkeypatch: pytest.MonkeyPatch, device: Callable[[], int], stream: Callable[[int], int]
) -> None:
    for name, told in {"_current_device": device, "_current_stream": stream}.items():
        monkeypatch.setattr(launch_recording, name, told)


def test_small_scratch_memory_is_shared_on_the_default_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other streams capture graphs, or warm up for them in memory that is then reused."""
    x, constant = torch.randn(5, 7), torch.randn(5, 7)
    recordings = [recorded(x, constant) for _ in range(2)]
    stream = 0
    fake_gpus(monkeypatch, lambda: 0, lambda _: stream)
    given: list[Tensor] = []

    def allocate(empty: Callable[..., Tensor], *layout: object) -> Tensor:
        block = empty(*layout)
        given.extend([block] if block.dtype == torch.uint8 else [])
        return block

    for made in recordings:
        made.index = 0
        allocating(made, allocate)

    def passed(made: Recording) -> int:
        assert torch.equal(made(x)[0], 2 * x + constant)
        return made.steps[0].passed[1]

    with ThreadPoolExecutor(1) as pool:  # a thread that has none yet
        shared = {pool.submit(passed, made).result() for made in 2 * recordings}
        assert shared == {t.data_ptr() for t in given}
        assert len(given) == 1
        assert passed(recordings[0]) not in shared  # launches of threads may alternate
        given.clear()
        stream = 7
        for made in recordings:
            assert pool.submit(passed, made).result() == given[-1].data_ptr() not in shared
    assert [t.nbytes for t in given] == [256, 256]


def test_scratch_memory_with_gaps_between_rows_is_whole() -> None:
    x = torch.randn(4, 32)

    def call() -> Tensor:
        gaps, ones, y = (
            torch.empty_strided((4, 32), (64, 1)),
            torch.empty(4, 64),
            torch.empty(4, 32),
        )
        launch(lambda x, out: out.copy_(x), x, gaps)
        launch(lambda out: out.fill_(1.0), ones)
        launch(lambda a, b, out: out.copy_(a + b[:, :32]), gaps, ones, y)
        return y

    made = record(call, [x], [])[1]
    assert made is not None
    assert torch.equal(made(x)[0], x + 1)


def test_much_scratch_memory_is_given_back() -> None:
    x, constant = torch.randn(2, 200, 200)
    made = recorded(x, constant)
    blocks = {torch.float32: torch.empty(200, 200)}
    allocating(made, lambda empty, *layout: blocks.get(layout[-1], empty(*layout)))
    for _ in range(2):
        blocks[torch.uint8] = torch.empty(200 * 200 * 4 + 256, dtype=torch.uint8)
        assert torch.equal(made(x)[0], 2 * x + constant)
        assert made.steps[0].passed[1] == blocks[torch.uint8].data_ptr()


@pytest.mark.parametrize("current", [0, 1])
def test_launches_go_to_the_stream_of_the_inputs_device(
    current: int, monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]
) -> None:
    """Two faked GPUs in one process: the recording is of device 1, whichever is current."""
    x = torch.randn(2, 2)
    y, made = record(lambda: twice_plus(x, x), [x], [])
    assert made is not None
    made.index = 1
    where = [current]
    entered: list[int] = []

    @contextlib.contextmanager
    def device(index: int) -> object:
        entered.append(index)
        before, where[0] = where[0], index
        yield
        where[0] = before

    def raw_stream(index: int) -> int:
        assert where[0] == index
        return 100 + index

    def allocate(empty: Callable[..., Tensor], *layout: object) -> Tensor:
        assert where[0] == 1
        return empty(*layout)

    faked_cuda(device=device)
    fake_gpus(monkeypatch, lambda: where[0], raw_stream)
    allocating(made, allocate)
    assert torch.equal(made(x)[0], y)
    assert entered == ([1] if current == 0 else [])
    assert where == [current]
    assert {s for step in made.steps for s in step.streams[1:]} == {101}


class Compiled:
    """The result of launching a jitted function, as far as a replay by Triton needs it."""

    function, packed_metadata = "function", "metadata"
    metadata = SimpleNamespace(target=SimpleNamespace(backend="hip"))

    def __init__(self) -> None:
        self.ran: list[tuple[object, ...]] = []

    def run(self, *arguments: object) -> None:
        self.ran.append(arguments)


class Jitted:
    arg_names = ("x_ptr", "y_ptr", "M", "K", "STATIC")

    def __init__(self, compiled: Compiled | None) -> None:
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        assert grid == (9,)
        return lambda *_, **__: self.compiled


def test_a_triton_launch_repeats_the_compiled_kernel() -> None:
    x, compiled = torch.randn(4, 4), Compiled()

    def function() -> Tensor:
        y = torch.empty_like(x)
        options = {"STATIC": True, "K": 16, "num_warps": 4}
        triton_launch.launch(Jitted(compiled), 9, x, y, 4, **options)
        return y

    made = record(function, [x], [])[1]
    assert made is not None
    (y,) = made(x)
    (ran,) = compiled.ran
    assert ran[:9] == (9, 1, 1, 0, "function", "metadata", None, None, None)
    assert ran[9:] == (x.data_ptr(), y.data_ptr(), 4, 16, True)


def test_the_interpreter_cannot_be_recorded() -> None:
    x = torch.randn(4, 4)

    def function() -> Tensor:
        y = torch.empty_like(x)
        triton_launch.launch(Jitted(None), 9, x, y, 4, K=16, STATIC=True)
        return y

    assert record(function, [x], [])[1] is None


class NotingKernel:
    """Replaces a quantizer's kernel: the compiled kernel notes its arguments."""

    def __init__(self, real: object) -> None:
        self.arg_names, self.compiled = tuple(real.arg_names), Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *_, **__: self.compiled


def noted(monkeypatch: pytest.MonkeyPatch, name: str) -> NotingKernel:
    """Replace the kernel of this name by one that notes its launches."""
    home, _, attribute = name.rpartition(".")
    fake = NotingKernel(getattr(importlib.import_module(home), attribute))
    monkeypatch.setattr(name, fake)
    return fake


@pytest.mark.parametrize(
    ("group", "shape", "kernels"),
    [
        (ROW, (4, 96), ["triton_rows._rows_kernel"]),
        (GROUP128, (4, 256), ["triton_groups._groups_kernel"]),
        (MX, (4, 256), ["triton_groups._groups_kernel"]),
        (BLOCK, (256, 256), ["triton_groups._blocks_kernel"]),
        (TENSOR, (8, 64), ["triton_tensor._tensor_kernel"]),
        (
            TENSOR,
            (512, 4096),
            ["triton_tensor._amax_kernel", "triton_tensor._tensor_kernel"],
        ),
    ],
    ids=["row", "group", "mx", "block", "tensor", "large-tensor"],
)
def test_every_quantizer_can_be_recorded(
    group: GroupShape, shape: tuple[int, int], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch passes every argument of the kernel's signature, in its order."""
    fakes = [noted(monkeypatch, f"fp8kit.quantizers.{name}") for name in kernels]
    x = torch.randn(shape)
    rounding = "floor" if group == MX else "exact"
    outputs: list[Tensor] = []

    def call() -> Tensor:
        y = torch.empty(1)
        launch(lambda out: None, y)
        outputs[:] = triton.quantize(x, group, torch.float8_e4m3fn, 1e-12, None, rounding)
        return y

    made = record(call, [x], [])[1]
    assert made is not None
    made(torch.randn(shape))
    for fake in fakes:
        (ran,) = fake.compiled.ran
        values = dict(zip(fake.arg_names, ran[9:], strict=True))
        assert values["x_ptr"] != x.data_ptr()
        assert isinstance(values["x_ptr"], int)
        assert values.get("scale_ub_ptr") is None
        assert not any(isinstance(v, Tensor) for v in values.values())
        assert ran[0] > 0


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize("producer", ["rms", "add", "adaptive", "silu"])
def test_every_fused_kernel_can_be_recorded(
    producer: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "activation" if producer == "silu" else "norm"
    fake = noted(monkeypatch, f"fp8kit.fused.triton_{name}s._{name}_kernel")
    x, other, weight = torch.randn(2, 4, 256), torch.randn(2, 4, 256), torch.randn(256)
    how = CodesFormat(None, GROUP128, torch.float8_e4m3fn, 1e-12, None, "exact", layout)
    pair = (torch.randn(2, 256), torch.randn(2, 256))
    calls = {
        "rms": lambda: fused_triton.rms_norm(x, None, weight, 1e-6, 0.0, "stepwise", how)[:2],
        "add": lambda: fused_triton.rms_norm(x, other, weight, 1e-6, 1.0, "once", how),
        "adaptive": lambda: fused_triton.layer_norm(x, None, None, pair, 1e-6, "once", how),
        "silu": lambda: fused_triton.activation("silu", x, other, how),
    }
    made = record(calls[producer], [x, other], [weight, *pair])[1]
    assert made is not None
    inputs = torch.randn(2, 4, 256), torch.randn(2, 4, 256)
    results = made(*inputs)
    (ran,) = fake.compiled.ran
    values = dict(zip(fake.arg_names, ran[9:], strict=True))
    assert not any(isinstance(v, Tensor) for v in values.values())
    assert values["gate_ptr" if producer == "silu" else "x_ptr"] == inputs[0].data_ptr()
    read = {"add": "residual_ptr", "silu": "up_ptr"}.get(producer)
    assert read is None or values[read] == inputs[1].data_ptr()
    written = ("data_ptr", "scale_ptr", "total_ptr")[: len(results)]
    assert [values[w] for w in written] == [y.data_ptr() for y in results]
    assert values["SCALES"] == ("group" if layout == "row" else "column")
    assert results[1].stride() == ((8, 2, 1) if layout == "row" else (4, 1, 8))


@pytest.mark.parametrize("splits", [1, 4])
def test_the_triton_product_can_be_recorded(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("product_kernel", "sum_kernel")
    fakes = {name: noted(monkeypatch, f"fp8kit.matmul.triton_gemm.{name}") for name in names}
    e4m3 = torch.float8_e4m3fn
    x, w = torch.zeros(4, 4096, dtype=e4m3), torch.zeros(64, 4096, dtype=e4m3)
    x_scale, w_scale = torch.ones(4, 1), torch.ones(64, 1)
    problem = MatmulProblem.of(x, w, (ROW, ROW), torch.bfloat16, None, "precise", False)
    tile = triton_gemm.choose_tile(problem, triton_gemm.Device(132, 228 * 1024))
    tile = tile._replace(splits=splits)

    def call() -> Tensor:
        return triton_gemm.run_tile(MatmulOperands(x, x_scale, w, w_scale), problem, tile)

    made = record(call, [x], [x_scale, w, w_scale])[1]
    assert made is not None
    another = x.clone()
    (y,) = made(another)
    launched = [(fake, *fake.compiled.ran) for fake in fakes.values() if fake.compiled.ran]
    assert len(launched) == (1 if splits == 1 else 2)
    for fake, ran in launched:
        values = dict(zip(fake.arg_names, ran[9:], strict=True))
        assert not any(isinstance(v, Tensor) for v in values.values())
        assert values["w_scale_ptr"] == w_scale.data_ptr()
        assert values.get("x_ptr", another.data_ptr()) == another.data_ptr()
    last, ran = launched[-1]
    assert dict(zip(last.arg_names, ran[9:], strict=True))["y_ptr"] == y.data_ptr()
