"""A part of the zoo, and tests that its checks can fail. ``make zoo`` runs the whole zoo."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8kit
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from zoo import check, of_torch, of_transformers, of_vision, page
from zoo.architecture import Architecture
from zoo.fake_experts import EXACT, FakeExperts
from zoo.pool import run

of_vision.install_stand_ins()  # before Transformers imports torchvision, which wants them
from transformers.models.mixtral import modeling_mixtral as mixtral  # noqa: E402

ONE = (("FP8_DYNAMIC", "bf16"),)
PLAIN = {a.name: a for a in of_torch.architectures()}
# one model of each kind, and what its plan converts
SLICE = {
    "transformers/LlamaForCausalLM": "model.layers.*.mlp.down_proj",
    "transformers/GPT2LMHeadModel": "transformer.h.*.attn.c_attn",
    "transformers/FalconForCausalLM": "transformer.h.*.mlp.dense_h_to_4h",
    "transformers/BertForMaskedLM": "bert.encoder.layer.*.output.dense",
    "transformers/ModernBertForMaskedLM": "model.layers.*.attn.Wqkv",
    "transformers/DeiTForImageClassificationWithTeacher": "",
    "transformers/Qwen2MoeForCausalLM": "model.layers.*.mlp.experts (4 experts)",
    "transformers/GptOssForCausalLM": "model.layers.*.mlp.experts (4 experts)",
    "transformers/Llama4ForCausalLM": "model.layers.*.feed_forward.experts (4 experts)",
    "transformers/NemotronHForCausalLM": "model.layers.*.mixer.experts (4 experts)",
    "transformers/LlavaForConditionalGeneration": "",
    **dict.fromkeys(
        ("transformers/BloomForCausalLM", "transformers/BloomForCausalLM (slow but exact)",
            "transformers/DetrForSegmentation", "transformers/FalconMambaForCausalLM",
            "transformers/FunAsrNanoEncoder", "transformers/Gemma3ForConditionalGeneration",
            "transformers/Gemma4VisionModel", "transformers/JambaForCausalLM",
            "transformers/JinaEmbeddingsV3ForMaskedLM", "transformers/MambaForCausalLM",
            "transformers/MobileBertForMaskedLM", "transformers/MobileBertForPreTraining",
            "transformers/OPTForCausalLM", "transformers/Phi3ForCausalLM",
            "transformers/Qwen3ForCausalLM", "transformers/RwkvForCausalLM",
            "transformers/SegGptModel", "transformers/T5ForConditionalGeneration",
            "transformers/ViTForImageClassification", "transformers/WavLMForCTC",
            "transformers/WhisperForCausalLM", "transformers/XLNetLMHeadModel",
            "diffusers/PixArtTransformer2DModel", "diffusers/SD3Transformer2DModel",
            "diffusers/WanTransformer3DModel"), ""),
    "diffusers/FluxTransformer2DModel": "transformer_blocks.*.attn.to_q",
    "diffusers/DiTTransformer2DModel": "transformer_blocks.*.attn1.to_q",
    "diffusers/UNet2DConditionModel (SDXL)": "mid_block.attentions.*.proj_out",
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules(name: str) -> None:
    record = check.check(PLAIN[name], ONE)
    assert record["status"] == ("dense" if name in DENSE else "passes"), record


DENSE = ("torch/nn.Bilinear", "torch/convolutions")


@pytest.fixture(scope="module")
def known() -> dict[str, Architecture]:
    every = list(of_transformers.architectures())
    if find_spec("diffusers"):
        from zoo import of_diffusers

        every += of_diffusers.architectures()
    return {a.name: a for a in every}


def dense(name: str, known: dict[str, Architecture]) -> nn.Module:
    """Build a model that only recent versions of its library have."""
    if name not in known:
        pytest.skip(f"{name} is in a later release than the one installed")
    return known[name].model(torch.bfloat16)


@pytest.mark.parametrize("name", SLICE)
def test_models_of_libraries(name: str, known: dict[str, Architecture]) -> None:
    library = name.partition("/")[0]
    pytest.importorskip(library, reason=f"{library} is not installed, whose model this is")
    record = check.check(known[name], ONE)
    conv1d = "GPT2" in name  # runs as it should, and no checkpoint can hold it
    assert record["status"] == ("refused" if conv1d else "passes"), record
    assert SLICE[name] in ("", *record["converted"])
    heads = ("lm_head", "classifier", "decoder", "proj_out_1", "add_embedding.linear_1")
    assert not set(heads) & set(record["converted"])


@pytest.mark.parametrize(
    "name",
    [
        "timm/beit_base_patch16_224",
        "timm/beitv2_base_patch16_224",
        "timm/eva02_tiny_patch14_224",
        "timm/swinv2_tiny_window8_256",
        "torchvision/swin_t",
    ],
)
def test_vision_models_that_read_weights(name: str) -> None:
    pytest.importorskip("timm", reason="`make zoo` has timm and torchvision in its environment")
    record = check.check({a.name: a for a in of_vision.architectures()}[name], ONE)
    assert record["status"] == "passes", record


def test_what_transformers_joins_as_it_saves_keeps_its_scales(
    known: dict[str, Architecture], tmp_path: Path
) -> None:
    model = dense("transformers/Molmo2TextModel", known)
    fp8kit.convert(model)
    with pytest.raises(fp8kit.CheckpointError, match=r"Save it with fp8kit\.save"):
        model.save_pretrained(tmp_path / "theirs")
    fp8kit.save(model, tmp_path / "ours")
    files = {
        k: t for f in (tmp_path / "ours").glob("*.safetensors") for k, t in load_file(f).items()
    }
    layers = [model.get_submodule(f"layers.0.mlp.{n}_proj") for n in ("up", "gate")]
    parts = [layer.quantized_weight() for layer in layers]
    for kind, held in (
        ("weight", [q.data for q in parts]),
        ("weight_scale", [q.scale for q in parts]),
    ):
        joined = torch.cat([t.float() for t in held])
        assert torch.equal(files[f"layers.0.mlp.ff_proj.{kind}"].float(), joined)


@pytest.mark.parametrize("name", ["Molmo2TextModel", "Tipsv2TextModel"])
def test_joined_layers_without_scales_per_row_are_refused(
    name: str, known: dict[str, Architecture], tmp_path: Path
) -> None:
    model = dense(f"transformers/{name}", known)
    fp8kit.convert(model, "FP8_BLOCK")
    with pytest.raises(fp8kit.CheckpointError, match=r"several FP8 layers as one tensor"):
        fp8kit.save(model, tmp_path / "fp8")


def test_inputs_below_every_floor(known: dict[str, Architecture]) -> None:
    tiny = Architecture(
        "a",
        lambda: nn.Sequential(nn.Linear(128, 128)),
        lambda _: [{"": (torch.randn(4, 128) * 1e-29,)}],
    )
    record = check.check(tiny, (("FP8_BLOCK", "fp32"),))
    assert record["status"] == "passes", record


def test_the_zoo_is_large(known: dict[str, Architecture]) -> None:
    assert len(known) >= 500


def altered(change: Callable[[Fp8Linear], object]) -> dict[str, Any]:
    """Check a model in which the first call changes an FP8 layer."""
    built = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))

    class Meddling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.inner[2], Fp8Linear):
                change(self.inner[2])
            return self.inner(x)

    arch = Architecture("a", Meddling, lambda _: [{"": (torch.randn(4, 128),)}])
    return check.check(arch, (("FP8_DYNAMIC", "fp32"),))


def test_a_wrong_layer_is_found() -> None:
    assert altered(lambda layer: None)["status"] == "passes"
    record = altered(lambda layer: layer.weight_scale.data.mul_(1.01))
    assert record["status"] == "fails"
    assert "inner.2 is off by" in record["cases"]["FP8_DYNAMIC fp32"]


def test_layers_that_were_not_compared_do_not_pass() -> None:
    """A layer whose input is NaN or empty cannot be checked."""

    class Two(nn.Module):
        def __init__(self, blind: tuple[bool, bool]) -> None:
            super().__init__()
            self.blind, self.inner = blind, nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            parts = (x * math.nan if b else x for b in self.blind)
            pairs = zip(self.inner, parts, strict=False)
            return sum(layer(part).nan_to_num() for layer, part in pairs)

    said = []
    for blind in ((False, True), (True, True)):
        arch = Architecture("a", partial(Two, blind), lambda _: [{"": (torch.randn(4, 128),)}])
        said.append(check.check(arch, ONE)["cases"]["FP8_DYNAMIC bf16"])
    assert said[0].startswith("passes, 1 layers never ran, 1 layers were not compared")
    assert said[1] == "wrong: no layer was compared: none ran on an input that is finite"


def test_what_an_engine_would_misread_fails(known: dict[str, Architecture], tmp_path: Path) -> None:
    model = known["transformers/LlamaForCausalLM"].model(torch.bfloat16)
    fp8kit.convert(model)
    fp8kit.save(model, tmp_path / "c")
    assert check._misread(model, tmp_path / "c") == []
    config = json.loads((tmp_path / "c/config.json").read_text())
    config["quantization_config"]["ignore"].append("model.layers.0.self_attn.o_proj")
    (tmp_path / "c/config.json").write_text(json.dumps(config))
    said = check._misread(model, tmp_path / "c")
    assert said == ["model.layers.0.self_attn.o_proj is taken for dense"]


def test_wrong_experts_are_found(known: dict[str, Architecture]) -> None:
    """One expert in four computes with the codes of another."""
    arch, meddles = known["transformers/MixtralForCausalLM"], [False]

    class Meddling(Architecture):
        def run(self, model: nn.Module, dtype: torch.dtype, candidate: int) -> list[Tensor]:
            layer = next((m for m in model.modules() if isinstance(m, ExpertTensors)), None)
            if layer is not None and meddles[0]:
                layer.codes("down_proj")[1] = layer.codes("down_proj")[2]
            return super().run(model, dtype, candidate)

    case = (("MXFP8", "bf16"),)
    meddling = Meddling(arch.name, arch.build, arch.inputs)
    assert check.check(meddling, case)["status"] == "passes"
    meddles[0] = True
    record = check.check(meddling, case)
    assert "mlp.experts is off by" in record["cases"]["MXFP8 bf16"]


def test_experts_that_compute_something_else_have_no_fake() -> None:
    class Halved(mixtral.MixtralExperts):  # type: ignore[misc]
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, ids, weights) / 2  # type: ignore[no-any-return]

    config = of_transformers.tiny_config("mixtral", _experts_implementation="eager")
    x, ids = torch.randn(4, 128), torch.tensor([[0, 1]] * 4)
    for kind, known in ((mixtral.MixtralExperts, True), (Halved, False)):
        module = kind(config)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        fake = FakeExperts(module, ("gate_up_proj", "down_proj"))
        with nullcontext() if known else pytest.raises(ValueError, match="nobody knows"):
            fake((x, ids, torch.rand(4, 2)), {}, EXACT)


def test_what_changes_between_save_and_load_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    load = fp8kit.load

    def damaged(*given: Any) -> Any:
        model = load(*given)
        next(m for m in model.modules() if isinstance(m, Fp8Linear)).bias.data.add_(1)
        return model

    monkeypatch.setattr(fp8kit, "load", damaged)
    record = check.check(PLAIN["torch/one layer"], ONE)
    assert "computes something else" in record["cases"]["FP8_DYNAMIC bf16"]


def test_a_model_that_never_repeats_itself_is_compared_by_its_state() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.inner = 0, nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(x) * self.calls

    arch = Architecture("a", Counting, lambda _: [{"": (torch.randn(4, 128),)}])
    said = check.check(arch, ONE)["cases"]["FP8_DYNAMIC bf16"]
    assert said == "passes, its results differ from call to call"


class Dying(nn.Module):
    """Ends its process, or hangs."""

    def __init__(self, hang: bool) -> None:
        super().__init__()
        while hang:
            time.sleep(1)
        import os

        os._exit(3)


def test_one_that_hangs_or_dies_stops_nothing() -> None:
    found = {"torch/one layer": PLAIN["torch/one layer"]}
    for name, hang in (("hangs", True), ("dies", False)):
        found[name] = Architecture(name, partial(Dying, hang), lambda _: [{}])
    records = {r["name"]: r for r in run(found, list(found), 1, quick=True, seconds=8)}
    assert records["hangs"]["why"] == "it took longer than 8 s"
    assert records["dies"]["why"] == "its process ended with code 3"
    assert records["torch/one layer"]["status"] == "passes"


def test_what_does_not_run_dense_is_listed() -> None:
    arch = Architecture("a", lambda: nn.Linear(4, 4), lambda _: [{"": (torch.randn(1, 3),)}])
    record = check.check(arch)
    assert record["status"] == "not built"
    assert "shapes cannot be multiplied" in record["why"]
    text = page.rendered([record, check.check(PLAIN["torch/one layer"], ONE)], ["a", "b"])
    assert "| not built | 1 |" in text
    assert "| passes | 1 |" in text
    assert "| not run | 1 |" in text
    assert "| listed | 3 |" in text
    assert "The run ended before them: b." in text
    assert "| torch/one layer | earlier | passes | * |  |" in text
    assert "| earlier | 2 | 0 modules of experts | FP8_DYNAMIC bf16 |" in text
