"""The command line: what it prints, its JSON, and one clear sentence on bad input."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import fp8kit
import fresh
from checkpoint_samples import edit_tensors
from disks import Disk
from fp8kit.cli.main import _in_shell_words, main
from fp8kit.dispatch.timings import Case, Table, table_for
from fp8kit.io import checkpoints, models
from fp8kit.perf import tune as tuning
from tiny_experts import tiny

NANO = Path(__file__).parents[2] / "examples" / "nano"


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
        (("--exclude", "*.o_proj,*.q_proj"), "Give each pattern by itself"),
        (("--device", "xpu:9"), "xpu devices here"),
        (("--device", "meta"), "Got --device meta. It must be a device of this machine"),
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


@pytest.mark.parametrize(
    ("text", "count"), [("2GB", 1), ("500kB", 9), ("0.5 mb", 9), ("500000", 9)]
)
def test_quantize_takes_a_size_of_files(text: str, count: int, tmp_path: Path) -> None:
    result = run("quantize", NANO, tmp_path / "out", "--max-shard-size", text, "--workers", 1)
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == count


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-shard-size", "5 apples"), "is not a size; write it like 5GB"),
        (("--max-shard-size", "0"), "is not a size"),
        (("--max-shard-size", "1.2.3GB"), "is not a size"),
        (("--max-shard-size", "0.1"), "is not a size"),
        (("--max-shard-size", "9" * 400), "is not a size"),
        (("--dtype", "int8"), "bfloat16"),
        (("--workers", "0"), "0 is not in the range"),
        (("--device", "cpu", "--device", "tpu"), "Got --device tpu. It must be a device"),
        (("--scheme", "FP8"), "needs calibration data"),
    ],
)
def test_quantize_refuses_bad_values(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    assert said in failure(run("quantize", NANO, tmp_path / "out", *options))
    assert list(tmp_path.iterdir()) == []


def test_quantize_casts_the_rest(tmp_path: Path) -> None:
    assert run("quantize", NANO, tmp_path / "out", "--dtype", "float16").exit_code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


def test_quantize_says_how_to_continue(tmp_path: Path, disk: Disk) -> None:
    def interrupted(written: Path) -> None:
        if written.name.startswith(".model"):
            raise KeyboardInterrupt

    disk.notes("fsync", interrupted)
    said = failure(run("quantize", NANO, tmp_path / "out"))
    disk.mend()
    assert "the same command continues" in said
    options = ("--scheme", "FP8_BLOCK", "--exclude", "*.o_proj", "--max-shard-size", "1GB")
    other = failure(run("quantize", NANO, tmp_path / "out", *options))
    assert (
        "it was another one (exclude not given then, '*.o_proj' now; files of up to 5.00 GB then, "
        "1.00 GB now; scheme FP8_DYNAMIC then, FP8_BLOCK now)"
    ) in other
    assert f"start anew: rm -r {tmp_path / '.out.partial'}" in other
    assert run("quantize", NANO, tmp_path / "out").exit_code == 0


def test_quantize_on_a_cluster_needs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fp8kit.integrations.ray", raising=False)
    assert "pip install 'fp8kit[ray]'" in failure(run("quantize", NANO, tmp_path / "out", "--ray"))


@pytest.mark.parametrize("options", [("--workers", "2"), ("--device", "cpu", "--device", "cpu")])
def test_a_cluster_takes_no_threads_of_this_machine(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    result = run("quantize", NANO, tmp_path / "out", "--ray", *options)
    assert result.exit_code == 2
    assert "are for this machine, and Ray chooses" in result.output


def test_verify(quantized: Path, tmp_path: Path) -> None:
    result = run("verify", NANO, quantized)
    assert result.exit_code == 0, result.output
    assert "28 FP8 layers, 28 of them equal to a new quantization" in result.output
    found = json.loads(run("verify", NANO, quantized, "--json").stdout)
    assert found["ok"]
    assert len(found["tensors"]) == 38
    damaged = tmp_path / "damaged"
    shutil.copytree(quantized, damaged)
    edit_tensors(damaged, model__norm__weight=None)
    result = run("verify", NANO, damaged)
    assert result.exit_code == 1
    assert "model.norm.weight: in the source, not in the result." in result.output
    assert f"{NANO} was given twice." in failure(run("verify", NANO, NANO))


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


@pytest.mark.slow
def test_forms_of_mxfp8_are_one_on_disk(tmp_path: Path) -> None:
    written = []
    for scheme in ("MXFP8", "MXFP8_ROW", "MXFP8_BLOCK"):
        result = run("quantize", NANO, tmp_path / scheme, "--scheme", scheme, "--json")
        assert json.loads(result.stdout)["scheme"] == "MXFP8"
        written.append((tmp_path / scheme / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("command", ["quantize", "inspect"])
def test_an_announcement_without_fp8_weights_is_refused(command: str, tmp_path: Path) -> None:
    shutil.copytree(NANO, tmp_path / "dense")
    file = tmp_path / "dense" / "config.json"
    announced = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(announced))
    destination = [tmp_path / "out"] * (command == "quantize")
    said = failure(run(command, tmp_path / "dense", *destination))
    assert "none of its weights is FP8" in said
    assert "remove quantization_config" in said


def test_eval_without_a_tokenizer_is_refused(quantized: Path, tmp_path: Path) -> None:
    shutil.copytree(NANO, tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    (tmp_path / "text.txt").write_text("some words")
    said = failure(run("eval", tmp_path / "bare", quantized, "--text", tmp_path / "text.txt"))
    assert "holds no tokenizer" in said


def test_plan_reads_no_weights(tmp_path: Path) -> None:
    result = run("plan", NANO, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert sum(r["action"] == "convert" for r in found["records"]) == 28
    assert "28 layers converted" in run("plan", NANO).output


def test_plan_without_defaults_converts_what_is_not_tied() -> None:
    found = json.loads(run("plan", NANO, "--no-default-exclude", "--json").stdout)
    head = next(r for r in found["records"] if r["name"] == "lm_head")
    assert head["reason"] == "its weight is tied to model.embed_tokens.weight"
    assert f"kept in high precision by default; {head['reason']}" in run("plan", NANO).stdout


def test_plan_of_a_quantized_checkpoint_is_refused(quantized: Path) -> None:
    assert "FP8_DYNAMIC already" in failure(run("plan", quantized))


def test_explain(quantized: Path) -> None:
    result = run("explain", quantized, "-m", 1)
    assert result.exit_code == 0, result.output
    assert "dequantized" in result.output
    found = json.loads(run("explain", quantized, "--json").stdout)
    assert {entry["backend"] for entry in found} == {"dequantized"}
    assert "torch_native" in found[0]["declined"]


def test_explain_of_high_precision_names_the_command(tmp_path: Path) -> None:
    said = failure(run("explain", NANO))
    assert f"Make one: fp8kit quantize {NANO} DESTINATION" in said


@pytest.mark.parametrize(
    ("python", "shell"),
    [
        ("Got target='ollama'.", "Got --target ollama."),
        ("Got target=''. It must", "Got --target ''. It must"),
        ("strict=True, and 3 layers cannot", "--strict, and 3 layers cannot"),
        ("Pass exclude=['*.a', 'b'].", "Pass --exclude '*.a' --exclude b."),
        ("Got scheme=FP8_BLOCK for d, which", "Got --scheme FP8_BLOCK for d, which"),
        ("pass overwrite=True.", "pass --overwrite."),
        ("Use fp8kit.load(dir, scheme='FP8').", "Use fp8kit.load(dir, scheme='FP8')."),
        ("Got unfit='drop'.", "Got --unfit drop."),
        ("Got dialect='deepseek'.", "Got --dialect deepseek."),
        ("Got sideways=3.", "Got sideways=3."),
    ],
)
def test_errors_name_options_not_arguments(python: str, shell: str) -> None:
    assert _in_shell_words(python) == shell


def test_options_are_named_end_to_end(tmp_path: Path) -> None:
    said = failure(run("quantize", NANO, tmp_path / "out", "--target", "vlm"))
    assert "Got --target vlm." in said
    assert "Did you mean 'vllm'?" in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    said = failure(run("quantize", NANO, tmp_path / "full"))
    assert "overwrite=True" not in said
    assert "--overwrite" in said


def test_explain_refuses_a_negative_row_count(quantized: Path) -> None:
    assert "row counts must be positive" in failure(run("explain", quantized, "-m", -1))


def test_explain_takes_several_row_counts(quantized: Path) -> None:
    result = run("explain", quantized, "-m", "1,16")
    assert result.exit_code == 0, result.output
    assert "[M<=1, K=256]" in result.stdout
    assert "[M<=16, K=256]" in result.stdout
    both = json.loads(run("explain", quantized, "-m", "1,16", "--json").stdout)
    assert [p["problem"].startswith("[M<=1,") for p in both].count(True) == len(both) // 2


def test_explain_tells_of_experts(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tiny("Qwen3Moe")
    fp8kit.convert(model, "MXFP8")
    fp8kit.save(model, tmp_path / "a", target="sglang")
    result = run("explain", tmp_path / "a", "-m", "1,16")
    assert result.exit_code == 0, result.output
    for m in (1, 16):
        assert f"4 experts, 2 for each of M<={m} tokens" in result.stdout
    assert "MXFP8_ROW: MXFP8 weights rebased to scales per row" in result.stdout
    found = json.loads(run("explain", tmp_path / "a", "-m", "1,16", "--json").stdout)
    assert ["by_expert"] * 2 == [e["backend"] for e in found if "mlp.experts" in e["layers"][0]]


def test_plan_for_row_counts_says_what_was_not_measured() -> None:
    result = run("plan", NANO, "-m", "1,64")
    assert result.exit_code == 0, result.output
    assert "Whether FP8 is faster than bf16" in result.output


def test_plan_for_row_counts_wants_the_gpu_that_serves(faked_cuda: Callable[..., None]) -> None:
    faked_cuda(0)
    said = run("plan", NANO, "-m", "1,64").output
    assert "faster than bf16 at m=1, 64 depends on the GPU, and there is none here" in said
    assert "on meta" not in said


@pytest.mark.parametrize("rows", ["0", "1,-4", "many", "1,,2"])
def test_row_counts_are_a_list_of_positive_numbers(rows: str) -> None:
    assert "row counts" in failure(run("plan", NANO, "-m", rows))


def test_bench_times_shapes() -> None:
    options = ("--shapes", "64x128,64x64", "-m", "3", "--device", "cpu")
    result = run("bench", *options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(t["n"], t["k"], t["m"]) for t in found] == [(64, 128, 3), (64, 64, 3)]
    assert all(t["us"] > 0 and t["bf16_us"] > 0 and t["roofline_us"] > 0 for t in found)


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Collect the shapes and rows that would be measured, instead of measuring for seconds."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        "fp8kit.cli.measure.linear.bench", lambda *a, **_: asked.append(a[:2]) or []
    )
    return asked


def test_what_is_measured_are_the_layers_of_a_checkpoint_in_fp8_too(
    quantized: Path, benched: list[tuple[object, ...]]
) -> None:
    for source in (NANO, quantized):
        result = run("bench", source, "-m", "2", "--device", "cpu")
        assert result.exit_code == 0, result.output
    dense, fp8 = (set(shapes) for shapes, _ in benched)
    assert dense == fp8 != set()


def test_explain_asks_the_gpu_where_there_is_one(
    quantized: Path, monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]
) -> None:
    asked: list[str] = []
    faked_cuda()
    real = models.load
    monkeypatch.setattr(
        "fp8kit.cli.main.models.load", lambda path, device: asked.append(device) or real(path)
    )
    assert run("explain", quantized).exit_code == 0
    assert run("explain", quantized, "--device", "cpu").exit_code == 0
    assert asked == ["cuda", "cpu"]


def test_bench_takes_the_layers_of_a_model(benched: list[tuple[object, ...]]) -> None:
    result = run("bench", NANO, "-m", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "of the roofline" in result.output
    ((shapes, rows),) = benched
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


def test_tune_needs_a_gpu(faked_cuda: Callable[..., None]) -> None:
    said = failure(run("tune", "--shapes", "64x64", "--device", "cpu"))
    assert "'cpu' has no backends to choose among. Run this on the machine with the GPU" in said
    faked_cuda(0)
    said = failure(run("tune", "--shapes", "64x64"))
    assert f"Got --device cuda, but torch {torch.__version__} finds 0 cuda devices here" in said
    assert "run this where the GPU is" in said
    assert failure(run("bench", "--shapes", "64x64")) == said


CASE = Case("row*row", "precise", 16, 64, 128)
TUNED = Table("Toy", 1e12, 1e15, {CASE: {"bf16": 4.0, "hopper_gemm": 2.0}})


@pytest.fixture
def requests(
    monkeypatch: pytest.MonkeyPatch, faked_cuda: Callable[..., None]
) -> list[tuning.TuneRequest]:
    """Collect the requests to a faked GPU's tuning, which returns ``TUNED``."""
    requests: list[tuning.TuneRequest] = []

    def tune(
        asked: list[tuning.TuneRequest], *_: object, store: Callable[[Table], None], **__: object
    ):
        requests.extend(asked)
        store(TUNED)
        return tuning.Outcome(TUNED)

    faked_cuda()
    monkeypatch.setattr(tuning, "tune", tune)
    return requests


