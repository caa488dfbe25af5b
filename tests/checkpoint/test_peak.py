"""Loading takes at most the memory of the final model, one layer, and five per cent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fp8kit
import fresh
from checkpoint_samples import edit_json
from golden.layout import compressed

if not Path("/proc/self/clear_refs").exists():
    pytest.skip("needs the memory counters of Linux", allow_module_level=True)

RUN = "import sys, peak; peak.main(*sys.argv[1:])"
WIDTH, BLOCKS, SHARDS = 1024, 16, 4
LEAST = 90 * 2**20  # bytes of a model, so that five per cent of it are more than noise
LAYER = 2 * 4 * WIDTH * WIDTH  # bytes of the largest layer in bf16, gate and up joined


def measured(way: str, small: Path, large: Path) -> dict[str, int]:
    done = fresh.run(RUN, way, small, large, first=Path(__file__).parents[1])
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def bound(found: dict[str, int]) -> float:
    return 1.05 * found["final"] + LAYER


def write(path: Path, blocks: int, width: int, fp8: bool) -> Path:
    path.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for i in range(blocks):
        for name, (n, k) in {
            "gate_proj": (2 * width, width),
            "up_proj": (2 * width, width),
            "down_proj": (width, 2 * width),
        }.items():
            key = f"{i}.{name}.weight"
            if fp8:
                tensors[key] = torch.full((n, k), 0.5).to(torch.float8_e4m3fn)
                tensors[f"{key}_scale"] = torch.ones(n, 1)
            else:
                tensors[key] = torch.full((n, k), 0.5, dtype=torch.bfloat16)
    names, index = list(tensors), {}
    for shard in range(SHARDS):  # gate and up of one block lie in different files
        file = f"model-{shard}.safetensors"
        part = {n: tensors[n] for n in names[shard::SHARDS]}
        if part:
            save_file(part, path / file)
            index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (path / "shape.json").write_text(json.dumps({"blocks": blocks, "width": width}))
    config: dict[str, Any] = {"dtype": "bfloat16"}
    if fp8:
        inputs = {"strategy": "token", "dynamic": True}
        config["quantization_config"] = compressed({"strategy": "channel"}, inputs, ignore=[])
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("dense")
    return write(path / "small", 1, 256, False), write(path / "large", BLOCKS, WIDTH, False)


@pytest.mark.parametrize("way", ["quantize", "join", "fp8"])
def test_loading_into_a_model_on_meta(tmp_path: Path, dense: tuple[Path, Path], way: str) -> None:
    small, large = dense
    if way == "fp8":
        small = write(tmp_path / "small", 1, 256, True)
        large = write(tmp_path / "large", BLOCKS, WIDTH, True)
    found = measured(way, small, large)
    assert found["final"] > LEAST
    assert 0.95 * found["final"] < found["peak"] < bound(found), found
    assert found["reload"] < 0.05 * found["final"] + 2 * LAYER, found


def test_mx_weights_go_as_they_are_rebased(dense: tuple[Path, Path]) -> None:
    found = measured("mx", *dense)
    work = 16 * 2 * WIDTH * WIDTH  # of one layer: a code's place in a table takes 8 bytes
    assert 0.95 * found["final"] < found["peak"] < bound(found) + work < 1.8 * found["final"], found


def test_the_bound_can_fail(dense: tuple[Path, Path]) -> None:
    found = measured("naive", *dense)
    for peak in (found["peak"], found["watched"]):
        assert peak > 1.5 * found["final"]
        assert peak > bound(found)


@pytest.mark.parametrize("way", ["hf-quantize", "hf-fp8", "hf-from-pretrained"])
def test_loading_a_transformers_model(tmp_path: Path, way: str) -> None:
    transformers = pytest.importorskip("transformers")
    for name, layers, width in (("small", 1, 256), ("large", 6, WIDTH)):
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            architectures=["LlamaForCausalLM"],
        )
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).bfloat16()
        state = {
            n: torch.full(t.shape, 0.5, dtype=torch.bfloat16) for n, t in model.state_dict().items()
        }
        path = tmp_path / name
        path.mkdir()
        save_file(state, path / "model.safetensors")
        config.save_pretrained(path)
        edit_json(path / "config.json", dtype="bfloat16")
        if way == "hf-fp8":
            fp8kit.save(fp8kit.load(path, scheme="FP8_DYNAMIC"), tmp_path / f"{name}-fp8")
    ending = "-fp8" if way == "hf-fp8" else ""
    found = measured(way, tmp_path / f"small{ending}", tmp_path / f"large{ending}")
    assert found["final"] > LEAST
    assert 0.95 * found["final"] < found["peak"] < bound(found), found
