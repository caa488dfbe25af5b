"""Compile, record, and on request tune the kernels that a model will run, before its first call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

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
from fp8kit.modules.own_forward import OwnForward
from fp8kit.modules.rotary import RotaryForward
from fp8kit.modules.shared_input import SharedInput
from fp8kit.ops.validation import check_row_counts
from fp8kit.perf import tune as tuning
from fp8kit.perf.row_counts import layer_counts
from fp8kit.perf.timing import Timer, time_cases
from fp8kit.perf.tune import TuneRequest
from fp8kit.perf.warmup_experts import calls_of_experts, record_experts
from fp8kit.runtime import replay_cache
from fp8kit.runtime.compile_ahead import collecting

Lead = tuple[int, int]  # sequences, and tokens of each
MOST_SEQUENCES = 256  # row counts up to this one may be sequences that decode, one token each


def warmup(
    model: nn.Module,
    m: int | Sequence[int] = (1, 16, 4096),
    *,
    tune: bool = False,
    timer: Timer = time_cases,
) -> int:
    """Run every distinct FP8 layer once per row count, so that no request waits for a compiler.

    Compiled kernels are kept on disk, and those in CUDA C++ are compiled in parallel. A power of
    two stands for all row counts from the next smaller one up to it, so ``m`` needs one value for
    each size of batch. Where these row counts run several kernels, layers run each of them.

    On a GPU every layer then records its launches (see ``runtime.replay_cache``) for exactly these
    row counts: for one prompt of ``m`` tokens, and for ``m`` sequences of one token up to 256.

    The number of experts per token is the first of these that exists: ``top_k`` of a ``routing``
    that is a ``functools.partial``; ``top_k`` or ``num_experts_per_tok`` of the module, of the
    block that holds it, or of the router beside it; ``num_experts_per_tok`` of a config of these or
    of the model. Where none exists, experts run with 1, 2, 4 and 8.

    Args:
        model: holds ``Fp8Linear`` layers or FP8 experts, on the device where they will run.
        m: row count (tokens) to expect, or several.
        tune: first measure which backend is fastest for these layers, and keep the times on disk;
            backends of experts are not measured.
        timer: how candidates are timed.

    Returns:
        The number of distinct calls that were made.

    Raises:
        TypeError: if ``model`` is no module, a row count no integer, or ``tune`` no switch.
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
    """Yield a call for every distinct module and number of rows."""
    done = set[object]()
    for module in model.modules():
        run = _run_of(module)
        if run is None or run.kind in done:
            continue
        done.add(run.kind)
        for rows in dict.fromkeys(count for most in m for count in _row_counts(module, most)):
            yield functools.partial(run.call, (1, rows))


def layer_requests(layers: Sequence[Fp8Linear], m: Sequence[int]) -> Iterator[TuneRequest]:
    """Yield what to tune for layers: their shapes, and those of siblings joined to one matrix."""
    for scheme in dict.fromkeys(layer.scheme for layer in layers):
        for accum in dict.fromkeys(layer.accum for layer in layers if layer.scheme == scheme):
            alike = [mod for mod in layers if (mod.scheme, mod.accum) == (scheme, accum)]
            alone = [(mod.out_features, mod.in_features) for mod in alike]
            joined = [
                (sum(mod.out_features for mod in mod.shared.members), mod.in_features)
                for mod in alike
                if isinstance(mod.shared, SharedInput) and can_join(mod.shared.members)
            ]
            yield from tuning.requests_of(alone, joined, list(m), scheme, accum)


def tune_layers(layers: Sequence[Fp8Linear], m: Sequence[int], timer: Timer) -> None:
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
            outcome = tuning.tune(layer_requests(here, m), device, timer=timer, store=tuning.keep)
        for fault in outcome.faults:
            warnings.warn(f"Rejected while tuning: {fault}", stacklevel=3)


