"""Dense weights that arrive piece by piece through ``weight_loader``, and are quantized once.

A Parameter lives on the meta device until its first piece comes. Then a dense buffer is filled;
when it is full, its owner quantizes it and drops it. A reload fills a new buffer, and writes the
same storage. The protocol is vLLM's: ``param.weight_loader(param, loaded_weight, *shard)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8kit.errors import InvalidValue, teach
from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.parameters import frozen, written_together

Loader = Callable[..., Any]
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class _Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds what is written to a storage to ``pieces``: bytes, by where they lie."""

    def __init__(self, into: Tensor, pieces: dict[Any, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage, self._pieces = into.untyped_storage().data_ptr(), pieces

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _COPIES and (to := args[0]).untyped_storage().data_ptr() == self._storage:
            size = to.itemsize
            strides = (*(stride * size for stride in to.stride()), 1)
            self._pieces[to.storage_offset() * size, (*to.shape, size), strides] = to.nbytes
        return result


class Arriving:
    """The dense weights of one layer while they arrive.

    ``complete`` is called when all of them are there; it takes them from ``dense``.
    """

    def __init__(self, layer: nn.Module, complete: Callable[[], None]) -> None:
        self._layer, self._complete = layer, complete
        self._device = torch.get_default_device()
        self._described: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {}
        self._loaders: dict[str, Loader] = {}
        self.dense: dict[str, nn.Parameter] = {}
        self._pieces: dict[str, dict[Any, int]] = {}  # one that comes twice counts once
        layer.register_load_state_dict_pre_hook(self._refuse_dense)  # type: ignore[no-untyped-call]

    def expect(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, loader: Loader, **facts: Any
    ) -> None:
        """Register a Parameter on the meta device that loads itself.

        ``loader(param, loaded_weight, *shard)`` writes a piece; ``facts`` are attributes that the
        Parameter gets, for the loader to read.
        """
        self._described[name] = (shape, dtype, facts)
        self._loaders[name] = loader
        meta = frozen(torch.empty(shape, dtype=dtype, device="meta"))
        self._layer.register_parameter(name, meta)
        self.attend(name, meta)

    def attend(self, name: str, parameter: nn.Parameter) -> None:
        """Give a Parameter a ``weight_loader`` that takes pieces of the dense weight ``name``."""

        def load(_: Tensor, loaded_weight: Tensor, *shard: Any, **words: Any) -> Any:
            return self._load(name, loaded_weight, *shard, **words)

        for fact, value in self._described[name][2].items():
            setattr(parameter, fact, value)
        parameter.weight_loader = load  # type: ignore[attr-defined]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights that are expected."""
        return tuple(self._described)

    def take(self, name: str) -> Tensor:
        """Return a dense weight that has arrived, or was put into the layer by hand."""
        return self.dense[name].data if name in self.dense else self._layer.get_parameter(name).data

    def has_begun(self) -> bool:
        """Return whether a piece came since the last weight was complete."""
        return bool(self.dense)

    def check_complete(self) -> None:
        """Raise a ``ValueError`` if pieces are missing."""
        for name, (shape, _, _) in self._described.items():
            missing = self._missing(name) if self.has_begun() else 0
            if missing > 0 or self.take(name).is_meta:
                raise InvalidValue(
                    f"{missing or 'All'} elements of {name} {shape} have not arrived.",
                    "A weight is quantized when all of it is there.",
                    "Load the missing shards through weight_loader first.",
                )

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Drop the dense buffers, and write quantized tensors into Parameters of the layer.

        A Parameter that fits is overwritten in place, so that graphs and views stay valid.
        """
        self.dense.clear()
        self._pieces.clear()
        with written_together(self._layer, self.names):
            for name, tensor in tensors.items():
                old = self._layer._parameters.get(name)
                facts = ("dtype", "shape", "device")
                if old is not None and all(getattr(old, f) == getattr(tensor, f) for f in facts):
                    with torch.inference_mode(old.is_inference()), torch.no_grad():
                        old.copy_(tensor)
                else:
                    self._layer.register_parameter(name, frozen(tensor))
        for name in self.names:
            self.attend(name, self._layer.get_parameter(name))

    def _refuse_dense(
        self, layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        """Refuse dense entries of a ``state_dict``, which torch would cast into held codes."""
        for name, held in layer.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            codes = held.dtype in FP8_FORMATS and name in self.names
            if codes and given is not None and given.dtype not in FP8_FORMATS:
                raise InvalidValue(
                    f"Got {prefix}{name} of {given.dtype} in a state_dict.",
                    "The layer has codes by now, and loads codes with their scales.",
                    f"Pass dense weights to layer.{name}.weight_loader(layer.{name}, weight).",
                )

    def _load(self, name: str, loaded_weight: Tensor, *shard: Any, **words: Any) -> Any:
        if not loaded_weight.is_floating_point() or loaded_weight.dtype.itemsize == 1:
            raise InvalidValue(
                f"Got a weight of {loaded_weight.dtype} for {name}.",
                "Weights arrive in high precision: codes are no numbers without their scales.",
                "Load fp8kit.dequantize of codes and scale, or keep both in a fp8kit.Fp8Linear.",
            )
        if name not in self.dense:
            self._buffer(name, loaded_weight.device)
        parameter = self.dense[name]
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():
            with _Copied(parameter, self._pieces[name]):
                result = self._loaders[name](parameter, loaded_weight, *shard, **words)
        if all(self._missing(name) <= 0 for name in self.names):
            self._complete()
        return result

    def _missing(self, name: str) -> int:
        """Return how many elements have not come since the last weight was complete.

        While this is certainly above zero, what came in two pieces counts twice.
        """
        shape, dtype, _ = self._described[name]
        wanted, pieces = torch.Size(shape).numel() * dtype.itemsize, self._pieces.get(name, {})
        missing = wanted - sum(pieces.values())
        if missing > 0 or len(pieces) < 2:
            return missing // dtype.itemsize
        spans = sorted(
            (
                offset,
                offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)),
            )
            for offset, sizes, strides in pieces
        )
        if any(last >= first for (_, last), (first, _) in itertools.pairwise(spans)):
            absent = torch.ones(wanted, dtype=torch.bool, device=self.dense[name].device)
            for offset, sizes, strides in pieces:
                absent.as_strided(sizes, strides, offset).fill_(False)
            missing = int(absent.sum())
        if not missing:  # so that this is looked for once
            self._pieces[name] = {(0, (wanted,), (1,)): wanted}
        return missing // dtype.itemsize

    def _buffer(self, name: str, source: torch.device) -> None:
        """Make an empty dense Parameter on the device of the layer."""
        shape, dtype, facts = self._described[name]
        placed = self._layer.get_parameter(name).device
        device = next(d for d in (placed, self._device, source) if d.type != "meta")
        parameter = frozen(torch.empty(shape, dtype=dtype, device=device))
        for fact, value in facts.items():
            setattr(parameter, fact, value)
        parameter.weight_loader = self._loaders[name]  # type: ignore[attr-defined]
        self.dense[name], self._pieces[name] = parameter, {}


def fill(param: Tensor, loaded_weight: Tensor, remedy: str) -> None:
    """Copy a piece into its place; raises ``ValueError``, with a remedy, if it does not fit."""
    if loaded_weight.shape != param.shape:
        raise InvalidValue(
            f"Got a weight of shape {tuple(loaded_weight.shape)}.",
            f"Here {tuple(param.shape)} is due.",
            remedy,
        )
    param.copy_(loaded_weight)


def check_coded(weight: Tensor) -> None:
    """Refuse to compute with a weight that is not FP8 yet; raises ``RuntimeError``."""
    if weight.dtype not in FP8_FORMATS:
        raise RuntimeError(
            teach(
                f"apply got a layer with a {weight.dtype} weight.",
                "The weight becomes FP8 when all of it has arrived.",
                "Load it through weight_loader, or call process_weights_after_loading.",
            )
        )


class OnlineMethod:
    """The base of vLLM's online methods: weights arrive dense and are kept as FP8."""

    uses_meta_device = True
    weight_block_size: list[int] | None = None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantize the dense weights, unless that was done after they arrived.

        Raises:
            ValueError: if pieces of a weight have not arrived.
        """
        arriving: Arriving = layer.__dict__["_arriving"]
        done = getattr(layer, "_already_called_process_weights_after_loading", False)
        if done and not arriving.has_begun():
            return
        if arriving.take(arriving.names[0]).dtype in FP8_FORMATS:  # given so, or quantized
            return
        arriving.check_complete()
        arriving.keep(self._quantized(arriving))
        layer._already_called_process_weights_after_loading = True  # type: ignore[assignment]

    def _await(self, layer: nn.Module) -> Arriving:
        """Prepare a layer for weights to arrive."""
        layer.__dict__["_arriving"] = arriving = Arriving(
            layer, lambda: self.process_weights_after_loading(layer)
        )
        layer._already_called_process_weights_after_loading = False  # type: ignore[assignment]
        return arriving

    def _quantized(self, arriving: Arriving) -> dict[str, Tensor]:
        """Quantize the weights that have arrived; return the tensors that a layer keeps."""
        raise NotImplementedError
