"""The benchmark of layers of experts, run on a CPU with a fake of vLLM's package."""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import expert_peers
import experts
import fp8kit
import grouped_peers
import summary
import tables
from expert_peers import ExpertLayer
from layers import EXPERTS, ExpertShape, experts_passes_us, experts_roofline_us
from timing import Case

CPU = torch.device("cpu")
MODELS = dict(EXPERTS)
ALIGNED, UNALIGNED = ExpertShape(4, 2, 128, 128), ExpertShape(8, 3, 96, 64)

# the modules that the adapter imports, and a layer that computes with any scales
FAKE_VLLM = {
    "vllm/__init__.py": "__version__ = '0.25.0'",
    "vllm/_custom_ops.py": """
def moe_sum(x, y): raise RuntimeError("no kernel image")
def moe_align_block_size(): pass
def silu_and_mul_per_block_quant(x, group_size, quant_dtype):
    import fp8kit
    gate, up = x.float().chunk(2, -1)
    q = fp8kit.quantize((gate * gate.sigmoid() * up).to(x.dtype), fp8kit.GROUP128)
    assert (q.data.dtype, group_size) == (quant_dtype, 128)
    return q.data, q.scale
def scaled_fp8_quant(x, scale, use_per_token_if_dynamic): pass
""",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/layers/__init__.py": "",
    "vllm/model_executor/layers/fused_moe/__init__.py": "",
    "vllm/model_executor/layers/fused_moe/config.py": """
class FusedMoEQuantConfig:
    def __init__(self, w1_scale, w2_scale, per_token, block_shape):
        self.w1_scale, self.w2_scale = w1_scale, w2_scale
        self.per_act_token_quant, self.block_shape = per_token, block_shape
""",
    "vllm/model_executor/layers/fused_moe/moe_align_block_size.py": """
def moe_align_block_size(ids, block, experts): pass
""",
    "vllm/model_executor/layers/fused_moe/utils.py": """
import fp8kit
def per_token_group_quant_fp8(x, group): pass
def moe_kernel_quantize_input(x, scale, dtype, per_token, block_shape=None):
    if scale is not None:
        assert scale.shape == (1,) and not per_token and block_shape is None
        return (x.float() / scale).clamp(-448, 448).to(dtype), scale
    assert scale is None and per_token == (block_shape is None)
    q = fp8kit.quantize(x, fp8kit.ROW if per_token else fp8kit.GROUP128)
    assert q.data.dtype == dtype
    return q.data, q.scale
""",
    "vllm/model_executor/layers/fused_moe/experts/__init__.py": "",
    "vllm/model_executor/layers/fused_moe/experts/triton_moe.py": """
import enum, fp8kit
MoEActivation = enum.Enum("MoEActivation", {"SILU": "silu"})
class TritonExperts:
    def __init__(self, moe_config, quant_config):
        self.quant_config = quant_config
    def workspace_shapes(self, m, n, k, top_k, experts, local, meta, activation):
        return (m, top_k, max(n // 2, k)), (m, top_k, max(n, k)), (m, k)
    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, a1q_scale,
              workspace13, workspace2, activation, global_num_experts, **rest):
        m, k = hidden_states.shape
        assert global_num_experts == len(w1) and activation is MoEActivation.SILU
        assert not any(rest.values())
        assert (workspace13.shape[0], workspace2.shape[2]) == (m, max(w1.shape[1], k))
        scale = a1q_scale.repeat_interleave(k // a1q_scale.shape[1], 1)
        x = (hidden_states.float() * scale).to(output.dtype)
        group = fp8kit.BLOCK if self.quant_config.block_shape else fp8kit.ROW
        w1 = fp8kit.QTensor(w1, self.quant_config.w1_scale, group)
        w2 = fp8kit.QTensor(w2, self.quant_config.w2_scale, group)
        output.copy_(fp8kit.moe.experts(x, w1, w2, topk_ids, topk_weights))
""",
    "fallback_ops.py": """
def moe_sum(x, y): y.copy_(x.sum(1))
def silu_and_mul(y, x): raise AssertionError("the fake layer calls none")
""",
}

