"""Launch compiled kernels through NVIDIA's driver bindings, and repeat the launches.

Needs ``cuda-bindings`` from PyPI (the extra ``cuda``). ``Kernel`` is compiled by ``nvrtc``; a
``Function`` may come from any compiler, such as Triton's. ``KernelLaunch`` repeats a launch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from fp8kit.runtime import compile_ahead, nvrtc
from fp8kit.runtime.launch_recording import is_recording, record_launch
from fp8kit.runtime.nvrtc import checked

# torch's stream 0: the bindings can be set up so that a 0 is the per-thread stream instead
_LEGACY_STREAM = int(driver.CU_STREAM_LEGACY)
_NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
_ATTRIBUTE = driver.CUlaunchAttributeID
_DYNAMIC_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


class Function:
    """A function on one device, with a fixed block, cluster and amount of shared memory.

    ``handle`` is the ``CUfunction``, ``cluster`` is 0 if it was not compiled for clusters, and
    ``shared_bytes`` is the dynamic shared memory per block that it may use. ``owner``, if any,
    unloads the function when it is freed, so it is kept alive here. With ``cooperative``, all
    blocks of a grid run at the same time, or none.
    """

    def __init__(
        self,
        handle: Any,
        block: int,
        cluster: int,
        shared_bytes: int,
        device: int,
        owner: object = None,
        cooperative: bool = False,
    ) -> None:
        self.handle, self.device, self._owner = handle, device, owner
        self._cooperative = cooperative
        self._block, self._cluster, self._shared_bytes = block, cluster, shared_bytes

    def parameter_bytes(self) -> list[int]:
        """Return the sizes of the function's parameters in bytes, in order."""
        sizes: list[int] = []
        while True:
            status, _, size = driver.cuFuncGetParamInfo(self.handle, len(sizes))
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                return sizes
            checked((status,))
            sizes.append(size)

    def config(self, overlap: bool) -> Any:
        """Return a launch configuration that lacks only its grid and stream."""
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX = self._block
        config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes = self._shared_bytes
        attributes = [_overlap_attribute()] if overlap else []
        if self._cooperative:
            attributes.append(_cooperative_attribute())
        if self._cluster:
            attributes.append(_cluster_attribute(self._cluster))
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