@pytest.mark.parametrize("stored", [True, False])
def test_tune_stores_or_writes_its_table(
    stored: bool, tmp_path: Path, cache_dir: Path, requests: list[tuning.TuneRequest]
) -> None:
    """The command alone; the tests of ``fp8kit.perf`` are about the measurement."""
    place = () if stored else ("--output", tmp_path / "t.json")
    schemes = ("--scheme", "FP8_BLOCK", "--scheme", "FP8")
    result = run("tune", "--shapes", "64x128", "-m", "16", *schemes, *place)
    assert result.exit_code == 0, result.output
    assert "64x128 m=16 row*row precise: hopper_gemm 2.0 µs, 2.00 x bf16" in result.output
    assert [w.schemes[0].name for w in requests] == ["FP8_BLOCK", "FP8"]
    found = table_for("Toy")
    assert found == TUNED if stored else found is None
    if not stored:
        assert Table.from_json((tmp_path / "t.json").read_text()) == TUNED


@pytest.mark.parametrize("fp8", [False, True], ids=["dense", "fp8"])
def test_tune_measures_joined_siblings_of_few_rows(
    fp8: bool, quantized: Path, cache_dir: Path, requests: list[tuning.TuneRequest]
) -> None:
    result = run("tune", quantized if fp8 else NANO, "-m", "1,4096")
    assert result.exit_code == 0, result.output
    alone, joined = requests
    assert set(alone.shapes) >= {(256, 256), (128, 256), (768, 256), (256, 768)}
    assert (set(joined.shapes), joined.rows) == ({(512, 256), (1536, 256)}, [1])
    assert alone.rows == [1, 4096]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cuda:7", "--shapes", "64x64"), "finds 1 cuda devices here"),
        (("--device", "gpu"), "Got --device gpu."),
        (("--shipped-shapes", "--shapes", "64x64", "-m", "1"), "leave out shapes, rows"),
        (("--shipped-shapes", "--accum", "fast"), "leave out accum"),
    ],
    ids=["absent", "unknown", "twice", "accum"],
)
def test_tune_refuses_what_it_would_ignore(
    arguments: tuple[str, ...], said: str, faked_cuda: Callable[..., None]
) -> None:
    faked_cuda()
    assert said in failure(run("tune", *arguments))


