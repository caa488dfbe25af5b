"""Compile, record, and on request tune what a model will run, before its first request."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.errors import InvalidType, InvalidValue, check_switch
from fp8kit.modules.decoder_layer import ResidualForward
from fp8kit.modules.diffusers_producers import FusedAdaptiveNorm, FusedFeedForward
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.fused_producers import FusedActivation, FusedGatedMlp, FusedNorm, Producer
from fp8kit.modules.fused_router import RouterForward
from fp8kit.modules.joining import MOST_JOINED_ROWS, can_join
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.own_forward import own_forward
from fp8kit.modules.rotary import RotaryForward
from fp8kit.modules.shared_input import SharedInput
from fp8kit.ops.validation import check_row_counts
from fp8kit.perf import tune as tuning
from fp8kit.perf.row_counts import layer_counts
from fp8kit.perf.timing import Timer, time_cases
from fp8kit.perf.tune import Wish
from fp8kit.perf.warmup_experts import calls_of_experts, record_experts
from fp8kit.runtime import replay_cache
from fp8kit.runtime.compile_ahead import collecting

MOST_SEQUENCES = 256  # row counts up to this one may be sequences that decode, one token each


def warmup(
    model: nn.Module,
    m: int | Sequence[int] = (1, 16, 4096),
    *,
    tune: bool = False,
    timer: Timer = time_cases,
) -> int:
    """Run every distinct FP8 layer once per row count, so that no request waits for a compiler.

    Compiled kernels are kept on disk, those in CUDA C++ are compiled side by side, and a power of
    two stands for all row counts below it down to the next, so ``m`` needs one value per size of
    batch that will come. Where a kernel is cut in several ways for these, layers run each of them.

    On a GPU every layer then records its launches (see ``runtime.replay_cache``) for exactly these
    row counts: for one prompt of ``m`` tokens, and for ``m`` sequences of one token up to 256.

    Experts run with as many experts per token as the first of these says: ``top_k`` of a
    ``routing`` that is a ``functools.partial``; ``top_k`` or ``num_experts_per_tok`` of the module,
    of the block that holds it, or of the router beside it; ``num_experts_per_tok`` of a config of
    these or of the model. Where nothing says it, they run with 1, 2, 4 and 8.

    Args:
        model: holds ``Fp8Linear`` layers or FP8 experts, on the device where they will run.
        m: row count (tokens) to expect, or several.
        tune: first measure which backend is fastest for these layers, and keep the answer on disk;
            backends of experts are not measured.
        timer: how candidates are timed.

    Returns:
        How many distinct calls were made.

    Raises:
        TypeError: if ``model`` is no module, or a row count no integer.
        ValueError: if there is no FP8 layer, it is on meta, or a row count is not positive.

    Example:
        >>> fp8kit.warmup(model, m=[1, 16, 4096])
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"Got a {type(model).__name__} as the model.",
            "warmup takes a module with FP8 layers, on the device where it will run.",
            "Load a checkpoint with fp8kit.load(directory, device='cuda') first.",
        )
    layers = [mod for mod in model.modules() if isinstance(mod, Fp8Linear)]
    experts = [mod for mod in model.modules() if isinstance(mod, ExpertTensors)]
    held = [layer.codes for layer in layers] + [mod.codes(mod.stacks.down) for mod in experts]
    if not held or any(codes.is_meta for codes in held):
        raise InvalidValue(
            f"{type(model).__name__} holds {len(held)} FP8 layers, or they are on meta.",
            "Layers are warmed up where they will run.",
            "Convert or load the model onto its device first.",
        )
    m = check_row_counts(m)
    check_switch("tune", tune)
    if tune:
        tune_layers(layers, m, timer)
    with torch.no_grad():
        calls = [*_calls(model, m), *calls_of_experts(model, m)]
        if any(codes.is_cuda for codes in held):
            with collecting():
                for call in calls:
                    call()
        for call in calls:
            call()
        _record(model, m)
        record_experts(model, m)
    for device in {codes.device for codes in held}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return len(calls)