class Kernel(Function):
    """A compiled kernel on one device, with a fixed block, cluster and amount of shared memory.

    ``source`` is CUDA C++ with an ``extern "C"`` kernel; ``block`` counts threads, ``cluster``
    blocks along x, and ``shared_bytes`` dynamic shared memory per block. With ``cooperative``, all
    blocks of a grid run at the same time, or none. Raises ``RuntimeError`` if the source does not
    compile, with the compiler's log, or CUDA fails.
    """

    def __init__(
        self,
        source: str,
        name: str,
        block: int,
        cluster: int,
        shared_bytes: int,
        device: torch.device,
        cooperative: bool = False,
    ) -> None:
        index = device.index
        super().__init__(None, block, cluster, shared_bytes, index, cooperative=cooperative)
        self.name, self._source = name, source
        self._lock = threading.RLock()
        kernels = compile_ahead.collected()
        if kernels is None:
            self.load()
        else:
            kernels.append(self.load)

    def load(self) -> None:
        """Compile the kernel and load it onto its device, unless that has been done."""
        with self._lock:
            if self.handle is None:
                self._load()

    def _load(self) -> None:
        with torch.cuda.device(self.device):
            _bind(self.device)
            major, minor = torch.cuda.get_device_capability(self.device)
            suffix = "a" if major >= 9 else ""
            image = nvrtc.cubin(self._source, f"sm_{major}{minor}{suffix}")
            module = checked(driver.cuModuleLoadData(image))
            function = checked(driver.cuModuleGetFunction(module, self.name.encode()))
            checked(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED, self._shared_bytes))
            # the largest for all: an SM drains before a kernel with another carveout starts on it
            checked(driver.cuFuncSetAttribute(function, _CARVEOUT, 100))
        self._configs = {overlap: self.config(overlap) for overlap in (False, True)}
        self.handle = function

    @functools.cached_property
    def _most_blocks(self) -> int:
        config = self.config(overlap=False)
        config.gridDimX = max(self._cluster, 1)
        with torch.cuda.device(self.device):
            clusters = checked(driver.cuOccupancyMaxActiveClusters(self.handle, config))
        return int(clusters) * max(self._cluster, 1)

    @property
    def most_blocks(self) -> int:
        """How many blocks can run at the same time, in whole clusters."""
        return self._most_blocks if self._runs() else max(self._cluster, 1)

    def _runs(self) -> bool:
        """Load the kernel and return true, unless this thread only collects kernels."""
        if compile_ahead.collected() is not None:
            return False
        if self.handle is None:  # it was made by a thread that still collects
            self.load()
        return True

    def launch(self, blocks: int, arguments: Sequence[Any], *, overlap: bool) -> None:
        """Launch on torch's current stream of the current device.

        ``blocks`` are a multiple of the cluster. Arguments are ``ctypes`` values and tensor maps,
        in the order of the kernel's parameters; a value that ``pointer`` made is an address, any
        other is a number. With ``overlap`` the kernel starts before the previous one of the stream
        has ended (programmatic dependent launch), and itself waits before it reads the previous
        one's results. Within ``compile_ahead.collecting`` nothing is launched.
        """
        if not self._runs():
            return
        stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        parameters = _parameters(arguments)
        config = self._configs[overlap]
        with self._lock:  # threads share the configuration
            config.gridDimX = blocks
            config.hStream = stream or _LEGACY_STREAM
            launch = (config, self.handle, ctypes.addressof(parameters), 0)
            status = driver.cuLaunchKernelEx(*launch)
            if status[0]:
                _launch_again(status, launch, self.device)
        if is_recording():
            record_launch(KernelLaunch(self, blocks, arguments, overlap))


class KernelLaunch:
    """A launch of a kernel that can be repeated with other addresses (see ``launch_recording``).

    The arguments and ``overlap`` are those of ``Kernel.launch``.
    """

    def __init__(
        self, kernel: Function, blocks: int, arguments: Sequence[Any], overlap: bool
    ) -> None:
        self._kernel, self._function = kernel, kernel.handle
        self._config = kernel.config(overlap)
        self._config.gridDimX = blocks
        self._stream, self._config.hStream = 0, _LEGACY_STREAM
        # copies, since ``move`` changes the values
        cells = {id(a): pointer_to(a.value) for a in arguments if _is_pointer(a)}
        self._arguments = [cells.get(id(a), a) for a in arguments]
        self._parameters = _parameters(self._arguments)
        self._address = ctypes.addressof(self._parameters)
        places: dict[int, list[int]] = {}  # a map that is passed twice is encoded once
        for i, argument in enumerate(self._arguments):
            if _is_pointer(argument) or isinstance(argument, TileMap):
                places.setdefault(id(argument), []).append(i)
        self._moving = list(places.values())
        self.addresses = [
            a.address if isinstance(a, TileMap) else a.value
            for a in (self._arguments[i] for i, *_ in self._moving)
        ]

    def move(self, position: int, address: int) -> None:
        """Pass another address from now on; ``position`` is an index into ``addresses``."""
        places = self._moving[position]
        argument = self._arguments[places[0]]
        if isinstance(argument, TileMap):
            argument = argument.make(address, *argument.shape)
            handle = argument.getPtr()
            for i in places:
                self._arguments[i], self._parameters[i] = argument, handle
        else:
            argument.value = address

    def start(self, stream: int) -> None:
        """Launch again, on a stream of the kernel's device, given by its handle."""
        if stream != self._stream:
            self._stream, self._config.hStream = stream, stream or _LEGACY_STREAM
        status = driver.cuLaunchKernelEx(self._config, self._function, self._address, 0)
        if status[0]:
            launch = (self._config, self._function, self._address, 0)
            _launch_again(status, launch, self._kernel.device)


def function_at(address: int) -> Any:
    """Return the ``CUfunction`` whose address another library holds."""
    return driver.CUfunction(address)


