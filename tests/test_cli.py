"""The command line: what it prints, its JSON, and one clear sentence on bad input."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import fp8kit
from fp8kit.bench import tuning
from fp8kit.cli import main
from fp8kit.measurements import Case, Table

NANO = Path(__file__).parents[1] / "examples" / "nano"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("cli") / "nano-fp8"
    result = run("quantize", NANO, destination)
    assert result.exit_code == 0, result.output
    return destination


def failure(result: Result) -> str:
    assert result.exit_code != 0
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.output


def test_quantize_writes_a_checkpoint_that_loads(quantized: Path) -> None:
    model = fp8kit.load(quantized)
    assert sum(isinstance(m, fp8kit.Fp8Linear) for m in model.modules()) == 28
    assert (quantized / "tokenizer.json").read_bytes() == (NANO / "tokenizer.json").read_bytes()


def test_quantize_json_describes_the_result(tmp_path: Path) -> None:
    result = run("quantize", NANO, tmp_path / "out", "--exclude", "*.o_proj", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["scheme"] == "FP8_DYNAMIC"
    assert "model.layers.0.self_attn.o_proj" in found["ignored"]
    assert "lm_head" in found["ignored"]


def test_quantize_refuses_an_existing_destination(quantized: Path) -> None:
    before = {f.name: f.read_bytes() for f in quantized.iterdir()}
    assert "exists and is not empty" in failure(run("quantize", NANO, quantized))
    assert {f.name: f.read_bytes() for f in quantized.iterdir()} == before
    again = run("quantize", NANO, quantized, "--overwrite")
    assert again.exit_code == 0, again.output
    assert {f.name: f.read_bytes() for f in quantized.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--scheme", "FP9"), "Known schemes are"),
        (("--target", "tensorrt"), "vllm"),
        (("--exclude", "*.nothing"), "matches no linear layer"),
        (("--no-default-exclude", "--exclude", "*.o_proj"), "contradict each other"),
    ],
)
def test_quantize_refuses_bad_options(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in failure(run("quantize", NANO, tmp_path / "out", *options))
    assert not (tmp_path / "out").exists()


def test_quantize_refuses_bad_sources(tmp_path: Path) -> None:
    assert "nowhere" in failure(run("quantize", tmp_path / "nowhere", tmp_path / "out"))
    damaged = tmp_path / "damaged"
    shutil.copytree(NANO, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in failure(run("quantize", damaged, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_inspect(quantized: Path) -> None:
    result = run("inspect", quantized)
    assert result.exit_code == 0, result.output
    assert "FP8_DYNAMIC" in result.output
    assert "compressed-tensors" in result.output
    assert json.loads(run("inspect", quantized, "--json").stdout)["scheme"] == "FP8_DYNAMIC"


def test_inspect_of_damage_fails(quantized: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(quantized, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    result = run("inspect", damaged)
    assert result.exit_code == 1
    assert "model.safetensors" in result.output


def test_plan_reads_no_weights(tmp_path: Path) -> None:
    result = run("plan", NANO, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sum(r["action"] == "convert" for r in found["records"]) == 28
    assert "28 layers converted" in run("plan", NANO).output


def test_plan_without_defaults_converts_what_is_not_tied() -> None:
    found = json.loads(run("plan", NANO, "--no-default-exclude", "--json").stdout)
    head = next(r for r in found["records"] if r["name"] == "lm_head")
    assert head["reason"] == "its weight is tied to another parameter"


def test_plan_of_a_quantized_checkpoint_is_refused(quantized: Path) -> None:
    assert "FP8_DYNAMIC already" in failure(run("plan", quantized))


def test_explain(quantized: Path) -> None:
    result = run("explain", quantized, "-m", 1)
    assert result.exit_code == 0, result.output
    assert "dequantized" in result.output
    found = json.loads(run("explain", quantized, "--json").stdout)
    assert {entry["backend"] for entry in found} == {"dequantized"}
    assert "torch_native" in found[0]["declined"]


def test_explain_refuses_a_negative_row_count(quantized: Path) -> None:
    assert "not negative" in failure(run("explain", quantized, "-m", -1))


def test_plan_for_row_counts_says_what_was_not_measured() -> None:
    result = run("plan", NANO, "-m", "1,64")
    assert result.exit_code == 0, result.output
    assert "Whether FP8 is faster than bf16" in result.output


@pytest.mark.parametrize("rows", ["0", "1,-4", "many", "1,,2"])
def test_row_counts_are_a_list_of_positive_numbers(rows: str) -> None:
    assert "row counts" in failure(run("plan", NANO, "-m", rows))


def test_bench_times_shapes() -> None:
    options = ("--shapes", "128x256,64x64", "-m", "1,3", "--device", "cpu")
    result = run("bench", *options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(t["n"], t["k"], t["m"]) for t in found] == [
        (128, 256, 1),
        (128, 256, 3),
        (64, 64, 1),
        (64, 64, 3),
    ]
    assert all(t["us"] > 0 and t["bf16_us"] > 0 and t["roofline_us"] > 0 for t in found)
    assert "of the roofline" in run("bench", *options).output


def test_bench_takes_the_layers_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "fp8kit.cli_measuring.linear.bench", lambda *a, **_: asked.append(a[:2]) or []
    )
    result = run("bench", NANO, "-m", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    ((shapes, rows),) = asked
    config = json.loads((NANO / "config.json").read_text())
    assert (config["intermediate_size"], config["hidden_size"]) in shapes
    assert len(shapes) == len(set(shapes))
    assert rows == [2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--shapes"),
        ((NANO, "--shapes", "64x64"), "not both"),
        (("--shapes", "64"), "Shapes are NxK"),
        (("--shapes", "64x64", "--scheme", "FP9"), "Known schemes are"),
    ],
    ids=["nothing", "both", "shape", "scheme"],
)
def test_bench_refuses_bad_options(arguments: tuple[object, ...], said: str) -> None:
    assert said in failure(run("bench", *arguments, "--device", "cpu"))


def test_tune_needs_a_gpu() -> None:
    assert "no backends to choose among" in failure(
        run("tune", "--shapes", "64x64", "--device", "cpu")
    )


@pytest.mark.parametrize("stored", [True, False])
def test_tune_stores_or_writes_its_table(
    stored: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command alone: what it measures is tested where it is measured."""
    kept: list[Table] = []
    wishes: list[tuning.Wish] = []
    case = Case("row*row", "precise", 16, 64, 128)
    outcome = tuning.Outcome(Table("Toy", 1e12, 1e15, {case: {"bf16": 4.0, "swap_ab": 2.0}}))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(tuning, "keep", kept.append)
    monkeypatch.setattr(tuning, "tune", lambda w, *_, **__: wishes.extend(w) or outcome)
    place = () if stored else ("--output", tmp_path / "t.json")
    schemes = ("--scheme", "FP8_BLOCK", "--scheme", "FP8")
    result = run("tune", "--shapes", "64x128", "-m", "16", *schemes, *place)
    assert result.exit_code == 0, result.output
    assert "64x128 m=16 row*row precise: swap_ab 2.0 µs, 2.00 x bf16" in result.output
    assert [w.schemes[0].name for w in wishes] == ["FP8_BLOCK", "FP8"]
    assert kept == ([outcome.table] if stored else [])
    if not stored:
        assert Table.from_json((tmp_path / "t.json").read_text()) == outcome.table


def test_env() -> None:
    found = json.loads(run("env", "--json").stdout)
    assert found["fp8kit"] == fp8kit.__version__
    assert found["torch"].startswith("2.")
    assert f"fp8kit: {fp8kit.__version__}" in run("env").output


def test_module_entry_point() -> None:
    command = [sys.executable, "-m", "fp8kit", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert fp8kit.__version__ in done.stdout
