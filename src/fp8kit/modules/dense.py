"""High-precision modules that compute ``x @ W.T + b``: ``nn.Linear`` and its equivalents."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from fp8kit.errors import InvalidType
from fp8kit.functional import dequantize
from fp8kit.modules.trials import (
    Alone,
    CopyError,
    contents,
    isolated_copy,
    on_trial,
    row_factors,
    set_training,
)

if TYPE_CHECKING:
    from fp8kit.modules.linear import Fp8Linear

_TRIED = (24, 40)  # K and N of the copy that is tried
_WIDE = (128, 256)  # likewise, for classes that compute large layers in another way
_LEADS = ((2, 3), (24,), (), (2, 24, 1), (1,), (300,))  # dimensions before K of the tried inputs
# factors of the rows of inputs: beyond any clamp that a class may have, and beyond fp16
_MAGNITUDES = (1.0, 0.0, 30.0, 1e4, 1e-4, 1e6)
_SIZES = ("in_features", "out_features")
_LINEAR = frozenset(vars(nn.Linear(1, 1, device="meta")))
# names that a subclass may define and still look like nn.Linear to its users
_PLAIN = frozenset(
    "__init__ __module__ __qualname__ __doc__ __annotations__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __parameters__ __orig_bases__ __static_attributes__ __firstlineno__ "
    "__dict__ __weakref__ __slots__ __class_getitem__ __init_subclass__ _is_protocol "
    "__constants__ __repr__ forward extra_repr in_features out_features weight bias".split()
)
# initialize a new layer
_MAKING = re.compile(r"_?(init|reset)_(params|parameters|weights?)|_\w+_init")
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device)


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether a module is the ``Conv1D`` of Transformers: a linear layer held as [K, N]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is a linear layer, dense or FP8, whatever else it does."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def holds_matrix(module: nn.Module) -> bool:
    """Return whether a module itself has a matrix, as routers, embeddings and linear layers do."""
    return any(p is not None and p.dim() > 1 for p in module._parameters.values())


def as_linear(module: nn.Module | None) -> nn.Linear:
    """Return a linear layer as an ``nn.Linear``: itself, or a new one that views a ``Conv1D``.

    Raises ``TypeError`` if it is no linear layer.
    """
    if isinstance(module, nn.Linear):
        return module
    if not is_conv1d(module):
        raise no_linear(module)
    assert module is not None
    weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
    k, n = weight.shape
    layer = nn.Linear(k, n, False, device="meta")
    layer.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
    layer.register_parameter("bias", bias)
    return layer.train(module.training)


def linear_at(model: nn.Module, name: str) -> nn.Linear:
    """Return the linear layer of a qualified name, by ``as_linear``."""
    module: nn.Module | None = model
    for part in name.split("."):
        assert module is not None
        module = module._modules[part]
    return as_linear(module)


def no_linear(module: object) -> TypeError:
    """Return the error for an object that is no ``nn.Linear``."""
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    whole = isinstance(module, nn.Module) and not is_linear(module)
    return InvalidType(
        f"Got a {name}.",
        "One layer that becomes FP8 is an nn.Linear, with a weight [N, K].",
        "Convert the linear layers inside it: fp8kit.convert(module)."
        if whole
        else "Convert the model that holds it: fp8kit.convert(model).",
    )


def restored(layer: Fp8Linear, dtype: torch.dtype) -> nn.Linear:
    """Return the dense form of an FP8 layer; see ``Fp8Linear.to_linear``."""
    if layer.original_weight is not None:
        weight = layer.original_weight.to(layer.codes.device, dtype, copy=True)
    else:
        weight = dequantize(layer.quantized_weight(), dtype)
    dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    dense.weight = nn.Parameter(weight)
    if layer.bias is not None:
        dense.bias = nn.Parameter(layer.bias.detach().to(dtype, copy=True))
    return dense


def extras(linear: nn.Linear, tried: dict[Any, Any]) -> list[str]:
    """Name what a linear layer has beyond ``nn.Linear`` and other code may use.

    Attributes with plain values are left out, because an FP8 layer keeps them, except numbers that
    its ``forward`` uses: a factor of 1 or a switch that is off may be set later, and an FP8 layer
    would ignore it. ``tried`` is that of ``unlike_linear``, which must have accepted the layer.
    """
    own = set(linear._parameters) | set(linear._buffers) | set(linear._modules)
    held = {name for name, value in vars(linear).items() if not isinstance(value, _VALUES)}
    found = own - {"weight", "bias"} | held - _LINEAR
    for cls in type(linear).__mro__:
        if cls not in nn.Linear.__mro__:  # a mixin may come after nn.Linear
            found |= {n for n in vars(cls) if n not in _PLAIN and not _MAKING.fullmatch(n)}
    if not found and type(linear).forward is not nn.Linear.forward:
        key = ("numbers", *_kind(linear))
        if key not in tried:
            with on_trial(), Alone():  # type: ignore[no-untyped-call]
                tried[key] = _numbers_used(linear)
        found = tried[key]
    return sorted(found)


def _numbers_used(linear: nn.Linear) -> set[str]:
    numbers = {n: v for n, v in vars(linear).items() if type(v) in (bool, int, float)}
    others = {n: not v if isinstance(v, bool) else v + 1 for n, v in numbers.items()}
    return {
        name
        for name in others.keys() - {"training", *_SIZES}
        if not _agrees(linear, False, torch.float32, _TRIED, {name: others[name]})
    }


def forward_replaced() -> bool:
    """Return whether ``nn.Linear.forward`` is other code than torch's, for all linear layers."""
    return getattr(nn.Linear.forward, "__globals__", None) is not vars(torch.nn.modules.linear)


