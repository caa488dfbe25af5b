"""Which tensors streaming quantizes: by names and shapes, and by Transformers' knowledge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8kit.checkpoint.dialects.base import TEXT_PARTS
from fp8kit.checkpoint.storage.headers import TensorInfo
from fp8kit.checkpoint.storage.matrices import Matrix, MatrixFile, stacked_experts
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.checkpoint.streaming.layer_selection import facts_by_name, select_layers
from fp8kit.checkpoint.streaming.recipe import Recipe
from fp8kit.errors import CheckpointError, ConversionError

BF16 = torch.bfloat16


def checkpoint(config: dict[str, object] | None = None, **shapes: tuple[int, ...]) -> Checkpoint:
    """Return a checkpoint without files; ``__`` in a name stands for a dot."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    tensors = {n: TensorInfo(n, "model.safetensors", BF16, s) for n, s in names.items()}
    return Checkpoint(Path("nowhere"), config or {}, tensors, ("model.safetensors",))


def decided(found: Checkpoint, recipe: Recipe | None = None) -> dict[str, str]:
    choice = select_layers(found, recipe or Recipe(), facts_by_name(found))
    return {r.name: r.reason for r in choice.report.records}


COMMON = {
    "model__embed_tokens__weight": (512, 128),
    "model__layers__0__self_attn__o_proj__weight": (128, 128),
    "model__layers__0__mlp__gate__weight": (8, 128),
    "model__layers__0__mlp__experts__0__up_proj__weight": (256, 128),
    "model__layers__0__input_layernorm__weight": (128,),
    "model__layers__0__conv__weight": (128, 128, 3),
    "lm_head__weight": (512, 128),
}


def test_names_tell_linear_layers_from_the_rest() -> None:
    found = decided(checkpoint(**COMMON))
    assert found == {
        "model.layers.0.self_attn.o_proj": "",
        "model.layers.0.mlp.gate": "MoE router: kept in high precision by default",
        "model.layers.0.mlp.experts.0.up_proj": "",
        "lm_head": "output head: kept in high precision by default",
    }


def test_no_exclusion_lifts_the_defaults_but_not_obstacles() -> None:
    found = decided(checkpoint({"tie_word_embeddings": True}, **COMMON), Recipe(exclude=[]))
    assert found["lm_head"] == "its weight is tied to another parameter"
    assert found["model.layers.0.mlp.gate"].startswith("too small to gain")
    assert "model.embed_tokens" not in found
    assert decided(checkpoint(**COMMON), Recipe(exclude=[]))["lm_head"] == ""


@pytest.mark.parametrize(
    "name",
    ["wte", "wpe", "shared", "word_embeddings", "position_embeddings", "token_embed", "tok_emb"],
)
def test_embeddings_by_name(name: str) -> None:
    shapes = {f"h__0__{name}__weight": (512, 128), "h__0__fc__weight": (128, 128)}
    assert decided(checkpoint(**shapes), Recipe(exclude=[])) == {"h.0.fc": ""}


def test_embeddings_by_the_size_of_the_vocabulary() -> None:
    shapes = {"tokens__weight": (512, 128), "layers__0__fc__weight": (512, 128)}
    found = checkpoint({"vocab_size": 512}, **shapes)
    assert decided(found, Recipe(exclude=[])) == {"layers.0.fc": ""}
    for part in TEXT_PARTS:
        nested = checkpoint({part: {"vocab_size": 512}}, **shapes)
        assert decided(nested, Recipe(exclude=[])) == {"layers.0.fc": ""}


def test_transposed_layers_of_gpt2_stay() -> None:
    shapes = {"h__0__attn__c_attn__weight": (768, 2304), "x__weight": (128, 128)}
    assert "Conv1D" in decided(checkpoint({"model_type": "gpt2"}, **shapes))["h.0.attn.c_attn"]
    assert decided(checkpoint({"model_type": "starcoder2"}, **shapes))["h.0.attn.c_attn"] == ""


