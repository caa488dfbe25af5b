"""Launches through a faked CUDA driver: their arguments, and what a replay changes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import launches
from fp8kit.runtime import cuda_launch
from fp8kit.runtime.launch_recording import record

STREAM = 77


def attributes(config: Any, ids: Any) -> dict[str, Any]:
    """Return a launch configuration's attributes as the driver would read them."""
    found: dict[str, Any] = {}
    for attribute in list(config.attrs)[: config.numAttrs]:
        if attribute.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            shape = attribute.value.clusterDim
            found["cluster"] = (shape.x, shape.y, shape.z)
        else:
            assert attribute.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            found["early"] = attribute.value.programmaticStreamSerializationAllowed
    return found


class FakeDriver:
    """The bindings' own structures, with calls that are noted and reach no GPU."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.launched: list[dict[str, Any]] = []
        self.kinds: list[Any] = []
        self.status = real.CUresult.CUDA_SUCCESS
        self.bound: list[str] = []
        self.loaded: list[bytes] = []
        self.allowed: list[tuple[Any, ...]] = []
        self.cold = False  # whether the thread has no context yet

    def bind(self, context: str) -> Any:
        self.bound.append(context)
        self.cold = False
        return (self.status,)

    def cuModuleLoadData(self, image: bytes) -> Any:
        self.loaded.append(image)
        return self.status, "module"

    def cuModuleGetFunction(self, *_: object) -> Any:
        return self.status, "function"

    def cuFuncSetAttribute(self, *given: object) -> Any:
        self.allowed.append(given)
        return (self.status,)

    def cuDeviceGet(self, index: int) -> Any:
        return self.status, f"gpu {index}"

    def cuDevicePrimaryCtxRetain(self, gpu: str) -> Any:
        return self.status, f"context of {gpu}"

    def cuCtxSetCurrent(self, context: str) -> Any:
        return self.bind(context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, _: int) -> Any:
        if self.cold:
            return (self._real.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        addresses = (ctypes.c_void_p * len(self.kinds)).from_address(parameters)
        values = [
            address if kind == "map" else kind.from_address(address).value
            for kind, address in zip(self.kinds, addresses, strict=True)
        ]
        self.launched.append(
            {
                "grid": (config.gridDimX, config.gridDimY, config.gridDimZ),
                "block": (config.blockDimX, config.blockDimY, config.blockDimZ),
                "shared": config.sharedMemBytes,
                "stream": int(config.hStream),
                "attributes": attributes(config, self._real.CUlaunchAttributeID),
                "values": values,
            }
        )
        return (self.status,)

    def cuTensorMapEncodeTiled(self, *described: Any) -> Any:
        self.described = [[int(n) for n in d] if isinstance(d, list) else d for d in described]
        return self.status, self._real.CUtensorMap()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]) -> FakeDriver:
    made = FakeDriver(cuda_launch.driver)
    faked_cuda(get_device_capability=lambda _: (9, 0))
    launches.on_driver(monkeypatch, made, STREAM)
    cuda_launch.byte_tile_map.cache_clear()
    cuda_launch.float_row_map.cache_clear()
    yield made
    cuda_launch.byte_tile_map.cache_clear()
    cuda_launch.float_row_map.cache_clear()


@pytest.fixture
def kernel(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> cuda_launch.Kernel:
    monkeypatch.setattr(cuda_launch.nvrtc, "cubin", lambda _, arch: arch.encode())
    return cuda_launch.Kernel("source", "name", 160, 2, 4096, torch.device("cuda", 1))


def test_a_kernel_is_made_for_its_device_and_allowed_its_memory(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    assert fake.bound == ["context of gpu 1"]
    assert fake.loaded == [b"sm_90a"]
    given = {what.name: (of, value) for of, what, value in fake.allowed}
    assert given == {
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": ("function", 4096),
        "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": ("function", 100),
    }
    assert kernel.device == 1


def test_a_failure_to_read_parameters_is_an_error(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    failed = (fake.CUresult.CUDA_ERROR_INVALID_HANDLE, None, None)
    fake.cuFuncGetParamInfo = lambda *_: failed
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_HANDLE"):
        kernel.parameter_bytes()


def test_stream_zero_is_the_legacy_one(kernel: cuda_launch.Kernel, fake: FakeDriver) -> None:
    x = torch.zeros(4, 16)
    made = cuda_launch.KernelLaunch(kernel, 6, arguments(x, x, fake), True)
    for stream in (0, 5, 0):
        made.start(stream)
    legacy = int(fake.CU_STREAM_LEGACY)
    assert [launched["stream"] for launched in fake.launched] == [legacy, 5, legacy]


def arguments(x: Tensor, y: Tensor, fake: FakeDriver) -> tuple[Any, ...]:
    """A tile map, three pointers of which one is null, and two numbers."""
    fake.kinds = ["map", *[ctypes.c_uint64] * 3, *[ctypes.c_int] * 2]
    return (
        cuda_launch.byte_tile_map(x.data_ptr(), 4, 16, 16, 2, 16),
        cuda_launch.pointer(x),
        cuda_launch.pointer(None),
        cuda_launch.pointer(y),
        ctypes.c_int(-3),
        ctypes.c_int(9),
    )


def test_the_run_under_sanitizers_notes_a_launch(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    noted = pytest.importorskip("sanitize", reason="triton is not installed").noted
    seen: set[str] = set()
    x = torch.zeros(4, 16)
    with noted(seen):
        kernel.launch(6, arguments(x, x, fake), overlap=True)
    assert seen == {"name"}
    assert len(fake.launched) == 1


def test_a_launch_passes_grid_stream_attributes_and_arguments(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    given = arguments(x, y, fake)
    kernel.launch(6, given, overlap=True)
    kernel.launch(8, given, overlap=False)
    first, second = fake.launched
    sizes = (first["grid"], first["block"], first["shared"])
    assert sizes == ((6, 1, 1), (160, 1, 1), 4096)
    assert first["stream"] == STREAM
    assert first["values"] == [given[0].getPtr(), x.data_ptr(), 0, y.data_ptr(), -3, 9]
    assert first["attributes"] == {"early": 1, "cluster": (2, 1, 1)}
    assert (second["grid"], second["attributes"]) == ((8, 1, 1), {"cluster": (2, 1, 1)})


def test_a_thread_without_a_context_is_given_that_of_the_device(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    given = arguments(x, y, fake)
    repeated = cuda_launch.KernelLaunch(kernel, 6, given, True)
    fake.bound.clear()
    for launch in (lambda: kernel.launch(6, given, overlap=True), lambda: repeated.start(STREAM)):
        fake.cold = True
        launch()
        launch()
    assert fake.bound == ["context of gpu 1"] * 2
    assert len(fake.launched) == 4


def test_a_repeated_launch_changes_addresses_and_stream_alone(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    x, y = torch.zeros(4, 16), torch.zeros(4, 16)
    given = arguments(x, y, fake)
    made = cuda_launch.KernelLaunch(kernel, 6, given, True)
    assert made.addresses == [x.data_ptr(), x.data_ptr(), 0, y.data_ptr()]
    kernel.launch(6, given, overlap=True)
    made.start(STREAM)
    other, result = torch.zeros(4, 16), torch.zeros(4, 16)
    for position, tensor in ((0, other), (1, other), (3, result)):
        made.move(position, tensor.data_ptr())
    for stream in (5, 5, 0, STREAM):
        made.start(stream)
    original, same, moved, *later = fake.launched
    assert same == original
    assert [launched["stream"] for launched in (moved, *later)] == [5, 5, 1, STREAM]
    wanted = cuda_launch.byte_tile_map(other.data_ptr(), 4, 16, 16, 2, 16).getPtr()
    assert moved["values"] == [wanted, other.data_ptr(), 0, result.data_ptr(), -3, 9]
    assert {k: v for k, v in moved.items() if k not in ("stream", "values")} == {
        k: v for k, v in original.items() if k not in ("stream", "values")
    }
    assert given[1].value == x.data_ptr()  # the caller's own values stay


def test_a_repeated_launch_keeps_the_kind_of_its_maps(
    kernel: cuda_launch.Kernel, fake: FakeDriver
) -> None:
    x, other = torch.zeros(4, 16), torch.ones(4, 16)
    fake.kinds = ["map", "map"]
    shapes = {
        cuda_launch.byte_tile_map: (4, 16, 16, 2, 16),
        cuda_launch.float_row_map: (4, 16, 16, 8),
    }
    given = [make(x.data_ptr(), *shape) for make, shape in shapes.items()]
    made = cuda_launch.KernelLaunch(kernel, 6, given, True)
    for position in range(2):
        made.move(position, other.data_ptr())
    made.start(5)
    wanted = [make(other.data_ptr(), *shape) for make, shape in shapes.items()]
    assert fake.launched[-1]["values"] == [m.getPtr() for m in wanted]
    assert [m.make for m in wanted] == list(shapes)


def test_what_is_passed_twice_is_moved_once(kernel: cuda_launch.Kernel, fake: FakeDriver) -> None:
    x, other = torch.zeros(4, 16), torch.ones(4, 16)
    tile_map, pointer = (
        cuda_launch.byte_tile_map(x.data_ptr(), 4, 16, 16, 2, 16),
        cuda_launch.pointer(x),
    )
    fake.kinds = ["map", "map", *[ctypes.c_uint64] * 3]
    given = (tile_map, tile_map, pointer, pointer, cuda_launch.pointer(x))
    made = cuda_launch.KernelLaunch(kernel, 6, given, True)
    assert made.addresses == [x.data_ptr()] * 3
    for turn in (other, x):
        for position in range(3):
            made.move(position, turn.data_ptr())
        made.start(STREAM)
        handle = cuda_launch.byte_tile_map(turn.data_ptr(), 4, 16, 16, 2, 16).getPtr()
        assert fake.launched[-1]["values"] == [handle] * 2 + [turn.data_ptr()] * 3


def test_a_launch_is_noted_on_a_recording(kernel: cuda_launch.Kernel, fake: FakeDriver) -> None:
    x = torch.zeros(4, 16)

    def call() -> Tensor:
        y = torch.empty(4, 16)
        kernel.launch(6, arguments(x, y, fake), overlap=True)
        return y

    _, made = record(call, [x], [])
    assert made is not None
    (step,) = made.steps
    assert isinstance(step, cuda_launch.KernelLaunch)
    other = torch.zeros(4, 16)
    (y,) = made(other)
    assert fake.launched[-1]["values"][1:4] == [other.data_ptr(), 0, y.data_ptr()]


def test_a_failed_launch_raises(kernel: cuda_launch.Kernel, fake: FakeDriver) -> None:
    x = torch.zeros(4, 16)
    given = arguments(x, x, fake)
    made = cuda_launch.KernelLaunch(kernel, 6, given, False)
    fake.status = fake.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(6, given, overlap=False)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        made.start(STREAM)


def test_rows_of_a_described_matrix_may_have_gaps(fake: FakeDriver) -> None:
    cuda_launch.byte_tile_map(4096, 5, 48, 64, 2, 16)
    _, rank, address, shape, pitch, box = fake.described[:6]
    assert (rank, address, shape, pitch, box) == (2, 4096, [48, 5], [64], [16, 2])


def test_tile_maps_are_cached_by_address_and_shape(fake: FakeDriver) -> None:
    first = cuda_launch.byte_tile_map(4096, 4, 16, 16, 2, 16)
    assert cuda_launch.byte_tile_map(4096, 4, 16, 16, 2, 16) is first
    assert cuda_launch.byte_tile_map(8192, 4, 16, 16, 2, 16) is not first
    assert (first.address, first.shape) == (4096, (4, 16, 16, 2, 16))