def _launch_again(status: Any, launch: tuple[Any, ...], device: int) -> None:
    if status[0] == _NO_CONTEXT:
        _bind(device)
        status = driver.cuLaunchKernelEx(*launch)
    checked(status)


def _bind(device: int) -> None:
    # a new thread has no current context: torch sets its own only when it launches something, not
    # when a device is selected or the current stream is queried
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))
    checked(driver.cuCtxSetCurrent(context))


@dataclass(frozen=True, slots=True)
class TileMap:
    """A matrix as the tensor memory accelerator (TMA) sees it.

    ``make(address, *shape)`` makes the same map for another address of the first byte; ``handle``
    is the ``CUtensorMap``.
    """

    address: int
    make: Callable[..., TileMap]
    shape: tuple[int, ...]
    handle: Any

    def getPtr(self) -> int:
        """Return the address of the ``CUtensorMap``, from which a launch copies the parameter."""
        return self.handle.getPtr()


@functools.lru_cache(maxsize=4096)
def byte_tile_map(
    address: int, rows: int, cols: int, pitch: int, tile_rows: int, tile_cols: int
) -> TileMap:
    """Describe a row-major byte matrix to the tensor memory accelerator, which loads or stores it.

    The map holds the address and the shape but no content, so caching it by address is safe
    whatever happens to the memory.

    Args:
        address: of the first byte, a multiple of 16.
        rows: rows of the matrix; reads beyond them give zeros, writes are dropped.
        cols: bytes per row, a multiple of 16; the same holds for reads and writes beyond them.
        pitch: bytes from row to row, a multiple of 16.
        tile_rows: rows of a tile, at most 256.
        tile_cols: bytes per row of a tile, a multiple of 16, at most 256. In shared memory, tiles
            with rows of 128 bytes have the 128-byte swizzle; all others are plain row-major.

    Returns:
        The map, to be passed to ``Kernel.launch``.
    """
    shape = (rows, cols, pitch, tile_rows, tile_cols)
    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    if tile_cols != 128:
        swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
    handle = _encoded(address, kind, (cols, rows), pitch, (tile_cols, tile_rows), swizzle)
    return TileMap(address, byte_tile_map, shape, handle)


@functools.lru_cache(maxsize=4096)
def float_row_map(address: int, rows: int, cols: int, pitch: int, tile_cols: int) -> TileMap:
    """Describe a row-major ``float32`` matrix of which a load takes part of one row.

    Reads beyond its rows and columns give zeros. The address is a multiple of 16 bytes, the pitch
    (values from row to row) a multiple of 4. One load takes ``tile_cols`` values, at most 256.
    """
    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
    handle = _encoded(address, kind, (cols, rows), 4 * pitch, (tile_cols, 1), swizzle)
    return TileMap(address, float_row_map, (rows, cols, pitch, tile_cols), handle)


def _encoded(
    address: int, kind: Any, shape: tuple[int, int], pitch: int, box: tuple[int, int], swizzle: Any
) -> Any:
    return checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [driver.cuuint64_t(extent) for extent in shape],
            [driver.cuuint64_t(pitch)],
            [driver.cuuint32_t(extent) for extent in box],
            [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def pointer(tensor: Tensor | None) -> ctypes.c_uint64:
    """Pass a tensor's address as a kernel argument; ``None`` is a null pointer."""
    return pointer_to(0 if tensor is None else tensor.data_ptr())


def pointer_to(address: int) -> ctypes.c_uint64:
    """Pass an address as a kernel argument."""
    return ctypes.c_uint64(address)


def _is_pointer(argument: Any) -> bool:
    return isinstance(argument, ctypes.c_uint64)


def _parameters(arguments: Sequence[Any]) -> Any:
    """Return the array of pointers to the arguments that the driver reads (``kernelParams``)."""
    addresses = [a.getPtr() if isinstance(a, TileMap) else ctypes.addressof(a) for a in arguments]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _overlap_attribute() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _cooperative_attribute() -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    return attribute


def _cluster_attribute(cluster: int) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cluster
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    return attribute
