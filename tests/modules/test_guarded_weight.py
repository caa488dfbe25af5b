"""Code that reads an FP8 weight, unseen by ``convert``: it raises, or gets no numbers."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.fusion import fuse_linear_bn_eval

import fp8kit
from fp8kit import Fp8Linear, UnsupportedError
from fp8kit.runtime.weight_hazards import invalidate, mark_synchronized, safe_to_prefetch
from numerics import assert_bits_equal

SIZE = 128
TAUGHT = r"to the weight of proj \(Fp8Linear \[128, 128\]\)\. .*Call the layer instead"


def model_of(weight_storage: str = "discard") -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"proj": nn.Linear(SIZE, SIZE), "other": nn.Linear(SIZE, SIZE)})
    fp8kit.convert(model, weight_storage=weight_storage)
    return model


def overwritten(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.randn(SIZE, SIZE))


def assigned(layer: Any, x: Tensor) -> None:
    layer.weight.data = torch.randn(SIZE, SIZE)


def indexed(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight[0] = torch.randn(SIZE)


def numbered(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight[torch.tensor([0])] = 0.5


def filled(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(layer.weight.view(torch.uint8))


def replaced(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight.set_(torch.randn(SIZE, SIZE).to(torch.float8_e5m2))


def under_autocast(layer: Any, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        F.linear(x, layer.weight)


def scripted(w: torch.Tensor) -> torch.Tensor:
    return w.to(torch.float32)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        return x @ weight.float().t()


def decayed(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer.weight *= 0.9


REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "to": lambda m, x: m.weight.to(x.dtype),
    "to(x)": lambda m, x: m.weight.to(x),
    "to another FP8": lambda m, x: m.weight.to(torch.float8_e5m2),
    "float": lambda m, x: m.weight.float(),
    "half": lambda m, x: m.weight.half(),
    "bfloat16": lambda m, x: m.weight.bfloat16(),
    "int": lambda m, x: m.weight.int(),
    "type": lambda m, x: m.weight.type(torch.float32),
    "type_as": lambda m, x: m.weight.type_as(x),
    "detach": lambda m, x: m.weight.detach().to(x.dtype),
    "data": lambda m, x: m.weight.data.to(x.dtype),
    "t": lambda m, x: m.weight.t().to(x.dtype),
    "T": lambda m, x: m.weight.T.to(x.dtype),
    "index": lambda m, x: m.weight[0].to(x.dtype),
    "chunk": lambda m, x: m.weight.chunk(2)[1].to(x.dtype),
    "rows": lambda m, x: [row.float() for row in m.weight],
    "stack": lambda m, x: torch.stack([m.weight, m.weight]).to(x.dtype),
    "clone": lambda m, x: m.weight.clone().cpu().contiguous().float(),
    "view": lambda m, x: m.weight.view(-1).float(),
    "copied": lambda m, x: torch.empty(SIZE, SIZE).copy_(m.weight),
    "linear": lambda m, x: F.linear(x, m.weight),
    "matmul": lambda m, x: x @ m.weight.t(),
    "einsum": lambda m, x: torch.einsum("bk,nk->bn", x, m.weight),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight.t()),
    "mul": lambda m, x: torch.mul(m.weight, 2.0),
    "rmul": lambda m, x: 2.0 * m.weight,
    "greater": lambda m, x: m.weight > 0.5,
    "equal to a number": lambda m, x: m.weight == 1.0,
    "sum": lambda m, x: m.weight.sum(),
    "norm": lambda m, x: m.weight.norm(),
    "bilinear": lambda m, x: F.bilinear(x, x, m.weight[None]),
    "embedding": lambda m, x: F.embedding(torch.arange(3), m.weight).float(),
    "tolist": lambda m, x: m.weight.tolist(),
    "item": lambda m, x: m.weight[0, 0].item(),
    "numpy": lambda m, x: m.weight.numpy(),
    "init": lambda m, x: nn.init.normal_(m.weight),
    "constant": lambda m, x: nn.init.constant_(m.weight, 1.0),
    "copy_": overwritten,
    "data =": assigned,
    "setitem": indexed,
    "setitem of a number by an index": numbered,
    "copy_ of bytes": filled,
    "imul": decayed,
    "prune": lambda m, x: prune.l1_unstructured(m, "weight", 0.5),
    "weight norm": lambda m, x: parametrizations.weight_norm(m),
    "spectral norm": lambda m, x: parametrizations.spectral_norm(m),
    "tensor": lambda m, x: torch.tensor(m.weight, dtype=x.dtype),
    "asarray": lambda m, x: torch.asarray(m.weight, dtype=x.dtype),
    "as_tensor": lambda m, x: torch.as_tensor(m.weight, dtype=x.dtype),
    "as_tensor, then cast": lambda m, x: torch.as_tensor(m.weight).float(),
    "Tensor()": lambda m, x: Tensor(m.weight).float(),
    "as_subclass": lambda m, x: m.weight.as_subclass(Tensor).float(),
    "new_tensor": lambda m, x: x.new_tensor(m.weight),
    "vmap": lambda m, x: torch.vmap(lambda row: row.float())(m.weight),
    "vmap over another": lambda m, x: torch.vmap(lambda r: m.weight.to(r.dtype) @ r)(x),
    "func.grad": lambda m, x: torch.func.grad(lambda w: w.to(x.dtype).sum())(m.weight),
    "func.vjp": lambda m, x: torch.func.vjp(lambda w: w.to(x.dtype), m.weight),
    "func.functionalize": lambda m, x: torch.func.functionalize(lambda w: w.float())(m.weight),
    "functional_call of another": lambda m, x: torch.func.functional_call(
        nn.Linear(SIZE, SIZE), {"weight": m.weight}, (x,)
    ),
    "autograd.Function": lambda m, x: Product.apply(x, m.weight),
    "autocast": under_autocast,
    "foreach_mul": lambda m, x: torch._foreach_mul([m.weight], 2.0),
    "foreach_copy": lambda m, x: torch._foreach_copy_([torch.empty(SIZE, SIZE)], [m.weight]),
    "foreach_norm": lambda m, x: torch._foreach_norm([m.weight]),
    "out=": lambda m, x: torch.add(m.weight, 0, out=torch.empty(SIZE, SIZE)),
    "out= of the weight": lambda m, x: torch.mul(torch.randn(SIZE, SIZE), 2, out=m.weight),
    "foreach_copy into it": lambda m, x: torch._foreach_copy_([m.weight], [torch.randn(128, 128)]),
    "aten": lambda m, x: torch.ops.aten._to_copy(m.weight, dtype=x.dtype),
    "text": lambda m, x: f"{m.weight[0, 0]:.3f}",
    "batch norm": lambda m, x: fuse_linear_bn_eval(m.eval(), nn.BatchNorm1d(SIZE).eval()),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", REFUSED)
def test_reading_codes_as_numbers_raises_and_changes_nothing(name: str) -> None:
    model, x = model_of(), torch.randn(3, SIZE)
    before = model["proj"].codes.detach().clone()
    with pytest.raises(UnsupportedError, match=TAUGHT):
        REFUSED[name](model["proj"], x)
    assert_bits_equal(model["proj"].codes.detach(), before)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_layer_is_whole_after_a_refused_norm(norm: Callable[[nn.Module], nn.Module]) -> None:
    """torch's old weight norm deletes the weight before it reads it."""
    layer, x = model_of()["proj"], torch.randn(3, SIZE)
    before, y = {n: t.clone() for n, t in layer.state_dict().items()}, layer(x)
    with pytest.raises((UnsupportedError, NotImplementedError)):  # the latter is torch's own
        norm(layer)
    held = layer.state_dict()
    assert held.keys() == before.keys()
    for name, tensor in before.items():
        assert_bits_equal(held[name], tensor)
    assert_bits_equal(layer(x), y)


