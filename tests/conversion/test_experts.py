"""Stacks of experts become FP8: recognised by their results, compared with plain torch."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
import numerics
from fp8kit.conversion.experts import recognize
from fp8kit.errors import ConversionError
from fp8kit.formats import GROUP128, Scheme
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.moe.activation import Activation
from numerics import assert_same_tensors
from tiny_experts import KINDS, tiny

transformers = pytest.importorskip("transformers")

from transformers.models.step3p7 import modeling_step3p7 as step3p7  # noqa: E402

IDS = torch.arange(24).view(1, -1) * 7 % 160
TOKENS = 40


def experts_in(model: nn.Module) -> list[ExpertTensors]:
    return [m for m in model.modules() if isinstance(m, ExpertTensors)]


def rounded(x: Tensor, group: fp8kit.GroupShape) -> Tensor:
    """Quantize and dequantize; gradients pass unchanged."""
    return x + (fp8kit.dequantize(fp8kit.quantize(x.detach(), group)) - x.detach())


def reference(module: Any, x: Tensor, ids: Tensor, weights: Tensor, scheme: Scheme) -> Tensor:
    """Compute experts in fp32 from dequantized weights, with the module's own gate."""
    up, down = (fp8kit.dequantize(module.quantized(name)) for name in module.stacks.names)
    assert scheme.activation is not None
    rows, total = rounded(x.float(), scheme.activation), torch.zeros(x.shape)
    gated = up.shape[1] == 2 * down.shape[2]
    for expert in range(up.shape[0]):
        token, slot = torch.where(ids == expert)
        h = F.linear(rows[token], up[expert])
        if (bias := module.beside(module.stacks.up, "bias")) is not None:
            h = h + bias[expert].float()
        if gated and hasattr(module, "_apply_gate"):
            h = module._apply_gate(h)
        elif gated:
            gate, wide = h.chunk(2, -1)
            h = module.act_fn(gate) * wide
        else:
            h = module.act_fn(h)
        y = F.linear(rounded(h, GROUP128), down[expert])
        if (bias := module.beside(module.stacks.down, "bias")) is not None:
            y = y + bias[expert].float()
        total = total.index_add(0, token, y * weights[token, slot, None])
    return total