def test_env() -> None:
    found = json.loads(run("env", "--json").stdout)
    assert found["fp8kit"] == fp8kit.__version__
    assert found["torch"].startswith("2.")
    assert {"triton", "cuda-bindings", "deep_gemm", "transformers", "devices"} <= set(found)
    lines = run("env").output.splitlines()
    assert f"fp8kit: {fp8kit.__version__}" in lines
    assert all(line.partition(": ")[2] for line in lines)  # "none" where there is nothing


MODULE = "import runpy; runpy.run_module('fp8kit', run_name='__main__', alter_sys=True)"


def test_module_entry_point() -> None:
    assert fp8kit.__version__ in fresh.run(MODULE, "--version").stdout


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


def as_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(POINTER)


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/tool.jinja"])
def test_a_side_file_that_is_a_pointer(name: str, quantized: Path, tmp_path: Path) -> None:
    for source in (NANO, quantized):
        folder = tmp_path / source.name
        shutil.copytree(source, folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(POINTER)
        command = "quantize" if source is NANO else "convert-checkpoint"
        for said in (run("inspect", folder), run(command, folder, tmp_path / "out")):
            assert f"{name} is a git-LFS pointer" in failure(said)
            assert "Get them with git lfs pull" in said.output
            assert "no problems found" not in said.output
        assert run("inspect", folder / "model.safetensors").exit_code == 0
    assert sorted(os.listdir(tmp_path)) == sorted([NANO.name, quantized.name])


def as_other(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(b"other")

    return change


def as_shards(folder: Path) -> None:
    for i in (1, 2):
        shutil.copy(NANO / "model.safetensors", folder / f"model-0000{i}-of-00002.safetensors")
    (folder / "model.safetensors").unlink()


def as_processes(folder: Path) -> None:
    for i in (1, 2):
        name = f"shard-0000{i}-model-00001-of-00001.safetensors"
        shutil.copy(NANO / "model.safetensors", folder / name)
    (folder / "model.safetensors").unlink()


def named(*names: str) -> Callable[[Path], None]:
    """Give the file of a checkpoint other names, each a copy of it."""

    def change(folder: Path) -> None:
        for name in names:
            shutil.copy(folder / "model.safetensors", folder / name)
        (folder / "model.safetensors").unlink()

    return change


def as_pipeline(folder: Path) -> None:
    (folder / "transformer").mkdir()
    (folder / "model.safetensors").rename(folder / "transformer" / "model.safetensors")


def with_a_missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def as_quanto(folder: Path) -> None:
    (folder / "quanto_qmap.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (as_pointer, ["model.safetensors is a git-LFS pointer", "Get them with git lfs pull"]),
        (lambda d: (d / "config.json").write_text(POINTER), ["config.json is a git-LFS pointer"]),
        (as_other("nano-q4.gguf"), ["only nano-q4.gguf: that is GGUF", "Start from the model"]),
        (as_other("__0_0.distcp"), ["only __0_0.distcp: that is a part of what torch.distributed"]),
        (as_other("pytorch_model.bin"), ["only pytorch_model.bin: that is a pickle"]),
        (lambda d: (d / "model.safetensors").unlink(), ["complete the download"]),
        (as_shards, ["and no model.safetensors.index.json", "Download the index too"]),
        (as_processes, ["2 processes wrote by torch.distributed", "enable_consolidation=True"]),
        (
            named("model-rank-0-part-0.safetensors"),
            ["vLLM or SGLang", "that the engine had loaded"],
        ),
        (named(*(f"model-rank-{i}-part-0.safetensors" for i in (0, 1))), ["lie as kernels read"]),
        (named("model1-mp8.safetensors"), ["8 parts by DeepSeek's", "--model-parallel 1"]),
        (with_a_missing_shard, ["model-00002-of-00002.safetensors is missing"]),
        (as_pipeline, ["transformer inside it does", "Pass one of its folders"]),
        (as_quanto, ["was written by quanto", "high-precision checkpoint"]),
        (lambda d: os.truncate(d / "model.safetensors", 900), ["model.safetensors is damaged"]),
    ],
    ids="lfs lfs-config gguf distcp pickle nothing no-index processes rank ranks part no-shard "
    "pipeline quanto truncated".split(),
)
def test_a_folder_that_is_no_checkpoint(
    change: Callable[[Path], None], said: list[str], tmp_path: Path
) -> None:
    shutil.copytree(NANO, tmp_path / "source")
    change(tmp_path / "source")
    for command in (("inspect",), ("plan",), ("quantize", tmp_path / "out")):
        text = failure(run(command[0], tmp_path / "source", *command[1:]))
        assert all(words in text for words in said), text
        assert "pickle" not in text or "pickle" in said[0]
    assert os.listdir(tmp_path) == ["source"]


def test_what_one_of_many_processes_wrote_is_no_checkpoint(tmp_path: Path) -> None:
    as_processes(shutil.copytree(NANO, tmp_path / "source"))
    one = tmp_path / "source" / "shard-00001-model-00001-of-00001.safetensors"
    for command in (("inspect",), ("plan",), ("quantize", tmp_path / "out")):
        assert "these have some rows of each" in failure(run(command[0], one, *command[1:]))
    one.with_name(one.name.replace("00001", "00002", 1)).unlink()
    assert run("inspect", one).exit_code == 0


def test_a_path_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(NANO, "nano")
    Path("model.gguf").write_bytes(b"GGUF")
    Path("link").symlink_to("gone")
    Path("loop").symlink_to("pool")
    Path("pool").symlink_to("loop")
    os.mkfifo("fifo")
    expected = {
        "nano/config.json": "nano/config.json is a file, and no safetensors file. A checkpoint is a"
        " directory with safetensors files, or one such file. Pass its directory: nano.",
        "model.gguf": "that is GGUF",
        "link": "link is a link to gone, which does not exist",
        "loop": "loop is a link that leads to itself",
        "loop/inside": "loop is a link that leads to itself",
        "fifo": "fifo exists, and is no regular file and no directory",
        "/dev/null": "/dev/null exists, and is no regular file and no directory",
        "~/models/x": f"pass {Path('~/models/x').expanduser()}",
        "nano/model": "Check the path",
        "a\udcff": "is not UTF-8",
        "n" * 300: "is too long",
    }
    for source, said in expected.items():
        for command in (
            ("inspect",),
            ("plan",),
            ("quantize", "out"),
            ("convert-checkpoint", "out"),
        ):
            assert said in failure(run(command[0], source, *command[1:]))
    assert not Path("out").exists()


def test_a_destination_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    coded = GOLDEN / "compressed-tensors-dynamic"
    for command in (("quantize", NANO), ("convert-checkpoint", coded)):
        for destination in (tmp_path / "a", tmp_path / "a" / "inside"):
            said = failure(run(*command, destination, "--overwrite"))
            assert f"{tmp_path / 'a'} is a link that leads to itself" in said
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("length", [242, 255, 256])
def test_a_destination_with_too_long_a_name(length: int, tmp_path: Path) -> None:
    coded = GOLDEN / "compressed-tensors-dynamic"
    for command in (("quantize", NANO), ("convert-checkpoint", coded)):
        said = failure(run(*command, tmp_path / ("n" * length)))
        assert "is too long" in said
        assert "Choose a shorter one" in said
    assert list(tmp_path.iterdir()) == []


HUB = "https://huggingface.co/meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"),
        ("hf://meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"),
        ("hf://org/x@main/sub", "org/x --revision main --local-dir x"),
        (HUB, "meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"),
        (f"{HUB}/", "meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"),
        (
            f"{HUB}/tree/main",
            "meta-llama/Llama-3.1-8B --revision main --local-dir Llama-3.1-8B",
        ),
        (
            f"{HUB}/blob/refs/pr/7/config.json",
            "meta-llama/Llama-3.1-8B --revision refs/pr/7 --local-dir Llama-3.1-8B",
        ),
        ("org/x@main", "org/x --revision main --local-dir x"),
        ("gpt2", "gpt2 --local-dir gpt2"),
        ("gpt2@v1.0", "gpt2 --revision v1.0 --local-dir gpt2"),
    ],
)
def test_a_model_on_a_hub_is_downloaded_first(
    source: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert failure(run("inspect", source)).endswith(f": hf download {wanted}\n")
    with pytest.raises(fp8kit.CheckpointError, match=f": hf download {re.escape(wanted)}$"):
        fp8kit.load(source)


@pytest.mark.parametrize(
    "source", ["nano/model", "nano/model@main", "model.gguf", "a/b/c", "../x", "/x/y", "s3://org/x"]
)
def test_a_path_is_no_model_on_a_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nano").mkdir()
    said = failure(run("inspect", source))
    assert "Check the path" in said
    assert "hf download" not in said


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("quantize", "", "out"), "SOURCE"),
        (("quantize", NANO, ""), "DESTINATION"),
        (("convert-checkpoint", "", "out"), "SOURCE"),
        (("verify", NANO, ""), "RESULT"),
        (("inspect", ""), "SOURCE"),
        (("bench", "", "--device", "cpu", "-m", "1"), "SOURCE"),
    ],
)
def test_an_empty_path_is_not_the_working_directory(
    arguments: tuple[object, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(NANO, tmp_path / "nano")
    monkeypatch.chdir(tmp_path / "nano")
    said = failure(run(*arguments))
    assert f"Got an empty path as {name}." in said
    assert "Pass it, such as 'model-fp8'." in said
    assert not Path("out").exists()


def test_a_destination_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(NANO, "nano")
    Path("file").touch()
    expected = {
        "nano": "is or holds the source",
        "nano/": "is or holds the source",
        "nano/fp8": "lies inside the source",
        ".": "is or holds the source",
        "file": "is a file",
        "file/out": f"{tmp_path / 'file/out'} lies inside {tmp_path / 'file'}, which is a file. A "
        "checkpoint is a directory. Choose another path.",
        "file/deep/out": f"lies inside {tmp_path / 'file'}, which is a file",
        "/dev/null/x": "/dev/null/x lies inside /dev/null, which is a file",
        "o\udcff": "is not UTF-8",
    }
    for destination, said in expected.items():
        assert said in failure(run("quantize", "nano", destination))
    for destination in ("file", "file/out", "/dev/null/x"):
        said = failure(run("convert-checkpoint", GOLDEN / "modelopt-flat", destination))
        assert expected[destination] in said
    assert sorted(os.listdir()) == ["file", "nano"]
    assert run("quantize", "nano/", "deep/er/out/").exit_code == 0


@pytest.mark.parametrize("command", ["quantize", "convert-checkpoint"])
@pytest.mark.parametrize("destination", [".", "..", "../out"])
def test_the_working_directory_is_not_exchanged(
    command: str, destination: str, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename would leave the process and its shell in a directory that is gone."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    source = NANO if command == "quantize" else quantized
    said = failure(run(command, source, destination, "--overwrite"))
    assert "is or holds the working directory" in said
    assert Path.cwd() == tmp_path / "out"
    assert run(command, source, "below").exit_code == 0


@pytest.mark.parametrize("command", ["quantize", "convert-checkpoint"])
def test_a_destination_that_may_not_be_written(
    command: str, quantized: Path, tmp_path: Path, disk: Disk
) -> None:
    disk.refuses("mkdir", errno.EACCES, lambda path: path.name.startswith(".out."))
    said = failure(run(command, NANO if command == "quantize" else quantized, tmp_path / "out"))
    assert "cannot be written: Permission denied" in said
    assert f"look at the permissions of {tmp_path}" in said
    assert "Errno" not in said
    # /proc says so of what it will not make; what is named is what was asked for
    disk.refuses("mkdir", errno.ENOENT, lambda path: path.name.startswith(".out."))
    said = failure(run(command, NANO if command == "quantize" else quantized, tmp_path / "out"))
    assert f"{tmp_path / 'out'} cannot be written: No such file or directory. A checkpoint" in said
    assert ".partial" not in said


def test_a_full_disk_is_told_in_units_for_people(tmp_path: Path, disk: Disk) -> None:
    disk.has_free(1_234_567)
    said = failure(run("quantize", NANO, tmp_path / "out"))
    assert re.search(r"has 1\.23 MB free\. The checkpoint needs 5\.\d\d MB\. Make room", said)


def test_a_source_without_a_config_is_told_of(tmp_path: Path) -> None:
    shutil.copytree(NANO, tmp_path / "source")
    (tmp_path / "source" / "config.json").unlink()
    assert "config.json is missing" in run("inspect", tmp_path / "source").output
    assert "config.json is missing" in run("plan", tmp_path / "source").output
    result = run("quantize", tmp_path / "source", tmp_path / "out")
    assert result.exit_code == 0
    assert "config.json names no model" in result.output
    assert "fp8kit.load(dir, model=...)" in result.output


def test_errors_of_the_system_are_words(tmp_path: Path, disk: Disk) -> None:
    disk.refuses("fsync", errno.EIO)
    said = failure(run("quantize", NANO, tmp_path / "out"))
    assert re.search(r"Error: .*: Input/output error\.", said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_behind_standard_output_is_named() -> None:
    with Path("/dev/full").open("w") as full:
        result = fresh.run(MODULE, "inspect", NANO, out=full.fileno(), check=False)
    assert result.returncode == 1
    assert "Error: Standard output: No space left on device." in result.stderr


def test_an_error_leaves_nothing_for_a_reader_of_json(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "gone", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: There is no directory")


def test_a_pipe_gets_lines_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "quantize:" not in run("quantize", NANO, tmp_path / "quick").stderr
    for patience in ("LINE_SECONDS", "QUIET_SECONDS"):
        monkeypatch.setattr(checkpoints, patience, 0)
    lines = run("quantize", NANO, tmp_path / "out").stderr.splitlines()
    assert any(re.match(r"quantize: \d+%, .+ of 8.39M", line) for line in lines), lines
    assert not any("\r" in line for line in lines)


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = fresh.run(MODULE, "inspect", NANO, out=writing, check=False)
    os.close(writing)
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr


def test_numpy_is_asked_for_only_where_it_is_needed(quantized: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')"
    )
    paths = [str(tmp_path), str(Path(fp8kit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:  # of torch without numpy
        command = [sys.executable, "-m", "fp8kit", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = run("inspect", NANO)
    assert (done.returncode, done.stderr) == (0, "")
    pytest.importorskip("transformers")
    done = run("explain", quantized)
    assert done.returncode == 1
    assert "Error: numpy is not installed, and Transformers needs it. Loading" in done.stderr
    assert "Run pip install numpy, or" in done.stderr


GOLDEN = Path(__file__).parents[1] / "golden"


def test_convert_checkpoint(tmp_path: Path) -> None:
    result = run("convert-checkpoint", GOLDEN / "modelopt-flat", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["dialect"], found["scheme"]) == ("compressed-tensors", "FP8")
    result = run("convert-checkpoint", tmp_path / "out", tmp_path / "again", "--dialect", "autofp8")
    assert result.exit_code == 0, result.output
    assert "autofp8, FP8" in result.output
    assert f"written to {tmp_path / 'again'}" in result.output


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("fp8-block", ("--target", "transformers"), "do not load in transformers"),
        ("fp8-block", ("--dialect", "quark"), "which are written"),
        ("fp8-block", ("--target", "tgi"), "It must be one of vllm, sglang"),
        ("compressed-tensors-dynamic", ("--dialect", "fbgemm"), "and set one layer.scale_ub"),
        ("fp8-block", ("--unfit", "drop"), "It must be one of refuse, dequantize"),
        ("nowhere", (), "There is no directory"),
    ],
)
def test_convert_checkpoint_refuses(
    source: str, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = run("convert-checkpoint", GOLDEN / source, tmp_path / "out", *options)
    assert said in failure(result)
    assert not (tmp_path / "out").exists()


def test_inspect_of_one_file() -> None:
    result = run("inspect", GOLDEN / "comfyui-scaled" / "diffusion.safetensors")
    assert result.exit_code == 0, result.output
    assert "comfyui, FP8_TENSOR_BY_16BIT" in result.output


def test_the_list_of_commands_cuts_no_sentence() -> None:
    assert "..." not in run("--help").output.partition("Commands:")[2]


def test_every_option_says_what_it_is() -> None:
    options = [(c.name, o) for c in main.commands.values() for o in c.params]
    assert [(c, o.name) for c, o in options if not o.help and o.opts[0][0] == "-"] == []


def test_eval_names_the_order_of_its_arguments(quantized: Path) -> None:
    text = NANO.parent / "eval.txt"
    result = run("eval", quantized, NANO, "--text", text)
    assert "Pass the source first" in failure(result)