# GEMMs of rows that lie one expert after another (contiguous), or in a part per expert (masked)
FAKE_DEEP_GEMM = """
import torch
__version__ = "0.1"
def get_mk_alignment_for_contiguous_layout(): return 16
def dense(pair):
    codes, scale = pair
    for dim in range(codes.dim() - 2, codes.dim()):
        scale = scale.repeat_interleave(codes.shape[dim] // scale.shape[dim], dim)
    return codes.float() * scale
def m_grouped_fp8_gemm_nt_contiguous(a, b, y, experts):
    x, w = dense(a), dense(b)
    for at in range(0, len(x), 16):
        if experts[at] >= 0:
            y[at : at + 16] = (x[at : at + 16] @ w[experts[at]].T).to(y.dtype)
def m_grouped_fp8_gemm_nt_masked(a, b, y, taken, expected):
    x, w = dense(a), dense(b)
    for e, rows in enumerate(taken.tolist()):
        y[e, :rows] = (x[e, :rows] @ w[e].T).to(y.dtype)
"""

# kernels 0 to 2 compute the first product, and kernels 3 to 6 the second; the last of the first and
# the third of the second refuse every problem, and kernel 6 does not fit the GPU
FAKE_TVM_FFI = """
import pathlib, torch
def load_module(path):
    assert pathlib.Path(path).read_bytes() == b"library"
    return Module
class Module:
    used = []
    def set_deepgemm_jit_include_dirs(folders): Module.included = folders
    def init(x_dtype, w_dtype, y_dtype, block, groups, mx, packed, fused_finalize, humming):
        assert x_dtype == (torch.bfloat16 if block else torch.float8_e4m3fn)
        assert (w_dtype, y_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
        assert fused_finalize and not (groups or mx or packed or humming)
        return Module
    def get_gemm1_tactic_count(): return 3
    def get_gemm2_tactic_count(): return 4
    def get_tactic_occupancy(tactic): return int(tactic < 6)
    def get_workspace_size(rows, hidden, inner, experts, top_k, *rest):
        assert rest == (1, 0, 1, 0, False, 3)
        return rows * top_k
    def run_moe(y, x, ids, weights, w1, b1, w2, b2, scales, *rest):
        tactics, others = rest[16], rest[:16]
        assert (b1, b2) + others == (None,) * 9 + (False, 1, 0, 1, 0, 1, 0, False, False)
        pdl, activation, workspace = rest[17:]
        assert pdl and activation == 3 and workspace.numel() == ids.numel()
        Module.used.append(tactics)
        if 2 in tactics or 5 in tactics:
            raise RuntimeError("refused")
        w1, w2 = w1.float(), w2.float()
        if x.dtype == torch.bfloat16:
            w1, w2 = (w * s.repeat_interleave(128, 1).repeat_interleave(128, 2)
                      for w, s in zip((w1, w2), scales))
            scales = torch.ones(len(w1)), torch.tensor(2.0), torch.full((len(w1),), 0.5), None
        first, up, second, _ = scales
        assert (first.dim(), up.dim(), second.dim()) == (1, 0, 1)
        linear, gate = ((x.float() @ w1.mT) * first[:, None, None]).chunk(2, -1)
        h = (gate.sigmoid() * gate * linear * up).to(torch.float8_e4m3fn).float()
        down = (h @ w2.mT) * second[:, None, None]
        assert not down.isnan().any()
        of_pair = down[ids.long(), torch.arange(len(x))[:, None]]
        y.copy_((of_pair * weights[..., None]).sum(1))
"""


