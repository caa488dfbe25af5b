"""The files beside a checkpoint's tensors, and the rename that makes a finished folder appear."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from fp8kit.checkpoint.dialects import JsonObject
from fp8kit.checkpoint.storage.layout import Layout, Shard, index_of
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.checkpoint.storage.refusals import check_name, pointer, unwritable
from fp8kit.errors import CheckpointError, as_path, check_switch

# what a model needs beside its weights and config.json, copied from its source directory
SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*vocab*",
    "merges*",
    "bpe.codes",
    "dict.txt",
    "emoji.json",
    "byte_maps.json",
    "word_*.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.spm",
    "normalizer.json",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "audio_tokenizer_config.json",
    "spk_dict.pt",  # the voices of Qwen2.5-Omni
    # of sentence-transformers: without them engines pool and normalize embeddings otherwise
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[1-9]_*/*",  # 1_Pooling, 2_Dense
    "*.py",
    "LICENSE*",
    "NOTICE*",
)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def resolved(source: str | Path) -> Path:
    """Return the path of a source without symbolic links; a lone file keeps its name.

    In a hub cache, a file is a link to a blob whose name does not say what it is.
    """
    path = as_path(source, "a checkpoint")
    if path.is_file():
        return Path(os.path.realpath(path.parent)) / path.name
    return Path(os.path.realpath(path))


def staging_folder(destination: Path, mark: str) -> Path:
    """Name the folder for a checkpoint until it is complete; ``mark`` is 8 hex digits."""
    return destination.parent / f".{destination.name}.{mark}.tmp"


def check_destination(destination: Path, source: Path | None, overwrite: bool) -> None:
    """Refuse a destination that cannot be made or replaced, before any work is done.

    Raises ``CheckpointError`` if the destination is or lies inside a file, is or holds the source
    or a file that the source links to, lies inside the source, is or holds the working directory,
    or is not empty and not replaceable.
    """
    check_switch("overwrite", overwrite)
    check_name(destination)
    check_name(staging_folder(destination, "00000000"))
    where = ""
    if source is not None and any(destination in (p, *p.parents) for p in _places(source)):
        where = "is or holds"
    elif source is not None and source in destination.parents:
        where = "lies inside"
    if where:
        raise CheckpointError(
            f"The destination {destination} {where} the source {source}.",
            "The source is never written to.",
            "Save into another directory.",
        )
    above = next((p for p in (destination, *destination.parents) if p.exists()), None)
    if above is not None and not above.is_dir():
        inside = "" if above == destination else f" lies inside {above}, which"
        raise CheckpointError(
            f"The destination {destination}{inside} is a file.",
            "A checkpoint is a directory.",
            "Choose another path.",
        )
    if _holds_working_directory(destination):
        raise CheckpointError(
            f"The destination {destination} is or holds the working directory.",
            "A checkpoint appears by a rename, after which this process and the shell that started "
            "it would stand in a directory that is gone.",
            "Run this from another directory, or choose a path below this one.",
        )
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"The destination {destination} exists and is not empty.",
            "An existing directory is not replaced by default.",
            "Choose another path, or pass overwrite=True.",
        )
    if not (destination / "config.json").exists() and not any(destination.glob("*.safetensors")):
        raise CheckpointError(
            f"The destination {destination} holds neither config.json nor safetensors files.",
            "overwrite=True replaces a whole directory, and only if it is a checkpoint.",
            "Choose another path, or empty the directory yourself.",
        )


def _holds_working_directory(destination: Path) -> bool:
    with suppress(FileNotFoundError):  # the working directory is gone
        return destination in (Path.cwd(), *Path.cwd().parents)
    return False


def check_side_files(source: Path | None) -> None:
    """Refuse a source whose tokenizer or the like is a git-LFS pointer, before any work is done."""
    if pointers := side_pointers(source):
        raise CheckpointError("\n".join(pointers))


def side_pointers(source: Path | None) -> list[str]:
    """Describe the files beside the weights that are git-LFS pointers."""
    found = []
    for name, file in _side_files(source).items():
        with suppress(OSError), file.open("rb") as opened:  # copying it will report that
            found.append(pointer(name, opened.read(64)))
    return [str(error) for error in found if error is not None]


def _side_files(source: Path | None) -> dict[str, Path]:
    if source is None or not source.is_dir():
        return {}
    found = (f for p in SIDE_FILES for f in sorted(source.glob(p)) if f.is_file())
    return {str(f.relative_to(source)): f for f in found}


def _places(source: Path) -> list[Path]:
    """Return a source, and the real paths of it and its files."""
    files = [p for p in source.iterdir() if p.is_file()] if source.is_dir() else []
    return [source, *(Path(os.path.realpath(p)) for p in (source, *files))]


def check_space(folder: Path, wanted: int) -> None:
    """Refuse a folder whose disk has fewer bytes free than are wanted."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise CheckpointError(
            f"{folder.parent} has {size(free)} free.",
            f"The checkpoint needs {size(wanted)}.",
            "Make room, or choose another disk.",
        )


