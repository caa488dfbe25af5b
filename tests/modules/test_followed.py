"""Kept dense weights that change, biases that train, and tools that rewrite models."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8kit
from fp8kit import UnsupportedError
from numerics import assert_bits_equal


def model_of(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    fp8kit.convert(model, **options)
    return model


@pytest.mark.parametrize("storage", ["keep", "cpu_offload"])
@pytest.mark.parametrize("look", ["forward", "state_dict", "quantized_weight", "weight", "half"])
def test_a_kept_weight_that_is_edited_is_quantized_again(look: str, storage: str) -> None:
    layer: Any = model_of(weight_storage=storage)[0]
    x = torch.randn(3, 128)
    layer(x)
    with torch.no_grad():
        layer.original_weight.mul_(-3.0)
    expected = fp8kit.Fp8Linear.from_linear(layer.to_linear())
    if look == "forward":
        assert_bits_equal(layer(x).detach(), expected(x).detach())
    elif look == "half":
        layer.half().float()(x)
    else:
        found = getattr(layer, look)
        assert look == "weight" or found()
    assert_bits_equal(layer.codes.detach(), expected.codes.detach())
    assert_bits_equal(layer.weight_scale.detach(), expected.weight_scale.detach())


def test_a_kept_weight_that_is_replaced_is_quantized() -> None:
    layer: Any = model_of(weight_storage="keep")[0]
    layer.original_weight = torch.ones(256, 128)
    x = torch.randn(3, 128)
    expected = fp8kit.Fp8Linear.from_linear(layer.to_linear())
    assert_bits_equal(copy.deepcopy(layer)(x).detach(), expected(x).detach())


def built(inference: bool, storage: str) -> Any:
    with torch.inference_mode(inference):
        return model_of(weight_storage=storage)[0]


@pytest.mark.parametrize("inside", [True, False], ids=["edited inside", "edited outside"])
@pytest.mark.parametrize("storage", ["keep", "cpu_offload"])
@pytest.mark.parametrize("moved", [False, True], ids=["as made", "moved"])
def test_a_weight_kept_in_inference_mode_is_followed(
    storage: str, moved: bool, inside: bool
) -> None:
    layer, x = built(not moved, storage), torch.randn(3, 128)
    if moved:
        with torch.inference_mode():
            layer = copy.deepcopy(layer).half().float()
    with torch.inference_mode():
        layer(x)
    with torch.inference_mode(inside), torch.no_grad():
        layer.original_weight.mul_(-3.0)
        expected = fp8kit.Fp8Linear.from_linear(layer.to_linear())
        assert_bits_equal(layer(x), expected(x))
    with torch.inference_mode():
        layer.load_state_dict({"weight": torch.ones(256, 128)}, strict=False)
    assert (layer.original_weight == 1).all()


def test_a_weight_of_inference_mode_cannot_be_assigned() -> None:
    layer, x = built(False, "keep"), torch.randn(3, 128)
    with torch.inference_mode():
        layer.original_weight = torch.ones(256, 128)
    with pytest.raises(UnsupportedError, match=r"original_weight of 0 .* Assign a copy"):
        layer(x)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_does_not_quantize_a_kept_weight_again(how: str) -> None:
    layer: Any = model_of(weight_storage="keep")[0]
    layer.original_weight = layer.original_weight.half()
    layer(torch.randn(3, 128))
    for _ in range(3):  # kept as fp16
        layer.load_state_dict({"weight": torch.randn(256, 128)}, strict=False)
    x = torch.randn(3, 128)
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    assert_bits_equal(twin(x).detach(), layer(x).detach())
    with torch.no_grad():
        twin.original_weight.mul_(-3.0)
    expected = fp8kit.Fp8Linear.from_linear(twin.to_linear())
    assert_bits_equal(twin(x).detach(), expected(x).detach())


def test_a_changed_kept_weight_is_not_written_into_tensors_of_a_functional_call() -> None:
    model: Any = model_of(weight_storage="keep")
    x = torch.randn(3, 128)
    given = {n: t.clone() for n, t in model_of().state_dict().items()}
    before = {n: t.clone() for n, t in given.items()}
    with torch.no_grad():
        model[0].original_weight.mul_(-3.0)
    with pytest.raises(UnsupportedError, match=r"original_weight of 0 .* own weights first"):
        torch.func.functional_call(model, given, (x,))
    for name, tensor in given.items():
        assert_bits_equal(tensor, before[name])
    expected = fp8kit.Fp8Linear.from_linear(model[0].to_linear())
    own = {n: t.detach() for n, t in model.named_parameters()}
    torch.func.functional_call(model, own, (x,))
    assert_bits_equal(model[0].codes.detach(), expected.codes.detach())
    assert_bits_equal(model[0](x).detach(), expected(x).detach())
    assert_bits_equal(torch.func.functional_call(model, given, (x,)), model_of()(x))


def test_a_bias_that_trained_trains() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))
    model[0].bias.requires_grad_(False)
    fp8kit.convert(model)
    assert [p.requires_grad for n, p in model.named_parameters() if "bias" in n] == [False, True]
    model(torch.randn(3, 128)).sum().backward()
    assert_bits_equal(model[1].bias.grad, torch.full((128,), 3.0))


def test_symbolic_traces_keep_layers_whole() -> None:
    model, x = model_of(), torch.randn(3, 128)
    graph = torch.fx.symbolic_trace(model)
    assert [n.op for n in graph.graph.nodes].count("call_module") == 3
    assert_bits_equal(graph(x), model(x))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_torch_script_is_refused_and_its_traces_work() -> None:
    model, x = model_of().requires_grad_(False), torch.randn(3, 128)
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script was called with 0 .*TorchSc"):
        torch.jit.script(model)
    traced = torch.jit.trace(model, x)
    assert_bits_equal(traced(x[:2]), model(x[:2]))


@pytest.fixture
def gloo(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
def test_tensor_parallel_styles_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(UnsupportedError, match=r"tensor parallelism was requested for 0 "):
        parallelize_module(model_of(), mesh, {"0": ColwiseParallel()})
