"""Place tensors that arrive one by one, in any order; weights are stored when complete."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, MutableMapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fp8kit import functional
from fp8kit.checkpoint.loading.expert_placement import StackPlacement
from fp8kit.checkpoint.loading.merged_weights import (
    Fp8Weight,
    check_shape,
    fp8_weight,
    join,
    quantized,
    rows_of,
)
from fp8kit.checkpoint.loading.partial_tensors import Partials
from fp8kit.checkpoint.schema.decoding import cast_numbers, check_cast, same_bytes
from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.merged_names import SCALES, Route, Shapes, find
from fp8kit.checkpoint.schema.naming import layer_and_kind, named
from fp8kit.errors import CheckpointError
from fp8kit.formats import BLOCK, FP8_FORMATS, MX, ROW, GroupShape, QTensor, Scheme, scale_shape
from fp8kit.modules import refusals
from fp8kit.modules.entries import stored_tensors
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.parameters import written_together
from fp8kit.quantizers.rebase import restore

_SHOWN = 20
_EXPONENTS = "weight_exponents"


class Placement:
    """Places tensors in a model as they arrive; quantizes every weight once, when it is complete.

    A weight that comes in parts (q/k/v, gate/up, experts) is complete when all parts are there, FP8
    codes when their scales are there. A complete weight is written into the model's storage, which
    is allocated if it is on meta, and is not kept here.

    ``sources`` are the FP8 layers of a checkpoint; without them, scales have the name of any
    dialect, and codes the scheme of the layer they go into. By default tensors keep device and
    dtype, those on meta go to the CPU, and decoded FP8 weights become ``high``. Unless arriving
    tensors are ``owned``, they are copied while they wait, because the caller may reuse their
    memory, and the model's dtypes stay.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Shapes,
        sources: Mapping[str, Layer] | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        high: torch.dtype = torch.bfloat16,
        owned: bool = False,
    ) -> None:
        self.placed: set[str] = set()
        self.unused: list[str] = []
        self.decoded: list[str] = []
        self._module = weakref.WeakMethod(model.get_submodule)  # a load may outlive its model
        self.shapes, self._layers = shapes, sources or {}
        self._roles = {
            name: (layer.name, role)
            for layer in self._layers.values()
            for role, name in layer.tensors.items()
        }
        self._device, self._dtype, self._high = device, dtype, dtype or high
        self._owned = owned
        # not bound methods: by them the stacks would keep this object alive, and all its tensors
        self._place = functools.partial(_place, device)
        self._kept = functools.partial(_kept, owned)
        self._stacks = StackPlacement(model, self._place, self._kept)
        self._roles = self._stacks.roles() | self._roles
        self._arrived: set[str] = set()
        self._dense: dict[str, torch.dtype] = {}  # layers whose weight came in high precision
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._partial = Partials(shapes)
        # tensor of the model -> name that filled it, tensor there now; tied names share an entry
        self._filled: MutableMapping[Tensor, tuple[str, Tensor]] = WeakIdKeyDictionary()

    def put(self, name: str, tensor: Tensor) -> None:
        """Take one tensor, on any device, by its name in the checkpoint.

        Raises ``CheckpointError`` if it has arrived before, does not fit, or contradicts its scale,
        and ``ConversionError`` if it cannot be quantized.
        """
        layer, kind = self._roles.get(name) or layer_and_kind(name, self.shapes)
        if named(layer, kind) in self._arrived:  # maybe by another name
            raise CheckpointError(
                f"{name} arrived twice.",
                "One load brings each tensor once.",
                "Drop one of the two; another load may bring it again.",
            )
        if tensor.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device.",
                "What is loaded has values.",
                "Pass the tensor itself, from where it is in memory.",
            )
        tensor = tensor.detach()
        route = self._route(layer, "weight") if kind == _EXPONENTS else None
        route = route or self._route(layer, kind)
        if route is None:
            self.unused.append(name)
            return
        self._arrived.add(named(layer, kind))
        fp8 = tensor.dtype in FP8_FORMATS
        stacked = self._stacks.home(route) is not None
        if kind == "weight" and not fp8:
            self._dense[layer] = tensor.dtype
        if not (fp8 or stacked) and name in self.shapes and self._fp8_layer(route) is None:
            self._write(route, name.rpartition(".")[2], tensor)
        elif fp8 or kind in ("weight", *SCALES, _EXPONENTS):
            source = self._waiting.setdefault(layer, {})
            source[kind] = tensor
            if self._missing(layer, source):
                source[kind] = self._kept(tensor)
            else:
                del self._waiting[layer]
                known = self._layers.get(layer)  # a stack of experts has a name of its own
                key = known.weight.rpartition(".")[2] if known else "weight"
                self._deliver(route, layer, self._value(layer, source), key)
        else:
            self._deliver(route, layer, tensor, kind)

    def finish(self) -> None:
        """Raise ``CheckpointError`` if a weight still waits; it names each and what it lacks."""
        waiting = [
            f"{named(layer, next(iter(source)))} waits for {self._missing(layer, source)}"
            for layer, source in self._waiting.items()
        ]
        absent = (*self._partial.absent(), *self._stacks.absent())
        waiting += [f"{name} waits for {part}" for name, part in absent]
        if waiting:
            listed = "\n  ".join(waiting[:_SHOWN])
            raise CheckpointError(
                f"{len(waiting)} weights are not whole:\n  {listed}\n",
                "A weight is loaded when all its parts and scales are there.",
                "Bring them in the same load.",
            )
        self._filled.clear()  # MX weights are replaced by rebased ones, and shall go then

    def _fp8_layer(self, route: Route) -> Fp8Linear | None:
        if route.split or route.expert is not None:
            return None
        found = self._submodule(route.target)
        return found if isinstance(found, Fp8Linear) else None

    def _submodule(self, name: str) -> nn.Module:
        get = self._module()
        assert get is not None
        return get(name)

    def _route(self, layer: str, kind: str) -> Route | None:
        if (whole := self._stacks.route(layer)) is not None:
            return whole
        known = self._layers.get(layer)
        if known is not None and known.weight == layer:
            holder, _, kind = layer.rpartition(".")
            return find(holder, kind, self.shapes)
        return find(layer, kind, self.shapes)

    def _numbers(self, layer: str) -> tuple[Scheme, GroupShape] | None:
        """Return the scheme of a layer's codes and the granularity of their scales, if known."""
        known = self._layers.get(layer)
        if known is not None:
            return known.scheme, known.group
        route = self._route(layer, "weight")
        home = self._stacks.home(route)
        if home is not None:
            scheme = cast(ExpertTensors, self._submodule(home[0])).scheme.stored
            return scheme, scheme.weight
        names = route.split or (route.target,) if route and route.expert is None else ()
        found = [m.scheme for m in map(self._submodule, names) if isinstance(m, Fp8Linear)]
        return (found[0].stored, found[0].stored.weight) if found else None

    def _missing(self, layer: str, source: dict[str, Tensor]) -> str:
        """Name what a weight waits for; empty if it is complete."""
        numbers = self._numbers(layer)
        if layer not in self._dense:
            static = numbers is not None and numbers[0].static
            known, kinds = self._layers.get(layer), SCALES if static else SCALES[:1]
            names = known.tensors if known else {k: named(layer, k) for k in ("weight", *kinds)}
            scale = source.get("weight_scale")
            if scale is not None and scale.dtype != torch.uint8 and numbers and numbers[1] == MX:
                names[_EXPONENTS] = named(layer, _EXPONENTS)  # an MX weight that was rebased
            return " and ".join(name for kind, name in names.items() if kind not in source)
        if beside := [kind for kind in (*SCALES, _EXPONENTS) if kind in source]:
            raise CheckpointError(
                f"{named(layer, 'weight')} is {self._dense[layer]} and comes with {beside[0]}.",
                "A dense weight has no scale, and FP8 codes that were cast are no weight.",
                "Drop the scale of a dense weight, or pass the codes as they were: of a state_dict "
                "that .half() or .to(dtype) has cast, the one before the cast.",
            )
        return ""

    def _value(self, layer: str, source: dict[str, Tensor]) -> Tensor | Fp8Weight:
        weight, numbers = source["weight"], self._numbers(layer)
        if weight.dtype not in FP8_FORMATS:
            return weight
        if numbers is None:
            raise CheckpointError(
                f"{named(layer, 'weight')} is {weight.dtype}, and its layer is in high precision.",
                "Codes load where their scheme is known: into an FP8 layer, or from a checkpoint.",
                "Pass the dense weight, or convert the layer first.",
            )
        if numbers[0].dtype != weight.dtype:
            raise CheckpointError(
                f"{named(layer, 'weight')} is {weight.dtype}, and its layer is {numbers[0]}.",
                f"The layer holds codes of {numbers[0].dtype}.",
                "Pass such codes (fp8kit.recode makes e4m3 ones of others), or the dense weight.",
            )
        scale, input_scale = source["weight_scale"], source.get("input_scale")
        if _EXPONENTS in source and scale.dtype == torch.float32:
            rows = scale_shape(weight.shape, ROW)
            group = ROW if tuple(scale.shape) == rows else BLOCK
            held, what = QTensor(weight, scale, group), named(layer, "weight")
            weight = restore(held, source[_EXPONENTS], what).data
            scale = source[_EXPONENTS]
        return fp8_weight(named(layer, "weight_scale"), weight, scale, input_scale, numbers[1])

    def _deliver(self, route: Route, layer: str, value: Tensor | Fp8Weight, kind: str) -> None:
        """Hand a complete tensor to its target, or divide it among several."""
        home = self._stacks.home(route)
        if home is not None and kind in ("weight", home[1]):
            module = cast(ExpertTensors, self._submodule(home[0]))
            self.placed |= self._stacks.put(module, route, value)
            return
        if route.split:
            last = [0]
            for target in route.split:
                last.append(last[-1] + self.shapes[named(target, kind)][0])
            check_shape(layer, value.shape[:1], last[-1:])
            for target, a, b in zip(route.split, last, last[1:], strict=False):
                part = value[a:b] if isinstance(value, Tensor) else rows_of(value, a, b, layer)
                self._deliver(Route(target, (target,)), target, part, kind)
            return
        owner = self._fp8_layer(route)
        if owner is not None and kind == "weight":
            self._gather(owner, route, value)
            return
        if isinstance(value, Fp8Weight):
            self.decoded.append(layer)
            value = functional.dequantize(value.q, self._high)
            known = self._layers.get(layer)
            value = value.transpose(-1, -2) if known and known.transposed else value
        self._write(route, kind, value)

    def _gather(self, owner: Fp8Linear, route: Route, value: Tensor | Fp8Weight) -> None:
        """Take a part of an FP8 layer's weight, and fill the layer when all are there."""
        name, shape = route.tensor("weight"), (owner.out_features, owner.in_features)
        if route.whole:
            if owner.transposed and isinstance(value, Tensor):
                check_shape(name, value.shape, shape[::-1])
                value = value.t()
            check_shape(name, value.shape, shape)
            self._store(owner, route.target, value)
            return
        partial = self._partial.begin(route, name, value.shape, shape)
        if isinstance(value, Fp8Weight):
            q = QTensor(self._kept(value.q.data), self._kept(value.q.scale), value.q.group)
            partial.codes[route.index] = Fp8Weight(q, value.input_scale)
        else:
            if partial.dense is None:
                partial.dense = torch.empty(
                    shape, dtype=value.dtype, device=self._place(owner.weight)
                )
            partial.fill(partial.dense, route, value, self._kept)
        if self._partial.end(name):
            parts = [partial.codes[index] for index in sorted(partial.codes)]
            if parts and partial.dense is not None:
                raise CheckpointError(
                    f"Of {', '.join(route.sources)}, some are FP8 and some are not.",
                    f"{route.target} joins them into one layer of one kind.",
                    "Load into a model that keeps these layers apart.",
                )
            whole = (
                join(parts, owner.scheme.stored.weight, route.target) if parts else partial.dense
            )
            assert whole is not None
            self._store(owner, route.target, whole)

    def _store(self, layer: Fp8Linear, name: str, value: Tensor | Fp8Weight) -> None:
        self._check_unmerged(name, "weight")
        place = self._place(layer.weight)
        if isinstance(value, Fp8Weight):
            if value.q.group != layer.scheme.stored.weight:
                value = join([value], layer.scheme.stored.weight, name)
            layer.original_weight = None  # these codes were not made from it
            found = stored_tensors(value.q, layer.scheme, layer=name)
            if value.input_scale is not None and layer.input_scale is not None:
                found["input_scale"] = value.input_scale
        else:
            q = quantized(value.to(place), layer.scheme, named(name, "weight"))
            if layer.original_weight is not None:
                layer.original_weight.copy_(value)
                layer.keep(layer.original_weight)  # in its dtype it may have other codes
            found = stored_tensors(q, layer.scheme, layer=name)
        with written_together(layer, ("weight",)):
            for kind, tensor in found.items():
                self._set(layer, kind, tensor, named(name, kind), fresh=isinstance(value, Tensor))
                self.placed.add(named(name, kind))

    def _check_unmerged(self, layer: str, kind: str) -> None:
        """Refuse a tensor of a LoRA's base layer that unmerging would overwrite."""
        wrapper = self._submodule(layer.rpartition(".")[0])
        if kind in getattr(wrapper, "restored_by_unmerge", ()):
            raise refusals.merged(named(layer, kind), cast(list[str], wrapper.merged_adapters))

    def _write(self, route: Route, kind: str, value: Tensor) -> None:
        """Fill a tensor in high precision, or those of its rows that have arrived."""
        name = route.tensor(kind)
        owner, _, key = name.rpartition(".")
        module = self._submodule(owner)
        if key == "_extra_state":
            module.set_extra_state(value)
            self.placed.add(name)
            return
        if self._dtype is not None and value.is_floating_point():
            value = cast_numbers(name, value, self._dtype)
        self._check_unmerged(owner, key)
        held, shape = getattr(module, key), self.shapes[name]
        check_cast(name, value, held.dtype)
        _refuse_numbers(name, value, module, key)
        if held.is_floating_point() and not value.is_floating_point():
            value = value.to(self._dtype or held.dtype)  # as load_state_dict does
        if not self._owned and value.is_floating_point():
            value = cast_numbers(name, value, held.dtype)
        if route.whole:
            check_shape(name, value.shape, shape)
            self._set(module, key, value, name)
            self.placed.add(name)
            return
        if getattr(module, "is_transposed", False):
            raise CheckpointError(
                f"{name} stacks its experts as [E, K, N].",
                "Single experts [N, K] are put into stacks [E, N, K].",
                "Pass the stacked tensor, or load the directory without model=.",
            )
        matrix = shape if route.expert is None else shape[1:]
        partial = self._partial.begin(route, name, value.shape, matrix)
        if held.is_meta or (self._device is not None and held.device != self._device):
            place = self._place(held)
            dtype = value.dtype if held.is_meta else held.dtype
            _substitute(module, key, torch.empty(shape, dtype=dtype, device=place))
        view = getattr(module, key).detach()
        view = view if route.expert is None else view[route.expert]
        partial.fill(view, route, value, self._kept)
        if self._partial.end(name):
            self.placed.add(name)

    def _set(
        self, module: nn.Module, key: str, value: Tensor, name: str, fresh: bool = False
    ) -> None:
        # not the guarded view of a weight, which is a new object at each access
        held = cast(Tensor, nn.Module.__getattr__(module, key))
        moved = value.to(self._place(held))
        other, first = self._filled.get(held, ("", held))
        if other:
            _check_tied(other, name, first.detach(), moved)
            setattr(module, key, first)
            return
        self._filled[held] = name, held
        if not held.is_meta and held.device == moved.device:
            if any(n > 1 and not step for n, step in zip(held.shape, held.stride(), strict=True)):
                held.data = held.data.contiguous()  # an expanded tensor repeats memory
            with torch.inference_mode(held.is_inference()), torch.no_grad():
                held.copy_(cast_numbers(name, moved, held.dtype))
            return
        borrowed = moved is value and not (fresh or self._owned)
        part = moved.untyped_storage().nbytes() > moved.nbytes  # would keep the whole storage alive
        if borrowed or part or not moved.is_contiguous():
            moved = moved.clone(memory_format=torch.contiguous_format)
        made = _substitute(module, key, moved)
        self._filled[held] = self._filled[made] = name, made


