"""Mutate checkpoint files and check how reading them ends; a script, so that memory is limited.

    python tests/fuzzing.py CASES [FIRST]

Each case depends only on its number, so ``replay(number, folder)`` repeats it. A case passes if the
checkpoint is read, or refused with a ``CheckpointError`` that names the file and the field, within
a time and a memory limit, and nothing outside its directory is opened or inside it is changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import fp8kit
from fp8kit.checkpoint.inspection import inspect
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.errors import CheckpointError
from golden.layout import compressed

SECONDS = 5.0  # of processor time; the test has its own limit for a read that waits without end
FITTING = 6  # the first of ``samples``, whose layers are those of ``Net``
EXTRA_MEMORY = 2**30  # address space on top of what the process has before the first case
LONGEST_MESSAGE = 20_000
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MODELOPT = "hf_quant_config.json"
GOLDEN = Path(__file__).parent / "golden"
OUTSIDE = "secret.safetensors"
E4 = torch.float8_e4m3fn

NUMBERS = (0, 1, -1, 3, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0.5, -0.0, 1e308, float("nan"), float("inf"), *NUMBERS),
    *(
        "",
        "x",
        "\x00",
        "\x1b[2J",
        "\ud800",
        "a" * 5000,
        "../" + OUTSIDE,
        "/etc/passwd",
        "re:(",
        "e",
    ),
    *("F8_E4M3", "F8_E8M0", "BF16", "F32", "U8", "I64", "F4", "fp8", "modelopt", "torchao"),
    *([], {}, [[]], [{}], [None], {"a": {}}, [-1], [0], [2**62, 4], [0, 2**63], [1] * 70),
    *([2**32] * 2, [2**21] * 3, [10**30] * 3, ["*"], [True, True], [128, 128], [0, 0]),
)
SHARDS = (
    *("../" + OUTSIDE, "/etc/passwd", "a/../b.safetensors", "a\\b.safetensors", "C:x.safetensors"),
    *(
        "",
        ".",
        "..",
        ".safetensors",
        "model\x00.safetensors",
        "\ud800.safetensors",
        CONFIG,
        3,
        None,
    ),
    *("x" * 5000 + ".safetensors", "none.safetensors", ["model.safetensors"], "~/x.safetensors"),
)


class Net(nn.Module):
    """The model of the samples, except the golden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 8)
        self.down = nn.Linear(8, 12, bias=False)
        self.head = nn.Linear(12, 6, bias=False)


# an earlier mutation may have destroyed the structure that a later one changes
NOT_A_TREE = (ValueError, RecursionError, KeyError, TypeError, IndexError, AttributeError)
Files = dict[str, bytes]


@dataclass(slots=True)
class Case:
    """A mutated checkpoint, before it is written to disk.

    Args:
        files: content by name.
        specials: by file name, what is made in its place: a directory, a pipe, a link.
        touched: words of which a refusal must name one; empty if it must only name some file.
        layers: names of the layers before the mutation: tensor names without their last part.
    """

    files: Files
    specials: dict[str, str] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    layers: tuple[str, ...] = ()


def samples() -> list[Files]:
    """Return sound checkpoints to start from: in one file and in shards, and of every dialect."""
    torch.manual_seed(0)
    block = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    mx = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    dynamic = {"strategy": "token", "dynamic": True}
    row = compressed({"strategy": "channel"}, dynamic, ignore=["head"])
    tensor = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["head"]}
    return [
        sample(1, fp8kit.ROW, "weight_scale", {"quantization_config": row}),
        sample(3, fp8kit.ROW, "weight_scale", {"quantization_config": row}),
        sample(2, None, "", {}),
        sample(2, fp8kit.BLOCK, "weight_scale_inv", {"quantization_config": block}),
        sample(1, fp8kit.MX, "weight_scale_inv", {"quantization_config": mx}),
        sample(1, fp8kit.TENSOR, "weight_scale", {}) | {MODELOPT: dumped({"quantization": tensor})},
        *({p.name: p.read_bytes() for p in f.iterdir()} for f in golden()),
    ]


def golden() -> list[Path]:
    """List the folders of the golden checkpoints."""
    return sorted(f.parent for f in GOLDEN.glob("*/*.safetensors"))


