"""Ratios, means, tables and the plot of measured layers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import plot
import summary
import tables

ROOT = Path(__file__).resolve().parents[2]


def row(shape: str, m: int, roofline: float, **us: float) -> summary.Row:
    return {"shape": shape, "m": m, "n": 16, "k": 32, "roofline_us": roofline, "us": us}


ROWS = [
    row(
        "8b.o",
        1,
        2.0,
        bf16=12.0,
        fp8kit_row=4.0,
        vllm_row=8.0,
        deepgemm_block=6.0,
        fp8kit_block=5.0,
    ),
    row("8b.qkv", 1, 1.0, bf16=6.0, fp8kit_row=4.0, vllm_row=2.0, torchao_row=3.0),
    row("odd.a", 1, 1.0, bf16=8.0, fp8kit_row=2.0)
    | {"failed": {"vllm_row": "N | K is odd", "torch_block": "no"}},
    row("8b.o", 64, 2.0, bf16=8.0, fp8kit_row=4.0, vllm_row=4.0, fp8kit_row_fast=3.0),
]


def test_ratios_of_one_layer() -> None:
    found = summary.ratios(ROWS[0], "row")
    assert found == summary.Ratios("8b.o", 4.0, 3.0, 0.5, "deepgemm_block", 1.5)
    block = summary.ratios(ROWS[0], "block")
    assert block is not None
    assert (block.peer, block.of_peer) == ("deepgemm_block", 1.2)
    alone = summary.ratios(ROWS[2], "row")
    assert alone is not None
    assert (alone.peer, alone.of_peer) == ("", 0.0)
    assert summary.ratios(ROWS[1], "block") is None


def test_means_and_worst_layers() -> None:
    one, many = summary.summarize(ROWS, "row")
    assert (one.m, one.layers, many.m, many.layers) == (1, 3, 64, 1)
    # 3, 1.5 and 4; a half, a quarter and a half; peers 1.5 and 0.5 of two layers only
    assert one.of_bf16 == pytest.approx((3 * 1.5 * 4) ** (1 / 3))
    assert one.worst_of_bf16 == (1.5, "8b.qkv")
    assert one.roofline == pytest.approx((0.5 * 0.25 * 0.5) ** (1 / 3))
    assert one.of_peer == pytest.approx((1.5 * 0.5) ** 0.5)
    assert one.worst_of_peer == (0.5, "8b.qkv")
    (block,) = summary.summarize(ROWS, "block")
    assert (block.m, block.layers) == (1, 1)
    assert summary.summarize(ROWS, "weight_only") == []
    (lonely,) = summary.summarize(ROWS[2:3], "row")
    assert (lonely.of_peer, lonely.worst_of_peer) == (None, None)


def test_odd_shapes_are_apart_from_models() -> None:
    models, odd = summary.split_odd_shapes(ROWS)
    assert [r["shape"] for r in models] == ["8b.o", "8b.qkv", "8b.o"]
    assert [r["shape"] for r in odd] == ["odd.a"]
    assert summary.split_odd_shapes(odd) == (odd, [])
    text = tables.linear({"rows": ROWS})
    assert "1 to 2 layers (Llama 8B)" in text
    means, apart = text.split("### Odd shapes, per-token")
    assert "odd.a" not in means
    assert "| 1 | 1 | 50% | 4.00 | 4.00 (odd.a) |" in apart
    assert "### Odd shapes" not in tables.linear({"rows": ROWS[:2]})


def test_one_case_divided_by_another() -> None:
    found = summary.compared(ROWS, "bf16", "vllm_row")
    # the odd layer has no such peer
    assert found[1] == (pytest.approx((1.5 * 3) ** 0.5), (1.5, "8b.o"), (3.0, "8b.qkv"))
    assert found[64] == (2.0, (2.0, "8b.o"), (2.0, "8b.o"))
    assert summary.compared(ROWS, "bf16", "fp8kit_row_fast").keys() == {64}


def test_curves_are_of_layers_that_have_all_three() -> None:
    found = summary.curves(ROWS)
    assert [m for m, _ in found["fp8kit"]] == [1, 64]
    assert dict(found["fp8kit"])[1] == pytest.approx((0.5 * 0.25) ** 0.5)
    assert dict(found["best peer"])[1] == pytest.approx((2 / 6 * 1 / 2) ** 0.5)
    assert dict(found["bf16"])[1] == pytest.approx((2 / 12 * 1 / 6) ** 0.5)
    assert found["fp8kit, fast"] == [(64, pytest.approx(2 / 3))]


def document(rows: list[summary.Row]) -> dict[str, Any]:
    found = {"device": "a GPU", "torch": "2", "triton": "3", "rows": rows}
    return found | {"peers": {"vllm": "present", "torchao": "0.18.0"}}


def test_tables_say_what_was_measured() -> None:
    text = tables.full({"linear": document(ROWS)})
    assert "1 to 2 layers (Llama 8B)" in text
    assert "Peers: vLLM (present), torchao (0.18.0)." in text
    assert "| 1 | 2 | 35% | 2.12 | 1.50 (8b.qkv) | 0.87 | 0.50 (8b.qkv) |" in text
    assert (
        "| 1 | 2.0 | 12.0 | 4.0 | – | 5.0 | 6.0 (deepgemm_block) | 6.0 (deepgemm_block) |" in text
    )
    assert "| `vllm_row` | odd.a M=1 | N \\| K is odd |" in text
    assert '`accum="fast"`' in text
    assert "FP8_WEIGHT_ONLY" not in text
    assert "Measured on one a GPU, torch 2, Triton 3 (`benchmarks/results/linear.json`)." in text
    short = tables.compact({"linear": document(ROWS)})
    lines = [line for line in short.splitlines() if line.startswith("|")][2:]
    assert lines == [
        "| 1 | 0.87 (0.50) | 2.12 (1.50) | 35% | 1.20 (1.20) | 2.40 (2.40) |",
        "| 64 | 1.00 (1.00) | 2.00 (2.00) | 50% | – | – |",
    ]
    assert "the best peer (vLLM, DeepGEMM, torchao)" in short


def test_a_table_of_mx_layers() -> None:
    rows = [
        row("8b.o", 1, 1.0, bf16=8.0, FP8_DYNAMIC=4.0, MXFP8=4.0),
        row("8b.qkv", 1, 1.0, bf16=9.0, FP8_DYNAMIC=4.0, MXFP8=4.5),
    ]
    text = tables.full({"mx_speed": document(rows)})
    assert "2 layers (Llama 8B)" in text
    ours = "1.061 | 1.000 (8b.o) | 1.125 (8b.qkv)"
    assert f"| 1 | {ours} | 2.000 | 2.000 (8b.o) | 2.000 (8b.qkv) |" in text


def test_long_lists_of_failures_are_cut() -> None:
    missing = {("vllm_row", "odd"): [f"a M={m}" for m in range(5)]}
    assert "| `vllm_row` | a M=0, a M=1, a M=2 and 2 more | odd |" in tables.failures(missing)


def run(script: str, *arguments: str) -> None:
    previous, sys.argv = sys.argv, [script, *arguments]
    try:
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    finally:
        sys.argv = previous


def test_documents_show_the_results_of_the_repository() -> None:
    run("tables.py", "--check")
    run("plot.py", "--check")


def test_results_of_the_repository_are_all_shown() -> None:
    files = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    # skinny explains choices; the page on streaming quotes its second machine, and the one on
    # numerics the cost of formats and experts in perplexity
    quoted = {"skinny", "streaming_h200", "mx_accuracy", "experts_accuracy"}
    assert files - set(tables.SECTIONS) <= quoted


def moved(monkeypatch: pytest.MonkeyPatch, script: ModuleType, places: dict[str, Path]) -> None:
    """Make a script read and write other paths."""
    for name, path in places.items():
        monkeypatch.setattr(script, name, path)


def test_the_check_of_tables_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linear.json").write_text(json.dumps(document(ROWS)))
    readme, full = tmp_path / "README.md", tmp_path / "benchmarks.md"
    readme.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    places = {"ROOT": tmp_path, "RESULTS": tmp_path, "README": readme, "DOCUMENT": full}
    moved(monkeypatch, tables, places)
    with pytest.raises(SystemExit, match=r"README.md is not what .* writes. Run it."):
        tables.main(["--check"])
    tables.main([])
    assert readme.read_text().startswith(f"before\n{tables.BEGIN}\n\nWhole linear")
    assert readme.read_text().endswith(f"\n\n{tables.END}\nafter\n")
    tables.main(["--check"])
    full.write_text(full.read_text().replace("2.12", "2.13"))
    with pytest.raises(SystemExit, match=r"benchmarks.md is not"):
        tables.main(["--check"])


def test_the_check_of_the_plot_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, drawn = tmp_path / "linear.json", tmp_path / "images" / "roofline.svg"
    results.write_text(json.dumps(document(ROWS)))
    moved(monkeypatch, plot, {"ROOT": tmp_path, "RESULTS": results, "PLOT": drawn})
    with pytest.raises(SystemExit, match=r"images/roofline.svg does not show linear.json"):
        plot.main(["--check"])
    plot.main([])
    plot.main(["--check"])
    results.write_text(json.dumps(document(ROWS[:3])))
    with pytest.raises(SystemExit, match=r"does not show"):
        plot.main(["--check"])


def test_the_plot_shows_the_curves_and_nothing_that_changes() -> None:
    found = summary.curves(ROWS)
    (axes,) = plot.figure(found).axes
    shown = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert shown == {name: [list(point) for point in line] for name, line in found.items()}
    assert axes.get_xscale() == "log"
    assert set(found) <= set(plot.STYLES)
    text = plot.svg(found)
    assert text == plot.svg(found)
    assert "<dc:date>" not in text
    assert plot.fingerprint(found) in text
    moved = found | {"bf16": [(1, 0.5)]}
    assert plot.fingerprint(moved) != plot.fingerprint(found)
