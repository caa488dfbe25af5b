"""The base of all modules of FP8 experts: stacks of codes ``[E, N, K]``, and their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8kit.dispatch.device import capability
from fp8kit.errors import CheckpointError
from fp8kit.formats import FP8_FORMATS, MX, QTensor, Scheme
from fp8kit.matmul.problem import MatmulProblem, linear_problem, m_bucket
from fp8kit.modules import layer_options
from fp8kit.modules.entries import (
    check_form,
    check_shapes,
    quantize_weight,
    stored_entries,
    stored_tensors,
)
from fp8kit.modules.expert_stacks import ExpertStacks, quantize_stack
from fp8kit.modules.guarded_weight import computed_codes, guarded, unguarded
from fp8kit.modules.libraries import patch_libraries
from fp8kit.modules.parameters import (
    apply_without_casts,
    as_bytes,
    cast_dtype,
    deepcopied,
    frozen,
    written_together,
)
from fp8kit.moe.activation import Activation
from fp8kit.moe.problem import ExpertsProblem
from fp8kit.ops.validation import check_codes, default_rounding
from fp8kit.quantizers.rebase import restore

# suffixes of a stack's Parameters except its bias, in the order in which modules hold them
FROZEN_KINDS = ("", "_scale", "_exponents", "_input_scale")


class ExpertTensors(nn.Module):
    """A module of FP8 experts, of this package or in the class of another library.

    ``<name>`` holds codes ``[E, N, K]`` and ``<name>_scale`` their scales (``stack_scale_shape``).
    Static schemes add ``<name>_input_scale`` (fp32 ``[1, 1]``), rebased ones ``<name>_exponents``
    (uint8 ``[E, N, K / 32]``). All are frozen; casts change only ``compute_dtype`` and biases.
    """

    stacks: ExpertStacks
    scheme: Scheme
    compute_dtype: torch.dtype
    originals: dict[str, Tensor]
    form_note = ""  # why MX weights are stored in their present form

    @property
    def expert_count(self) -> int:
        """E."""
        return self.codes(self.stacks.down).shape[0]

    def codes(self, name: str) -> Tensor:
        """Return the codes of a stack, ``[E, N, K]``."""
        # not get_parameter, which refuses the plain tensors that functional_call puts here
        held = self._parameters.get(name)
        return computed_codes(self, name, type(self).__name__) if held is None else held

    def beside(self, name: str, kind: str) -> Tensor | None:
        """Return ``bias``, ``scale``, ``exponents`` or ``input_scale`` of a stack, if any."""
        key = f"{name}_{kind}"
        if key in self._parameters:
            return self._parameters[key]
        # a buffer, a replica's plain tensor, or a parametrization
        elsewhere = key in self._buffers or key in vars(self) or hasattr(type(self), key)
        return cast(Tensor, getattr(self, key)) if elsewhere else None

    def quantized(self, name: str) -> QTensor:
        """View codes and scales of a stack as a ``QTensor``, without copying."""
        scale = cast(Tensor, self.beside(name, "scale"))
        return QTensor(self.codes(name).detach(), scale.detach(), self.scheme.weight)

    def operand(self, name: str) -> QTensor:
        """Return a stack as products take it: the Parameters themselves, which recordings guard."""
        codes, scale = self.codes(name), cast(Tensor, self.beside(name, "scale"))
        check_codes(f"{name} of {type(self).__name__}", codes.dtype, self.scheme)
        return QTensor(codes, scale, self.scheme.weight)

    def _options(self) -> dict[str, Any]:
        """Return the keywords of ``moe.experts`` except codes, ids, weights and activation."""
        up, down = self.stacks.names
        return {
            "scheme": self.scheme,
            "bias13": self.beside(up, "bias"),
            "bias2": self.beside(down, "bias"),
            "input_scale13": self.beside(up, "input_scale"),
            "input_scale2": self.beside(down, "input_scale"),
        }

    def stored(self, name: str) -> QTensor:
        """Return a stack as checkpoints hold it: a view, or the MX weights before rebasing."""
        q, exponents = self.quantized(name), self.beside(name, "exponents")
        what = f"{name} of {type(self).__name__}"
        return q if exponents is None else restore(q, exponents.detach(), what)

    def problem(self, m: int, top_k: int) -> ExpertsProblem:
        """Describe a call: ``m`` tokens with ``top_k`` experts each (see ``fp8kit.explain``)."""
        (up, down), scheme = self.stacks.names, self.scheme
        count, hidden, inner = self.codes(down).shape
        place, static = self.codes(down).device, self.beside(up, "input_scale") is not None
        rounding = default_rounding(scheme.activation, scheme.ue8m0)
        return ExpertsProblem(
            m_bucket(m * count if self.stacks.call == "sorted" else m), count, top_k, hidden, inner,
            cast(Activation, self.stacks.activation), scheme.activation, scheme.weight,
            self.compute_dtype, scheme.dtype, rounding, static,
            self.beside(down, "input_scale") is not None,
            getattr(self, "router_weight_on_input", False), getattr(self, "batch_invariant", False),
            place.type, capability(place),
        )  # fmt: skip

    def products(self, m: int) -> dict[str, MatmulProblem]:
        """Describe the product of each stack for ``m`` rows of one expert, by its name."""
        found = {}
        for name in self.stacks.names:
            codes, bias = self.codes(name), self.beside(name, "bias") is not None
            _, n, k = codes.shape
            kind = (self.scheme, self.compute_dtype, codes.device, bias)
            found[name] = linear_problem((n, k), *kind, m)
        return found

    def tensors(self) -> Iterator[tuple[str, str]]:
        """Yield the name of a stack and of one of its frozen Parameters, for all of them."""
        for name in self.stacks.names:
            for kind in FROZEN_KINDS:
                if self._parameters.get(name + kind) is not None:
                    yield name, name + kind

    @torch.no_grad()
    def store(self, name: str, expert: int, weight: QTensor | Tensor) -> None:
        """Overwrite the matrix of one expert in place; a dense one is quantized.

        ``weight`` is ``[N, K]``; for a rebased scheme codes come with MX scales.
        """
        if isinstance(weight, Tensor):
            weight = quantize_weight(weight.to(self.codes(name).device), self.scheme)
        stored = stored_tensors(weight, self.scheme, name)
        with written_together(self, (name,), expert=expert):
            for key, tensor in stored.items():
                # not the guarded view of codes, whose writes torch counts late
                cast(Tensor, nn.Module.__getattr__(self, key))[expert].copy_(tensor)
        self.originals.pop(name, None)  # the new codes were not made from it

    def __getattr__(self, name: str) -> Any:
        """Guard the stacks of codes, as ``Fp8Linear`` guards its weight."""
        stacks = self.__dict__.get("stacks")
        if stacks is not None and name in stacks.names and not torch.compiler.is_compiling():
            held = self.__dict__["_parameters"].get(name)
            if type(held) in (Tensor, nn.Parameter) and held.dtype in FP8_FORMATS:
                return guarded(held, f"{name} of {type(self).__name__}", self, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Resolve a scheme that is set, and check that it reads the codes and scales held here."""
        if name == "scheme":
            value = Scheme.of(value)
            for stack in self.stacks.names:
                layer_options.checked_scheme(self, value, stack, f"{stack}_input_scale")
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Hold a plain Parameter, also when a guarded view of one is assigned."""
        super().register_parameter(name, unguarded(param))

    def extra_repr(self) -> str:
        """Describe the experts in ``print(model)``."""
        shapes = ", ".join(f"{n}={list(self.codes(n).shape)}" for n in self.stacks.names)
        return f"{shapes}, scheme={self.scheme}, compute_dtype={self.compute_dtype}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertTensors:
        apply_without_casts(self, [name for _, name in self.tensors()], fn, recurse)
        device = self.codes(self.stacks.down).device
        self.compute_dtype = cast_dtype(fn, self.compute_dtype, device)
        return self

    __deepcopy__ = deepcopied

    def __getstate__(self) -> dict[str, Any]:
        """Give codes as uint8: plain pickle has no storage type for FP8."""
        return {**self.__dict__, "_parameters": as_bytes(self._parameters)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        patch_libraries()
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in self.stacks.names:
            self._parameters[name] = frozen(self.codes(name).detach().view(self.scheme.dtype))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Accept codes with scales, or dense stacks in the class's layout, which are quantized."""
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            state_dict = dict(state_dict)
            for name in self.stacks.names:
                self._check_entries(name, state_dict, prefix, assign)
        except (TypeError, ValueError) as error:
            rest[-1].append(str(error))
            return
        with written_together(self, self.stacks.names, replaced=assign):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _check_entries(self, name: str, state: dict[str, Any], prefix: str, assign: bool) -> None:
        """Quantize a dense stack of a ``state_dict``; refuse codes or scales without the other."""
        key, scale_key = prefix + name, f"{prefix}{name}_scale"
        weight, scale = state.get(key), state.get(scale_key)
        if (weight is None and scale is None) or not isinstance(weight, Tensor | None):
            return  # nn.Module names what is no tensor
        coded = weight is not None and weight.dtype in FP8_FORMATS
        if weight is not None and not coded and scale is self._parameters[f"{name}_scale"]:
            scale = None  # set_model_state_dict fills missing entries with the layer's own
        if weight is None or coded != (scale is not None):
            raise CheckpointError(
                f"{key} is {'absent' if weight is None else weight.dtype}, "
                f"and {scale_key} is {'absent' if scale is None else 'there'}.",
                "FP8 codes come with their scales, and a dense stack comes without.",
                "Load both in one call, or the dense stack alone.",
            )
        if coded:
            check_shapes(self, state, prefix, name, f"{name}_input_scale")
            as_mx = check_form(self.scheme, key, state)
            if not as_mx:
                check_shapes(self, state, prefix, f"{name}_scale", f"{name}_exponents")
            self.originals.pop(name, None)
            if as_mx:
                q = QTensor(weight.detach(), state[scale_key].detach(), MX)
                state |= stored_entries(q, self.scheme, prefix, name)
            return
        n, k = self.codes(name).shape[1:]
        held = (k, n) if self.stacks.transposed else (n, k)
        if tuple(weight.shape) != (self.expert_count, *held):
            return  # nn.Module raises the error about the shape
        if name in self.originals:
            self.originals[name].copy_(weight.detach())
        place = weight.device if assign else self.codes(name).device
        q = quantize_stack(weight.detach().to(place), self.scheme, self.stacks.transposed, [])
        state |= stored_entries(q, self.scheme, prefix, name)
        if (fixed := self.beside(name, "input_scale")) is not None:
            state.setdefault(f"{prefix}{name}_input_scale", fixed.detach())


def codes_shape(shape: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """Return ``(E, N, K)`` of a stack's shape, which is ``(E, K, N)`` if ``transposed``."""
    e, n, k = shape
    return (e, k, n) if transposed else shape
