"""The zoo on a GPU: compare fused, shared and replayed calls with plain ones.

``python -m zoo.on_gpu OUT.jsonl [--scheme S] [--dtype D] [--processes N] [NAME ...]`` with ``src``
and ``tests`` in ``PYTHONPATH``. Each architecture is called until its launches are replayed, with
other inputs in between, with other weights loaded in place, and in a CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.modules import fused_module
from fp8kit.runtime import replay_cache
from numerics import relative_error
from zoo import pool
from zoo.architecture import Architecture, tensors

CALLS = 4  # the third and later ones are replays
# a norm's sum that is rounded differently changes a code, which deeper layers amplify
LEAST, PART_OF_QUANTIZATION = 0.02, 0.5

Given = dict[str, Any]


def check(arch: Architecture, scheme: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Check an architecture; return its ``status`` and the error of each kind of call."""
    dense = arch.model(dtype)
    candidate = arch.runs(dense, dtype)
    dense.to(device)
    first = _moved(arch.given(dense, dtype, candidate), device)
    second = _changed(first)
    try:
        exact, changed = _called(dense, first), _called(dense, second)
        captured = _captured(dense, first)
    except Exception as error:
        return {"status": f"does not run on {device}", "why": str(error)[:200]}
    # a library may choose other kernels in a graph; codes amplify their different roundings
    pairs = ((first, exact), (second, changed))
    graph_is_sound = captured is not None and all(_error(captured(x), y) == 0 for x, y in pairs)
    if not fp8kit.plan(dense, scheme).report.converted:
        return {"status": "dense"}
    fp8kit.convert(dense, scheme)
    return _compared(dense, first, second, exact, graph_is_sound)


def _compared(
    model: nn.Module, first: Given, second: Given, exact: list[Tensor], captures: bool
) -> dict[str, Any]:
    with plainly(model):
        plain, changed = _called(model, first), _called(model, second)
    bound = max(LEAST, PART_OF_QUANTIZATION * _error(plain, exact))
    found = {"repeated": max(_error(_called(model, first), plain) for _ in range(CALLS))}
    found["another input"] = _error(_called(model, second), changed)
    found["the first again"] = _error(_called(model, first), plain)
    with torch.inference_mode():
        found["inference mode"] = _error(_called(model, first), plain)
    if captures and (graph := _captured(model, first)) is not None:
        found["captured"] = _error(graph(first), plain)
        found["captured, another input"] = _error(graph(second), changed)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    model.load_state_dict({name: _other_weight(t) for name, t in state.items()})
    loaded = _called(model, first)
    with plainly(model):
        found["loaded in place"] = _error(loaded, _called(model, first))
    wrong = [what for what, error in found.items() if not error <= bound]
    return {"status": f"wrong: {', '.join(wrong)}" if wrong else "passes", "bound": bound, **found}


@contextlib.contextmanager
def plainly(model: nn.Module) -> Iterator[None]:
    """Make every layer compute by itself: nothing is fused, joined or replayed."""
    layers = [m for m in model.modules() if isinstance(m, fp8kit.Fp8Linear)]
    shared = [layer.shared for layer in layers]
    devices = fused_module.FUSED_DEVICES, replay_cache.RECORDED_DEVICES
    fused_module.FUSED_DEVICES = replay_cache.RECORDED_DEVICES = ()
    replay_cache.forget_choices()
    for layer in layers:
        layer.shared = None
    try:
        yield
    finally:
        fused_module.FUSED_DEVICES, replay_cache.RECORDED_DEVICES = devices
        for layer, group in zip(layers, shared, strict=True):
            layer.shared = group


def _called(model: nn.Module, given: Given) -> list[Tensor]:
    torch.manual_seed(2)  # for models that draw noise
    with torch.no_grad():
        return _results(model, given)


def _results(model: nn.Module, given: Given) -> list[Tensor]:
    named = {name: value for name, value in given.items() if name}
    return list(tensors(model(*given.get("", ()), **named)))


def _captured(model: nn.Module, given: Given) -> Callable[[Given], list[Tensor]] | None:
    """Return a CUDA graph's replay, which copies its input first; ``None`` if capture fails."""
    if not any(p.is_cuda for p in model.parameters()):
        return None
    static = {name: v.clone() if isinstance(v, Tensor) else v for name, v in given.items()}
    graph = torch.cuda.CUDAGraph()
    try:
        for _ in range(2):
            _called(model, static)
        torch.cuda.synchronize()
        with torch.no_grad(), torch.cuda.graph(graph):
            results = _results(model, static)
    except (RuntimeError, ValueError):
        return None

    def replay(given: Given) -> list[Tensor]:
        for name, value in given.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        return [r.clone() for r in results]

    return replay


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of the tensors; NaN, over every bound, if one is NaN."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    pairs = [
        pair for pair in zip(found, expected, strict=True)
        if pair[0].is_floating_point() and pair[0].numel() and not torch.equal(*pair)
    ]  # fmt: skip
    errors = [relative_error(a.float(), b.float()) for a, b in pairs if not _same_gaps(a, b)]
    return max(errors, default=0.0, key=lambda e: float("inf") if e != e else e)


def _same_gaps(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal except where neither is finite."""
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(part, device) for part in value)
    return value


def _changed(given: Given) -> Given:
    """Return inputs with scaled floats and reversed tokens; other indices stay, to remain valid."""
    floats = {n: v for n, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()}
    ids = {n: given[n].flip(-1) for n in ("input_ids",) if isinstance(given.get(n), Tensor)}
    return given | {name: value * 0.75 for name, value in floats.items()} | ids


def _other_weight(held: Tensor) -> Tensor:
    if held.dtype == torch.float8_e4m3fn:
        return held.view(torch.uint8).flip(-1).contiguous().view(held.dtype)
    return held * 1.25 if held.is_floating_point() and held.dim() == 1 else held


def _work(task: tuple[str, str, str, str]) -> dict[str, Any]:
    name, scheme, dtype, device = task
    warnings.simplefilter("ignore")
    global _FOUND
    if not _FOUND:
        torch.set_num_threads(1)
        _FOUND = pool.architectures()
    try:
        record = check(_FOUND[name], scheme, getattr(torch, dtype), device)
    except Exception as error:
        record = {"status": "raises", "why": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"name": name, **record}


_FOUND: dict[str, Architecture] = {}


def main() -> None:
    """Run what the command line asks for; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="*", help="run only names that contain one of these")
    parser.add_argument("--scheme", default="FP8_DYNAMIC")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=16)
    given = parser.parse_intermixed_args()
    found = pool.architectures()
    names = [n for n in found if not given.names or any(w in n for w in given.names)]
    random.Random(0).shuffle(names)
    tasks = [(name, given.scheme, given.dtype, given.device) for name in names]
    counts: Counter[str] = Counter()
    # CUDA may have been initialized by a library, which forked processes do not survive
    with mp.get_context("spawn").Pool(given.processes) as workers, given.output.open("w") as out:
        for record in workers.imap_unordered(_work, tasks):
            out.write(json.dumps(record) + "\n")
            kind = record["status"].split(":")[0]
            counts[kind] += 1
            if kind in ("wrong", "raises"):
                print(record, flush=True)  # noqa: T201
    print(dict(counts))  # noqa: T201
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