@pytest.mark.parametrize("beside", ["in_proj_weight", "q_proj_weight"])
def test_what_attention_of_torch_multiplies_itself_stays(beside: str) -> None:
    shapes = {f"h__0__{beside}": (384, 128), "h__0__out_proj__weight": (128, 128)}
    found = decided(checkpoint(**shapes, h__1__out_proj__weight=(128, 128)))
    assert "nn.MultiheadAttention" in found["h.0.out_proj"]
    assert found["h.1.out_proj"] == ""


def test_every_unquantized_matrix_is_ignored_by_name() -> None:
    found = checkpoint(**COMMON)
    choice = select_layers(found, Recipe(), facts_by_name(found))
    assert choice.ignore == ["lm_head", "model.layers.0.mlp.gate"]
    assert sorted(choice.matrices) == [
        "model.layers.0.mlp.experts.0.up_proj",
        "model.layers.0.self_attn.o_proj",
    ]


def test_stacks_beside_a_router_are_ignored_by_the_modules_that_engines_make_of_them() -> None:
    """Step 3.5: vLLM's module is ``moe.experts``, SGLang's ``mlp.experts``."""
    names = ("gate_proj", "up_proj", "down_proj")
    shapes: dict[str, tuple[int, ...]] = {f"l__3__moe__{n}__weight": (4, 128, 128) for n in names}
    shapes |= {"l__3__moe__gate__weight": (4, 128), "l__3__a__weight": (128, 128)}
    found = checkpoint(**shapes)
    choice = select_layers(found, Recipe(), facts_by_name(found))
    assert choice.ignore == ["l.3.mlp.experts", "l.3.moe.experts", "l.3.moe.gate"]


def test_experts_of_a_layer_stay_together() -> None:
    shapes = {f"layers__0__experts__{i}__up_proj__weight": (128, 128) for i in range(3)}
    for target, said in (
        ("vllm", r"experts\.0\.up_proj is FP8 and layers\.0\.experts\.1\.up_proj is not"),
        ("transformers", r"Of layers\.0\.experts some experts are FP8"),
    ):
        with pytest.raises(CheckpointError, match=said):
            decided(checkpoint(**shapes), Recipe(target=target, exclude=["*.experts.1.*"]))
    assert len(decided(checkpoint(**shapes), Recipe(include=["*.experts.*"]))) == 3


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])  # one that FP8 cannot hold, too
@pytest.mark.parametrize("pattern", ["*.experts", "layers.0.experts", "*.experts.*"])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_pattern_may_name_the_module_of_experts(
    stacked: bool, pattern: str, model_type: str
) -> None:
    stacks = {"gate_up_proj": (2, 512, 128), "down_proj": (2, 128, 256)}
    single = {f"{i}__{n}__weight": (256, 128) for i in (0, 1) for n in ("gate_proj", "up_proj")}
    shapes = {f"layers__0__experts__{n}": s for n, s in (stacks if stacked else single).items()}
    found = checkpoint({"model_type": model_type}, layers__0__fc__weight=(128, 128), **shapes)
    left = decided(found, Recipe(exclude=[pattern]))
    assert [n for n, reason in left.items() if not reason] == ["layers.0.fc"]


def test_stacks_that_transformers_loads_whole_stay_dense_for_it() -> None:
    found = checkpoint(
        {"model_type": "llama4_text"},
        layers__0__experts__gate_up_proj=(2, 128, 512),
        layers__0__experts__down_proj=(2, 256, 128),
        layers__0__self_attn__o_proj__weight=(128, 128),
    )
    block = Recipe("FP8_BLOCK", target="transformers")
    left = {n: r for n, r in decided(found, block).items() if r}
    why = "Transformers loads experts of this model in high precision alone, in fp8"
    assert set(left.values()) == {why}
    assert left.keys() == {"layers.0.experts.gate_up_proj", "layers.0.experts.down_proj"}
    for target in ("vllm", "transformers"):  # in compressed-tensors it takes single experts
        assert not any(decided(found, Recipe(target=target)).values())
    with pytest.raises(CheckpointError, match=r"one by one: it would draw these stacks at random"):
        decided(found, Recipe(target="transformers", exclude=["*.experts.*"]))


