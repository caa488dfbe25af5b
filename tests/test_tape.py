"""Tapes: what is recorded, what is refused, and where the launches go."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8kit import tape
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.matmul import triton_scaled
from fp8kit.matmul.problem import MatmulProblem
from fp8kit.quantizers import triton, triton_launch
from taped import launch


def twice_plus(x: Tensor, constant: Tensor) -> Tensor:
    """Compute ``2 x + constant`` through a scratch tensor."""
    doubled, y = torch.empty_like(x), torch.empty_like(x)
    launch(lambda x, out: out.copy_(2 * x), x, doubled)
    launch(lambda a, b, out: out.copy_(a + b), doubled, constant, y)
    return y


def test_a_tape_repeats_with_another_input() -> None:
    x, constant = torch.randn(5, 7), torch.randn(5, 7)
    y, made = tape.record(lambda: twice_plus(x, constant), x, [constant, None])
    assert made is not None
    assert torch.equal(y, 2 * x + constant)
    other = torch.randn(5, 7)
    again = made(other)
    assert torch.equal(again, 2 * other + constant)
    assert torch.equal(y, 2 * x + constant)
    constant.fill_(3.0)
    assert torch.equal(made(x), 2 * x + 3)


def test_all_but_the_result_share_one_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    x, constant = torch.randn(5, 7), torch.randn(5, 7)
    made = tape.record(lambda: twice_plus(x, constant), x, [constant])[1]
    assert made is not None
    sizes: list[int] = []
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda *a, **k: (sizes.append(empty(*a, **k).nbytes), empty(*a, **k))[1],
    )
    made(x)
    assert sizes == [x.nbytes, 256]


def test_views_are_followed_into_their_tensor() -> None:
    x = torch.randn(4, 6)

    def halves() -> Tensor:
        buffer, y = torch.empty(2, 4, 6), torch.empty(4, 6)
        launch(lambda x, out: out.copy_(x), x.view(6, 4), buffer[1].view(6, 4))
        launch(lambda a, out: out.copy_(a + 1), buffer[1], y.view(24).view(4, 6))
        return y.view(24)

    y, made = tape.record(halves, x, [])
    assert made is not None
    assert torch.equal(y, x.flatten() + 1)
    assert torch.equal(made(-x), 1 - x.flatten())


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
    if tape.recording():
        tape.note(None)
    return y


def strided(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[1], x.shape[0])
    launch(lambda x, out: out.copy_(x.t()), x, y)
    return y.t()


def sliced(x: Tensor) -> Tensor:
    y = torch.empty(x.shape[0], x.shape[1] + 1)
    launch(lambda x, out: out[:, :-1].copy_(x), x, y)
    return y[:, :-1]


def unnoted(x: Tensor) -> Tensor:
    """The last kernel does not take part: a tape would give memory that nobody wrote."""
    doubled, y = torch.empty_like(x), torch.empty_like(x)
    launch(lambda x, out: out.copy_(2 * x), x, doubled)
    with _disable_current_modes():
        y.copy_(doubled)
    return y


def nothing(x: Tensor) -> Tensor:
    return torch.empty_like(x)


HIDDEN = torch.ones(3, 4)


@pytest.mark.parametrize(
    "function", [foreign, zeroed, unknown, unrepeatable, strided, sliced, unnoted, nothing]
)
def test_what_launches_do_not_tell_is_not_taped(function: object) -> None:
    x = torch.randn(3, 4)
    y, made = tape.record(lambda: function(x), x, [])
    assert made is None
    if function is not nothing:
        assert torch.equal(y, function(x))


def test_recording_ends_with_an_error() -> None:
    def broken() -> Tensor:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        tape.record(broken, torch.ones(1), [])
    assert not tape.recording()


@pytest.mark.parametrize("current", [0, 1])
def test_launches_go_to_the_stream_of_the_inputs_device(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs in one process, in fakes: the tape is of device 1, whichever is current."""
    x = torch.randn(2, 2)
    y, made = tape.record(lambda: twice_plus(x, x), x, [])
    assert made is not None
    made.device = torch.device("cuda", 1)
    where = [current]
    entered: list[int] = []
    empty = torch.empty

    @contextlib.contextmanager
    def device(index: int) -> object:
        entered.append(index)
        before, where[0] = where[0], index
        yield
        where[0] = before

    def raw_stream(index: int) -> int:
        assert where[0] == index
        return 100 + index

    fake = SimpleNamespace(current_device=lambda: where[0], device=device)
    monkeypatch.setattr(tape.torch, "cuda", fake)
    monkeypatch.setattr(tape.torch._C, "_cuda_getCurrentRawStream", raw_stream, raising=False)
    monkeypatch.setattr(tape.torch, "empty", lambda *a, device, **k: empty(*a, **k))
    assert torch.equal(made(x), y)
    assert entered == ([1] if current == 0 else [])
    assert {s for step, *_ in made.steps for s in step.streams[1:]} == {101}


class Compiled:
    """What a launch of a jitted function returns, as far as a replay needs it."""

    function, packed_metadata = "function", "metadata"

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

    made = tape.record(function, x, [])[1]
    assert made is not None
    y = made(x)
    (ran,) = compiled.ran
    assert ran[:9] == (9, 1, 1, 0, "function", "metadata", None, None, None)
    assert ran[9:] == (x.data_ptr(), y.data_ptr(), 4, 16, True)


def test_the_interpreter_cannot_be_taped() -> None:
    x = torch.randn(4, 4)

    def function() -> Tensor:
        y = torch.empty_like(x)
        triton_launch.launch(Jitted(None), 9, x, y, 4, K=16, STATIC=True)
        return y

    assert tape.record(function, x, [])[1] is None


class Recording:
    """Stands for a quantizer's kernel: it compiles to something that notes its arguments."""

    def __init__(self, real: object) -> None:
        self.arg_names, self.compiled = tuple(real.arg_names), Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *_, **__: self.compiled


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
def test_every_quantizer_can_be_taped(
    group: GroupShape, shape: tuple[int, int], kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch passes every argument of the kernel's signature, in its order."""
    fakes = []
    for name in kernels:
        module, _, attribute = name.partition(".")
        home = importlib.import_module(f"fp8kit.quantizers.{module}")
        fakes.append(Recording(getattr(home, attribute)))
        monkeypatch.setattr(home, attribute, fakes[-1])
    x = torch.randn(shape)
    rounding = "floor" if group == MX else "exact"
    outputs: list[Tensor] = []

    def call() -> Tensor:
        y = torch.empty(1)
        launch(lambda out: None, y)
        outputs[:] = triton.quantize(x, group, torch.float8_e4m3fn, 1e-12, None, rounding)
        return y

    made = tape.record(call, x, [])[1]
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


@pytest.mark.parametrize("splits", [1, 4])
def test_the_triton_product_can_be_taped(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("product_kernel", "sum_kernel")
    fakes = {name: Recording(getattr(triton_scaled, name)) for name in names}
    for name, fake in fakes.items():
        monkeypatch.setattr(triton_scaled, name, fake)
    e4m3 = torch.float8_e4m3fn
    x, w = torch.zeros(4, 4096, dtype=e4m3), torch.zeros(64, 4096, dtype=e4m3)
    x_scale, w_scale = torch.ones(4, 1), torch.ones(64, 1)
    problem = MatmulProblem.of(x, w, (ROW, ROW), torch.bfloat16, None, "precise", False)
    tile = triton_scaled.choose_tile(problem, triton_scaled.Device(132, 228 * 1024))
    tile = tile._replace(splits=splits)

    def call() -> Tensor:
        return triton_scaled.run_tile(x, x_scale, w, w_scale, None, problem, tile)

    made = tape.record(call, x, [x_scale, w, w_scale])[1]
    assert made is not None
    another = x.clone()
    y = made(another)
    launched = [(fake, *fake.compiled.ran) for fake in fakes.values() if fake.compiled.ran]
    assert len(launched) == (1 if splits == 1 else 2)
    for fake, ran in launched:
        values = dict(zip(fake.arg_names, ran[9:], strict=True))
        assert not any(isinstance(v, Tensor) for v in values.values())
        assert values["w_scale_ptr"] == w_scale.data_ptr()
        assert values.get("x_ptr", another.data_ptr()) == another.data_ptr()
    last, ran = launched[-1]
    assert dict(zip(last.arg_names, ran[9:], strict=True))["y_ptr"] == y.data_ptr()