def _kept(owned: bool, tensor: Tensor) -> Tensor:
    return tensor if owned else tensor.clone()


def _place(device: torch.device | None, held: Tensor) -> torch.device:
    return device or (torch.device("cpu") if held.is_meta else held.device)


def _substitute(module: nn.Module, key: str, value: Tensor) -> Tensor:
    """Replace a tensor of a module, as a Parameter if it was one."""
    held = getattr(module, key)
    if isinstance(held, nn.Parameter):
        value = nn.Parameter(value, requires_grad=held.requires_grad)
    setattr(module, key, value)
    return value


def _check_tied(first: str, second: str, held: Tensor, value: Tensor) -> None:
    """Refuse different tensors for two names that the model ties."""
    if not same_bytes(held, value.to(held.dtype)):
        raise CheckpointError(
            f"{first} and {second} differ, and the model ties them: they are one tensor.",
            "What is loaded under either name is the same.",
            "Untie them in the model, or drop the one that does not count.",
        )


def _refuse_numbers(name: str, value: Tensor, module: nn.Module, key: str) -> None:
    """Refuse numbers for codes of a module that holds their scales and is not fp8kit's own."""
    scales = {f"{key}_scale", f"{key}_scale_inv"} & {*module._parameters, *module._buffers}
    if scales and getattr(module, key).dtype in FP8_FORMATS and value.dtype not in FP8_FORMATS:
        raise CheckpointError(
            f"{name} has numbers of {value.dtype}, and {type(module).__name__} holds codes there.",
            "Only weights of fp8kit.Fp8Linear and of its experts are quantized while they arrive.",
            "Use model.load_state_dict, or the module's weight_loader.",
        )
