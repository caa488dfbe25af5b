"""Norms, activations and feed-forwards that write FP8.

A producer is a norm or activation whose result only known layers read, its consumers. A fused norm
writes codes and scales alone. In place of the unwritten result it returns a stand-in: one NaN,
expanded to the result's shape. The consumers recognise the stand-in by identity and take the codes;
any other reader would see NaN, not a plausible wrong number. The replaced module computes instead
where another reader is possible (a layer was wrapped or has a hook), gradients are needed, the
input is not on a GPU, or a compiler traces. The codes of an activation never leave the layer that
multiplies them, so activations and feed-forwards are fused under ``torch.compile``, too.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fp8kit.formats import Scheme
from fp8kit.modules.activation_formula import activation_codes, activation_kind, gated_codes
from fp8kit.modules.codes_calls import takes_codes
from fp8kit.modules.deferred import Deferred
from fp8kit.modules.hooks import carry_hooks, is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.norm_formula import NormFormula
from fp8kit.modules.parameters import any_trained, deepcopied
from fp8kit.modules.pending import make_stand_in
from fp8kit.modules.shared_input import SharedInput
from fp8kit.modules.tracing import constant_in_graphs, is_compiled
from fp8kit.ops.operators import CodesCall
from fp8kit.ops.transforms import is_transformed
from fp8kit.runtime.replay_cache import ReplayCache, jit_tracing

FUSED_DEVICES = ("cuda",)
_LAYER_CODE = Fp8Linear.forward  # a subclass may compute something else
# set on the fused module itself, even if the replaced module has an attribute of that name
_OWN = frozenset(
    """
    altered concatenated consumers embedding formula gated kind modulation parameter_names
    positional replaced replays
    """.split()
)


class _Step(NamedTuple):
    """A module on the path to the consumers, with its code, children and settings at fusion."""

    ref: weakref.ref[nn.Module]
    code: object
    children: list[tuple[str, weakref.ref[nn.Module]]]
    settings: list[tuple[str, object]]


class Consumers:
    """The layers that read a producer's result, and the state in which nothing else reads it.

    References to modules are weak: some of them contain the producer, which holds this object.

    Args:
        group: the ``SharedInput`` of these layers.
        unchanged: ``(module, attribute, value)`` that must still hold: the path from the known
            block to each layer, and settings that, if changed, let code in between read the tensor.
    """

    def __init__(
        self, group: SharedInput, unchanged: Iterable[tuple[nn.Module, str, object]]
    ) -> None:
        self.group = group
        steps: dict[nn.Module, _Step] = {}
        for module, name, value in unchanged:
            step = steps.setdefault(module, _Step(weakref.ref(module), _code_of(module), [], []))
            if isinstance(value, nn.Module):
                step.children.append((name, weakref.ref(value)))
            else:
                step.settings.append((name, value))
        self.path = tuple(steps.values())  # from the block on

    @property
    def scheme(self) -> Scheme:
        """The scheme of the layers."""
        return self.group.first.scheme

    def are_ready(self) -> bool:
        """Return whether these layers are the only readers of a stand-in for their input."""
        modules: list[nn.Module] = []
        for ref, code, children, settings in self.path:
            module = ref()
            if module is None or type(module).forward is not code:
                return False
            if isinstance(module, Fused) and not module.has_known_code():
                return False
            # ten times as fast as getattr
            held = module._modules
            for name, child in children:
                found = child()
                if found is None or held.get(name) is not found:
                    return False
            for name, value in settings:
                if getattr(module, name, None) is not value:
                    return False
            modules.append(module)
        members = self.group.members
        for member in members:
            if member.scale_ub is not None or type(member).forward is not _LAYER_CODE:
                return False
        # modules[0], the block, may have hooks: they do not see the stand-in
        free = bool(members) and not is_watched(*modules[1:], *members)
        return free and takes_codes(members[0].scheme) and not any_trained(*members)

    def __getstate__(self) -> dict[str, Any]:
        """Store modules without their ``forward``, which pickle may not find by name."""
        unchanged: list[tuple[nn.Module, str, object]] = []
        for ref, code, children, settings in self.path:
            module = ref()
            if module is None or type(module).forward is not code:
                module = nn.Module()  # freed at once after loading: are_ready() stays false
            unchanged += [(module, name, child() or nn.Module()) for name, child in children]
            unchanged += [(module, name, value) for name, value in settings]
        return {"group": self.group, "unchanged": unchanged}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo ``__getstate__``; state of older versions has more entries, which are ignored."""
        self.__init__(state["group"], state["unchanged"])  # type: ignore[misc]

    def produce(self, replays: ReplayCache, call: CodesCall) -> list[Tensor]:
        """Offer the codes of a call; return a stand-in for their input and the other results."""
        stand_in = make_stand_in(call.shape, call.inputs[0].device, call.dtype)
        return [stand_in, *self.group.produce(stand_in, replays, call)]


