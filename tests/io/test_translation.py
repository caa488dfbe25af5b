"""Translating checkpoints: what stays bit-equal, and what is refused with the reason."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_samples import NANO, SHARD, all_bytes, edit_json, saved
from fp8kit.checkpoint.storage.reader import open_checkpoint
from fp8kit.errors import CheckpointError, InvalidValue
from fp8kit.formats import QTensor
from fp8kit.functional import dequantize
from fp8kit.io import translation
from fp8kit.io.models import load
from fp8kit.io.translation import convert_checkpoint
from golden.generate import FOLDER
from golden.layout import codes, fp8, scales
from numerics import assert_bits_equal

EXPERTS = "model.layers.0.mlp.experts"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def make(folder: Path, tensors: dict[str, Tensor], quantization: Any, **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})
    content = config | {"quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def values(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path)
    return {
        name: dequantize(
            QTensor(checkpoint.read(x.weight), checkpoint.read(x.scale), x.group), torch.float32
        )
        for name, x in checkpoint.layers.items()
    }


def quantization(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())["quantization_config"]
    return found


def stack(scale: Tensor, rows: int = 32) -> dict[str, Tensor]:
    return {
        f"{EXPERTS}.gate_up_proj": fp8(codes(2, rows, 128)),
        f"{EXPERTS}.gate_up_proj_scale": scale,
        f"{EXPERTS}.down_proj": fp8(codes(2, 128, rows // 2, seed=4)),
        f"{EXPERTS}.down_proj_scale": scales(2),
        "model.layers.0.mlp.gate.weight": torch.ones(2, 128).bfloat16(),
    }


def test_a_sharded_source_and_its_side_files(tmp_path: Path) -> None:
    source = saved(tmp_path / "c", max_shard_bytes=20_000)
    (source / "tokenizer.json").write_text("{}")
    files = convert_checkpoint(source, tmp_path / "d", target="sglang", max_shard_bytes=30_000)
    assert "tokenizer.json" in files
    assert "model.safetensors.index.json" in files
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "d")
    assert after.layers == before.layers
    for name in before.tensors:
        assert_bits_equal(after.read(name), before.read(name))
    assert quantization(tmp_path / "d")["ignore"] == ["lm_head"]


@pytest.mark.parametrize("scale", [torch.tensor([0.5, 0.25]), torch.tensor([[0.5, 1], [0.25, 2]])])
def test_stacks_of_experts_become_matrices(tmp_path: Path, scale: Tensor) -> None:
    source = make(tmp_path / "c", stack(scale), FP8)
    before = values(source)
    convert_checkpoint(source, tmp_path / "d", dialect="autofp8")
    stored = load_file(tmp_path / "d" / SHARD)
    after = values(tmp_path / "d")
    for expert in range(2):
        gate, up = before[f"{EXPERTS}.gate_up_proj"][expert].chunk(2)
        assert_bits_equal(after[f"{EXPERTS}.{expert}.gate_proj"], gate.contiguous())
        assert_bits_equal(after[f"{EXPERTS}.{expert}.up_proj"], up.contiguous())
        down = before[f"{EXPERTS}.down_proj"][expert]
        assert_bits_equal(after[f"{EXPERTS}.{expert}.down_proj"], down)
        # a scale that was spread over the rows of a stack is one number again
        assert stored[f"{EXPERTS}.{expert}.up_proj.weight_scale"].shape == ()
    assert len(after) == 6
    assert quantization(tmp_path / "d")["ignored_layers"] == ["lm_head", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize(("name", "rows"), [("wi", 32), ("down_proj", 32), ("gate_up_proj", 31)])
def test_no_scale_and_no_row_of_a_stack_is_lost(name: str, rows: int, tmp_path: Path) -> None:
    tensors = {
        f"{EXPERTS}.{name}": fp8(codes(2, rows, 128)),
        f"{EXPERTS}.{name}_scale": scales(2) if rows % 2 else scales(2, 2),
    }
    source = make(tmp_path / "s", tensors, FP8)
    with (
        pytest.warns(UserWarning, match="have names that no engine")
        if name != "down_proj"
        else nullcontext()
    ):
        convert_checkpoint(source, tmp_path / "d")
    before, after = values(source)[f"{EXPERTS}.{name}"], values(tmp_path / "d")
    for expert, wanted in enumerate(before):
        assert_bits_equal(after[f"{EXPERTS}.{expert}.{name}"], wanted)
    if rows % 2 == 0:
        with pytest.raises(CheckpointError, match="Got scheme FP8_DYNAMIC to write as autofp8"):
            convert_checkpoint(source, tmp_path / "e", dialect="autofp8")
        odd = tensors | {f"{EXPERTS}.{name}": fp8(codes(2, rows + 1, 128))}
        with pytest.raises(CheckpointError, match=r"is torch.float32 of shape \[2, 2\]"):
            convert_checkpoint(make(tmp_path / "o", odd, FP8), tmp_path / "e")


def test_stacks_of_a_module_that_no_engine_takes_apart_are_said(tmp_path: Path) -> None:
    """Step 3.5 stores stacks as ``moe.gate_proj.weight``, and its engines read them so."""
    names = [f"model.layers.3.moe.{part}_proj" for part in ("gate", "up", "down")]
    tensors = {f"{n}.weight": fp8(codes(2, 128, 128)) for n in names}
    tensors |= {f"{n}.weight_scale_inv": scales(2, 1, 1) for n in names}
    source = make(tmp_path / "c", tensors, FP8 | {"weight_block_size": [128, 128]})
    with pytest.warns(UserWarning, match=r"moe\.0\.down_proj and 5 more .* no engine is known"):
        convert_checkpoint(source, tmp_path / "d")


def test_one_scale_becomes_rows_where_engines_need_them(tmp_path: Path) -> None:
    source = make(tmp_path / "c", stack(torch.tensor([0.5, 0.25])), FP8)
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    checkpoint = open_checkpoint(tmp_path / "d")
    assert {x.scheme.name for x in checkpoint.layers.values()} == {"FP8_DYNAMIC"}
    found = values(tmp_path / "d")[f"{EXPERTS}.1.gate_proj"]
    assert_bits_equal(found, values(source)[f"{EXPERTS}.gate_up_proj"][1, :16].contiguous())
    convert_checkpoint(source, tmp_path / "e", target="transformers")
    schemes = {x.scheme.name for x in open_checkpoint(tmp_path / "e").layers.values()}
    assert schemes == {"FP8_TENSOR"}


@pytest.mark.parametrize("kind", ["weight_scale", "scale_inv"])
def test_stacks_with_k_first_are_known_by_their_shapes(kind: str, tmp_path: Path) -> None:
    """ModelOpt and Transformers store Llama 4's stacks as its model multiplies by them."""
    up, down = codes(2, 256, 512), codes(2, 256, 256, seed=4)  # [E, K, N]: H = I = 256
    one = kind == "weight_scale"
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    config = config if one else FP8 | {"weight_block_size": [128, 128]}
    of = {
        "gate_up": torch.tensor(0.5) if one else scales(2, 2, 4),
        "down": torch.tensor(0.25) if one else scales(2, 2, 2),
    }
    tensors = {f"{EXPERTS}.{n}_proj_{kind}": scale for n, scale in of.items()}
    tensors |= {f"{EXPERTS}.gate_up_proj": fp8(up), f"{EXPERTS}.down_proj": fp8(down)}
    if one:
        tensors |= {f"{EXPERTS}.{n}_proj_input_scale": torch.tensor(0.1) for n in of}
    source = make(tmp_path / "c", tensors, config)
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    found = values(tmp_path / "d")
    wide = {
        n: scale.repeat_interleave(128, 1).repeat_interleave(128, 2) if scale.dim() else scale
        for n, scale in of.items()
    }
    gate_up, last = fp8(up).float() * wide["gate_up"], fp8(down).float() * wide["down"]
    for expert in range(2):
        gate, above = gate_up[expert].t().contiguous().chunk(2)
        assert_bits_equal(found[f"{EXPERTS}.{expert}.gate_proj"], gate)
        assert_bits_equal(found[f"{EXPERTS}.{expert}.up_proj"], above)
        assert_bits_equal(found[f"{EXPERTS}.{expert}.down_proj"], last[expert].t().contiguous())


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text"])
def test_single_experts_that_transformers_would_draw_at_random(
    model_type: str, tmp_path: Path
) -> None:
    names = [f"{EXPERTS}.{e}.{part}_proj" for e in range(2) for part in ("gate", "up", "down")]
    tensors = {f"{name}.weight": fp8(codes(128, 128)) for name in names}
    tensors |= {f"{name}.weight_scale": scales(1) for name in names}
    source = make(tmp_path / "c", tensors, FP8, model_type=model_type)
    for unfit in ("refuse", "dequantize"):
        with pytest.raises(CheckpointError, match=r"no rule to load these: it would draw them at"):
            convert_checkpoint(
                source, tmp_path / "d", target="transformers", dialect="fp8", unfit=unfit
            )
    convert_checkpoint(source, tmp_path / "d", target="transformers")  # which splits them
    assert values(tmp_path / "d").keys() == set(names)


