"""Fused norms and feed-forwards in real Transformers models: equal results, or NaN in doubt."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.utils.prune  # which torch does not import itself
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

import fp8kit
from fp8kit.conversion.fusible_modules import norm_forward, recognize_norm
from fp8kit.conversion.fusion import fuse_producers
from fp8kit.integrations.quantizer_of_layers import restore_dense
from fp8kit.modules import fused_module, fused_producers
from fp8kit.modules.plain_norm import NormForward
from numerics import assert_bits_equal, relative_error
from recorded_calls import install, record_on_cpu
from tiny_experts import SIZES, tiny

pytestmark = pytest.mark.usefixtures("fuses_on_cpu")

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}


def build(name: str, device: torch.device) -> nn.Module:
    config, model = MODELS[name]
    torch.manual_seed(0)
    made = model(config(**SIZES)).to(device, torch.bfloat16).eval()
    for parameter in made.parameters():
        if parameter.dim() == 1:  # norms of ones would hide a forgotten weight
            parameter.data.uniform_(0.5, 1.5)
    return made


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def tokens(device: torch.device, rows: int = 17) -> Tensor:
    return torch.arange(rows, device=device)[None] % 128


@pytest.mark.parametrize("name", MODELS)
def test_fused_models_compute_what_separate_layers_do(name: str, device: torch.device) -> None:
    dense = build(name, device)
    separate, together = copy.deepcopy(dense), copy.deepcopy(dense)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together, fuse="all")
    kinds = [type(m).__name__ for m in together.modules()]
    assert kinds.count("FusedNorm") == 4
    assert kinds.count("FusedGatedMlp") == 2
    expected, found = logits(separate, tokens(device)), logits(together, tokens(device))
    assert found.isfinite().all()
    if device.type == "cpu":
        assert_bits_equal(found, expected)
    else:
        # statistics and exponentials may round differently in the last bit of bf16, which moves a
        # code here and there: far below the error of FP8 itself
        assert relative_error(found, expected) < 0.5 * relative_error(
            expected, logits(dense, tokens(device))
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_takes_other_rows() -> None:
    model = build("llama", torch.device("cpu"))
    fp8kit.convert(model)
    block = model.model.layers[0]
    fused = nn.Sequential(block.post_attention_layernorm, block.mlp)
    x = torch.randn(2, 3, 128).bfloat16()
    with torch.no_grad():
        traced = torch.jit.trace(fused, x)
        for other in (x, x.transpose(0, 1), x[0]):
            assert_bits_equal(traced(other), fused(other))


def has_norm_forward(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), NormForward)


@pytest.mark.parametrize(("name", "others"), [("llama", 1), ("qwen3", 5), ("gemma2", 5)])
def test_norms_that_feed_no_fp8_layer_are_one_launch(name: str, others: int) -> None:
    model = build(name, torch.device("cpu"))
    fp8kit.convert(model)
    plain = [n for n, m in model.named_modules() if has_norm_forward(m)]
    assert len(plain) == others
    assert "model.norm" in plain
    assert fuse_producers(model) == []


def plain_norm() -> tuple[nn.Module, nn.Module, Tensor]:
    dense = build("llama", torch.device("cpu")).model.norm
    made = copy.deepcopy(dense)
    forward = norm_forward(made)
    assert forward is not None
    made.forward = forward
    return made, dense, torch.randn(3, 128).bfloat16()


def test_a_plain_norm_computes_what_the_norm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = install(monkeypatch)
    record_on_cpu(monkeypatch)
    norm, dense, _ = plain_norm()
    heads = torch.randn(2, 5, 3, 256).bfloat16()[..., 128:]
    for x in (torch.randn(7, 128).bfloat16(), heads, heads[0, 0, 0]):
        with torch.no_grad():
            for _ in range(3):
                assert_bits_equal(norm(x), dense(x))
    assert backends.calls == ["norm 128"] * 6  # twice for each layout, the third call is replayed
    with torch.no_grad():  # whoever views the result reads it in the strides that torch keeps
        swapped = norm(heads.contiguous().transpose(1, 2))
    assert swapped.stride() == dense(heads.contiguous().transpose(1, 2)).stride()
    assert backends.calls == ["norm 128"] * 6


def test_a_plain_norm_leaves_to_the_class_what_it_does_not_know() -> None:
    norm, dense, x = plain_norm()
    norm(x).float().sum().backward()
    assert norm.weight.grad is not None
    assert type(norm) is type(dense)
    with torch.no_grad():
        assert_bits_equal(norm(x.float()), dense(x.float()))
        assert_bits_equal(norm(hidden_states=x), dense(x))
        with pytest.raises(RuntimeError, match="size of tensor"):
            norm(x[:, :64])
        with pytest.raises(TypeError, match="positional argument"):
            norm(x, x)
        with pytest.raises(AttributeError, match="NoneType"):
            norm(None)
        norm.variance_epsilon = dense.variance_epsilon = 0.5
        assert_bits_equal(norm(x), dense(x))
    assert norm_forward(nn.RMSNorm(128)) is None
    assert norm_forward(nn.LayerNorm(128)) is None


class OwnNorm(nn.Module):
    """A user's own norm, about which a trial run does not tell everything."""

    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(128))

    forward = LlamaRMSNorm.forward
    variance_epsilon = eps


