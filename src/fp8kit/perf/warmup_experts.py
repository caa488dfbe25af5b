"""Run every distinct layer of FP8 experts once per count of tokens that has its own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.experts import Fp8Experts
from fp8kit.perf.row_counts import expert_counts
from fp8kit.runtime import replay_cache

# experts per token to run with, where the number is not known
USUAL = (1, 2, 4, 8)
_NAMES = ("top_k", "num_experts_per_tok")
# a config's own top_k belongs to the sampling of tokens
_CONFIG_NAMES = ("num_experts_per_tok", "top_k_experts")
_OPTIONS = ("router_weight_on_input", "batch_invariant", "shared")


def calls_of_experts(model: nn.Module, m: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Yield a call for every distinct layer of experts and number of tokens."""
    done = set[object]()
    for _, module, taken in experts_of(model):
        for top_k in taken:
            kind = (*_kind(module), top_k)
            if kind in done:
                continue
            done.add(kind)
            takes = pairs_of_a_token(module, top_k)
            counts = (count for tokens in m for count in expert_counts(module, takes, tokens))
            for tokens in dict.fromkeys(counts):
                yield functools.partial(_run, module, tokens, top_k)


def record_experts(model: nn.Module, m: Sequence[int]) -> None:
    """Run every layer of experts twice: the second call records.

    It runs for weights in ``float32`` and in the dtype of the model, as routers give either.
    """
    for _, module, taken in experts_of(model):
        device = module.codes(module.stacks.down).device
        if module.stacks.activation is None or device.type not in replay_cache.RECORDED_DEVICES:
            continue
        for tokens in m:
            for dtype in {torch.float32, module.compute_dtype}:
                for top_k in taken:
                    _run(module, tokens, top_k, dtype)
                    _run(module, tokens, top_k, dtype)


def experts_of(model: nn.Module) -> Iterator[tuple[str, ExpertTensors, tuple[int, ...]]]:
    """Yield the FP8 experts of a model: name, module, and possible numbers of experts per token."""
    parents = {child: mod for mod in model.modules() for child in mod.children()}
    for name, module in model.named_modules():
        if isinstance(module, ExpertTensors):
            near: list[nn.Module] = [module]
            if module in parents:
                near += [parents[module], *parents[module].children()]
            yield name, module, experts_per_token(module, near, model)


def experts_per_token(
    module: ExpertTensors, near: Sequence[nn.Module], model: nn.Module
) -> tuple[int, ...]:
    """Return how many experts a token may take, shared ones not included.

    The number is the first of these that exists: ``top_k`` of the ``routing``, if it is a
    ``functools.partial``; ``top_k`` or ``num_experts_per_tok`` of the modules ``near``; that of
    their configs or the model's. Where none exists: 1, 2, 4 and 8, up to E. ``near`` are the module
    itself, its parent and the parent's other children, in this order.
    """
    if module.stacks.call == "sorted" or module.stacks.activation is None:
        return (1,)  # no kernel sees more than the rows of an expert
    most = _routed(module)
    told = (k for k in _top_ks(module, near, model) if type(k) is int and 1 <= k <= most)
    found = next(told, None)
    return tuple(k for k in USUAL if k <= most) if found is None else (found,)


def _top_ks(module: ExpertTensors, near: Sequence[nn.Module], model: nn.Module) -> Iterator[object]:
    routing = getattr(module, "routing", None)
    if isinstance(routing, functools.partial):
        yield routing.keywords.get("top_k")
    for other in near:
        yield from (getattr(other, name, None) for name in _NAMES)
    for other in (*near, model):
        config = getattr(other, "config", None)
        yield from (getattr(config, name, None) for name in _CONFIG_NAMES)


def _routed(module: ExpertTensors) -> int:
    """Return the number of ids among which a router chooses."""
    return module.num_ids - module.shared if isinstance(module, Fp8Experts) else module.expert_count


def pairs_of_a_token(module: ExpertTensors, top_k: int) -> tuple[int, ...]:
    """Return the pairs of a token in each call: all, or routed and shared experts apart."""
    if isinstance(module, Fp8Experts) and module.shared:
        return (top_k + module.shared, top_k, module.shared)
    return (top_k,)


def _kind(module: ExpertTensors) -> tuple[object, ...]:
    """Return a key that is equal for modules whose kernels are the same."""
    stacks, held = module.stacks, []
    for name in stacks.names:
        codes, bias = module.codes(name), module.beside(name, "bias")
        given = module.beside(name, "input_scale") is not None
        held += [tuple(codes.shape), codes.device, None if bias is None else bias.dtype, given]
    gate = type(module) if stacks.activation is None else stacks.activation
    options = [getattr(module, name, None) for name in _OPTIONS]
    return (module.scheme, module.compute_dtype, gate, stacks.call, *held, *options)


def _run(
    module: ExpertTensors, tokens: int, top_k: int, dtype: torch.dtype = torch.float32
) -> None:
    """Run experts as a block does, with pairs spread over all of them."""
    codes = module.codes(module.stacks.down)
    place, hidden = codes.device, codes.shape[1]
    rows = tokens * module.expert_count if module.stacks.call == "sorted" else tokens
    x = torch.randn(rows, hidden, device=place, dtype=module.compute_dtype)
    if module.stacks.call == "sorted":
        module.forward(x)
        return
    ids = torch.arange(tokens * top_k, device=place).view(tokens, top_k) % _routed(module)
    if module.stacks.activation is None:
        ids = torch.zeros_like(ids)  # one expert sees all rows
    weights = torch.full((tokens, top_k), 1 / top_k, device=place, dtype=dtype)
    if isinstance(module, Fp8Experts):
        _run_uncounted(module, x, ids, weights)
    else:
        module.forward(x, ids, weights)


def _run_uncounted(module: Fp8Experts, x: Tensor, ids: Tensor, weights: Tensor) -> None:
    counted, module.tokens = module.tokens, None
    try:
        module.forward(x, ids, weights)
        if module.shared:  # with an input of their own they are a call of their own
            module.apart(x, ids, weights)
    finally:
        module.tokens = counted
