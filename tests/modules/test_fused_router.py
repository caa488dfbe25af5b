"""Routers of Transformers that choose in one kernel: which classes, and that others stay."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
import recorded_calls
import tiny_experts
from fp8kit.conversion.routers import recognize_router
from fp8kit.integrations.quantizer_of_layers import restore_dense
from fp8kit.modules.fused_router import RouterForward

transformers = pytest.importorskip("transformers")

# the settings that the classes read from their config, under every name
SETTINGS: dict[str, Any] = {
    "hidden_size": 32, "num_experts": 16, "num_local_experts": 16, "moe_num_experts": 16,
    "num_experts_per_tok": 4, "num_experts_per_token": 4, "moe_topk": 4, "moe_k": 4, "top_k": 4,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "router_scaling_factor": 2.5, "expert_selection_fn": "softmax",
    "moe_router_logit_softcapping": 0.0, "scoring_func": "sigmoid", "router_jitter_noise": 0.1,
    "moe_router_jitter_noise": 0.1, "use_expert_bias": True, "moe_jitter_eps": 0.1,
}  # fmt: skip
KNOWN = """
    AXK1TopkRouter AXK2TopkRouter AriaTextTopKRouter BailingHybridTopkRouter BeamTopKRouter
    Cohere2MoeTopKRouter DeepseekOcr2TextTopkRouter DeepseekV2TopkRouter DeepseekV32TopkRouter
    DeepseekV3TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter Dots3NoteVisionTopKRouter
    ExaoneMoeTopkRouter FlexOlmoTopKRouter FlintTopKRouter Glm4MoeLiteTopkRouter Glm4MoeTopkRouter
    Glm4vMoeTextTopkRouter Glm5NextTextTopkRouter GlmMoeDsaTopkRouter GptOssTopKRouter
    GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter GraniteMoeSharedTopKRouter
    GraniteMoeTopKRouter HYV3TopKRouter HYV4TopkRouter HYV4VLTopkRouter JambaTopKRouter
    KimiLinearTopkRouter LagunaTopKRouter LaraMiniTopKRouter MellumTopKRouter MiMoV2FlashTopkRouter
    MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter MiniMaxTopKRouter MistralLarge4TextTopkRouter
    MixtralTopKRouter NemotronHTopkRouter OlmoeTopKRouter Qwen2MoeTopKRouter Qwen3MoeTopKRouter
    Qwen3NextTopKRouter Qwen3OmniMoeTalkerTextTopKRouter Qwen3OmniMoeTextTopKRouter
    Qwen3OmniMoeThinkerTextTopKRouter Qwen3VLMoeTextTopKRouter Qwen3_5MoeTopKRouter
    Qwen4ExpTextTopKRouter SolarOpenTopkRouter Step3p7TopKRouter UnlimitedOcrTextTopkRouter
""".split()
# these return other values, hold more than a weight and a bias, or round each step to 16 bits
UNKNOWN = """
    AfmoeTokenChoiceRouter DbrxRouter DeepseekV4TopKRouter HunYuanMoEV1Gate InklingTopkRouter
    Kolibri1TopKRouter Lfm2MoeTopKRouter Llama4Router LongcatFlashTopkRouter Mistral4TopkRouter
    OpenAIPrivacyFilterTopKRouter PhimoeTopKRouter