def test_other_weights_may_be_given_to_a_call() -> None:
    separate = build("llama", torch.device("cpu"))
    together = copy.deepcopy(separate)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    given = {n: p.detach() * 2 for n, p in separate.named_parameters() if p.dim() == 1}
    calls = [(m, given, (tokens(torch.device("cpu")),)) for m in (separate, together)]
    with torch.no_grad():
        expected, found = (torch.func.functional_call(*call).logits for call in calls)
    assert_bits_equal(found, expected)


def test_norms_of_ones_own_stay_as_they_are() -> None:
    assert recognize_norm(OwnNorm()) is not None
    assert norm_forward(OwnNorm()) is None


class Misleading(OwnNorm):
    normalized_shape = 128


def test_what_is_no_norm_is_no_error() -> None:
    assert recognize_norm(Misleading()) is None
    fp8kit.convert(nn.ModuleDict({"norm": Misleading(), "fc": nn.Linear(128, 128)}))


def test_a_plain_norm_goes_where_its_module_goes(fuses_on_cpu: None) -> None:
    model = build("qwen3", torch.device("cpu"))
    dense_names = list(model.state_dict())
    fp8kit.convert(model)
    expected = logits(model, tokens(torch.device("cpu")))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, module in twin.named_modules():
            if has_norm_forward(module):
                assert module.forward.module is module, name
        twin.model.norm.weight.data.zero_()
        assert logits(twin, tokens(torch.device("cpu"))).abs().max() == 0
    assert_bits_equal(logits(model, tokens(torch.device("cpu"))), expected)
    assert set(dense_names) <= set(model.state_dict())
    restore_dense(model)
    assert not any(map(has_norm_forward, model.modules()))


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR"])
def test_fused_schemes(scheme: str, device: torch.device) -> None:
    dense = build("llama", device)
    separate, together = copy.deepcopy(dense), copy.deepcopy(dense)
    fp8kit.convert(separate, scheme, fuse="none")
    fp8kit.convert(together, scheme)
    found = logits(together, tokens(device))
    limit = relative_error(logits(separate, tokens(device)), logits(dense, tokens(device)))
    assert relative_error(found, logits(separate, tokens(device))) < 0.5 * limit