def test_the_operation_is_named_apart_from_the_sentence() -> None:
    with pytest.raises(UnsupportedError, match="Code applies 'to' to the weight of"):
        model_of()["proj"].weight.to(torch.float32)


def test_codes_of_another_dtype_cannot_be_put_in_its_place() -> None:
    layer, x = model_of()["proj"], torch.randn(3, SIZE)
    y = layer(x)
    with pytest.raises(RuntimeError, match=r"Could not set tensor|to the weight of proj"):
        replaced(layer, x)
    assert torch.equal(layer(x), y)
    with torch.no_grad():
        layer.weight.set_(torch.zeros(SIZE, SIZE).to(layer.weight.dtype))
    assert torch.equal(layer(x), layer.bias.expand(3, SIZE))  # it reached the layer


def test_scripts_read_no_codes() -> None:
    layer, script = model_of()["proj"], torch.jit.script(scripted)
    with pytest.raises(RuntimeError, match="TorchScript interpreter"):  # it drops the words
        script(layer.weight)


def test_facts_of_a_weight_are_as_ever() -> None:
    layer = model_of()["proj"]
    w, codes = layer.weight, layer.codes
    assert isinstance(w, nn.Parameter)
    assert isinstance(w, Tensor)
    assert layer.weight is layer.weight
    for fact in ("shape", "dtype", "device", "requires_grad", "ndim", "is_leaf", "grad", "nbytes"):
        assert getattr(w, fact) == getattr(codes, fact)
    for fact in ("data_ptr", "numel", "stride", "is_contiguous", "element_size", "__len__"):
        assert getattr(w, fact)() == getattr(codes, fact)()
    assert_bits_equal(w.view(torch.uint8), codes.view(torch.uint8))
    assert (w == codes).all()
    assert not torch.isnan(w).any()
    assert torch.zeros_like(w, dtype=torch.float32).sum() == 0
    assert len(inspect.getmembers(layer)) > 100
    assert "float8_e4m3fn" in repr(w)


