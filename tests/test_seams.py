"""Tests use public names: patches and reads of private names are limited, and have reasons."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "fp8kit"
PATCHES, PRIVATE_READS = 60, 30
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# attributes of torch, which the package sets or reads, too
OF_TORCH = {
    "_apply",
    "_load_from_state_dict",
    "_parameters",
    "_replicate_for_data_parallel",
    "_version",
}
# why a test reads each private name
REASONS = {
    "_EMPTY": "memory of recordings is poisoned, too, which torch does not",
    "_KEPT": "bytes that stay in the cache: an interpreter gets through fewer than a GPU",
    "_KINDS": "the variants of a source, each of which is compiled",
    "_LEAST": "a tensor must be large enough to be prefetched",
    "_Clock": "starts that come too late are timed again, which no result tells",
    "_OWN": "attributes that fused modules keep to themselves must be on the list",
    "_bar": "bytes of progress, which a terminal shows rounded",
    "_capture": "how many calls a graph has, which no result tells",
    "_current_stream": "a second stream where there is no GPU",
    "_with_most_stages": "a cache that must not decide",
    "_direct": "launches by the bindings, without Triton's compiler",
    "_empty": "where results of a recording lie",
    "_fp8_weight": "read by users of the library that `compat` stands for",
    "_fp8_weight_scale": "read by users of the library that `compat` stands for",
    "_in_shell_words": "one rule for every message, tried on many",
    "_joined": "where joined weights lie",
    "_kernel": "a cache of kernels that were compiled without their wait",
    "_left": "a trace leaves nothing behind",
    "_limits": "a device on which power limits the clock",
    "_product": "a process looks for the library once",
    "_replays": "whether an attention repeats its launches, which no result tells",
    "_rows_kernel": "what was watched is left as it was",
    "_patched": "another test may have patched the libraries",
    "_watch_capture": "a graph that is captured where there is no GPU",
}


@functools.cache
def private_names() -> frozenset[str]:
    """Return the private names that the package defines."""
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return frozenset(name for name in names - OF_TORCH if PRIVATE.fullmatch(name))


def called(function: ast.expr) -> str:
    """Return the last name of the called function."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def private_reads(tree: ast.Module) -> list[str]:
    """Return the package's private names that a test reads, imports or patches by name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls") and not owner.startswith("torch"):
                found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("fp8kit"):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and called(node.func).endswith(("setattr", "getattr")):
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            found += [t.rpartition(".")[2] for t in texts if isinstance(t, str)]
    return [name for name in found if name in private_names()]


def patches(text: str) -> int:
    """Count the places where a test replaces an attribute."""
    return len(re.findall(r"\.setattr\(", text))


def unexplained(names: Iterable[str]) -> list[str]:
    """Return the names that no line of ``REASONS`` explains."""
    return sorted(set(names) - set(REASONS))


def texts() -> dict[Path, str]:
    return {path: path.read_text() for path in TESTS.rglob("*.py") if path != Path(__file__)}


def test_tests_patch_little() -> None:
    assert sum(map(patches, texts().values())) <= PATCHES


def test_tests_read_few_private_names_and_each_for_a_reason() -> None:
    words = {text: set(re.findall(r"\w+", text)) for text in texts().values()}
    few = [text for text, said in words.items() if said & private_names()]
    found = [name for text in few for name in private_reads(ast.parse(text))]
    assert unexplained(found) == []
    assert set(REASONS) <= set(found), "a reason for what nobody reads any more"
    assert len(found) <= PRIVATE_READS


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("group._joins()", ["_joins"]),
        ("from fp8kit.cli.main import _in_shell_words, main", ["_in_shell_words"]),
        ("patch.setattr(timing, '_capture', f)", ["_capture"]),
        ("patch.setattr('fp8kit.perf.timing._capture', f)", ["_capture"]),
        ("torch._dynamo.reset()\nlayer._parameters\nself._joins()\n'_joins'", []),
    ],
)
def test_the_search_for_private_names_can_fail(code: str, names: list[str]) -> None:
    assert private_reads(ast.parse(code)) == names
    assert unexplained(["_a_new_one"]) == ["_a_new_one"]


def test_the_count_of_patches_can_fail() -> None:
    assert patches("patch.setattr(a, 'b', c)\npatched.setattr(a, 'b', c)\nsetattr(a, b)") == 2
