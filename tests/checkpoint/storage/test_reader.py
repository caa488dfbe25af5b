"""Opening checkpoints: sound ones are read, damaged ones are refused, naming the fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_samples import NANO, SHARD, converted, edit_json, edit_tensors, saved
from fp8kit.checkpoint.storage.reader import open_checkpoint, scan
from fp8kit.errors import CheckpointError
from fp8kit.formats import SCHEMES
from numerics import assert_bits_equal, assert_same_tensors

INDEX = "model.safetensors.index.json"
E4 = torch.float8_e4m3fn


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return saved(tmp_path / "sound")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = saved(tmp_path / "sharded", max_shard_bytes=20_000)
    assert (path / INDEX).exists()
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_high_precision_checkpoint() -> None:
    checkpoint = open_checkpoint(NANO)
    assert checkpoint.spec is None
    assert checkpoint.layers == {}
    assert checkpoint.dtype == torch.bfloat16
    assert checkpoint.tensors["model.norm.weight"].shape == (256,)


@pytest.mark.parametrize("shards", ["sound", "sharded"])
def test_tensors_come_back_bit_for_bit(shards: str, request: pytest.FixtureRequest) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(shards))
    assert checkpoint.spec is not None
    assert checkpoint.spec.scheme == SCHEMES["FP8_DYNAMIC"]
    assert list(checkpoint.layers) == ["down", "up"]
    torch.manual_seed(0)
    state = converted().state_dict()
    found = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert_same_tensors(found, {name: state[name] for name in checkpoint.tensors})


def test_a_file_that_is_all_of_its_folder_has_the_config_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", "FP8_WEIGHT_ONLY")
    checkpoint = open_checkpoint(path / SHARD)
    assert (checkpoint.path, checkpoint.shards) == (path, (SHARD,))
    assert checkpoint.spec is not None
    assert checkpoint.spec.scheme == SCHEMES["FP8_WEIGHT_ONLY"]
    divided = {"quant_method": "fp8", "weight_scale_semantics": "inverse"}
    edit_json(path / "config.json", quantization_config=divided)
    refused(path / SHARD, "It must be absent, for scales that multiply")
    shutil.copy(path / SHARD, path / "other.safetensors")  # which is of another model
    assert open_checkpoint(path / "other.safetensors").config == {}
    (path / SHARD).rename(path / "another.safetensors")
    assert open_checkpoint(path / "other.safetensors").config == {}


def test_a_file_beside_the_config_of_modelopt_is_read_by_it(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", "FP8_WEIGHT_ONLY")
    (path / "config.json").unlink()
    said = {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    for given in (path, path / SHARD):
        spec = open_checkpoint(given).spec
        assert spec is not None
        assert spec.scheme == SCHEMES["FP8_DYNAMIC"]
    said["quantization"]["quant_algo"] = "INT8"
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    refused(path / SHARD, "quant_algo = 'INT8'")


def test_tensors_own_their_memory(sound: Path) -> None:
    steps = open_checkpoint(sound).read("steps")
    (sound / SHARD).write_bytes(b"")
    assert steps.tolist() == [3, 4]


@pytest.mark.parametrize("scheme", ["FP8", "FP8_TENSOR"])
def test_scales_per_tensor_are_one_number_on_disk(tmp_path: Path, scheme: str) -> None:
    path = saved(tmp_path / "c", scheme)
    on_disk = load_file(path / SHARD)
    for name in ["up.weight_scale"] + ["up.input_scale"] * (scheme == "FP8"):
        ours = open_checkpoint(path).read(name)
        assert on_disk[name].shape == (1,)
        assert ours.shape == (1, 1)
        assert ours.item() == on_disk[name].item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_scales_are_upcast(sound: Path, dtype: torch.dtype) -> None:
    scale = load_file(sound / SHARD)["up.weight_scale"].to(dtype).clamp(min=1e-4)
    edit_tensors(sound, up__weight_scale=scale.flatten())
    read = open_checkpoint(sound).read("up.weight_scale")
    assert_bits_equal(read, scale.float())


def test_source_does_not_exist(tmp_path: Path) -> None:
    refused(tmp_path / "none", "There is no directory .*none")


def test_source_without_weights(tmp_path: Path) -> None:
    refused(tmp_path, "holds no safetensors files: it is empty")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    refused(tmp_path, r"only pytorch_model.bin.*never from pickle files")


def test_two_sets_of_weights(sharded: Path) -> None:
    shutil.copy(NANO / SHARD, sharded)
    refused(sharded, "holds both model.safetensors and model.safetensors.index.json")


@pytest.mark.parametrize(
    ("stem", "index"),
    [("model.fp8", "model.safetensors.index.fp8.json"), ("quant", "quant.safetensors.index.json")],
)
def test_shards_of_a_variant_or_another_stem(stem: str, index: str, sharded: Path) -> None:
    before = open_checkpoint(sharded).tensors
    for file in [*sharded.glob("*.safetensors"), sharded / INDEX]:
        text = file.read_bytes()
        if file.name == INDEX:
            text = text.replace(b"model-", f"{stem}-".encode())
        renamed = index if file.name == INDEX else file.name.replace("model-", f"{stem}-")
        file.unlink()
        (sharded / renamed).write_bytes(text)
    assert open_checkpoint(sharded).tensors.keys() == before.keys()
    *lost, _ = sharded.glob("*.safetensors")
    for shard in lost:  # one file is left, which the index does not take for the model
        shard.unlink()
    refused(sharded, f"{lost[0].name} is missing in")


def test_one_file_with_an_index_of_its_own(sound: Path) -> None:
    names = load_file(sound / SHARD)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SHARD)}
    (sound / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(sound).shards == (SHARD,)
    edit_tensors(sound, stray=torch.ones(3))
    refused(sound, "holds stray, which the index does not place in it")


def test_an_index_may_list_further_files_beside_the_usual_one(sound: Path) -> None:
    """compressed-tensors adds the layers of multi-token prediction so."""
    names = load_file(sound / SHARD)
    save_file({"mtp": torch.ones(2)}, sound / "model_mtp.safetensors")
    index = {"weight_map": dict.fromkeys(names, SHARD) | {"mtp": "model_mtp.safetensors"}}
    (sound / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(sound)
    assert checkpoint.shards == (SHARD, "model_mtp.safetensors")
    assert checkpoint.tensors.keys() == names.keys() | {"mtp"}


@pytest.mark.parametrize("keep", [0, 5, 400, -3])
def test_truncated_file_is_named(sharded: Path, keep: int) -> None:
    name = sorted(p.name for p in sharded.glob("*.safetensors"))[1]
    content = (sharded / name).read_bytes()
    (sharded / name).write_bytes(content[:keep])
    refused(sharded, f"{name} is damaged. What is wrong: ")


@pytest.mark.parametrize(
    "shard",
    ["../a.safetensors", "/a.safetensors", "b/../a.safetensors", "b\\a.safetensors", "a.bin", 3],
)
def test_index_cannot_lead_out_of_the_directory(sharded: Path, shard: object) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit_json(sharded / INDEX, weight_map={**index, "up.weight": shard})
    refused(sharded, "places up.weight in .*A shard is the plain name")


@pytest.mark.parametrize("weights", [None, [], {}, "x"])
def test_index_without_a_map(sharded: Path, weights: object) -> None:
    edit_json(sharded / INDEX, weight_map=weights)
    refused(sharded, "it has no weight_map")


def test_index_and_shards_disagree(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    shards = sorted(set(index.values()))
    wrong = next(s for s in shards if s != index["up.weight"])
    edit_json(sharded / INDEX, weight_map={**index, "up.weight": wrong})
    refused(sharded, f"{wrong} is damaged.*places up.weight in it, but it is not there")
    refused(sharded, f"{index['up.weight']} is damaged.*holds up.weight, which the index does not")


def test_config_is_not_an_object(sound: Path) -> None:
    (sound / "config.json").write_text("{")
    refused(sound, "config.json is damaged")


def test_fp8_without_a_config_is_told_by_its_tensors(sound: Path) -> None:
    (sound / "config.json").unlink()
    checkpoint = open_checkpoint(sound)
    assert checkpoint.dialect is not None
    assert checkpoint.dialect.name == "bare"
    assert {layer.scheme for layer in checkpoint.layers.values()} == {SCHEMES["FP8_DYNAMIC"]}
    edit_tensors(sound, up__weight_scale=None)
    refused(sound, "up.weight is torch.float8_e4m3fn and has no up.weight_scale")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up__weight_scale": None}, "up.weight is torch.float8_e4m3fn and has no up.weight_scale"),
        ({"up__weight": None}, r"up.weight_scale has no FP8 up.weight beside it\."),
        (
            {"up__input_scale": torch.ones(1)},
            "up.input_scale is there, and the config says FP8_DYN",
        ),
        ({"up__weight_scale": torch.ones(203, 1).double()}, "up.weight_scale is torch.float64 of"),
        ({"up__weight": torch.ones(203).to(E4)}, r"up.weight is .* FP8 weights are .* \[N, K\]"),
        ({"up__weight": torch.ones(2, 203, 129).to(E4)}, r"up.weight_scale is .* \[2, 203, 129\]"),
        ({"up__bias": torch.ones(203).to(E4)}, "up.bias is .* and is not the weight of a layer"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_does_not_fit_is_named_with_its_file(
    sound: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    edit_tensors(sound, **changes)
    refused(sound, f"^model.safetensors: {message}")


def test_static_scheme_without_input_scale(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", "FP8")
    edit_tensors(path, up__input_scale=None)
    refused(path, "has no up.input_scale. FP8 needs it")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_finite_and_positive(sound: Path, bad: float) -> None:
    scale = load_file(sound / SHARD)["up.weight_scale"]
    scale[77] = bad
    edit_tensors(sound, up__weight_scale=scale)
    checkpoint = open_checkpoint(sound)
    assert len(checkpoint.scale_problems()) == 1
    with pytest.raises(CheckpointError, match=r"model.safetensors: up.weight_scale holds NaN, inf"):
        checkpoint.read("up.weight_scale")


def test_scan_collects_every_damage(sharded: Path) -> None:
    first, second = sorted(p.name for p in sharded.glob("*.safetensors"))[:2]
    (sharded / first).unlink()
    (sharded / second).write_bytes(b"")
    found = "\n".join(scan(sharded).problems)
    assert f"{first} is missing" in found
    assert f"{second} is damaged" in found


def test_widths_of_no_layer_are_refused(sound: Path) -> None:
    with pytest.raises(CheckpointError, match=r"widths: '\*\.none' matches no FP8 layer"):
        open_checkpoint(sound, {"*.none": (64, 64)})


def test_dtype_comes_from_the_config_or_the_tensors(sound: Path) -> None:
    assert open_checkpoint(sound).dtype == torch.bfloat16
    edit_json(sound / "config.json", dtype=None, torch_dtype="float16")
    assert open_checkpoint(sound).dtype == torch.float16
    edit_json(sound / "config.json", torch_dtype="save")
    assert open_checkpoint(sound).dtype == torch.bfloat16
