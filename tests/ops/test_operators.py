"""The registered operators as ``torch.compile`` and ``torch.export`` see them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._pytree import tree_leaves, tree_map_only

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, SCHEMES, TENSOR, GroupShape, min_scale
from grids import diagonal
from numerics import assert_bits_equal, relative_error

NAMED = (TENSOR, ROW, GROUP128, BLOCK, MX)
E4M3 = torch.float8_e4m3fn
OPS = torch.ops.fp8kit


def sample(layout: str, device: torch.device | str = "cpu") -> Tensor:
    """Return a 2-D or 3-D tensor with the strides of a layout."""
    base = torch.randn(6, 5, 70, device=device)
    return {
        "contiguous": lambda: base,
        "matrix": lambda: base[0],
        "column-major": lambda: base[0].t().contiguous().t(),
        "permuted": lambda: torch.randn(5, 70, 6, device=device).permute(2, 0, 1),
        "transposed-rows": lambda: base.transpose(0, 1),
        "sliced": lambda: torch.randn(6, 5, 140, device=device)[:, ::2, ::2],
        "expanded": lambda: base[:1].expand(6, 5, 70),
        "empty": lambda: base[:0],
    }[layout]()


LAYOUTS = (
    "contiguous",
    "matrix",
    "column-major",
    "permuted",
    "transposed-rows",
    "sliced",
    "expanded",
    "empty",
)


def pair(group: GroupShape) -> list[int]:
    return [group.rows, group.cols]


def op_cases(x: Tensor, group: GroupShape) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return every quantizer operator with arguments."""
    rounding = "floor" if group == MX else "exact"
    floor = min_scale(group, E4M3, "weight")
    q = fp8kit.quantize(x.detach(), group)
    data = torch.empty_strided(x.shape, x.stride(), dtype=E4M3, device=x.device)
    if 0 not in x.stride():
        data.copy_(q.data)
    else:
        data = q.data
    columns = [
        (OPS.quantize, (x, pair(group), E4M3, floor, None, rounding, "column"))
        for _ in range(group.rows == 1 and group.cols != -1)
    ]
    return [
        *columns,
        (OPS.quantize, (x, pair(group), E4M3, floor, None, rounding)),
        (OPS.quantize, (x, pair(group), E4M3, floor, x.new_tensor(1.0), rounding)),
        (OPS.quantize_static, (x, q.scale, pair(group), E4M3)),
        (OPS.dequantize, (data, q.scale, pair(group), torch.bfloat16)),
    ]


def matmul_cases(
    scheme: str, device: torch.device | str = "cpu"
) -> list[tuple[Any, tuple[Any, ...]]]:
    """Return the matmul operators with arguments, strided and with every optional operand."""
    s = SCHEMES[scheme]
    x = torch.randn(5, 3, 200, device=device)
    w_q = fp8kit.quantize(torch.randn(48, 200, device=device), s.weight, role="weight")
    bias = torch.randn(48, device=device)
    static = torch.full((1, 1), 0.02, device=device) if s.static else None
    x_group = None if s.activation is None else pair(s.activation)
    rounding = "floor" if s.activation == MX else "exact"
    tail = (x_group, pair(s.weight), torch.bfloat16)
    groups = tail[:2]
    cases = [
        (OPS.linear, (x, w_q.data, w_q.scale, b, static, None, *groups, rounding, "precise", inv))
        for b, inv in ((None, False), (bias, True))
    ]
    strided = x.transpose(0, 1)
    head = (strided, w_q.data.t().contiguous().t(), w_q.scale, bias, static, None)
    cases.append((OPS.linear, (*head, *groups, rounding, "precise", False)))
    if s.activation is None:
        mm_x, mm_scale = x.flatten(0, 1), None
    else:
        x_q = fp8kit.quantize(x.flatten(0, 1), s.activation, scale=static)
        mm_x, mm_scale = x_q.data, x_q.scale
    for b in (None, bias):
        args = (mm_x, mm_scale, w_q.data, w_q.scale, b, *tail, "precise", False, None)
        cases.append((OPS.scaled_mm, args))
    for biases in ([], [bias, bias]) if x_group and static is None else ():
        operands = ([w_q.data, w_q.data.clone()], [w_q.scale, w_q.scale.clone()], biases)
        cases.append(
            (OPS.joined_linear, (x, *operands, None, *groups, rounding, "precise", False, None))
        )
    return cases


def assert_op(op: Any, args: tuple[Any, ...]) -> None:
    """Run torch's own checks; its schema check cannot compare FP8 inputs, which is done here."""
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [a for a in tree_leaves(args) if isinstance(a, Tensor)]
    if not any(t.dtype == E4M3 for t in tensors):
        checks.append("test_schema")
    torch.library.opcheck(op, args, test_utils=checks)
    before = [t.detach().clone() for t in tensors]
    out = op(*args)
    storages = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
    for result in out if isinstance(out, tuple) else (out,):
        assert not result.numel() or result.untyped_storage().data_ptr() not in storages
    for old, new in zip(before, tensors, strict=True):
        assert_bits_equal(old, new.detach())


# strides of each layout for each group: ``test_fake_quantizers_equal_real_ones``
@pytest.mark.parametrize(
    ("layout", "group"),
    diagonal(["contiguous", "permuted", "expanded", "empty"], NAMED, whole=False),
    ids=str,
)
def test_opcheck_quantizers(layout: str, group: GroupShape) -> None:
    for op, args in op_cases(sample(layout), group):
        assert_op(op, args)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_opcheck_matmuls(scheme: str) -> None:
    for op, args in matmul_cases(scheme):
        assert_op(op, args)


def test_opcheck_of_linear_with_gradient() -> None:
    op, args = matmul_cases("FP8_DYNAMIC")[1]
    args = (args[0].requires_grad_(), *args[1:3], args[3].requires_grad_(), *args[4:])
    assert_op(op, args)


def test_opcheck_covers_every_operator() -> None:
    registered = {
        n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if "fp8kit::" in n
    }
    tested = {op for op, _ in op_cases(sample("matrix"), ROW)}
    tested |= {op for op, _ in matmul_cases("FP8_DYNAMIC")}
    producers = ("rms_norm", "layer_norm", "activation", "concatenated_activation")
    elsewhere = {f"{producer}_quantize" for producer in producers}
    elsewhere |= {"attention_of_one_token", "experts", "experts_backward", "grouped_scaled_mm"}
    # the others are checked by their own tests, in tests/fused and tests/moe
    assert {str(op).removeprefix("fp8kit.") for op in tested} == registered - elsewhere


def assert_fake_equals_real(op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    real = op(*args)
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake_args = tree_map_only(Tensor, mode.from_tensor, args)
        fake = op(*fake_args)
    reals = real if isinstance(real, tuple) else (real,)
    fakes = fake if isinstance(fake, tuple) else (fake,)
    assert len(reals) == len(fakes)
    for r, f in zip(reals, fakes, strict=True):
        assert (r.shape, r.dtype, r.device) == (f.shape, f.dtype, f.device)
        # torch itself gives empty tensors differing strides
        assert r.stride() == f.stride() or not r.numel()


@pytest.mark.parametrize("group", NAMED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_quantizers_equal_real_ones(
    layout: str, group: GroupShape, device: torch.device
) -> None:
    for op, args in op_cases(sample(layout, device), group):
        assert_fake_equals_real(op, args)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_fake_matmuls_equal_real_ones(scheme: str, device: torch.device) -> None:
    for op, args in matmul_cases(scheme, device):
        assert_fake_equals_real(op, args)


def test_the_fake_check_notices_other_strides() -> None:
    def lying(x: Tensor) -> Tensor:
        is_fake = isinstance(x, torch._subclasses.FakeTensor)
        return x.new_empty(x.shape) if is_fake else x.new_empty(x.shape).t().contiguous().t()

    with pytest.raises(AssertionError):
        assert_fake_equals_real(lying, (torch.zeros(3, 4),))


def test_operators_run_on_meta() -> None:
    x = torch.empty(3, 4, 200, device="meta")
    layer = fp8kit.Fp8Linear(200, 96, scheme="FP8_BLOCK", device="meta")
    y = layer(x.bfloat16())
    assert y.is_meta
    assert y.shape == (3, 4, 96)
    assert y.dtype == torch.bfloat16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.up(x)))
        return y


