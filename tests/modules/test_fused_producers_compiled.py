"""Feed-forwards under ``torch.compile``: in graphs, too, the activation writes codes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from modules.test_diffusers_producers import basic, flux, ready, sd3
from modules.test_fused_producers import build
from numerics import assert_bits_equal, relative_error

pytestmark = pytest.mark.usefixtures("fuses_on_cpu")

ROWS = [7, 700]  # joined weights are one GEMM up to 512 rows


class Compiled:
    """A freshly compiled module, with the operators that its graphs call and their number."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        torch._dynamo.reset()
        self.graphs: list[list[str]] = []
        self._run = torch.compile(module, backend=self._backend, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    @property
    def activates(self) -> bool:
        """Return whether the newest graph activates and quantizes in one operator."""
        return any("activation_quantize" in name for name in self.graphs[-1])

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graph.graph.eliminate_dead_code()  # as compilers do
        graph.recompile()
        self.graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward


def feed_forward(device: torch.device, scheme: str = "FP8_DYNAMIC") -> Any:
    model = build("llama", device)
    fp8kit.convert(model, scheme)
    return model.model.layers[0].mlp


def hidden(device: torch.device, rows: int = 7) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(1, rows, 128, device=device, dtype=torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize("broken", [False, True])
def test_an_activation_is_read_behind_attention_in_a_graph(
    broken: bool, device: torch.device
) -> None:
    model, inputs = ready(flux, device)
    plain = copy.deepcopy(model)
    fp8kit.convert(model)
    fp8kit.convert(plain, fuse="none")
    if broken:  # between the activation and the concatenation
        attend = type(model.single_transformer_blocks[0].attn).forward

        def breaking(*args: Any, **kwargs: Any) -> Any:
            y = attend(*args, **kwargs)
            torch._dynamo.graph_break()
            return y

        for each in (model, plain):
            attention = each.single_transformer_blocks[0].attn
            attention.forward = functools.partial(breaking, attention)
    compiled = Compiled(model, fullgraph=not broken)
    found = compiled(**inputs, return_dict=False)[0]
    graphs = [name for graph in compiled.graphs for name in graph]
    assert broken or any("concatenated_activation_quantize" in name for name in graphs)
    assert relative_error(found, plain(**inputs, return_dict=False)[0]) < 0.02


@torch.no_grad()
def test_an_activation_writes_codes_in_a_graph(device: torch.device) -> None:
    for scheme in ("FP8_DYNAMIC", "FP8_BLOCK"):
        mlp = feed_forward(device, scheme)
        for rows in ROWS:
            compiled, x = Compiled(mlp, fullgraph=True), hidden(device, rows)
            assert_bits_equal(compiled(x), mlp(x))
            assert compiled.activates


@torch.no_grad()
@pytest.mark.filterwarnings("error:.*lru_cache")
def test_a_graph_takes_any_number_of_rows(device: torch.device) -> None:
    mlp = feed_forward(device)
    compiled = Compiled(mlp, fullgraph=True, dynamic=True)
    for rows in (17, 600, 9):
        assert_bits_equal(compiled(hidden(device, rows)), mlp(hidden(device, rows)))
    assert len(compiled.graphs) == 1
    assert compiled.activates


@torch.no_grad()
def test_feed_forwards_of_diffusers_write_codes_in_a_graph(device: torch.device) -> None:
    model, _ = ready(basic, device)
    fp8kit.convert(model)
    block = model.transformer_blocks[0].ff
    compiled, x = Compiled(block, fullgraph=True), hidden(device)
    x = x[..., : block.net[0].proj.in_features]
    assert_bits_equal(compiled(x), block(x))
    assert compiled.activates


def many_rows(build: Any, device: torch.device) -> tuple[Any, dict[str, Tensor]]:
    """Return a converted model of diffusers, and inputs of more image tokens than are joined."""
    model, inputs = ready(build, device)
    fp8kit.convert(model)
    batch, image = (1, {"hidden_states": (1, 600, 16), "img_ids": (600, 3)})
    if build is sd3:
        batch, image = (9, {"hidden_states": (9, 4, 16, 16)})
    for name in ("encoder_hidden_states", "pooled_projections", "timestep"):
        inputs[name] = inputs[name][:1].repeat(batch, *[1] * (inputs[name].dim() - 1))
    made = {n: torch.randn(*shape, device=device).bfloat16() for n, shape in image.items()}
    return model, inputs | made


def norms(compiled: Compiled) -> tuple[int, int]:
    """Return how many layer norms of all graphs write codes, and how many a tensor."""
    names = [name for graph in compiled.graphs for name in graph]
    codes = sum("layer_norm_quantize" in name for name in names)
    return codes, sum("function layer_norm" in name for name in names)


@torch.no_grad()
@pytest.mark.parametrize(("build", "fused", "plain"), [(flux, 2, 4), (sd3, 2, 6)])
def test_adaptive_norms_write_codes_in_a_graph(
    build: Any, fused: int, plain: int, device: torch.device
) -> None:
    model, inputs = many_rows(build, device)
    compiled = Compiled(model, fullgraph=True)
    found = compiled(**inputs, return_dict=False)[0]
    # plain are those of few rows, before feed-forwards and at the end; tensors of codes are dropped
    assert norms(compiled) == (fused, plain)
    wanted = model(**inputs, return_dict=False)[0]
    if device.type == "cpu":
        assert_bits_equal(found, wanted)
    assert relative_error(found, wanted) < 0.02


@torch.no_grad()
def test_layers_that_took_another_form_read_a_tensor(device: torch.device) -> None:
    model, inputs = many_rows(flux, device)
    norm = model.single_transformer_blocks[0].norm
    norm.scheme = fp8kit.SCHEMES["MXFP8"]  # as at the fusion, before a move gave layers their form
    compiled = Compiled(model, fullgraph=True)
    found = compiled(**inputs, return_dict=False)[0]
    assert norms(compiled)[0] == 1  # of the other block
    assert relative_error(found, model(**inputs, return_dict=False)[0]) < 0.02


@torch.no_grad()
def test_layers_of_few_rows_are_joined_behind_an_adaptive_norm(device: torch.device) -> None:
    model, inputs = ready(flux, device)
    fp8kit.convert(model)
    compiled = Compiled(model, fullgraph=True)
    compiled(**inputs, return_dict=False)
    assert norms(compiled) == (0, 6)
    assert any("joined_linear" in name for name in compiled.graphs[-1])


@torch.no_grad()
@pytest.mark.parametrize("way", ["reader", "hook", "adapter", "autocast", "grad"])
def test_what_else_reads_an_adaptive_norm_gets_its_result(way: str, device: torch.device) -> None:
    model, inputs = many_rows(flux, device)
    block = model.single_transformer_blocks[0]
    attend = type(block.attn).forward

    def between(hidden_states: Any, **kwargs: Any) -> Any:
        return attend(block.attn, hidden_states * 2, **kwargs)

    if way == "reader":
        block.attn.forward = between
    if way == "hook":
        block.attn.to_k.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    if way == "adapter":
        block.attn.to_k = nn.Sequential(block.attn.to_k)
    compiled = Compiled(model)
    with torch.autocast(device.type, torch.bfloat16, enabled=way == "autocast"):
        with torch.set_grad_enabled(way == "grad"):
            found = compiled(**inputs, return_dict=False)[0]
            wanted = model(**inputs, return_dict=False)[0]
    assert relative_error(found, wanted) < 0.02
    # of the other block
    assert norms(compiled)[0] == (way not in ("autocast", "grad"))


def with_gradients(mlp: Any) -> None:
    torch.set_grad_enabled(True)


def with_a_hook(mlp: Any) -> None:
    mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def with_a_hook_on_the_activation(mlp: Any) -> None:
    mlp.act_fn.register_forward_hook(lambda module, args, y: y * 2)


def with_another_activation(mlp: Any) -> None:
    mlp.act_fn = nn.Tanh()


def with_dense_weights(mlp: Any) -> None:
    mlp.down_proj = mlp.down_proj.to_linear()


def with_a_bound(mlp: Any) -> None:
    mlp.down_proj.scale_ub = 1e-4


CHANGES = [
    with_gradients,
    with_a_hook,
    with_a_hook_on_the_activation,
    with_another_activation,
    with_dense_weights,
    with_a_bound,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_known_runs_as_the_class_does(
    change: Callable[[Any], None], device: torch.device
) -> None:
    mlp, x = feed_forward(device), hidden(device)
    with torch.no_grad():
        change(mlp)
        compiled = Compiled(mlp)
        found = compiled(x)
        assert relative_error(found, mlp.replaced[0].forward(x)) < 1e-2
    assert not compiled.activates


@pytest.mark.parametrize("change", CHANGES[3:])
def test_changes_after_the_first_call_are_seen(
    change: Callable[[Any], None], device: torch.device
) -> None:
    mlp, x = feed_forward(device), hidden(device)
    with torch.no_grad():
        compiled = Compiled(mlp)
        before = compiled(x)
        assert compiled.activates
        change(mlp)
        found = compiled(x)
        assert relative_error(found, mlp.replaced[0].forward(x)) < 1e-2
        assert relative_error(found, before) > 1e-3
    assert not compiled.activates


@torch.no_grad()
def test_a_changed_approximation_is_seen(device: torch.device) -> None:
    mlp, x = feed_forward(device), hidden(device)
    mlp.act_fn = nn.GELU()
    mlp.kind = "gelu"
    mlp.altered = False
    compiled = Compiled(mlp)
    compiled(x)
    assert compiled.activates
    mlp.act_fn.approximate = "tanh"
    twin = copy.deepcopy(mlp.replaced[0])
    assert_bits_equal(compiled(x), twin.forward(x))
    assert not compiled.activates


@torch.no_grad()
def test_exported_programs_keep_the_class(device: torch.device) -> None:
    program = torch.export.export(feed_forward(device), (hidden(device),))
    assert "activation_quantize" not in program.graph_module.code