def _calls(model: nn.Module, m: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Give a call for every distinct module and number of rows."""
    done = set[object]()
    for module in model.modules():
        kind = _kind(module)
        if kind is None or kind in done:
            continue
        done.add(kind)
        for rows in dict.fromkeys(count for most in m for count in _row_counts(module, most)):
            yield functools.partial(_run, module, (1, rows))


def layer_wishes(layers: Sequence[Fp8Linear], m: Sequence[int]) -> Iterator[Wish]:
    """Return what to tune for some layers: their shapes, and those of siblings that are joined."""
    for scheme in dict.fromkeys(layer.scheme for layer in layers):
        for accum in dict.fromkeys(layer.accum for layer in layers if layer.scheme == scheme):
            alike = [mod for mod in layers if (mod.scheme, mod.accum) == (scheme, accum)]
            alone = [(mod.out_features, mod.in_features) for mod in alike]
            joined = [
                (sum(mod.out_features for mod in mod.shared.members), mod.in_features)
                for mod in alike
                if isinstance(mod.shared, SharedInput) and can_join(mod.shared.members)
            ]
            yield from tuning.wishes_of(alone, joined, list(m), scheme, accum)


def tune_layers(layers: Sequence[Fp8Linear], m: Sequence[int], timer: Timer = time_cases) -> None:
    """Measure the candidates for some layers on the GPU that holds them, and keep the times.

    Raises ``ValueError`` if a layer is not on a CUDA device.
    """
    for device in {layer.weight.device for layer in layers}:
        if device.type != "cuda":
            raise InvalidValue(
                f"Got layers on {device} to tune.",
                "Only CUDA devices have backends to choose among.",
                "Move the model to a GPU, or leave tune out.",
            )
        here = [layer for layer in layers if layer.weight.device == device]
        with torch.cuda.device(device):
            outcome = tuning.tune(layer_wishes(here, m), device, timer=timer, store=tuning.keep)
        for fault in outcome.faults:
            warnings.warn(f"Rejected while tuning: {fault}", stacklevel=3)


def _row_counts(module: nn.Module, rows: int) -> list[int]:
    """Add to a row count those of its power of two for which kernels are cut otherwise."""
    if not isinstance(module, Fp8Linear):
        return [rows]
    problems = [module.problem(rows)]
    if isinstance(module.shared, SharedInput):
        members = module.shared.members
        problems = [member.problem(rows) for member in members]
        if rows <= MOST_JOINED_ROWS and can_join(members):
            problems = [replace(problems[0], n=sum(problem.n for problem in problems))]
    return layer_counts(problems, rows, module.weight.device)


def _kind(module: nn.Module) -> object:
    """Return a key equal for modules of the same kernels, ``None`` for what runs no FP8."""
    if isinstance(module, Fp8Linear):
        alone = _layer_kind(module)
        if isinstance(module.shared, SharedInput):
            return ("group", *map(_layer_kind, module.shared.members))
        return alone
    if heads := _heads(module):
        fp8 = all(isinstance(layer, Fp8Linear) for layer in heads)
        return ("rotary", type(module), *map(_layer_kind, heads)) if fp8 else None
    if (own := own_forward(module)) is not None:
        weight = module.get_parameter("weight")
        return (type(own), own.formula, weight.shape, weight.dtype, weight.device)
    if isinstance(module, Producer):
        members = module.consumers.group.members
        return (*_producer_kind(module), *map(_layer_kind, members))
    if (halves := _second_half(module)) is not None:
        kinds = tuple(map(_kind, halves))
        return None if None in kinds else ("decoder layer", *kinds)
    if isinstance(module, FusedGatedMlp | FusedFeedForward) and module.is_converted():
        first, down = _projections(module)
        gated = isinstance(module, FusedGatedMlp) or module.gated
        shape = (first.in_features, first.out_features, first.weight.dtype)
        return ("mlp", module.kind, gated, shape, _layer_kind(down))
    return None


def _second_half(module: nn.Module) -> tuple[FusedNorm, FusedGatedMlp] | None:
    """Give norm and feed-forward of a decoder layer that computes both in one call."""
    forward = vars(module).get("forward")
    if not isinstance(forward, ResidualForward):
        return None
    norm, mlp = module._modules[forward.flow.before_mlp], module._modules["mlp"]
    if not (isinstance(norm, FusedNorm) and isinstance(mlp, FusedGatedMlp)):
        return None
    return (norm, mlp) if mlp.is_converted() else None


def _producer_kind(module: Producer) -> tuple[object, ...]:
    if isinstance(module, FusedActivation):
        return ("activation", module.kind, module.gated, module.concatenated)
    assert isinstance(module, FusedNorm | FusedAdaptiveNorm)
    tensors = (module._parameters.get("weight"), module._parameters.get("bias"))
    weights = tuple(None if t is None else t.dtype for t in tensors)
    return (type(module), module.formula, *weights)


def _device(module: nn.Module) -> torch.device:
    """Return where a module with a kind runs."""
    if isinstance(module, FusedGatedMlp | FusedFeedForward):
        return _projections(module)[1].weight.device
    if heads := _heads(module):
        weight: Tensor = heads[0].weight
        return weight.device
    if (halves := _second_half(module)) is not None:
        return _device(halves[0])
    layer = module.consumers.group.members[0] if isinstance(module, Producer) else module
    return layer.get_parameter("weight").device


def _projections(module: FusedGatedMlp | FusedFeedForward) -> tuple[nn.Linear, Fp8Linear]:
    """Give the layer that reads the input of a feed-forward, and the one that gives its result."""
    gated = isinstance(module, FusedGatedMlp)
    names = ("gate_proj", "down_proj") if gated else ("net.0.proj", "net.2")
    first, down = (module.get_submodule(name) for name in names)
    assert isinstance(first, nn.Linear)
    assert isinstance(down, Fp8Linear)
    return first, down


def _heads(module: nn.Module) -> list[Any]:
    """Give the layers that make queries, keys and values of an attention; none of other modules."""
    rotates = isinstance(vars(module).get("forward"), RotaryForward)
    found = [module._modules.get(f"{name}_proj") for name in "qkv"]
    known = rotates and type(getattr(module, "head_dim", None)) is int and None not in found
    return found if known else []


def _layer_kind(layer: Fp8Linear) -> tuple[object, ...]:
    bias = None if layer.bias is None else layer.bias.dtype
    options = (layer.accum, layer.batch_invariant, layer.compute_dtype, bias)
    return (layer.scheme, tuple(layer.weight.shape), layer.weight.device, *options)


def _record(model: nn.Module, m: Sequence[int]) -> None:
    """Run every module twice in the shapes in which a model calls it: the second call records."""
    runs_with_another = set[int]()
    for module in model.modules():
        if isinstance(module, Producer):
            runs_with_another |= {id(member) for member in module.consumers.group.members}
        elif isinstance(module, Fp8Linear) and isinstance(module.shared, SharedInput):
            runs_with_another |= {id(member) for member in module.shared.members[1:]}
    for module in model.modules():
        if id(module) in runs_with_another or _kind(module) is None:
            continue
        if _device(module).type not in replay_cache.RECORDED_DEVICES:
            continue
        for rows in m:
            prompt, batch = (1, rows), (rows, 1)
            for lead in {prompt, batch} if rows <= MOST_SEQUENCES else {prompt}:
                _run(module, lead)
                _run(module, lead)


def _run(module: nn.Module, lead: tuple[int, int]) -> None:
    """Run a module on an input ``[*lead, K]``."""
    if isinstance(module, FusedGatedMlp | FusedFeedForward):
        module(_input(_projections(module)[0], lead))
    elif heads := _heads(module):
        _run_rotary(module, heads, lead)
    elif (own := own_forward(module)) is not None:
        weight = module.get_parameter("weight")
        x = torch.randn(*lead, weight.shape[-1], device=weight.device, dtype=weight.dtype)
        if isinstance(own, RouterForward):
            x = x.flatten(0, 1)  # as blocks hand it to routers
        given = isinstance(own, RouterForward) and own.formula.correction == "given"
        module(x, *([x.new_zeros(weight.shape[0])] if given else []))
    elif (halves := _second_half(module)) is not None:
        x = _input(halves[0].consumers.group.first, lead).to(halves[0].weight.dtype)
        vars(module)["forward"].flow.feed_forward(module, x, torch.zeros_like(x))
    elif isinstance(module, FusedActivation):
        _run_activation(module, lead)
    elif isinstance(module, Producer):
        group = module.consumers.group
        for result in _produced(module, _input(group.members[0], lead)):
            for member in group.members:
                group(member, result)
    elif isinstance(module, Fp8Linear):
        x = _input(module, lead)
        if isinstance(module.shared, SharedInput):
            for member in module.shared.members:
                module.shared(member, x)
        else:
            module.compute(x)


def _run_activation(module: FusedActivation, lead: tuple[int, int]) -> None:
    """Activate, and multiply by the layers that read the result."""
    layer = module.consumers.group.first
    x, columns = _input(layer, lead), layer.out_features if module.concatenated else 0
    left, gate = x[..., :columns], x[..., columns:]
    for member in module.consumers.group.members:
        result = module(torch.cat((gate, gate), -1) if module.gated else gate)
        member.forward(torch.cat((left, result), -1) if module.concatenated else result)


def _run_rotary(module: nn.Module, layers: Sequence[Any], lead: tuple[int, int]) -> None:
    """Rotate heads in the strides of their products, with the same angles for all, and with own."""
    attention: Any = module
    x, width = _input(layers[0], lead), attention.head_dim
    results = [layer(x).unflatten(-1, (-1, width)) for layer in layers]
    for i, name in enumerate(("q_norm", "k_norm")):
        norm = module._modules.get(name)
        if norm is not None and norm.get_parameter("weight").shape == (width,):
            results[i] = norm(results[i])
    q, k, _ = (heads.transpose(1, 2) for heads in results)
    for rows in {1, lead[0]}:
        angles = x.new_zeros(2, rows, lead[1], width)
        attention.forward.rotate(q, k, *angles)


def _produced(module: Producer, x: Tensor) -> Iterator[Tensor]:
    """Run a producer in every way that a block calls it, one after the other."""
    if isinstance(module, FusedAdaptiveNorm):
        emb = x.new_zeros(x.shape[0], module.linear.in_features)
        result = module(x, **{module.embedding: emb})
        yield result[0] if isinstance(result, tuple) else result
        return
    weight = module._parameters.get("weight")
    x = x if weight is None else x.to(weight.dtype)
    yield module(x)
    if isinstance(module, FusedNorm) and module.formula.kind == "rms_norm":
        # a residual added in the same pass is another kernel
        call = module.codes_of_sum(x, torch.zeros_like(x))
        if call is not None:
            yield module(module.add(call))


def _input(layer: nn.Linear, lead: tuple[int, int]) -> Tensor:
    dtype = layer.compute_dtype if isinstance(layer, Fp8Linear) else layer.weight.dtype
    return torch.randn(*lead, layer.in_features, device=layer.weight.device, dtype=dtype)
