"""The benchmark of whole layers, run on a CPU with fake peers that check their operands."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backend_tables
import checking
import fp8kit
import layers
import linear
import peers
import tables
from fp8kit.matmul.problem import MatmulBackend, MatmulOperands, MatmulProblem
from fp8kit.matmul.reference import run as multiply
from grouped_peers import GROUPED
from summary import COMPARISONS
from timing import Case

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# aligned for every peer, for none of the block peers, and for no peer at all
ALIGNED, RAGGED, ODD = (256, 384), (144, 208), (131, 200)


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """Multiply codes by the scales of their groups."""
    rows, cols = (-(-c // s) for c, s in zip(codes.shape, scale.shape, strict=True))
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


class FakeVllm:
    """vLLM's operators in plain torch, with the checks that their sources make."""

    def dynamic_per_token_scaled_fp8_quant(
        self, codes: Tensor, x: Tensor, scale: Tensor, upper: Tensor | None
    ) -> None:
        assert x.is_contiguous()
        assert codes.is_contiguous()
        assert (scale.dtype, upper) == (torch.float32, None)
        q = fp8kit.quantize(x)
        codes.copy_(q.data)
        scale.copy_(q.scale)

    def static_scaled_fp8_quant(self, codes: Tensor, x: Tensor, scale: Tensor) -> None:
        assert scale.numel() == 1
        codes.copy_(fp8kit.quantize(x, fp8kit.TENSOR, scale=scale).data)

    def per_token_group_fp8_quant(
        self, x: Tensor, codes: Tensor, scale: Tensor, group: int, *rest: object
    ) -> None:
        assert rest == (1e-10, -448.0, 448.0, False, True, True)
        assert group == 128
        assert x.is_contiguous()
        assert codes.is_contiguous()
        assert x.shape[1] % group == 0
        # the strides say column-major; the second one is the distance of columns
        assert scale.stride(0) < scale.stride(1)
        q = fp8kit.quantize(x, fp8kit.GROUP128)
        codes.copy_(q.data)
        scale.copy_(q.scale)

    def cutlass_scaled_mm(
        self, y: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: None
    ) -> None:
        if y.stride(0) % 16 or b.stride(1) % 16:
            raise RuntimeError("Expected c.stride(0) % 16 == 0 && b.stride(1) % 16 == 0\nstack")
        assert (a.stride(1), y.stride(1), b.stride(0)) == (1, 1, 1)
        if a_scale.numel() in (1, a.shape[0]) and b_scale.numel() in (1, b.shape[1]):
            assert a_scale.is_contiguous()
            assert b_scale.is_contiguous()
            y.copy_((a.float() * a_scale) @ (b.float() * b_scale.view(1, -1)))
            return
        # the real operator reads scales by pointer, so they must be packed, along M and along K
        blocks = math.ceil(a.shape[1] / 128)
        assert a.shape[0] % 4 == 0
        assert a_scale.shape == (a.shape[0], blocks)
        assert a_scale.stride() == (1, a.shape[0])
        assert b_scale.shape == (blocks, math.ceil(b.shape[1] / 128))
        assert b_scale.t().is_contiguous()
        y.copy_(decoded(a, a_scale) @ decoded(b, b_scale))


class FakeDeepGemm:
    __version__ = "2.1"

    def fp8_gemm_nt(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], y: Tensor) -> None:
        # rows of scales start at multiples of 16 bytes, as TMA wants
        assert a[1].stride(0) == 1
        assert a[1].stride(1) % 4 == 0
        assert b[1].is_contiguous()
        y.copy_(decoded(*a) @ decoded(*b).t())


