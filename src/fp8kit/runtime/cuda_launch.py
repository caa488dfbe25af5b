"""Launch compiled kernels through NVIDIA's own bindings of the driver, and launch them again.

Needs ``cuda-bindings`` from PyPI (the extra ``cuda``). ``Kernel`` is compiled by ``nvrtc``; a
``Function`` may come from any compiler.
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

# torch's stream 0 by its own handle: the bindings can be told that 0 is the thread's stream
_LEGACY_STREAM = int(driver.CU_STREAM_LEGACY)
_NO_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
_ATTRIBUTE = driver.CUlaunchAttributeID
_DYNAMIC_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


class Function:
    """A function on one device, with a fixed block, cluster and amount of shared memory.

    ``handle`` is the ``CUfunction``, ``cluster`` 0 if it was not compiled for clusters, and
    ``shared_bytes`` per block are what it has been allowed. ``owner`` unloads the function when it
    goes, if anything does. If it is ``cooperative``, all blocks of a grid run at the same time, or
    none.
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
        """Return the sizes of its parameters, in order."""
        sizes: list[int] = []
        while True:
            status, _, size = driver.cuFuncGetParamInfo(self.handle, len(sizes))
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                return sizes
            checked((status,))
            sizes.append(size)

    def config(self, overlap: bool) -> Any:
        """Return what a launch is configured with, but for the grid and the stream."""
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
    blocks along x, and ``shared_bytes`` dynamic memory per block. If it is ``cooperative``, all
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
        """Compile it and load it onto its device, unless that is done."""
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
            # an SM with another size of shared memory must run empty before the next kernel starts
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
        """Return whether launches are wanted of this thread; then it is loaded."""
        if compile_ahead.collected() is not None:
            return False
        if self.handle is None:  # another thread notes kernels
            self.load()
        return True

    def launch(self, blocks: int, arguments: Sequence[Any], *, overlap: bool) -> None:
        """Launch on torch's current stream of the current device.

        ``blocks`` are a multiple of the cluster. Arguments are ``ctypes`` values and tensor maps,
        in the order of the kernel's parameters; a value that ``pointer`` made is an address, any
        other is a number. With ``overlap`` it starts before the previous kernel of the stream has
        ended (programmatic dependent launch); the kernel itself waits before it reads that kernel's
        results. Within ``compile_ahead.collecting`` nothing is launched.
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

    The arguments and ``overlap`` are as of ``Kernel.launch``.
    """

    def __init__(
        self, kernel: Function, blocks: int, arguments: Sequence[Any], overlap: bool
    ) -> None:
        self._kernel, self._function = kernel, kernel.handle
        self._config = kernel.config(overlap)
        self._config.gridDimX = blocks
        self._stream, self._config.hStream = 0, _LEGACY_STREAM
        # cells of its own: the values in them change
        cells = {id(a): pointer_to(a.value) for a in arguments if _is_pointer(a)}
        self._arguments = [cells.get(id(a), a) for a in arguments]
        self._parameters = _parameters(self._arguments)
        self._address = ctypes.addressof(self._parameters)
        places: dict[int, list[int]] = {}  # a map that is passed twice is made once
        for i, argument in enumerate(self._arguments):
            if _is_pointer(argument) or isinstance(argument, TileMap):
                places.setdefault(id(argument), []).append(i)
        self._moving = list(places.values())
        self.addresses = [
            a.address if isinstance(a, TileMap) else a.value
            for a in (self._arguments[i] for i, *_ in self._moving)
        ]

    def move(self, position: int, address: int) -> None:
        """Pass another address from now on; ``position`` counts in ``addresses``."""
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
    """Return the ``CUfunction`` that another library holds by its address."""
    return driver.CUfunction(address)


def _launch_again(status: Any, launch: tuple[Any, ...], device: int) -> None:
    if status[0] == _NO_CONTEXT:
        _bind(device)
        status = driver.cuLaunchKernelEx(*launch)
    checked(status)


def _bind(device: int) -> None:
    # a thread that has just begun has no context: torch makes its own current in what it launches
    # itself, and neither when a device is chosen nor when a stream is asked for
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device))))
    checked(driver.cuCtxSetCurrent(context))


@dataclass(frozen=True, slots=True)
class TileMap:
    """A matrix as the tensor memory accelerator sees it.

    ``make`` makes such a map from the address of the first byte and ``shape``, its other arguments;
    ``handle`` is the ``CUtensorMap``.
    """

    address: int
    make: Callable[..., TileMap]
    shape: tuple[int, ...]
    handle: Any

    def getPtr(self) -> int:
        """Return the address of the ``CUtensorMap``, which is what a kernel's parameter copies."""
        return self.handle.getPtr()


@functools.lru_cache(maxsize=4096)
def byte_tile_map(
    address: int, rows: int, cols: int, pitch: int, tile_rows: int, tile_cols: int
) -> TileMap:
    """Describe a row-major byte matrix to the tensor memory accelerator, which loads or stores it.

    The map holds the address and the shape, nothing of the content, so caching it by address is
    safe whatever happens to the memory.

    Args:
        address: of the first byte, a multiple of 16.
        rows: rows of the matrix; reads beyond them give zeros, writes are left out.
        cols: bytes per row, a multiple of 16; beyond them likewise.
        pitch: bytes from row to row, a multiple of 16.
        tile_rows: rows that move together, at most 256.
        tile_cols: bytes of each, a multiple of 16, at most 256. In shared memory, rows of 128 are
            in the 128-byte swizzle, others one after the other.

    Returns:
        What to pass to ``Kernel.launch``.
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
    """Describe a row-major ``float32`` matrix that is loaded in parts of one row.

    Reads beyond its rows and columns give zeros. The address is a multiple of 16 bytes, the pitch
    (values from row to row) of 4; one load takes ``tile_cols`` values, at most 256.
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
    """Return the array of addresses of arguments that the driver reads."""
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