class Fused(nn.Module):
    """A module in place of another (the replaced module), which it computes in one pass.

    Both share their dictionaries of Parameters, buffers and children, so names, moves, casts and
    loading reach both. Where it may not fuse, and for most keyword arguments, whose names differ
    between classes, it calls the replaced module. The fused pass also computes ``inner`` modules.
    """

    def __init__(self, replaced: nn.Module, *inner: object) -> None:
        super().__init__()
        self._parameters = replaced._parameters
        self._buffers = replaced._buffers
        self._modules = replaced._modules
        self.training = replaced.training
        self.altered = False
        self.parameter_names = tuple(replaced._parameters)
        self.replaced = (replaced,)  # inside a tuple, it is not registered as a child
        self.replays = ReplayCache()
        self._kinds = (type(replaced), *(type(m) for m in inner if isinstance(m, nn.Module)))
        self._code: object = [kind.forward for kind in self._kinds]
        carry_hooks(replaced, self)

    def __copy__(self) -> nn.Module:
        """Copy what was replaced: who reads a copy, and which settings it gets, is not known."""
        return copy.copy(self.replaced[0])

    def __getstate__(self) -> dict[str, Any]:
        """Store whether the code is known, not the code: pickle may not find it by name."""
        return {**vars(self), "_code": self.has_known_code()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without recordings; older files have them under the name ``_tapes``."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.pop("_tapes", None)
        self.__dict__.setdefault("parameter_names", tuple(self._parameters))
        self.replays = ReplayCache()
        kinds = self.__dict__.setdefault("_kinds", (type(self.replaced[0]),))
        self._code = [kind.forward for kind in kinds] if state.get("_code", True) else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Forward an attribute of the replaced module to it; if its value changes, stop fusing."""
        replaced = self.__dict__.get("replaced")
        own = name[0] == "_" or name in _OWN or name in vars(self).get("parameter_names", ())
        if replaced is None or own or name not in vars(replaced[0]):
            super().__setattr__(name, value)
            return
        before = getattr(replaced[0], name)
        setattr(replaced[0], name, value)
        if name == "training":
            super().__setattr__(name, value)
        elif before is not value:
            self.altered = True

    def __getattr__(self, name: str) -> Any:
        """Fall back to the replaced module for attributes that this one lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # an unfilled copy has no "replaced" yet; a missing Parameter was deleted
            if name == "replaced" or name in self.__dict__.get("parameter_names", ()):
                raise
            return getattr(self.replaced[0], name)

    def unfused(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the code of the replaced module."""
        replaced = self.replaced[0]
        # FSDP, pruning and parametrizations replace a Parameter by a tensor attribute of this one
        others = () if torch.compiler.is_compiling() else self.parameter_names
        found = {name: getattr(self, name) for name in others if name not in self._parameters}
        if found:  # in a copy for this call alone: the next call may get other tensors
            held, replaced = vars(replaced), type(replaced).__new__(type(replaced))
            vars(replaced).update({**held, **found})
        elif torch.compiler.is_compiling() and not self._is_known():
            return type(replaced).forward(self, *args, **kwargs)
        return replaced.forward(*args, **kwargs)

    def extra_repr(self) -> str:
        """Name the module in ``print(model)``."""
        return f"replaces {type(self.replaced[0]).__name__}"

    def may_fuse(self, *inputs: Tensor) -> bool:
        """Return whether device, modes and unchanged code permit fusing for these inputs."""
        return may_fuse(self, *inputs) and not self.altered and self._is_known()

    def may_compute(self, *inputs: Tensor) -> bool:
        """Return whether the fused pass may compute these inputs, eagerly or in a graph."""
        if not torch.compiler.is_compiling():
            return self.may_fuse(*inputs)
        place = inputs[0].device.type
        if place not in FUSED_DEVICES or torch.is_grad_enabled() or not is_compiled():
            return False
        return not (torch.is_autocast_enabled(place) or self.altered) and self._is_known()

    @constant_in_graphs
    def _is_known(self) -> bool:
        held = self._parameters
        return self.has_known_code() and all(map(held.__contains__, self.parameter_names))

    def has_known_code(self) -> bool:
        """Return whether the replaced classes still have the ``forward`` they had at fusion."""
        return [kind.forward for kind in self._kinds] == self._code

    def _replicate_for_data_parallel(self) -> nn.Module:
        """Replicate the replaced module: codes are offered to layers of one GPU only."""
        replaced: Any = self.replaced[0]
        return replaced._replicate_for_data_parallel()


class Producer(Fused):
    """A fused module whose result is read by its ``consumers`` alone."""

    def __init__(self, replaced: nn.Module, consumers: Consumers, *inner: object) -> None:
        super().__init__(replaced, *inner)
        self.consumers = consumers

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the replaced module alone, unless its block is copied: readers would be unknown."""
        if id(self.consumers.path[0].ref()) not in memo:
            return copy.deepcopy(self.replaced[0], memo)
        return deepcopied(self, memo)

    def may_offer(self, *inputs: Tensor) -> bool:
        """Return whether codes may be offered instead of a result of these inputs."""
        return self.may_fuse(*inputs) and not is_watched(self) and self.consumers.are_ready()


class FusedNorm(Producer):
    """A norm that quantizes its result for its consumers."""

    def __init__(self, norm: nn.Module, formula: NormFormula, consumers: Consumers) -> None:
        super().__init__(norm, consumers)
        self.formula = formula
        # at most one (sum, stand-in); a list, as setting a module's attribute takes microseconds
        self._prepared: list[tuple[Tensor, Tensor]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Norm ``[..., K]``: return the normed tensor, or its stand-in once codes are offered."""
        # first, because torch.compile guards on every attribute that is read before this return
        if torch.compiler.is_compiling() or kwargs or len(args) != 1:
            return self.unfused(*args, **kwargs)
        (x,) = args
        if self._prepared:
            prepared = self._prepared[:]  # a copy, as another thread may clear the list meanwhile
            self._prepared.clear()
            for total, stand_in in prepared:
                if total is x:
                    return stand_in
        if not (self.may_offer(x) and self.formula.takes(x, self)):
            return self.unfused(x)
        call = self.formula.codes((x,), self, self.consumers.scheme)
        return self.consumers.produce(self.replays, call)[0]

    def add(self, call: CodesCall) -> Tensor:
        """Run a call of ``codes_of_sum`` and return its sum; this norm is called with it next.

        The same pass quantizes the norm of the sum, which is kept for that next call.
        """
        stand_in, total = self.consumers.produce(self.replays, call)
        self._prepared[:] = [(total, stand_in)]
        return total

    def codes_of_sum(self, x: Tensor, residual: Tensor) -> CodesCall | None:
        """Return the call that adds, norms and quantizes in one pass; ``None`` if not permitted."""
        alike = (x.shape, x.dtype, x.device) == (residual.shape, residual.dtype, residual.device)
        fusable = self.formula.kind == "rms_norm" and self.formula.takes(x, self) and alike
        if not (fusable and self.may_offer(x, residual)):
            return None
        return self.formula.codes((x, residual), self, self.consumers.scheme)


class FusedActivation(Producer):
    """An activation that the layer behind it computes and quantizes; ``kind`` as FusedGatedMlp's.

    If ``gated``, the input has the gate's columns, then as many that the gate multiplies. If
    ``concatenated``, the layer reads it behind other columns, as many as the layer's output has.
    """

    gated = concatenated = False  # for files of older versions, which lack them

    def __init__(
        self, activation: nn.Module, kind: str, consumers: Consumers, concatenated: bool = False
    ) -> None:
        gate = activation._modules.get("gate_fn")
        super().__init__(activation, consumers, gate)
        self.kind, self.gated, self.concatenated = kind, gate is not None, concatenated

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | Deferred:
        """Activate ``[..., K]``: return the result, or a ``Deferred`` that waits to be read."""
        if kwargs or len(args) != 1 or not self._may_defer(*args):
            return self.unfused(*args, **kwargs)
        (x,) = args
        return Deferred(self.kind, *(x.chunk(2, -1) if self.gated else (x,)))

    def _may_defer(self, x: Tensor) -> bool:
        # requires_grad even without grad mode: custom autograd code computes gradients itself
        plain = type(x) is Tensor and not x.is_nested and not x.requires_grad
        same = not self.gated or activation_kind(self._modules.get("gate_fn")) == self.kind
        return plain and same and self.may_compute(x) and self._hands_over()

    @constant_in_graphs
    def _hands_over(self) -> bool:
        """Return whether only the consumers read the result: no hook, no unknown child."""
        inner = [m for m in self._modules.values() if m is not None]
        alone = len(inner) == self.gated
        return alone and not is_watched(self, *inner) and self.consumers.are_ready()


class FusedGatedMlp(Fused):
    """``down(act(gate(x)) * up(x))``: one pass activates, multiplies, and quantizes for ``down``.

    ``kind`` is ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
    """

    def __init__(self, mlp: nn.Module, kind: str) -> None:
        super().__init__(mlp, getattr(mlp, "act_fn", None))
        self.kind = kind

    def is_converted(self) -> bool:
        """Return whether the last projection takes codes."""
        return can_multiply(self.get_submodule("down_proj"))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute ``[..., K]`` from ``[..., K]``."""
        layers = None if kwargs or len(args) != 1 else self.layers(*args)
        if layers is None:
            return self.unfused(*args, **kwargs)
        gate_proj, up_proj, down = layers
        gate, up = gate_proj(*args), up_proj(*args)
        return down.multiply(activation_codes(self.kind, gate, up, down.scheme))

    def of_codes(self, call: CodesCall, group: SharedInput) -> list[Tensor] | None:
        """Return ``[..., K]`` for a call's codes, which ``group`` reads, then its other results.

        All launches are one recording; ``None`` where that is not permitted.
        """
        found = self.gated(call, group)
        return None if found is None else group.multiply(*found)

    def gated(self, call: CodesCall, group: SharedInput) -> tuple[CodesCall, Fp8Linear] | None:
        """Return a call that makes codes of ``call``'s, and the layer that reads them.

        ``None`` if the formula may not hold, or ``group`` is not that of the other layers.
        """
        layers = None if is_watched(self) else self.layers(*call.inputs)
        if layers is None or group.members != [*layers[:2]]:
            return None
        gate, down = group.members[0], layers[2]
        width, options = gate.out_features, gate.options()
        return gated_codes(self.kind, call, width, options, down.scheme), down

    def layers(self, *inputs: Tensor) -> tuple[nn.Module, nn.Module, Fp8Linear] | None:
        """Return the gate, up and down projections; ``None`` if the formula may not hold."""
        if not self.may_compute(*inputs):
            return None
        child: Any = self._modules.get
        gate, up, down, act_fn = map(child, ("gate_proj", "up_proj", "down_proj", "act_fn"))
        known = activation_kind(self.act_fn if act_fn is None else act_fn) == self.kind
        if not known or not self._hands_over() or any_trained(gate, up, down):
            return None
        return gate, up, down

    @constant_in_graphs
    def _hands_over(self) -> bool:
        """Return whether the last projection takes codes, and no hook sees what it reads."""
        down, act_fn = map(self._modules.get, ("down_proj", "act_fn"))
        return can_multiply(down) and (act_fn is None or not is_watched(act_fn))


def may_fuse(module: nn.Module, *inputs: Tensor) -> bool:
    """Return whether device, modes and gradients permit our kernels for a module's inputs."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_transformed():
        return False
    if jit_tracing() or not isinstance(inputs[0], Tensor):  # torch.fx traces without tensors
        return False
    place = inputs[0].device.type
    if place not in FUSED_DEVICES or torch.is_autocast_enabled(place):
        return False
    if not torch.is_grad_enabled():
        return True
    tensors = (*inputs, *module._parameters.values())
    return not any(t is not None and t.requires_grad for t in tensors)


def can_multiply(layer: nn.Module | None) -> TypeGuard[Fp8Linear]:
    """Return whether a layer can be given codes, which bypasses its ``forward``."""
    if not isinstance(layer, Fp8Linear) or layer.scale_ub is not None:
        return False
    known = type(layer).forward is _LAYER_CODE and not is_watched(layer)
    return known and takes_codes(layer.scheme)


def _code_of(module: nn.Module) -> object:
    """Return the ``forward`` of a class; ``None`` if compiled, as compiled code reads its input."""
    own = type(module).forward
    return None if hasattr(own, "_torchdynamo_orig_callable") else own
