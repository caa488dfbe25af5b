"""Links (a norm or activation -> its consumers): syntax, families' own links, refusals."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fp8kit import ConversionError
from fp8kit.conversion.fusible_modules import can_produce
from fp8kit.conversion.fusion_rules import Link, family_links, given_links, verify_links
from fp8kit.conversion.model_families import BLOCKS
from fp8kit.conversion.patterns import names_block


def own() -> nn.Module:
    layers = {"norm": nn.LayerNorm(8), "q": nn.Linear(8, 8), "k": nn.Linear(8, 4)}
    odd = {"wide": nn.Linear(16, 4), "conv": nn.Conv1d(8, 8, 1)}
    return nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({**layers, **odd})])})


def test_rules_are_parsed_into_links() -> None:
    assert Link.parse("a", "norm -> x.q x.k") == Link("a", "norm", ("x.q", "x.k"))
    assert Link.parse("", "  q   k ") == Link("", None, ("q", "k"))
    assert Link.parse("a.b", "act -> fc").layers == ("a.b.fc",)
    assert Link.parse("", "act -> fc").layers == ("fc",)


@pytest.mark.parametrize("rule", ["", "q", "norm ->", "-> q", "a b -> q", "a -> b -> c"])
def test_rules_that_cannot_be_read(rule: str) -> None:
    with pytest.raises(ValueError, match="Got the fusion rule"):
        Link.parse("", rule)


def test_given_links_bind_each_block() -> None:
    model = nn.ModuleDict({"a": own(), "b": own()})
    links = given_links(model, {"blocks.0": ["norm -> q k"]})
    assert [link.block for link in links] == ["a.blocks.0", "b.blocks.0"]
    assert given_links(own()["blocks"][0], {"": ["q k"]})[0].layers == ("q", "k")


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("layers.*", "layers.0 layers.11 model.layers.11", "layers layers.0.norm ''"),
        ("layers.?", "layers.1 model.layers.1", "layers.11 layers.1.a"),
        ("layers.*.attn", "layers.0.attn a.layers.10.attn", "layers.0 layers.0.attn.q"),
        ("*.layers.*", "model.layers.0", "layers.0 model.layers.0.norm"),
        (r"re:layers\.\d+", "layers.0 layers.11", "model.layers.0 layers.0.norm"),
        (r"re:.*layers\.[0-3]", "model.layers.3", "model.layers.31 model.layers.3.norm"),
        ("", "''", "layers layers.0"),
    ],
)
def test_patterns_of_blocks(pattern: str, names: str, others: str) -> None:
    def found(text: str) -> set[bool]:
        return {names_block(pattern, name.strip("'")) for name in text.split()}

    assert found(names) == {True}
    assert found(others) == {False}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"re:blocks.(": ["norm -> q"]}, r"pattern 're:blocks.\(' is not a regular expression"),
        ({"layers.*": ["norm -> q"]}, r"pattern 'layers.\*' matches no module"),
        ({"blocks.0": ["norm -> q v"]}, r"do not exist: blocks\.0\.v\."),
        ({"blocks.0": ["norm2 -> q"]}, r"do not exist: blocks\.0\.norm2\."),
        ({"blocks.0": ["norm -> q conv"]}, r"are not linear layers: blocks\.0\.conv \(Conv1d\)\."),
        ({"blocks.0": ["norm -> q wide"]}, r"differ in K: blocks\.0\.q, blocks\.0\.wide\."),
    ],
)
def test_rules_that_do_not_fit_the_model(rules: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        given_links(own(), rules)


def test_one_rule_without_a_list_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Got the rule 'norm -> q'.*Pass \['norm -> q'\]"):
        given_links(own(), {"blocks.0": "norm -> q"})


def block(**options: object) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what diffusers warns about on import is not ours to fix
        attention = pytest.importorskip("diffusers.models.attention")
    sizes = {"dim": 128, "num_attention_heads": 2, "attention_head_dim": 64}
    options = {**sizes, "cross_attention_dim": 160, **options}
    return nn.ModuleDict({"block": attention.BasicTransformerBlock(**options)})


def producers(model: nn.Module) -> list[str | None]:
    return [link.producer for link in family_links(model)]


def test_a_basic_block() -> None:
    assert producers(block()) == ["norm1", "norm2", "norm3"]
    assert producers(block(cross_attention_dim=None)) == ["norm1", "norm3"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # without encoder states, keys and values of attn2 read the norm as well
        ({"cross_attention_dim": 128}, ["norm1", "norm3"]),
        ({"double_self_attention": True}, ["norm1", "norm3"]),
        ({"only_cross_attention": True}, []),
        ({"positional_embeddings": "sinusoidal", "num_positional_embeddings": 9}, []),
        ({"norm_type": "ada_norm_single"}, []),
    ],
)
def test_a_basic_block_set_up_in_another_way(options: dict[str, object], expected: object) -> None:
    assert producers(block(**options)) == expected


def test_a_block_that_was_changed() -> None:
    model = block()
    model["block"].set_chunk_feed_forward(2, 1)
    assert producers(model) == []
    model = block()
    model["block"].attn1.processor = object()
    assert producers(model) == ["norm2", "norm3"]
    model = block()
    model["block"].attn1.residual_connection = True
    assert producers(model) == ["norm2", "norm3"]


def test_a_decoder_layer_and_a_namesake() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_attention_heads=2)
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
    model = nn.ModuleDict({"0": layer})
    assert [link.layers[0] for link in family_links(model)] == [
        "0.self_attn.q_proj",
        "0.mlp.gate_proj",
    ]

    class Mine(LlamaDecoderLayer):
        """A subclass in another module, whose code is unknown."""

    with torch.device("meta"):
        assert family_links(nn.ModuleDict({"0": Mine(config, 0)})) == []


def test_every_rule_of_the_families_can_be_read() -> None:
    rules = {rule for rules in BLOCKS.values() for rule in rules}
    links = [Link.parse("", rule, family=True) for rule in rules]
    assert all(link.producer for link in links)
    behind = {link.consumers for link in links if link.concatenated}
    assert behind == {("proj_out",), ("to_out",)}


def test_users_have_no_rule_for_what_is_read_behind_other_columns() -> None:
    model = nn.Sequential(nn.Sequential(nn.GELU(), nn.Linear(64, 64)))
    with pytest.raises(ConversionError, match=r"do not exist: \+>"):
        given_links(model, {"*": ["0 +> 1"]})


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
    "num_experts": 16,
    "num_local_experts": 16,
    "moe_num_experts": 16,
    "n_routed_experts": 16,
    "moe_intermediate_size": 64,
}
# number of links in a decoder layer; mixtures of experts have no feed-forward with one consumer
LINKS = {
    **dict.fromkeys(("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3"), 2),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "granite", "helium", "smollm3"), 2),
    **dict.fromkeys(("ernie4_5", "hunyuan_v1_dense"), 2),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "starcoder2"), 1),
    **dict.fromkeys(("ernie4_5_moe", "glm4_moe"), 1),
}


def causal(name: str, **options: object) -> nn.Module:
    kind = type(AutoConfig.for_model(name))
    known = {n for base in kind.__mro__ for n in getattr(base, "__annotations__", ())}
    sizes = {k: v for k, v in TINY.items() if k in known}
    config = AutoConfig.for_model(name, **sizes, **options)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", LINKS)
def test_the_links_of_a_family_hold_in_a_run(name: str) -> None:
    model = causal(name)
    links = [link for link in family_links(model) if link.block.endswith("layers.1")]
    assert len(links) == LINKS[name]
    ids = torch.arange(9)[None]
    verify_links(model, links, lambda m: m(input_ids=ids, use_cache=False))
    producers = [model.get_submodule(link.name(link.producer or "")) for link in links]
    assert all(can_produce(producer) for producer in producers)


def test_links_are_tried_on_a_model_that_is_compiled_already() -> None:
    layers = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    model, x = torch.compile(layers, backend="eager"), torch.ones(2, 8)
    with torch.no_grad():
        model(x)
    verify_links(model, [Link("_orig_mod", "0", ("1",))], lambda m: m(x))


def test_every_family_is_tried() -> None:
    patterns = [p.split(".")[2] for p in BLOCKS if p.startswith("transformers.")]
    assert set(patterns) == {name.removesuffix("_text") for name in LINKS}