def sample(shards: int, group: fp8kit.GroupShape | None, scale: str, config: Any) -> Files:
    """Make a checkpoint of ``Net``: number of files, granularity, and the name of its scales."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in Net().bfloat16().state_dict().items():
        if group is not None and name in ("up.weight", "down.weight"):
            q = fp8kit.quantize(tensor, group, role="weight")
            state |= {name: q.data, name.replace("weight", scale): q.scale}
            if group == fp8kit.TENSOR:
                state[name.replace("weight", "input_scale")] = torch.tensor(0.5)
                state[name.replace("weight", scale)] = q.scale.reshape(())
        else:
            state[name] = tensor
    with tempfile.TemporaryDirectory() as folder:
        path, names, index = Path(folder), list(state), {}
        for shard in range(shards):
            file = SINGLE if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {n: state[n] for n in names[shard::shards]}
            index |= dict.fromkeys(part, file)
            save_file(part, path / file, metadata={"format": "pt"})
        if shards > 1:
            whole = {"metadata": {"total_size": 1000}, "weight_map": index}
            (path / INDEX).write_bytes(dumped(whole))
        kind = {"model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 2}
        (path / CONFIG).write_bytes(dumped(kind | config))
        return {p.name: p.read_bytes() for p in path.iterdir()}


def dumped(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def make(number: int, bases: list[Files]) -> Case:
    """Make the case of a number from one of the sound checkpoints."""
    r = random.Random(number)
    # half of the cases start from a checkpoint that ``fill`` loads into a model
    files = r.choice(bases[: len(bases) if r.random() < 0.5 else FITTING])
    case = Case(dict(files), layers=layers(files))
    count = r.choice((1, 1, 1, 1, 2, 3))
    for _ in range(count):
        r.choice(MUTATIONS)(r, case)
    if count > 1:
        case.touched = []
    return case


def layers(files: Files) -> tuple[str, ...]:
    """Return the names of the layers in sound safetensors files."""
    found: set[str] = set()
    for name, data in files.items():
        if name.endswith(".safetensors"):
            names = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            found |= {n.rpartition(".")[0] for n in names}
    return tuple(sorted(found - {""}))


def tensor_file(r: random.Random, case: Case) -> str:
    return r.choice([n for n in case.files if n.endswith(".safetensors")])


def json_file(r: random.Random, case: Case) -> str:
    case.files.setdefault(CONFIG, b"{}")
    return r.choice([n for n in case.files if n.endswith(".json")])


def bytes_anywhere(r: random.Random, case: Case) -> None:
    name = r.choice(list(case.files))
    data = bytearray(case.files[name])
    for _ in range(r.choice((1, 1, 2, 5, 20))):
        # most of a file is data, in which every byte is legal
        end = min(len(data), 600) if r.random() < 0.8 else len(data)
        at, how = r.randrange(end + 1), r.randrange(5)
        if how == 0:
            data[at : at + 1] = r.randbytes(1)
        elif how == 1:
            data[at:at] = r.randbytes(r.randrange(1, 9))
        elif how == 2:
            del data[at : at + r.randrange(1, 30)]
        elif how == 3:
            data[at : at + 8] = struct.pack("<Q", r.choice(NUMBERS) % 2**64)
        else:
            data[at:at] = bytes(data[at : at + r.randrange(1, 40)])
    case.files[name] = bytes(data)


def cut(r: random.Random, case: Case) -> None:
    name = r.choice(list(case.files))
    data = case.files[name]
    case.files[name] = data[: r.choice((0, 1, 7, 8, 9, r.randrange(len(data) + 1), len(data) - 1))]


def header_length(r: random.Random, case: Case) -> None:
    name = tensor_file(r, case)
    data = case.files[name]
    true = int.from_bytes(data[:8], "little")
    length = r.choice((*NUMBERS, true - 1, true + 1, true + 8, len(data), len(data) - 8, 10**8 + 1))
    case.files[name] = struct.pack("<Q", length % 2**64) + data[8:]


def header_tree(r: random.Random, case: Case) -> None:
    name = tensor_file(r, case)
    data = case.files[name]
    with contextlib.suppress(*NOT_A_TREE):
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(data[8 : 8 + length])
        words = change(r, tree)
        header = dumped(tree)
        case.files[name] = struct.pack("<Q", len(header)) + header + data[8 + length :]
        case.touched = [*words, name]


def json_tree(r: random.Random, case: Case) -> None:
    name = json_file(r, case)
    with contextlib.suppress(*NOT_A_TREE):
        tree = json.loads(case.files[name])
        words = change(r, tree)
        case.files[name] = dumped(tree)
        case.touched = words


def hostile_index(r: random.Random, case: Case) -> None:
    with contextlib.suppress(*NOT_A_TREE):
        tree = json.loads(case.files[INDEX])
        tree["weight_map"][r.choice([*tree["weight_map"], "new.weight"])] = r.choice(SHARDS)
        case.files[INDEX] = dumped(tree)


def deep(r: random.Random, case: Case) -> None:
    name = r.choice(list(case.files))
    depth, mark = r.choice((70, 500, 990, 2000, 100_000)), r.choice((b"[", b'{"a":'))
    nested = mark * depth + (b"]" if mark == b"[" else b"1" + b"}") * r.choice((0, 1, depth))
    if name.endswith(".json"):
        nested = b'{"model_type": ' + nested + b"}" if r.random() < 0.5 else nested
        case.files[name] = nested
    else:
        header = b'{"a":' + nested + b"}"
        case.files[name] = struct.pack("<Q", len(header)) + header


def wide(r: random.Random, case: Case) -> None:
    """Insert many small values, which cost a parser far more than their bytes."""
    name = json_file(r, case)
    filler = r.choice((b"[],", b"{},", b"0,", b'"",')) * r.choice((10, 1000, 20_000))
    case.files[name] = b'{"a": [' + filler + b"0]," + case.files[name].lstrip()[1:]


def special(r: random.Random, case: Case) -> None:
    kinds = ("directory", "pipe", "loop", "outside", "device", "broken", "missing", "empty")
    case.specials[r.choice(list(case.files))] = r.choice(kinds)


def paths_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a tree except its root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from paths_in(value, (*path, key))


def change(r: random.Random, tree: Any) -> list[str]:
    """Change one place of a tree; return the words of which a refusal must name one."""
    path = r.choice(list(paths_in(tree)) or [()])
    if not path:
        return []
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    key, how = path[-1], r.randrange(6)
    value = holder[key]
    words = [p for p in path if isinstance(p, str)]
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):
        new = r.choice([v for v in VALUES if isinstance(v, str)] + [f"{key}2", "__metadata__"])
        holder[new] = holder.pop(key)
        words.append(new)
    elif how == 2 and isinstance(value, int):
        holder[key] = value + r.choice((-8, -1, 1, 8, 2**32, 2**63, -(2**63)))
    elif how == 3:
        other = tree
        for step in r.choice(list(paths_in(tree))):
            other = other[step]
        holder[key] = json.loads(json.dumps(other))
    elif how == 4:
        holder[key] = r.choice(([value], {"a": value}, [value, value], str(value)))
    else:
        holder[key] = r.choice(VALUES)
    return words


def repeated_key(r: random.Random, case: Case) -> None:
    """Repeat a key, and perhaps change the encoding: JSON libraries treat both differently."""
    name = json_file(r, case)
    with contextlib.suppress(*NOT_A_TREE):
        tree = json.loads(case.files[name])
        key = r.choice(list(tree))
        again = json.dumps({key: r.choice((tree[key], 1, {}, "x"))})
        text = f"{json.dumps(tree)[:-1]}, {again[1:]}"
        case.files[name] = text.encode(r.choice(("utf-8", "utf-16", "utf-32", "utf-8-sig")))


MUTATIONS = (
    *(bytes_anywhere, cut, header_length, header_tree, header_tree, header_tree, json_tree),
    *(json_tree, json_tree, json_tree, hostile_index, repeated_key, deep, wide, special),
)


def write(case: Case, path: Path) -> None:
    """Put a case on disk."""
    for name, data in case.files.items():
        file, kind = path / name, case.specials.get(name)
        if kind is None:
            file.write_bytes(data)
        elif kind == "directory":
            file.mkdir()
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "empty":
            file.write_bytes(b"")
        elif kind != "missing":
            targets = {"loop": name, "device": "/dev/zero", "broken": "nowhere"}
            file.symlink_to(targets.get(kind, f"../{OUTSIDE}"))


class Watch:
    """Collect the paths that are opened, listed, removed or renamed while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and event in ("open", "os.listdir", "os.scandir", "os.remove", "os.rename"):
            if isinstance(args[0], (str, bytes, os.PathLike)):
                self.opened.append(os.fsdecode(args[0]))

    def outside(self, path: Path) -> list[str]:
        """Return the collected paths outside ``path``, except the interpreter's own files."""
        own = (str(path), sys.prefix, sys.base_prefix, str(Path(fp8kit.__file__).parent), "/proc")
        return [p for p in self.opened if not os.path.abspath(p).startswith(own)]