def test_blocks_are_not_cut(tmp_path: Path) -> None:
    tensors = {
        f"{EXPERTS}.gate_up_proj": fp8(codes(1, 192, 128)),
        f"{EXPERTS}.gate_up_proj_scale_inv": scales(1, 2, 1),
    }
    source = make(tmp_path / "c", tensors, FP8 | {"weight_block_size": [128, 128]})
    with pytest.raises(
        CheckpointError, match=r"gate_proj is cut at row 96, inside a 128x128 block"
    ):
        convert_checkpoint(source, tmp_path / "d", dialect="fp8")
    assert not (tmp_path / "d").exists()


def test_one_block_keeps_its_shape(tmp_path: Path) -> None:
    tensors = {"a.weight": fp8(codes(128, 128)), "a.weight_scale_inv": scales(1, 1)}
    source = make(tmp_path / "c", tensors, FP8 | {"weight_block_size": [128, 128]})
    convert_checkpoint(source, tmp_path / "d", target="transformers")
    assert load_file(tmp_path / "d" / SHARD)["a.weight_scale_inv"].shape == (1, 1)


def test_static_scales_of_experts(tmp_path: Path) -> None:
    tensors = stack(torch.tensor([0.5, 0.25]))
    tensors[f"{EXPERTS}.gate_up_proj_input_scale"] = torch.tensor([1.0, 2.0])
    tensors[f"{EXPERTS}.down_proj_input_scale"] = torch.tensor(3.0)
    source = make(tmp_path / "c", tensors, FP8 | {"activation_scheme": "static"})
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    stored = load_file(tmp_path / "d" / SHARD)
    inputs = {n.split(".", 5)[5]: t.tolist() for n, t in stored.items() if "input_scale" in n}
    assert inputs == {
        "0.gate_proj.input_scale": [1.0],
        "0.up_proj.input_scale": [1.0],
        "0.down_proj.input_scale": [3.0],
        "1.gate_proj.input_scale": [2.0],
        "1.up_proj.input_scale": [2.0],
        "1.down_proj.input_scale": [3.0],
    }


