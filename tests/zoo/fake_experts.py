"""Fake quantization of a module of experts in plain torch, compared with its own dense code.

The layout of the stacks is found by trial: without rounding, the sums here must equal the result of
the dense module. The gate between the two GEMMs is the module's own code.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from numerics import relative_error
from zoo.fake import GROUPS, Groups, rounded

_CLOSE = 1e-4  # allows fp32 sums in another order; a wrong layout or formula is off by far more
Round = Callable[[Tensor], Tensor]


class Rounding(NamedTuple):
    """Functions that quantize and dequantize a matrix, for each rounding in a layer of experts."""

    weight: Round
    inputs: Round
    intermediate: Round
    product: Round = lambda t: t


def _as_it_is(matrix: Tensor) -> Tensor:
    return matrix.double()


EXACT = Rounding(_as_it_is, _as_it_is, _as_it_is)


def rounding(scheme: str, apart: torch.dtype | None) -> Rounding:
    """Return the roundings of FP8 experts in a scheme.

    Args:
        scheme: scheme of the module.
        apart: the dtype to which the GEMMs' results are rounded if the GEMMs run one by one, around
            the module's own gate; ``None`` if experts run as one operator.
    """
    groups = GROUPS[scheme]

    def inputs(x: Tensor) -> Tensor:
        return rounded(x, groups.inputs)

    def weight(w: Tensor) -> Tensor:
        return rounded(w, groups.weight)

    if apart is not None:
        return Rounding(weight, inputs, inputs, lambda t: t.to(apart))
    between = Groups((1, 128), power=groups.inputs.power)
    return Rounding(weight, inputs, lambda h: rounded(h, between))


class FakeExperts:
    """Fake-quantized experts, made from the dense module.

    Args:
        dense: the module before it was converted.
        names: names of its two stacks.
    """

    def __init__(self, dense: nn.Module, names: tuple[str, str]) -> None:
        self.dense, self.names = copy.deepcopy(dense).float(), names
        self.transposed: bool | None = None

    def __call__(self, args: Any, kwargs: Any, how: Rounding) -> Tensor:
        """Compute a call of the module in float64; raise if no layout explains its result."""
        names = list(inspect.signature(type(self.dense).forward).parameters)[1:]
        given = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(names)]
        if self.transposed is None:
            self.transposed = self._layout(given)
        return self._sums(given, how, self.transposed)

    def _layout(self, given: list[Any]) -> bool:
        floats = [t.float() if t.is_floating_point() else t for t in given]
        with torch.no_grad():
            expected = self.dense(*floats)
        for transposed in (False, True):
            try:
                found = self._sums(floats, EXACT, transposed)
            except RuntimeError:  # shapes that do not fit this layout
                continue
            if relative_error(found, expected.reshape(found.shape)) < _CLOSE:
                return transposed
        raise ValueError(f"nobody knows what {type(self.dense).__name__} computes")

    def _sums(self, given: list[Any], how: Rounding, transposed: bool) -> Tensor:
        x = given[0].reshape(-1, given[0].shape[-1])
        count = self.dense.get_parameter(self.names[0]).shape[0]
        if len(given) > 1:
            ids, weights = given[1].flatten(0, -2), given[2].flatten(0, -2).double()
        else:
            ids = torch.arange(count).repeat_interleave(x.shape[0] // count).unsqueeze(1)
            weights = torch.ones(ids.shape, dtype=torch.float64)
        total = torch.zeros(x.shape, dtype=torch.float64)
        for expert in range(count):
            token, slot = torch.where(ids == expert)
            if token.numel():
                y = self._expert(x[token], expert, how, transposed)
                total.index_add_(0, token, y * weights[token, slot, None])
        return total

    def _expert(self, x: Tensor, expert: int, how: Rounding, transposed: bool) -> Tensor:
        up, down = self.names
        h = how.product(self._product(how.inputs(x), up, expert, how, transposed))
        h = h.float() if h.dtype == torch.float64 else h
        y = self._product(how.intermediate(self._gated(h)), down, expert, how, transposed)
        return how.product(y).double()

    def _product(
        self, x: Tensor, name: str, expert: int, how: Rounding, transposed: bool
    ) -> Tensor:
        matrix = self.dense.get_parameter(name).detach()[expert]
        y = x @ how.weight(matrix.t() if transposed else matrix).t()
        bias = self.dense._parameters.get(f"{name}_bias")
        return y if bias is None else y + bias[expert].detach().double()

    def _gated(self, h: Tensor) -> Tensor:
        own: Any = self.dense
        if self.names[0] == "up_proj":
            return own.act_fn(h)  # type: ignore[no-any-return]
        if hasattr(own, "_apply_gate"):
            return own._apply_gate(h)  # type: ignore[no-any-return]
        gate, up = h.chunk(2, -1)
        return own.act_fn(gate) * up  # type: ignore[no-any-return]
