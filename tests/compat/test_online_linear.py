"""Online methods for linear layers: each weight that arrives dense is quantized once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8kit
from fp8kit import compat
from fp8kit.errors import InvalidValue
from fp8kit.formats import SCHEMES
from numerics import assert_bits_equal, assert_scheme_error

WIDTHS, K = [96, 32, 32], 160
N = sum(WIDTHS)
METHODS = {
    "FP8_TENSOR": compat.Fp8PerTensorOnlineLinearMethod,
    "FP8_BLOCK": compat.Fp8PerBlockOnlineLinearMethod,
    "FP8_DYNAMIC": compat.Fp8PtpcOnlineLinearMethod,
    "MXFP8": compat.Mxfp8OnlineLinearMethod,
}


def new_layer(scheme: str, **words: Any) -> tuple[Any, nn.Module]:
    method, layer = METHODS[scheme](), nn.Module()
    method.create_weights(layer, K, WIDTHS, K, N, torch.bfloat16, **words)
    return method, layer


def weight_of(seed: int) -> Tensor:
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()
    w[0] *= 2**-12  # a row of activations would get the least scale, a row of a weight does not
    return w


def check(scheme: str, layer: nn.Module, w: Tensor) -> None:
    """Compare a layer's tensors with the core's codes and scales, in the shapes of vLLM."""
    q = fp8kit.quantize(w, SCHEMES[scheme].weight, role="weight")
    turned = scheme in ("FP8_TENSOR", "FP8_DYNAMIC")
    assert layer.weight.shape == ((K, N) if turned else (N, K))
    assert_bits_equal(layer.weight.t() if turned else layer.weight, q.data)
    scale = layer.weight_scale_inv if scheme == "FP8_BLOCK" else layer.weight_scale
    assert scale.shape == ((1,) if scheme == "FP8_TENSOR" else q.scale.shape)
    assert torch.equal(scale, q.scale.view(scale.shape))
    assert layer.input_scale is None


@pytest.mark.parametrize("scheme", list(METHODS))
def test_a_weight_is_quantized_as_soon_as_all_shards_are_there(scheme: str) -> None:
    method, layer = new_layer(scheme)
    held = layer.weight
    assert held.is_meta
    assert held.shape == (N, K)
    assert (held.input_dim, held.output_dim) == (1, 0)
    w = weight_of(0)
    for shard, part in zip("qkv", w.split(WIDTHS), strict=True):
        assert layer.weight.is_meta
        held.weight_loader(held, part, shard)  # as loaders hold the Parameters of the start
    check(scheme, layer, w)
    before = layer.weight
    method.process_weights_after_loading(layer)
    assert layer.weight is before
    x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
    y = method.apply(layer, x, bias)
    assert (y.shape, y.dtype) == ((2, 3, N), torch.bfloat16)
    assert_scheme_error(y.double() - bias.double(), x.double() @ w.double().t(), scheme)


@pytest.mark.parametrize("scheme", list(METHODS))
def test_what_comes_twice_counts_once(scheme: str) -> None:
    method, layer = new_layer(scheme)
    w, held = weight_of(0), layer.weight
    held.weight_loader(held, w[:128], (0, 1))
    held.weight_loader(held, w[96:128], 1)
    assert layer.weight.is_meta
    with pytest.raises(InvalidValue, match=f"^{32 * K} elements of weight .* have not arrived"):
        method.process_weights_after_loading(layer)
    held.weight_loader(held, w[96:], (1, 2))
    check(scheme, layer, w)


def by_bytes(parameter: Tensor, loaded: Tensor, half: int) -> None:
    columns = slice(half * K // 2, (half + 1) * K // 2)
    parameter.data[:, columns].view(torch.uint8).copy_(loaded.view(torch.uint8))


def test_columns_may_be_written_as_bytes() -> None:
    _, layer = new_layer("FP8_DYNAMIC", weight_loader=by_bytes)
    w, held = weight_of(0), layer.weight
    for half, part in enumerate(w.chunk(2, 1)):
        assert layer.weight.is_meta
        held.weight_loader(held, part.contiguous(), half)
    check("FP8_DYNAMIC", layer, w)


@pytest.mark.parametrize("modes", list(itertools.product((False, True), repeat=3)))
def test_weights_arrive_within_inference_mode_and_without(modes: tuple[bool, ...]) -> None:
    _, layer = new_layer("FP8_DYNAMIC")
    for seed in (0, 1):
        first, second = weight_of(seed).split([WIDTHS[0], N - WIDTHS[0]])
        with torch.inference_mode(modes[seed]):
            layer.weight.weight_loader(layer.weight, first, 0)
        with torch.inference_mode(modes[2]):
            layer.weight.weight_loader(layer.weight, second, (1, 2))
        check("FP8_DYNAMIC", layer, weight_of(seed))


@pytest.mark.parametrize("scheme", list(METHODS))
def test_a_state_dict_has_codes(scheme: str) -> None:
    (_, layer), (_, other) = new_layer(scheme), new_layer(scheme)
    for seed, each in enumerate((layer, other)):
        each.weight.weight_loader(each.weight, weight_of(seed))
    model = nn.ModuleDict({"part": layer})
    model.load_state_dict({f"part.{n}": t for n, t in other.state_dict().items()})
    check(scheme, layer, weight_of(1))
    dense = {"part.weight": weight_of(0).view(layer.weight.shape)}
    with pytest.raises(InvalidValue, match=r"part\.weight of torch\.bfloat16.*weight_loader"):
        model.load_state_dict(dense, strict=False)
    check(scheme, layer, weight_of(1))


@pytest.mark.parametrize("scheme", list(METHODS))
def test_a_reload_writes_the_same_storage(scheme: str) -> None:
    method, layer = new_layer(scheme)
    layer.weight.weight_loader(layer.weight, weight_of(0))
    address, parameter = layer.weight.data_ptr(), layer.weight
    for shard, part in enumerate(weight_of(1).split(WIDTHS)):
        check(scheme, layer, weight_of(0))
        parameter.weight_loader(parameter, part, shard)
    method.process_weights_after_loading(layer)
    check(scheme, layer, weight_of(1))
    assert layer.weight is parameter
    assert layer.weight.data_ptr() == address


@pytest.mark.parametrize("scheme", list(METHODS))
def test_what_is_missing_is_told(scheme: str) -> None:
    method, layer = new_layer(scheme)
    with pytest.raises(RuntimeError, match="The weight becomes FP8 when all of it has arrived"):
        method.apply(layer, torch.randn(1, K))
    with pytest.raises(ValueError, match="All elements of weight"):
        method.process_weights_after_loading(layer)
    layer.weight.weight_loader(layer.weight, weight_of(0)[:96], 0)
    with pytest.raises(ValueError, match=f"{64 * K} elements of weight"):
        method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match="Pass the shard's number"):
        layer.weight.weight_loader(layer.weight, weight_of(0)[:5])


def test_neighbouring_shards_arrive_in_one_tensor() -> None:
    _, layer = new_layer("FP8_DYNAMIC")
    w = weight_of(0)
    layer.weight.weight_loader(layer.weight, w[WIDTHS[0] :], (1, 2))
    layer.weight.weight_loader(layer.weight, w[: WIDTHS[0]], (0,))
    check("FP8_DYNAMIC", layer, w)


def test_a_shard_that_comes_twice_stands_for_no_other() -> None:
    method, layer = new_layer("FP8_DYNAMIC")
    w = weight_of(0)
    q, k, v = w.split(WIDTHS)
    for shard, part in (("q", q), ("k", v), ("k", k)):
        layer.weight.weight_loader(layer.weight, part, shard)
    with pytest.raises(ValueError, match=rf"{v.numel()} elements of weight .* have not arrived"):
        method.process_weights_after_loading(layer)
    layer.weight.weight_loader(layer.weight, v, "v")
    check("FP8_DYNAMIC", layer, w)


@pytest.mark.parametrize("shard", ["gate", "k", 2, -1, (), (1, 0), (0, 2), ("q", "w")])
def test_shards_that_a_weight_does_not_have_are_refused(shard: Any) -> None:
    layer = nn.Module()
    compat.Fp8PtpcOnlineLinearMethod().create_weights(layer, K, [N] if shard == "k" else [N, N])
    with pytest.raises(InvalidValue, match=r"Got shard_id=.* with . shards.*output_partition_siz"):
        layer.weight.weight_loader(layer.weight, weight_of(0), shard)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_codes_are_no_dense_weight(dtype: torch.dtype) -> None:
    def own_loader(param: Tensor, loaded_weight: Tensor) -> None:
        param.copy_(loaded_weight)

    for words in ({}, {"weight_loader": own_loader}):
        _, layer = new_layer("FP8_DYNAMIC", **words)
        with pytest.raises(InvalidValue, match=rf"weight of {dtype} .*codes are no numbers"):
            layer.weight.weight_loader(layer.weight, weight_of(0).to(dtype))


def test_a_loader_of_the_model_writes_the_dense_weight() -> None:
    seen = []

    def half(param: Tensor, loaded_weight: Tensor, shard: int) -> None:
        seen.append((param.output_dim, param.dtype, param.note))  # type: ignore[attr-defined]
        param.data[shard * N // 2 : (shard + 1) * N // 2].copy_(loaded_weight[: N // 2])

    _, layer = new_layer("FP8_TENSOR", weight_loader=half, note="kept")
    w = weight_of(0)
    layer.weight.weight_loader(layer.weight, w[: N // 2], 0)
    layer.weight.weight_loader(layer.weight, w[N // 2 :].float(), shard=1)
    check("FP8_TENSOR", layer, w)
    assert seen == [(0, torch.bfloat16, "kept")] * 2
    assert layer.weight.note == "kept"


def test_a_weight_put_in_by_hand_is_quantized_when_asked() -> None:
    method, layer = METHODS["FP8_BLOCK"](), nn.Linear(K, N)
    method.create_weights(layer, K, [N], K, N, torch.float32, weight_loader=None)
    assert layer.weight.is_meta
    layer.weight = nn.Parameter(weight_of(3).float())
    method.process_weights_after_loading(layer)
    check("FP8_BLOCK", layer, weight_of(3))
    assert layer.weight_block_size == [128, 128]
    assert layer.orig_dtype == torch.float32


def test_a_quantized_weight_may_be_held_elsewhere_when_asked_again() -> None:
    method, layer = new_layer("FP8_DYNAMIC")
    layer.weight.weight_loader(layer.weight, weight_of(0))
    codes = layer.weight.data
    del layer.weight
    layer.weight = codes
    method.process_weights_after_loading(layer)
    assert layer.weight is codes


def test_weights_arrive_on_the_device_of_creation() -> None:
    with torch.device("cpu"):
        _, layer = new_layer("FP8_TENSOR")
    layer.weight.weight_loader(layer.weight, weight_of(0))
    assert layer.weight.device.type == "cpu"
    assert set(layer.state_dict()) == {"weight", "weight_scale"}
