"""Every script under examples runs as its head says, on the small model that comes with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def test_lora_finetune(run_script: Callable[..., str]) -> None:
    said = run_script(FOLDER / "lora_finetune.py", "--steps", "4")
    assert "trainable params: 155,648" in said
    assert "step    3  loss" in said
    assert "merged:   56 tensors of the base differ" in said  # codes and scales of 28 layers
    assert "unmerged: 0 tensors of the base differ" in said


def test_chat(run_script: Callable[..., str]) -> None:
    typed = "def main(\nimport \n\nnever read\n"
    said = run_script(FOLDER / "chat.py", "--tokens", "6", typed=typed)
    assert "28 layers converted" in said
    assert len(said.splitlines()) >= 3


def test_checkpoint_for_vllm(tmp_path: Path, run_script: Callable[..., str]) -> None:
    source, destination = str(FOLDER / "nano"), str(tmp_path / "an fp8 model")
    script = FOLDER / "checkpoint_for_vllm.py"
    said = run_script(script, source, destination)
    assert "28 layers" in said
    assert f"vllm serve '{destination}'" in said
    assert (tmp_path / "an fp8 model" / "model.safetensors").is_file()


def test_train_experts(tmp_path: Path, run_script: Callable[..., str]) -> None:
    said = run_script(FOLDER / "train_experts.py", str(tmp_path), "2")
    assert said.startswith("0 5.")  # an untrained model's loss on bytes: log 256 is 5.5
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "training.json"}


def test_every_example_is_run_by_a_test() -> None:
    tests = FOLDER.parent / "tests"
    said = " ".join(path.read_text() for path in tests.rglob("*.py"))
    by_make = {"demo.py"}
    scripts = {path.name for path in FOLDER.glob("*.py")} - by_make
    assert [name for name in scripts if f'"{name}"' not in said] == []
