"""Writing checkpoints: complete or not at all, readable by the library that defines the format."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import fresh
from checkpoint_samples import NANO, all_bytes, read
from disks import Disk
from fp8kit.checkpoint.dialects import DIALECTS, Spec
from fp8kit.checkpoint.storage import directory
from fp8kit.checkpoint.storage.headers import DTYPES
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.errors import CheckpointError
from fp8kit.formats import SCHEMES
from numerics import assert_bits_equal

INDEX = "model.safetensors.index.json"
CONFIG = {"quantization_config": DIALECTS[0].render(Spec(SCHEMES["FP8_DYNAMIC"]))}


def state(layers: int = 3) -> dict[str, Tensor]:
    found = {}
    for i in range(layers):
        found[f"{i}.weight"] = torch.randn(33, 17).to(torch.float8_e4m3fn)
        found[f"{i}.weight_scale"] = torch.rand(33, 1) + 0.1
        found[f"{i}.bias"] = torch.randn(33).bfloat16()
    return found


def layout(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}


def write(path: Path, tensors: dict[str, Tensor], **options: Any) -> list[str]:
    config = options.pop("config", CONFIG)
    return write_checkpoint(path, layout(tensors), tensors.items(), config=config, **options)


def only(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    tensors = state()
    assert write(tmp_path / "c", tensors) == ["config.json", "model.safetensors"]
    found = read(tmp_path / "c")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_bits_equal(found[name], tensor)
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    raw = (tmp_path / "c" / "model.safetensors").read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0  # what follows is aligned in a mapped file
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d != torch.complex64], ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype)
    names = ["0.weight"] if dtype == torch.float8_e4m3fn else ["x"]
    tensors = {names[0]: tensor}
    if dtype == torch.float8_e4m3fn:
        tensors["0.weight_scale"] = torch.ones(3, 1)
    elif dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        with pytest.raises(CheckpointError, match="is not the weight of a layer"):
            write(tmp_path / "c", tensors)
        return
    write(tmp_path / "c", tensors)
    with safe_open(tmp_path / "c" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(names[0]).view(torch.uint8), raw)


def test_strides_views_and_empty_tensors(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "transposed": base.t(),
        "sliced": base[1:, ::2],
        "shared": base[2],
        "expanded": base[:1].expand(3, 6),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(7),
        "ünï.cødé": torch.ones(1),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    write(tmp_path / "c", tensors, config={})
    found = read(tmp_path / "c")
    for name, tensor in tensors.items():
        assert_bits_equal(found[name], tensor.resolve_conj().resolve_neg())


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    limit=st.integers(1, 200),
    order=st.randoms(use_true_random=False),
)
def test_shards_keep_the_limit_and_whole_modules(
    sizes: list[int], limit: int, order: Any, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {}
    for i, n in enumerate(sizes):
        tensors[f"m{i}.weight"] = torch.full((n,), i, dtype=torch.uint8)
        tensors[f"m{i}.weight_scale"] = torch.full((1,), float(i))
    arriving = list(tensors.items())
    order.shuffle(arriving)
    write_checkpoint(folder / "c", layout(tensors), arriving, config={}, max_shard_bytes=limit)
    shards = sorted((folder / "c").glob("*.safetensors"))
    for file in shards:
        names = load_file(file).keys()
        modules = {n.partition(".")[0] for n in names}
        assert len(names) == 2 * len(modules)
        assert sum(sizes[int(m[1:])] + 4 for m in modules) <= limit or len(modules) == 1
    assert all(torch.equal(t, tensors[n]) for n, t in read(folder / "c").items())
    if len(shards) == 1:
        assert shards[0].name == "model.safetensors"
        assert not (folder / "c" / INDEX).exists()
        return
    index = json.loads((folder / "c" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    places = {n: f.name for f in shards for n in load_file(f)}
    assert index["weight_map"] == places
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"


def test_side_files_come_from_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(NANO, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    (source / "merges.txt").write_text("a b")
    (source / "tekken.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"no")
    before = {p: p.read_bytes() for p in source.rglob("*") if p.is_file()}
    names = write(tmp_path / "c", state(), source=source, texts={"generation_config.json": "{}"})
    assert names == [
        "additional_chat_templates/tool.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tekken.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    copied = tmp_path / "c" / "tokenizer.json"
    assert copied.read_bytes() == (NANO / "tokenizer.json").read_bytes()
    assert (tmp_path / "c" / "generation_config.json").read_text() == "{}"
    assert {p: p.read_bytes() for p in source.rglob("*") if p.is_file()} == before


def test_what_other_libraries_ask_for_comes_from_the_source(tmp_path: Path) -> None:
    wanted = {
        *("bpe.codes", "dict.txt", "emoji.json", "byte_maps.json", "word_shape.json"),
        *("entity_vocab.json", "audio_tokenizer_config.json", "spk_dict.pt"),
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    }
    source = tmp_path / "source"
    for name in (*wanted, "onnx/model.onnx"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("{}")
    names = write(tmp_path / "c", state(), source=source)
    assert set(names) == {*wanted, "config.json", "model.safetensors"}


def test_same_input_same_bytes(tmp_path: Path) -> None:
    tensors = state()
    write(tmp_path / "a", tensors)
    reordered = list(reversed(tensors.items()))
    write_checkpoint(tmp_path / "b", layout(tensors), reordered, config=CONFIG)
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")


def test_everything_is_durable_before_it_appears(tmp_path: Path, disk: Disk) -> None:
    synced: set[tuple[str, bool]] = set()
    disk.notes("fsync", lambda path: synced.add((path.name, (tmp_path / "c").exists())))
    names = write(tmp_path / "c", state(), max_shard_bytes=700, source=NANO)
    assert len(names) > 6
    assert {(n, False) for n in names} < synced
    assert (tmp_path.name, True) in synced


def test_folders_get_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write(tmp_path / "c", state())
    assert (tmp_path / "c").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_parents_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c", state())
    assert (tmp_path / "a" / "b" / "c" / "config.json").exists()


def test_an_empty_destination_is_filled(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    write(tmp_path / "c", state())
    assert only(tmp_path / "c") == ["c"]


def test_an_existing_destination_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", state())
    before = all_bytes(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"c exists and is not empty.*overwrite=True"):
        write(tmp_path / "c", state(1))
    assert all_bytes(tmp_path / "c") == before


@pytest.fixture
def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system lack the call that swaps two folders."""
    monkeypatch.setattr(directory, "exchange", lambda *_: False)


