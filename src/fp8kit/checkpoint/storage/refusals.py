"""Errors for files that are no readable checkpoint: what they are, and how to get one."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Sequence
from os.path import lexists
from pathlib import Path

from fp8kit.errors import CheckpointError, as_path, some_of, teach

# endings of files that hold weights in another form: what that is, what is read, what to do
_OTHERS = {
    ".gguf": (
        "GGUF, the format of llama.cpp, which is quantized already.",
        "Weights are read from safetensors.",
        "Start from the model it was made of, in bf16 and safetensors.",
    ),
    ".distcp": (
        "a part of what torch.distributed.checkpoint writes, also for Megatron and NeMo.",
        "Weights are read from safetensors.",
        "Export it with the library that wrote it, or fill the model by "
        "torch.distributed.checkpoint.load and convert it.",
    ),
    **dict.fromkeys(
        (".bin", ".pt", ".pth", ".ckpt", ".pkl"),
        (
            "a pickle.",
            "Weights are read from safetensors, never from pickle files, which run code.",
            "Download the model's safetensors files, or load it where you trust it and save it "
            "with save_pretrained.",
        ),
    ),
}
_OF_PROCESS = re.compile(r"shard-(\d{5})-.+\.safetensors")
_OF_RANK = re.compile(r"model-rank-\d+-part-\d+\.safetensors")
_OF_DEEPSEEK = re.compile(r"model\d+-mp(\d+)\.safetensors")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
# owner/name, as hubs write it, or a name without a dot; what begins with .. or a slash is meant
# as a path, and Path leaves one slash where an address has two
_HUB_ID = re.compile(
    r"(?:(?:hf:|https?:/+(?:www\.)?huggingface\.co)/+)?"
    r"(?P<model>[a-z0-9][\w.-]*/(?P<name>[a-z0-9][\w.-]*)|[a-z0-9][\w-]*)"
    r"(?:(?:@|/(?:tree|blob|resolve)/)(?P<revision>refs/pr/\d+|[\w.-]+)(?:/.*)?)?",
    re.ASCII | re.IGNORECASE,
)
_A_CHECKPOINT = "A checkpoint is a directory with safetensors files, or one such file."


def check_source(path: str | Path) -> None:
    """Raise ``CheckpointError`` unless a path is a readable directory or a safetensors file.

    ``path`` is as the caller wrote it, because only so is a hub id recognized.
    """
    place = as_path(path, "a checkpoint")
    check_name(place)
    try:
        if place.is_dir():
            os.scandir(place).close()
        elif not place.is_file():
            raise _absent(place)
        elif place.suffix != ".safetensors":
            raise _other_file(place)
        elif _OF_PROCESS.fullmatch(place.name) and (split := _split(place.parent)):
            raise split
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be opened: {error.strerror}.",
            "This process needs to read it.",
            "Look at the permissions of it and of the folders above it (ls -ld).",
        ) from error


def check_name(path: Path) -> None:
    """Refuse a path that the safetensors library cannot open, or that leads nowhere.

    Such a path is not UTF-8, is too long, or goes through a link that leads to itself.
    """
    try:
        os.path.realpath(path).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"The path {str(path)!a} is not UTF-8.",
            "The safetensors library opens only paths that are.",
            "Rename the folder.",
        ) from error
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise CheckpointError(
                f"The path {str(path)!r:.80}... is too long.",
                "Most systems take 255 bytes for a name and 4096 for a path; what is made beside "
                "a destination has a name longer by 14.",
                "Choose a shorter one.",
            ) from error
        if error.errno == errno.ELOOP:
            link = next((p for p in (path, *path.parents) if p.is_symlink()), path)
            raise CheckpointError(
                f"{link} is a link that leads to itself.",
                "A path leads to a folder or a file.",
                "Remove the link, or pass another path.",
            ) from error


def no_weights(folder: Path) -> CheckpointError:
    """Return the error that says what a directory holds instead of the files of one model."""
    files = sorted(p.name for p in folder.iterdir() if p.is_file() or p.is_symlink())
    shards = [n for n in files if n.endswith(".safetensors")]
    if shards:
        ranks = of_ranks(shards)
        return CheckpointError(ranks[0]) if ranks else _split(folder) or _several(folder, shards)
    inner = sorted(
        {p.parent for n in ("*", "snapshots/*") for p in folder.glob(f"{n}/*.safetensors")}
    )
    if inner:
        return CheckpointError(
            f"{folder} holds no safetensors files itself; "
            f"{some_of([str(p.relative_to(folder)) for p in inner], most=3)} inside it does.",
            "A checkpoint is one model; a pipeline of several is converted model by model.",
            f"Pass one of its folders, such as {inner[0]}.",
        )
    for name in files:
        if other := _of_another_form(name, f"{folder} holds no safetensors files, only {name}"):
            return other
    empty = "" if any(folder.iterdir()) else ": it is empty"
    return CheckpointError(
        f"{folder} holds no safetensors files{empty}.",
        _A_CHECKPOINT,
        "Check the path, or complete the download.",
    )


def of_ranks(shards: Sequence[str]) -> list[str]:
    """Describe the first file, by its name, that holds what one process of an engine computes with.

    Without a model nothing else tells: weights are transposed or sliced, and fit their scales.
    """
    for name in shards:
        if _OF_RANK.fullmatch(name):
            return [
                teach(
                    f"{name} is named as what one process of vLLM or SGLang saves (sharded_state).",
                    "Its layers are merged and sliced, and lie as kernels read them, often [K, N].",
                    "Start from the checkpoint that the engine had loaded.",
                )
            ]
        parts = _OF_DEEPSEEK.fullmatch(name)
        if parts and int(parts[1]) > 1:
            return [
                teach(
                    f"{name} is named as one of {parts[1]} parts by DeepSeek's convert.py.",
                    "A file of a checkpoint has whole tensors; these have some rows or columns.",
                    "Start from the checkpoint that it converted, or give it --model-parallel 1.",
                )
            ]
    return []


def pointer(file: str, start: bytes) -> CheckpointError | None:
    """Return the error for a pointer that git-LFS left in the place of a file, else ``None``."""
    if not start.startswith(b"version https://git-lfs"):
        return None
    return CheckpointError(
        f"{file} is a git-LFS pointer, a few lines of text in the place of the file.",
        "The repository was cloned without its large files.",
        "Get them with git lfs pull in that directory (git lfs install comes first).",
    )


def _absent(place: Path) -> CheckpointError:
    text = str(place)
    if place.exists():
        what = f"{text} exists, and is no regular file and no directory."
        return CheckpointError(what, _A_CHECKPOINT, "Check the path.")
    if place.is_symlink():
        what = f"{text} is a link to {os.readlink(place)}, which does not exist."
        return CheckpointError(what, _A_CHECKPOINT, "Complete the download or the copy.")
    remedy = "Check the path; a model from a hub is downloaded first."
    if text.startswith("~"):
        remedy = f"Only a shell replaces ~, and not in quotes: pass {place.expanduser()}."
    elif (hub := _HUB_ID.fullmatch(text)) and not lexists(place.parts[0]):
        revision = f" --revision {hub['revision']}" if hub["revision"] else ""
        remedy = (
            "Check the path. If this is a model on a hub, download it and pass that folder: "
            f"hf download {hub['model']}{revision} --local-dir {hub['name'] or hub['model']}"
        )
    return CheckpointError(f"There is no directory {text}.", _A_CHECKPOINT, remedy)


def _other_file(place: Path) -> CheckpointError:
    if other := _of_another_form(place.name, f"{place} is a file"):
        return other
    beside = any(place.parent.glob("*.safetensors"))
    folder = shlex.quote(str(place.parent))
    remedy = f"Pass its directory: {folder}" if beside else "Check the path"
    return CheckpointError(
        f"{place} is a file, and no safetensors file.", _A_CHECKPOINT, f"{remedy}."
    )


def _of_another_form(name: str, what: str) -> CheckpointError | None:
    form, *rest = _OTHERS.get(Path(name).suffix.lower(), ("",))
    return CheckpointError(f"{what}: that is {form}", *rest) if form else None


def _split(folder: Path) -> CheckpointError | None:
    """Return the error for files in which each process wrote its own rows of all tensors."""
    names = (_OF_PROCESS.fullmatch(p.name) for p in folder.glob("shard-*"))
    processes = {m[1] for m in names if m is not None}
    if len(processes) < 2:
        return None
    return CheckpointError(
        f"{folder} holds what {len(processes)} processes wrote by torch.distributed.checkpoint.",
        "A file of a checkpoint has whole tensors; these have some rows of each.",
        "Save with HuggingFaceStorageWriter(..., enable_consolidation=True), or load them by "
        "HuggingFaceStorageReader.",
    )


def _several(folder: Path, shards: Sequence[str]) -> CheckpointError:
    stems = {m[1] for m in map(_SHARD.fullmatch, shards) if m is not None}
    index = f"{min(stems, default='model')}.safetensors.index.json"
    count = len(shards)
    return CheckpointError(
        f"{folder} holds {count} safetensors files ({some_of(shards, most=3)}) and no {index}.",
        "The index says which of them are the model, and which tensor is in which.",
        "Download the index too, or pass the one file that is meant."
        if stems
        else "Pass the one file that is meant.",
    )


def unwritable(error: OSError, place: Path) -> CheckpointError | None:
    """Return the error for a place that may not be written, if an ``OSError`` means that."""
    ours = _belongs_to(place, error.filename)
    refusing = (errno.EACCES, errno.EPERM, errno.EROFS)
    # /proc reports a folder that it refuses to make as absent (ENOENT)
    if error.errno not in (*refusing, errno.ENOENT) or (error.errno == errno.ENOENT and not ours):
        return None
    return CheckpointError(
        f"{place if ours else error.filename} cannot be written: {error.strerror}.",
        "A checkpoint is made beside its destination, and renamed when it is complete.",
        f"Choose a folder that you may write to, or look at the permissions of {place.parent}.",
    )


def _belongs_to(place: Path, name: object) -> bool:
    """Return whether a file is a place, above or in it, or in a working folder beside it."""
    if not isinstance(name, str):
        return True
    path = Path(name)
    if path in (place, *place.parents):
        return True
    if place.parent not in path.parents:
        return False
    first = path.relative_to(place.parent).parts[0]
    return first == place.name or first.startswith(f".{place.name}.")
