from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import backend_tables
import fp8kit
from fp8kit.conversion.notes import mx_numbers
from fp8kit.dispatch.timings import table_for
from fp8kit.formats import SCHEMES
from fp8kit.matmul.problem import MATMUL_BACKENDS, MatmulProblem
from fp8kit.moe import reference
from fp8kit.moe.problem import MOE_BACKENDS, ExpertOperands, ExpertsProblem
from tiny_experts import tiny


def model() -> nn.Sequential:
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(3)], nn.Linear(128, 256, bias=False))
    fp8kit.convert(net)
    return net


def test_layers_with_one_problem_share_an_entry(device: torch.device) -> None:
    explanation = fp8kit.explain(model().to(device), m=5)
    assert [names for names, _ in explanation.entries] == [("0", "1", "2"), ("3",)]
    problems = [choice.problem for _, choice in explanation.entries]
    assert [(p.m, p.n, p.k, p.bias) for p in problems] == [
        (8, 128, 128, True),
        (8, 256, 128, False),
    ]


def test_text_names_layers_backend_and_every_reason_before_it() -> None:
    text = str(fp8kit.explain(model(), m=16))
    blocks = text.split("\n\n")
    assert blocks[0].startswith("0 and 2 more\n[M<=16, K=128] per row @ [N=128, K] per row")
    assert blocks[1].startswith("3\n")
    assert "dequantized    chosen" in blocks[0]
    assert "torch_native   declined: runs on cuda, not on cpu" in blocks[0]


def test_a_single_layer_has_no_name() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64))
    assert str(fp8kit.explain(layer)).startswith("this layer\n")


def test_data_is_plain_and_complete() -> None:
    data = json.loads(json.dumps(fp8kit.explain(model()).to_dict()))
    assert data[0]["layers"] == ["0", "1", "2"]
    assert data[0]["backend"] == "dequantized"
    others = [name for name, *_ in MATMUL_BACKENDS if name != "dequantized"]
    assert list(data[0]["declined"]) == others
    assert data[0]["declined"]["reference"] == "not measured, and after dequantized in the order"
    assert (data[0]["us"], data[0]["bf16_us"], data[0]["configuration"]) == (None, None, "")
    assert data[0]["problem"].endswith("on cpu")


def test_options_of_a_layer_change_the_choice() -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64))
    layer.batch_invariant = True
    entry = fp8kit.explain(layer).to_dict()[0]
    assert entry["backend"] == "reference"
    assert "batch invariant" in str(entry["problem"])


def test_the_explained_backend_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(64, 64)).to(device)
    ((_, choice),) = fp8kit.explain(layer, m=4).entries
    ran: list[str] = []
    chosen = choice.implementation
    real = chosen.run
    monkeypatch.setattr(chosen, "run", lambda *a: (ran.append(choice.backend), real(*a))[1])
    layer(torch.randn(4, 64, device=device))
    assert ran == [choice.backend]


@pytest.fixture
def describe_layers_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[MatmulProblem], None]:
    """Return a function that sets the problem of all layers, on a GPU that need not exist here."""
    return lambda problem: monkeypatch.setattr(fp8kit.Fp8Linear, "problem", lambda *_: problem)


def test_a_measured_device_gets_times(
    describe_layers_as: Callable[[MatmulProblem], None],
) -> None:
    layer = fp8kit.Fp8Linear(4096, 4096, bias=False, device="meta", dtype=torch.bfloat16)
    h200 = {"device_type": "cuda", "capability": (9, 0), "device": "NVIDIA H200"}
    on_h200 = dataclasses.replace(layer.problem(64), **h200)
    describe_layers_as(on_h200)
    explanation = fp8kit.explain(layer, m=64)
    found = explanation.to_dict()[0]
    table = table_for("NVIDIA H200")
    assert table is not None
    times = table.rows[on_h200.case()]
    assert found["bf16_us"] == times["bf16"]
    assert found["measured_m"] == 64
    assert f"µs, bf16 {times['bf16']:.1f} µs (measured at m=64)" in str(explanation)


