"""Replays of Triton kernels by the CUDA bindings; CUDA and Triton's results are faked."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
cuda_launch = pytest.importorskip(
    "fp8kit.runtime.cuda_launch", reason="cuda-bindings is not installed"
)
import launches  # noqa: E402
from fp8kit.runtime import triton_launch  # noqa: E402
from fp8kit.runtime.launch_recording import record  # noqa: E402

SIGNATURE = {"x_ptr": "*bf16", "bound_ptr": "constexpr", "M": "i32", "stride": "i64", "low": "fp32"}
SIZES = [8, 4, 8, 4, 8, 8]  # and two pointers to scratch memory


class FakeDriver:
    """The CUDA bindings, with a function that has given parameters; launches are noted."""

    def __init__(self, real: Any, sizes: list[int]) -> None:
        self._real, self.sizes, self.values = real, sizes, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, int, int]:
        assert int(function) == 4242
        found, none = self._real.CUresult.CUDA_SUCCESS, self._real.CUresult.CUDA_ERROR_INVALID_VALUE
        return (found, 0, self.sizes[index]) if index < len(self.sizes) else (none, 0, 0)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, _: int) -> tuple[Any]:
        kinds = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float]
        kinds += [ctypes.c_uint64] * 2
        addresses = (ctypes.c_void_p * len(kinds)).from_address(parameters)
        self.values = [k.from_address(a).value for k, a in zip(kinds, addresses, strict=True)]
        self.config = config
        return (self._real.CUresult.CUDA_SUCCESS,)


class Compiled(SimpleNamespace):
    """The result of launching a jitted function, of a class that the tests can watch."""


def compiled(**metadata: object) -> Compiled:
    facts = {"num_warps": 4, "num_ctas": 1, "shared": 48, "launch_pdl": True}
    facts |= {
        "target": SimpleNamespace(backend="cuda"),
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "launch_cooperative_grid": False,
    }
    source = SimpleNamespace(signature=SIGNATURE)
    return Compiled(
        metadata=SimpleNamespace(**facts | metadata), src=source, function=4242, run=None
    )


def direct(
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int] = SIZES,
    driver: type[FakeDriver] = FakeDriver,
    **metadata: object,
) -> tuple[Any, FakeDriver, torch.Tensor]:
    fake = driver(cuda_launch.driver, sizes)
    launches.on_driver(monkeypatch, fake)
    x = torch.zeros(4, dtype=torch.bfloat16)
    return repeated(compiled(**metadata), x), fake, x


def repeated(owner: Compiled, x: torch.Tensor) -> Any:
    """Return the launch by the bindings of a compiled kernel; ``None`` if Triton replays it."""
    return triton_launch._direct(owner, 9, [x, None, 3, 2**40, 0.5])


def test_the_bindings_pass_what_is_not_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, fake, x = direct(monkeypatch)
    assert launch.addresses == [x.data_ptr(), 0, 0]
    launch.move(0, 64)
    launch.start(77)
    assert fake.values == [64, 3, 2**40, 0.5, 0, 0]
    assert (fake.config.gridDimX, fake.config.blockDimX, fake.config.sharedMemBytes) == (9, 128, 48)
    (attribute,) = fake.config.attrs
    kinds = fake.CUlaunchAttributeID
    assert attribute.id == kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def test_a_kernel_that_does_not_overlap_has_no_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, fake, _ = direct(monkeypatch, launch_pdl=False)
    launch.start(0)
    assert list(fake.config.attrs) == []


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES[:3],
        SIZES[:4],
        SIZES[:5],
        [*SIZES, 8],
        [*SIZES[:4], 8, 8, *SIZES[4:]],
        [8, 8, 4, 4, 8, 8],
        [8, 8, 8, 4, 8, 8],
        [*SIZES[:4], 4, 8],
        [],
    ],
    ids=str,
)
def test_other_parameters_are_left_to_triton(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct(monkeypatch, sizes)[0] is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"target": SimpleNamespace(backend="hip")},
        {"num_ctas": 2},
        {"global_scratch_size": 64},
        {"profile_scratch_size": 64},
        {"launch_cooperative_grid": True},
    ],
    ids=str,
)
def test_other_launches_are_left_to_triton(
    metadata: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert direct(monkeypatch, **metadata)[0] is None


def test_a_driver_that_does_not_tell_leaves_it_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldDriver(FakeDriver):
        def cuFuncGetParamInfo(self, *_: object) -> tuple[Any, int, int]:
            raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    assert direct(monkeypatch, driver=OldDriver)[0] is None


@pytest.mark.parametrize("triton_repeats", [False, True])
def test_a_launch_keeps_the_function_loaded(
    triton_repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = direct(monkeypatch)[2]
    owner = compiled()
    owner.packed_metadata = None
    if triton_repeats:
        launch = triton_launch.TritonLaunch(owner, 9, [x])
    else:
        launch = repeated(owner, x)
    assert launch is not None
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is not None
    del launch
    gc.collect()
    assert gone() is None


def test_other_types_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIGNATURE, "low", "fp64")  # would be passed as a pointer to scratch memory
    assert direct(monkeypatch, [8, 4, 8, 8, 8])[0] is None


def test_without_the_bindings_triton_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    made = direct(monkeypatch)[0]
    assert made is not None
    monkeypatch.setattr(triton_launch, "cuda_launch", None)
    assert direct(monkeypatch)[0] is None


def test_a_recorded_launch_is_repeated_by_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    x = direct(monkeypatch)[2]
    ran = compiled()
    ran.packed_metadata = None
    jitted = Jitted(ran)

    def call() -> torch.Tensor:
        y = torch.empty_like(x)
        triton_launch.launch(jitted, 9, y, None, 3, 2**40, low=0.5)
        return y

    _, made = record(call, [x], [])
    assert made is not None
    assert [type(step) for step in made.steps] == [cuda_launch.KernelLaunch]


class Jitted:
    """A jitted function that was compiled before."""

    arg_names = tuple(SIGNATURE)

    def __init__(self, ran: Compiled) -> None:
        self.ran = ran

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert grid == (9,)
        return lambda *_, **__: self.ran


@pytest.mark.gpu
def test_quantizers_are_repeated_by_the_bindings() -> None:
    from fp8kit import ROW
    from fp8kit.quantizers import triton

    x = torch.randn(96, 4096, device="cuda", dtype=torch.bfloat16)
    arguments = (ROW, torch.float8_e4m3fn, 0.0, None, "exact")
    _, made = record(lambda: triton.quantize(x, *arguments), [x], [])
    assert made is not None
    assert [type(step) for step in made.steps] == [cuda_launch.KernelLaunch]
    other = torch.randn_like(x)
    again = made(other)
    expected = triton.quantize(other, *arguments)
    for found, wanted in zip(again, expected, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