def test_attributes_set_on_a_weight_stay() -> None:
    layer = model_of()["proj"]
    layer.weight.mark = 3
    assert layer.weight.mark == layer.codes.mark == 3
    assert not hasattr(layer.weight, "other_mark")


def test_a_mark_is_taken_from_the_parameter_behind_the_guard() -> None:
    layer = model_of()["proj"]
    mark_synchronized(layer.codes)
    assert safe_to_prefetch(layer.codes)
    invalidate(layer.weight)
    assert not safe_to_prefetch(layer.codes)
    layer.weight.told = True
    del layer.weight.told
    assert not hasattr(layer.codes, "told")


def test_writing_codes_reaches_the_layer() -> None:
    model, x = model_of(), torch.randn(3, SIZE)
    a, b = model["proj"], model["other"]
    b.bias = a.bias
    with torch.no_grad():
        a.weight.copy_(b.weight)
        a.weight_scale.copy_(b.weight_scale)
    assert torch.equal(a(x), b(x))
    a.weight.zero_()
    assert torch.equal(a(x), a.bias.expand(3, SIZE))
    rows = torch.tensor([0, 2])
    with torch.no_grad():
        a.weight[rows] = b.codes[rows]
    assert torch.equal(a(x)[:, rows], b(x)[:, rows])


def test_a_view_follows_a_weight_that_moves() -> None:
    layer = model_of()["proj"]
    held = layer.weight
    layer.share_memory()
    assert layer.weight.data_ptr() == layer.codes.data_ptr()
    layer.to("meta")
    assert layer.weight.is_meta
    assert held.shape == layer.weight.shape


@pytest.mark.parametrize("how", ["pickle", "save"])
def test_files_of_a_weight_hold_it_plain(how: str) -> None:
    def saved(value: Tensor) -> Any:
        file = io.BytesIO()
        torch.save({"w": value}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)["w"]

    model = model_of()
    pickled = how == "pickle"
    made = (
        pickle.loads(pickle.dumps(model))["proj"].codes if pickled else saved(model["proj"].weight)
    )
    assert type(made) is nn.Parameter
    assert made.float().dtype == torch.float32  # nothing of the guard is left in it
    assert_bits_equal(made.detach(), model["proj"].codes.detach())


PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "Parameter": lambda w: nn.Parameter(w, requires_grad=False),
    "detach": lambda w: nn.Parameter(w.detach(), requires_grad=False),
    "data": lambda w: nn.Parameter(w.data),
    "type": lambda w: type(w)(w, requires_grad=False),
    "deepcopy": copy.deepcopy,
    "deepcopy of data": lambda w: nn.Parameter(copy.deepcopy(w.data)),
    "cat": lambda w: nn.Parameter(torch.cat([w.data, w.data])[SIZE:]),
    "stack": lambda w: nn.Parameter(torch.stack([w, w])[1]),
    "chunk": lambda w: nn.Parameter(torch.cat(w.chunk(2))),
}


