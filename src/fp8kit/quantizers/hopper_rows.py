"""One scale per row, for few rows on Hopper: a cluster of blocks per row (``hopper_rows.cu``).

With few rows latency decides. In the Triton kernel, each program that shares a row reads all of it;
here the blocks send each other their maxima, so a row is read once, into registers, with at most
four 16-byte vectors per thread. Bit-equal to ``reference``.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from fp8kit.runtime import cuda_launch, nvrtc
except ImportError:  # without the extra ``cuda``
    cuda_launch = nvrtc = None  # type: ignore[assignment]

_KINDS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 8}
_THREADS, _MOST_THREADS, _MOST_BLOCKS, _MOST_VECTORS = 128, 512, 8, 4
_ALIGN = 16
_MOST_ROWS = 32  # beyond, one block per row spreads the work well enough
_SHORT = 512  # vectors: one block quantizes a row of at most so many as fast as a cluster
_MANY_ROWS, _LONG = 16, 3584  # with at least so many rows and vectors, a program per row is faster


class RowCut(NamedTuple):
    """How a row is spread: blocks (a power of two), their threads, 16-byte vectors per thread."""

    blocks: int
    threads: int
    vectors: int


def row_cut(m: int, vectors: int, processors: int) -> RowCut | None:
    """Spread rows of 16-byte vectors; ``None`` if a row is too long for the registers."""
    blocks, each = 2, 1  # the kernel addresses a peer's shared memory
    # half of the multiprocessors stay free for the next kernel, where two blocks per row allow it
    most = min(_MOST_BLOCKS, processors // (2 * m))
    while 2 * blocks <= most and vectors > 2 * blocks * _THREADS:
        blocks *= 2
    while each < _MOST_VECTORS and vectors > each * blocks * _THREADS:
        each *= 2
    threads = -(-vectors // (blocks * each * 32)) * 32
    return RowCut(blocks, threads, each) if threads <= _MOST_THREADS else None


def takes(x: Tensor, processors: int) -> bool:
    """Return whether ``x [M, K]`` has few and regular rows, and the kernel can be compiled here."""
    (m, k), size = x.shape, x.element_size()
    if x.dtype not in _KINDS or not x.is_cuda or k * size % _ALIGN or x.stride(1) != 1:
        return False
    if x.data_ptr() % _ALIGN or (m > 1 and x.stride(0) * size % _ALIGN):
        return False
    vectors = k * size // _ALIGN
    if m > _MOST_ROWS or vectors <= _SHORT or (m >= _MANY_ROWS and vectors >= _LONG):
        return False
    return row_cut(m, vectors, processors) is not None and _compiles(x.device)


def quantize_rows(
    x: Tensor, scale: Tensor, data: Tensor, min_scale: float, processors: int
) -> None:
    """Quantize ``x`` row by row into ``data`` and ``scale``.

    ``takes`` accepts ``x [M, K]``, ``scale`` is contiguous ``float32 [M]``, and ``data`` receives
    e4m3fn codes as ``uint8 [M, K]``; its columns are adjacent, and rows start at multiples of 8
    bytes (4 if ``x`` is fp32). ``min_scale`` is at least ``SAFE_SCALE``: quotients are exact.
    """
    m, k = x.shape
    vectors = k * x.element_size() // _ALIGN
    cut = row_cut(m, vectors, processors)
    assert cut is not None
    _kernel(_KINDS[x.dtype], cut, x.device.index).launch(
        m * cut.blocks,
        (
            cuda_launch.pointer(x),
            cuda_launch.pointer(scale),
            cuda_launch.pointer(data),
            ctypes.c_longlong(x.stride(0) * x.element_size()),
            ctypes.c_longlong(data.stride(0)),
            ctypes.c_int(vectors),
            ctypes.c_float(min_scale),
        ),
        overlap=True,
    )


@functools.cache
def _compiles(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return nvrtc is not None and nvrtc.missing() is None


@functools.cache
def _kernel(kind: int, cut: RowCut, device: int) -> Any:
    return cuda_launch.Kernel(
        source(kind, cut),
        "cluster_rows_kernel",
        block=cut.threads,
        cluster=cut.blocks,
        shared_bytes=0,  # many blocks fit on one multiprocessor, which leaves others to the product
        device=torch.device("cuda", device),
    )


def source(kind: int, cut: RowCut) -> str:
    """Write the CUDA source of one variant; ``kind`` is a value of ``_KINDS``."""
    constants = {
        "KIND": kind,
        "VECTORS": cut.vectors,
        "BLOCKS": cut.blocks,
        "THREADS": cut.threads,
    }
    return nvrtc.joined(constants, "quantizers/encode.cuh", "quantizers/hopper_rows.cu")