def _row_counts(module: nn.Module, rows: int) -> list[int]:
    """Return a row count, and others of its power of two for which layers run other kernels."""
    if not isinstance(module, Fp8Linear):
        return [rows]
    problems = [module.problem(rows)]
    if isinstance(module.shared, SharedInput):
        members = module.shared.members
        problems = [member.problem(rows) for member in members]
        if rows <= MOST_JOINED_ROWS and can_join(members):
            problems = [replace(problems[0], n=sum(problem.n for problem in problems))]
    return layer_counts(problems, rows, module.weight.device)


def _record(model: nn.Module, m: Sequence[int]) -> None:
    """Run every module twice in the shapes in which a model calls it: the second call records."""
    runs_with_another = set[int]()
    for module in model.modules():
        if isinstance(module, Producer):
            runs_with_another |= {id(member) for member in module.consumers.group.members}
        elif isinstance(module, Fp8Linear) and isinstance(module.shared, SharedInput):
            runs_with_another |= {id(member) for member in module.shared.members[1:]}
    for module in model.modules():
        run = None if id(module) in runs_with_another else _run_of(module)
        if run is None or run.device.type not in replay_cache.RECORDED_DEVICES:
            continue
        for rows in m:
            prompt, batch = (1, rows), (rows, 1)
            for lead in {prompt, batch} if rows <= MOST_SEQUENCES else {prompt}:
                run.call(lead)
                run.call(lead)


class _Run(NamedTuple):
    """How to run a module: ``call(lead)`` runs it on an input ``[*lead, K]``.

    Modules with an equal ``kind`` run the same kernels.
    """

    kind: tuple[object, ...]
    device: torch.device
    call: Callable[[Lead], None]


def _run_of(module: nn.Module) -> _Run | None:
    """Return how to run a module, ``None`` for a module without FP8 or fused kernels."""
    forward = vars(module).get("forward")
    if isinstance(module, Fp8Linear):
        return _layer(module)
    if isinstance(module, FusedActivation):
        return _activation(module)
    if isinstance(module, FusedNorm | FusedAdaptiveNorm):
        return _norm(module)
    if isinstance(module, FusedGatedMlp | FusedFeedForward):
        return _feed_forward(module)
    if isinstance(forward, ResidualForward):
        return _second_half(module, forward)
    if isinstance(forward, RotaryForward):
        return _rotary(module, forward)
    return _own(module, forward) if isinstance(forward, OwnForward) else None


def _layer(layer: Fp8Linear) -> _Run:
    group = layer.shared if isinstance(layer.shared, SharedInput) else None

    def call(lead: Lead) -> None:
        x = _input(layer, lead)
        if group is None:
            layer.compute(x)
        else:
            for member in group.members:
                group(member, x)

    kind = _layer_kind(layer) if group is None else ("group", *map(_layer_kind, group.members))
    return _Run(kind, layer.weight.device, call)


def _activation(module: FusedActivation) -> _Run:
    """Run an activation and the layers that read its result."""
    members = module.consumers.group.members
    layer = members[0]

    def call(lead: Lead) -> None:
        x, columns = _input(layer, lead), layer.out_features if module.concatenated else 0
        left, gate = x[..., :columns], x[..., columns:]
        for member in members:
            result = module(torch.cat((gate, gate), -1) if module.gated else gate)
            member.forward(torch.cat((left, result), -1) if module.concatenated else result)

    kind = ("activation", module.kind, module.gated, module.concatenated)
    return _Run((*kind, *map(_layer_kind, members)), layer.weight.device, call)


def _norm(module: FusedNorm | FusedAdaptiveNorm) -> _Run:
    group, members = module.consumers.group, module.consumers.group.members

    def call(lead: Lead) -> None:
        for result in _normed(module, _input(members[0], lead)):
            for member in members:
                group(member, result)

    tensors = (module._parameters.get("weight"), module._parameters.get("bias"))
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    kind = (type(module), module.formula, *dtypes, *map(_layer_kind, members))
    return _Run(kind, members[0].weight.device, call)