@pytest.mark.parametrize("how", PARAMETERS)
@pytest.mark.parametrize("assign", [True, False], ids=["assign", "attribute"])
def test_a_dense_layer_of_codes_raises_whatever_its_parameter_was_made_of(
    how: str, assign: bool
) -> None:
    """diffusers joins q, k and v like this; without a guard, autocast takes codes for numbers."""
    model, x = model_of(), torch.randn(3, SIZE)
    made = PARAMETERS[how](model["proj"].weight)
    assert isinstance(made, nn.Parameter)
    assert_bits_equal(made.view(torch.uint8), model["proj"].codes.view(torch.uint8))
    dense = nn.Linear(SIZE, SIZE, bias=False, device="meta")
    if assign:
        dense.load_state_dict({"weight": made}, assign=True)
    else:
        dense.weight = made
    for layer in (dense, copy.deepcopy(dense)):
        with pytest.raises(UnsupportedError, match=TAUGHT), torch.autocast("cpu", torch.bfloat16):
            layer(x)
        for cast in (layer.to, layer.half):
            with pytest.raises(UnsupportedError, match=TAUGHT):
                cast(*[torch.bfloat16][: cast == layer.to])
    y = model["proj"](x)
    model["proj"].weight = made
    assert type(model["proj"]._parameters["weight"]) is nn.Parameter
    assert torch.equal(model["proj"](x), y)


def test_a_parameter_put_past_the_layer_still_computes() -> None:
    """Code that moves tensors writes into ``_parameters``, guards included; results stay equal."""
    model, x = model_of(), torch.randn(3, SIZE)
    layer = model["proj"]
    y = layer(x)
    layer._parameters["weight"] = nn.Parameter(layer.weight.clone(), requires_grad=False)
    assert torch.equal(layer(x), y)
    assert torch.equal(layer.double().float()(x), y)
    assert torch.equal(layer.to_linear()(x), copy.deepcopy(layer).to_linear()(x))


def test_what_is_assigned_to_a_layer_is_plain() -> None:
    model = model_of()
    a, b = model["proj"], model["other"]
    with pytest.warns(UserWarning, match="codes of other .* without their scales") as told:
        a.weight, a.weight_scale = b.weight, b.weight_scale
    assert told[0].filename == __file__
    assert a._parameters["weight"] is b._parameters["weight"]
    a.weight = nn.Parameter(a.weight.detach(), requires_grad=False)  # its own: nothing is told
    assert type(a._parameters["weight"]) is nn.Parameter
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {type(t) for t in model.state_dict().values()} == {Tensor}


def test_a_dense_weight_that_is_assigned_is_refused() -> None:
    layer = model_of()["proj"]
    layer.weight = nn.Parameter(torch.randn(SIZE, SIZE))
    with pytest.raises(ValueError, match=r"It holds torch\.float8_e4m3fn codes"):
        layer(torch.randn(3, SIZE))


def test_files_hold_the_codes(tmp_path: Path) -> None:
    layer = model_of()["proj"]
    save_file({"w": layer.weight, "part": layer.weight[:4].clone()}, tmp_path / "w.safetensors")
    assert_bits_equal(load_file(tmp_path / "w.safetensors")["w"], layer.codes.detach())


def test_operators_that_know_scales_take_it() -> None:
    layer = model_of()["proj"]
    q = fp8kit.QTensor(layer.weight, layer.weight_scale, layer.scheme.weight)
    assert_bits_equal(fp8kit.dequantize(q), layer.to_linear().weight.detach())


def scaled_product(layer: Any, x: fp8kit.QTensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    codes = copy.deepcopy(layer.weight).t()
    scales = {"scale_a": scale_a, "scale_b": scale_b}
    bias = torch.zeros(SIZE, dtype=torch.bfloat16)
    return torch._scaled_mm(x.data, codes, bias=bias, out_dtype=torch.bfloat16, **scales)


def test_a_scaled_product_by_one_is_refused() -> None:
    """Model code that casts weights to FP8 itself multiplies any FP8 weight with a scale of one."""
    layer, x = model_of()["proj"], fp8kit.quantize(torch.randn(2, SIZE), fp8kit.TENSOR)
    with pytest.raises(UnsupportedError, match="'_scaled_mm' " + TAUGHT):
        scaled_product(layer, x, x.scale, torch.ones(1))


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="on a CPU torch 2.11 takes scales per tensor only"
)
def test_a_scaled_product_takes_the_scales_of_the_layer() -> None:
    layer, x = model_of()["proj"], fp8kit.quantize(torch.randn(2, SIZE), fp8kit.TENSOR)
    expected = fp8kit.dequantize(x) @ layer.to_linear().weight.t()
    scale_a = x.scale.expand(2, 1).contiguous()
    made = scaled_product(layer, x, scale_a, layer.weight_scale.t())
    assert torch.allclose(made.float(), expected, rtol=2**-8, atol=1e-3)