def test_settings_changed_after_conversion_count(device: torch.device) -> None:
    """Each setting is stored in the replaced module, which computes from then on."""

    def changed(fuse: str, change: Callable[[nn.Module], None]) -> Tensor:
        model = build("llama", device)
        fp8kit.convert(model, fuse=fuse)
        before = logits(model, tokens(device))
        change(model)
        after = logits(model, tokens(device))
        assert not torch.equal(before, after)
        return after

    def other_activation(model: nn.Module) -> None:
        model.model.layers[0].mlp.act_fn = nn.GELU("tanh")

    def other_epsilon(model: nn.Module) -> None:
        norm = model.model.layers[0].post_attention_layernorm
        norm.variance_epsilon = 1.0
        assert norm.variance_epsilon == 1.0

    for change in (other_activation, other_epsilon):
        expected = changed("none", change)
        limit = 0 if device.type == "cpu" else 0.05
        assert relative_error(changed("all", change), expected) <= limit


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj"])
def test_a_kept_weight_that_changed_counts_from_the_next_call_on(
    name: str, device: torch.device
) -> None:
    """The first sibling has computed for all siblings with the old codes, on the same input."""
    model = build("llama", device)
    fp8kit.convert(model, weight_storage="keep")
    before = logits(model, tokens(device))
    kept = model.model.layers[0].get_submodule(name).original_weight
    with torch.no_grad():
        kept.mul_(2)
    found = logits(model, tokens(device))
    assert not torch.equal(found, before)
    assert relative_error(found, logits(model, tokens(device))) < (0.05 if found.is_cuda else 1e-6)


def test_what_stays_the_same_or_is_not_of_the_replaced_module_alters_nothing() -> None:
    model = build("llama", torch.device("cpu"))
    fp8kit.convert(model, fuse="all")
    layer = model.model.layers[0]
    made = (layer.input_layernorm, layer.mlp)
    for module in made:
        module.train()
        assert module.training
        assert module.replaced[0].training
        module.eval()
        assert not module.replaced[0].training
        module.colour = "red"
    made[0].variance_epsilon = made[0].replaced[0].variance_epsilon
    assert not any(module.altered for module in made)


def test_attributes_of_fused_modules_are_told_from_those_of_what_they_replace() -> None:
    """An attribute that is not listed would be set on the replaced module if that has it too."""
    model = build("llama", torch.device("cpu"))
    fp8kit.convert(model, fuse="all")
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.mlp):
        own = {n for n in vars(module) if n[0] != "_"} - set(vars(nn.Module()))
        assert own <= fused_module._OWN


@pytest.mark.parametrize("fuse", ["none", "inputs", "all"])
def test_a_tangent_is_refused(fuse: str) -> None:
    model = build("llama", torch.device("cpu"))
    fp8kit.convert(model, fuse=fuse)
    x = model.model.embed_tokens(tokens(torch.device("cpu"))).detach()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda e: model(inputs_embeds=e).logits, (x,), (x,))


def test_vmap_computes_what_separate_layers_do() -> None:
    separate = build("llama", torch.device("cpu"))
    together = copy.deepcopy(separate)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    x = torch.randn(3, 5, 128).bfloat16()

    def run(model: nn.Module) -> Tensor:
        layer = model.model.layers[0]
        return torch.func.vmap(lambda e: layer.mlp(layer.post_attention_layernorm(e)))(x)

    with torch.no_grad():
        assert_bits_equal(run(together), run(separate))


def test_torch_fx_traces_what_was_replaced() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(128, 256)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return self.q(x) + self.k(x)

    model, x = nn.ModuleDict({"block": Block()}).bfloat16(), torch.randn(3, 128).bfloat16()
    fp8kit.convert(model, fuse={"block": ["norm -> q k"]})
    assert isinstance(model["block"].norm, fused_producers.FusedNorm)
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(model["block"])
        assert_bits_equal(traced(x), model["block"](x))


def test_fused_state_dict_is_that_of_the_model(device: torch.device) -> None:
    dense = build("llama", device)
    names = list(dense.state_dict())
    fp8kit.convert(dense)
    kept = [n for n in dense.state_dict() if not n.endswith("weight_scale")]
    assert kept == names


def fused_norm(model: nn.Module) -> fused_producers.FusedNorm:
    norm = model.model.layers[0].input_layernorm
    assert isinstance(norm, fused_producers.FusedNorm)
    return norm


