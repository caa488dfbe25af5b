"""``enable_fp8_gemm``: the interface of the ``fp8_gemm.py`` that diffusion projects copy.

Source: ``telefuser/ops/fp8_gemm.py`` of Tele-AI/TeleFuser, and the file of that name beside
Soul-AILab/SoulX-LiveAct. Unlike theirs, the default filter keeps sensitive layers dense.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.wrapped_linear import (
    DEFAULT_OPTIONS,
    FP8GemmOptions,
    FP8Linear,
    check_wrappable,
)
from fp8kit.conversion.eligibility import Eligibility
from fp8kit.conversion.patterns import roles_by_name, size_obstacle
from fp8kit.errors import InvalidType, check_switch, teach
from fp8kit.modules.hooks import is_watched
from fp8kit.modules.linear import Fp8Linear

_16_BITS = (torch.float16, torch.bfloat16)
ModuleFilter = Callable[[str, nn.Module], bool]


@names_wrong_argument
def enable_fp8_gemm(
    model: nn.Module,
    *,
    options: FP8GemmOptions = DEFAULT_OPTIONS,
    module_filter: ModuleFilter | None = None,
    inplace: bool = True,
) -> nn.Module:
    """Replace linear layers of a model by ``FP8Linear``.

    Args:
        model: any module that holds ``nn.Linear``.
        options: see ``FP8GemmOptions``.
        module_filter: a function of the qualified name and the layer; ``True`` replaces it. By
            default, layers that are sensitive by the rules of ``fp8kit.plan`` stay dense (heads,
            embeddings, routers, modulation, tied weights), but small ones do not.
        inplace: change the model; otherwise a deep copy of it.

    Returns:
        the model, or its changed copy. A warning says if no layer was replaced.

    Raises:
        TypeError: if ``model`` is no module, ``module_filter`` no function, or a layer that it
            accepts computes something else than ``nn.Linear``.
        ValueError: if the options contradict each other.

    Example:
        >>> fp8kit.compat.enable_fp8_gemm(model, options=FP8GemmOptions(fp16_weight_storage="keep"))
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"Got a model of type {type(model).__name__}.",
            "It must be an nn.Module with linear layers in it.",
            "Of a pipeline pass a part, such as pipeline.transformer.",
        )
    if module_filter is not None and not callable(module_filter):
        raise InvalidType(
            f"Got module_filter={module_filter!r:.80}.",
            "It is a function of a layer's name and the layer, which says whether to replace it.",
            "Pass lambda name, layer: 'blocks' in name, for example.",
        )
    check_switch("inplace", inplace)
    if not inplace:
        model = copy.deepcopy(model)
    accepts = module_filter or _default_filter(model)
    found = list(_linears(model))
    taken = {layer: name for _, _, name, layer in found if accepts(name, layer)}
    tried: dict[Any, Any] = {}
    for layer, name in taken.items():  # an error leaves the model as it was
        check_wrappable(layer, options, tried, name)
    wrapped: dict[nn.Module, FP8Linear] = {}
    for parent, child, _, layer in found:
        if layer not in taken:
            continue
        if layer not in wrapped:
            wrapped[layer] = FP8Linear.from_linear(layer, options=options)
            if options.materialize_fp8_on_wrap and layer.weight.is_cuda:
                wrapped[layer].materialize_fp8_weight(layer.weight.device)
        setattr(parent, child, wrapped[layer])
    if not wrapped:
        warnings.warn(
            teach(
                f"enable_fp8_gemm replaced no layer of {type(model).__name__}.",
                "It replaces nn.Linear inside a model, where module_filter accepts them.",
                "Check module_filter, or look at fp8kit.plan(model).",
            ),
            stacklevel=2,
        )
    return model


@names_wrong_argument
def fp8_linear_forward_many(linears: Sequence[FP8Linear], x: Tensor) -> tuple[Tensor, ...]:
    """Call layers that read the same input, which is quantized once.

    Args:
        linears: ``FP8Linear`` layers with the same options.
        x: bf16, fp16 or fp32 ``[..., K]``.

    Returns:
        the result of each layer for ``x``, with the bits of a call by itself.

    Example:
        >>> q, k, v = fp8kit.compat.fp8_linear_forward_many((to_q, to_k, to_v), x)
    """
    learned = (x, *(p for layer in linears for p in layer.parameters()))
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in learned)
    if (
        len(linears) < 2
        or learns
        or is_watched(*linears)
        or not x.is_cuda
        or x.dtype not in _16_BITS
    ):
        return tuple(layer(x) for layer in linears)
    layers = [layer.fp8_layer(x.device) for layer in linears]
    codes = layers[0].quantize_input(x)
    return tuple(layer.multiply(codes) for layer in layers)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Linear]]:
    """Yield each dense linear layer with its parent, its name there, and its qualified name."""
    for prefix, parent in model.named_modules():
        if isinstance(parent, FP8Linear):
            continue
        for child, layer in parent._modules.items():
            if isinstance(layer, nn.Linear) and not isinstance(layer, Fp8Linear):
                yield parent, child, f"{prefix}.{child}" if prefix else child, layer


def _default_filter(model: nn.Module) -> ModuleFilter:
    """Accept what ``plan`` would convert, and layers too small to gain."""
    names = [name for _, _, name, _ in _linears(model)]
    roles, eligible = roles_by_name(names), Eligibility(model)

    def accepts(name: str, layer: nn.Module) -> bool:
        assert isinstance(layer, nn.Linear)
        size = (layer.out_features, layer.in_features)
        return name not in roles and eligible.of([name]) in ("", size_obstacle(size))

    return accepts
