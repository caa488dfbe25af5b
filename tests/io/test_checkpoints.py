"""Streaming from directory to directory: equal to `load` and `save`, interruptions, bad input."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, Qwen3MoeForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

import fp8kit
import fresh
from checkpoint_samples import NANO, all_bytes, edit_json, edit_tensors, read
from disks import Disk
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.checkpoint.streaming import executor, journal
from fp8kit.errors import CheckpointError, ConversionError
from fp8kit.io import checkpoints
from fp8kit.io.checkpoints import Recipe, quantize_checkpoint, workers_on
from numerics import assert_bits_equal
from tiny_experts import tiny

SCHEMES = ("FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "FP8_WEIGHT_ONLY", "MXFP8")
TESTS = Path(__file__).parents[1]
SMALL = 500_000


def plain(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Write a checkpoint of plain tensors that belongs to no library."""
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def weights(count: int = 3, n: int = 128, k: int = 256) -> dict[str, Tensor]:
    found = {f"layers.{i}.up_proj.weight": torch.randn(n, k).bfloat16() for i in range(count)}
    return found | {"embed_tokens.weight": torch.randn(300, 64), "norm.weight": torch.ones(64)}


def stream(source: Path, destination: Path, scheme: str = "FP8_DYNAMIC", **options: Any) -> Path:
    limit = options.pop("max_shard_bytes", SMALL)
    kept = {k: options.pop(k) for k in ("devices", "overwrite", "runner") if k in options}
    recipe = Recipe(scheme, max_shard_bytes=limit, **options)
    quantize_checkpoint(source, destination, recipe, progress=False, **kept)
    return destination


