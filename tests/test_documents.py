"""Every snippet of the README and the documents runs verbatim, in order.

The Python blocks of a document share variables, but no imports: each block brings its own. In bash
blocks the lines that call ``fp8kit`` run. Without a GPU, the lines of a block after
``# needs a GPU`` are only compiled, or parsed with their options.
"""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import fp8kit
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.cli.main import main

ROOT = Path(__file__).parents[1]
NANO = ROOT / "examples" / "nano"
OPTIONAL = {"accelerate", "diffusers", "peft", "ray", "transformers"}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
GPU = "# needs a GPU"
_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A snippet: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int

    @property
    def here(self) -> str:
        """Return the part that runs on this machine."""
        return self.text if torch.cuda.is_available() else self.text.partition(GPU)[0]


def blocks(text: str) -> list[Block]:
    return [
        Block(m[2], textwrap.dedent(m[3]), text.count("\n", 0, m.start(3)) + 1)
        for m in _FENCE.finditer(text)
    ]


def imported(tree: ast.Module) -> set[str]:
    """Return the names that the import statements of a block bind."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(a.asname or a.name).split(".")[0] for node in found for a in node.names}


def libraries(text: str) -> set[str]:
    """Return the optional libraries that Python blocks import."""
    found = {b.text for b in blocks(text) if b.language == "python"}
    lines = re.findall(r"^ *(?:import|from) (\w+)", "\n".join(found), re.MULTILINE)
    return OPTIONAL & set(lines)


def run_python(text: str, names: dict[str, Any], place: str = "a document") -> None:
    """Run the Python blocks of a document, each with the variables of those before it."""
    for block in blocks(text):
        if block.language != "python":
            continue
        where = "\n" * (block.line - 1)  # errors name the line of the document
        compile(where + block.text, place, "exec")
        tree = ast.parse(where + block.here)
        exec(compile(tree, place, "exec"), names)
        for name in imported(tree):
            names.pop(name, None)


def run_bash(text: str) -> list[list[str]]:
    """Run the calls of ``fp8kit`` in a document's bash blocks; return the words of all lines."""
    found = []
    for block in blocks(text):
        if block.language != "bash":
            continue
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for number, line in enumerate(block.text.splitlines()):
            words = shlex.split(line, comments=True)
            if not words:
                continue
            found.append(words)
            if words[0] == "fp8kit":
                _call(words[1:], line, number < len(block.here.splitlines()))
    return found


def _call(arguments: list[str], line: str, here: bool) -> None:
    if arguments[0] in ("quantize", "convert-checkpoint"):  # lines are alternatives
        shutil.rmtree(arguments[2], ignore_errors=True)
    result = CliRunner().invoke(main, arguments)
    if here:
        assert result.exit_code == 0, f"{line}\n{result.output}"
    else:  # all that stops it is the machine: its options are known and have values that fit
        assert "finds 0 cuda devices here" in result.output, f"{line}\n{result.output}"


class MyModel(nn.Module):
    """A module of the reader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)


def _readme(_: dict[str, Any]) -> None:
    shutil.copytree(NANO, "SRC")


def _streaming(_: dict[str, Any]) -> None:
    shutil.copytree(NANO, "SRC")


def _checkpoints(_: dict[str, Any]) -> None:
    from diffusers import FluxTransformer2DModel

    fp8kit.quantize_checkpoint(NANO, "SRC", "FP8_TENSOR")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 128, "in_channels": 64}
    depth = {"num_layers": 1, "num_single_layers": 1}
    widths = {"joint_attention_dim": 256, "pooled_projection_dim": 256}
    flux = FluxTransformer2DModel(**sizes, **depth, **widths, axes_dims_rope=(32, 48, 48))
    flux.save_config("flux-bf16")
    fp8kit.convert(flux.to(torch.bfloat16))
    fp8kit.save(flux, "flux-fp8")


def _loading(names: dict[str, Any]) -> None:
    trained = MyModel()
    state = trained.state_dict()
    layout = {n: (t.dtype, tuple(t.shape)) for n, t in state.items()}
    write_checkpoint("bf16-dir", layout, state.items(), config={})
    names.update(MyModel=MyModel, training=range(2), trainer=trained)
    tensors = list(load_file(NANO / "model.safetensors").items())
    names["buckets"] = [tensors[:10], tensors[10:]]


# what the text around the snippets speaks of
READERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "README.md": _readme,
    "docs/serving.md": _streaming,
    "docs/streaming.md": _streaming,
    "docs/checkpoints.md": _checkpoints,
    "docs/loading.md": _loading,
}


def place(path: Path) -> str:
    """Return the path of a document in the project."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", DOCUMENTS, ids=place)
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text()
    if not blocks(text):
        return
    for library in sorted(libraries(text)):
        pytest.importorskip(library, reason=f"{library} is not installed, which {path.name} uses")
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    names: dict[str, Any] = {}
    READERS.get(place(path), lambda _: None)(names)
    run_python(text, names, place(path))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for words in run_bash(text):
        if words[0] == "make":
            assert words[1] in targets
        elif words[:2] == ["pip", "install"] and words[2].startswith("fp8kit["):
            extras = words[2].removeprefix("fp8kit[").rstrip("]").split(",")
            assert set(extras) <= set(project["optional-dependencies"])
        else:
            assert words[0] == "fp8kit" or "=" in words[0], f"nobody runs {words}"


def test_every_snippet_is_found() -> None:
    """Fences of another form would hide their snippets from the test."""
    for path in DOCUMENTS:
        marks = re.findall(r"^ *```\w+$", path.read_text(), re.MULTILINE)
        assert len(marks) == len(blocks(path.read_text())), place(path)
        assert {b.language for b in blocks(path.read_text())} <= {"python", "bash"}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import math\n```\n```python\nmath.pi", NameError),  # of another block
        ("x = 1 +", SyntaxError),
        ("import fp8kit\nfp8kit.gone", AttributeError),
        (f"{GPU}\nx = 1 +", SyntaxError),
    ],
)
def test_a_python_snippet_can_fail(text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run_python(f"```python\n{text}\n```\n", {})


@pytest.mark.parametrize(
    "line", ["fp8kit inspect nowhere", "fp8kit env --gone", f"{GPU}\nfp8kit tune --shape 1x1"]
)
def test_a_bash_snippet_can_fail(line: str, faked_cuda: Callable[..., None]) -> None:
    faked_cuda(0)
    with pytest.raises(AssertionError):
        run_bash(f"```bash\n{line}\n```\n")


def unmerged(text: str) -> list[str]:
    """Return the lines with conflict marks of a merge."""
    return re.findall(r"^(?:<{7}|>{7}).*$", text, re.MULTILINE)


def test_documents_are_merged() -> None:
    assert unmerged("one\n<<<<<<< HEAD\ntwo\n>>>>>>> other\n")
    assert not [line for path in DOCUMENTS for line in unmerged(path.read_text())]


def test_libraries_of_snippets_are_found() -> None:
    text = "```python\nimport diffusers\nfrom peft.tuners import lora\n```\nimport ray\n"
    assert libraries(text) == {"diffusers", "peft"}
    assert libraries((ROOT / "docs/diffusers.md").read_text()) >= {"diffusers"}
    assert not libraries((ROOT / "docs/numerics.md").read_text())


def test_blocks_in_lists_are_found() -> None:
    text = "- one\n\n  ```python\n  if True:\n      x = 1\n  ```\n"
    assert blocks(text) == [Block("python", "if True:\n    x = 1\n", 4)]
