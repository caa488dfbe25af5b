"""What ``layer.weight`` returns: the Parameter of codes, guarded against use as numbers.

Codes mean nothing without their scales. Code that casts the weight of an ``Fp8Linear``, or computes
with it, would get wrong numbers and no error, so attribute access returns a view of the Parameter
that raises instead. Operations that do not read values still work: shape, dtype, device, addresses,
copies, moves, views of the bytes, writing other codes, serialization, ``isinstance`` of
``nn.Parameter``. Tensors derived from the view without a cast (``detach()``, ``data``, ``t()``,
parts, stacks) are guarded too, and so are Parameters made of any of these, whatever module holds
them. Setting attributes on the view, and changing it in place, change the Parameter.

torch's Python functions reach the view by ``__torch_function__``. Functions that bypass it
(constructors such as ``torch.tensor`` and ``asarray``, ``vmap``, ``torch.func``, scripts) reach it
in the dispatcher, by ``__torch_dispatch__``.

The module itself holds the plain Parameter. So tensors from ``parameters()``,
``named_parameters()``, ``state_dict()``, ``_parameters`` or ``nn.Module.__getattr__(layer,
"weight")`` are not guarded, nor are tensors in a compiler's graph or under a mode that makes fake
tensors. Bytes that leave torch cannot be guarded either: ``storage()`` and ``untyped_storage()``,
DLPack, a raw address, integers that ``view`` makes of the codes, pickles. The shards of
``fully_shard`` are plain too.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp8kit.errors import UnsupportedError
from fp8kit.formats import FP8_FORMATS

# copies, moves and views: results are codes if the arguments are
_MOVES = frozenset(
    """
    __get__ __getitem__ adjoint alias as_strided atleast_2d atleast_3d broadcast_tensors
    broadcast_to cat chunk clone column_stack concat concatenate contiguous copy_ cpu cuda detach
    diag diagonal dstack embedding expand expand_as flatten flip gather hsplit hstack index_copy_
    index_select masked_select moveaxis movedim narrow pad permute pin_memory ravel repeat
    repeat_interleave reshape reshape_as roll rot90 row_stack scatter_ select set_ split
    split_with_sizes squeeze stack swapaxes swapdims t take take_along_dim tensor_split tile to
    _to_copy transpose type unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze view
    view_as vsplit vstack where
    """.split()
)
# results contain no values of the codes
_MADE = frozenset(
    """
    empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_empty_strided
    new_full new_ones new_tensor new_zeros
    """.split()
)
_TESTS = frozenset("eq ne equal isnan isinf isfinite __eq__ __ne__".split())
_COPIES = frozenset("__deepcopy__ __reduce__ __reduce_ex__ _reduce_ex_internal".split())
_NUMBERS = frozenset(
    """
    __array__ __bool__ __complex__ __contains__ __dlpack__ __float__ __index__ __int__ allclose
    is_nonzero item numpy tolist
    """.split()
)
# these write into codes, which is allowed if they write other codes
_WRITES = frozenset("copy_ __setitem__ set_ index_copy_ scatter_".split())
_IN_PLACE = frozenset(
    """
    as_strided_ detach_ requires_grad_ resize_ share_memory_ squeeze_ t_ transpose_ unsqueeze_
    zero_
    """.split()
)


class _Owner(NamedTuple):
    """The layer of codes: its name in errors, and how many scales it has for them."""

    name: str
    scales: int = 1


_views: weakref.WeakValueDictionary[int, GuardedCodes] = weakref.WeakValueDictionary()


class _BelowPython:
    """``__torch_dispatch__``, hidden from compilers: they do not take a tensor that defines it."""

    def __get__(self, _: Any, kind: Any = None) -> Any:
        compiling = torch._guards.TracingContext.try_get() is not None
        return Tensor.__torch_dispatch__ if compiling else kind.__torch_function__


class GuardedCodes(Tensor):
    """FP8 codes that raise when used as numbers; see the module's docstring."""

    __torch_dispatch__ = _BelowPython()

    @staticmethod
    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Any:
        """Make a Parameter, as code that rebuilds one by ``type(weight)(data)`` expects."""
        return nn.Parameter(data, requires_grad)

    @property
    def _is_param(self) -> bool:
        """Return whether ``isinstance`` takes this for an ``nn.Parameter``."""
        return "_codes" in self.__dict__

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        # called by nn.Parameter(codes), whose result may be put into any module
        own = self.__dict__
        if "_part" in own:
            part = own.pop("_part")
            own["_codes"] = nn.Parameter(part, part.requires_grad)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that other code has set on the Parameter."""
        own = self.__dict__
        if name == "_codes" or "_codes" not in own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(own["_codes"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the Parameter, such as ``data`` or one of other code."""
        codes = self.__dict__.get("_codes")
        if codes is None or name in ("__class__", "_is_param"):
            super().__setattr__(name, value)
        elif name == "data" and value.dtype != codes.dtype:
            raise _refused("data =", [self])
        else:
            setattr(codes, name, unguarded(value))

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the Parameter."""
        codes = self.__dict__.get("_codes")
        if codes is None:
            super().__delattr__(name)
        else:
            delattr(codes, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy what is guarded, with its guard."""
        copied, owner = copy.deepcopy(unguarded(self), memo), self.__dict__["_owner"]
        if not self._is_param:
            return _guarded(copied, {}, owner)
        made = guarded(copied, owner.name)
        made.__dict__["_owner"] = owner
        return made

    def __hash__(self) -> int:
        """Tell objects apart, as tensors do."""
        return id(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run what reads no values, and guard what results; raise for anything else."""
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", func)).partition(".")[0]
        given = _tensors((args, kwargs))
        codes = [t for t in given if isinstance(t, GuardedCodes)]
        if name == "__iter__":
            return iter(args[0].unbind(0))
        library = _library(func)
        taught = "scaled" in name or library not in ("aten", "prims")  # codes with their scales
        lone = taught and library != "fp8kit" and len(codes) == len(given)
        out = any(isinstance(t, GuardedCodes) for t in _tensors(kwargs.get("out")))
        text = name == "__format__" and not args[0].dim()
        lacking = "scaled" in name and _lacks_scales(codes, args, kwargs)
        spoilt = lacking or (not taught and _spoils(name, given))
        if name in _NUMBERS or out or text or spoilt:
            raise _refused(name, codes)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*unguarded(args), **unguarded(kwargs))
            except (RuntimeError, TypeError) as error:
                if (taught and not lone) or name in _MOVES | _IN_PLACE | _COPIES | _TESTS:
                    raise
                raise _refused(name, codes) from error
            made = _tensors(result)
            if lone and any(t.is_floating_point() and t.dtype not in FP8_FORMATS for t in made):
                raise _refused(name, codes)  # it got no scales, so it used codes as numbers
            if taught or name in _COPIES or not made:
                return result
            if not _reads_nothing(name, made, given):
                raise _refused(name, codes)
            seen = {id(unguarded(t)): t for t in given}
            return _guarded(result, seen, _owner(codes))


def guarded(
    parameter: Tensor, owner: str, module: nn.Module | None = None, name: str = ""
) -> Tensor:
    """Return a view of a Parameter of codes that raises when used as numbers.

    A Parameter has one view object as long as somebody holds it. ``owner`` names the layer in
    errors. ``module`` holds the Parameter as ``name``: if code deletes it there and is then
    refused, the module gets the Parameter back.
    """
    view = _views.get(id(parameter))
    with torch._C.DisableTorchFunctionSubclass():
        if view is not None and _is_of(view, parameter):
            return view
        detached = parameter.detach()
        if type(detached) is not Tensor:  # under a tracing mode: return the plain Parameter
            return parameter
        made = detached.as_subclass(GuardedCodes)
    scale = None if module is None else module._parameters.get(f"{name}_scale")
    scales = 1 if scale is None else scale.numel()
    made.__dict__.update(_codes=parameter, _owner=_Owner(owner, scales))
    if module is not None:
        made.__dict__["_place"] = weakref.ref(module), name
    _views[id(parameter)] = made
    return made


def unguarded(value: Any) -> Any:
    """Replace guarded views by their plain tensors, also in lists, tuples and dicts."""
    if isinstance(value, GuardedCodes):
        own = value.__dict__
        return own["_codes"] if "_codes" in own else own["_part"]
    if isinstance(value, dict):
        return {k: unguarded(v) for k, v in value.items()}
    return type(value)(unguarded(v) for v in value) if type(value) in (list, tuple) else value


def computed_codes(module: nn.Module, name: str, owner: str) -> Tensor:
    """Return codes that a module computes (by a parametrization) instead of holding a Parameter.

    Raises ``UnsupportedError`` if a parametrization moves codes, because the scales do not move
    with them. One with a ``right_inverse`` is accepted: it brings codes back to their places.
    """
    codes: Tensor = unguarded(getattr(module, name))
    if parametrize.is_parametrized(module, name):
        steps: Any = module.parametrizations[name]  # type: ignore[index]
        if not all(hasattr(step, "right_inverse") for step in steps):
            held = unguarded(getattr(steps, "original", None))
            if held is None or _place(codes) != _place(held):
                raise UnsupportedError(
                    f"A parametrization gives other codes for {name} of {owner} than it holds.",
                    "Its scales belong to the codes in their places, and do not move with them.",
                    "Call torch.nn.utils.parametrize.remove_parametrizations(layer, "
                    f"{name!r}, leave_parametrized=False), and parametrize layer.to_linear() "
                    "instead; or give the parametrization a right_inverse.",
                )
    return codes


def unguarded_for(parameter: Tensor | None, layer: Callable[[], str]) -> Any:
    """Return a Parameter without its guard, as the layer that ``layer()`` names may hold it.

    Warns if it has the codes of another layer, which mean nothing under this layer's scales.
    """
    owner = vars(parameter).get("_owner") if isinstance(parameter, GuardedCodes) else None
    if owner is not None and owner.name != layer():
        warnings.warn(
            f"The weight of {layer()} is now codes of {owner.name}, without their scales. Assign "
            "its weight_scale too; or share the whole layer, as in `model.a = model.b`.",
            stacklevel=5,
        )
    return unguarded(parameter)


def _place(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.stride())


def _is_of(view: GuardedCodes, parameter: Tensor) -> bool:
    """Return whether a view still shows a Parameter's data, which may have been moved."""
    return (
        view.__dict__["_codes"] is parameter
        and view.device == parameter.device
        and view.shape == parameter.shape
        and view.stride() == parameter.stride()
        and (view.is_meta or view.data_ptr() == parameter.data_ptr())
    )


def _spoils(name: str, given: Sequence[Tensor]) -> bool:
    """Return whether an operation would write something other than codes into codes."""
    if name in _WRITES:
        if len(given) < 2 and name != "set_":
            return True  # a number
        others = [t for t in given if t.is_floating_point() and t.dtype not in FP8_FORMATS]
        return bool(others) or given[-1].dtype not in FP8_FORMATS  # the last is what is written
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or (name.startswith("__i") and name not in ("__index__", "__int__", "__iter__")):
        return name not in _IN_PLACE and not all(t.is_meta for t in given)
    return False


def _lacks_scales(codes: Sequence[GuardedCodes], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a scaled product gets single numbers only, for codes with many scales."""
    given = _tensors((args, {k: v for k, v in kwargs.items() if k != "bias"}))
    single = all(t.numel() == 1 for t in given if t.dtype not in FP8_FORMATS)
    return single and _owner(codes).scales > 1


def _reads_nothing(name: str, made: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Return whether an operation's results are codes, bytes, or free of the codes' values."""
    if name in _MADE | _IN_PLACE or all(t.is_meta for t in given):
        return True
    kinds = {t.dtype for t in given if t.dtype in FP8_FORMATS}
    if name in _TESTS:
        pair = len(given) == 2 or name.startswith("is")  # and no number beside the codes
        return pair and all(t.dtype in kinds for t in given)
    if name == "view":
        return all(t.dtype in kinds or not t.is_floating_point() for t in made)
    return name in _MOVES and all(t.dtype in kinds for t in made)


def _library(func: Any) -> str:
    """Return an operator's namespace: those of libraries take codes with scales, as ours do."""
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "_qualified_op_name", "aten::")).partition("::")[0]


