"""``FP8Linear`` of the copied ``fp8_gemm.py``: a layer that becomes FP8 when a GPU runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.shapes import with_scale
from fp8kit.errors import InvalidType, InvalidValue, check_choice, check_switch, teach
from fp8kit.formats import FLOATS, FP8_FORMATS, TENSOR
from fp8kit.modules.dense import unlike_linear
from fp8kit.modules.hooks import carry_hooks, is_replaced
from fp8kit.modules.linear import Fp8Linear as Core
from fp8kit.runtime.weight_hazards import UNCOUNTED, version

STORAGES = ("keep", "cpu_offload", "discard")
_16_BITS = (torch.float16, torch.bfloat16)
_INPUTS = (*FLOATS, torch.float64)
_HELD = ("weight", "weight_scale", "bias")


@dataclass(frozen=True)
class FP8GemmOptions:
    """How ``FP8Linear`` treats inputs of other dtypes, and the dense weight.

    Args:
        cast_inputs: inputs that are not bf16 or fp16 are cast to bf16; otherwise the dense weight
            multiplies them.
        cast_output_back: the result of a cast input gets the input's dtype; otherwise it is bf16.
        fp16_weight_storage: where the dense weight is: ``"keep"`` leaves the dense layer in
            ``FP8Linear.linear``; ``"cpu_offload"`` keeps its weight on the CPU; ``"discard"`` drops
            it as soon as there are codes.
        materialize_fp8_on_wrap: weights that are on a GPU are quantized at once.

    Raises:
        TypeError: if a switch is neither ``True`` nor ``False``.
        ValueError: if the options contradict each other.

    Example:
        >>> FP8GemmOptions(fp16_weight_storage="keep").cast_inputs
        True
    """

    cast_inputs: bool = True
    cast_output_back: bool = True
    fp16_weight_storage: Literal["keep", "cpu_offload", "discard"] = "discard"
    materialize_fp8_on_wrap: bool = True

    def __post_init__(self) -> None:
        for switch in ("cast_inputs", "cast_output_back", "materialize_fp8_on_wrap"):
            check_switch(switch, getattr(self, switch))
        check_choice("fp16_weight_storage", self.fp16_weight_storage, STORAGES)
        if self.fp16_weight_storage == "discard" and not self.cast_inputs:
            raise InvalidValue(
                "Got fp16_weight_storage='discard' with cast_inputs=False.",
                "Inputs that are not cast need the dense weight.",
                "Use cast_inputs=True, or fp16_weight_storage='keep' or 'cpu_offload'.",
            )


DEFAULT_OPTIONS = FP8GemmOptions()


class FP8Linear(nn.Module):
    """A linear layer whose FP8 weight is made at the first forward on a GPU.

    On a CPU it multiplies by the dense weight. The FP8 weight is made again if a kept dense weight
    has changed, or the input is on another device. ``state_dict`` has ``linear.weight`` and
    ``linear.bias`` in the mode ``"keep"``, and otherwise ``weight`` and ``bias``, with
    ``weight_scale`` once the dense weight is discarded. Every mode loads all of these names, with
    dense weights or codes.

    Args:
        linear: bf16, fp16 or fp32.
        options: see ``FP8GemmOptions``.

    Raises:
        TypeError: if ``linear`` is no ``nn.Linear``, or computes something else.
        ValueError: if the options contradict each other.

    Example:
        >>> layer = fp8kit.compat.FP8Linear.from_linear(nn.Linear(64, 64), options=options)
    """

    linear: nn.Linear | None
    bias: nn.Parameter | None

    @names_wrong_argument
    def __init__(self, linear: nn.Linear, *, options: FP8GemmOptions = DEFAULT_OPTIONS) -> None:
        super().__init__()
        check_wrappable(linear, options)
        carry_hooks(linear, self)
        self.options = options
        self.in_features, self.out_features = linear.in_features, linear.out_features
        keeps = options.fp16_weight_storage == "keep"
        self.linear = linear if keeps else None
        self._fp16_weight_cpu: Tensor | None = None
        self._made_from: tuple[Any, ...] = ()
        self.__dict__["_fp8"] = None  # not a child: its Parameters are this layer's
        self.register_parameter("bias", None)
        if not keeps:
            if linear.bias is not None:
                self.bias = nn.Parameter(linear.bias.detach().clone(), linear.bias.requires_grad)
            self._fp16_weight_cpu = linear.weight.detach().to("cpu")

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, options: FP8GemmOptions = DEFAULT_OPTIONS
    ) -> FP8Linear:
        """Wrap a layer, which stays as it is in the mode ``"keep"``."""
        return cls(linear, options=options)

    @names_wrong_argument
    def forward(self, x: Tensor) -> Tensor:
        """Compute ``[..., N]`` from ``[..., K]``, in the dtype of ``x`` unless options differ."""
        if x.dtype not in _INPUTS:
            raise InvalidType(
                f"Got x of dtype {x.dtype} and shape {tuple(x.shape)}.",
                "FP8Linear takes real numbers, and codes mean nothing without their scales.",
                "Code that casts x to the dtype of an FP8 weight should take that of the model; "
                "convert other numbers by .float().",
            )
        if not x.is_cuda:
            return self._dense(x, "an input on a CPU")
        if x.dtype in _16_BITS:
            return self._multiply(x)
        if not self.options.cast_inputs:
            return self._dense(x, f"an input of {x.dtype} with cast_inputs=False")
        y = self._multiply(x.to(torch.bfloat16))
        return y.to(x.dtype) if self.options.cast_output_back else y

    def materialize_fp8_weight(self, device: torch.device | str) -> None:
        """Make the FP8 weight on a device now, unless it is there and up to date.

        Args:
            device: where it will multiply.

        Raises:
            RuntimeError: if neither a dense weight nor an FP8 weight is left.
        """
        device = torch.device(device)
        if self._is_current(device):
            return
        source = self._source()
        made = self._layer()
        if source is None and made is not None:
            self._hold(made.to(device))
            return
        if source is None:
            raise RuntimeError(
                teach(
                    "This FP8Linear has neither a dense weight nor an FP8 weight.",
                    "Its dense weight was discarded, and invalidate_weight_cache() dropped the "
                    "FP8 weight.",
                    "Use fp16_weight_storage='keep' or 'cpu_offload', or load a state_dict.",
                )
            )
        bias = self._bias()
        with torch.no_grad():
            q = functional.quantize(source.detach().to(device), role="weight")
        moved = bias if bias is None or bias.device == q.device else bias.detach().to(q.device)
        layer = Core.from_quantized(q, moved, dtype=source.dtype)
        if self.options.fp16_weight_storage == "discard":
            self._fp16_weight_cpu = None
            self._hold(layer)
        else:
            self.__dict__["_fp8"] = layer
            self._made_from = _versions(source, bias)

    def fp8_layer(self, device: torch.device) -> Core:
        """Return the FP8 layer for a device, made again if it is not up to date."""
        if not self._is_current(device):
            self.materialize_fp8_weight(device)
        made = self._layer()
        assert made is not None
        return made

    def invalidate_weight_cache(self) -> None:
        """Drop the FP8 weight; where the dense weight was discarded, that was the only one."""
        self.__dict__["_fp8"] = None
        for name in ("weight", "weight_scale"):
            self._parameters.pop(name, None)

    @property
    def _fp8_weight(self) -> Tensor | None:
        """The codes as the view ``[K, N]``; ``None`` before they are made."""
        made = self._layer()
        return None if made is None else made.codes.t()

    @property
    def _fp8_weight_scale(self) -> Tensor | None:
        """fp32 ``[N, 1]``; ``None`` before it is made."""
        made = self._layer()
        return None if made is None else made.weight_scale

    def __getattr__(self, name: str) -> Any:
        """Return codes as a guarded view, as ``fp8kit.Fp8Linear`` does: they are no numbers."""
        if name == "weight" and name in self.__dict__.get("_parameters", ()):
            layer = self._layer()
            if layer is not None:
                return layer.weight
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Describe the layer in ``print(model)``."""
        where = "not made yet" if self._layer() is None else "made"
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, dense weight: {self.options.fp16_weight_storage}, FP8 weight: {where}"

    def _layer(self) -> Core | None:
        return self.__dict__["_fp8"]

    def _source(self) -> Tensor | None:
        return self._fp16_weight_cpu if self.linear is None else self.linear.weight

    def _bias(self) -> nn.Parameter | None:
        return self.bias if self.linear is None else self.linear.bias

    def _is_current(self, device: torch.device) -> bool:
        made, source = self._layer(), self._source()
        if made is None:
            return False
        if made.codes.device != device and not _is_current_gpu(made.codes.device, device):
            return False
        return source is None or torch.compiler.is_compiling() or self._follows(source)

    def _follows(self, source: Tensor) -> bool:
        now = _versions(source, self._bias())
        if UNCOUNTED in now[1::3]:  # made in inference mode: changes are not counted
            return False
        return len(now) == len(self._made_from) and all(
            a is b if isinstance(a, Tensor) else a == b
            for a, b in zip(now, self._made_from, strict=True)
        )

    def _multiply(self, x: Tensor) -> Tensor:
        return self.fp8_layer(x.device)(x)

    def _dense(self, x: Tensor, reason: str) -> Tensor:
        """Multiply by the dense weight; raise if there is none."""
        weight, bias = self._source(), self._bias()
        if weight is None:
            raise RuntimeError(
                teach(
                    f"FP8Linear got {reason}, and its dense weight was discarded.",
                    "The FP8 weight multiplies on a GPU; anything else needs the dense weight.",
                    "Use fp16_weight_storage='keep' or 'cpu_offload'.",
                )
            )
        return F.linear(
            x, weight.to(x.device, x.dtype), None if bias is None else bias.to(x.device, x.dtype)
        )

    def _hold(self, layer: Core) -> None:
        """Register the Parameters of an FP8 layer as this layer's own, in one dictionary."""
        self.__dict__["_fp8"] = layer
        self._parameters = layer._parameters  # so that it computes with what replaces one

    def _discarded(self) -> Core | None:
        """Return the FP8 layer if no dense weight is left; else ``None``."""
        return self._layer() if self._source() is None else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FP8Linear:
        # the FP8 layer knows which of its Parameters a cast may change
        layer = self._discarded()
        if layer is None:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            made = self._layer()
            if made is not None and fn(torch.empty(0, device=made.codes.device)).device != (
                made.codes.device
            ):
                self.invalidate_weight_cache()
            return self
        self._parameters = {}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._hold(layer._apply(fn, recurse))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the codes out: the FP8 layer, which is in the state, pickles them."""
        state = dict(self.__dict__)
        held = {n: p for n, p in self._parameters.items() if n not in ("weight", "weight_scale")}
        return {**state, "_parameters": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        layer = self._discarded()
        if layer is not None:
            self._hold(layer)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fp16_weight_cpu is not None:
            destination[prefix + "weight"] = self._fp16_weight_cpu

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Read a dense weight or codes, under the names of any mode."""
        report = (missing_keys, unexpected_keys, error_msgs)
        try:
            self._adopt(state_dict, prefix)
            dense = None
            if self._fp16_weight_cpu is not None:
                dense = state_dict.pop(prefix + "weight", None)
                self._read_dense(dense, local_metadata.get("assign_to_params_buffers", False))
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")
            return
        layer = self._discarded()
        if layer is not None:
            layer._load_from_state_dict(state_dict, prefix, local_metadata, strict, *report)
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *report)
        if self._fp16_weight_cpu is not None and dense is None and strict:
            missing_keys.append(prefix + "weight")

    def _adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename entries to those of this mode, and convert codes to what this mode holds."""
        own, other = prefix, prefix + "linear."
        if self.linear is not None:
            own, other = other, own
        for name in _HELD:
            if other + name in state_dict:
                state_dict.setdefault(own + name, state_dict.pop(other + name))
        codes = state_dict.get(own + "weight")
        scale = state_dict.get(own + "weight_scale")
        if codes is None or scale is None or codes.dtype not in FP8_FORMATS:
            return
        q = with_scale(codes, scale)
        if self.options.fp16_weight_storage != "discard":
            del state_dict[own + "weight_scale"]
            state_dict[own + "weight"] = functional.dequantize(q)
            return
        rows = q.scale.expand(codes.shape[0], 1) if q.group == TENSOR else q.scale
        state_dict[own + "weight_scale"] = rows.contiguous()
        dense = self._fp16_weight_cpu
        if self._layer() is None and codes.shape == (self.out_features, self.in_features):
            device = codes.device if self.bias is None else self.bias.device
            dtype = torch.bfloat16 if dense is None else dense.dtype
            size = (self.in_features, self.out_features)
            layer = Core(*size, bias=False, device=device, dtype=dtype)
            layer.register_parameter("bias", self.bias)
            self._fp16_weight_cpu = None
            self._hold(layer)

    def _read_dense(self, weight: Tensor | None, assign: bool) -> None:
        held = self._fp16_weight_cpu
        if weight is None or held is None:
            return
        if weight.shape != held.shape or weight.dtype not in _INPUTS:
            raise InvalidValue(
                f"Got a weight {weight.dtype} {tuple(weight.shape)}.",
                f"This layer has a dense weight {tuple(held.shape)}.",
                "Load a dense weight of this shape, or codes with their weight_scale.",
            )
        if assign:
            self._fp16_weight_cpu = weight.detach().to("cpu")
        else:
            held.copy_(weight.detach())


def check_wrappable(
    linear: nn.Module,
    options: FP8GemmOptions,
    tried: dict[Any, Any] | None = None,
    name: str = "",
) -> None:
    """Refuse a layer for which ``FP8Linear`` cannot stand; ``tried`` as in ``unlike_linear``."""
    got = f"{name}, a {type(linear).__name__}," if name else f"a {type(linear).__name__}"
    if not isinstance(linear, nn.Linear) or isinstance(linear, Core):
        raise InvalidType(
            f"Got {got} to wrap.",
            "FP8Linear wraps an nn.Linear that is not FP8 yet.",
            "Leave other modules out with module_filter.",
        )
    differs = "has another forward" if is_replaced(linear) else unlike_linear(linear, tried)
    if "weight" not in linear._parameters and not parametrize.is_parametrized(linear):
        differs = "computes its weight in a hook"
    if differs:
        raise InvalidType(
            f"Got {got} that {differs}.",
            "FP8Linear multiplies by a weight and adds a bias.",
            "Leave it out with module_filter; remove pruning or weight_norm first.",
        )
    if linear.weight.is_meta and options.fp16_weight_storage != "keep":
        raise InvalidValue(
            f"Got {got} whose weight is on the meta device.",
            f"fp16_weight_storage={options.fp16_weight_storage!r} keeps its values.",
            "Load the weights first, or use fp16_weight_storage='keep'.",
        )
    if linear.weight.dtype not in FLOATS:
        raise InvalidType(
            f"Got {got} with a {linear.weight.dtype} weight.",
            "FP8 is made from bfloat16, float16 or float32.",
            "Cast the layer, or leave it out with module_filter.",
        )


def _is_current_gpu(device: torch.device, wanted: torch.device) -> bool:
    """Return whether ``wanted`` is "cuda" without a number and means this device."""
    if wanted.type != "cuda" or wanted.index is not None:
        return False
    return device.type == "cuda" and device.index == torch.cuda.current_device()


def _versions(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return facts that change when a tensor, or its data, is replaced or written to."""
    return tuple(
        fact
        for t in tensors
        for fact in (t, None if t is None else version(t), None if t is None else t.data_ptr())
    )
