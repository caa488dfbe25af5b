"""All routes to a checkpoint for Transformers, each judged by Transformers' own loader.

``python -m zoo.routes [SCHEME [NAME ...]]`` goes over all architectures of Transformers.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

import fp8kit
from fp8kit.formats import FP8_FORMATS
from numerics import relative_error
from zoo.architecture import Architecture

ROUTES = ("save", "save_pretrained", "quantize", "quantize-convert", "save-convert")
# Transformers decodes (code times scale) in bf16, this package in fp32: half a unit in the last
# place of bf16, twice
ROUNDED = 2**-8


def routes(arch: Architecture, scheme: str, wanted: Iterable[str] = ROUTES) -> dict[str, str]:
    """Return by route ``"loads"``, ``"refused: ..."`` or what is wrong with its checkpoint."""
    dense = arch.model(torch.bfloat16)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        dense.save_pretrained(folder / "dense")
        kind: Any = type(dense)
        model, before = kind.from_pretrained(
            folder / "dense", dtype=torch.bfloat16, output_loading_info=True
        )
        return {way: _said(way, folder, model, before, scheme) for way in wanted}


def _said(way: str, folder: Path, model: Any, before: Any, scheme: str) -> str:
    try:
        _WAYS[way](folder, model, scheme)
    except (fp8kit.CheckpointError, fp8kit.ConversionError, fp8kit.UnsupportedError) as error:
        return f"refused: {str(error)[:300]}"
    except Exception as error:
        return f"{way} raised {type(error).__name__}: {error}"
    try:
        return judged(folder / way, type(model), before) or "loads"
    except Exception as error:
        return f"Transformers raised {type(error).__name__}: {str(error)[:300]}"


def judged(folder: Path, kind: Any, before: Any) -> str:
    """Return complaints of Transformers' loader about a checkpoint, and values that differ."""
    theirs, info = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if odd := {str(k) for k in info[key]} - {str(k) for k in before[key]}:
            return f"{len(odd)} {key}: {', '.join(sorted(odd)[:3])}"
    ours = fp8kit.load(folder)
    ours.dequantize()
    held, wanted = _numbers(theirs), _numbers(ours)
    if odd := held.keys() ^ wanted.keys():
        return f"tensors differ: {sorted(odd)[:3]}"
    far = [n for n in wanted if not _close(held[n], wanted[n])]
    return f"{len(far)} tensors have other values: {', '.join(far[:3])}" if far else ""


def _close(theirs: Tensor, ours: Tensor) -> bool:
    same = torch.equal(theirs, ours) or not theirs.numel()
    return same or (theirs.shape == ours.shape and relative_error(theirs, ours) < ROUNDED)


def _numbers(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    scales = {n for n in state if n.endswith("_scale") and n.removesuffix("_scale") in state}
    found = {}
    for name, tensor in state.items():
        if name in scales or (name.endswith("_scale") and tensor.numel() == 1):
            continue
        if tensor.dtype in FP8_FORMATS:
            tensor = tensor.float() * state[f"{name}_scale"].float()
        found[name] = tensor.float() if tensor.is_floating_point() else tensor
    return found


def _save(folder: Path, model: Any, scheme: str) -> None:
    _convert(folder, model, scheme)
    fp8kit.save(model, folder / "save", target="transformers")


def _save_pretrained(folder: Path, model: Any, scheme: str) -> None:
    _convert(folder, model, scheme)
    model.save_pretrained(folder / "save_pretrained")


def _convert(folder: Path, model: Any, scheme: str) -> None:
    if not any(isinstance(m, fp8kit.Fp8Linear) for m in model.modules()):
        report = fp8kit.convert(model, scheme)
        if not report.converted:
            raise fp8kit.ConversionError("nothing to convert")


def _quantize(folder: Path, model: Any, scheme: str) -> None:
    recipe = fp8kit.Recipe(scheme, target="transformers")
    fp8kit.quantize_checkpoint(folder / "dense", folder / "quantize", recipe)


def _quantize_convert(folder: Path, model: Any, scheme: str) -> None:
    fp8kit.quantize_checkpoint(folder / "dense", folder / "vllm", fp8kit.Recipe(scheme))
    fp8kit.convert_checkpoint(folder / "vllm", folder / "quantize-convert", target="transformers")


def _save_convert(folder: Path, model: Any, scheme: str) -> None:
    _convert(folder, model, scheme)
    fp8kit.save(model, folder / "engine")
    fp8kit.convert_checkpoint(folder / "engine", folder / "save-convert", target="transformers")


_DOORS = (_save, _save_pretrained, _quantize, _quantize_convert, _save_convert)
_WAYS: dict[str, Callable[[Path, Any, str], None]] = dict(zip(ROUTES, _DOORS, strict=True))


def main(scheme: str = "FP8_DYNAMIC", *names: str) -> int:
    """Print what is wrong, and counts of the rest."""
    from zoo import of_transformers

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    counts: Counter[str] = Counter()
    for arch in of_transformers.architectures():
        if names and not any(arch.name.endswith(f"/{n}") for n in names):
            continue
        try:
            found = routes(arch, scheme)
        except Exception as error:
            found = {"dense": f"not built: {type(error).__name__}"}
        for way, said in found.items():
            kind = said.partition(":")[0] if said.startswith(("refused", "not built")) else said
            counts[f"{way} {kind if kind in ('loads', 'refused', 'not built') else 'fails'}"] += 1
            if said != "loads":
                sys.stdout.write(f"{arch.name} {way} {said[:300]!r}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}\n")
    return sum(n for kind, n in counts.items() if kind.endswith("fails"))


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))
