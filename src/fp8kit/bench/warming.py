"""Compile, and on request tune, everything a model will run, before its first request."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fp8kit.bench import tuning
from fp8kit.bench.operands import unique
from fp8kit.bench.timing import Timer, time_cases
from fp8kit.bench.tuning import Wish
from fp8kit.errors import teach
from fp8kit.modules.fused import FusedGatedMlp, FusedRMSNorm
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.shared import MOST_JOINED_ROWS, SharedInput, can_join


def warmup(
    model: nn.Module,
    m: Sequence[int] = (1, 16, 4096),
    *,
    tune: bool = False,
    timer: Timer = time_cases,
) -> int:
    """Run every distinct FP8 layer once per row count, so that no request waits for a compiler.

    Compiled kernels are kept on disk, and a power of two stands for all row counts below it down to
    the next, so ``m`` needs one value per size of batch that will come.

    Args:
        model: holds ``Fp8Linear`` layers, on the device where they will run.
        m: row counts (tokens) to expect.
        tune: first measure which backend is fastest for these layers, and keep the answer on disk.
        timer: how candidates are timed.

    Returns:
        How many distinct calls were made.

    Raises:
        ValueError: if there is no FP8 layer, it is on meta, or a row count is not positive.

    Example:
        >>> fp8kit.warmup(model, m=[1, 16, 4096])
    """
    layers = [mod for mod in model.modules() if isinstance(mod, Fp8Linear)]
    if not layers or any(layer.weight.is_meta for layer in layers):
        raise ValueError(
            teach(
                f"{type(model).__name__} holds {len(layers)} FP8 layers, or they are on meta.",
                "What shall run soon is warmed up where it will run.",
                "Convert or load the model onto its device first.",
            )
        )
    if min(m, default=0) < 1:
        raise ValueError(
            teach(
                f"Got m={list(m)}.", "Row counts are positive.", "Pass the sizes of your batches."
            )
        )
    if tune:
        tune_layers(layers, m, timer)
    done: set[object] = set()
    with torch.no_grad():
        for module in model.modules():
            for rows in m:
                key = (_kind(module), rows)
                if key[0] is not None and key not in done:
                    done.add(key)
                    _run(module, rows)
    for device in {layer.weight.device for layer in layers}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return len(done)


def layer_wishes(layers: Sequence[Fp8Linear], m: Sequence[int]) -> Iterator[Wish]:
    """Say what to tune for some layers: their shapes, and those of siblings that are joined.

    Args:
        layers: of one device.
        m: row counts to expect.
    """
    for scheme in dict.fromkeys(layer.scheme for layer in layers):
        for accum in dict.fromkeys(layer.accum for layer in layers if layer.scheme == scheme):
            alike = [mod for mod in layers if (mod.scheme, mod.accum) == (scheme, accum)]
            shapes = [(mod.out_features, mod.in_features) for mod in alike]
            yield Wish(unique(shapes), list(m), [scheme], accum)
            joined = [
                (sum(mod.out_features for mod in mod.shared.members), mod.in_features)
                for mod in alike
                if isinstance(mod.shared, SharedInput) and can_join(mod.shared.members)
            ]
            few = [rows for rows in m if rows <= MOST_JOINED_ROWS]
            if joined and few:
                yield Wish(unique(joined), few, [scheme], accum)


def tune_layers(layers: Sequence[Fp8Linear], m: Sequence[int], timer: Timer = time_cases) -> None:
    """Measure the candidates for some layers on the GPU that holds them, and keep the times.

    Args:
        layers: layers with weights.
        m: row counts to expect.
        timer: how candidates are timed.

    Raises:
        ValueError: if a layer is not on a CUDA device.
    """
    for device in {layer.weight.device for layer in layers}:
        if device.type != "cuda":
            raise ValueError(
                teach(
                    f"Got layers on {device} to tune.",
                    "Only CUDA devices have backends to choose among.",
                    "Move the model to a GPU, or leave tune out.",
                )
            )
        here = [layer for layer in layers if layer.weight.device == device]
        with torch.cuda.device(device):
            outcome = tuning.tune(layer_wishes(here, m), device, timer=timer)
        tuning.keep(outcome.table)
        for fault in outcome.faults:
            warnings.warn(f"Rejected while tuning: {fault}", stacklevel=3)


def _kind(module: nn.Module) -> object:
    """Give equal keys to modules whose kernels are the same, ``None`` to what runs no FP8."""
    if isinstance(module, Fp8Linear):
        alone = _layer_kind(module)
        if isinstance(module.shared, SharedInput):
            return ("group", *map(_layer_kind, module.shared.members))
        return alone
    if isinstance(module, FusedRMSNorm):
        size, members = tuple(module.weight.shape), module.group.members
        return ("norm", size, module.gemma, module.weight.dtype, *map(_layer_kind, members))
    if isinstance(module, FusedGatedMlp) and isinstance(module.down_proj, Fp8Linear):
        return ("mlp", module.kind, _layer_kind(module.down_proj))
    return None


def _layer_kind(layer: Fp8Linear) -> tuple[object, ...]:
    bias = None if layer.bias is None else layer.bias.dtype
    options = (layer.accum, layer.batch_invariant, layer.compute_dtype, bias)
    return (layer.scheme, tuple(layer.weight.shape), layer.weight.device, *options)


def _run(module: nn.Module, rows: int) -> None:
    if isinstance(module, FusedGatedMlp):
        assert isinstance(module.gate_proj, nn.Linear)
        module(_input(module.gate_proj, rows))
    elif isinstance(module, FusedRMSNorm):
        normed = module(_input(module.group.members[0], rows).to(module.weight.dtype))
        for member in module.group.members:
            module.group(member, normed)
    elif isinstance(module, Fp8Linear):
        x = _input(module, rows)
        if isinstance(module.shared, SharedInput):
            for member in module.shared.members:
                module.shared(member, x)
        else:
            module.compute(x, module.weight, module.weight_scale, module.bias)


def _input(layer: nn.Linear, rows: int) -> Tensor:
    dtype = layer.compute_dtype if isinstance(layer, Fp8Linear) else layer.weight.dtype
    return torch.randn(rows, layer.in_features, device=layer.weight.device, dtype=dtype)
