"""FP8 experts of other libraries: a subclass of each of their classes, made when needed.

A module of experts becomes FP8 in place. It keeps its class (as a base class), its Parameter names,
its activation and all other attributes. Codes ``[E, N, K]`` replace the dense stacks, their scales
are added, and ``forward`` computes with both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8kit import functional
from fp8kit.errors import InvalidType, teach
from fp8kit.formats import QTensor, Scheme
from fp8kit.modules.entries import stored_tensors
from fp8kit.modules.expert_stacks import ExpertStacks, quantize_stack
from fp8kit.modules.expert_tensors import FROZEN_KINDS, ExpertTensors, codes_shape
from fp8kit.modules.hooks import is_watched, take_form
from fp8kit.modules.libraries import patch_libraries
from fp8kit.modules.own_forward import settings
from fp8kit.modules.parameters import empty_tensors, frozen
from fp8kit.moe.functional import experts as run_experts

Gate = Callable[[Tensor], Tensor]


class LibraryExperts(ExpertTensors):
    """The common part of FP8 forms of other libraries' classes; see ``ExpertStacks``."""

    dense_class: type[nn.Module]
    settled: frozenset[str] = frozenset()  # attributes whose values conversion has relied on

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change a setting that the dense class may read and this one ignores."""
        known = name not in self.settled or hasattr(self, "_is_replica")  # replicas get copies
        if not known and (old := getattr(self, name)) is not value and old != value:
            raise AttributeError(
                teach(
                    f"{name} of FP8 {self.dense_class.__name__} was set to {value!r:.80}.",
                    f"They were converted by what they compute with {old!r:.80}.",
                    "Set it before fp8kit.convert, or keep them dense: exclude=['*.experts'].",
                )
            )
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute what the dense class computes, from the same arguments."""
        given = self._given(args, kwargs)
        x = given[0]
        rows = x.reshape(-1, x.shape[-1])
        if self.stacks.call == "sorted":
            count = self.expert_count
            ids = torch.arange(count, device=x.device).repeat_interleave(rows.shape[0] // count)
            ids, weights = ids.unsqueeze(1), rows.new_ones(rows.shape[0], 1)
        else:
            _, ids, weights = given
        if self.stacks.activation is None or self._is_gate_watched():
            y = self._in_two_products(rows, ids, weights)
        else:
            # trainers may set requires_grad on every Parameter, codes included
            frozen = not torch.is_grad_enabled() or not self.codes(self.stacks.down).requires_grad
            w13, w2 = map(self.operand if frozen else self.quantized, self.stacks.names)
            y = run_experts(
                rows, w13, w2, ids, weights, activation=self.stacks.activation, **self._options()
            )
        return y.reshape(x.shape)

    def to_dense(self, dtype: torch.dtype | None = None) -> None:
        """Become the dense class again, in place, with the kept weights or else decoded ones."""
        parameters, held = dict(self._parameters), dict(vars(self))
        for name in self.stacks.names:
            q, kept = self.quantized(name), self.originals.get(name)
            if kept is None:
                dense = functional.dequantize(q, dtype or self.compute_dtype)
                dense = dense.transpose(1, 2).contiguous() if self.stacks.transposed else dense
            else:
                dense = kept.to(q.device, dtype or kept.dtype)
            parameters[name] = nn.Parameter(dense)
            for kind in FROZEN_KINDS[1:]:
                parameters.pop(name + kind, None)
        if hasattr(self, "is_transposed"):
            held["is_transposed"] = self.stacks.transposed
        for own in ("stacks", "scheme", "compute_dtype", "originals", "settled", "form_note"):
            held.pop(own, None)
        take_form(self, self.dense_class, held | {"_parameters": parameters})

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call in the order of the dense class; refuse further ones."""
        count = 1 if self.stacks.call == "sorted" else 3
        if len(args) == count and not kwargs:
            return args
        names = argument_names(self.dense_class)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != count or given.keys() != set(names[:count]):
            raise InvalidType(
                f"FP8 {self.dense_class.__name__} got {len(args)} arguments"
                f"{''.join(f', {name}' for name in kwargs)}.",
                f"They compute with {', '.join(names[:count])} alone, each given once.",
                "Call them with these, or keep them dense: exclude=['*.experts'].",
            )
        return tuple(given[name] for name in names[:count])

    def _is_gate_watched(self) -> bool:
        act = self._modules.get("act_fn")
        if act is None or torch.compiler.is_compiling() or not hasattr(self, "_apply_gate"):
            return False
        return is_watched(act)

    def _in_two_products(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute expert by expert, with the module's own gate between two linear layers."""
        up, down = (self.quantized(name) for name in self.stacks.names)
        gate = cast(Gate, own_gate(self, up.shape[1] == 2 * down.shape[2]))
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.expert_count):
            token, slot = torch.where(ids == expert)
            if not token.numel():
                continue
            h = self._product(x[token], up, self.stacks.up, expert)
            y = self._product(gate(h), down, self.stacks.down, expert)
            total = total.index_add(0, token, y.float() * weights[token, slot, None].float())
        return total.to(x.dtype)

    def _product(self, x: Tensor, q: QTensor, name: str, expert: int) -> Tensor:
        matrix = QTensor(q.data[expert], q.scale[expert], q.group)
        bias, fixed = self.beside(name, "bias"), self.beside(name, "input_scale")
        return functional.linear(
            x, matrix, None if bias is None else bias[expert], scheme=self.scheme, input_scale=fixed
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the dense class: pickle cannot import the FP8 class, which is made here."""
        return _blank, (self.dense_class,), self.__getstate__()


def held_tensors(module: nn.Module, stacks: ExpertStacks, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors that an FP8 form of a module of experts would hold, stacks on meta."""
    found = dict(module.state_dict(keep_vars=True))
    for name in stacks.names:
        shape = tuple(module.get_parameter(name).shape)
        transposed = stacks.transposed and not isinstance(module, LibraryExperts)
        found |= empty_tensors(codes_shape(shape, transposed), scheme, "meta", name)
        if scheme.static:
            found[f"{name}_input_scale"] = torch.empty(1, 1, dtype=torch.float32, device="meta")
    return found


def empty_experts(
    module: nn.Module, stacks: ExpertStacks, scheme: Scheme, dtype: torch.dtype
) -> None:
    """Turn a module of experts into an FP8 one in place, with codes and scales on meta.

    ``dtype`` is the compute dtype, that of the dense experts.
    """
    found = held_tensors(module, stacks, scheme)
    names = [name + kind for name in stacks.names for kind in FROZEN_KINDS]
    made = {name: frozen(found[name]) for name in names if name in found}
    _become(module, made, stacks, scheme, dtype)


def convert_experts(
    module: nn.Module, stacks: ExpertStacks, scheme: Scheme, weight_storage: str = "discard"
) -> LibraryExperts:
    """Turn a module of experts into an FP8 one in place, once all of its stacks are quantized.

    An error or an interrupt before that leaves it dense.
    """
    dtype, kept = module.get_parameter(stacks.down).dtype, {}
    made: dict[str, nn.Parameter] = {}
    for name in stacks.names:
        dense = module.get_parameter(name).detach()
        if weight_storage != "discard":
            kept[name] = dense.to("cpu") if weight_storage == "cpu_offload" else dense
        q = quantize_stack(dense, scheme, stacks.transposed, [])
        made |= {key: frozen(t) for key, t in stored_tensors(q, scheme, name).items()}
    converted = _become(module, made, stacks, scheme, dtype)
    converted.originals = kept
    return converted


def fp8_class(base: type[nn.Module]) -> type[LibraryExperts]:
    """Return the FP8 form of a class of experts, the same subclass at every call."""
    if base not in _CLASSES:
        own = {"dense_class": base, "__module__": __name__, "__doc__": base.__doc__}
        _CLASSES[base] = type(f"Fp8{base.__name__}", (LibraryExperts, base), own)
    return _CLASSES[base]


_CLASSES: dict[type[nn.Module], type[LibraryExperts]] = {}


def _blank(base: type[nn.Module]) -> LibraryExperts:
    made = fp8_class(base)
    return made.__new__(made)


def _become(
    module: nn.Module,
    made: dict[str, nn.Parameter],
    stacks: ExpertStacks,
    scheme: Scheme,
    dtype: torch.dtype,
) -> LibraryExperts:
    patch_libraries()
    order = [n + kind for n in stacks.names for kind in (*FROZEN_KINDS, "_bias")]
    tensors = module._parameters | made
    held = vars(module) | {"stacks": stacks, "scheme": scheme, "compute_dtype": dtype}
    held |= {"_parameters": {n: tensors[n] for n in order if n in tensors} | tensors}
    if hasattr(module, "is_transposed"):  # read by adapter libraries
        held["is_transposed"] = False
    # counts of experts are not settled, as libraries may set them anew
    numbers = {
        n for n in settings(module) if "num" not in n and n != "is_transposed" and n[0] != "_"
    }
    functions = {n for n, v in vars(module).items() if callable(v)}
    settled = frozenset(numbers | functions | {*module._modules})
    take_form(module, fp8_class(type(module)), held | {"originals": {}, "settled": settled})
    module.requires_grad_(False)  # freezes the biases of experts, too
    return cast(LibraryExperts, module)


def argument_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments of a class's ``forward`` after ``self``, in order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def own_gate(module: nn.Module, gated: bool) -> Gate | None:
    """Return the function that a module applies between its products; ``None`` if it has none."""
    own, act = getattr(module, "_apply_gate", None), getattr(module, "act_fn", None)
    if gated and own is not None:
        return cast(Gate, own)
    if not callable(act):
        return None
    return (lambda z: act(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]) if gated else act