def judge(case: Case, path: Path, watch: Watch, limit: float = SECONDS) -> tuple[str, list[str]]:
    """Read a case in three ways; return how reading ended, and a list of what went wrong."""
    wrong: list[str] = []
    ended = "read"
    before = snapshot(path)
    watch.opened.clear()
    start = time.process_time()
    for read in (read_all, fill, describe):
        watch.on = True
        try:
            read(path)
        except CheckpointError as error:
            ended = f"refused by {read.__name__}" if ended == "read" else ended
            wrong += complaints(str(error), case, path)
        except BaseException:
            wrong.append(traceback.format_exc(limit=-6))
        finally:
            watch.on = False
    seconds = time.process_time() - start
    wrong += [f"opened {p}" for p in watch.outside(path)]
    wrong += [f"took {seconds:.1f} s"] if seconds > limit else []
    wrong += [] if snapshot(path) == before else ["changed what it read"]
    return ended, wrong


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for tensor in map(checkpoint.read, checkpoint.tensors):
        tensor.view(torch.uint8) if tensor.dim() else tensor.clone()


def fill(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    if not checkpoint.tensors.keys() & {"up.weight", "down.weight"}:
        return  # not a checkpoint of ``Net``
    with torch.device("meta"):
        model = Net().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fp8kit.load(path, model, scheme=None if checkpoint.layers else "FP8_DYNAMIC")


def describe(path: Path) -> None:
    found = inspect(path)
    json.dumps(found.to_dict())
    str(found).encode()
    if found.problems:
        raise CheckpointError("\n".join(found.problems[:20]))


def complaints(message: str, case: Case, path: Path) -> list[str]:
    """Return what is wrong with the message of a refusal."""
    wrong = []
    if not any(name in message for name in case.files) and str(path) not in message:
        wrong.append(f"names no file: {message[:500]}")
    elif case.touched and not any(word in message for word in expected_words(case)):
        wrong.append(f"names none of {case.touched}: {message[:500]}")
    if len(message) > LONGEST_MESSAGE:
        wrong.append(f"is {len(message)} characters long: {message[:300]}")
    if not message.replace("\n", "").isprintable():
        wrong.append(f"cannot be printed: {message[:500]!r}")
    return wrong


def expected_words(case: Case) -> list[str]:
    """List the words of which a refusal must name one: what was changed, or an original layer."""
    changed = [ascii(word)[1:-1][:50] for word in case.touched if word]
    return [*changed, "quant_method", *(f"{layer}." for layer in case.layers)]


def snapshot(path: Path) -> list[tuple[str, int, int]]:
    return sorted((p.name, p.lstat().st_mtime_ns, p.lstat().st_size) for p in path.iterdir())


def replay(number: int, folder: Path) -> tuple[str, list[str]]:
    """Make, write and judge one case."""
    case = make(number, samples())
    write(case, folder)
    return judge(case, folder, Watch())


def main(cases: int, first: int = 0) -> int:
    """Run cases and print how they ended, and every one that went wrong."""
    torch.set_num_threads(1)
    bases, watch, ends, failures = samples(), Watch(), Counter[str](), 0
    base = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (base / OUTSIDE).write_bytes(bases[0][SINGLE])
    outside = (base / OUTSIDE).stat()
    judge(
        Case(dict(bases[0])), empty(base), watch
    )  # imports whatever reading needs before the limit is set
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + EXTRA_MEMORY, resource.RLIM_INFINITY))
    try:
        for number in range(first, first + cases):
            case, path = make(number, bases), empty(base)
            write(case, path)
            ended, wrong = judge(case, path, watch)
            ends[ended] += 1
            if wrong:
                failures += 1
                listed = "\n  ".join(dict.fromkeys(wrong))
                print(f"case {number}: {ended}\n  {listed}", flush=True)  # noqa: T201
        after = (base / OUTSIDE).stat()
        if (after.st_mtime_ns, after.st_size) != (outside.st_mtime_ns, outside.st_size):
            failures += 1
            print("the file outside was written to")  # noqa: T201
    finally:
        shutil.rmtree(base)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    summary = {"cases": cases, "failures": failures, "grown MiB": round(grown), **ends}
    print(json.dumps(summary))  # noqa: T201
    return 1 if failures else 0


def empty(base: Path) -> Path:
    path = base / "case"
    if path.exists():
        shutil.rmtree(path)
    path.mkdir()
    return path


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