def only(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the nano model, with configs as the installed Transformers writes them."""
    path = tmp_path_factory.mktemp("nano") / "nano"
    shutil.copytree(NANO, path)
    AutoConfig.from_pretrained(NANO).save_pretrained(path)
    GenerationConfig.from_pretrained(NANO).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3-MoE checkpoint, with experts one by one on disk."""
    path = tmp_path_factory.mktemp("moe") / "moe"
    tiny("Qwen3Moe", intermediate_size=256, mlp_only_layers=[1]).save_pretrained(path)
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_to_load_and_save(nano: Path, scheme: str, tmp_path: Path) -> None:
    stream(nano, tmp_path / "streamed", scheme)
    # rebased, a value in some ten thousands would lose its last bits
    model = fp8kit.load(nano, scheme="MXFP8_EMULATED" if scheme == "MXFP8" else scheme)
    fp8kit.save(model, tmp_path / "saved", source=nano, max_shard_bytes=SMALL)
    assert all_bytes(tmp_path / "streamed") == all_bytes(tmp_path / "saved")
    assert len(list((tmp_path / "streamed").glob("*.safetensors"))) > 5


@pytest.mark.parametrize(
    "options",
    [{"exclude": ["*.o_proj"]}, {"include": ["*.mlp.*"]}, {"exclude": []}],
    ids=["exclude", "include", "all"],
)
def test_equal_to_load_and_save_with_patterns(
    nano: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    stream(nano, tmp_path / "streamed", target="transformers", **options)
    model = fp8kit.load(nano, scheme="FP8_DYNAMIC", **options)
    fp8kit.save(
        model, tmp_path / "saved", source=nano, target="transformers", max_shard_bytes=SMALL
    )
    assert all_bytes(tmp_path / "streamed") == all_bytes(tmp_path / "saved")


def test_equal_to_load_and_save_without_experts(moe: Path, tmp_path: Path) -> None:
    stream(moe, tmp_path / "streamed", exclude=["*.experts.*"])
    model = fp8kit.load(moe, scheme="FP8_DYNAMIC", exclude=["*.experts"])
    fp8kit.save(model, tmp_path / "saved", source=moe, max_shard_bytes=SMALL)
    assert all_bytes(tmp_path / "streamed") == all_bytes(tmp_path / "saved")


def test_names_and_shapes_decide_alike(
    nano: Path, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (nano, moe):
        stream(source, tmp_path / f"{source.name}-known")
    monkeypatch.setitem(sys.modules, "fp8kit.integrations.transformers_facts", None)
    for source in (nano, moe):
        stream(source, tmp_path / f"{source.name}-named")
        pair = [all_bytes(tmp_path / f"{source.name}-{how}") for how in ("known", "named")]
        assert pair[0] == pair[1]
    report = checkpoints.decide(open_checkpoint(moe), Recipe()).report
    assert "names and shapes, because of this: import of fp8kit" in report.notes[0]


def test_experts_become_fp8_and_load(moe: Path, tmp_path: Path) -> None:
    out = stream(moe, tmp_path / "out")
    found, dense = read(out), read(moe)
    experts = [n for n in dense if ".experts." in n]
    assert len(experts) == 12
    for name in experts:
        q = fp8kit.quantize(dense[name], fp8kit.ROW, role="weight")
        assert_bits_equal(found[name], q.data)
        assert_bits_equal(found[f"{name}_scale"], q.scale)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]
    with pytest.warns(UserWarning, match="loading attributes"):
        model = Qwen3MoeForCausalLM.from_pretrained(
            out, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    first = model.model.layers[0].mlp.experts.gate_up_proj[0]
    pair = [f"model.layers.0.mlp.experts.0.{k}_proj.weight" for k in ("gate", "up")]
    wanted = torch.cat([found[n].float() * found[f"{n}_scale"] for n in pair])
    assert_bits_equal(first.detach(), wanted.to(first.dtype))


@pytest.mark.parametrize("transposed", [False, True], ids=["E,N,K", "E,K,N"])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_TENSOR", "FP8_BLOCK", "MXFP8"])
def test_stacked_experts_are_written_one_by_one(
    scheme: str, transposed: bool, tmp_path: Path
) -> None:
    e, hidden, inner = 3, 256, 128
    at = "layers.0.mlp.experts"
    gate, up = torch.randn(2, e, inner, hidden).bfloat16()
    down = torch.randn(e, hidden, inner).bfloat16()
    stacks = {f"{at}.gate_up_proj": torch.cat([gate, up], 1), f"{at}.down_proj": down}
    if transposed:
        stacks = {n: t.transpose(1, 2).contiguous() for n, t in stacks.items()}
    singles = {}
    for i in range(e):
        for kind, stack in (("gate", gate), ("up", up), ("down", down)):
            singles[f"{at}.{i}.{kind}_proj.weight"] = stack[i].clone()
    router = {"layers.0.mlp.gate.weight": torch.randn(e, hidden).bfloat16()}
    target = "transformers"  # it loads experts of every granularity
    stream(plain(tmp_path / "stacked", stacks | router), tmp_path / "a", scheme, target=target)
    stream(plain(tmp_path / "single", singles | router), tmp_path / "b", scheme, target=target)
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    assert fp8kit.verify_checkpoint(tmp_path / "stacked", tmp_path / "a").problems == []


def test_stacks_that_cannot_be_taken_apart_stay(tmp_path: Path) -> None:
    stacks = {
        "layers.0.mlp.experts.gate_up_proj": torch.randn(2, 128, 256).bfloat16(),
        "layers.0.mlp.experts.gate_up_proj_bias": torch.randn(2, 256).bfloat16(),
        "layers.0.mlp.experts.down_proj": torch.randn(2, 128, 128).bfloat16(),
    }
    source = plain(tmp_path / "source", weights() | stacks)
    out = stream(source, tmp_path / "out")
    for name, tensor in stacks.items():
        assert_bits_equal(read(out)[name], tensor)
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "layers.0.mlp.experts" in ignore
    with pytest.raises(ConversionError, match="biases"):
        stream(source, tmp_path / "strict", strict=True)


def test_what_is_not_quantized_stays_as_it_is(tmp_path: Path) -> None:
    odd = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        "flags": torch.tensor([True, False]),
        "router.e_score_correction_bias": torch.randn(7),
        "conv.weight": torch.randn(3, 4, 5, 6).half(),
        "../../evil.weight": torch.randn(2, 3),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    source = plain(tmp_path / "source", weights() | odd)
    before = all_bytes(source)
    found = read(stream(source, tmp_path / "out"))
    for name, tensor in odd.items():
        assert_bits_equal(found[name], tensor)
    assert all_bytes(source) == before
    assert only(source) == ["out", "source"]


def test_a_dtype_for_the_rest(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", weights(), dtype="float32")
    out = stream(source, tmp_path / "out", dtype=torch.float16)
    found = read(out)
    assert_bits_equal(
        found["embed_tokens.weight"], weights_of(source)["embed_tokens.weight"].half()
    )
    assert found["layers.0.up_proj.weight_scale"].dtype == torch.float32
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert_bits_equal(
        found["layers.0.up_proj.weight"],
        read(stream(source, tmp_path / "b"))["layers.0.up_proj.weight"],
    )


def test_a_dtype_that_does_not_hold_the_rest(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", weights() | {"norm.weight": torch.full((64,), 1e5)})
    with pytest.raises(CheckpointError, match=r"norm\.weight has 64 of 64 numbers beyond 65504"):
        stream(source, tmp_path / "out", dtype=torch.float16)


def weights_of(source: Path) -> dict[str, Tensor]:
    return load_file(source / "model.safetensors")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slices_and_workers_do_not_matter(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plain(tmp_path / "source", weights(3, 384, 640))
    whole = stream(source, tmp_path / "whole", scheme, devices=["cpu"])
    monkeypatch.setattr("fp8kit.checkpoint.storage.matrices.SLICE_BYTES", 5000)
    sliced = stream(source, tmp_path / "sliced", scheme, devices=["cpu"] * 5)
    assert all_bytes(whole) == all_bytes(sliced)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gpu_writes_the_same_bytes(scheme: str, nano: Path, tmp_path: Path) -> None:
    stream(nano, tmp_path / "cpu", scheme)
    stream(nano, tmp_path / "gpu", scheme, devices=workers_on(["cuda"]))
    assert all_bytes(tmp_path / "cpu") == all_bytes(tmp_path / "gpu")


def test_ten_thousand_tensors(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.norm.weight": torch.full((4,), float(i)) for i in range(9_000)}
    block = torch.randn(128, 128).bfloat16()
    tensors |= {f"layers.{i}.up_proj.weight": block.roll(i) for i in range(1_000)}
    source = plain(tmp_path / "source", tensors)
    found = read(stream(source, tmp_path / "out", max_shard_bytes=2_000_000))
    assert len(found) == 11_000
    for i in (0, 499, 999):
        q = fp8kit.quantize(block.roll(i), fp8kit.ROW, role="weight")
        assert_bits_equal(found[f"layers.{i}.up_proj.weight"], q.data)
    assert found["layers.8999.norm.weight"].tolist() == [8999.0] * 4


MEMORY = """
import sys
from fp8kit.io.checkpoints import quantize_checkpoint, workers_on
from fp8kit.checkpoint.storage import matrices
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
matrices.SLICE_BYTES = int(sys.argv[4])
start = peak()
quantize_checkpoint(
    sys.argv[1], sys.argv[2], sys.argv[3], devices=workers_on(["cpu"], 2), progress=False
)
print((peak() - start) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_TENSOR"])
def test_memory_does_not_grow_with_the_tensor(scheme: str, tmp_path: Path) -> None:
    source, rows = tmp_path / "source", 2**14
    source.mkdir()
    header = {
        "x.weight": {"dtype": "BF16", "shape": [rows, 2**14], "data_offsets": [0, rows << 15]}
    }
    text = json.dumps(header).encode()
    with (source / "model.safetensors").open("wb") as file:  # zeros that take no space on disk
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + (rows << 15))
    (source / "config.json").write_text("{}")

    def grown(slice_bytes: int) -> int:
        out = fresh.run(MEMORY, source, tmp_path / "out", scheme, slice_bytes)
        shutil.rmtree(tmp_path / "out")
        return int(out.stdout)

    tensor_mib = rows * 2**15 // 2**20
    assert grown(2**22) < 100 < tensor_mib // 4
    if scheme == "FP8_DYNAMIC":  # the figure would show a tensor that is read as a whole
        assert grown(2**30) > tensor_mib


def test_killed_conversions_resume_to_the_same_result(tmp_path: Path) -> None:
    """A dozen kills by default; FP8KIT_KILLS=200 for the long run."""
    kills = os.environ.get("FP8KIT_KILLS", "12")
    out = fresh.run("import interruptions; interruptions.main()", tmp_path, kills, first=TESTS)
    counts = json.loads(out.stdout.splitlines()[-1])
    assert counts["random"] + counts["steps"] >= int(kills)
    assert counts["steps"] > 0


class Stop(Exception):
    pass


def interrupted(
    source: Path, destination: Path, whole: int, **options: Any
) -> journal.UnfinishedConversion:
    """Make a run fail after some files are complete."""

    def failing(path: Path) -> None:
        if len(list(path.parent.glob("model*.safetensors"))) == whole:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        Disk(patch).notes("fsync", failing)
        with pytest.raises(Stop):
            stream(source, destination, devices=["cpu"], **options)
    return journal.UnfinishedConversion(destination.resolve())


def test_a_resumed_run_keeps_what_is_whole(nano: Path, tmp_path: Path) -> None:
    wanted = all_bytes(stream(nano, tmp_path / "wanted"))
    partial = interrupted(nano, tmp_path / "out", 3)
    kept = {p.name: p.stat().st_ino for p in partial.folder.glob("*.safetensors")}
    assert len(kept) == 3
    assert list(partial.folder.glob(".*")) == []
    assert not (tmp_path / "out").exists()
    stream(nano, tmp_path / "out")
    assert all_bytes(tmp_path / "out") == wanted
    assert {n: (tmp_path / "out" / n).stat().st_ino for n in kept} == kept
    assert only(tmp_path / "out") == ["out", "wanted"]


@pytest.mark.parametrize("damage", ["shorter", "longer", "header", "empty", "part"])
def test_a_half_written_file_is_written_again(damage: str, nano: Path, tmp_path: Path) -> None:
    wanted = all_bytes(stream(nano, tmp_path / "wanted"))
    partial = interrupted(nano, tmp_path / "out", 3)
    file = min(partial.folder.glob("*.safetensors"))
    data = file.read_bytes()
    changed = {
        "shorter": data[:-1],
        "longer": data + b"x",
        "header": data[:20] + b"?" + data[21:],
        "empty": b"",
        "part": data,
    }
    file.write_bytes(changed[damage])
    if damage == "part":
        file.rename(file.with_name(f".{file.name}.0.part"))
    stream(nano, tmp_path / "out")
    assert all_bytes(tmp_path / "out") == wanted


def test_half_copied_files_are_copied_again(nano: Path, tmp_path: Path) -> None:
    wanted = all_bytes(stream(nano, tmp_path / "wanted"))
    partial = interrupted(nano, tmp_path / "out", 3)
    (partial.folder / "tokenizer.json").write_text("{")
    (partial.folder / "additional_chat_templates").mkdir()
    (partial.folder / "stray").write_text("x")
    stream(nano, tmp_path / "out")
    assert all_bytes(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"scheme": "FP8_BLOCK"}, r"\(scheme FP8_DYNAMIC then, FP8_BLOCK now\)"),
        ({"exclude": ["*.o_proj"]}, r"\(exclude not given then, '\*.o_proj' now\)"),
        ({"target": "sglang"}, r"\(target vllm then, sglang now\)"),
        ({"max_shard_bytes": 10**6}, r"\(files of up to 500 kB then, 1.00 MB now\)"),
        ({"dtype": torch.float32}, r"\(dtype not given then, torch.float32 now\)"),
    ],
)
def test_another_run_does_not_continue(
    options: dict[str, Any], named: str, nano: Path, tmp_path: Path
) -> None:
    partial = interrupted(nano, tmp_path / "out", 2)
    before = all_bytes(partial.folder)
    with pytest.raises(CheckpointError, match=f"it was another one {named}.*start anew: rm -r"):
        stream(nano, tmp_path / "out", **options)
    assert all_bytes(partial.folder) == before
    stream(nano, tmp_path / "out")


def test_a_changed_source_does_not_continue(nano: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(nano, source)
    interrupted(source, tmp_path / "out", 2)
    weight = weights_of(source)["model.layers.0.mlp.up_proj.weight"]
    edit_tensors(source, model__layers__0__mlp__up_proj__weight=weight + 1)
    with pytest.raises(CheckpointError, match="the files of the source have changed"):
        stream(source, tmp_path / "out")


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_journal_says_how_to_start_anew(text: str, nano: Path, tmp_path: Path) -> None:
    partial = interrupted(nano, tmp_path / "out", 2)
    (partial.home / "journal.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"journal.json is damaged.*Start anew: rm -r \S+$"):
        stream(nano, tmp_path / "out")


def test_two_runs_at_once(nano: Path, tmp_path: Path) -> None:
    partial = journal.UnfinishedConversion((tmp_path / "out").resolve())
    with partial.locked(), pytest.raises(CheckpointError, match="Another process is writing"):
        stream(nano, tmp_path / "out")
    stream(nano, tmp_path / "out")


def test_a_destination_that_appears_meanwhile_stays_and_no_lock_is_left(
    nano: Path, tmp_path: Path, disk: Disk
) -> None:
    """Another run ends after the first check and before the lock is taken."""
    out, others = tmp_path / "out", []

    def another(made: Path) -> None:
        if made.name == ".out.partial" and not others:
            others.append(made)
            stream(nano, out, "FP8_BLOCK")

    disk.notes("mkdir", another)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        stream(nano, out)
    assert others
    assert only(out) == ["out"]
    assert open_checkpoint(out).spec.scheme.name == "FP8_BLOCK"


@pytest.mark.parametrize(
    "place", ["", "lock", "journal.json", "journal.new", "checkpoint", "checkpoint/X"]
)
def test_links_that_somebody_put_in_the_way_lead_nowhere(
    place: str, nano: Path, tmp_path: Path
) -> None:
    """Files are written only into the destination, and no link gets there."""
    out, elsewhere = stream(nano, tmp_path / "out"), tmp_path / "elsewhere"
    shutil.copytree(out, elsewhere)
    shutil.rmtree(out)
    before = all_bytes(elsewhere)
    home = tmp_path / ".out.partial"
    if place.endswith("X"):  # whole, as a resumed run would find it
        (home / "checkpoint").mkdir(parents=True)
        for name in ("model.safetensors", "config.json"):
            (home / "checkpoint" / name).symlink_to(elsewhere / name)
        assert not any(p.is_symlink() for p in stream(nano, out).iterdir())
    else:
        home.mkdir() if place else None
        file = {"": "", "checkpoint": ""}.get(place, "config.json")
        (home / place).symlink_to(elsewhere / file)
        with pytest.raises(CheckpointError, match=r"is a symbolic link, to .*elsewhere"):
            stream(nano, out)
        assert not out.exists()
    assert all_bytes(elsewhere) == before


@pytest.mark.parametrize(("scheme", "again"), [("FP8_BLOCK", True), ("FP8_DYNAMIC", False)])
def test_traces_of_a_finished_run_belong_to_it_alone(
    scheme: str, again: bool, nano: Path, tmp_path: Path, disk: Disk
) -> None:
    out = tmp_path / "out"

    def killed(synced: Path) -> None:
        if synced == out.parent:  # the last step: the new name is made durable
            raise Stop

    disk.notes("fsync", killed)
    with pytest.raises(Stop):
        stream(nano, out)
    disk.mend()
    number = out.stat().st_ino
    if again:
        with pytest.raises(CheckpointError, match="exists and is not empty"):
            stream(nano, out, scheme)
    stream(nano, out, scheme, overwrite=True)
    assert open_checkpoint(out).spec.scheme.name == scheme
    assert (out.stat().st_ino != number) == again
    assert only(out) == ["out"]


def test_a_finished_destination_is_refused(nano: Path, tmp_path: Path) -> None:
    out = stream(nano, tmp_path / "out")
    before = all_bytes(out)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        stream(nano, out, "FP8_BLOCK")
    assert all_bytes(out) == before
    stream(nano, out, "FP8_BLOCK", overwrite=True)
    assert open_checkpoint(out).spec.scheme.name == "FP8_BLOCK"
    assert only(out) == ["out"]


def test_a_full_disk_says_what_is_kept(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.up_proj.weight": torch.randn(128 << i, 256) for i in range(4)}
    source = plain(tmp_path / "source", tensors)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"no room to write.*3 of 4 files are.*continues"):
            stream(source, tmp_path / "out", devices=["cpu"], max_shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert only(source) == [".out.partial", "source"]
    stream(source, tmp_path / "out", max_shard_bytes=1)
    assert fp8kit.verify_checkpoint(source, tmp_path / "out").problems == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_any_write(code: int, nano: Path, tmp_path: Path, disk: Disk) -> None:
    def of_weights(path: Path) -> bool:
        return path.suffix == ".safetensors"

    faults: dict[str, tuple[str, Callable[..., bool]]] = {
        "weights": ("fsync", of_weights),
        "copies": ("copyfile", lambda *_: True),
        "the rest": ("fsync", lambda path: not of_weights(path)),
    }
    for call, when in faults.values():
        disk.refuses(call, code, when)
        with pytest.raises(CheckpointError, match="no room to write") as caught:
            stream(nano, tmp_path / "out")
        assert str(nano) not in str(caught.value)
        disk.mend()
    stream(nano, tmp_path / "out")


def test_a_file_beside_the_weights_that_cannot_be_read(
    nano: Path, tmp_path: Path, disk: Disk
) -> None:
    disk.refuses("copyfile", errno.EACCES)
    message = rf"{nano}/\S+ cannot be opened: Permission denied\. It is copied"
    with pytest.raises(CheckpointError, match=message):
        stream(nano, tmp_path / "out")


def test_other_errors_of_the_disk_are_not_called_full(
    nano: Path, tmp_path: Path, disk: Disk
) -> None:
    disk.refuses("fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        stream(nano, tmp_path / "out")


def _edited(**changes: Any) -> Callable[[Path], None]:
    return lambda source: edit_tensors(source, **changes)


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (
            _edited(layers__1__up_proj__weight=torch.full((128, 256), float("nan"))),
            ConversionError,
            "layers.1.up_proj.weight holds NaN",
        ),
        (
            lambda source: (source / "model.safetensors").unlink(),
            CheckpointError,
            "no safetensors files",
        ),
        (
            lambda source: edit_json(
                source / "config.json", quantization_config={"quant_method": "x"}
            ),
            CheckpointError,
            "quant_method",
        ),
    ],
)
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_TENSOR"])
def test_bad_sources(
    edit: Callable[[Path], None], error: type[Exception], said: str, scheme: str, tmp_path: Path
) -> None:
    source = plain(tmp_path / "source", weights())
    edit(source)
    with pytest.raises(error, match=said):
        stream(source, tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


def test_a_source_that_shrinks_meanwhile(tmp_path: Path, disk: Disk) -> None:
    source = plain(tmp_path / "source", weights())
    disk.has_free(10**9, lambda: os.truncate(source / "model.safetensors", 1000))
    with pytest.raises(CheckpointError, match="ends at byte"):
        stream(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"scheme": "FP8"}, ValueError, "calibration data.*weights alone.*calibrate="),
        ({"scheme": "FP9"}, ValueError, "Known schemes"),
        ({"target": "tensorrt"}, ValueError, "It must be one of vllm"),
        ({"dtype": torch.int8}, ValueError, "Got dtype torch.int8"),
        ({"exclude": ["nothing"]}, ConversionError, "matches no linear layer"),
        ({"include": ["*.norm"]}, ConversionError, "matches no linear layer"),
        ({"exclude": ["*_proj"]}, ConversionError, "No layer of this checkpoint"),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes=0"),
    ],
)
def test_bad_recipes(
    options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    source = plain(tmp_path / "source", weights())
    with pytest.raises(error, match=said):
        stream(source, tmp_path / "out", **options)
    assert only(source) == ["source"]


def test_fp8_is_not_quantized_again(nano: Path, tmp_path: Path) -> None:
    out = stream(nano, tmp_path / "out")
    with pytest.raises(CheckpointError, match="FP8_DYNAMIC already"):
        stream(out, tmp_path / "again")


def test_a_lone_file(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", weights())
    (source / "tokenizer.json").write_text("{}")
    lone = (source / "model.safetensors").rename(source / "lone.safetensors")
    out = stream(lone, tmp_path / "out")
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    assert len(open_checkpoint(out).layers) == 3
    assert fp8kit.verify_checkpoint(lone, out).problems == []


def test_what_the_headers_say_of_the_model_stays(tmp_path: Path) -> None:
    said = {"modelspec.architecture": "ltx-video", "config": '{"layers": 3}', "format": "pt"}
    old = said | {"format": "tf", "modelspec.hash_sha256": "0x1"}
    save_file(weights(), tmp_path / "a.safetensors", metadata=old)
    out = stream(tmp_path / "a.safetensors", tmp_path / "b", max_shard_bytes=60_000)
    files = [*out.glob("*.safetensors")]
    assert len(files) > 1
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == said


def test_a_lone_file_that_is_a_link_to_a_blob(tmp_path: Path) -> None:
    source = plain(tmp_path / "blobs", weights())
    blob = (source / "model.safetensors").rename(source / "0a1b2c")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    out = stream(link, tmp_path / "out")
    assert len(open_checkpoint(out).layers) == 3


def test_files_that_the_source_links_to_are_not_replaced(tmp_path: Path) -> None:
    original = plain(tmp_path / "original", weights())
    source = tmp_path / "source"
    source.mkdir()
    for file in original.iterdir():
        (source / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="is or holds the source"):
        stream(source, original, overwrite=True)
    with pytest.raises(CheckpointError, match="lies inside the source"):
        stream(source, source / "inside")
    assert read(original).keys() == weights().keys()


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("weight_scale", torch.ones(128, 1)),
        ("weight_scale", torch.ones(1)),
        ("weight_scale_inv", torch.ones(1, 2)),
        ("input_scale", torch.ones(1)),
    ],
)
def test_scales_beside_dense_weights_are_refused_at_once(
    kind: str, left: Tensor, tmp_path: Path
) -> None:
    source = plain(tmp_path / "source", weights() | {f"layers.0.up_proj.{kind}": left})
    with pytest.raises(CheckpointError, match=f"layers.0.up_proj.{kind}.*earlier quantization"):
        stream(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_no_devices(nano: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Got no devices"):
        stream(nano, tmp_path / "out", devices=[])


def test_the_source_is_no_destination(nano: Path) -> None:
    with pytest.raises(CheckpointError, match="is or holds the source"):
        stream(nano, nano, overwrite=True)


def test_workers(faked_cuda: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="finds 0 cuda devices here"):
        workers_on(["cpu", "cuda:1"], 2)
    faked_cuda(2)
    assert (
        workers_on(["cpu", "cuda:1"], 2)
        == [torch.device("cpu")] * 2 + [torch.device("cuda", 1)] * 2
    )
    assert len(workers_on(["cpu"])) == len(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match=r"Got 10+ workers\. 1 to 1024"):
        workers_on(["cpu"], 10**20)
    with pytest.raises(ValueError, match="Got 0 workers"):
        workers_on(["cpu"], 0)


def test_progress_counts_every_byte_once(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = []
    make = checkpoints._bar

    def watched(what: str, total: int, done: int, progress: bool | None) -> Any:
        with contextlib.redirect_stderr(io.StringIO()):
            bars.append(make(what, total, done, True))
        return bars[-1]

    monkeypatch.setattr(checkpoints, "_bar", watched)
    total = sum(i.nbytes for i in open_checkpoint(nano).tensors.values())
    for scheme in ("FP8_DYNAMIC", "FP8_TENSOR"):
        stream(nano, tmp_path / scheme, scheme)
        assert bars[-1].n == bars[-1].total == total
    fp8kit.verify_checkpoint(nano, tmp_path / "FP8_DYNAMIC")
    assert bars[-1].n == bars[-1].total == total
    interrupted(nano, tmp_path / "out", 3)
    stream(nano, tmp_path / "out")
    assert 0 < bars[-1].initial < bars[-1].n == total


def test_a_source_that_changes_meanwhile(nano: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(nano, source)

    def writing(*work: Any) -> None:
        executor.write_shards(*work, devices=[torch.device("cpu")])
        os.utime(source / "model.safetensors", (1, 1))

    with pytest.raises(CheckpointError, match=r"model.safetensors has changed since it was opened"):
        stream(source, tmp_path / "out", runner=writing)
    assert not (tmp_path / "out").exists()


def test_without_stderr_there_is_no_bar(nano: Path, tmp_path: Path) -> None:
    with contextlib.redirect_stderr(None):  # as Python finds it where it is closed
        quantize_checkpoint(nano, tmp_path / "out", progress=True)
        assert fp8kit.verify_checkpoint(nano, tmp_path / "out", progress=True).problems == []


def test_workers_end_before_an_interrupted_run(nano: Path, tmp_path: Path, disk: Disk) -> None:
    events: list[str] = []

    def slow(file: Path) -> None:
        if file.name.startswith(".model") and not events:
            time.sleep(0.2)  # until all wait for this worker
            events.append("interrupted")
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.3)
            events.append("worker ended")

    disk.notes("fsync", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # some runners ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            stream(nano, tmp_path / "out", devices=["cpu"])
    finally:
        signal.signal(signal.SIGINT, before)
    events.append("run ended")
    assert events == ["interrupted", "worker ended", "run ended"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_threads_that_do_not_start(
    error: type[BaseException], nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise error

    stream(nano, tmp_path / "first")  # libraries have started threads of their own by then
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(error):
            stream(nano, tmp_path / "out")
    stream(nano, tmp_path / "out")


def test_threads_are_given_back(nano: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    stream(nano, tmp_path / "out")
    assert torch.get_num_threads() == before