@pytest.mark.parametrize("exchange", [True, False], ids=["swap", "two renames"])
def test_overwrite_replaces_everything(
    tmp_path: Path, request: pytest.FixtureRequest, exchange: bool
) -> None:
    if not exchange:
        request.getfixturevalue("without_exchange")
    write(tmp_path / "c", state(), max_shard_bytes=700)
    tensors = state(1)
    write(tmp_path / "c", tensors, overwrite=True)
    assert sorted(all_bytes(tmp_path / "c")) == ["config.json", "model.safetensors"]
    assert_bits_equal(read(tmp_path / "c")["0.weight"], tensors["0.weight"])
    assert only(tmp_path / "c") == ["c"]


def test_directories_swap_in_one_step_here(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not directory.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system or file system cannot swap directories")
    assert os.listdir(tmp_path / "a") == ["b"]


def test_failed_rename_puts_the_old_files_back(
    tmp_path: Path, without_exchange: None, disk: Disk
) -> None:
    write(tmp_path / "c", state())
    before = all_bytes(tmp_path / "c")
    place = (tmp_path / "c").resolve()
    disk.refuses("rename", when=lambda a, b: Path(b) == place and not a.name.endswith(".old"))
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "c", state(1), overwrite=True)
    assert all_bytes(tmp_path / "c") == before
    assert only(tmp_path / "c") == ["c"]


def test_overwrite_replaces_checkpoints_only(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match=r"holds neither config.json nor safetensors"):
        write(tmp_path / "c", state(), overwrite=True)
    assert (tmp_path / "c" / "thesis.txt").read_text() == "years"


def test_destination_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        write(tmp_path / "c", state(), overwrite=True)


@pytest.mark.parametrize("inside", ["", "snapshot"])
def test_destination_is_or_holds_the_source(tmp_path: Path, inside: str) -> None:
    source = tmp_path / "c" / inside
    write(source, state())
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for destination in (tmp_path / "c", tmp_path / "link"):
        with pytest.raises(CheckpointError, match="is or holds the source"):
            write(destination, state(1), source=source, overwrite=True)
    assert "2.weight" in read(source)


