"""Why linear layers cannot become FP8: their class, their state, or the code around them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8kit.conversion.patterns import SMALLEST_WEIGHT, size_obstacle
from fp8kit.conversion.readers.held import addresses, read_elsewhere
from fp8kit.conversion.report import ALREADY, TIED, Record
from fp8kit.errors import some_of
from fp8kit.formats import FLOATS
from fp8kit.modules.dense import extras, unlike_linear
from fp8kit.modules.expert_stacks import ExpertStacks
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.hooks import is_replaced, own_names
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import held_bytes

# attributes in which modules of Transformers and diffusers list parameters that stay in fp32
_KEPT = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_DISPATCHED = (
    "accelerate dispatched the model and runs this layer by a hook; convert the model "
    "first and dispatch it then, or call remove_hook_from_submodules of accelerate.hooks"
)
_OFFLOADED = (
    "diffusers offloads it in a group that keeps the dense Parameters; convert the model first and "
    "call enable_group_offload then"
)
_SHARDED = (
    "fully_shard or FullyShardedDataParallel has split its weight; convert the model first and "
    "shard it then, by the latter with ignored_states= for what is frozen"
)
_PARTITIONED = (
    "DeepSpeed's ZeRO 3 has split its weight; convert the model within "
    "deepspeed.zero.GatheredParameters, before deepspeed.initialize"
)


class Eligibility:
    """The reasons for which layers of one model cannot become FP8.

    The model's weights may be on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tried: dict[Any, Any] = {}
        self._tied = _tied_weights(model)
        self._kept = _kept_in_float32(model)
        self._offloaded = _offloaded_in_groups(model)
        self._read = read_elsewhere(model, methods=True)

    def of(self, names: Sequence[str], wanted: bool = False, merged: bool = False) -> str:
        """Return why a linear layer cannot become FP8; empty if it can.

        ``names`` are all its names. ``wanted`` if ``include`` has its full name, ``merged`` if
        engines run it as one matrix with a layer that becomes FP8.
        """
        module = self._model.get_submodule(names[0])
        return (
            _of_state(module)
            or self._of_class(module, wanted)
            or self._of_names(names)
            or (_OFFLOADED if module in self._offloaded else "")
            or self._read.get(module, "")
            or _of_names_taken(module)
            or self._of_weight(module.get_parameter("weight"), wanted or merged)
        )

    def _of_class(self, module: nn.Module, wanted: bool) -> str:
        if not isinstance(module, nn.Linear):
            return ""
        if type(module) is nn.Linear:
            differs = unlike_linear(module, self._tried)
            return f"nn.Linear.forward was replaced by code that {differs}" if differs else ""
        kind = f"{type(module).__name__} is a subclass of nn.Linear"
        if type(module).__basicsize__ != nn.Linear.__basicsize__:
            return f"{kind} with __slots__, whose instances cannot become those of another class"
        if differs := unlike_linear(module, self._tried):
            return f"{kind} that {differs}"
        if not wanted and (more := extras(module, self._tried)):
            return (
                f"{kind} and has more than it: {some_of(more)}; include=[its full name] converts "
                "it all the same, if nothing else uses that"
            )
        return ""

    def of_experts(self, names: Sequence[str], stacks: ExpertStacks, wanted: bool) -> str:
        """Return why a module of experts cannot become FP8; empty if it can."""
        module = self._model.get_submodule(names[0])
        if isinstance(module, ExpertTensors):
            return ALREADY
        if reason := of_call(module):
            return reason
        if module in self._offloaded:
            return _OFFLOADED
        if parametrize.is_parametrized(module):
            return "its stacks are parametrized; remove the parametrization first"
        for stack in stacks.names:
            if reason := self._of_names(names, stack) or self._of_stack(module, stack):
                return reason
        if reason := self._read.get(module, ""):
            return reason
        # gate, up and down of one expert are equally large
        return "" if wanted else size_obstacle(tuple(module.get_parameter(stacks.down).shape[1:]))

    @torch.no_grad()  # autograd refuses the weights of a model made in inference mode
    def _of_stack(self, module: nn.Module, stack: str) -> str:
        weight = module.get_parameter(stack)
        if reason := self._of_owner(weight):
            return reason
        if not weight.is_meta and not all(matrix.isfinite().all() for matrix in weight):
            return "its stacks hold NaN or infinities"
        return ""

    def _of_names(self, names: Sequence[str], kind: str = "weight") -> str:
        kept = any(kept.match(f"{name}.{kind}") for kept in self._kept for name in names)
        return "the model keeps it in float32" if kept else ""

    def _of_owner(self, weight: nn.Parameter) -> str:
        if isinstance(weight, FakeTensor):
            return "its weight is a FakeTensor, which has no values"
        if is_traceable_wrapper_subclass(weight):
            kind = type(weight)
            return f"its weight is a {kind.__name__} of {kind.__module__.partition('.')[0]}"
        if weight.layout != torch.strided:
            return f"its weight is {weight.layout}; FP8 is made from plain tensors"
        if weight.dtype not in FLOATS:
            return f"its weight is {weight.dtype}; FP8 is made from bf16, fp16 or fp32"
        if not self._tied.isdisjoint(addresses(weight)):
            return TIED
        return ""

    @torch.no_grad()
    def _of_weight(self, weight: nn.Parameter, small: bool) -> str:
        if reason := self._of_owner(weight):
            return reason
        if not small and (too_small := size_obstacle(tuple(weight.shape))):
            return too_small
        if not weight.is_meta and not weight.isfinite().all():
            return "its weight holds NaN or infinities"
        return ""