def test_the_tile_is_named(
    monkeypatch: pytest.MonkeyPatch,
    faked_cuda: Callable[..., None],
    describe_layers_as: Callable[[MatmulProblem], None],
) -> None:
    gemm = pytest.importorskip("fp8kit.matmul.hopper.gemm", reason="cuda-bindings is not installed")
    launches = pytest.importorskip("launches")
    from fp8kit.matmul.hopper import heuristics
    from fp8kit.matmul.hopper.device import H200

    faked_cuda()
    launches.fake_gemm_launch(monkeypatch)
    layer = fp8kit.Fp8Linear(14336, 4096, bias=False, device="meta", dtype=torch.bfloat16)
    on_hopper = dataclasses.replace(layer.problem(128), device_type="cuda", capability=(9, 0))
    describe_layers_as(on_hopper)
    config = heuristics.choose(128, 4096, 14336, H200, False)
    text = str(fp8kit.explain(layer))
    assert f"hopper_gemm    chosen: {config}" in text
    assert f"tiles of {config.tokens} rows by {config.weights} weights, " in text
    assert fp8kit.explain(layer).to_dict()[0]["cut"] in text

    few = dataclasses.replace(on_hopper, m=1)
    quantizing = heuristics.choose_quantizing(1, 4096, 14336, H200, False)
    assert quantizing is not None
    assert gemm.cut(few) == f"{quantizing}, which quantize their rows"
    assert gemm.cut(dataclasses.replace(few, x_group=fp8kit.TENSOR)) != gemm.cut(few)
    for empty in ({"n": 0}, {"k": 0}, {"m": 0}):
        assert gemm.cut(dataclasses.replace(few, **empty)).startswith("tiles of ")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_WEIGHT_ONLY"])
def test_a_gpu_names_its_tiles(scheme: str) -> None:
    dense = nn.Linear(4096, 4096, False, device="cuda", dtype=torch.bfloat16)
    layer = fp8kit.Fp8Linear.from_linear(dense, scheme)
    found = fp8kit.explain(layer, m=16).to_dict()[0]
    assert str(found["cut"]).startswith("tiles of ")


def test_zero_rows_can_be_explained() -> None:
    assert fp8kit.explain(model(), m=0).entries[0][1].problem.m == 0


def test_a_row_count_may_be_an_integer_of_numpy() -> None:
    assert fp8kit.explain(model(), m=np.int64(5)).entries == fp8kit.explain(model(), m=5).entries


def stack(scheme: str, **options: object) -> fp8kit.Fp8Experts:
    torch.manual_seed(0)
    shapes = (4, 256, 128), (4, 128, 128)
    layer = fp8kit.Fp8Experts.from_dense(*(torch.randn(s) * 0.1 for s in shapes), scheme)
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


def test_experts_are_explained_like_layers(device: torch.device) -> None:
    route = functools.partial(fp8kit.moe.route, top_k=2)
    first, second = (stack("FP8_BLOCK", routing=route) for _ in range(2))
    net = nn.ModuleDict({"a": first, "b": second, "c": nn.Linear(128, 128)}).to(device)
    fp8kit.convert(net, include=["c"])
    explanation = fp8kit.explain(net, m=5)
    (_, _), (names, choice) = explanation.entries
    assert names == ("a", "b")
    problem = choice.problem
    assert (problem.m, problem.experts, problem.top_k, problem.hidden) == (8, 4, 2, 128)
    text = str(explanation).split("\n\n")[1]
    assert "FP8_BLOCK: weights with scales per 128x128, activations per 1x128" in text
    assert "between the products per 1x128" in text
    if device.type == "cpu":
        assert "hopper_experts declined: runs on cuda, not on cpu" in text
        assert choice.backend == "by_expert"
    entry = explanation.to_dict()[1]
    assert list(entry["declined"]) == [n for n, *_ in MOE_BACKENDS if n != entry["backend"]]  # type: ignore[call-overload]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the problems of experts that run."""
    found: list[object] = []

    def experts(operands: ExpertOperands, problem: ExpertsProblem) -> torch.Tensor:
        found.append(problem)
        return reference.BACKEND.experts(operands, problem)

    recording = dataclasses.replace(reference.BACKEND, experts=experts)
    backend_tables.install(monkeypatch, moe={"recording": recording})
    return found


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"shared": 1}])
def test_the_experts_problem_is_the_one_that_runs(
    options: dict[str, object], seen: list[object]
) -> None:
    layer = stack("FP8_DYNAMIC", routing=functools.partial(fp8kit.moe.route, top_k=2), **options)
    ((_, choice),) = fp8kit.explain(layer, m=3).entries
    layer(torch.randn(3, 128), logits=torch.randn(3, 4 - int("shared" in options)))
    assert seen == [choice.problem]