def test_a_destination_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    tensors = state()

    def slowly() -> Iterator[tuple[str, Tensor]]:
        write(tmp_path / "c", state(1))
        yield from tensors.items()

    layout = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_checkpoint(tmp_path / "c", layout, slowly(), config=CONFIG)
    assert "2.weight" not in read(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 20, limits[1]))
    try:
        names = write(tmp_path / "c", state(40), max_shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sum(n.endswith(".safetensors") for n in names) == 40


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_stream_leaves_nothing_behind(tmp_path: Path, overwrite: bool) -> None:
    destination = tmp_path / "new" / "c"
    if overwrite:
        write(destination, state())
        before = all_bytes(destination)
    tensors = state()

    def stream() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors.items())[:4]
        raise Interrupted

    with pytest.raises(Interrupted):
        write_checkpoint(destination, layout(tensors), stream(), config=CONFIG, overwrite=overwrite)
    if overwrite:
        assert all_bytes(destination) == before
        assert only(destination) == ["c"]
    else:
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"3.bias": torch.ones(1)}, "Got 3.bias.*no tensor of this name"),
        (lambda s: s | {"0.bias": torch.ones(33)}, "Got 0.bias, torch.float32 of shape"),
        (lambda s: s | {"0.bias": torch.ones(32).bfloat16()}, r"of shape \[32\]"),
        (lambda s: {k: v for k, v in s.items() if k != "0.bias"}, "ended without 0.bias"),
    ],
)
def test_the_stream_must_be_what_was_announced(tmp_path: Path, change: Any, message: str) -> None:
    tensors = state(1)
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "c", layout(tensors), change(tensors).items(), config=CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    tensors = state(1)
    twice = [*tensors.items(), *tensors.items()]
    with pytest.raises(CheckpointError, match=r"Got 0.weight"):
        write_checkpoint(tmp_path / "c", layout(tensors), twice, config=CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight_scale": torch.zeros(33, 1)}, "0.weight_scale holds NaN, infinite, zero"),
        (
            {"0.weight_scale": torch.ones(33, 2)},
            r"0.weight_scale is torch.float32 of shape \[33, 2",
        ),
        ({"1.weight_scale": torch.ones(33, 1)}, "1.weight_scale has no FP8 1.weight"),
    ],
)
def test_what_does_not_read_back_is_not_written(
    tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path / "c", state(1) | change)
    assert list(tmp_path.iterdir()) == []


def test_old_files_that_another_process_removes_first(tmp_path: Path, disk: Disk) -> None:
    """The other process takes the old files for leftovers of a killed process."""
    write(tmp_path / "c", state())
    (tmp_path / "c" / "old").touch()

    def meanwhile(file: object, *_: object) -> None:
        if Path(str(file)).suffix == ".tmp" and (Path(str(file)) / "old").exists():
            disk.mend()
            shutil.rmtree(str(file))

    disk.notes("open", meanwhile)
    write(tmp_path / "c", state(1), overwrite=True)
    assert not (tmp_path / "c" / "old").exists()
    assert only(tmp_path / "c") == ["c"]


def test_a_disk_that_is_too_small_is_refused_first(tmp_path: Path, disk: Disk) -> None:
    disk.has_free(10)
    with pytest.raises(
        CheckpointError, match=r"has 10 bytes free. The checkpoint needs \d\.\d+ kB"
    ):
        write(tmp_path / "c", state())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a\nb", "a\ud800", "a"])
def test_what_no_file_can_hold_is_refused_first(tmp_path: Path, name: str) -> None:
    dtype = torch.complex128 if name == "a" else torch.float32
    with pytest.raises(CheckpointError, match=r"Files hold .*persistent=False") as error:
        write(tmp_path / "c", {name: torch.ones(1, dtype=dtype)}, config={})
    assert str(error.value).startswith(f"The tensor {name!a} is {dtype}.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_shard_size_is_positive(tmp_path: Path, size: float) -> None:
    with pytest.raises(ValueError, match=f"Got max_shard_bytes={size}"):
        write(tmp_path / "c", state(), max_shard_bytes=size)


DIE = """
import os, signal, sys
import torch
from fp8kit.checkpoint.storage.writer import write_checkpoint

def tensors():
    yield "a.weight", torch.ones(8)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))

kind = (torch.float32, (8,))
write_checkpoint(sys.argv[1], {"a.weight": kind, "b.weight": kind}, tensors(), config={})
"""


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    others = [".c.partial", ".c.0123abcd", ".d.0123abcd.tmp", "c.0123abcd.tmp", ".c.0123abcd.tmp.x"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".c.01234567.tmp").symlink_to(tmp_path / ".c.partial")
    assert fresh.Program(DIE, tmp_path / "c", "SIGKILL").wait()[1] == signal.SIGKILL
    assert len(only(tmp_path / "c")) == len(others) + 2
    write(tmp_path / "c", state())
    assert only(tmp_path / "c") == sorted(["c", ".c.01234567.tmp", *others])


def test_what_a_living_run_writes_stays(tmp_path: Path) -> None:
    program = fresh.Program(DIE, tmp_path / "c", "SIGSTOP")
    number, status = program.wait()
    try:
        assert os.WIFSTOPPED(status)
        (theirs,) = tmp_path.iterdir()
        write(tmp_path / "c", state())
        assert theirs.is_dir()
        assert only(tmp_path / "c") == sorted([theirs.name, "c"])
    finally:
        os.kill(number, signal.SIGKILL)
        program.wait()
    write(tmp_path / "c", state(), overwrite=True)
    assert only(tmp_path / "c") == ["c"]