def timer(cases: Mapping[str, Case], turns: int, *_: object) -> dict[str, float]:
    for case in cases.values():
        case(turns - 1)
    return {name: 1.0 + i for i, name in enumerate(cases)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODELS:
        monkeypatch.delitem(EXPERTS, name)
    for name, shape in {"Aligned": ALIGNED, "Unaligned": UNALIGNED}.items():
        monkeypatch.setitem(EXPERTS, name, shape)


@pytest.fixture
def vllm_folder(tmp_path: Path) -> Iterator[Path]:
    folder, path = tmp_path / "peer", list(sys.path)
    for name, text in FAKE_VLLM.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    yield folder
    sys.path[:] = path
    for name in [
        n
        for n in sys.modules
        if n.split(".")[0] in ("vllm", "fallback_ops", "deep_gemm", "tvm_ffi")
    ]:
        del sys.modules[name]


def run_main(out: Path, *more: str) -> dict[str, Any]:
    experts.main([str(out), "--device", "cpu", "--tokens", "1,16", *more], timer)
    return json.loads(out.read_text())


def test_a_run_without_peers_says_so(tmp_path: Path) -> None:
    found = run_main(tmp_path / "experts.json", "--models", "all")
    assert found["absent"] == {"vllm": "not asked for (--vllm FOLDER)"}
    cells = [(row["shape"], row["m"], row["routing"]) for row in found["rows"]]
    each = [(1, "uniform"), (16, "uniform"), (16, "skewed")]
    assert cells == [(shape, *cell) for shape in ("Aligned", "Unaligned") for cell in each]
    for row in found["rows"]:
        assert "failed" not in row
        ours = {"fp8kit_row", "fp8kit_block"} if row["shape"] == "Aligned" else {"fp8kit_row"}
        assert set(row["us"]) == {"bf16_batched_mm", "bf16_grouped_mm"} | ours
        assert set(row["backends"]) == ours
        assert row["best_peer_by_ours"] == {}
        assert row["of_roofline"]["fp8kit_row"] == row["roofline_us"] / row["us"]["fp8kit_row"]
        assert row["relative_error"]["bf16_grouped_mm"] < 0.01
        assert 0.02 < row["relative_error"]["fp8kit_row"] < experts.FP8_ERROR
    text = tables.full({"experts": found})
    assert "### 1x128 groups by 128x128 blocks, skewed routing" in text
    assert "**Unaligned**, 8 experts, top 3, H 96, I 64" in text
    assert "| tokens | row-wise: best peer / fp8kit |" in tables.compact({"experts": found})


def test_vllm_computes_the_layer(tmp_path: Path, vllm_folder: Path) -> None:
    out = tmp_path / "experts.json"
    found = run_main(out, "--models", "Aligned", "--vllm", str(vllm_folder))
    assert found["peers"] == {"vllm": "0.25.0", "torch": torch.__version__}
    assert found["absent"] == {}
    assert found["vllm_operators"]["moe_sum"] == "fallback: RuntimeError: no kernel image"
    assert found["vllm_operators"]["moe_align_block_size"] == "vLLM's"
    for row in found["rows"]:
        assert set(row["failed"]) == {"torch_grouped_row"}  # torch has no such GEMM on a CPU
        assert {"vllm_channel", "vllm_block"} <= set(row["us"])
        assert set(row["best_peer_by_ours"]) == {"row", "block"}
    # row-wise against the faster of both peers, block-wise against the block-wise peer
    times, of_peer = row["us"], row["best_peer_by_ours"]
    assert of_peer["row"] == min(times["vllm_channel"], times["vllm_block"]) / times["fp8kit_row"]
    assert of_peer["block"] == times["vllm_block"] / times["fp8kit_block"]
    assert "(vllm_block)" in tables.full({"experts": found})


@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_grouped_products_of_others_compute_the_layer(
    tmp_path: Path, vllm_folder: Path, tokens: int
) -> None:
    (vllm_folder / "deep_gemm.py").write_text(FAKE_DEEP_GEMM)
    sys.path.insert(0, str(vllm_folder))
    found = run_main(
        tmp_path / "a.json",
        "--models",
        "Aligned",
        "--vllm",
        str(vllm_folder),
        "--tokens",
        str(tokens),
    )
    assert found["peers"]["deep_gemm"] == "0.1"
    for row in found["rows"]:
        errors, wanted = row["relative_error"], {"deepgemm_contiguous"}
        wanted |= {"deepgemm_masked"} if tokens <= 128 else set()
        assert wanted == {name for name in row["us"] if name.startswith("deepgemm")}
        assert all(0.01 < errors[name] < experts.FP8_ERROR for name in wanted)


def test_one_shape_of_few_tokens_has_a_kernel_of_its_own() -> None:
    assert grouped_peers.serves("flashinfer_mono", (256, 1024, 2048), 8)
    assert not grouped_peers.serves("flashinfer_mono", (256, 1024, 2048), 9)
    assert not grouped_peers.serves("flashinfer_mono", (128, 1024, 2048), 8)


def test_flashinfer_computes_the_layer_with_its_fastest_kernels(
    tmp_path: Path, vllm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", "of the user")
    folder = tmp_path / "flashinfer"
    folder.mkdir()
    (folder / "tvm_ffi.py").write_text(FAKE_TVM_FFI)
    (folder / "fused_moe_90.so.xz").write_bytes(lzma.compress(b"library"))
    (folder / "fused_moe_90_block.so").write_bytes(b"library")
    (folder / "version.txt").write_text("0.7.2\n")
    peers = ["--vllm", str(vllm_folder), "--flashinfer", str(folder)]
    out = tmp_path / "a.json"

    def with_two_fast_kernels(cases: Mapping[str, Case], *rest: Any) -> dict[str, float]:
        return timer(cases, *rest) | {name: 0.5 for name in cases if name in ("1", "4")}

    asked = [str(out), "--device", "cpu", "--models", "Aligned", "--tokens", "4", *peers]
    experts.main(asked, with_two_fast_kernels)
    found = json.loads(out.read_text())
    assert (found["peers"]["flashinfer"], found["absent"]) == ("0.7.2", {})
    (row,) = found["rows"]
    assert set(row["failed"]) == {"torch_grouped_row"}
    for name in ("flashinfer_cutlass", "flashinfer_block", "fp8kit_static"):
        assert 0.01 < row["relative_error"][name] < experts.FP8_ERROR
    assert set(row["backends"]) == {"fp8kit_row", "fp8kit_block"}
    module = sys.modules["tvm_ffi"].Module
    assert module.included == [str(folder / "include")]
    static = [tuple(pair) for pair in module.used if pair != [-1, -1]]  # blocks have no choice
    assert static[-1] == (1, 4)
    assert set(static) == {(0, -1), (1, -1), (2, -1), (1, 3), (1, 4), (1, 5)}


def test_a_flashinfer_that_does_not_load_costs_its_column_only(
    tmp_path: Path, vllm_folder: Path
) -> None:
    asked = ["--models", "Una", "--tokens", "1", "--flashinfer", str(tmp_path)]
    found = run_main(tmp_path / "a.json", *asked, "--vllm", str(vllm_folder))
    assert found["absent"]["flashinfer_cutlass"].startswith("ValueError: not enough values")
    assert {"fp8kit_row", "vllm_channel"} <= set(found["rows"][0]["us"])
    found = run_main(tmp_path / "a.json", *asked)
    assert found["absent"]["flashinfer_cutlass"].startswith("needs vLLM")
    assert "fp8kit_row" in found["rows"][0]["us"]


def test_a_folder_without_vllm_costs_its_columns_only(tmp_path: Path) -> None:
    found = run_main(tmp_path / "a.json", "--models", "Una", "--vllm", str(tmp_path))
    assert found["absent"]["vllm"].startswith("ModuleNotFoundError")
    assert "fp8kit_row" in found["rows"][0]["us"]
    sys.path.remove(str(tmp_path))


def test_operators_are_unpacked(tmp_path: Path) -> None:
    folder, into = tmp_path / "from", tmp_path / "to"
    folder.mkdir()
    into.mkdir()
    (folder / "c.so").write_bytes(b"plain")
    (folder / "moe.so.xz").write_bytes(lzma.compress(b"packed"))
    found = expert_peers.unpacked(folder, into)
    assert [path.read_bytes() for path in found] == [b"packed", b"plain"]
    assert found == [into / "moe.so", folder / "c.so"]
    assert expert_peers.unpacked(into, folder) == [into / "moe.so"]


def spoiled(build: experts.Build, spoil: Callable[[Tensor], Tensor]) -> experts.Build:
    def with_a_fault(layer: ExpertLayer) -> Case:
        case = build(layer)
        return lambda i: spoil(case(i))

    return with_a_fault


def wrong_columns(y: Tensor) -> Tensor:
    y[:, -8:] *= 1.5
    return y


def test_a_wrong_result_of_our_own_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, build = experts.OURS["fp8kit_row"]
    monkeypatch.setitem(experts.OURS, "fp8kit_row", (kind, spoiled(build, wrong_columns)))
    out = tmp_path / "experts.json"
    with pytest.raises(SystemExit, match="failed, see above: Aligned m=1: fp8kit_row"):
        run_main(out, "--models", "Aligned")
    failed = [row["failed"] for row in json.loads(out.read_text())["rows"]]
    assert all(set(why) == {"fp8kit_row"} for why in failed)
    assert failed[0]["fp8kit_row"].startswith("relative error 0.")


def test_every_case_runs_once_to_compile() -> None:
    assert experts.compile_cell(None, [], "cpu", False, ALIGNED, 4) == {}
    assert experts.compile_cell(None, [], "cpu", True, UNALIGNED, 4) == {}


def test_routes_are_uniform_or_skewed() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = ExpertShape(16, 4, 128, 128)
    counts = {}
    for routing in ("uniform", "skewed"):
        ids, weights = experts.routes(generator, shape, 4000, routing)
        assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
        assert all(row.unique().numel() == 4 for row in ids[:100])
        torch.testing.assert_close(weights.sum(1), torch.ones(4000))
        counts[routing] = ids.flatten().bincount(minlength=16)
    assert counts["uniform"].max() < 1.2 * counts["uniform"].min()
    assert counts["skewed"][0] > 3 * counts["skewed"][8] > 3 * counts["skewed"][15]


def test_the_roofline_of_experts_is_bytes_or_operations() -> None:
    shape = MODELS["Mixtral-8x7B"]
    weights = 3 * 4096 * 14336
    assert experts_roofline_us(shape, 1, 2) == pytest.approx(2 * weights / 4.3e12 * 1e6)
    operations = 2 * 4096 * 2 * weights
    assert experts_roofline_us(shape, 4096, 8) == pytest.approx(operations / 1400e12 * 1e6)
    moved = 4096 * 4096 * (2 + 1 + 2 * 2 + 2)
    assert experts_passes_us(shape, 4096) == pytest.approx(moved / 4.3e12 * 1e6)


def test_nothing_starts_after_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "none.json"
    experts.main([str(out), "--device", "cpu", "--seconds", "-1"])
    assert capsys.readouterr().out.count("skipped, out of time") == 2
    assert not out.exists()


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        experts.parse(["out.json", "--models", "Mistral"])
    assert "'Mistral' starts none of Aligned, Unaligned" in capsys.readouterr().err


def test_copies_are_many_only_where_weights_are_few() -> None:
    assert experts.turns_for(1, 6) == 12
    assert experts.turns_for(128, 5) == 15
    assert experts.turns_for(1024, 2) == 2
    bench = experts.Bench(None, CPU)
    assert "bf16_batched_mm" in bench.cases(MODELS["Mixtral-8x7B"], 4)
    assert "bf16_batched_mm" not in bench.cases(MODELS["Mixtral-8x7B"], 16)
    assert "fp8kit_block" not in bench.cases(MODELS["GPT-OSS-120B"], 1)
    assert set(summary.EXPERT_COMPARISONS) == set(tables.EXPERT_KINDS)
    assert fp8kit.BLOCK == experts.GROUPS["block"]


@pytest.mark.slow
def test_processes_compile_every_layer_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    known = ["out.json", "--device", "cpu", "--tokens", "4", "--processes", "1"]
    experts.compile_ahead(experts.parse([*known, "--vllm", "nowhere"]), [])
    assert capsys.readouterr().out == ""
    experts.compile_ahead(experts.parse([*known, "--seconds", "0"]), [])
    assert capsys.readouterr().out == "not everything is compiled ahead\n"