def test_layers_that_engines_merge_stay_together() -> None:
    shapes = {f"layers__0__{n}_proj__weight": (128, 128) for n in "qkv"}
    with pytest.raises(CheckpointError, match="merges q_proj, k_proj, v_proj"):
        decided(checkpoint(**shapes), Recipe(exclude=["*.k_proj"]))
    decided(checkpoint(**shapes), Recipe(exclude=["*.k_proj"], target="transformers"))


def test_small_keys_and_values_go_with_a_large_query() -> None:
    shapes = {f"a__{n}_proj__weight": (r, 128) for n, r in (("q", 128), ("k", 64), ("v", 64))}
    assert set(decided(checkpoint(**shapes)).values()) == {""}
    found = decided(checkpoint(**shapes), Recipe("FP8_BLOCK", "transformers"))
    assert [n for n, why in found.items() if not why] == ["a.q_proj"]
    one = {"b__q_proj__weight": (128, 128)}
    found = decided(checkpoint(**shapes, **one), Recipe(exclude=["a.q_proj"]))
    assert "too small" in found["a.k_proj"]


def test_strict_names_every_obstacle() -> None:
    shapes = {"layers__0__a__weight": (32, 128), "layers__0__b__weight": (128, 128)}
    assert decided(checkpoint(**shapes))["layers.0.b"] == ""
    with pytest.raises(ConversionError, match=r"layers\.0\.a: too small to gain"):
        decided(checkpoint(**shapes), Recipe(strict=True))


def test_a_full_name_in_include_takes_small_layers() -> None:
    shapes = {"layers__0__a__weight": (32, 128), "layers__0__b__weight": (128, 128)}
    assert decided(checkpoint(**shapes), Recipe(include=["layers.0.a"]))["layers.0.a"] == ""
    with pytest.raises(ConversionError, match=r"too small to gain.*\(1\), not in include \(1\)"):
        decided(checkpoint(**shapes), Recipe(include=["*.a"]))


def stack(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "f", BF16, shape, 0)


@pytest.mark.parametrize(
    ("gate_up", "down", "orientation"),
    [
        ((2, 512, 128), (2, 128, 256), False),
        ((2, 128, 512), (2, 256, 128), True),
        ((2, 128, 128), (2, 128, 64), False),
        ((2, 128, 128), (2, 64, 128), True),
        ((2, 512, 128), (3, 128, 256), None),
        ((2, 512, 128), (2, 128, 128), None),
    ],
)
def test_the_orientation_of_stacks_follows_from_both_shapes(
    gate_up: tuple[int, ...], down: tuple[int, ...], orientation: bool | None
) -> None:
    tensors = {
        "experts.gate_up_proj": stack("experts.gate_up_proj", *gate_up),
        "experts.down_proj": stack("experts.down_proj", *down),
    }
    found, odd = stacked_experts(tensors)
    if orientation is None:
        assert found == {}
        assert "do not fit together" in odd["experts"]
        return
    (matrices,) = found.values()
    assert len(matrices) == 6
    assert {m.transposed for m in matrices.values()} == {orientation}
    hidden, inner = (down[2], down[1]) if orientation else (down[1], down[2])
    assert (matrices["experts.1.up_proj"].rows, matrices["experts.1.up_proj"].cols) == (
        inner,
        hidden,
    )
    assert "alternate" in stacked_experts(tensors, "gpt_oss")[1]["experts"]
    del tensors["experts.down_proj"]
    assert "missing" in stacked_experts(tensors)[1]["experts"]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_come_from_where_the_matrix_lies(transposed: bool, tmp_path: Path) -> None:
    stored = torch.arange(20 * 12).view(20, 12).to(torch.int16)
    (tmp_path / "f").write_bytes(b"head" + stored.numpy().tobytes())
    file = MatrixFile(tmp_path)
    if transposed:  # columns 3 to 8 of all rows
        matrix = Matrix("f", torch.int16, 4 + 3 * 2, 5, 20, 12, transposed=True)
        wanted = stored[:, 3:8].t()
    else:
        matrix = Matrix("f", torch.int16, 4 + 12 * 2 * 3, 5, 12, 12)
        wanted = stored[3:8]
    assert torch.equal(file.rows(matrix, 0, 5), wanted)
    assert torch.equal(file.rows(matrix, 2, 4), wanted[2:4])
    file.close()
