"""Online methods for experts against the formula of the layer in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8kit
from fp8kit import compat
from fp8kit.errors import InvalidType, InvalidValue
from fp8kit.formats import SCHEMES, scale_shape
from numerics import SCHEME_ERROR, relative_error

E, H, WIDE, M, TOP = 4, 64, 48, 12, 2
METHODS = {
    "FP8_TENSOR": compat.Fp8PerTensorOnlineMoEMethod,
    "FP8_BLOCK": compat.Fp8PerBlockOnlineMoEMethod,
    "FP8_DYNAMIC": compat.Fp8PtpcOnlineMoEMethod,
    "MXFP8": compat.Mxfp8OnlineMoEMethod,
}


def weights_of(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 0.25, 4.0, 1.0]).reshape(E, 1, 1)
    return {
        "w13_weight": (torch.randn(E, 2 * WIDE, H, generator=g) * scale / 8).bfloat16(),
        "w2_weight": (torch.randn(E, H, WIDE, generator=g) / 8).bfloat16(),
        "w13_bias": torch.randn(E, 2 * WIDE, generator=g).bfloat16(),
        "w2_bias": torch.randn(E, H, generator=g).bfloat16(),
    }


def new_layer(scheme: str, **attributes: Any) -> tuple[Any, nn.Module]:
    layer = nn.Module()
    for name, value in attributes.items():
        setattr(layer, name, value)
    method = METHODS[scheme](layer=layer)
    method.create_weights(layer, E, H, WIDE, torch.bfloat16)
    return method, layer


def filled(scheme: str, seed: int = 0, **attributes: Any) -> tuple[Any, nn.Module]:
    method, layer = new_layer(scheme, **attributes)
    for name, parameter in list(layer.named_parameters()):
        parameter.weight_loader(parameter, weights_of(seed)[name])
    return method, layer


def tokens() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    return torch.randn(M, H, generator=g).bfloat16(), torch.randn(M, E, generator=g)


def by_hand(
    x: Tensor, ids: Tensor, weights: Tensor, biased: bool = False, gpt_oss: bool = False
) -> Tensor:
    """Compute the layer in float64 from the dense weights."""
    w, y = {n: t.double() for n, t in weights_of(0).items()}, torch.zeros(M, H).double()
    for m in range(M):
        for e, p in zip(ids[m].tolist(), weights[m].double(), strict=True):
            if e < 0:
                continue
            z = w["w13_weight"][e] @ x[m].double() + (w["w13_bias"][e] if biased else 0)
            if gpt_oss:
                gate, up = z[::2].clamp(max=7.0), z[1::2].clamp(-7.0, 7.0)
                z = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                z = F.silu(z[:WIDE]) * z[WIDE:]
            y[m] += p * (w["w2_weight"][e] @ z + (w["w2_bias"][e] if biased else 0))
    return y


def check(y: Tensor, wanted: Tensor) -> None:
    """Check the error of two GEMMs in a row: two draws of one GEMM's error, and SiLU's part.

    SiLU and gate multiply two results of the first GEMM, which at most doubles its share.
    """
    lower, upper = SCHEME_ERROR["FP8_TENSOR"]
    assert y.dtype == torch.bfloat16
    assert lower < relative_error(y, wanted) < 3 * upper


@pytest.mark.parametrize("scheme", list(METHODS))
def test_experts_arrive_shard_by_shard(scheme: str) -> None:
    method, layer = new_layer(scheme)
    w13, w2 = layer.w13_weight, layer.w2_weight
    assert w13.is_meta
    assert w2.is_meta
    w = weights_of(0)
    for e in range(E):
        assert w13.is_meta
        w13.weight_loader(w13, w["w13_weight"][e, :WIDE], "experts.w1", "w1", e)
        w2.weight_loader(w2, w["w2_weight"][e], "experts.w2", shard_id="w2", expert_id=e)
        w13.weight_loader(w13, w["w13_weight"][e, WIDE:], "experts.w3", "w3", e)
    assert layer.w13_weight.dtype == layer.w2_weight.dtype == torch.float8_e4m3fn
    group = SCHEMES[scheme].weight
    scales = layer.w13_weight_scale_inv if scheme == "FP8_BLOCK" else layer.w13_weight_scale
    one = scheme == "FP8_TENSOR"
    assert scales.shape == ((E,) if one else scale_shape((E, 2 * WIDE, H), group))
    for e in range(E):
        q = fp8kit.quantize(w["w13_weight"][e], group, role="weight")
        assert torch.equal(layer.w13_weight[e].view(torch.uint8), q.data.view(torch.uint8))
        assert torch.equal(scales[e].flatten(), q.scale.flatten())
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(logits, TOP)
    check(method.apply(layer, x, weights, ids, None, None), by_hand(x, ids, weights))


def test_shards_of_all_experts_arrive_at_once() -> None:
    _, layer = new_layer("FP8_TENSOR")
    w13, w2, w = layer.w13_weight, layer.w2_weight, weights_of(0)
    assert w13.weight_loader(w13, w["w13_weight"][:, :WIDE], "", "w1", 0) is None
    assert w13.weight_loader(w13, w["w13_weight"][:, WIDE:], "", "w3", 0, return_success=True)
    w2.weight_loader(w2, w["w2_weight"], "", "w2", 0)
    _, whole = filled("FP8_TENSOR")
    assert torch.equal(layer.w13_weight.view(torch.uint8), whole.w13_weight.view(torch.uint8))
    assert torch.equal(layer.w2_weight.view(torch.uint8), whole.w2_weight.view(torch.uint8))


def test_a_gate_that_is_not_cut_for_this_rank_is_no_gate_and_up() -> None:
    _, layer = new_layer("FP8_TENSOR")
    with pytest.raises(ValueError, match=rf"\({2 * WIDE}, {H}\).*Here \({WIDE}, {H}\) is due"):
        layer.w13_weight.weight_loader(
            layer.w13_weight, weights_of(0)["w13_weight"][0], "", "w1", 0
        )


@pytest.mark.parametrize("scheme", list(METHODS))
def test_a_reload_writes_the_same_storage(scheme: str) -> None:
    method, layer = filled(scheme, seed=1)
    addresses = {n: p.data_ptr() for n, p in layer.named_parameters()}
    method.process_weights_after_loading(layer)
    for name in ("w13_weight", "w2_weight"):
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, weights_of(0)[name])
    assert {n: p.data_ptr() for n, p in layer.named_parameters()} == addresses
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(logits, TOP)
    check(method.apply(layer, x, topk_weights=weights, topk_ids=ids), by_hand(x, ids, weights))


def test_gpt_oss_has_biases_and_an_activation_of_its_own() -> None:
    config = SimpleNamespace(has_bias=True)
    method, layer = filled("FP8_TENSOR", moe_config=config, activation="swigluoai")
    assert compat.Mxfp8OnlineMoEMethod(moe=config).moe is method.moe is config
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(logits, TOP)
    y = method.apply(layer, x, weights, ids.int())
    check(y, by_hand(x, ids, weights, biased=True, gpt_oss=True))
    assert layer.w13_bias.dtype == torch.bfloat16


def test_maps_shared_experts_and_weights_on_the_input() -> None:
    method, layer = filled("FP8_TENSOR")
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(logits, TOP)
    layer.expert_map = torch.tensor([0, 1, -1, -1])
    kept = torch.where(ids < 2, ids, -1)
    check(method.apply(layer, x, weights, ids), by_hand(x, kept, weights))
    plain = method.apply(layer, x, weights, ids)
    shared = nn.Linear(H, H, dtype=torch.bfloat16)
    assert torch.equal(method.apply(layer, x, weights, ids, shared), plain + shared(x))
    other = torch.randn_like(x)
    assert torch.equal(method.apply(layer, x, weights, ids, shared, other), plain + shared(other))
    layer.expert_map = None
    once = torch.full((M, 1), 0.5)
    layer.apply_router_weight_on_input = True
    y = method.apply(layer, x, once, ids[:, :1])
    check(y, by_hand(x / 2, ids[:, :1], torch.ones(M, 1)))


def test_the_router_is_asked_in_the_words_of_every_version() -> None:
    bias = torch.randn(E, generator=torch.Generator().manual_seed(3))
    words = {
        "top_k": TOP,
        "scoring_func": "sigmoid",
        "renormalize": True,
        "use_grouped_topk": True,
        "num_expert_group": 2,
        "topk_group": 1,
        "e_score_correction_bias": bias,
        "routed_scaling_factor": 2.5,
    }
    method, layer = filled("FP8_TENSOR", **words)
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(
        logits,
        TOP,
        scoring="sigmoid",
        groups=2,
        top_groups=1,
        correction_bias=bias,
        scaling_factor=2.5,
    )
    y = method.apply_monolithic(layer, x, logits)
    assert torch.equal(y, method.apply(layer, x, weights, ids))
    _, bare = filled("FP8_TENSOR")
    more = {n: v for n, v in words.items() if n not in ("top_k", "renormalize")}
    assert torch.equal(y, method.apply(bare, x, logits, TOP, renormalize=True, **more))
    assert torch.equal(y, method.apply(bare, x, router_logits=logits, enable_eplb=False, **words))

    def custom(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return weights / 2.5, ids

    again = method.apply(
        bare, x, logits, TOP, custom_routing_function=custom, routed_scaling_factor=2.5
    )
    assert torch.allclose(again, y)
    with pytest.raises(TypeError, match="enable_eplb"):
        method.apply(bare, x, logits, TOP, enable_eplb=True)


def test_half_of_a_routing_is_refused() -> None:
    method, layer = filled("FP8_TENSOR")
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(logits, TOP)
    for given in ({}, {"topk_ids": ids}):
        with pytest.raises(
            InvalidValue, match="neither topk_weights with topk_ids nor router_logits"
        ):
            method.apply(layer, x, **given)
    for logits_alone in ({"router_logits": logits}, {"topk_weights": weights}):
        with pytest.raises(InvalidType, match="Got top_k=None"):
            method.apply(layer, x, **logits_alone)
    with pytest.raises(InvalidValue, match="use_grouped_topk without num_expert_group"):
        method.apply(layer, x, logits, TOP, use_grouped_topk=True)


def test_what_does_not_fit_is_told() -> None:
    method, layer = new_layer("FP8_TENSOR")
    x, logits = tokens()
    ids, weights = fp8kit.moe.route(logits, TOP)
    with pytest.raises(RuntimeError, match="The weight becomes FP8 when all of it has arrived"):
        method.apply(layer, x, weights, ids)
    layer.w13_weight.weight_loader(layer.w13_weight, weights_of(0)["w13_weight"])
    with pytest.raises(ValueError, match="elements of w2_weight"):
        method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match="Shards of an expert are 'w1'"):
        layer.w2_weight.weight_loader(layer.w2_weight, torch.zeros(1), "", "w4", 0)
    for expert in (-1, 99, "0"):
        with pytest.raises(ValueError, match=r"Got expert_id=.*expert_map maps to -1"):
            layer.w2_weight.weight_loader(layer.w2_weight, torch.zeros(1), "", "w2", expert)
    with pytest.raises(ValueError, match="Pass shard_id and expert_id"):
        layer.w2_weight.weight_loader(layer.w2_weight, torch.zeros(1))
    _, ungated = new_layer("FP8_TENSOR", activation="relu2_no_mul")
    with pytest.raises(ValueError, match="'w3' of experts without a gate"):
        ungated.w13_weight.weight_loader(ungated.w13_weight, torch.zeros(WIDE, H), "", "w3", 0)
    with pytest.raises(ValueError, match="It must be one of silu"):
        new_layer("FP8_TENSOR", activation="tanh")