def _normed(module: FusedNorm | FusedAdaptiveNorm, x: Tensor) -> Iterator[Tensor]:
    """Run a norm in every way that a block calls it, one after the other."""
    if isinstance(module, FusedAdaptiveNorm):
        emb = x.new_zeros(x.shape[0], module.linear.in_features)
        result = module(x, **{module.embedding: emb})
        yield result[0] if isinstance(result, tuple) else result
        return
    weight = module._parameters.get("weight")
    x = x if weight is None else x.to(weight.dtype)
    yield module(x)
    if module.formula.kind == "rms_norm":
        # a residual added in the same pass is another kernel
        call = module.codes_of_sum(x, torch.zeros_like(x))
        if call is not None:
            yield module(module.add(call))


def _feed_forward(module: FusedGatedMlp | FusedFeedForward) -> _Run | None:
    if not module.is_converted():
        return None
    gated = isinstance(module, FusedGatedMlp)
    names = ("gate_proj", "down_proj") if gated else ("net.0.proj", "net.2")
    first, down = (cast(Any, module.get_submodule(name)) for name in names)
    shape = (first.in_features, first.out_features, first.weight.dtype)
    kind = ("mlp", module.kind, gated or module.gated, shape, _layer_kind(down))
    return _Run(kind, down.weight.device, lambda lead: module(_input(first, lead)))


def _second_half(module: nn.Module, forward: ResidualForward) -> _Run | None:
    """Run the norm and feed-forward of a decoder layer that computes both in one call."""
    norm, mlp = module._modules[forward.flow.before_mlp], module._modules["mlp"]
    if not (isinstance(norm, FusedNorm) and isinstance(mlp, FusedGatedMlp)):
        return None
    runs = _norm(norm), _feed_forward(mlp)
    if runs[1] is None:
        return None

    def call(lead: Lead) -> None:
        x = _input(norm.consumers.group.first, lead).to(norm.weight.dtype)
        forward.flow.feed_forward(module, x, torch.zeros_like(x))

    return _Run(("decoder layer", runs[0].kind, runs[1].kind), runs[0].device, call)


def _rotary(module: nn.Module, forward: RotaryForward) -> _Run | None:
    """Rotate heads in the strides of their products, with shared angles and with each its own."""
    width: Any = getattr(module, "head_dim", None)
    layers = [module._modules.get(f"{name}_proj") for name in "qkv"]
    fp8 = [layer for layer in layers if isinstance(layer, Fp8Linear)]
    if type(width) is not int or len(fp8) < len(layers):
        return None

    def call(lead: Lead) -> None:
        x = _input(fp8[0], lead)
        results = [layer(x).unflatten(-1, (-1, width)) for layer in fp8]
        for i, name in enumerate(("q_norm", "k_norm")):
            norm = module._modules.get(name)
            if norm is not None and norm.get_parameter("weight").shape == (width,):
                results[i] = norm(results[i])
        q, k, _ = (heads.transpose(1, 2) for heads in results)
        for rows in {1, lead[0]}:
            forward.rotate(q, k, *x.new_zeros(2, rows, lead[1], width))

    return _Run(("rotary", type(module), *map(_layer_kind, fp8)), fp8[0].weight.device, call)


def _own(module: nn.Module, forward: OwnForward) -> _Run:
    weight = module.get_parameter("weight")

    def call(lead: Lead) -> None:
        x = torch.randn(*lead, weight.shape[-1], device=weight.device, dtype=weight.dtype)
        if not isinstance(forward, RouterForward):
            module(x)
            return
        given = forward.formula.correction == "given"
        # blocks pass rows ``[M, K]`` to routers
        module(x.flatten(0, 1), *([x.new_zeros(weight.shape[0])] if given else []))

    kind = (type(forward), forward.formula, weight.shape, weight.dtype, weight.device)
    return _Run(kind, weight.device, call)


def _layer_kind(layer: Fp8Linear) -> tuple[object, ...]:
    bias = None if layer.bias is None else layer.bias.dtype
    options = (layer.accum, layer.batch_invariant, layer.compute_dtype, bias)
    return (layer.scheme, tuple(layer.weight.shape), layer.weight.device, *options)


def _input(layer: nn.Linear, lead: Lead) -> Tensor:
    dtype = layer.compute_dtype if isinstance(layer, Fp8Linear) else layer.weight.dtype
    return torch.randn(*lead, layer.in_features, device=layer.weight.device, dtype=dtype)