def _owner(codes: Sequence[GuardedCodes]) -> _Owner:
    return next((t.__dict__["_owner"] for t in codes if "_owner" in t.__dict__), _Owner(""))


def _refused(name: str, codes: Sequence[GuardedCodes]) -> UnsupportedError:
    for own in (t.__dict__ for t in codes if "_place" in t.__dict__):
        module, place = own["_place"][0](), own["_place"][1]
        # a parametrization is looked up in the class: evaluating it would come back here
        if module and not (hasattr(type(module), place) or hasattr(module, place)):
            module._parameters[place] = own["_codes"]  # torch's old weight_norm deletes it first
    return UnsupportedError(
        f"Code applies {name!r} to the weight of {_owner(codes).name or 'an Fp8Linear'}.",
        "That weight is FP8 codes, which are no numbers without their scales.",
        "Call the layer instead; or compute with layer.to_linear().weight, or with "
        "fp8kit.dequantize(layer.quantized_weight()), of experts with "
        "fp8kit.dequantize(experts.quantized(name)); or convert the model with this layer "
        "in exclude=. Other weights are written by layer.load_state_dict.",
    )


def _guarded(result: Any, originals: dict[int, Any], owner: _Owner) -> Any:
    if isinstance(result, Tensor):
        if id(result) in originals:
            return originals[id(result)]
        if result.dtype not in FP8_FORMATS:
            return result
        part = result.detach()
        view = part.as_subclass(GuardedCodes)
        view.__dict__.update(_part=part, _owner=owner)
        return view
    if isinstance(result, list | tuple):
        parts = [_guarded(r, originals, owner) for r in result]
        return type(result)(parts) if type(result) in (list, tuple) else parts
    return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []
