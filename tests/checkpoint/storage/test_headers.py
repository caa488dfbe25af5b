"""Wrong headers, JSON and paths: each is refused, with the place of the fault."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from checkpoint_samples import SHARD, Ragged, edit_json, saved
from disks import Disk
from fp8kit.checkpoint.inspection import inspect
from fp8kit.checkpoint.storage.headers import (
    TensorInfo,
    check_unchanged,
    read_header,
    read_json,
    read_tensor,
)
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.cli.main import main
from fp8kit.errors import CheckpointError
from fp8kit.io.models import load
from numerics import assert_bits_equal

INDEX = "model.safetensors.index.json"
U8 = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def write(path: Path, header: Any, data: bytes = b"abc", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = struct.pack("<Q", len(raw) if length is None else length)
    (path / SHARD).write_bytes(size + raw + data)


@pytest.mark.parametrize("length", [0, 1, 2**20, 10**8 + 1, 2**63, 2**64 - 1])
def test_length_of_the_header(tmp_path: Path, length: int) -> None:
    write(tmp_path, {"a": U8}, length=length)
    refused(tmp_path, r"model.safetensors is damaged. What is wrong: (its header length is|Expect)")


def test_size_of_the_file(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(b"1234567")
    refused(tmp_path, "it has 7 bytes, less than the length of a header")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (U8 | {"dtype": "F5"}, "a has dtype F5"),
        (U8 | {"dtype": ["U8"]}, r"a has dtype \['U8'\]"),
        (U8 | {"shape": [-3]}, r"a has shape \[-3\]"),
        (U8 | {"shape": [True]}, r"a has shape \[True\]"),
        (U8 | {"shape": [3.0]}, r"a has shape \[3.0\]"),
        (U8 | {"shape": 3}, "a has shape 3"),
        (U8 | {"shape": [3] + [1] * 64}, "a has shape"),
        (U8 | {"shape": [2**32, 2**32]}, r"a is U8 of shape \[4294967296, 4294967296\] and has"),
        (U8 | {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "a is U8 of shape"),
        (U8 | {"shape": [10**40]}, "a has shape"),
        (U8 | {"data_offsets": [0, 4]}, r"a is U8 of shape \[3\] and has data_offsets \[0, 4\]"),
        (U8 | {"data_offsets": [3, 0]}, r"a is U8 .* has data_offsets \[3, 0\]"),
        (U8 | {"data_offsets": [-3, 0]}, "a has data_offsets"),
        (U8 | {"data_offsets": [0, 3, 6]}, "a has data_offsets"),
        (U8 | {"data_offsets": [1, 4]}, r"a leaves a hole after the header \(data_offsets\)"),
        (U8 | {"data_offsets": [2**62, 2**62 + 3]}, "a leaves a hole"),
        (U8 | {"more": 1}, "a is not an object of data_offsets, dtype, shape"),
        ([], "a is not an object of data_offsets, dtype, shape"),
        ("nothing", "a is not an object of data_offsets, dtype, shape"),
    ],
)
def test_entries_of_the_header(tmp_path: Path, entry: Any, message: str) -> None:
    write(tmp_path, {"a": entry})
    refused(tmp_path, f"model.safetensors is damaged. What is wrong: {message}")


def test_elements_below_a_byte_are_no_damage(tmp_path: Path) -> None:
    write(tmp_path, {"a": {"dtype": "F4", "shape": [6], "data_offsets": [0, 3]}})
    refused(tmp_path, r"^model.safetensors: a has dtype F4. .* as tensor.view\(torch.uint8\)")


def test_tensors_cover_the_data_once(tmp_path: Path) -> None:
    write(tmp_path, {"a": U8, "b": U8 | {"data_offsets": [2, 5]}}, b"abcde")
    refused(tmp_path, r"b overlaps a \(data_offsets\)")
    write(tmp_path, {"a": U8, "b": U8 | {"data_offsets": [4, 7]}}, b"abcdefg")
    refused(tmp_path, r"b leaves a hole after a \(data_offsets\)")
    write(tmp_path, {"a": U8}, b"abcd")
    refused(tmp_path, "it has bytes that no tensor owns")
    write(tmp_path, {"a": U8}, b"ab")
    refused(tmp_path, "it ends early")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "its header is list, no object"),
        ({"__metadata__": {"a": 1}}, "its __metadata__ is not an object of texts"),
        ({"a\x1b[2J": U8}, "characters that cannot be printed"),
        ({"a\x00": U8}, "characters that cannot be printed"),
        (b'{"a": {}, "a": {}}', "it names a twice"),
        (b'{"a": \xff}', "'utf-8' codec can't decode"),
        (b"[" * 50_000, "maximum recursion depth"),
        (b'{"a":' * 50_000, "maximum recursion depth"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: Any, message: str) -> None:
    write(tmp_path, header, b"")
    refused(tmp_path, f"model.safetensors is damaged. What is wrong: .*{message}")


def test_long_names_are_shortened(tmp_path: Path) -> None:
    write(tmp_path, {"a" * 10_000: U8 | {"dtype": "F4"}})
    with pytest.raises(CheckpointError, match=r"aaa\.\.\. \(10000 characters\)") as caught:
        open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000


def test_small_files_do_not_take_much_memory(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(b'{"a": [' + b"[]," * 9_000_000 + b"0]}")
    with pytest.raises(CheckpointError, match=r"config.json is damaged.*more than 8388608 values"):
        read_json(config)
    config.write_bytes(b'{"a": [' + b"[]," * 1000 + b"0]}")
    tracemalloc.start()
    try:
        assert len(read_json(config)["a"]) == 1001
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_large_files_are_not_read_at_all(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"config.json is damaged.* 1099511627776 bytes"):
        read_json(tmp_path / "config.json")
    with (tmp_path / SHARD).open("wb") as file:
        file.write(struct.pack("<Q", 2**39))
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"length is 549755813888, and .* allows 100000000"):
        read_header(tmp_path, SHARD)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[1]", "it holds list, no object"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"a": 1, "a": 2}', "it names a twice"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "nested more than 64 deep"),
        ('{"a": {"b": ["\\ud800"]}}', "what is no character at a.b.0"),
        ('{"\\ud800": 1}', r"what is no character at '\\ud800'"),
        ('{"a": "\x00"}', "Invalid control character"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=f"config.json is damaged. What is wrong: .*{message}"
    ):
        read_json(tmp_path / "config.json")


def test_control_characters_of_a_config_are_not_printed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c")
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    group = quantization["config_groups"].pop("group_0")
    quantization["ignore"] = ["lm_head\x1b[2J", "größe\\"]
    quantization["config_groups"]["\x1b[2Jgroup"] = group
    edit_json(path / "config.json", quantization_config=quantization)
    assert "lm_head\\x1b[2J" in str(inspect(path))
    assert "größe\\" in str(inspect(path))
    assert "\x1b" not in str(inspect(path))
    group["weights"]["num_bits"] = 3
    edit_json(path / "config.json", quantization_config=quantization)
    with pytest.raises(CheckpointError, match=r"\\x1b\[2Jgroup has weights") as caught:
        open_checkpoint(path)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", SHARD, INDEX])
@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "loop"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    path = saved(tmp_path / "c", max_shard_bytes=20_000 if name == INDEX else 2**30)
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "directory":
        (path / name).mkdir()
    else:
        (path / name).symlink_to("/dev/zero" if kind == "device" else name)
    what = "Too many levels of symbolic links" if kind == "loop" else "not a regular file"
    refused(path, f"{name} is damaged. What is wrong: .*{what}")


def test_files_that_may_not_be_opened_are_not_called_damaged(tmp_path: Path, disk: Disk) -> None:
    path = saved(tmp_path / "c")
    disk.refuses("open", errno.EACCES, lambda place, *_: str(place).endswith(SHARD))
    refused(path, "^model.safetensors cannot be opened: Permission denied. .*permissions")


@pytest.mark.parametrize("name", ["config.json", SHARD])
def test_a_broken_link_is_no_absent_file(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "c")
    (path / name).unlink()
    (path / name).symlink_to("../blobs/gone")
    refused(path, rf"{name} is (damaged. .*No such file|missing in)")


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    path = saved(tmp_path / "snapshot")
    (tmp_path / "blobs").mkdir()
    for file in list(path.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(f"../blobs/{file.name}")
    assert open_checkpoint(path).spec is not None


def test_a_file_in_the_place_of_the_one_that_was_opened_is_not_read(tmp_path: Path) -> None:
    """The new file has the same shapes: a trainer saves again while a server loads."""
    save_file({"a": torch.zeros(1000)}, tmp_path / SHARD)
    found = read_header(tmp_path, SHARD)[0]
    check_unchanged(tmp_path, found.values())
    assert_bits_equal(read_tensor(tmp_path, found["a"]), torch.zeros(1000))
    save_file({"a": torch.ones(1000)}, tmp_path / "new")
    os.utime(tmp_path / "new", (1, 1))
    (tmp_path / "new").replace(tmp_path / SHARD)
    with pytest.raises(CheckpointError, match=r"model.safetensors has changed since.* start again"):
        read_tensor(tmp_path, found["a"])
    with pytest.raises(CheckpointError, match=r"model.safetensors has changed since"):
        check_unchanged(tmp_path, found.values())


def test_files_that_are_replaced_while_headers_are_read(tmp_path: Path, disk: Disk) -> None:
    path = saved(tmp_path / "a", max_shard_bytes=20_000)
    shutil.copytree(path, tmp_path / "b")
    first, *_, last = sorted(p.name for p in path.glob("*.safetensors"))
    os.utime(tmp_path / "b" / first, (1, 1))

    def meanwhile(file: Any, *_: Any) -> None:
        if Path(file).name == last and (tmp_path / "b").exists():
            shutil.rmtree(path)
            (tmp_path / "b").rename(path)

    disk.notes("open", meanwhile)
    refused(path, f"{first} has changed since")


def test_files_that_shrink_while_they_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / SHARD)
    info = read_header(tmp_path, SHARD)[0]["a"]
    (tmp_path / SHARD).write_bytes((tmp_path / SHARD).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged.*a cannot be read"):
        read_tensor(tmp_path, replace(info, stamp=()))
    (tmp_path / SHARD).unlink()
    with pytest.raises(CheckpointError, match=r"a cannot be read: .*No such file"):
        read_tensor(tmp_path, info)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_tensors_are_read_as_they_are(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensors = {"first": torch.zeros(3, dtype=torch.uint8), "b": torch.ones(shape).to(dtype)}
    save_file(tensors, tmp_path / SHARD)
    found = read_tensor(tmp_path, read_header(tmp_path, SHARD)[0]["b"])
    assert found.shape == shape
    assert_bits_equal(found, tensors["b"])


def test_reading_needs_no_more_than_the_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2**20), "b": torch.zeros(2**24)}, tmp_path / SHARD)
    info = read_header(tmp_path, SHARD)[0]["a"]
    assert isinstance(info, TensorInfo)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_tensor(tmp_path, info).nbytes == 2**22
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**24


def broken(tmp_path: Path, how: str) -> Path:
    path = saved(tmp_path / "c", max_shard_bytes=20_000)
    names = json.loads((path / INDEX).read_text())["weight_map"]
    other = path / next(s for s in names.values() if s != names["steps"])
    if how == "missing":
        other.unlink()
    elif how == "truncated":
        other.write_bytes(other.read_bytes()[:-3])
    else:
        checkpoint = open_checkpoint(path)
        mine = [n for n, s in names.items() if s == other.name]
        save_file({n: checkpoint.read(n) for n in (*mine, "steps")}, other)
    return path


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", r"model-0000\d-of-\d+.safetensors is missing in .*Complete the download"),
        ("truncated", r"model-0000\d-of-\d+.safetensors is damaged. What is wrong: .* ends early"),
        ("twice", r"model-0000\d-of-\d+.safetensors is damaged.*steps is also in model-0000\d"),
    ],
)
def test_broken_shards_are_named_end_to_end(tmp_path: Path, how: str, message: str) -> None:
    path = broken(tmp_path, how)
    with torch.device("meta"):
        model = Ragged().bfloat16()
    with pytest.raises(CheckpointError, match=message):
        load(path, model)
    assert model.up.weight.is_meta
    with pytest.raises(CheckpointError, match=message):
        load(path)
    assert re.search(message, "\n".join(inspect(path).problems))
    for command in ("inspect", "explain"):
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 1
        assert re.search(message, result.output)
        assert "Traceback" not in result.output