@torch.library.custom_op("fp8kit_tests::halves", mutates_args=())
def halves(w: Tensor) -> list[Tensor]:
    return [part.clone() for part in w.chunk(2)]


@torch.library.custom_op("fp8kit_tests::decoded", mutates_args=())
def decoded(w: Tensor, scale: Tensor) -> Tensor:
    return w.float() * scale


@torch.library.custom_op("fp8kit_tests::largest", mutates_args=())
def largest(w: Tensor, cast: bool) -> Tensor:
    return w.float().amax() if cast else w.amax().float()


@pytest.mark.parametrize("cast", [True, False], ids=["computes", "fails"])
def test_operators_of_others_take_codes_beside_scales_alone(cast: bool) -> None:
    """torchao's operators compute the range of a weight: they would take codes for numbers."""
    layer = model_of()["proj"]
    with pytest.raises(UnsupportedError, match=TAUGHT):
        largest(layer.weight, cast)
    assert halves(layer.weight)[1].shape == (SIZE // 2, SIZE)
    assert_bits_equal(decoded(layer.weight, layer.weight_scale), layer.to_linear().weight.detach())


def test_functional_call_and_parametrizations_take_it() -> None:
    model, x = model_of(), torch.randn(3, SIZE)
    layer = model["proj"]
    y = layer(x)
    assert torch.equal(torch.func.functional_call(layer, {"weight": layer.weight}, (x,)), y)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    assert torch.equal(layer(x), y)


class Flipped(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.flip(0)


class FlippedBits(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.view(torch.uint8).flip(0).view(w.dtype)


class FlippedBack(Flipped):
    def right_inverse(self, w: Tensor) -> Tensor:
        return w.flip(0)


class InTwo(nn.Module):
    def forward(self, top: Tensor, rest: Tensor) -> Tensor:
        return torch.cat([top, rest])

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w[:3], w[3:]


@pytest.mark.parametrize(
    "kinds", [[Flipped], [FlippedBits], [nn.Identity, Flipped], [InTwo, Flipped]]
)
def test_parametrizations_that_move_codes_are_refused(kinds: list[type[nn.Module]]) -> None:
    layer, x = model_of()["proj"], torch.randn(3, SIZE)
    experts = fp8kit.Fp8Experts(2, SIZE, SIZE)
    for kind in kinds:
        parametrize.register_parametrization(layer, "weight", kind())
        parametrize.register_parametrization(experts, "down_proj", kind())
    for use in (lambda: layer(x), layer.to_linear, layer.quantized_weight):
        with pytest.raises(UnsupportedError, match=r"weight of proj .* do not move with them"):
            use()
    with pytest.raises(UnsupportedError, match="down_proj of ParametrizedFp8Experts"):
        experts.quantized("down_proj")


def test_a_parametrization_that_computes_is_refused_at_its_use() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(SIZE, 2 * SIZE))
    parametrizations.orthogonal(layer)
    with pytest.raises(UnsupportedError, match=r"Code applies 'tril' to the weight of an unnamed"):
        layer(torch.randn(3, SIZE))


@pytest.mark.parametrize("kind", [FlippedBack, InTwo])
def test_parametrizations_that_undo_what_they_store_are_taken(kind: type[nn.Module]) -> None:
    layer, x = model_of()["proj"], torch.randn(3, SIZE)
    y = layer(x)
    parametrize.register_parametrization(layer, "weight", kind())
    assert_bits_equal(layer(x), y)


def test_swapped_parameters_work() -> None:
    layer, x = model_of()["proj"], torch.randn(3, SIZE)
    y = layer(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.bfloat16().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(layer(x), y, rtol=0, atol=2**-8)  # its bias was bf16 in between


def test_threads_get_a_weight_each_its_own_time() -> None:
    layer = model_of()["proj"]
    seen: list[bool] = []

    def look() -> None:
        seen.extend(layer.weight.data_ptr() == layer.codes.data_ptr() for _ in range(200))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen)
    assert len(seen) == 800


def test_no_view_outlives_its_use() -> None:
    layer = model_of()["proj"]
    ends = io.BytesIO()
    assert layer.weight.shape
    torch.save(list(layer.parameters()), ends)  # nothing on the Parameter hinders it
    assert vars(layer.codes).keys() <= {"_fp8kit_waited_for"}


def test_accelerate_moves_layers_and_brings_them_back() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, x = nn.Sequential(*model_of().values()), torch.randn(3, SIZE)
    y = model(x)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model(x), y)
    accelerate.hooks.remove_hook_from_submodules(model)
    accelerate.utils.set_module_tensor_to_device(model, "0.weight", "meta")
    assert type(model[0]._parameters["weight"]) is nn.Parameter


def test_lora_trains_beside_it() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(*model_of().values())
    tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4))
    tuned(torch.randn(3, SIZE)).sum().backward()
    assert any(p.grad is not None for n, p in tuned.named_parameters() if "lora_B" in n)
    tuned = peft.get_peft_model(
        nn.Sequential(*model_of().values()),
        peft.IA3Config(target_modules=["0"], feedforward_modules=[]),
    )
    with pytest.raises(UnsupportedError, match="Call the layer instead"):
        tuned.merge_and_unload()