def test_experts_whose_input_scales_differ(tmp_path: Path) -> None:
    tensors = {}
    for i, part in enumerate(("gate_proj", "up_proj", "down_proj")):
        tensors[f"{EXPERTS}.0.{part}.weight"] = fp8(codes(32, 32))
        tensors[f"{EXPERTS}.0.{part}.weight_scale"] = torch.tensor(0.5)
        tensors[f"{EXPERTS}.0.{part}.input_scale"] = torch.tensor(0.5 + i / 8)
    source = make(tmp_path / "c", tensors, FP8 | {"activation_scheme": "static"})
    message = r"gate_proj has the input scale 0\.5, and .*up_proj 0\.625.*Write dialect autofp8"
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "d", target="vllm")
    convert_checkpoint(source, tmp_path / "d", target="vllm", dialect="autofp8")
    tensors[f"{EXPERTS}.0.up_proj.input_scale"] = torch.tensor(0.5)
    again = make(tmp_path / "e", tensors, FP8 | {"activation_scheme": "static"})
    convert_checkpoint(again, tmp_path / "f", target="vllm")


def test_a_quantized_head_is_named(tmp_path: Path) -> None:
    tensors = {
        "lm_head.weight": fp8(codes(32, 128)),
        "lm_head.weight_scale": scales(32, 1),
        "a.weight": fp8(codes(32, 128)),
        "a.weight_scale": scales(32, 1),
    }
    source = make(tmp_path / "c", tensors, {"quant_method": "fbgemm_fp8"})
    # ModelOpt leaves models tied whose head it quantizes; vLLM would then not read the head
    texts = {"text_config": {"hidden_size": 128}, "llm_config": {"quantization_config": {}}}
    edit_json(source / "config.json", tie_word_embeddings=True, **texts)
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert "quantization_config" not in config["llm_config"]
    found = quantization(tmp_path / "d")
    assert found["ignore"] == []
    assert found["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]


def test_embeddings_are_not_listed_and_dense_experts_are(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.ones(4, 8).bfloat16(),
        "wte.weight": torch.ones(4, 8).bfloat16(),
        "norm.weight": torch.ones(8).bfloat16(),
        "a.experts.gate_up_proj": torch.ones(2, 4, 8).bfloat16(),
        "b.weight": torch.ones(4, 8).bfloat16(),
        "c.weight": fp8(codes(32, 128)),
        "c.weight_scale": torch.tensor(0.5),
    }
    source = make(tmp_path / "c", tensors, FP8)
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    assert quantization(tmp_path / "d")["ignore"] == [
        "a.experts",
        *(f"a.experts.0.{part}_proj" for part in ("down", "gate", "up")),
        "b",
        "lm_head",
        r"re:a\.experts\..*",
    ]


def test_dense_stacks_of_experts_are_written_one_by_one_for_engines(tmp_path: Path) -> None:
    """Quark writes stacks; vLLM's Mixtral and SGLang's Mixtral and Qwen3-MoE know no such names."""
    home = "model.layers.0.mlp.experts"
    tensors = {
        f"{home}.gate_up_proj": torch.randn(2, 8, 6).bfloat16(),
        f"{home}.down_proj": torch.randn(2, 6, 4).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.ones(2, 6).bfloat16(),
        "c.weight": fp8(codes(32, 128)),
        "c.weight_scale": torch.tensor(0.5),
    }
    for kind, home_on_disk, parts in (
        ("qwen3_moe", home, ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "model.layers.0.block_sparse_moe.experts", ("w1", "w3", "w2")),
    ):
        source = make(tmp_path / kind, tensors, FP8, model_type=kind)
        convert_checkpoint(source, tmp_path / f"{kind}-new", target="sglang")
        stored = load_file(tmp_path / f"{kind}-new" / SHARD)
        gate, up = tensors[f"{home}.gate_up_proj"][1].chunk(2)
        for part, wanted in zip(parts, (gate, up, tensors[f"{home}.down_proj"][1]), strict=True):
            assert_bits_equal(stored.pop(f"{home_on_disk}.1.{part}.weight"), wanted)
        assert len([n for n in stored if "experts" in n]) == 3
    # SGLang's Mixtral asks for its layers without the name of the model around them
    block = r"re:layers\.0\.block_sparse_moe\.experts\..*"
    ignored = quantization(tmp_path / "mixtral-new")["ignore"]
    assert {"layers.0.block_sparse_moe.gate", block} <= set(ignored)
    convert_checkpoint(source, tmp_path / "whole", target="transformers")
    assert f"{home}.gate_up_proj".replace("mlp", "block_sparse_moe") in load_file(
        tmp_path / "whole" / SHARD
    )


def test_blocks_are_what_linear_stands_for(tmp_path: Path) -> None:
    """SGLang reads the block size only from the group for ``Linear``."""
    tensors = {"a.weight": fp8(codes(128, 128)), "a.weight_scale": scales(1, 1)}
    for name in "bc":
        tensors |= {f"{name}.weight": fp8(codes(32, 128)), f"{name}.weight_scale": scales(32, 1)}
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    rows = {"weights": {**args, "strategy": "channel"}, "targets": ["Linear"]}
    rows["input_activations"] = {**args, "strategy": "token", "dynamic": True}
    sides = {**args, "strategy": "block", "block_structure": [128, 128]}
    inputs = {**args, "strategy": "group", "group_size": 128, "dynamic": True}
    blocks = {"weights": sides, "targets": ["a"], "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    groups = {"config_groups": {"x": rows, "y": blocks}}
    source = make(tmp_path / "c", tensors, config | groups)
    convert_checkpoint(source, tmp_path / "d", target="sglang")
    first, second = quantization(tmp_path / "d")["config_groups"].values()
    assert (first["weights"]["strategy"], first["targets"]) == ("block", ["Linear"])
    assert second["targets"] == ["b", "c"]


def test_embeddings_in_fp8_are_decoded_on_request(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": fp8(codes(8, 16)),
        "model.embed_tokens.weight_scale": torch.tensor([0.5]),
        "a.weight": fp8(codes(32, 128)),
        "a.weight_scale": torch.tensor(0.5),
    }
    source = make(tmp_path / "c", tensors, FP8)
    with pytest.raises(CheckpointError, match=r"e\.g\. model\.embed_tokens\. vllm reads embedd"):
        convert_checkpoint(source, tmp_path / "d", target="vllm")
    convert_checkpoint(source, tmp_path / "d", target="vllm", unfit="dequantize")
    found = load_file(tmp_path / "d" / SHARD)["model.embed_tokens.weight"]
    assert_bits_equal(found.float(), values(source)["model.embed_tokens"].bfloat16().float())


def test_a_file_is_a_source(tmp_path: Path) -> None:
    source = FOLDER / "comfyui-quant" / "diffusion.safetensors"
    convert_checkpoint(source, tmp_path / "d", target="vllm")
    assert open_checkpoint(tmp_path / "d").dtype == torch.bfloat16
    assert quantization(tmp_path / "d")["config_groups"]["group_0"]["input_activations"] is None


def test_a_file_is_not_replaced_by_its_translation(tmp_path: Path) -> None:
    source = saved(tmp_path / "c")
    before = all_bytes(source)
    with pytest.raises(CheckpointError, match="is or holds the source"):
        convert_checkpoint(source / SHARD, source, overwrite=True)
    assert all_bytes(source) == before


def test_an_older_config_does_not_survive(tmp_path: Path) -> None:
    source = saved(tmp_path / "c")
    found = quantization(source)
    edit_json(source / "config.json", quantization_config=None, compression_config=found)
    convert_checkpoint(source, tmp_path / "d")
    assert "compression_config" not in json.loads((tmp_path / "d" / "config.json").read_text())


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (NANO, {}, "is in high precision.*Quantize it with fp8kit quantize"),
        (FOLDER / "mistral", {"target": "vllm"}, "has Mistral's own names of layers"),
        (FOLDER / "modelopt-mixed", {"dialect": "fp8"}, "and others to write as fp8"),
        (FOLDER / "fp8-block", {"dialect": "mxfp8"}, "FP8_BLOCK to write as mxfp8"),
        (FOLDER / "fp8-block", {"target": "transformers"}, "2 layers do not load in transformers"),
        (
            FOLDER / "fp8-block",
            {"target": "transformers", "unfit": "dequantize"},
            "Something has to stay FP8",
        ),
        (FOLDER / "fp8-block-ue8m0", {"dialect": "compressed-tensors"}, "cannot hold it"),
    ],
)
def test_what_is_refused(
    source: Path, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "d", **options)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unfit": "drop"}, "It must be one of refuse, dequantize"),
        ({"target": "tgi"}, "It must be one of vllm, sglang"),
        ({"dialect": "modelopt"}, "which are written"),
    ],
)
def test_unknown_words(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(FOLDER / "autofp8-static", tmp_path / "d", **options)


def test_interleaved_experts_are_refused(tmp_path: Path) -> None:
    name = f"{EXPERTS}.0.up_proj"  # one by one, as llm-compressor writes them
    single = {f"{name}.weight": fp8(codes(128, 128)), f"{name}.weight_scale": scales(1)}
    for i, tensors in enumerate((stack(torch.ones(2)), single)):
        source = make(tmp_path / f"c{i}", tensors, FP8, model_type="gpt_oss")
        with pytest.raises(CheckpointError, match=r"is an FP8 expert of GPT-OSS.*have biases"):
            convert_checkpoint(source, tmp_path / "d", dialect="autofp8")
    with pytest.raises(CheckpointError, match=r"FP8 experts of GPT-OSS, one by one\. The model ho"):
        load(source)


def test_names_that_are_taken(tmp_path: Path) -> None:
    tensors = stack(torch.ones(2)) | {f"{EXPERTS}.0.up_proj.weight": torch.ones(2, 2)}
    source = make(tmp_path / "c", tensors, FP8)
    with pytest.raises(CheckpointError, match=r"Two tensors of .* would be called"):
        convert_checkpoint(source, tmp_path / "d", dialect="autofp8")


def test_nan_codes_are_not_copied(tmp_path: Path) -> None:
    bad = torch.full((4, 4), 0x7F, dtype=torch.uint8)
    tensors = {"a.weight": fp8(bad), "a.weight_scale": torch.tensor(0.5)}
    source = make(tmp_path / "c", tensors, FP8)
    with pytest.raises(CheckpointError, match=r"model.safetensors: a.weight holds NaN"):
        convert_checkpoint(source, tmp_path / "d")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_the_destination_may_be_replaced(tmp_path: Path) -> None:
    convert_checkpoint(FOLDER / "autofp8-static", tmp_path / "d")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        convert_checkpoint(FOLDER / "autofp8-dynamic", tmp_path / "d")
    convert_checkpoint(FOLDER / "autofp8-dynamic", tmp_path / "d", overwrite=True)
    assert open_checkpoint(tmp_path / "d").spec.scheme.name == "FP8_TENSOR"  # type: ignore[union-attr]


def test_one_tensor_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack is read once for all its experts; no tensor is read twice."""
    source = make(tmp_path / "c", stack(torch.ones(2)), FP8)
    seen: list[str] = []
    read = translation.Checkpoint.read

    def counting(self: Any, name: str) -> Tensor:
        seen.append(name)
        return read(self, name)

    monkeypatch.setattr(translation.Checkpoint, "read", counting)
    convert_checkpoint(source, tmp_path / "d", dialect="autofp8")
    of_source = [n for n in seen if ".0." not in n.removeprefix("model.layers.0")]
    assert sorted(of_source.count(n) for n in stack(torch.ones(2)) if "_proj" in n) == [1] * 4


@pytest.mark.parametrize("word", ["", "vlm", ["vllm"]])
@pytest.mark.parametrize("option", ["target", "dialect"])
def test_no_word_is_another_word_than_none(option: str, word: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {option: word}
    with pytest.raises(InvalidValue, match=f"Got {option}"):
        convert_checkpoint(FOLDER / "fp8-block", tmp_path / "d", **options)
    assert not (tmp_path / "d").exists()
