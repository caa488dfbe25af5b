"""Groups of layers with one input, found by name and by watching a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.structure import find_groups, sibling_groups, traced_groups


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


def test_siblings_by_name_leave_cross_attention_alone() -> None:
    assert sibling_groups(Block(), EVERY) == [QKV]


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


def test_traced_groups_remove_their_hooks() -> None:
    model = Block()
    traced_groups(model, EVERY, lambda m: m(torch.randn(3, 128)))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_find_groups_prefers_the_run() -> None:
    model = Block()
    assert find_groups(model, EVERY) == [QKV]
    assert ODD in find_groups(model, EVERY, lambda m: m(torch.randn(3, 128)))


def test_convert_shares_inputs_and_reports_it() -> None:
    model = Block()
    report = fp8kit.convert(model)
    assert report.groups == [QKV]
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