def routed(module: ExpertTensors) -> tuple[Tensor, ...]:
    """Draw tokens, ids and weights for a module."""
    random = torch.Generator().manual_seed(3)
    hidden = module.codes(module.stacks.up).shape[2]
    x = torch.randn(TOKENS, hidden, generator=random).bfloat16()
    if module.stacks.call == "sorted":
        ids = torch.arange(module.expert_count).repeat_interleave(TOKENS // module.expert_count)
        return x, ids.unsqueeze(1), torch.ones(TOKENS, 1)
    ids = torch.rand(TOKENS, module.expert_count, generator=random).topk(2).indices
    return x, ids, torch.rand(TOKENS, 2, generator=random)


def run(module: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    given = (x,) if ids.shape[1] == 1 else (x, ids, weights)
    return module(*given)  # type: ignore[no-any-return]


def generated(model: Any) -> Tensor:
    return model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)  # type: ignore


@pytest.mark.parametrize("kind", KINDS)
def test_models_keep_what_they_compute(kind: str, tmp_path: Path) -> None:
    scheme = "FP8_BLOCK" if kind in ("DeepseekV3", "GptOss") else "FP8_DYNAMIC"
    model = tiny(kind)
    dense = copy.deepcopy(model)
    report = fp8kit.convert(model, scheme)
    assert [r.experts for r in report.stacks] == [4] * len(report.stacks)
    assert len(report.stacks) == sum(isinstance(m, ExpertTensors) for m in model.modules()) > 0
    for record in report.stacks:
        module, before = model.get_submodule(record.name), dense.get_submodule(record.name)
        assert isinstance(module, type(before))
        x, ids, weights = routed(module)
        leaf = x.clone().requires_grad_()
        y = run(module, leaf, ids, weights)
        theirs = x.float().requires_grad_()
        expected = reference(module, theirs, ids, weights, Scheme.of(scheme))
        numerics.assert_experts(y.float(), expected)
        assert numerics.relative_error(y.float(), run(before, x, ids, weights).float()) > 5e-3
        wanted = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
        y.backward(wanted.bfloat16())
        expected.backward(wanted)
        assert leaf.grad is not None
        assert theirs.grad is not None
        assert numerics.relative_error(leaf.grad.float(), theirs.grad) < 0.05
    with torch.no_grad():
        logits = model(IDS).logits
        tokens = generated(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stacks that no engine reads
        fp8kit.save(model, tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fp8kit.load(tmp_path / "c")
    for name, tensor in model.state_dict().items():
        if "experts" in name:
            numerics.assert_bits_equal(tensor, again.state_dict()[name])
    with torch.no_grad():
        numerics.assert_bits_equal(again(IDS).logits, logits)
        assert torch.equal(generated(again), tokens)


def test_routers_stay_dense_and_see_what_they_saw() -> None:
    model = tiny("Mixtral")
    seen: list[Tensor] = []
    gates = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
    for gate in gates:
        gate.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    report = fp8kit.convert(model)
    with torch.no_grad():
        model(IDS)
    assert len(seen) == len(gates) == 2
    assert all(x.dtype == torch.bfloat16 for x in seen)
    assert all(p.dtype == torch.bfloat16 for gate in gates for p in gate.parameters())
    assert not any("gate" in r.name.rpartition(".")[2] for r in report.converted)


def test_excluding_a_router_changes_nothing() -> None:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    names = [r.name for r in fp8kit.plan(model).report.converted]
    assert [r.name for r in fp8kit.plan(model, exclude=["*.gate"]).report.converted] == names
    for wrong in ({"exclude": ["*.gates"]}, {"include": ["*.gate"]}):
        with pytest.raises(ConversionError, match="matches no linear layer"):
            fp8kit.plan(model, **wrong)  # type: ignore[arg-type]


def test_experts_on_meta_are_not_converted() -> None:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    model.model.layers[0].mlp.experts.to("meta")
    with pytest.raises(ConversionError, match="experts are on the meta device"):
        fp8kit.convert(model)


def test_a_converted_copy_leaves_the_model_dense() -> None:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    found = fp8kit.convert(model, copy=True).model
    assert found is not None
    assert not experts_in(model)
    fp8kit.convert(model)
    with torch.no_grad():
        numerics.assert_bits_equal(found(IDS).logits, model(IDS).logits)


def test_functional_call_takes_codes_and_scales_from_elsewhere() -> None:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    fp8kit.convert(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        expected = model(IDS).logits
        for tensor in model.parameters():
            tensor.zero_()
        found = torch.func.functional_call(model, state, (IDS,)).logits
    numerics.assert_bits_equal(found, expected)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "MXFP8"])
def test_copies_casts_and_pickles_compute_the_same(scheme: str) -> None:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    fp8kit.convert(model, scheme)
    (module,) = experts_in(model)
    given = routed(module)
    with torch.no_grad():
        y = module(*given)
        for twin in (
            copy.deepcopy(module),
            pickle.loads(pickle.dumps(module)),
            copy.deepcopy(module).float().bfloat16(),
        ):
            assert type(twin) is type(module)
            numerics.assert_bits_equal(twin(*given), y)
            for name, tensor in module.state_dict().items():
                numerics.assert_bits_equal(twin.state_dict()[name], tensor)
    assert isinstance(module, transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts)
    assert module.half().compute_dtype == torch.float16


def test_dense_and_coded_state_dicts_load_into_the_same_storage() -> None:
    model = tiny("GptOss", num_hidden_layers=1)
    dense = {n: t.clone() for n, t in model.state_dict().items()}
    fp8kit.convert(model)
    coded = {n: t.clone() for n, t in model.state_dict().items()}
    (module,) = experts_in(model)
    places = {n: t.data_ptr() for n, t in module.state_dict().items()}
    for state in (dense, coded):
        for name in module.stacks.names:
            module.codes(name).data.zero_()
        model.load_state_dict({n: t for n, t in state.items() if "experts" in n}, strict=False)
        assert {n: t.data_ptr() for n, t in module.state_dict().items()} == places
        assert_same_tensors(model, coded)
    half = {n: t for n, t in coded.items() if not n.endswith("gate_up_proj_scale")}
    with pytest.raises(RuntimeError, match="codes come with their scales"):
        model.load_state_dict(half, strict=False)


def test_a_setting_of_transformers_changes_nothing() -> None:
    model = tiny("Mixtral")
    fp8kit.convert(model)
    with torch.no_grad():
        y = model(IDS).logits
        for setting in ("eager", "batched_mm", "fp8kit"):
            model.set_experts_implementation(setting)
            numerics.assert_bits_equal(model(IDS).logits, y)


def test_models_become_dense_again() -> None:
    model = tiny("GptOss")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fp8kit.convert(model, weight_storage="keep")
    model.dequantize()
    assert not experts_in(model)
    assert_same_tensors(model, before)


def test_kept_stacks_follow_what_is_loaded() -> None:
    model = tiny("GptOss")
    fp8kit.convert(model, weight_storage="keep")
    other = {n: t * 2 for n, t in tiny("GptOss").state_dict().items()}
    model.load_state_dict(other)
    model.dequantize()
    assert_same_tensors(model, other)


class Own(nn.Module):
    """Experts with unusual parameter names, without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 128, 128) / 11)
        self.second = nn.Parameter(torch.randn(4, 128, 128) / 11)
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        h = self.act_fn(torch.einsum("enk,mk->men", self.first, x))
        y = torch.einsum("enk,mek->men", self.second, h)
        chosen = torch.zeros(ids.shape[0], self.first.shape[0], dtype=y.dtype)
        chosen = chosen.scatter_add(1, ids, weights.to(y.dtype))
        return (y * chosen[..., None]).sum(1)


class Holder(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def odd(kind: type[nn.Module]) -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=128, num_local_experts=4, experts_implementation="eager"
    )
    torch.manual_seed(0)
    module = kind(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module.bfloat16()


def test_an_unknown_gate_runs_between_two_products() -> None:
    config = SimpleNamespace(
        num_local_experts=4, hidden_size=128, moe_intermediate_size=128, hidden_act="silu"
    )
    torch.manual_seed(0)
    experts = step3p7.Step3p7Experts(config, swiglu_limit=0.5)  # it bounds what SiLU gives
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = Holder(experts.bfloat16())
    report = fp8kit.convert(model)
    assert any("gate of experts is none that is known" in note for note in report.notes)
    (module,) = experts_in(model)
    x, ids, weights = routed(module)
    expected = reference(module, x, ids, weights, Scheme.of("FP8_DYNAMIC"))
    # The second GEMM's input is quantized per token, not in groups of 128; with 128 columns that is
    # the same.
    # It is rounded to bf16 first, by 2**-9, which takes one in 32 to the next code, 2**-3 away.
    assert numerics.relative_error(module(x, ids, weights).float(), expected) < 2**-3 / 32**0.5


def test_a_registered_class_converts_if_it_computes_what_is_said() -> None:
    def right(_: nn.Module) -> fp8kit.ExpertStacks:
        return fp8kit.ExpertStacks("first", "second", Activation("gelu", gated=False))

    def wrong(_: nn.Module) -> fp8kit.ExpertStacks:
        return fp8kit.ExpertStacks("first", "second", Activation("relu2", gated=False))

    class Other(Own):
        pass

    assert recognize(Own()) is None
    fp8kit.register_experts(Own, right)
    fp8kit.register_experts(Other, wrong)
    model = Holder(Own().bfloat16())
    assert [r.name for r in fp8kit.convert(model).stacks] == ["experts"]
    (module,) = experts_in(model)
    x, ids, weights = routed(module)
    expected = reference(module, x, ids, weights, Scheme.of("FP8_DYNAMIC"))
    numerics.assert_experts(module(x, ids, weights).float(), expected)
    assert "computes something else" in str(recognize(Other()))
    with pytest.raises(TypeError, match=r"subclass of nn\.Module"):
        fp8kit.register_experts(Own(), right)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"describe of type ExpertStacks.*a function"):
        fp8kit.register_experts(Own, right(Own()))  # type: ignore[arg-type]


class Plain(nn.Module):
    """Experts as typical model files write them, with one addition."""

    def __init__(self, more: str = "") -> None:
        super().__init__()
        self.num_experts, self.act_fn, self.more = 4, nn.SiLU(), more
        self.gate_up_proj = nn.Parameter(torch.randn(4, 256, 128) / 11)
        self.down_proj = nn.Parameter(torch.randn(4, 128, 128) / 11)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        if self.more == "weights":
            weights = weights.clamp(max=1)
        for expert in range(self.num_experts):
            token, slot = torch.where(ids == expert)
            if self.more == "capacity":
                token, slot = token[:200], slot[:200]
            gate, up = (x[token] @ self.gate_up_proj[expert].T).chunk(2, -1)
            if self.more == "gates":
                gate, up = gate.clamp(max=100), up.clamp(-100, 100)
            h = self.act_fn(gate) * up
            if self.more == "hidden":
                h = h.clamp(-65504, 65504)
            if self.more == "dropout":
                h = F.dropout(h, 0.5, self.training)
            y = h @ self.down_proj[expert].T
            if self.more == "result":
                y = y.clamp(-65504, 65504)
            total.index_add_(0, token, y * weights[token, slot, None])
        return total


def test_experts_of_a_plain_loop_are_known() -> None:
    assert isinstance(recognize(Plain()), fp8kit.ExpertStacks)


@pytest.mark.parametrize("more", ["weights", "capacity", "gates", "hidden", "dropout", "result"])
def test_experts_that_do_more_at_large_numbers_or_in_training_stay_dense(more: str) -> None:
    assert "computes something else" in str(recognize(Plain(more).eval()))


def test_a_registered_class_is_tried_in_its_own_sizes_too() -> None:
    class Counted(Own):
        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            assert self.first.shape[1] == 128
            return super().forward(x, ids, weights)

    class Untried(Own):
        def forward(self, x: Tensor, *others: Any) -> Tensor:
            raise NotImplementedError

    def says(kind: str) -> Any:
        return lambda _: fp8kit.ExpertStacks("first", "second", Activation(kind, gated=False))

    fp8kit.register_experts(Counted, says("gelu"))
    assert isinstance(recognize(Counted()), fp8kit.ExpertStacks)
    fp8kit.register_experts(Counted, says("relu2"))
    assert "computes something else" in str(recognize(Counted()))
    fp8kit.register_experts(Untried, says("relu2"))
    with pytest.warns(UserWarning, match=r"Untried could not be run.*fp8kit\.evaluate"):
        assert isinstance(recognize(Untried()), fp8kit.ExpertStacks)


@pytest.mark.parametrize("said", [fp8kit.ExpertStacks("w1", "second"), "gelu"])
def test_a_wrong_description_of_a_class_is_refused(said: Any) -> None:
    class Misdescribed(Own):
        pass

    fp8kit.register_experts(Misdescribed, lambda _: said)
    with pytest.raises(ConversionError, match=r"Misdescribed was described.*first, second"):
        recognize(Misdescribed())
    fp8kit.register_experts(Misdescribed, lambda _: None)  # type: ignore[arg-type,return-value]
    assert recognize(Misdescribed()) is None


def test_a_stack_with_two_names_may_be_described_by_the_second() -> None:
    class Named(Own):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.first

    said = fp8kit.ExpertStacks("again", "second", Activation("gelu", gated=False))
    fp8kit.register_experts(Named, lambda _: said)
    with pytest.warns(UserWarning, match="could not be run"):  # it reads the first name
        assert isinstance(recognize(Named()), fp8kit.ExpertStacks)


@pytest.mark.parametrize("said", [{"activation": Activation()}, {}])
def test_a_description_whose_shapes_do_not_fit_is_refused(said: dict[str, Any]) -> None:
    class Unfit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(4, 64, 128))
            self.second = nn.Parameter(torch.randn(4, 256, 64))

    said = {"activation": Activation("gelu", gated=False), **said}
    fp8kit.register_experts(Unfit, lambda _: fp8kit.ExpertStacks("first", "second", **said))
    with pytest.raises(ConversionError, match=r"shapes that go together.*first.*second"):
        recognize(Unfit())


@pytest.mark.parametrize(
    "said", [{"up": 3}, {"up": "down_proj"}, {"activation": "gelu"}, {"transposed": "no"}]
)
def test_an_odd_description_is_refused_when_it_is_made(said: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Got (up|activation|transposed)="):
        fp8kit.ExpertStacks(**said)


def test_what_stays_dense_is_named() -> None:
    class Lossy(transformers.models.mixtral.modeling_mixtral.MixtralExperts):  # type: ignore
        def forward(self, *args: Any) -> Tensor:
            return super().forward(*args) / 2

    assert "computes something else" in str(recognize(odd(Lossy)))
    report = fp8kit.plan(Holder(odd(Lossy))).report
    assert {r.reason for r in report.skipped} == {
        "stacks of Lossy, whose forward computes something else; if an fp8kit.ExpertStacks says "
        "what, tell fp8kit.register_experts"
    }
    model = tiny("Mixtral")
    for pattern in ("*.experts", "*.experts.*", "*.gate_up_proj"):
        report = fp8kit.plan(model, exclude=[pattern]).report
        assert not report.stacks
        assert sum(f"excluded by {pattern!r}" in r.reason for r in report.skipped) == 2
    small = fp8kit.plan(tiny("Mixtral", intermediate_size=32)).report
    assert sum("too small to gain" in r.reason for r in small.skipped) == 2
    named = ["model.layers.1.mlp.experts"]  # in full: however small it is
    assert [
        r.name
        for r in fp8kit.plan(tiny("Mixtral", intermediate_size=32), include=named).report.stacks
    ] == named
    model.model.layers[0].mlp.experts.down_proj.data[1, 2, 3] = torch.inf
    with pytest.raises(ConversionError, match="NaN or infinities"):
        fp8kit.plan(model, strict=True)
    with pytest.raises(ConversionError, match="come from a checkpoint"):
        fp8kit.plan(tiny("Mixtral"), "FP8", strict=True)
    assert all(not r.experts for r in fp8kit.plan(model, include=["*.q_proj"]).report.converted)


def test_experts_that_are_fp8_already_are_left_alone() -> None:
    model = tiny("Mixtral")
    fp8kit.convert(model)
    report = fp8kit.plan(model).report
    assert not report.converted
    assert sum(r.experts > 0 and r.reason == "already FP8" for r in report.skipped) == 2
    assert report.nothing() == ""


def test_converting_needs_no_second_copy_of_the_stacks() -> None:
    """Codes take half of a stack; temporary tensors have the size of one expert."""
    model = tiny("Mixtral", num_hidden_layers=1, num_local_experts=16)
    module = model.model.layers[0].mlp.experts
    largest = max(p.nbytes for p in module.parameters())
    seen: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                seen.append(out.untyped_storage().nbytes())
            return out

    with Watch():
        fp8kit.convert(model, include=["*.experts"])
    # the stack itself is looked at; nothing new is larger than its codes
    assert max(size for size in seen if size != largest) <= largest // 2


def test_the_default_dtype_decides_nothing() -> None:
    """Loaders make a 16-bit dtype the default meanwhile, and some classes compute in fp32."""
    kind = transformers.OpenAIPrivacyFilterConfig
    from transformers.models.openai_privacy_filter import modeling_openai_privacy_filter as theirs

    module = theirs.OpenAIPrivacyFilterExperts(
        kind(hidden_size=128, intermediate_size=128, num_local_experts=4)
    )
    expected = recognize(module)
    assert isinstance(expected, fp8kit.ExpertStacks)
    held = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert recognize(module) == expected
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(held)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_stacks_with_bad_values_stay_dense_by_name(bad: float) -> None:
    model = tiny("Qwen3Moe", num_hidden_layers=1)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj[1, 2, 3] = bad
    report = fp8kit.convert(model)
    assert {r.reason for r in report.skipped if "experts" in r.name} == {
        "its stacks hold NaN or infinities"
    }
    assert not experts_in(model)