""".split()


class Config:
    """Settings of every model; an absent one is ``None``."""

    def __init__(self, **changes: Any) -> None:
        vars(self).update(SETTINGS | changes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def router_classes() -> dict[str, type[nn.Module]]:
    """Return the classes of Transformers that are routers by their name."""
    found: dict[str, type[nn.Module]] = {}
    for path in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        pattern = r"^class (\w*(?:Router|MoEV1Gate))\(nn\.\w+\)"
        if names := re.findall(pattern, path.read_text(), re.MULTILINE):
            place = f"transformers.models.{path.parent.name}.{path.stem}"
            module = importlib.import_module(place)
            found |= {name: getattr(module, name) for name in names}
    return found


def router(name: str, **changes: Any) -> nn.Module:
    """Return a router in fp32 with random numbers."""
    made = router_classes()[name](Config(**changes))
    for tensor in (*made.parameters(), *made.buffers()):
        nn.init.normal_(tensor.data)
    return made.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Use one thread: tiny products on many threads would wait for cores that other tests use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def known_routers() -> list[str]:
    found = []
    for name, kind in router_classes().items():
        try:
            made = kind(Config())
        except (AttributeError, TypeError):  # more than a config, or parts of its own
            continue
        if recognize_router(made) is not None:
            found.append(name)
    return found


def test_the_known_routers_of_transformers() -> None:
    found, there = known_routers(), router_classes().keys()
    assert sorted(found) == sorted(set(KNOWN) & there)  # earlier versions have fewer
    assert len(found) > 50
    assert not set(found) & set(UNKNOWN)
    assert len(there & set(UNKNOWN)) > 10


@pytest.mark.parametrize(
    ("name", "changes", "known"),
    [
        ("DeepseekV3TopkRouter", {"n_group": 4, "topk_group": 2}, False),
        ("DeepseekV3TopkRouter", {"n_group": 4, "topk_group": 4}, True),
        ("Qwen3MoeTopKRouter", {"norm_topk_prob": False}, True),
        ("Lfm2MoeTopKRouter", {"use_expert_bias": False}, False),
        ("Cohere2MoeTopKRouter", {"expert_selection_fn": "sigmoid"}, False),
        ("LagunaTopKRouter", {"moe_router_logit_softcapping": 3.0}, False),
    ],
)
def test_settings_decide(name: str, changes: dict[str, Any], known: bool) -> None:
    found = recognize_router(router(name, **changes))
    assert (found is not None) == known
    if name.startswith("Qwen") and found is not None:
        assert not found.choice.renormalize


class Noisy(nn.Module):
    """A router with noise in training, unless that is switched off."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.weight, self.top_k, self.noise = nn.Parameter(torch.randn(8, 16), False), 2, noise

    def forward(self, x: Tensor) -> Any:
        logits = F.linear(x, self.weight)
        if self.training and self.noise:
            logits = logits + self.noise * torch.randn_like(logits)
        weights, ids = logits.float().softmax(-1).topk(self.top_k, -1)
        return logits, weights, ids


def test_noise_in_training_shows() -> None:
    assert recognize_router(Noisy(0.0).eval()) is not None
    assert recognize_router(Noisy(0.01).eval()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3MoeTopKRouter",
        "MixtralTopKRouter",
        "GptOssTopKRouter",
        "DeepseekV3TopkRouter",
        "GraniteMoeTopKRouter",
        "MiniMaxM2TopKRouter",
    ],
)
def test_fused_routers_compute_the_same(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    made = router(name).to(dtype)
    formula = recognize_router(made)
    assert formula is not None
    x, given = torch.randn(5, 32, dtype=dtype), ()
    if formula.correction == "given":
        given = (torch.randn(16),)
    expected = made(x, *given)
    made.forward = RouterForward(made, formula)
    for _ in range(4):  # from the third on a recording computes
        found = made(x, *given)
        assert torch.equal(found[0], expected[0])
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        order, expected_order = found[2].argsort(1), expected[2].argsort(1)
        assert torch.equal(found[2].gather(1, order), expected[2].gather(1, expected_order))
        weights = expected[1].gather(1, expected_order)
        torch.testing.assert_close(found[1].gather(1, order), weights)
        x = x.flip(0)
        expected = [t.flip(0) for t in expected]
    assert calls == ["choose"] * 2


def fused_routers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), RouterForward)]