def fake_block_recipe(a: Tensor, b: Tensor, *rest: Any, output_dtype: torch.dtype) -> Tensor:
    a_scale, a_kind, b_scale, b_kind = rest
    kinds = (torch.nn.functional.ScalingType.BlockWise1x128,)
    assert (a_kind, b_kind) == (*kinds, torch.nn.functional.ScalingType.BlockWise128x128)
    blocks = a.shape[1] // 128
    assert a.shape[0] % 4 == 0
    assert a_scale.stride() == (1, a.shape[0])
    assert b_scale.shape == (blocks + -blocks % 4, b.shape[1] // 128)
    assert b_scale.t().is_contiguous()
    return (decoded(a, a_scale) @ decoded(b, b_scale[:blocks])).to(output_dtype)


def timer(cases: Mapping[str, Case], copies: int, **_: object) -> dict[str, float]:
    for case in cases.values():
        case(copies - 1)
    return {name: 1.0 + i for i, name in enumerate(cases)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, set_torch_product: Callable[..., None]) -> None:
    fakes = {"copies_past_cache": lambda *_: 2, "time_cases": timer}
    for name, fake in fakes.items():
        monkeypatch.setattr(linear, name, fake)
    set_torch_product(fake_block_recipe)
    for name in ("VLLM_SO", "DG_ROOT", "TORCHAO"):
        monkeypatch.delenv(name, raising=False)


def bench(cases: Sequence[str] = tuple(linear.OURS), **others: peers.Peer) -> linear.Bench:
    found = {"vllm": FakeVllm(), "deepgemm": FakeDeepGemm()}
    return linear.Bench(cases, peers.PEERS | others, peers.Libraries(found), (), CPU)


def one_row(run: linear.Bench, shape: tuple[int, int], m: int) -> linear.Row:
    (row,) = linear.measure_all(run, {"8b.test": shape}, [m], math.inf)
    return row


@pytest.mark.parametrize("m", [1, 5, 64])
def test_every_peer_gets_the_layout_that_it_checks(m: int) -> None:
    row = one_row(bench(), ALIGNED, m)
    assert "failed" not in row
    few = {n for n, p in peers.PEERS.items() if p.beside} if m in linear.FEW_ROWS else set()
    everywhere = {n for n, p in peers.PEERS.items() if not p.beside}
    measured = {n for n in row["us"] if not n.startswith(("fp8kit", "bf16"))}
    assert measured == few | everywhere
    # quantizers and scales equal ours, and products are exact up to their last rounding
    same = {"vllm_row": "row", "vllm_tensor": "tensor", "vllm_block": "block"}
    same |= {"torch_row_fast": "row", "torch_block": "block", "deepgemm_block": "block"}
    for name, kind in same.items():
        ours = row["relative_error"][f"fp8kit_{kind}"]
        assert row["relative_error"][name] == pytest.approx(ours, rel=0.01)


def test_cases_of_fp8kit_by_row_count() -> None:
    at = {m: set(bench().ours(m)) for m in (1, 16, 64, 1024, 4096)}
    assert at[1] == {"row", "tensor", "block", "weight_only", "static", "quantized"}
    assert at[16] == {"row", "tensor", "block", "weight_only"}
    assert at[64] == {"row", "tensor", "block", "static", "quantized"}
    assert at[1024] == {"row", "tensor", "block", "row_fast"}
    assert at[4096] == {"row", "tensor", "block", "row_fast", "static", "quantized"}
    only = bench(["block"])
    assert only.ours(1) == ["block"]
    assert not {"vllm_static", "vllm_quantized"} & set(only.wanted(1))


def test_fast_accumulation_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def spy(operands: MatmulOperands, problem: MatmulProblem) -> Tensor:
        asked.append(problem.accum)
        return multiply(operands, problem)

    backend = MatmulBackend(run=spy)
    backend_tables.install(monkeypatch, matmul={"reference": backend})
    x, w = torch.randn(2, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    weights = {"row": [fp8kit.quantize(w, role="weight")]}
    layer = peers.Layer(x, [w], weights, torch.ones(1, 1), fp8kit.quantize(x))
    linear.OURS["row_fast"].build(layer)(0)
    linear.OURS["row"].build(layer)(0)
    assert asked == ["fast", "precise"]


def test_what_a_peer_declines_is_recorded_and_the_rest_measured() -> None:
    failed = one_row(bench(), RAGGED, 4)["failed"]
    assert set(failed) == {"vllm_block", "deepgemm_block", "torch_block"}
    assert failed["vllm_block"] == "vLLM's group quantizer wants multiples of 128, K is 208"
    assert failed["torch_block"] == "torch's recipe wants multiples of 128, N and K are 144 and 208"
    row = one_row(bench(), ODD, 4)
    aligned = "RuntimeError: Expected c.stride(0) % 16 == 0 && b.stride(1) % 16 == 0"
    assert row["failed"]["vllm_row"] == row["failed"]["vllm_tensor"] == aligned
    ours = {f"fp8kit_{kind}" for kind in ("row", "tensor", "block", "weight_only")}
    # torch itself takes this shape on a CPU
    assert set(row["us"]) - {"torch_row_fast"} == {"bf16", *ours}


def test_a_broken_or_wrong_peer_does_not_stop_the_run() -> None:
    def unbuildable(libraries: peers.Libraries, layer: peers.Layer) -> Case:
        raise ImportError("no symbol\nand a stack")

    def unrunnable(libraries: peers.Libraries, layer: peers.Layer) -> Case:
        def run(i: int) -> Tensor:
            raise RuntimeError("no kernel image")

        return run

    def wrong_edge(libraries: peers.Libraries, layer: peers.Layer) -> Case:
        def run(i: int) -> Tensor:
            y = layer.x @ layer.dense[i].t()
            y[:, -8:] = 0
            return y

        return run

    broken = {"a_build": unbuildable, "b_run": unrunnable, "c_edge": wrong_edge}
    row = one_row(bench(**{n: peers.Peer((), b) for n, b in broken.items()}), ALIGNED, 4)
    assert row["failed"]["a_build"] == "ImportError: no symbol"
    assert row["failed"]["b_run"] == "RuntimeError: no kernel image"
    assert row["failed"]["c_edge"].startswith("relative error 0.")
    assert {"fp8kit_row", "vllm_row"} <= set(row["us"])
    assert not set(row["failed"]) & set(row["us"])


def test_a_wrong_edge_hides_in_the_norm_of_the_whole() -> None:
    torch.manual_seed(0)
    exact = torch.randn(64, 4096)
    assert checking.relative_errors(exact * 1.01, exact) == pytest.approx((0.01, 0.01), rel=1e-3)
    y = exact.clone()
    y[:, -8:] *= 1.5
    whole, worst = checking.relative_errors(y, exact)
    assert whole < linear.FP8_ERROR / 2
    assert worst > linear.FP8_ERROR
    y = exact.clone()
    y[-1] *= 1.1
    whole, worst = checking.relative_errors(y, exact)
    assert whole < linear.FP8_ERROR / 2
    assert worst == pytest.approx(0.1, rel=1e-3)
    y[0, 0] = math.nan
    checked = checking.Checked()
    checked.add("nan", lambda _: y, exact, 10.0)
    assert list(checked.failed) == ["nan"]
    assert not checked.cases


def run_main(out: Path, *more: str) -> dict[str, Any]:
    linear.main([str(out), "--device", "cpu", "--shapes", "odd.smollm", *more])
    return json.loads(out.read_text())


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"8b.o": (32, 64), "odd.smollm_qkv": (48, 64)}
    for module in (layers, linear):
        monkeypatch.setattr(module, "SHAPES", small)


@pytest.mark.usefixtures("tiny")
def test_runs_add_up_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "linear.json"
    monkeypatch.setenv("VLLM_SO", str(tmp_path / "none.so"))
    found = run_main(out, "--rows", "4,1", "--cases", "row")
    assert [row["m"] for row in found["rows"]] == [1, 4]
    assert set(found["rows"][0]["us"]) == {"bf16", "fp8kit_row"}
    assert found["absent"]["vllm"].startswith("OSError: ")
    assert found["absent"]["deepgemm"] == "not asked for (DG_ROOT)"
    out.write_text(json.dumps(found | {"peers": {"vllm": "0.25"}}))
    found = run_main(out, "--rows", "2,4", "--cases", "block", "--append")
    assert [row["m"] for row in found["rows"]] == [1, 2, 4]
    assert "fp8kit_block" in found["rows"][2]["us"]
    assert found["peers"] == {"vllm": "0.25"}
    assert set(found["absent"]) == {"deepgemm", "torchao"}
    linear.main([str(out), "--device", "cpu", "--rows", "1", "--append"])
    shapes = [(row["shape"], row["m"]) for row in json.loads(out.read_text())["rows"]]
    assert shapes[:2] == [("8b.o", 1), ("odd.smollm_qkv", 1)]
    other = {"commit": found["commit"].removesuffix("-dirty") + "-dirty"}
    out.write_text(json.dumps(found | other))
    run_main(out, "--rows", "1", "--append")
    out.write_text(json.dumps(found | {"device": "NVIDIA H100"}))
    with pytest.raises(SystemExit, match=r"measured with device NVIDIA H100, this is cpu: write"):
        run_main(out, "--append")


@pytest.mark.usefixtures("tiny")
def test_a_failure_of_our_own_is_an_error_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(layer: peers.Layer) -> Case:
        return lambda i: torch.zeros(layer.x.shape[0], layer.dense[0].shape[0])

    monkeypatch.setitem(linear.OURS, "row", linear.Ours(wrong))
    out = tmp_path / "linear.json"
    with pytest.raises(SystemExit, match=r"fp8kit failed.*odd.smollm_qkv m=1: fp8kit_row"):
        run_main(out, "--rows", "1,2")
    assert [row["m"] for row in json.loads(out.read_text())["rows"]] == [1, 2]


@pytest.mark.usefixtures("tiny")
def test_nothing_starts_after_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--shapes", "all", "--seconds", "-1"]
    linear.main([str(tmp_path / "none.json"), *arguments])
    assert capsys.readouterr().out.count("skipped, out of time") == 2
    assert not (tmp_path / "none.json").exists()


def test_unknown_layers_and_cases_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(layers.chosen("8b.o,ds")) == ["8b.o", "ds.gate_up", "ds.down"]
    assert layers.chosen("all") == layers.SHAPES
    for word in ("9b", "8b,", ""):
        with pytest.raises(SystemExit, match="no layer starts with"):
            layers.chosen(word)
    with pytest.raises(SystemExit, match="2"):
        linear.parse(["out.json", "--cases", "rows"])
    assert "'rows' is none of row, tensor" in capsys.readouterr().err


def test_the_roofline_is_bytes_or_operations() -> None:
    small = (4096 * 4096 + 2 * 16 * 4096 * 2) / 4.3e12 * 1e6
    assert layers.roofline_us(16, 4096, 4096) == pytest.approx(small)
    assert layers.roofline_us(4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1400e12 * 1e6)


def test_everything_measured_is_compared_and_shown() -> None:
    assert set(linear.OURS) == set(COMPARISONS) == set(tables.KINDS)
    known = {name for names in COMPARISONS.values() for name in names}
    assert known == set(peers.all_peers(peers.TorchAO()))
    assert {name.split(".")[0] for name in layers.SHAPES} == set(layers.MODELS)
    of_experts = {package for _, package, _ in GROUPED.values()}
    assert {name.split("_")[0] for name in known} | of_experts == set(tables.LIBRARIES)
    odd = [shape for name, shape in layers.SHAPES.items() if name.startswith("odd.")]
    assert len(odd) == len(set(odd)) >= 12
    assert any(n % 16 for n, _ in odd)
    assert any(k % 128 for _, k in odd)


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the real torchao, without its check of the GPU and without the compiler."""
    api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(api, "_check_hardware_support", lambda _: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize(("granularity", "scales"), [("PerRow", 256), ("PerTensor", 1)])
def test_torchao_computes_the_layer(granularity: str, scales: int) -> None:
    compiler = peers.TorchAO(seconds=1e9)
    added = {"torchao_test": peers.Peer((), compiler.case(granularity))}
    row = one_row(bench(["row"], **added), ALIGNED, 16)
    assert row["relative_error"]["torchao_test"] == pytest.approx(0.037, rel=0.1)
    assert compiler.spent > 0
    dense = torch.randn(*ALIGNED, dtype=torch.bfloat16)
    (weight,) = peers.torchao_weights([dense], granularity)
    assert isinstance(weight, nn.Parameter)
    assert weight.scale.numel() == scales
    failed = one_row(bench(["row"], **added), ODD, 16)["failed"]
    assert failed["torchao_test"] == "torchao leaves a weight of 131 x 200 in bf16"


@pytest.mark.usefixtures("torchao")
def test_torchao_stops_compiling_when_its_time_is_spent() -> None:
    added = {"torchao_test": peers.Peer((), peers.TorchAO(seconds=0).case("PerRow"))}
    failed = one_row(bench(["row"], **added), ALIGNED, 16)["failed"]
    assert failed == {"torchao_test": "0 seconds of compiling are spent"}


UNCAPTURABLE = """
import json, math, torch, layers, linear, peers
def build(libraries, layer):
    return lambda i: layer.x @ layer.dense[i].t() * (1 if layer.x.isnan().any().item() else 1)
device = torch.device("cuda")
waits = {"waits": peers.Peer((), build)}
bench = linear.Bench(["row", "block"], waits, peers.Libraries(), (), device)
print(json.dumps(list(linear.measure_all(bench, {"8b.test": (256, 384)}, [1, 2048], math.inf))))
"""


@pytest.mark.gpu
def test_a_case_that_cannot_be_captured_does_not_stop_the_run() -> None:
    # its own process: a failed capture leaves a device's random number generator unusable
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])
    ran = subprocess.run(
        [sys.executable, "-c", UNCAPTURABLE],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    for row in json.loads(ran.stdout.splitlines()[-1]):
        assert set(row["failed"]) == {"waits"}
        assert set(row["us"]) == {"bf16", "fp8kit_row", "fp8kit_block"}
        assert min(row["us"].values()) > 0


def test_torchao_is_compiled_for_the_rows_asked() -> None:
    everything = peers.all_peers(peers.TorchAO())
    run = linear.Bench(["row"], everything, peers.Libraries(), (64,), CPU)
    assert "torchao_row" not in run.wanted(1)
    assert {"torchao_row", "torchao_tensor"} <= set(run.wanted(64))
