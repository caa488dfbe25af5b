"""``enable_fp8_gemm`` and its layer: when it is FP8, what it keeps, what it saves and loads."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import fp8kit
from engine_formulas import decoded, on_gpu, plain, quantized
from fp8kit import compat
from fp8kit.compat import FP8GemmOptions, FP8Linear, enable_fp8_gemm
from numerics import assert_bits_equal, assert_matmul, assert_scheme_error, relative_error

N, K = 24, 32
MODES = ["keep", "cpu_offload", "discard"]


def layer_of(mode: str, dtype: torch.dtype = torch.bfloat16, **options: bool) -> FP8Linear:
    torch.manual_seed(0)
    dense = nn.Linear(K, N, dtype=dtype)
    return FP8Linear.from_linear(
        dense,
        options=FP8GemmOptions(fp16_weight_storage=mode, **options),  # type: ignore[arg-type]
    )


def inputs(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).to(dtype)


def dense_of(dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, dtype=dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.time_embedding = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lm_head(self.down(self.up(x)) + self.time_embedding(x))
        return y


def wrapped_names(model: nn.Module) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m, FP8Linear)}


@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_input_is_multiplied_in_fp8(mode: str) -> None:
    layer, dense, x = layer_of(mode), dense_of(), inputs()
    y = plain(layer(on_gpu(x)))
    assert (y.shape, y.dtype) == ((2, 3, N), torch.bfloat16)
    (a, s), (b, t) = quantized(x.view(-1, K)), quantized(dense.weight)
    assert_matmul(y.view(-1, N), decoded(a, s), decoded(b, t), dense.bias.detach())


@pytest.mark.parametrize("mode", ["keep", "cpu_offload"])
def test_a_cpu_input_is_multiplied_by_the_kept_weight(mode: str) -> None:
    layer, dense = layer_of(mode), dense_of()
    layer.materialize_fp8_weight("cpu")
    assert torch.equal(layer(inputs()), dense(inputs()))
    wide = layer(inputs(torch.float64))
    assert wide.dtype == torch.float64
    assert torch.equal(wide, dense.double()(inputs(torch.float64)))


def test_discarding_names_the_modes_that_serve_a_cpu() -> None:
    layer = layer_of("discard")
    assert torch.equal(layer(inputs()), dense_of()(inputs()))  # nothing is discarded yet
    layer.materialize_fp8_weight(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="fp16_weight_storage='keep' or 'cpu_offload'"):
        layer(inputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_other_dtypes_are_cast_and_cast_back(mode: str, dtype: torch.dtype) -> None:
    x = inputs(dtype)
    rounded = plain(layer_of(mode)(on_gpu(x.bfloat16())))
    back = plain(layer_of(mode)(on_gpu(x)))
    assert back.dtype == dtype
    assert torch.equal(back, rounded.to(dtype))
    stays = plain(layer_of(mode, cast_output_back=False)(on_gpu(x)))
    assert torch.equal(stays, rounded)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.complex64])
@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_is_no_real_number_is_refused(mode: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"Got x of dtype {dtype} .* without their scales"):
        layer_of(mode)(inputs().to(dtype))


@pytest.mark.parametrize("mode", ["keep", "cpu_offload"])
def test_inputs_that_are_not_cast_meet_the_dense_weight(mode: str) -> None:
    layer = layer_of(mode, torch.float32, cast_inputs=False)
    y = plain(layer(on_gpu(inputs(torch.float32))))
    assert torch.equal(y, dense_of(torch.float32)(inputs(torch.float32)))
    assert_scheme_error(
        plain(layer(on_gpu(inputs()))) - dense_of(torch.float32).bias,
        inputs().float() @ dense_of(torch.float32).weight.t(),
        "FP8_DYNAMIC",
    )


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="Inputs that are not cast need the dense weight"):
        FP8GemmOptions(cast_inputs=False)
    with pytest.raises(ValueError, match="keep, cpu_offload, discard"):
        FP8GemmOptions(fp16_weight_storage="gpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Got cast_output_back='no'"):
        FP8GemmOptions(cast_output_back="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"FP8Linear.__init__ takes FP8GemmOptions there"):
        FP8Linear(nn.Linear(K, N), options=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="module_filter='up'"):
        enable_fp8_gemm(Block(), module_filter="up")  # type: ignore[arg-type]
    options = FP8GemmOptions()
    words = (options.cast_inputs, options.cast_output_back, options.fp16_weight_storage)
    assert (*words, options.materialize_fp8_on_wrap) == (True, True, "discard", True)
    for wrong in (nn.Conv1d(1, 1, 1), fp8kit.Fp8Linear(K, N)):
        with pytest.raises(TypeError, match="that is not FP8 yet"):
            FP8Linear(wrong, options=options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Load the weights first"):
        FP8Linear(nn.Linear(2, 2, device="meta"))
    with pytest.raises(TypeError, match="FP8 is made from"):
        FP8Linear(nn.Linear(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mode", ["keep", "cpu_offload"])
def test_a_changed_dense_weight_is_quantized_again(mode: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        check_that_changes_are_seen(mode)


def check_that_changes_are_seen(mode: str) -> None:
    layer, dense, x = layer_of(mode), dense_of(), on_gpu(inputs())
    layer(x)
    name = "linear.weight" if mode == "keep" else "weight"
    with torch.no_grad():
        layer.state_dict()[name].mul_(2)
        dense.weight.mul_(2)
    assert torch.equal(plain(layer(x)), plain(FP8Linear.from_linear(dense)(x)))
    if layer.linear is not None:
        layer.linear.weight.data = torch.zeros_like(layer.linear.weight)
        assert torch.equal(plain(layer(x)), dense.bias.expand(2, 3, N))


@pytest.mark.parametrize("mode", ["keep", "discard"])
def test_tensors_that_are_replaced_are_computed_with(mode: str) -> None:
    layer, other, x = layer_of(mode), layer_of(mode), on_gpu(inputs())
    other.load_state_dict({n: t * -2 for n, t in other.state_dict().items()})
    before, wanted = plain(layer(x)), plain(other(x))
    given = {n: p.detach().clone() for n, p in other.named_parameters()}
    assert_bits_equal(plain(torch.func.functional_call(layer, given, (x,))), wanted)
    assert_bits_equal(plain(layer(x)), before)
    for name, tensor in given.items():
        owner, _, kind = name.rpartition(".")
        layer.get_submodule(owner)._parameters[kind] = nn.Parameter(tensor, requires_grad=False)
    assert_bits_equal(plain(layer(x)), wanted)
    held = layer if layer.linear is None else layer.linear
    held.bias = None
    assert not torch.equal(plain(layer(x)), wanted)
    assert not any("bias" in name for name in layer.state_dict())


def test_codes_are_not_taken_for_numbers() -> None:
    layer = layer_of("discard")
    layer.materialize_fp8_weight("cpu")
    assert layer.weight.shape == (N, K)
    with pytest.raises(fp8kit.UnsupportedError, match="FP8 codes, which are no numbers"):
        layer.weight.float()
    with pytest.raises(AttributeError, match="weight"):
        layer_of("keep").weight  # noqa: B018


def published(layer: FP8Linear) -> tuple[Any, Any]:
    """Return codes and scales by the names that users of the original library read."""
    return layer._fp8_weight, layer._fp8_weight_scale


def test_invalidating_drops_the_fp8_weight() -> None:
    layer = layer_of("keep")
    layer.materialize_fp8_weight("cpu")
    assert published(layer)[0].shape == (K, N)
    layer.invalidate_weight_cache()
    assert published(layer) == (None, None)
    layer(on_gpu(inputs()))
    assert published(layer)[1] is not None
    gone = layer_of("discard")
    gone.materialize_fp8_weight("cpu")
    gone.invalidate_weight_cache()
    with pytest.raises(RuntimeError, match="neither a dense weight nor an FP8 weight"):
        gone(on_gpu(inputs()))


NAMES = {
    ("keep", False): {"linear.weight", "linear.bias"},
    ("keep", True): {"linear.weight", "linear.bias"},
    ("cpu_offload", False): {"weight", "bias"},
    ("cpu_offload", True): {"weight", "bias"},
    ("discard", False): {"weight", "bias"},
    ("discard", True): {"weight", "weight_scale", "bias"},
}


@pytest.mark.parametrize(("mode", "made"), list(NAMES))
def test_state_dict_has_the_weight_in_every_mode_and_every_mode_reads_it(
    mode: str, made: bool
) -> None:
    source, x = layer_of(mode), on_gpu(inputs())
    y = plain(copy.deepcopy(source)(x))
    if made:
        source(x)
    state = source.state_dict()
    assert set(state) == NAMES[mode, made]
    for other, ready in NAMES:
        torch.manual_seed(7)
        options = FP8GemmOptions(fp16_weight_storage=other)  # type: ignore[arg-type]
        target = FP8Linear(nn.Linear(K, N, dtype=torch.bfloat16), options=options)
        if ready:
            target(x)
        target.load_state_dict(state)
        loaded = plain(target(x))
        if "weight_scale" not in state or other == "discard":
            assert torch.equal(loaded, y)
        else:
            # codes became a bf16 weight: their scales are found again, to 8 bits, and the result
            # is rounded to 8 bits twice
            assert relative_error(loaded, y) < 3 * 2**-8


def test_a_dense_checkpoint_of_the_model_is_read() -> None:
    torch.manual_seed(3)
    model, dense = Block(), Block()
    for mode in MODES:
        options = FP8GemmOptions(fp16_weight_storage=mode)  # type: ignore[arg-type]
        wrapped = enable_fp8_gemm(model, options=options, inplace=False)
        wrapped.load_state_dict(dense.state_dict())
        x = torch.randn(2, 64)
        assert torch.equal(wrapped(x), dense(x))


def test_wrong_entries_are_told() -> None:
    for mode in ("cpu_offload", "discard"):
        layer = layer_of(mode)
        with pytest.raises(RuntimeError, match="Missing key"):
            layer.load_state_dict({"bias": torch.zeros(N)})
        with pytest.raises(RuntimeError, match="This layer has a dense weight"):
            layer.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.zeros(N)})


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize(("mode", "made"), list(NAMES))
def test_a_layer_can_be_copied_in_every_mode(mode: str, made: bool, how: str) -> None:
    layer, x = layer_of(mode), on_gpu(inputs())
    if made:
        layer(x)
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert torch.equal(plain(twin(x)), plain(layer(x)))
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(
        p.data_ptr() for p in layer.parameters()
    )


@pytest.mark.parametrize("mode", MODES)
def test_casts_leave_codes_alone(mode: str) -> None:
    layer, x = layer_of(mode), inputs()
    y = plain(layer(on_gpu(x)))
    layer.half()
    if mode == "discard":
        assert layer.state_dict()["weight"].dtype == torch.float8_e4m3fn
        assert layer.bias is not None
        assert layer.bias.dtype == torch.float16
    again = plain(layer(on_gpu(x)))
    assert torch.allclose(again.float(), y.float(), atol=2**-6)
    for parameter in layer.parameters():
        assert parameter.dtype in (torch.float16, torch.float8_e4m3fn, torch.float32)


def test_the_default_filter_keeps_sensitive_layers_and_takes_small_ones() -> None:
    model = Block()
    model.tiny = nn.Linear(8, 8)
    assert enable_fp8_gemm(model) is model
    assert wrapped_names(model) == {"up", "down", "tiny"}
    everything = enable_fp8_gemm(Block(), module_filter=lambda name, layer: True)
    assert wrapped_names(everything) == {"up", "down", "time_embedding", "lm_head"}
    seen: list[str] = []
    nested = nn.Sequential(Block())
    enable_fp8_gemm(nested, module_filter=lambda name, layer: seen.append(name) or name == "0.up")
    assert wrapped_names(nested) == {"0.up"}
    assert seen == ["0.up", "0.down", "0.time_embedding", "0.lm_head"]


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_a_layer_stay(mode: str) -> None:
    model, x = nn.Sequential(dense_of()), inputs()
    seen: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    model[0].register_forward_hook(lambda module, given, y: seen.append(y) or y * 3)
    y = model(x)
    enable_fp8_gemm(model, options=FP8GemmOptions(fp16_weight_storage=mode))  # type: ignore[arg-type]
    assert_bits_equal(model(x), y)
    assert_scheme_error(plain(model(on_gpu(x))), y, "FP8_DYNAMIC")
    layers = (model[0], layer_of(mode))
    assert_bits_equal(
        plain(compat.fp8_linear_forward_many(layers, on_gpu(x))[0]), plain(model(on_gpu(x)))
    )
    assert len(seen) == 5  # once for each call


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3


def odd_layers() -> dict[str, nn.Linear]:
    replaced, pruned = nn.Linear(K, N), nn.Linear(K, N)
    replaced.forward = Tripled(K, N).forward  # type: ignore[method-assign]
    prune.l1_unstructured(pruned, "weight", 0.5)
    return {
        "computes something else": Tripled(K, N),
        "has another forward": replaced,
        "computes its weight in a hook": pruned,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", odd_layers())
def test_layers_that_compute_something_else_are_refused(mode: str, what: str) -> None:
    options = FP8GemmOptions(fp16_weight_storage=mode)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(K, K), odd_layers()[what])
    with pytest.raises(TypeError, match=f"Got 1, a .*{what}.*Leave it out with module_filter"):
        enable_fp8_gemm(model, options=options, module_filter=lambda name, layer: True)
    assert wrapped_names(model) == set()
    with pytest.raises(TypeError, match=what):
        FP8Linear.from_linear(model[1], options=options)
    assert wrapped_names(enable_fp8_gemm(model, options=options)) == {"0"}


def test_a_parametrized_weight_stays_dense_by_default() -> None:
    model = nn.Sequential(nn.Linear(K, K), weight_norm(nn.Linear(K, N)))
    assert wrapped_names(enable_fp8_gemm(model)) == {"0"}


@pytest.mark.parametrize("mode", MODES)
def test_a_copy_is_changed_if_asked_and_shared_layers_stay_shared(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.append(model[0])
    options = FP8GemmOptions(fp16_weight_storage=mode)  # type: ignore[arg-type]
    changed = enable_fp8_gemm(model, inplace=False, options=options)
    assert wrapped_names(model) == set()
    assert isinstance(changed[0], FP8Linear)
    assert changed[0] is changed[1]
    with pytest.warns(UserWarning, match="replaced no layer"):
        again = enable_fp8_gemm(changed, module_filter=lambda n, m: True)
    assert wrapped_names(again) == {"0"}


def test_a_model_without_a_layer_to_replace_gets_a_warning() -> None:
    with pytest.warns(UserWarning, match="replaced no layer of Sequential"):
        enable_fp8_gemm(nn.Sequential(nn.Linear(8, 8)), module_filter=lambda n, m: False)


def test_a_kept_weight_is_not_converted_under_the_layer_that_reads_it() -> None:
    options = FP8GemmOptions(fp16_weight_storage="keep")
    model = enable_fp8_gemm(nn.Sequential(nn.Linear(128, 128)), options=options)
    x = torch.randn(2, 128)
    y = model(x)
    with pytest.warns(UserWarning, match="No layer becomes FP8: FP8Linear"):
        assert not fp8kit.convert(model).converted
    assert_bits_equal(model(x), y)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Got a model of type dict.*pipeline\.transformer"):
        enable_fp8_gemm({})  # type: ignore[arg-type]


def test_weights_on_a_cpu_wait_for_the_first_gpu_input() -> None:
    model = enable_fp8_gemm(nn.Sequential(nn.Linear(K, N)))
    layer = model[0]
    assert isinstance(layer, FP8Linear)
    assert published(layer) == (None, None)
    assert "not made yet" in repr(layer)
    model(on_gpu(inputs()))
    assert published(layer)[0] is not None
    assert layer.state_dict()["weight"].dtype == torch.float8_e4m3fn


def test_gradients_reach_the_input_and_the_bias() -> None:
    layer = layer_of("keep")
    x = inputs().requires_grad_()
    plain(layer(on_gpu(x))).sum().backward()
    assert x.grad is not None
    assert layer.linear is not None
    assert layer.linear.bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_of_one_input_quantize_it_once(dtype: torch.dtype) -> None:
    layers = [layer_of(mode) for mode in MODES]
    x = on_gpu(inputs(dtype))
    for learn in (False, True):
        with torch.set_grad_enabled(learn):
            found = compat.fp8_linear_forward_many(tuple(layers), x)
            for y, layer in zip(found, layers, strict=True):
                assert_bits_equal(plain(y), plain(layer(x)))
    assert compat.fp8_linear_forward_many((), x) == ()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_weights_are_materialized_while_wrapping(mode: str) -> None:
    options = FP8GemmOptions(fp16_weight_storage=mode)  # type: ignore[arg-type]
    model = enable_fp8_gemm(nn.Sequential(nn.Linear(64, 64)).cuda().bfloat16(), options=options)
    layer = model[0]
    assert isinstance(layer, FP8Linear)
    assert published(layer)[0].is_cuda
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    y = model(x)
    if mode != "discard":
        assert torch.allclose(y.cpu(), model.cpu()(x.cpu()), atol=0.1, rtol=0.1)
    assert compat.supports("fp8")
    assert_bits_equal(model.cuda()(x), y)
