"""vLLM's online methods for linear layers: dense weights in, FP8 weights kept.

Source: ``fp8.py`` and ``mxfp8.py`` of ``vllm/model_executor/layers/quantization/online``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8kit import functional
from fp8kit.compat.arguments import names_wrong_argument
from fp8kit.compat.arriving import Arriving, Loader, OnlineMethod, check_coded, fill
from fp8kit.compat.known_weights import KnownWeights
from fp8kit.compat.shapes import with_scale_as_stored
from fp8kit.errors import InvalidValue
from fp8kit.formats import BLOCK, MX, ROW, TENSOR, GroupShape, QTensor

_SHARDS = {"q": 0, "k": 1, "v": 2}


class _OnlineLinearMethod(OnlineMethod):
    """The base of all granularities; a ``_turned`` weight is held as the view ``[K, N]``."""

    weight_scale_name = "weight_scale"
    _group: GroupShape
    _turned = True

    def __init__(self) -> None:
        self._known = KnownWeights()

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int | None = None,
        output_size: int | None = None,
        params_dtype: torch.dtype = torch.bfloat16,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give a module a weight on the meta device that loads and quantizes itself.

        Args:
            layer: any module.
            input_size_per_partition: K.
            output_partition_sizes: rows of each shard; their sum is N.
            input_size: K of all partitions; kept, not used.
            output_size: N of all partitions; kept, not used.
            params_dtype: dtype of the dense weight.
            extra_weight_attrs: ``weight_loader(param, loaded_weight, *shard)``, which writes a
                piece; by default one that takes a whole weight, or a shard by its number or as
                ``"q"``, ``"k"``, ``"v"``, or a tuple of neighbours. Anything else becomes an
                attribute of the Parameter.
        """
        layer.logical_widths = list(output_partition_sizes)  # type: ignore[assignment]
        n, k = sum(output_partition_sizes), input_size_per_partition
        for name, value in {
            "input_size_per_partition": k,
            "output_size_per_partition": n,
            "input_size": input_size or k,
            "output_size": output_size or n,
            "orig_dtype": params_dtype,
            "weight_block_size": self.weight_block_size,
            "input_scale": None,
        }.items():
            setattr(layer, name, value)
        loader: Loader = extra_weight_attrs.pop("weight_loader", None) or _loader(layer)
        facts = {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}
        if "weight" in layer._parameters:
            del layer.weight
        self._await(layer).expect("weight", (n, k), params_dtype, loader, **facts)

    @names_wrong_argument
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``[..., N]`` in the dtype of ``x``.

        Args:
            layer: whose weight was processed.
            x: bf16, fp16 or fp32 ``[..., K]``.
            bias: ``[N]``, bf16, fp16 or fp32.

        Raises:
            RuntimeError: if the weight was not processed yet.
        """
        weight = layer.get_parameter("weight")
        check_coded(weight)
        return functional.linear(x, self._weight(layer, weight), bias)

    def _quantized(self, arriving: Arriving) -> dict[str, Tensor]:
        q = functional.quantize(arriving.take("weight"), self._group, role="weight")
        scale = q.scale.reshape(1) if self._group == TENSOR else q.scale
        return {"weight": q.data.t() if self._turned else q.data, self.weight_scale_name: scale}

    def _weight(self, layer: nn.Module, weight: Tensor) -> QTensor:
        scale = layer.get_parameter(self.weight_scale_name)
        if self._turned:
            return self._known.of(weight, scale, with_scale_as_stored)
        return QTensor(weight, scale, self._group)


class Fp8PerTensorOnlineLinearMethod(_OnlineLinearMethod):
    """Linear layers with one scale for the weight and one for each token of the input.

    After loading, ``layer.weight`` is FP8, the view ``[K, N]``, and ``layer.weight_scale`` fp32
    ``(1,)``, as in vLLM.

    Example:
        >>> method = fp8kit.compat.Fp8PerTensorOnlineLinearMethod()
        >>> method.create_weights(layer, 64, [32, 32], 64, 64, torch.bfloat16)
        >>> layer.weight.weight_loader(layer.weight, torch.randn(64, 64))
        >>> y = method.apply(layer, torch.randn(3, 64))
    """

    _group = TENSOR


class Fp8PerBlockOnlineLinearMethod(_OnlineLinearMethod):
    """Linear layers with a scale for each 128x128 block of the weight, and 1x128 of the input.

    After loading, ``layer.weight`` is FP8 ``[N, K]`` and ``layer.weight_scale_inv`` fp32
    ``[ceil(N / 128), ceil(K / 128)]``, as in vLLM.

    Example:
        >>> method = fp8kit.compat.Fp8PerBlockOnlineLinearMethod()
    """

    weight_block_size = [128, 128]  # noqa: RUF012  (an attribute as in vLLM, never written)
    weight_scale_name = "weight_scale_inv"
    _group = BLOCK
    _turned = False


class Fp8PtpcOnlineLinearMethod(_OnlineLinearMethod):
    """Linear layers with a scale for each row of the weight; each token has its own.

    After loading, ``layer.weight`` is FP8, the view ``[K, N]``, and ``layer.weight_scale`` fp32
    ``[N, 1]``, as in vLLM.

    Example:
        >>> method = fp8kit.compat.Fp8PtpcOnlineLinearMethod()
    """

    _group = ROW


class Mxfp8OnlineLinearMethod(_OnlineLinearMethod):
    """Linear layers in MXFP8.

    After loading, ``layer.weight`` is FP8 ``[N, K]``, and ``layer.weight_scale`` has E8M0 bytes
    ``[N, ceil(K / 32)]``.

    Example:
        >>> method = fp8kit.compat.Mxfp8OnlineLinearMethod()
    """

    _group = MX
    _turned = False


def _loader(layer: nn.Module) -> Loader:
    """Return the default loader, of a whole weight or one of the shards of ``logical_widths``."""

    def load(param: Tensor, loaded_weight: Tensor, shard_id: Any = None) -> None:
        if shard_id is not None:
            widths: list[int] = layer.logical_widths  # type: ignore[assignment]
            numbers = _numbers(shard_id, len(widths))
            rows = sum(widths[n] for n in numbers)
            param = param.narrow(0, sum(widths[: numbers[0]]), rows)
        fill(param, loaded_weight, "Pass the shard's number for a part of a fused weight.")

    return load


def _numbers(shard_id: Any, shards: int) -> list[int]:
    """Return the numbers of one shard, or of neighbours that one tensor holds."""
    given = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    numbers = [_SHARDS.get(n, shards) if isinstance(n, str) else n for n in given]
    at = [n for n in range(shards) if n in numbers]
    if not numbers or numbers != at or at != list(range(at[0], at[-1] + 1)):
        raise InvalidValue(
            f"Got shard_id={shard_id!r} of a weight with {shards} shards.",
            f"It is a number from 0 to {shards - 1}, 'q', 'k' or 'v' for 0, 1 and 2, or a tuple of "
            "neighbours.",
            "Pass the place of the piece in output_partition_sizes.",
        )
    return at
