"""Write a checkpoint directory: all of it or nothing, one tensor in memory at a time.

The layout (names, dtypes, shapes) is given first, so every file's header and size are known
before the first byte; tensors may then arrive in any order. Everything goes into a folder beside
the destination, is read back, made durable, and renamed in one step.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch import Tensor

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.storage import directory
from fp8kit.checkpoint.storage.directory import check_destination
from fp8kit.checkpoint.storage.layout import MAX_SHARD_BYTES, Layout, Shard, plan_shards
from fp8kit.errors import CheckpointError, as_path
from fp8kit.runtime.atomic_files import held


def write_checkpoint(
    destination: str | Path,
    layout: Layout,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: JsonObject,
    source: str | Path | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Write a checkpoint directory in one step.

    Parents of the destination are made. With ``overwrite`` a checkpoint there is replaced, and its
    old files are deleted last. ``tensors`` has each name of the layout once, in any order, on any
    device. The tokenizer and the like of a ``source`` directory are copied, except files that
    ``texts`` has. Returns the names of the files. Raises ``CheckpointError``, and leaves nothing
    behind, if the destination may not be replaced, is the source, or lacks space, a file to copy is
    a git-LFS pointer, or the result does not read back.
    """
    destination = Path(os.path.realpath(as_path(destination, "the destination")))
    origin = None if source is None else directory.resolved(source)
    check_destination(destination, origin, overwrite)
    directory.check_side_files(origin)
    shards = plan_shards(layout, max_shard_bytes)
    nothing = "Nothing is kept. Make room, and run it again, or choose another disk."
    with directory.disk_errors(destination, lambda: nothing), _staging(destination) as folder:
        directory.check_space(folder, sum(s.size for s in shards))
        for shard in shards:
            shard.begin(folder / shard.file)
        _fill(folder, shards, layout, tensors)
        names = directory.complete(folder, shards, layout, config, source=origin, texts=texts)
        # another process may have written the destination in the meantime
        check_destination(destination, origin, overwrite)
        directory.install(folder, destination)
    return names


def _fill(
    folder: Path, shards: Sequence[Shard], layout: Layout, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    places = {name: (shard.file, start) for shard in shards for name, start in shard.starts.items()}
    awaited = set(layout)
    for name, tensor in tensors:
        arrived = (tensor.dtype, tuple(tensor.shape))
        if name not in awaited or arrived != layout[name]:
            raise CheckpointError(
                f"Got {name}, {tensor.dtype} of shape {list(tensor.shape)}.",
                f"The layout has {layout.get(name, 'no tensor of this name')}, once.",
                "This is a bug in the caller: pass the tensors that were announced.",
            )
        awaited.remove(name)
        file, start = places[name]
        # one at a time: there may be more files than a process may hold open
        with (folder / file).open("r+b") as opened:
            opened.seek(start)
            opened.write(directory.bytes_of(tensor))
    if awaited:
        raise CheckpointError(
            f"The stream ended without {', '.join(sorted(awaited)[:5])}.",
            f"The layout has {len(layout)} tensors.",
            "This is a bug in the caller: pass the tensors that were announced.",
        )


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    """Make a folder beside the destination; whatever happens, it is not there afterwards.

    A process that was killed leaves its folder to the next one, which removes it: the folder is
    locked as long as its process lives.
    """
    made = [p for p in destination.parents if not p.exists()]
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(destination)
    with ExitStack() as stack:
        while True:
            folder = directory.staging_folder(destination, uuid.uuid4().hex[:8])
            folder.mkdir()
            stack.enter_context(held(folder, wait=True))
            if folder.is_dir():
                break  # else another process removed it as abandoned before the lock was held
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made:
                with suppress(OSError):
                    parent.rmdir()
            raise


def _remove_abandoned(destination: Path) -> None:
    """Remove the folders beside a destination whose processes are gone."""
    mine = re.compile(re.escape(f".{destination.name}.") + r"[0-9a-f]{8}\.tmp")
    for entry in os.scandir(destination.parent):
        if mine.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with held(Path(entry.path)) as abandoned:
                if abandoned:
                    shutil.rmtree(entry.path, ignore_errors=True)
