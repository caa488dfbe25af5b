"""Run a work plan: slices go from the source through a quantizer into new files.

Memory holds one slice per worker. A file gets its final name when all of it is on disk, so a file
with that name is complete, even after a crash.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fp8kit import functional
from fp8kit.checkpoint.loading.merged_weights import quantized
from fp8kit.checkpoint.schema.decoding import cast_numbers
from fp8kit.checkpoint.storage.directory import bytes_of, sync
from fp8kit.checkpoint.storage.layout import Shard
from fp8kit.checkpoint.storage.matrices import MatrixFile
from fp8kit.checkpoint.streaming.work_plan import Item, Slice, Work
from fp8kit.formats import TENSOR

PART = ".part"


def write_shards(
    work: Work,
    indices: Sequence[int],
    source: Path,
    folder: Path,
    progress: Callable[[int], object],
    devices: Sequence[torch.device],
) -> None:
    """Write the files ``indices`` of a plan; all workers take slices from one queue.

    A file under its final name is complete. Each entry of ``devices`` stands for a worker thread;
    a device may appear repeatedly. ``progress`` is called with the bytes of the source that were
    done since the last call. Raises ``ConversionError`` if a weight holds NaN or infinities, and
    ``CheckpointError`` if the disk is full, or the source changed. Complete files stay.
    """
    queue = _Queue(work, indices, folder, progress)
    threads = torch.get_num_threads()
    try:
        # wait for the futures, not for the threads: until Python 3.13 a thread counts as ended once
        # its join was interrupted, and a thread that still runs at exit aborts the process
        with ThreadPoolExecutor(len(devices)) as pool:
            try:
                wait([pool.submit(_serve, queue, source, device) for device in devices])
            finally:
                queue.stop()
    finally:
        queue.clean()
        torch.set_num_threads(threads)
    if queue.error is not None:
        raise queue.error


def is_whole(folder: Path, shard: Shard) -> bool:
    """Return whether a planned file is complete: of its size, and with its header."""
    file = folder / shard.file
    if file.is_symlink() or not file.is_file() or file.stat().st_size != shard.size:
        return False
    with file.open("rb") as f:
        return f.read(len(shard.header)) == shard.header


class _PartialFile:
    """A file that is being written, under a temporary name until no slice is missing."""

    def __init__(self, folder: Path, shard: Shard, slices: int) -> None:
        self.shard, self.missing, self.target = shard, slices, folder / shard.file
        # a random name: a worker believed to be lost must not write into its successor's file
        self.path = folder / f".{shard.file}.{uuid.uuid4().hex[:8]}{PART}"
        shard.begin(self.path)

    def finish(self) -> None:
        sync(self.path)
        self.path.replace(self.target)
        sync(self.target.parent)


class _Queue:
    """Hands out slices in order, and gives each file its final name after its last slice."""

    def __init__(
        self, work: Work, indices: Sequence[int], folder: Path, progress: Callable[[int], object]
    ) -> None:
        self.work = work
        self.error: BaseException | None = None
        self._folder, self._progress = folder, progress
        self._lock = threading.Lock()
        self._parts: set[_PartialFile] = set()
        self._pending = self._all(indices)

    def _all(self, indices: Sequence[int]) -> Iterator[tuple[_PartialFile, Slice]]:
        for index in indices:
            slices = list(self.work.slices(index))
            part = _PartialFile(self._folder, self.work.shards[index], len(slices))
            self._parts.add(part)
            if not slices:
                part.finish()
            for piece in slices:
                yield part, piece

    def next(self) -> tuple[_PartialFile, Slice] | None:
        with self._lock:
            return None if self.error is not None else next(self._pending, None)

    def done(self, part: _PartialFile, piece: Slice) -> None:
        with self._lock:
            part.missing -= 1
            last = part.missing == 0
            self._progress(piece.nbytes)
        if last and self.error is None:
            part.finish()

    def stop(self, error: BaseException | None = None) -> None:
        with self._lock:
            self.error = self.error or error
            self._pending = iter(())

    def clean(self) -> None:
        for part in self._parts:
            part.path.unlink(missing_ok=True)


def _serve(queue: _Queue, source: Path, device: torch.device) -> None:
    """Process slices of the queue until there are none: the body of a worker thread."""
    torch.set_num_threads(1)  # slices are the unit of parallelism
    reader, writer = MatrixFile(source), _Writer()
    try:
        while (found := queue.next()) is not None:
            part, piece = found
            writer.switch(part)
            if piece.item.scale:
                _quantize(queue.work, piece, reader, writer, device)
            else:
                name, matrix = piece.item.name, piece.item.matrix
                rows = reader.rows(matrix, piece.first, piece.last)
                rows = cast_numbers(name, rows, piece.item.dtype)
                writer.write(name, piece.first * rows.shape[1], rows)
            queue.done(part, piece)
    except BaseException as error:
        queue.stop(error)
    finally:
        reader.close()
        writer.close()


class _Writer:
    """Writes tensors to their places in the current file."""

    def __init__(self) -> None:
        self._part: _PartialFile | None = None
        self._file: IO[bytes] | None = None

    def switch(self, part: _PartialFile) -> None:
        if part is not self._part:
            self.close()
            self._part, self._file = part, part.path.open("r+b", buffering=0)

    def write(self, name: str, first: int, tensor: Tensor) -> None:
        """Write elements of the tensor ``name``, starting at its element ``first``."""
        assert self._part is not None
        assert self._file is not None
        view, done = bytes_of(tensor), 0
        self._file.seek(self._part.shard.starts[name] + first * tensor.element_size())
        try:
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            error.filename = str(self._part.target)
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _quantize(
    work: Work, piece: Slice, reader: MatrixFile, writer: _Writer, device: torch.device
) -> None:
    item, group = piece.item, work.scheme.weight
    if group == TENSOR:
        _quantize_whole(work, item, reader, writer, device)
        return
    rows = reader.rows(item.matrix, piece.first, piece.last).to(device)
    q = quantized(rows, work.scheme, item.name)
    scale = q.scale.cpu()
    writer.write(item.name, piece.first * rows.shape[1], q.data.cpu())
    writer.write(item.scale, piece.first // group.rows * scale.shape[1], scale)


def _quantize_whole(
    work: Work, item: Item, reader: MatrixFile, writer: _Writer, device: torch.device
) -> None:
    """Quantize a weight with one scale in two passes: one for the maximum, one for the codes."""
    matrix, scheme = item.matrix, work.scheme
    slices = list(matrix.slices())
    # floats, not tensors: small tensors that stay would fragment the memory that slices free
    peaks = [float(reader.rows(matrix, *ends).to(device).abs().amax()) for ends in slices]
    # the scale depends on the largest element alone
    scale = quantized(torch.tensor(peaks).amax().reshape(1, 1), scheme, item.name).scale
    for first, last in slices:
        rows = reader.rows(matrix, first, last).to(device)
        q = functional.quantize(rows, TENSOR, dtype=scheme.dtype, scale=scale.to(device))
        writer.write(item.name, first * matrix.cols, q.data.cpu())
    writer.write(item.scale, 0, scale)