def unlike_linear(linear: nn.Linear, tried: dict[Any, Any] | None = None) -> str:
    """Return how the ``forward`` of a layer differs from that of ``nn.Linear``; empty if not.

    The code of a subclass does not tell, so a copy runs, forward and backward, with random weights,
    bias and inputs, in both modes, two sizes and three dtypes. Inputs have one to four dimensions;
    their rows are zero, small, beyond fp16's range, NaN, or any number that the layer or its code
    contains. The layer itself is neither run nor changed.
    ``tried`` caches results, so that layers alike are tried once.
    """
    if type(linear).forward is nn.Linear.forward and not forward_replaced():
        return ""
    parameters = inspect.signature(type(linear).forward).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(named) > 2:  # an argument besides self and the input
        return "computes something else"
    tried, key = {} if tried is None else tried, _kind(linear)
    if key not in tried:
        try:
            with on_trial():
                agrees = all(
                    _agrees(linear, training, dtype, sizes)
                    for dtype in (torch.float32, torch.bfloat16, torch.float16)
                    for sizes in (_TRIED, _WIDE)
                    for training in (False, True)
                )
            tried[key] = "" if agrees else "computes something else"
        except CopyError as error:
            tried[key] = str(error)
    return str(tried[key])


def _kind(linear: nn.Linear) -> tuple[Any, ...]:
    """Return a key that is equal for layers that compute alike."""
    held = {n: v for n, v in contents(linear).items() if n not in _SIZES}
    return (type(linear), linear.bias is None, *held.items())


def _agrees(
    linear: nn.Linear,
    training: bool,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    held: dict[str, Any] | None = None,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    k, n = sizes
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((n, k), (n,)))
    own: dict[str, nn.Parameter | None] = {"weight": nn.Parameter(weight)}
    own["bias"] = None if linear.bias is None else nn.Parameter(bias)
    twin = isolated_copy(linear, _parameters=own)
    twin.__dict__ |= {**dict(zip(_SIZES, sizes, strict=True)), **(held or {})}
    set_training(twin, training)
    marks = _marks(linear)
    tried = False
    for lead in _LEADS if dtype == torch.float32 else _LEADS[:1]:
        x = torch.randn(*lead, k, generator=generator)
        rows = x.view(-1, k)
        rows *= row_factors(_MAGNITUDES, len(rows))
        if len(rows) > len(_MAGNITUDES):
            rows[: len(marks)] = marks[: len(rows)]
        x = x.to(dtype)
        given = x.clone()
        try:
            y = twin.forward(given)
        except Exception:  # it may need state for its own size or device
            if not tried:
                return False
            continue  # it took the first form of input, and does not take this one
        wanted = functional.linear(x, weight, own["bias"])
        if not _close(y, wanted) or not torch.allclose(given, x, 0, 0, equal_nan=True):
            return False
        if not tried and dtype == torch.float32 and not _backward_agrees(twin, x, y):
            return False
        tried = True
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    x = torch.randn(2, k, generator=generator).to(other)
    try:
        y = twin.forward(x)
    except Exception:  # nn.Linear raises for an input of another dtype, too
        return True
    # or it casts its weight to the input's dtype, as in Whisper, like an FP8 layer
    cast = bias.to(other) if linear.bias is not None else None
    return _close(y, functional.linear(x, weight.to(other), cast))


def _marks(linear: nn.Linear) -> torch.Tensor:
    """Return ``[numbers, 1]``: values by which a class may mark padding rows, and NaN."""
    code = getattr(inspect.unwrap(type(linear).forward), "__code__", None)
    known = (*vars(linear).values(), *getattr(code, "co_consts", ()))
    numbers = {v for v in known if type(v) in (int, float) and abs(v) < torch.finfo().max}
    return torch.tensor([*sorted(numbers), torch.nan]).float()[:, None]


@torch.enable_grad()
def _backward_agrees(twin: Any, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether results with gradients enabled are the same, and gradients are right."""
    x = x.clone().requires_grad_()
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    try:
        found = twin.forward(x * 1)  # no leaf: the layer may change its input in place
        (gradient,) = torch.autograd.grad(found, x, upstream)
    except Exception:  # it detaches its input, or an operation has no gradient
        return False
    return _close(found, y) and _close(gradient, upstream @ twin._parameters["weight"])


def _close(y: object, wanted: torch.Tensor) -> bool:
    if not isinstance(y, torch.Tensor) or (y.dtype, y.shape) != (wanted.dtype, wanted.shape):
        return False
    y, wanted, eps = y.float(), wanted.float(), torch.finfo(wanted.dtype).eps
    finite = wanted.isfinite()
    largest = torch.where(finite, wanted, 0.0).abs().amax(-1, keepdim=True)
    # the product may have been rounded before the bias was added
    same = torch.where(finite, (y - wanted).abs() <= 4 * eps * largest, ~y.isfinite())
    return bool(same.all())