def size(count: int) -> str:
    """Write a number of bytes for people: ``4.97 GB``."""
    from tqdm import tqdm  # imported here: it takes a tenth of this package's import

    text = tqdm.format_sizeof(count)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{count} bytes"


@contextmanager
def disk_errors(place: Path, kept: Callable[[], str]) -> Iterator[None]:
    """Raise a ``CheckpointError`` for a full disk, and for one that may not be written.

    ``kept`` gives a sentence that says what is kept when a disk is full, and what to do.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise CheckpointError(
                f"There is no room to write {error.filename or place}: {error.strerror}. {kept()}"
            ) from error
        refused = unwritable(error, place)
        if refused is None:
            raise
        raise refused from error


def complete(
    folder: Path,
    shards: Sequence[Shard],
    layout: Layout,
    config: JsonObject,
    *,
    source: Path | None = None,
    texts: Mapping[str, str] | None = None,
) -> list[str]:
    """Add everything that is not a shard, read the result back, and make it durable.

    The tokenizer and the like of a ``source`` directory are copied, except files that are in
    ``texts``; a lone source file says nothing about the files beside it. Returns the names of all
    files. Raises ``CheckpointError`` if the result does not read back.
    """
    if len(shards) > 1:
        stem = shards[0].file.partition("-")[0]
        write_json(folder / f"{stem}.safetensors.index.json", index_of(shards, layout))
    write_json(folder / "config.json", config)
    for name, text in (texts or {}).items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, file in _side_files(source).items():
        copy = folder / name
        if not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            _copy(file, copy)
    problems = open_checkpoint(folder).scale_problems()
    if problems:
        raise CheckpointError("\n".join(problems))
    for entry in (*folder.rglob("*"), folder):
        sync(entry)
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _copy(file: Path, copy: Path) -> None:
    """Copy a file; an error of the system names the copy, of what cannot be read the file."""
    try:
        shutil.copyfile(file, copy)
    except OSError as error:
        of_source = error.filename == os.fspath(file) and error.filename2 is None
        if of_source and error.errno not in _FULL:
            raise CheckpointError(
                f"{file} cannot be opened: {error.strerror}.",
                "It is copied to where the weights are written.",
                "Look at its permissions (ls -lL), or move it out of the source.",
            ) from error
        raise OSError(error.errno, error.strerror, os.fspath(copy)) from error


def write_json(file: Path, content: JsonObject) -> None:
    """Write a JSON object, the same bytes for the same content."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a writable view of a tensor's bytes; on the CPU, if contiguous, of its own memory."""
    # torch may hold a conjugate or negative as a flag on the bytes of another tensor
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().view(-1)
    if not flat.numel():
        return memoryview(b"")
    raw = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    raw._tensor = flat  # type: ignore[attr-defined]  # keeps the memory while the view lives
    return memoryview(raw)


def install(folder: Path, destination: Path) -> None:
    """Replace the destination by a finished folder, in one step where possible.

    Both are on one file system. Old files are deleted last, here or by a later process, to which
    they look like those of a killed process.
    """
    if not destination.exists() or not any(destination.iterdir()):
        folder.rename(destination)
    elif exchange(folder, destination):
        shutil.rmtree(folder, ignore_errors=True)  # now the old files
    else:
        aside = folder.with_name(f"{folder.name}.old")
        destination.rename(aside)
        try:
            folder.rename(destination)
        except BaseException:
            aside.rename(destination)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    sync(destination.parent)


def exchange(a: Path, b: Path) -> bool:
    """Swap two directories in one step where the system can; return whether it did."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    old, new = os.fsencode(a), os.fsencode(b)
    return bool(swap(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE) == 0)


def sync(path: Path) -> None:
    """Make a file or a directory survive a loss of power."""
    if os.name == "nt" and path.is_dir():  # directories cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
