"""Check one architecture in all that a user does: plan, convert, run, save, load, run again."""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import fp8kit
from engines import disagreements
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.libraries import is_transformers
from numerics import EXPERTS_DIFFERENCE, matmul_bound, relative_error
from zoo.architecture import Architecture
from zoo.fake import operands
from zoo.fake_experts import FakeExperts, rounding

SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK", "FP8_TENSOR", "MXFP8")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CASES = tuple((scheme, dtype) for dtype in DTYPES for scheme in SCHEMES)
QUICK = (("FP8_DYNAMIC", "bf16"), ("FP8_BLOCK", "fp32"), ("MXFP8", "bf16"))
TARGETS = ("vllm", "transformers")

Cases = tuple[tuple[str, str], ...]
Dense = dict[str, tuple[Tensor, Tensor | None] | nn.Module]
Hook = Callable[[Any, Any, Any, Tensor], None]


def check(arch: Architecture, cases: Cases = CASES) -> dict[str, Any]:
    """Check one architecture; return a record for the page of the zoo, and never raise.

    Its ``status`` is ``"passes"``, ``"not built"`` (it cannot be run in high precision),
    ``"dense"`` (no layer becomes FP8, for reasons that are given), ``"refused"`` (it runs as it
    should, but cannot be saved in any case) or ``"fails"``.
    """
    started = time.perf_counter()
    record: dict[str, Any] = {"name": arch.name, "status": "passes", "cases": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _check(arch, cases, record)
        except _NotBuilt as error:
            record |= {"status": "not built", "why": str(error)}
        except Exception as error:
            record |= {"status": "fails", "why": _line(error)}
    record["seconds"] = round(time.perf_counter() - started, 1)
    return record


class _NotBuilt(Exception):
    pass


def _check(arch: Architecture, cases: Cases, record: dict[str, Any]) -> None:
    inputs = {}
    for dtype in dict.fromkeys(dtype for _, dtype in cases):
        try:
            model = arch.model(DTYPES[dtype])
            inputs[dtype] = arch.runs(model, DTYPES[dtype])
        except Exception as error:
            record["cases"] |= {
                f"{s} {d}": f"dense: {_line(error)}" for s, d in cases if d == dtype
            }
            why = _line(error)
    if not inputs:
        record["cases"] = {}
        raise _NotBuilt(why)
    record["class"] = type(model).__name__
    report = fp8kit.plan(model).report
    record |= {"converted": _gathered(map(_named, report.converted)), "kept": _kept(report)}
    record["layers"] = [len(report.converted), len(report.records)]
    if not report.converted:
        record["status"] = "dense"
        return
    for scheme, dtype in cases:
        if dtype in inputs:
            said = _case(arch, scheme, DTYPES[dtype], inputs[dtype])
            record["cases"][f"{scheme} {dtype}"] = said
            if not said.startswith(("passes", "refused")):
                record["status"] = "fails"
    ran = [said for said in record["cases"].values() if not said.startswith("dense")]
    if all(said.startswith("refused") for said in ran):
        record["status"] = "refused"


def _case(arch: Architecture, scheme: str, dtype: torch.dtype, candidate: int) -> str:
    stage = "convert"
    try:
        model = arch.model(dtype)
        dense = _dense_weights(model)
        fp8kit.convert(model, scheme)
        stage = "forward"
        run = functools.partial(arch.run, model, dtype, candidate)
        wrong, ran, compared = _compare_layers(model, dense, run)
        if wrong:
            return f"wrong: {'; '.join(wrong[:3])}"
        if not compared:
            return "wrong: no layer was compared: none ran on an input that is finite"
        never, blind = len(_fp8(model)) - len(ran), len(ran - compared)
        stage = "save"
        with tempfile.TemporaryDirectory() as folder:
            target, said = _save(model, Path(folder) / "fp8")
            if target:
                stage = "load"
                if is_transformers(
                    model
                ):  # as in a loaded model: FalconMamba then rounds differently
                    model.config._is_quantized = True
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    again = _load(arch, model, Path(folder) / "fp8", dtype)
                decoded = _decoded(model, again)
                if decoded and not any("were decoded" in str(w.message) for w in warned):
                    return "wrong: layers that were FP8 are not, and no warning says so"
                for name in decoded:
                    _decode(model, name)
                said += f", {len(decoded)} layers decoded when loaded" if decoded else ""
                expected = arch.run(model, dtype, candidate)
                stage = "second forward"
                found = arch.run(again, dtype, candidate)
                if not _same(found, expected):
                    # a model that reads unset memory may repeat its results by chance: run it often
                    repeats = all(
                        _same(arch.run(model, dtype, candidate), expected) for _ in range(5)
                    )
                    if repeats or not _same_state(model, again):
                        return "wrong: what was saved and loaded computes something else"
                    said += ", its results differ from call to call"
        unseen = f", {never} layers never ran" if never else ""
        unseen += f", {blind} layers were not compared" if blind else ""
        return f"passes{unseen}{said}" if target else f"refused{said}"
    except Exception as error:
        return f"{stage}: {_line(error)}"


def _dense_weights(model: nn.Module) -> Dense:
    found: Dense = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight, bias = (module._parameters.get(key) for key in ("weight", "bias"))
        if weight is not None and weight.dim() == 2:
            dense = weight.detach().clone()
            dense = dense.t() if type(module).__name__ == "Conv1D" else dense
            found[name] = dense, None if bias is None else bias.detach().clone()
        elif any(p is not None and p.dim() == 3 for p in module._parameters.values()):
            found[name] = copy.deepcopy(module)
    return found


def _compare_layers(
    model: nn.Module, dense: Dense, run: Callable[[], object]
) -> tuple[list[str], set[str], set[str]]:
    """Compare each FP8 layer with fake quantization of its own input.

    Returns the layers that are off, those that ran, and those that were compared; a layer whose
    input is empty or not finite is not compared.
    """
    wrong: list[str] = []
    ran: set[str] = set()
    compared: set[str] = set()

    def watch(name: str, module: nn.Module) -> Hook:
        kept = dense[name]
        if isinstance(kept, nn.Module):
            compare = _of_experts(module, kept)
        else:
            compare = _of_linear(module, *kept)

        def hook(_: Any, args: Any, kwargs: Any, y: Tensor) -> None:
            ran.add(name)
            said = compare(args, kwargs, y)
            if said is not None:
                compared.add(name)
            if said:
                wrong.append(f"{name} is off by {said}")

        return hook

    layers = _fp8(model)
    handles = [m.register_forward_hook(watch(n, m), with_kwargs=True) for n, m in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return wrong, ran, compared


Compare = Callable[[Any, Any, Tensor], str | None]  # how far off, or None: nothing to compare


def _of_linear(layer: Any, weight: Tensor, bias: Tensor | None) -> Compare:
    def compare(args: Any, kwargs: Any, y: Tensor) -> str | None:
        x = args[0] if args else kwargs["input"]
        if not x.isfinite().all() or not x.numel():
            return None
        x_q, w_q = operands(x, weight, layer.scheme.name)
        exact = x_q @ w_q.T + (0 if bias is None else bias.double())
        error = (y.reshape(exact.shape).double() - exact).norm(dim=1)
        bound = matmul_bound(x_q, w_q, bias, y.dtype, y.dtype)
        if y.shape[:-1] == x.shape[:-1] and (error <= bound).all():
            return ""
        return f"{(error / exact.norm(dim=1)).max().item():.1e}"

    return compare


def _of_experts(layer: Any, dense: nn.Module) -> Compare:
    fake = FakeExperts(dense, layer.stacks.names)

    def compare(args: Any, kwargs: Any, y: Tensor) -> str | None:
        x = args[0] if args else next(iter(kwargs.values()))
        if not x.isfinite().all() or not x.numel():
            return None
        apart = x.dtype if layer.stacks.activation is None else None
        exact = fake(args, kwargs, rounding(layer.scheme.name, apart))
        off = relative_error(y.reshape(exact.shape), exact)
        return "" if y.shape == x.shape and off < EXPERTS_DIFFERENCE else f"{off:.1e}"

    return compare


def _save(model: nn.Module, folder: Path) -> tuple[str, str]:
    """Save for the first target that can load the model; also return why others cannot."""
    said = ""
    for target in TARGETS:
        try:
            fp8kit.save(model, folder, target=target)
        except fp8kit.CheckpointError as error:
            said += f"; {target}: {_line(error)}"
        else:
            if target == "vllm" and (wrong := _misread(model, folder)):
                raise ValueError(f"vLLM would misread the config: {'; '.join(wrong[:3])}")
            return target, said
    return "", said


def _misread(model: nn.Module, folder: Path) -> list[str]:
    """Return the FP8 layers that vLLM would take for dense, and the dense ones it takes for FP8."""
    config = folder / "config.json"
    if not is_transformers(model) or not config.is_file():
        return []
    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    dense = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                name, _, last = key.rpartition(".")
                is_fp8 = last == "weight" and file.get_slice(key).get_dtype().startswith("F8")
                if is_fp8 or (last == "weight" and name in linear):
                    dense[name] = not is_fp8
    return disagreements(json.loads(config.read_text())["quantization_config"], dense)


def _load(arch: Architecture, model: nn.Module, folder: Path, dtype: torch.dtype) -> nn.Module:
    if is_transformers(model) and (folder / "config.json").is_file():
        try:
            found: nn.Module = fp8kit.load(folder)
        except fp8kit.CheckpointError as error:
            if "has no model class" not in str(error) and "cannot read config" not in str(error):
                raise
        else:
            return found.to(dtype)  # buffers too, which `from_pretrained` leaves in fp32
    return fp8kit.load(folder, arch.model(dtype)).eval()


def _fp8(model: nn.Module) -> dict[str, Any]:
    kinds = (fp8kit.Fp8Linear, ExpertTensors)
    return {name: m for name, m in model.named_modules() if isinstance(m, kinds)}


def _decoded(model: nn.Module, again: nn.Module) -> list[str]:
    """Return the FP8 layers of a model that are dense in the loaded model ``again``."""
    held = _fp8(again)
    return [name for name in _fp8(model) if name not in held]


def _decode(model: nn.Module, name: str) -> None:
    layer: Any = model.get_submodule(name)
    if isinstance(layer, ExpertTensors):
        layer.to_dense()
    else:
        model.set_submodule(name, layer.to_linear())


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(_equal, a, b))


def _same_state(model: nn.Module, again: nn.Module) -> bool:
    a, b = model.state_dict(), again.state_dict()
    return a.keys() == b.keys() and all(_equal(a[k].float(), b[k].float()) for k in a)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _kept(report: fp8kit.Report) -> dict[str, list[str]]:
    kept: dict[str, list[str]] = defaultdict(list)
    for record in report.skipped:
        kept[record.reason].append(record.name)
    return {reason: _gathered(names) for reason, names in kept.items()}


def _named(record: Any) -> str:
    return f"{record.name} ({record.experts} experts)" if record.experts else str(record.name)


def _gathered(names: Any) -> list[str]:
    """Replace the numbers in names by ``*``, so that repeated layers are one entry."""
    return list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name) for name in names))


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {said[:240]}"