LIMITS: dict[str, Callable[[Fp8Linear], Tensor]] = {
    "state_dict": lambda layer: layer.state_dict()["weight"],
    "parameters": lambda layer: dict(layer.named_parameters())["weight"],
    "_parameters": lambda layer: layer._parameters["weight"],  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("name", LIMITS)
def test_tensors_from_elsewhere_are_codes_and_cannot_be_guarded(name: str) -> None:
    layer = model_of()["proj"]
    codes = LIMITS[name](layer)
    assert codes.dtype == torch.float8_e4m3fn
    assert_bits_equal(codes.float(), layer.codes.float())


def test_a_graph_of_a_compiler_is_not_guarded() -> None:
    layer, x = model_of()["proj"], torch.randn(3, SIZE)

    def reads(y: Tensor) -> Tensor:
        return F.linear(y, layer.weight.to(y.dtype))

    compiled = torch.compile(reads, fullgraph=True, backend="eager")
    assert_bits_equal(compiled(x), F.linear(x, layer.codes.to(x.dtype)))


@pytest.mark.filterwarnings("ignore")  # what the compiler warns about is not ours to fix
@pytest.mark.parametrize("how", ["inside", "closure", "argument", "detached"])
def test_compiled_functional_calls_take_it(how: str) -> None:
    layer, x = model_of()["proj"], torch.randn(3, SIZE)
    y, weight = layer(x), layer.weight

    def call(x: Tensor, given: Any = None) -> Any:
        w = {"inside": None, "closure": weight, "argument": given, "detached": given}[how]
        w = layer.weight if how == "inside" else w.detach() if how == "detached" else w
        return torch.func.functional_call(layer, {"weight": w}, (x,))

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=how == "inside")
    given = () if how in ("inside", "closure") else (weight,)
    assert torch.equal(compiled(x, *given), y)


def test_layers_run_under_a_compiler_without_a_guard_in_the_graph() -> None:
    model, x = nn.Sequential(*model_of().values()), torch.randn(3, SIZE)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), model(x))
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


def test_stacks_of_experts_are_guarded_too() -> None:
    stacks = torch.randn(3, 64, 32), torch.randn(3, 32, 32)
    experts = fp8kit.Fp8Experts.from_dense(*stacks)
    for read in (
        lambda w: w.float(),
        lambda w: w[0].to(torch.bfloat16),
        lambda w: w.detach().transpose(1, 2) * 2,
    ):
        with pytest.raises(fp8kit.UnsupportedError, match="gate_up_proj of Fp8Experts"):
            read(experts.gate_up_proj)
    assert isinstance(experts.gate_up_proj, nn.Parameter)
    assert experts.gate_up_proj.shape == (3, 64, 32)
    assert type(experts._parameters["gate_up_proj"]) is nn.Parameter
    assert fp8kit.dequantize(experts.quantized("gate_up_proj")).shape == (3, 64, 32)
    experts.gate_up_proj = experts.gate_up_proj  # as movers do
    assert type(experts._parameters["gate_up_proj"]) is nn.Parameter