def converted(scheme: str = "FP8_DYNAMIC", device: torch.device | str = "cpu") -> Mlp:
    model = Mlp().to(device)
    report = fp8kit.convert(
        model, scheme, calibrate=lambda m: m(torch.randn(64, 128, device=device))
    )
    assert len(report.converted) == 2
    return model


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiles_to_one_graph_for_every_row_count(scheme: str, device: torch.device) -> None:
    # torch specialises sizes 0 and 1 unless the dimension is marked unbacked, and only then; a
    # server that also decodes single rows marks it, as here, or accepts a second graph for M = 1
    model = converted(scheme, device)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (64, 63, 33, 17, 16, 9, 8, 7, 3, 2):
            x = torch.randn(m, 128, device=device)
            assert_bits_equal(compiled(x), model(x))
        assert counter.frame_count == 1
        compiled(torch.randn(1, 128, device=device))
        assert counter.frame_count == 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_an_unbacked_dimension_covers_one_row_too() -> None:
    model = converted()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for m in (7, 1, 2, 64):
            x = torch.randn(m, 128)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            assert_bits_equal(compiled(x), model(x))
    assert counter.frame_count == 1


def graph_of(model: nn.Module, x: Tensor, **inputs: Tensor) -> list[str]:
    """Return the names of the calls in the one graph of a compiled model."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op.startswith("call")])
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(x, **inputs)
    assert len(graphs) == 1
    return graphs[0]


@pytest.mark.usefixtures("_fresh_compiler")
def test_the_graph_holds_the_operators_and_nothing_of_dispatch() -> None:
    seen = graph_of(converted(), torch.randn(3, 128))
    assert seen.count("fp8kit.linear") == 2
    assert len(seen) == 3


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("scheme", ["FP8", "FP8_BLOCK", "MXFP8", "FP8_WEIGHT_ONLY"])
def test_every_scheme_is_one_operator_per_layer(scheme: str) -> None:
    with torch.no_grad():
        seen = graph_of(converted(scheme), torch.randn(3, 128))
    assert seen.count("fp8kit.linear") == 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_graphs_with_gradients_keep_the_operator() -> None:
    seen = graph_of(converted(), torch.randn(3, 128, requires_grad=True))
    assert seen.count("fp8kit.linear") == 2
    torch._dynamo.reset()
    model = converted()
    model.up.bias.requires_grad_(True)
    assert graph_of(model, torch.randn(3, 128)).count("fp8kit.linear") == 2


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_backward_equals_eager() -> None:
    model = converted()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    x = torch.randn(5, 128)
    grads = []
    for run in (model, compiled):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert relative_error(grads[1], grads[0]) < 1e-6


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # what inductor warns about is not ours to fix
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_runs_a_converted_model(device: torch.device) -> None:
    model = converted(device=device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (16, 3):
            x = torch.randn(m, 128, device=device)
            # fused activations round differently, and an ulp can move a code by one step
            assert relative_error(compiled(x), model(x)) < 5e-3


@pytest.mark.parametrize(
    ("scheme", "strict"), diagonal(SCHEMES, (False, True), whole=False), ids=str
)
def test_exported_program_survives_saving(scheme: str, strict: bool) -> None:
    model = converted(scheme).eval()
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(
        model, (torch.randn(8, 128),), dynamic_shapes=({0: batch},), strict=strict
    )
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("fp8kit.linear.default") == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for m in (1, 2, 33):
        x = torch.randn(m, 128)
        with torch.no_grad():
            assert_bits_equal(loaded(x), model(x))