def bypassed(module: nn.Module, name: str, reason: str) -> list[Record]:
    """Report large matrices that are not in a linear layer, so that none is silently skipped."""
    if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd)):
        return []
    return [
        Record(
            f"{name}.{p_name}" if name else p_name,
            type(module).__name__,
            tuple(p.shape),
            "skip",
            reason or _bypass(module, p.shape),
            held_bytes([p]),
            held_bytes([p]),
        )
        for p_name, p in module.named_parameters(recurse=False)
        if p.dim() >= 2 and p.numel() >= SMALLEST_WEIGHT
    ]


def _bypass(module: nn.Module, shape: Sequence[int]) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention holds its projections in one parameter and multiplies itself"
    name = type(module).__name__
    if not isinstance(module, getattr(nn, name, object)):  # a library's class named as in torch
        name = f"{type(module).__module__}.{name}"
    several = len(shape) == 3 and shape[0] > 1  # [1, N, K] is a position embedding
    hint = "; fp8kit.register_experts takes stacks of experts" if several else ""
    return f"a parameter of {name}, which is not an nn.Linear{hint}"


def _of_state(module: nn.Module) -> str:
    if isinstance(module, Fp8Linear):
        return ALREADY
    if getattr(module, "_is_fsdp_managed_module", False):
        return _SHARDED
    weight = module._parameters.get("weight")
    if weight is not None and hasattr(weight, "ds_tensor") and weight.numel() == 0:
        return _PARTITIONED
    if parametrize.is_parametrized(module):
        return "its weight is parametrized; remove the parametrization first"
    if "weight" not in module._parameters or vars(module).get("bias") is not None:
        return "its weight or bias is computed by a hook; remove weight_norm or pruning first"
    return of_call(module)


def of_instance(layer: nn.Module) -> str:
    """Return why what other code has set on a layer forbids that it becomes FP8, or nothing."""
    if hasattr(layer, "quantization_scheme"):
        return ""  # compressed-tensors' forward rounds to what an FP8 layer holds
    return of_call(layer) or _of_names_taken(layer)


def of_call(module: nn.Module) -> str:
    """Return which other code than its class's runs a layer or experts, as a reason, or nothing."""
    if hasattr(module, "_hf_hook"):
        return _DISPATCHED
    return "its forward was replaced on the instance" if is_replaced(module) else ""


def _of_names_taken(module: nn.Module) -> str:
    """Return why attributes set on a layer forbid conversion: an FP8 layer uses their names."""
    held = {*vars(module), *module._buffers, *module._modules, *module._parameters}
    taken = held & own_names(Fp8Linear) - own_names(nn.Linear)
    # methods set on the instance; FP8 layers print themselves, is_replaced looks at forward, and
    # what compile() has set is of the dense layer, which `read_elsewhere` finds
    known = {"extra_repr", "forward", "_compiled_call_impl"}
    taken |= vars(module).keys() & set(dir(nn.Linear)) - known
    return f"it has {some_of(sorted(taken))} of its own, and an FP8 layer too" if taken else ""


def _kept_in_float32(model: nn.Module) -> set[re.Pattern[str]]:
    """Return patterns for names of parameters that modules of a model list to stay in float32."""
    held = ((n, getattr(m, kept, None) or ()) for n, m in model.named_modules() for kept in _KEPT)
    return {
        re.compile(rf"{re.escape(f'{name}.' if name else '')}(.*\.)?{re.escape(part)}(\.|$)")
        for name, parts in held
        for part in ((parts,) if isinstance(parts, str) else parts)  # diffusers takes both
    }


def _offloaded_in_groups(model: nn.Module) -> set[nn.Module]:
    """Find modules whose weights diffusers loads when their group is called (group offloading)."""
    hooks = ((m, getattr(m, "_diffusers_hook", None)) for m in model.modules())
    leaders = [m for m, found in hooks if "group_offloading" in getattr(found, "hooks", ())]
    return {module for leader in leaders for module in leader.modules()}


def _tied_weights(model: nn.Module) -> set[int]:
    owners: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            for address in addresses(p):
                owners[address].add((id(module), name))
    return {key for key, users in owners.items() if len(users) > 1}
