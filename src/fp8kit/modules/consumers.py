"""The layers that read the result of a fused module as codes, and whether nothing else reads it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from fp8kit.formats import Scheme
from fp8kit.modules.codes_calls import takes_codes
from fp8kit.modules.fused_module import Fused
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import any_trained
from fp8kit.modules.pending import make_stand_in
from fp8kit.modules.shared_input import SharedInput
from fp8kit.ops.operators import CodesCall
from fp8kit.runtime.replay_cache import ReplayCache

_LAYER_CODE = Fp8Linear.forward  # a subclass may compute something else


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
        free = bool(members) and not is_watched(*modules[1:], inputs_alone=True)
        free = free and not is_watched(*members)
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