def test_the_stand_in_is_nan_so_that_a_stray_reader_sees_it(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    x = torch.randn(1, 3, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        stand_in = fused_norm(model)(x)
    assert stand_in.shape == x.shape
    assert stand_in.isnan().all()


def read_elsewhere(model: nn.Module) -> None:
    model.model.layers[0].post_attention_layernorm = fused_norm(model)


def called_inside(model: nn.Module) -> None:
    """Run the model once more between two layers of one input."""
    once = [tokens(model.device, 2)]
    activation = model.model.layers[0].mlp.act_fn
    activation.register_forward_hook(lambda *_: model(once.pop()) and None if once else None)


@pytest.mark.parametrize("rows", [17, 600])
@pytest.mark.parametrize("change", [read_elsewhere, called_inside])
def test_a_layer_that_a_norm_does_not_write_for_says_so(
    change: Callable[[nn.Module], None], rows: int, device: torch.device
) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    logits(model, tokens(device, rows))
    change(model)
    with pytest.raises(fp8kit.UnsupportedError, match="stands for the result of a fused norm"):
        logits(model, tokens(device, rows))


class Named(nn.Module):
    """A block that passes its tensors as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(input=self.norm(input=x))


def test_a_norm_is_called_by_the_name_of_its_argument(device: torch.device) -> None:
    model = nn.Sequential(Named()).to(device)
    x = torch.randn(3, 128, device=device)
    separate = fp8kit.convert(model, fuse="none", copy=True).model
    fp8kit.convert(model, fuse={"0": ["norm -> fc"]})
    assert isinstance(model[0].norm, fused_producers.FusedNorm)
    with torch.no_grad():
        assert_bits_equal(model(x), separate(x))


class OtherMlp(LlamaMLP):
    def forward(self, hidden_state: Tensor) -> Tensor:
        return super().forward(hidden_state)


def test_a_feed_forward_is_called_by_the_name_of_its_argument() -> None:
    mlp = OtherMlp(LlamaConfig(**SIZES))
    fused, x = fused_producers.FusedGatedMlp(mlp, "silu"), torch.randn(3, 128)
    with torch.no_grad():
        assert_bits_equal(fused(hidden_state=x), mlp(x))


def test_a_copy_of_the_norm_alone_gives_real_numbers(device: torch.device) -> None:
    model = build("llama", device)
    dense = copy.deepcopy(model.model.layers[0].input_layernorm)
    fp8kit.convert(model)
    twin = copy.deepcopy(fused_norm(model))
    x = torch.randn(1, 3, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        assert_bits_equal(twin(x), dense(x))
    fused_norm(copy.deepcopy(model))  # of which its readers are copied too


@pytest.mark.parametrize("watched", ["norm", "holder", "layer"])
def test_a_hook_sees_real_numbers(watched: str, device: torch.device) -> None:
    model = build("llama", device)
    expected = logits(model, tokens(device))
    fp8kit.convert(model)
    layer = model.model.layers[0]
    seen: list[Tensor] = []
    module = {
        "norm": layer.input_layernorm,
        "holder": layer.self_attn,
        "layer": layer.self_attn.k_proj,
    }[watched]
    if watched == "norm":
        module.register_forward_hook(lambda m, a, out: seen.append(out))
    elif watched == "holder":
        module.register_forward_pre_hook(
            lambda m, a, k: seen.append(k["hidden_states"]), with_kwargs=True
        )
    else:
        module.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    found = logits(model, tokens(device))
    assert seen[0].isfinite().all()
    assert relative_error(found, expected) < 0.2


def test_a_hook_of_an_activation_is_called(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    mlp = model.model.layers[0].mlp
    seen: list[Tensor] = []
    mlp.act_fn.register_forward_hook(lambda m, a, out: seen.append(out))
    logits(model, tokens(device))
    assert len(seen) == 1


def test_a_wrapped_layer_gets_real_numbers(device: torch.device) -> None:
    class Wrapper(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x)
            return self.base(x)

    model = build("llama", device)
    fp8kit.convert(model)
    attention = model.model.layers[0].self_attn
    attention.v_proj = Wrapper(attention.v_proj)
    assert logits(model, tokens(device)).isfinite().all()
    assert attention.v_proj.seen[0].isfinite().all()


def test_a_fake_run_leaves_nothing_fake(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    norm = model.model.layers[0].input_layernorm
    # no other test makes what stands for results of this dtype
    norm.weight.data = norm.weight.data.half()
    x = torch.randn(3, 128, device=device, dtype=torch.float16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert isinstance(norm(mode.from_tensor(x)), FakeTensor)
    with torch.no_grad():
        stand_in = norm(x)
    assert type(stand_in) is Tensor
    assert stand_in.isnan().all()


def test_a_hook_between_producer_and_layers_gets_real_numbers(device: torch.device) -> None:
    model = nn.Sequential(nn.Sequential(nn.GELU()), nn.Linear(256, 128)).to(device, torch.bfloat16)
    fp8kit.convert(model, fuse={"": ["0.0 -> 1"]})
    assert isinstance(model[0][0], fused_producers.FusedActivation)
    x, seen = torch.randn(3, 256, device=device, dtype=torch.bfloat16), list[Tensor]()
    model[0].register_forward_hook(lambda m, args, y: seen.append(y))
    with torch.no_grad():
        assert model(x).isfinite().all()
    assert seen[0].isfinite().all()


def test_gradients_flow_through_the_unfused_path(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    x = torch.randn(1, 3, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
    model.model(inputs_embeds=x).last_hidden_state.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0


def test_fused_models_survive_copies_and_casts(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    expected = logits(model, tokens(device))
    twin = copy.deepcopy(model)
    norm = fused_norm(twin)
    attention = twin.model.layers[0].self_attn
    assert norm.consumers.path[0].ref() is twin.model.layers[0]
    assert norm.consumers.group is attention.q_proj.shared
    assert norm.replaced[0]._parameters is norm._parameters
    assert_bits_equal(logits(twin, tokens(device)), expected)
    moved = twin.to("cpu").to(device)
    assert_bits_equal(logits(moved, tokens(device)), expected)
    assert norm.consumers.are_ready()
    attention.q_proj = copy.deepcopy(attention.q_proj)
    assert not norm.consumers.are_ready()
    assert fused_norm(model).consumers.are_ready()


def test_a_layer_that_was_replaced_is_freed_and_no_longer_waited_for() -> None:
    cpu = torch.device("cpu")
    model, plain = build("llama", cpu), build("llama", cpu)
    fp8kit.convert(model)
    fp8kit.convert(plain, fuse="none")
    for made in (model, plain):
        attention = made.model.layers[0].self_attn
        gone = weakref.ref(attention.v_proj)
        attention.v_proj = attention.v_proj.to_linear()
        assert gone() is None
    expected = logits(plain, tokens(cpu))
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not fused_norm(made).consumers.are_ready()
        assert_bits_equal(logits(made, tokens(cpu)), expected)


def test_many_rows_multiply_the_codes_apart(device: torch.device) -> None:
    dense = build("llama", device)
    separate, together = copy.deepcopy(dense), copy.deepcopy(dense)
    fp8kit.convert(separate, fuse="none")
    fp8kit.convert(together)
    many = torch.randint(0, 128, (12, 60), device=device)
    found = logits(together, many)
    limit = relative_error(logits(separate, many), logits(dense, many))
    assert relative_error(found, logits(separate, many)) < 0.5 * limit


def test_excluded_layers_are_not_fused(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model, exclude=["*.k_proj", "*.down_proj"])
    kinds = [type(m).__name__ for m in model.modules()]
    assert kinds.count("FusedNorm") == 2
    assert "FusedGatedMlp" not in kinds
    assert logits(model, tokens(device)).isfinite().all()


def test_unknown_models_are_left_alone() -> None:
    model = nn.ModuleDict({"norm": nn.RMSNorm(128), "q_proj": nn.Linear(128, 128)})
    fp8kit.convert(model)
    assert fuse_producers(model) == []
    assert isinstance(model["norm"], nn.RMSNorm)


def test_unknown_fuse_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Got fuse='most'.*none, inputs, all"):
        fp8kit.convert(nn.Sequential(nn.Linear(128, 128)), fuse="most")


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_fused_model_compiles_to_one_graph(name: str, device: torch.device) -> None:
    model = build(name, device)
    fp8kit.convert(model)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (17, 9, 30):
            found = compiled(input_ids=tokens(device, rows), use_cache=False).logits
            # in the graph every norm is the model's own
            assert relative_error(found, logits(model, tokens(device, rows))) < 0.02
    assert counter.frame_count == 1


def test_accelerate_style_forwards_are_respected(device: torch.device) -> None:
    model = build("llama", device)
    expected = logits(model, tokens(device))
    fp8kit.convert(model)
    down = model.model.layers[0].mlp.down_proj
    seen: list[Tensor] = []
    inner = down.forward

    def hooked(x: Tensor) -> Tensor:  # what offloading puts on an instance, to bring the weight
        seen.append(x)
        return inner(x)

    down.forward = hooked
    assert relative_error(logits(model, tokens(device)), expected) < 0.2
    assert seen[0].isfinite().all()


@pytest.mark.gpu
def test_a_fused_layer_is_captured_by_a_graph() -> None:
    device = torch.device("cuda")
    model = build("llama", device)
    fp8kit.convert(model)
    ids = tokens(device)
    expected = logits(model, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = model(input_ids=ids).logits
    graph.replay()
    torch.cuda.synchronize()
    assert_bits_equal(captured, expected)


@pytest.mark.parametrize("trained", ["q_proj", "v_proj", "gate_proj", "down_proj"])
def test_a_trained_bias_behind_a_fused_module_gets_its_gradient(
    trained: str, device: torch.device
) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    model.requires_grad_(False)
    layers = [m for name, m in model.named_modules() if name.endswith(trained)]
    for layer in layers:
        bias = torch.zeros(layer.out_features, device=device, dtype=torch.bfloat16)
        layer.bias = nn.Parameter(bias)
    model(input_ids=tokens(device)).logits.float().sum().backward()
    assert all(layer.bias.grad is not None for layer in layers)


def test_threads_may_run_a_fused_model_at_once(device: torch.device) -> None:
    model = build("llama", device)
    fp8kit.convert(model)
    expected = logits(model, tokens(device))
    norm, attention = fused_norm(model), model.model.layers[0].self_attn
    x = torch.randn(1, 3, 128, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        normed = norm(x)
        with ThreadPoolExecutor(1) as other:  # a whole run between a norm and the layers behind it
            assert_bits_equal(other.submit(logits, model, tokens(device)).result(), expected)
        assert attention.q_proj(normed).isfinite().all()


def first_norm(model: nn.Module) -> nn.Module:
    norm: nn.Module = model.model.layers[0].input_layernorm
    return norm


def prune(norm: nn.Module) -> None:
    torch.nn.utils.prune.l1_unstructured(norm, "weight", 0.5)


def parametrize(norm: nn.Module) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(norm, "weight", Half())


def replace(norm: nn.Module) -> None:
    del norm.weight
    norm.weight = torch.full((128,), 0.5, dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of what prune leaves
@pytest.mark.parametrize("change", [prune, parametrize, replace])
def test_a_fused_norm_whose_weight_is_no_parameter_computes_with_it(
    change: Callable[[nn.Module], None], fuses_on_cpu: None
) -> None:
    cpu = torch.device("cpu")
    fused, plain = build("llama", cpu), build("llama", cpu)
    fp8kit.convert(fused)
    fp8kit.convert(plain, fuse="inputs")
    before = logits(fused, tokens(cpu))
    for model in (fused, plain):
        change(first_norm(model))
    assert_bits_equal(logits(fused, tokens(cpu)), logits(plain, tokens(cpu)))
    assert not torch.equal(logits(fused, tokens(cpu)), before)
    x = torch.randn(3, 128).bfloat16()
    compiled = torch.compile(first_norm(fused), backend="eager", fullgraph=True)
    assert_bits_equal(compiled(x), first_norm(plain)(x))
    if change is prune:
        for model in (fused, plain):
            torch.nn.utils.prune.remove(first_norm(model), "weight")
            first_norm(model).weight.data.fill_(2.0)
        assert_bits_equal(logits(fused, tokens(cpu)), logits(plain, tokens(cpu)))
        assert_bits_equal(compiled(x), first_norm(plain)(x))
    if change is replace:
        first_norm(fused).weight = torch.full((128,), 2.0, dtype=torch.bfloat16)
        first_norm(plain).weight = first_norm(fused).weight
        assert_bits_equal(logits(fused, tokens(cpu)), logits(plain, tokens(cpu)))


def test_replicas_of_other_gpus_hold_nothing_of_the_first(fuses_on_cpu: None) -> None:
    model = build("qwen3", torch.device("cpu"))
    fp8kit.convert(model)
    changed = [m for m in model.modules() if isinstance(m, fused_module.Fused)]
    changed += [m for m in model.modules() if "forward" in vars(m)]
    assert len(changed) > 8
    for module in changed:
        replica = module._replicate_for_data_parallel()
        assert not isinstance(replica, fused_module.Fused)
        assert "forward" not in vars(replica)
        again = replica._replicate_for_data_parallel()
        assert type(again) is type(replica)
    norm = model.model.norm
    replica = norm._replicate_for_data_parallel()
    replica.weight = torch.full((128,), 5.0)
    x = torch.randn(3, 128)
    assert_bits_equal(replica(x), type(norm).forward(replica, x))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("fuse", ["all", "none"])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "Qwen3Moe"])
def test_data_parallel_runs_on_every_gpu(name: str, scheme: str, fuse: str) -> None:
    gpu = torch.device("cuda", 0)
    model = build(name, gpu) if name in MODELS else tiny(name).to(gpu)
    fp8kit.convert(model, scheme, fuse=fuse)
    ids = tokens(torch.device("cuda", 0), 64).view(4, 16)
    parallel = nn.DataParallel(Logits(model), [0, 1])
    with torch.no_grad():
        expected = torch.cat([model(input_ids=half).logits for half in ids.chunk(2)])
        for _ in range(3):
            assert relative_error(parallel(ids), expected) < 1e-2
    assert parallel(ids).requires_grad


@pytest.mark.parametrize("part", ["self_attn", "self_attn.q_proj", "mlp"])
def test_a_part_that_is_compiled_in_place_reads_its_input(part: str) -> None:
    model = build("llama", torch.device("cpu"))
    fp8kit.convert(model)
    expected = logits(model, tokens(torch.device("cpu")))
    for layer in model.model.layers:
        layer.get_submodule(part).compile(backend="eager")
    assert_bits_equal(logits(model, tokens(torch.device("cpu"))), expected)


class CompiledAttention(LlamaAttention):
    forward = torch.compile(LlamaAttention.forward, backend="eager")


def test_a_class_that_is_compiled_reads_its_input() -> None:
    """In a graph of their own, the layers see a tensor, and not that it is a stand-in for codes."""
    model = build("llama", torch.device("cpu"))
    fp8kit.convert(model)
    expected = logits(model, tokens(torch.device("cpu")))
    for layer in model.model.layers:
        layer.self_attn.__class__ = CompiledAttention
    for found in (model, pickle.loads(pickle.dumps(model))):  # also made with that class
        assert_bits_equal(logits(found, tokens(torch.device("cpu"))), expected)
