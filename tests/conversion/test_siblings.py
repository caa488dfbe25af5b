"""Siblings (layers with one input), found by name and by watching a run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit import ConversionError
from fp8kit.conversion.fusion_rules import Link
from fp8kit.conversion.siblings import find_groups, joined_shapes, sibling_groups, traced_groups
from fp8kit.formats import SCHEMES
from numerics import relative_error


class Attention(nn.Module):
    def __init__(self, k: int = 128, kv: int | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(k, 128)
        self.k_proj = nn.Linear(kv or k, 128)
        self.v_proj = nn.Linear(kv or k, 128)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        return self.q_proj(x) + self.k_proj(memory) + self.v_proj(memory)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.cross_attn = Attention()
        self.odd = nn.ModuleDict({"left": nn.Linear(128, 256), "right": nn.Linear(128, 256)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.self_attn(x)
        y = self.cross_attn(y, x + 1)
        return self.odd["left"](y) * self.odd["right"](y)


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
CROSS = ("cross_attn.k_proj", "cross_attn.v_proj")
ODD = ("odd.left", "odd.right")
EVERY = [*QKV, "cross_attn.q_proj", *CROSS, *ODD]


def test_siblings_by_name_keep_queries_of_cross_attention_apart() -> None:
    assert sibling_groups(Block(), EVERY) == [QKV, CROSS]


def test_siblings_must_all_be_allowed() -> None:
    assert sibling_groups(Block(), QKV[:2]) == []


def test_siblings_must_have_one_width() -> None:
    model = nn.ModuleDict({"attn": Attention(128, kv=64)})
    assert sibling_groups(model, [f"attn.{c}_proj" for c in "qkv"]) == []


def test_traced_groups_follow_the_tensor() -> None:
    found = traced_groups(Block(), EVERY, lambda m: m(torch.randn(3, 128)))
    assert sorted(found) == sorted([QKV, CROSS, ODD])


def test_traced_groups_drop_what_changes_between_calls() -> None:
    def run(model: nn.Module) -> None:
        x = torch.randn(3, 128)
        model.self_attn(x)
        model.self_attn(x, x + 1)

    assert traced_groups(Block(), EVERY, run) == []


def test_find_groups_prefers_the_run() -> None:
    model = Block()
    assert find_groups(model, EVERY) == [QKV, CROSS]
    assert ODD in find_groups(model, EVERY, lambda m: m(torch.randn(3, 128)))


def test_convert_shares_inputs_and_reports_it() -> None:
    model = Block()
    report = fp8kit.convert(model)
    assert report.groups == [QKV, CROSS]
    assert model.self_attn.q_proj.shared is model.self_attn.v_proj.shared is not None
    assert model.cross_attn.q_proj.shared is None
    assert "shares its input with k_proj, v_proj" in str(report)


def test_convert_without_sharing() -> None:
    model = Block()
    report = fp8kit.convert(model, fuse="none")
    assert report.groups == []
    assert model.self_attn.q_proj.shared is None


def test_convert_shared_equals_separate() -> None:
    shared = Block()
    separate = Block()
    separate.load_state_dict(shared.state_dict())
    x = torch.randn(3, 128)
    fp8kit.convert(shared, calibrate=lambda m: m(x))
    fp8kit.convert(separate, fuse="none")
    assert torch.equal(shared(x), separate(x))


def test_groups_never_overlap() -> None:
    links = [Link("", None, ("self_attn.k_proj", "self_attn.v_proj")), Link("", None, ODD)]
    assert find_groups(Block(), EVERY, None, links) == [links[0].consumers, ODD, CROSS]


class Norm(nn.Module):
    """An RMS norm of a user: the weight is added to one, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class Own(nn.Module):
    """A block that is in no table of model families."""

    def __init__(self, stray: bool = False) -> None:
        super().__init__()
        self.before, self.between = Norm(128), nn.LayerNorm(128)
        self.heads = nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 256)})
        self.up, self.act, self.down = nn.Linear(384, 256), nn.SiLU(), nn.Linear(256, 128)
        self.memory = nn.ModuleDict({"k": nn.Linear(128, 128), "v": nn.Linear(128, 128)})
        self.last = nn.Linear(128, 128)
        self.stray = stray

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        y = torch.cat([self.heads["a"](normed), self.heads["b"](normed)], -1)
        y = x + self.down(self.act(self.up(y)))
        y = y + normed if self.stray else y
        y = y + self.memory["k"](x) * self.memory["v"](x)
        return y + self.last(self.between(y))


class Tower(nn.Module):
    def __init__(self, stray: bool = False, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*(Own() for _ in range(depth - 1)), Own(stray)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


STATED = {
    "blocks.*": [
        "before -> heads.a heads.b",
        "act -> down",
        "memory.k memory.v",
        "between -> last",
    ]
}


FUSED = ("act", "before", "between")


def tower(device: torch.device, stray: bool = False) -> tuple[nn.Module, Tensor]:
    model = Tower(stray).to(device, torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.25, 0.75)
    return model, torch.randn(2, 9, 128, device=device, dtype=torch.bfloat16)


@pytest.mark.usefixtures("fuses_on_cpu")
@pytest.mark.parametrize("traced", [False, True])
def test_a_users_rules_fuse(traced: bool, device: torch.device) -> None:
    together, x = tower(device)
    separate, dense = copy.deepcopy(together), copy.deepcopy(together)
    fp8kit.convert(separate, fuse="none")
    run = (lambda m: m(x)) if traced else None
    report = fp8kit.convert(together, fuse=STATED, calibrate=run)
    assert ("The rules of fuse= were not tried" in str(report)) == (not traced)
    assert ("blocks.0.heads.a", "blocks.0.heads.b") in report.groups
    assert ("blocks.1.memory.k", "blocks.1.memory.v") in report.groups
    assert sorted(report.fused) == [f"blocks.{i}.{n}" for i in "01" for n in FUSED]
    assert "Fused on a GPU, 6 in all: blocks.0.before, blocks.0.act" in str(report)
    kinds = [type(m).__name__ for m in together.blocks[1].children()]
    assert kinds.count("FusedNorm") == 2
    assert kinds.count("FusedActivation") == 1
    assert together.blocks[0].before.formula.weight_offset == 1
    with torch.no_grad():
        found, expected, exact = together(x), separate(x), dense(x)
        assert together.blocks[0].before(x).isnan().all()
    limit = relative_error(expected, exact)
    assert relative_error(found, expected) < 0.5 * limit


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("pattern", ["blocks.*", "blocks.[0-9]*", r"re:(model\.)?blocks\.\d+"])
def test_a_pattern_of_blocks_fuses_all_twelve(pattern: str, nested: bool) -> None:
    model: nn.Module = Tower(depth=12)
    prefix = "model." if nested else ""
    model = nn.ModuleDict({"model": model}) if nested else model
    report = fp8kit.convert(model, fuse={pattern: STATED["blocks.*"]})
    names = [f"{prefix}blocks.{i}.{n}" for i in range(12) for n in FUSED]
    assert sorted(report.fused) == sorted(names)


class Documented(nn.Module):
    """The block of the example in README.md and in the docstring of ``plan``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(128, eps=1e-6)
        self.attn = nn.ModuleDict({n: nn.Linear(128, 128) for n in "qkv"})
        self.act, self.fc2 = nn.GELU(), nn.Linear(128, 128)
        self.cross = nn.ModuleDict({n: nn.Linear(128, 128) for n in "kv"})


def test_the_documented_rules_hold_for_twelve_blocks() -> None:
    rules = {"layers.*": ["norm -> attn.q attn.k attn.v", "act -> fc2", "cross.k cross.v"]}
    model = nn.ModuleDict({"layers": nn.ModuleList(Documented() for _ in range(12))})
    report = fp8kit.plan(model, fuse=rules).report
    assert len(report.groups) == 24
    assert not any("Not fused" in note for note in report.notes)


def test_rules_that_do_not_hold_are_refused_by_name() -> None:
    model, x = tower(torch.device("cpu"), stray=True)
    rules = {"blocks.1": ["before -> heads.a heads.b"]}
    with pytest.raises(ConversionError, match=r"blocks.1.* met NaN.*reads blocks.1.before"):
        fp8kit.convert(model, fuse=rules, calibrate=lambda m: m(x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert type(model.blocks[0].up) is nn.Linear


def test_a_rule_that_forgets_a_layer_is_refused() -> None:
    model, x = tower(torch.device("cpu"))
    with pytest.raises(ConversionError, match=r"blocks.0.heads.b met NaN"):
        fp8kit.plan(model, fuse={"blocks.0": ["before -> heads.a"]}, calibrate=lambda m: m(x))


def test_a_rule_with_a_foreign_layer_is_refused() -> None:
    model, x = tower(torch.device("cpu"))
    rules = {"blocks.0": ["before -> heads.a heads.b memory.k"]}
    with pytest.raises(ConversionError, match=r"memory.k read its result 0 times"):
        fp8kit.plan(model, fuse=rules, calibrate=lambda m: m(x))


def test_a_rule_about_what_never_runs_is_refused() -> None:
    model, _ = tower(torch.device("cpu"))
    with pytest.raises(ConversionError, match=r"blocks.0.before ran 0 times"):
        fp8kit.plan(model, fuse=STATED, calibrate=lambda m: None)


class Writing(nn.Module):
    """A block that overwrites the input of its activation before the activation is read."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act, self.fc2 = act, nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.act(x)
        x.data.zero_()
        out: Tensor = self.fc2(y)
        return out


def test_a_rule_about_an_input_that_is_written_meanwhile_is_refused() -> None:
    rule, x = {"0": ["act -> fc2"]}, torch.randn(4, 128)

    def run(model: nn.Module) -> None:
        with torch.inference_mode():
            model(x)

    activation, norm = (nn.Sequential(Writing(act)) for act in (nn.GELU(), nn.LayerNorm(128)))
    with pytest.raises(ConversionError, match=r"input of 0\.act is written before 0\.fc2 reads"):
        fp8kit.plan(activation, fuse=rule, calibrate=run)
    fp8kit.plan(norm, fuse=rule, calibrate=run)


def test_a_producer_without_a_fused_form_is_refused() -> None:
    model, _ = tower(torch.device("cpu"))
    with pytest.raises(ConversionError, match=r"blocks.0.up \(Linear\) before an arrow"):
        fp8kit.plan(model, fuse={"blocks.0": ["up -> down"]})


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_in_two_groups_is_an_error(turned: bool) -> None:
    model, _ = tower(torch.device("cpu"))
    rules = ["before -> heads.a heads.b", "heads.a memory.k"]
    with pytest.raises(ConversionError, match=r"Got blocks.0.heads.a together .* one rule"):
        fp8kit.plan(model, fuse={"blocks.0": rules[::-1] if turned else rules})


def test_a_norm_of_torch_without_epsilon_is_accepted_and_one_without_weight_is_refused() -> None:
    layers = {"q": nn.Linear(128, 128), "k": nn.Linear(128, 128)}
    rules = {"": ["norm -> q k"]}
    model = nn.ModuleDict({"norm": nn.RMSNorm(128), **layers})
    assert fp8kit.convert(model, fuse=rules).fused == ["norm"]
    bare = nn.ModuleDict({"norm": nn.RMSNorm(128, elementwise_affine=False), **layers})
    with pytest.raises(
        ConversionError, match=r"RMSNorm\) before an arrow\. .*_epsilon or eps or epsilon; an RMS"
    ):
        fp8kit.plan(bare, fuse=rules)


class OwnNorm(nn.Module):
    """An RMS norm that computes in fp32, or in the dtype of its input."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight, self.eps, self.dtype = nn.Parameter(torch.ones(128)), 1e-6, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.dtype or x.dtype)
        return (y * (y.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype) * self.weight


def test_a_norm_of_ones_own_computes_in_fp32() -> None:
    layers = {"q": nn.Linear(128, 128), "k": nn.Linear(128, 128)}
    rules = {"": ["norm -> q k"]}
    model = nn.ModuleDict({"norm": OwnNorm(torch.float32), **layers})
    assert fp8kit.convert(model, fuse=rules).fused == ["norm"]
    with pytest.raises(ConversionError, match="an RMS norm has a weight, and computes in fp32"):
        fp8kit.plan(nn.ModuleDict({"norm": OwnNorm(None), **layers}), fuse=rules)


@pytest.mark.usefixtures("fuses_on_cpu")
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_layers_that_are_fp8_already_are_fused_later(scheme: str, tmp_path: Path) -> None:
    model, x = tower(torch.device("cpu"))
    fp8kit.convert(model, scheme, fuse="none")
    fp8kit.save(model, tmp_path)
    loaded = fp8kit.load(tmp_path, Tower().to(torch.bfloat16))
    expected = fp8kit.convert(copy.deepcopy(model), scheme, fuse="none")
    assert not expected.groups
    assert not expected.fused
    report = fp8kit.convert(loaded, scheme, fuse=STATED)
    assert sorted(report.fused) == [f"blocks.{i}.{n}" for i in "01" for n in FUSED]
    assert ("blocks.1.memory.k", "blocks.1.memory.v") in report.groups
    assert "Not fused" not in str(report)
    with torch.no_grad():
        assert loaded.blocks[0].before(x).isnan().all()
        found, wanted = loaded(x), model(x)
    assert relative_error(found, wanted) < 0.02
    again = fp8kit.convert(loaded, scheme, fuse=STATED)
    assert not again.groups
    assert not again.fused


def test_layers_of_two_schemes_share_nothing() -> None:
    model, _ = tower(torch.device("cpu"))
    fp8kit.convert(model, "FP8_BLOCK", include=["*.heads.a", "*.memory.k"], fuse="none")
    fp8kit.convert(model, "FP8_DYNAMIC", include=["*.heads.b", "*.memory.v"], fuse="none")
    report = fp8kit.convert(model, exclude=["*"], fuse=STATED)
    assert not report.groups
    assert not report.fused
    report = fp8kit.convert(model, "MXFP8_EMULATED", fuse={"blocks.0": ["act -> down"]})
    assert "because MXFP8_EMULATED quantizes" in str(report)


def test_rules_that_change_nothing_are_notes() -> None:
    model, _ = tower(torch.device("cpu"))
    plan = fp8kit.plan(model, exclude=["*.heads.b"], fuse={"blocks.0": STATED["blocks.*"][:2]})
    assert "Not fused: blocks.0.before, because blocks.0.heads.b is not converted." in str(plan)
    plan = fp8kit.plan(model, "MXFP8_EMULATED", fuse={"blocks.0": STATED["blocks.*"][:3]})
    assert str(plan).count("because MXFP8_EMULATED quantizes inputs in another way") == 2
    assert not any("Not fused: blocks.0.memory" in note for note in plan.report.notes)


def test_siblings_known_by_name_are_tuned_as_one() -> None:
    shapes = {"q_proj": (1024, 512), "k_proj": (256, 512), "v_proj": (200, 512), "o": (512, 1024)}
    names = {f"layers.0.attn.{name}": shape for name, shape in shapes.items()}
    assert joined_shapes(names, SCHEMES["FP8_DYNAMIC"]) == [(1480, 512)]
    assert joined_shapes(names, SCHEMES["FP8_BLOCK"]) == [(1480, 512)]
    assert joined_shapes(names, SCHEMES["FP8"]) == []
    names["layers.0.attn.k_proj"] = (200, 512)  # ends inside a block
    assert joined_shapes(names, SCHEMES["FP8_BLOCK"]) == []