@pytest.mark.parametrize("kind", ["Qwen3Moe", "GptOss", "Llama4Text", "NemotronH"])
def test_experts_of_transformers_are_explained_as_they_run(kind: str, seen: list[object]) -> None:
    pytest.importorskip("transformers")
    net = tiny(kind)
    fp8kit.convert(net)
    found = [c.problem for _, c in fp8kit.explain(net, m=16).entries]
    with torch.no_grad():
        net(torch.arange(16).view(1, -1))
    assert set(seen) == {p for p in found if isinstance(p, ExpertsProblem)} != set()


def test_experts_with_a_gate_of_their_own_are_explained_by_their_products() -> None:
    layer = stack("FP8_DYNAMIC")
    layer.stacks = dataclasses.replace(layer.stacks, activation=None)
    entries = fp8kit.explain(nn.ModuleDict({"e": layer}), m=4).entries
    assert [(names, c.problem.n, c.problem.m) for names, c in entries] == [
        (("e.gate_up_proj",), 256, 4),
        (("e.down_proj",), 128, 4),
    ]


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("MXFP8", "weights with scales per 1x32, activations per 1x32{}; emulated"),
        ("MXFP8_EMULATED", "weights with scales per 1x32, activations per 1x32{}; emulated"),
        ("MXFP8_ROW", "MXFP8 weights rebased to scales per row, activations per token"),
        ("MXFP8_BLOCK", "rebased to scales per 128x128, activations per 1x128"),
        ("FP8_WEIGHT_ONLY", "weights with scales per row, activations in 16 bit"),
    ],
)
def test_the_numbers_and_the_form_of_mx_are_told(scheme: str, words: str) -> None:
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(128, 128), scheme)
    assert f"{scheme}: " in str(fp8kit.explain(layer))
    assert words.format("") in str(fp8kit.explain(layer))
    between = ", between the products per 1x128"
    assert words.format(between) in str(fp8kit.explain(stack(scheme)))


def test_mx_weights_under_16_bit_activations_are_called_weight_only() -> None:
    own = fp8kit.Scheme("own", fp8kit.MX, None)
    layer = fp8kit.Fp8Linear.from_linear(nn.Linear(128, 128), own)
    assert "activations in 16 bit; weight-only" in str(fp8kit.explain(layer))


def test_tensor_cores_of_blackwell_run_mx_natively(
    describe_layers_as: Callable[[MatmulProblem], None],
) -> None:
    layer = fp8kit.Fp8Linear(4096, 4096, False, "MXFP8", device="meta", dtype=torch.bfloat16)
    found = layer.problem(64)
    describe_layers_as(dataclasses.replace(found, device_type="cuda", capability=(10, 0)))
    assert "activations per 1x32; native" in str(fp8kit.explain(layer))


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("MXFP8", "MXFP8 layers compute as MXFP8_ROW: MXFP8 weights rebased to scales per row"),
        ("MXFP8_BLOCK", "MXFP8 weights rebased to scales per 128x128, activations per 1x128"),
        ("MXFP8_EMULATED", "weights with scales per 1x32, activations per 1x32; no tensor core"),
    ],
)
def test_a_plan_tells_the_numbers_of_every_form_of_mx(scheme: str, words: str) -> None:
    assert words in str(fp8kit.plan(nn.Sequential(nn.Linear(128, 128)), scheme))


def test_a_plan_for_blackwell_says_that_mx_is_native() -> None:
    (told,) = mx_numbers("cuda", (10, 0), SCHEMES["MXFP8"])
    assert "MXFP8 layers compute as MXFP8: weights with scales per 1x32" in told
    assert "tensor cores multiply both natively" in told


@pytest.mark.parametrize("word", ["emulation", "emulated"])
def test_the_way_to_ask_for_emulation_is_named(word: str) -> None:
    w = fp8kit.quantize(torch.randn(32, 64), fp8kit.MX, role="weight")
    with pytest.raises(ValueError, match="scheme='MXFP8_EMULATED'"):
        fp8kit.scaled_mm(fp8kit.quantize(torch.randn(2, 64), fp8kit.MX), w, backend=word)


def test_a_directory_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"Got 'fp8-dir' as the model.*fp8kit.load"):
        fp8kit.explain("fp8-dir")
