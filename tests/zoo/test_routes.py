"""Every route to a checkpoint for Transformers is refused, or its result loads completely.

The whole list: ``python -m zoo.routes``, with ``src`` and ``tests`` in ``PYTHONPATH``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fp8kit
from zoo import of_transformers, of_vision
from zoo.architecture import Architecture
from zoo.routes import ROUTES, judged, routes

of_vision.install_stand_ins()

LOADS, REFUSED = dict.fromkeys(ROUTES, "loads"), dict.fromkeys(ROUTES, "refused")
# the expected result of each route in FP8_DYNAMIC, by architecture
SLICE = {
    "LlamaForCausalLM": LOADS,
    "Qwen2MoeForCausalLM": LOADS,
    # layers that the model names differently than its files: heads, towers, routers
    "ModernBertForMaskedLM": LOADS,
    "BertForMaskedLM": LOADS,
    "XLNetLMHeadModel": LOADS,
    "PhimoeForCausalLM": LOADS,
    "Gemma3ForConditionalGeneration": LOADS,
    "KimiLinearForCausalLM": LOADS,
    # experts that no rule stacks; stacks outside a module of experts, which streaming keeps dense
    "Qwen3VLMoeForConditionalGeneration": REFUSED,
    "ZayaForCausalLM": REFUSED,
    "GraniteMoeForCausalLM": {**REFUSED, "quantize": "loads", "quantize-convert": "loads"},
    # layers that rules join or split without their scales
    "Dinov2ForImageClassification": REFUSED,
}


@pytest.fixture(scope="module")
def known() -> dict[str, Architecture]:
    return {a.name.partition("/")[2]: a for a in of_transformers.architectures()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICE)
def test_what_is_written_for_transformers_loads_there(
    name: str, known: dict[str, Architecture]
) -> None:
    if name not in known:
        pytest.skip(f"{name} is in a later release than the one installed")
    found = routes(known[name], "FP8_DYNAMIC")
    assert {way: said.partition(":")[0] for way, said in found.items()} == SLICE[name], found


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "MXFP8"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "Qwen2MoeForCausalLM"])
def test_other_dialects_load_there(name: str, scheme: str, known: dict[str, Architecture]) -> None:
    ways = ("save", "save_pretrained", "quantize")
    assert set(routes(known[name], scheme, ways).values()) == {"loads"}


def test_the_judge_sees_what_is_wrong(known: dict[str, Architecture], tmp_path: Path) -> None:
    model: Any = known["BertForMaskedLM"].model(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    kind = type(model)
    model, before = kind.from_pretrained(tmp_path / "dense", output_loading_info=True)
    fp8kit.convert(model)
    fp8kit.save(model, tmp_path / "fp8", target="transformers")
    assert not judged(tmp_path / "fp8", kind, before)
    shard, config = tmp_path / "fp8" / "model.safetensors", tmp_path / "fp8" / "config.json"
    whole, said = load_file(shard), json.loads(config.read_text())
    name = next(n for n in whole if n.endswith("weight_scale"))
    save_file({n: t for n, t in whole.items() if n != name}, shard, {"format": "pt"})
    assert judged(tmp_path / "fp8", kind, before).startswith("1 missing_keys")
    save_file(whole, shard, {"format": "pt"})
    said["quantization_config"]["ignore"] = ["cls"]
    config.write_text(json.dumps(said))
    assert "missing_keys: cls.predictions" in judged(tmp_path / "fp8", kind, before)
