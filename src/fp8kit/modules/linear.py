"""``Fp8Linear``: an ``nn.Linear`` whose weight is FP8 codes and scales, both plain Parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8kit.formats import FP8_FORMATS, GroupShape, QTensor, Scheme, check_scale
from fp8kit.matmul.problem import MatmulProblem, linear_problem
from fp8kit.modules import dense, layer_options, refusals
from fp8kit.modules.entries import quantize_weight, quantized_entries, stored_tensors
from fp8kit.modules.guarded_weight import computed_codes, guarded, unguarded_for
from fp8kit.modules.kept_weight import (
    Made,
    codes_replaced,
    counted,
    follow_original,
    made_of_original,
)
from fp8kit.modules.libraries import patch_libraries
from fp8kit.modules.other_inputs import OTHERS, of_others
from fp8kit.modules.parameters import (
    apply_without_casts,
    as_bytes,
    cast_dtype,
    deepcopied,
    empty_tensors,
    frozen,
    shallow_copied,
    written_together,
)
from fp8kit.modules.pending import check_written
from fp8kit.modules.tracing import traced
from fp8kit.ops import operators, scale_validation, validation
from fp8kit.ops.operators import CodesCall, RowCodes
from fp8kit.runtime import settings
from fp8kit.runtime.replay_cache import Options, ReplayCache
from fp8kit.runtime.weight_hazards import invalidate, version

_is_compiling = torch.compiler.is_compiling  # bound once: every call needs it
_FROZEN = ("weight", "weight_scale", "weight_exponents", "input_scale")


class Fp8Linear(nn.Linear):
    """A linear layer with an FP8 weight: ``y = quantize(x) @ weight.T * scales + bias``.

    Its Parameters are ``weight`` (FP8 ``[N, K]``), ``weight_scale`` (``scale_shape((N, K),
    scheme.weight)``), ``input_scale`` (fp32 ``[1, 1]``, static schemes only), ``weight_exponents``
    (E8M0, rebased schemes only) and an optional ``bias [N]``: ``state_dict()`` is the checkpoint.
    Casts such as ``.half()`` change bias and ``compute_dtype``, never codes or scales. Weight and
    scales are frozen: gradients reach the input and, if it requires one, the bias.

    Four attributes may be set at any time. ``accum`` (``"fast"`` for the tensor core's own sums),
    ``batch_invariant`` (``True`` gives a row the same bits whatever other rows there are) and
    ``out_dtype`` (dtype of results; ``None`` for the input's) belong to the run and are not saved.
    ``scale_ub``, a number, bounds each amax of the input from above; checkpoints keep it.

    A new layer is uninitialized; ``from_linear`` and ``from_quantized`` return filled layers.

    Args:
        in_features: K.
        out_features: N.
        bias: whether to hold a bias of ``compute_dtype``.
        scheme: a preset name or a ``Scheme``.
        device: where the Parameters live; ``"meta"`` allocates nothing.
        dtype: compute dtype, that of the bias and of ``to_linear``: bf16, fp16 or fp32.

    Raises:
        TypeError: if ``bias`` is neither ``True`` nor ``False``, or ``dtype`` is no dtype.
        ValueError: for a size, scheme, device or ``dtype`` that a layer cannot have.

    Example:
        >>> layer = fp8kit.Fp8Linear.from_linear(nn.Linear(256, 512))
        >>> layer(torch.randn(3, 256)).shape
        torch.Size([3, 512])
    """

    weight_scale: nn.Parameter
    input_scale: nn.Parameter | None
    accum: str = settings.ACCUM
    batch_invariant: bool = settings.BATCH_INVARIANT
    out_dtype: torch.dtype | None = None
    scale_ub: float | None = None
    _bound: Tensor | None = None  # scale_ub on the device of the weight
    qualified_name = ""  # name in the converted model, for error messages
    form_note = ""  # why an MX weight is stored in its present form
    place = ""  # "first", "middle" or "last" of siblings whose input is known not to change
    sharded = False  # has held a distributed tensor: the whole weight may be borrowed memory
    transposed = False  # the dense layer was a Conv1D of Transformers, which holds [K, N]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: Scheme | str = "FP8_DYNAMIC",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer_options.check_new(self, in_features, out_features, bias, device, dtype)
        nn.Module.__init__(self)
        patch_libraries()
        self.in_features, self.out_features = in_features, out_features
        self.scheme = Scheme.of(scheme)
        self.compute_dtype = dtype or torch.get_default_dtype()
        self.original_weight: Tensor | None = None
        self._quantized_from: Made | None = None
        self.replays = ReplayCache()
        self.shared: Callable[[Fp8Linear, Tensor], Tensor] | None = None  # a SharedInput
        # registered first: other code takes the first Parameter's dtype for the compute dtype
        self.register_parameter("bias", None)
        for name, tensor in empty_tensors((out_features, in_features), self.scheme, device).items():
            setattr(self, name, frozen(tensor))
        self.register_parameter("input_scale", None)
        if self.scheme.static:
            self.input_scale = frozen(torch.empty(1, 1, dtype=torch.float32, device=device))
        if bias:
            self.bias = frozen(torch.empty(out_features, dtype=self.compute_dtype, device=device))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: Scheme | str = "FP8_DYNAMIC",
        input_scale: Tensor | None = None,
    ) -> Fp8Linear:
        """Quantize a dense layer; its bias Parameter is shared, its weight is left untouched.

        Args:
            linear: a layer with a bf16, fp16 or fp32 weight ``[N, K]``.
            scheme: a preset name or a ``Scheme``.
            input_scale: as in ``from_quantized``.

        Raises:
            TypeError, ValueError: as ``from_quantized``, or if ``linear`` is no dense layer.

        Example:
            >>> layer = Fp8Linear.from_linear(nn.Linear(256, 512), "FP8_BLOCK")
        """
        if not isinstance(linear, nn.Linear):
            raise dense.no_linear(linear)
        scheme = Scheme.of(scheme)
        q = quantize_weight(linear.weight.detach(), scheme)
        return cls.from_quantized(
            q, linear.bias, scheme=scheme, input_scale=input_scale, dtype=linear.weight.dtype
        )

    @classmethod
    def from_quantized(
        cls,
        weight: QTensor,
        bias: Tensor | None = None,
        *,
        scheme: Scheme | str = "FP8_DYNAMIC",
        input_scale: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Fp8Linear:
        """Wrap an FP8 weight and its scales, without copying them.

        Args:
            weight: codes ``[N, K]`` with scales of the scheme's weight granularity, or of MX.
            bias: ``[N]``; a Parameter is shared.
            scheme: a preset name or a ``Scheme``.
            input_scale: fp32 ``[1, 1]``, positive and finite, for static schemes and no others.
            dtype: the compute dtype: bf16, fp16 or fp32.

        Raises:
            TypeError: if ``weight`` is no ``QTensor``, or another argument is of the wrong type.
            ValueError: if shapes, granularity, devices or scales do not fit the scheme.

        Example:
            >>> layer = Fp8Linear.from_quantized(fp8kit.quantize(w, role="weight"))
        """
        scheme = Scheme.of(scheme)
        validation.check_layer_weight(weight, bias, scheme, input_scale)
        n, k = weight.shape
        layer = cls(k, n, False, scheme, device="meta", dtype=dtype)
        for name, tensor in stored_tensors(weight, scheme).items():
            setattr(layer, name, frozen(tensor))
        if input_scale is not None:
            scale_validation.check_input_scale(input_scale, weight.shape, weight.device, wait=True)
            layer.input_scale = frozen(input_scale)
        if bias is not None:
            layer.bias = bias if isinstance(bias, nn.Parameter) else frozen(bias)
        return layer

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Compute ``[..., N]`` from ``[..., K]``.

        Args:
            input: bf16, fp16 or fp32, dense or jagged; or the ``QTensor`` that ``fp8kit.quantize``
                returns for the scheme's activation granularity and dtype.

        Returns:
            ``[..., N]`` in ``out_dtype`` if that is set, else in the dtype of ``input`` (autocast's
            where it is on; ``compute_dtype`` for a ``QTensor``).

        Raises:
            TypeError, ValueError: if dtype, K, device or granularity do not fit the layer.
            UnsupportedError: if no backend computes it, or a fused norm left no codes for it.
        """
        if isinstance(input, OTHERS):
            return of_others(self, input)
        if self.original_weight is not None:
            follow_original(self)
        if _is_compiling():
            return traced(self, input)
        if self.shared is not None:
            return self.shared(self, input)
        inputs, constants, options = (input,), self.operands(), self._options
        y = self.replays.replay(operators.LINEAR, inputs, constants, options)
        if y is None:
            self.check_input(input)
            check_written(input)
            y = self.replays.run(operators.LINEAR, inputs, constants, options)
        return y

    def check_input(self, x: Tensor) -> None:
        """Raise a ``TypeError`` or ``ValueError`` that says why the layer cannot take ``x``."""
        # operands() because self.bias would run __getattr__, and torch.compile guards each step
        codes, scale, bias, fixed, _ = self.operands()
        try:
            validation.check_codes("the weight of an Fp8Linear", codes.dtype, self.scheme)
            validation.check_layer_input(x, codes.dtype)
            validation.check_operands(x, codes, bias, self.accum)
            check_scale(scale, codes.shape, self.scheme.weight, codes.device)
            scale_validation.check_input_scale(fixed, x.shape, x.device)
        except (TypeError, ValueError) as error:
            if not self.qualified_name:
                raise
            raise type(error)(f"{self._described()}: {error}") from None

    def compute(self, x: Tensor) -> Tensor:
        """Compute ``[..., N]`` from an input that ``check_input`` has accepted."""
        constants = self.operands()
        if _is_compiling():
            return operators.linear_registered(x, *constants, *self._options)
        return self.replays.call(operators.LINEAR, (x,), constants, self._options)

    def multiply(self, codes: RowCodes | CodesCall) -> Tensor:
        """Compute ``[..., N]`` from codes, or from a call that makes them; the input fits."""
        if self.original_weight is not None:
            follow_original(self)
        constants = self.operands()[:3]
        if isinstance(codes, CodesCall) and _is_compiling():
            codes = codes.traced()
        if isinstance(codes, CodesCall):
            operator, both = codes.then_multiply(self._options)
            call = (operator, codes.inputs, (*codes.constants, *constants), both)
            return self.replays.call(*call, codes.check)[0]
        inputs, options = codes.inputs, operators.options_of_codes(codes, self._options)
        if _is_compiling():
            return operators.codes_registered(*inputs, *constants, *options)
        return self.replays.call(operators.CODES, inputs, constants, options)

    def operands(self) -> tuple[Any, ...]:
        """Return weight, scale, bias, input scale and bound: the constants of ``LINEAR``."""
        held, bound = self._parameters, self._bound
        if bound is not None and bound.device != self.codes.device:
            self._bound = bound = layer_options.bound_of(self)
        try:
            return held["weight"], held["weight_scale"], held["bias"], held["input_scale"], bound
        except KeyError:  # a tensor is a buffer, or is computed by a parametrization
            return self.codes, self.weight_scale, self.bias, self.input_scale, bound

    def options(self) -> Options:
        """Return the options of ``operators.LINEAR``: its arguments that are no tensors."""
        return self._options

    def quantize_input(self, x: Tensor) -> RowCodes:
        """Quantize an input for ``multiply``, so that siblings share codes; no gradient flows."""
        codes, _, _, _, bound = self.operands()
        group, _, rounding, *_ = self._options
        assert group is not None
        return operators.quantize_rows(x, GroupShape(*group), codes.dtype, rounding, bound)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return a dense layer: the original weight if it was kept, else the dequantized one.

        Args:
            dtype: dtype of its weight; by default ``compute_dtype``.

        Returns:
            An ``nn.Linear`` on the device of this layer, with a copy of the bias.

        Example:
            >>> dense = layer.to_linear()
        """
        return dense.restored(self, self.compute_dtype if dtype is None else dtype)

    def problem(self, m: int) -> MatmulProblem:
        """Describe the matmul that this layer runs for ``m`` rows (see ``fp8kit.explain``)."""
        shape, device = (self.out_features, self.in_features), self.codes.device
        kind = (self.scheme, self.compute_dtype, device, self.bias is not None)
        return linear_problem(shape, *kind, m, self.accum, self.batch_invariant)

    def quantized_weight(self) -> QTensor:
        """View weight and scales as a ``QTensor``, without copying."""
        follow_original(self)
        return QTensor(self.codes.detach(), self.weight_scale.detach(), self.scheme.weight)

    def extra_repr(self) -> str:
        """Describe the layer in ``print(model)``."""
        return f"{super().extra_repr()}{layer_options.described(self)}"

    def reset_parameters(self) -> None:
        """Do nothing: FP8 weights are loaded or quantized, never drawn at random."""

    @property
    def codes(self) -> Tensor:
        """The Parameter of codes ``[N, K]``, without the guard that ``weight`` puts around it."""
        weight = self._parameters.get("weight")
        return computed_codes(self, "weight", self._described()) if weight is None else weight

    def keep(self, original_weight: Tensor) -> None:
        """Keep the dense weight that the codes were made from, and requantize when it changes."""
        self.original_weight = kept = counted(original_weight)
        self._quantized_from = (kept, version(kept), weakref.ref(self.codes))

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and combine the options when one is set, which saves the work at every call."""
        if name not in layer_options.CHECKED:
            super().__setattr__(name, value)
            return
        super().__setattr__(name, layer_options.checked(self, name, value))
        self._options, self._bound = layer_options.options_of(self), layer_options.bound_of(self)

    def __getattr__(self, name: str) -> Any:
        """Guard ``weight``; refuse ``distribute_module``, as it would split codes, not scales."""
        if name == "weight":
            weight = self.__dict__.get("_parameters", {}).get(name)
            if type(weight) in (Tensor, nn.Parameter) and weight.dtype in FP8_FORMATS:
                if torch.compiler.is_compiling():
                    return weight
                follow_original(self)
                return guarded(weight, self._described(), self, name)
        elif name == "_distribute_module_applied":  # the first thing distribute_module asks for
            raise refusals.tensor_parallel(self._described())
        return super().__getattr__(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Walk as any module does; a library that replaces layers walks first: patch it now."""
        patch_libraries()
        return super().named_modules(*args, **kwargs)

    def _described(self) -> str:
        name = self.qualified_name or "an unnamed layer"
        return f"{name} (Fp8Linear [{self.out_features}, {self.in_features}])"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Hold a plain Parameter, also when the guarded view ``layer.weight`` is assigned."""
        if param is not None:
            invalidate(param)  # fully_shard gathers weights without raising version counters
            self.sharded = self.sharded or is_traceable_wrapper_subclass(param)
        super().register_parameter(name, unguarded_for(param, self._described))
        if name == "weight":
            codes_replaced(self)

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script`` with an error that says what to use instead."""
        raise refusals.scripting(self._described())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        follow_original(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        apply_without_casts(self, _FROZEN, fn, recurse)
        self.compute_dtype = cast_dtype(fn, self.compute_dtype, self.codes.device)
        if self.original_weight is not None and self.original_weight.device.type != "cpu":
            follow_original(self)
            self.keep(fn(self.original_weight))
        codes_replaced(self)
        return self

    __copy__ = shallow_copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Linear:
        """Copy the layer without its siblings; those copied in the same call share input again."""
        follow_original(self)
        twin: Fp8Linear = made_of_original(deepcopied(self, memo), self)
        if twin.shared is not None:
            twin._join_again(twin.shared, self._index())
        return twin

    def _index(self) -> int | None:
        members = getattr(self.shared, "members", ())
        return members.index(self) if self in members else None

    def _join_again(self, group: Any, index: int | None) -> None:
        self.shared, self.place = None, ""
        if index is not None:
            group.adopt(index, self)

    def __getstate__(self) -> dict[str, Any]:
        """Give codes as uint8: plain pickle has no storage type for FP8."""
        follow_original(self)
        own = ("replays", "_options", "_quantized_from")
        state = {n: v for n, v in vars(self).items() if n not in own}
        state["shared"] = self.shared and (self.shared, self._index())
        state["_parameters"] = as_bytes(self._parameters)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        patch_libraries()
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.pop("_tapes", None)  # older files have recordings under this name
        self.replays, self._options = ReplayCache(), layer_options.options_of(self)
        self._parameters["weight"] = frozen(self.codes.detach().view(self.scheme.dtype))
        made_of_original(self)
        if isinstance(self.shared, tuple):  # older files have the SharedInput itself
            self._join_again(*self.shared)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Accept FP8 codes with scales, or a dense weight, which is quantized into place."""
        try:
            assign = local_metadata.get("assign_to_params_buffers", False)
            state_dict = quantized_entries(self, state_dict, prefix, assign)
        except (TypeError, ValueError) as error:
            rest[-1].append(str(error))  # torch's list of error messages
            return
        with written_together(self, ("weight",), replaced=assign):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