def test_the_class_computes_where_kernels_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded_calls.install(monkeypatch).calls
    model = tiny_experts.tiny("Qwen3Moe")
    fp8kit.convert(model, "FP8_DYNAMIC")
    first = fused_routers(model)[0]
    x = torch.randn(4, 128, dtype=torch.bfloat16)

    def computes_itself(x: Tensor = x) -> bool:
        first.forward.replays.clear()
        calls.clear()
        first(x)
        return not calls

    assert computes_itself()  # the weight wants a gradient
    with torch.no_grad():
        assert not computes_itself()
        assert not computes_itself(x[None])
        with torch.autocast("cpu", torch.bfloat16):
            assert computes_itself()
        first.top_k = 1
        assert computes_itself()
        first.top_k = 2
        assert not computes_itself()
        first.norm_topk_prob = not first.norm_topk_prob
        assert computes_itself()
        first.norm_topk_prob = not first.norm_topk_prob
        found = torch.compile(first, backend="eager", fullgraph=True)(x)
        assert torch.equal(found[2], first(x)[2])
    first.requires_grad_(False)
    assert not computes_itself()
    assert computes_itself(x.clone().requires_grad_())


@pytest.mark.parametrize("on_cpu_too", [False, True])
def test_router_logits_are_still_collected(
    on_cpu_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_cpu_too:
        recorded_calls.fuse_on_cpu(monkeypatch)
    model = tiny_experts.tiny("Qwen3Moe")
    ids = torch.arange(6)[None]
    with torch.no_grad():
        expected = model(ids, output_router_logits=True).router_logits
        report = fp8kit.convert(model, "FP8_DYNAMIC")
        found = model(ids, output_router_logits=True).router_logits
        copied = copy.deepcopy(model)(ids, output_router_logits=True).router_logits
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"} <= set(report.fused)
    assert [t.shape for t in found] == [t.shape for t in expected] == [(6, 4)] * 2
    assert all(torch.equal(a, b) for a, b in zip(found, copied, strict=True))
    assert (found[0] - expected[0]).norm() < 0.2 * expected[0].norm()


@pytest.mark.usefixtures("fuses_on_cpu")
def test_copies_pickles_and_files_are_routers_of_their_own(tmp_path: Path) -> None:
    dense = tiny_experts.tiny("Qwen3Moe")
    names = list(dense.model.layers[0].mlp.gate.state_dict())
    model = fp8kit.convert(dense, "FP8_DYNAMIC", copy=True).model
    assert len(fused_routers(model)) == 2
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model.model.layers[0].mlp.gate(x)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            gate = made.model.layers[0].mlp.gate
            assert gate.forward.module is gate
            assert list(gate.state_dict()) == names
            assert torch.equal(gate(x)[1], expected[1])
            gate.weight.zero_()
            assert gate(x)[0].abs().sum() == 0
        assert torch.equal(model.model.layers[0].mlp.gate(x)[0], expected[0])
    fp8kit.save(model, tmp_path / "saved")
    loaded = fp8kit.load(tmp_path / "saved", tiny_experts.tiny("Qwen3Moe"))
    loaded = loaded[0] if isinstance(loaded, tuple) else loaded
    assert len(fused_routers(loaded)) == 2
    restore_dense(loaded)
    assert fused_routers(loaded) == []


def test_other_forwards_and_other_blocks_stay() -> None:
    model = tiny_experts.tiny("Qwen3Moe")
    gate = model.model.layers[0].mlp.gate
    gate.forward = offloaded = lambda x: type(gate).forward(gate, x)
    fp8kit.convert(model, "FP8_DYNAMIC")
    assert gate.forward is offloaded
    assert len(fused_routers(model)) == 1
    dense = tiny_experts.tiny("Qwen3Moe")
    fp8kit.convert(dense, "FP8_DYNAMIC", exclude=["*experts*"])
    assert fused_routers(dense) == []


@pytest.mark.gpu
def test_routers_replay_on_a_gpu() -> None:
    model = tiny_experts.tiny("Qwen3Moe").cuda()
    fp8kit.convert(model, "FP8_DYNAMIC")
    gate = model.model.layers[0].mlp.gate
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(16, 128, dtype=torch.bfloat16, device="cuda")
            found, expected = gate(x), type(gate).forward(gate, x)
            assert torch.equal(found[0], expected[0])
            scores = found[1].sort(-1).values, expected[1].sort(-1).values
            torch.testing.assert_close(*scores)
    assert gate.forward.replays.launches(torch.Size([16, 4])) == 1
