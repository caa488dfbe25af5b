"""torch's FLOP counter counts the GEMMs of FP8 layers like those of dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fp8kit
import fresh
from tiny_experts import tiny


def counted(model: nn.Module, x: Tensor, backward: bool = False) -> int:
    with FlopCounterMode(display=False) as counter:
        y = model(x)
        y = y if isinstance(y, Tensor) else y.logits
        if backward:
            y.sum().backward()
    return int(counter.get_total_flops())


def test_linear_layers_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    x = torch.randn(2, 3, 128, requires_grad=True)
    model.requires_grad_(False)
    wanted, both = counted(model, x), counted(model, x, backward=True)
    fp8kit.convert(model)
    assert (counted(model, x), counted(model, x, backward=True)) == (wanted, both)
    assert wanted == 2 * 6 * 2 * 128 * 256


def test_products_of_codes() -> None:
    x_q, w_q = fp8kit.quantize(torch.randn(3, 128)), fp8kit.quantize(torch.randn(64, 128))
    with FlopCounterMode(display=False) as counter:
        fp8kit.scaled_mm(x_q, w_q)
    assert counter.get_total_flops() == 2 * 3 * 64 * 128


@pytest.mark.slow
def test_experts_count_by_pairs() -> None:
    model = tiny("Qwen3Moe")
    model.set_experts_implementation("eager")  # torch counts no grouped product
    config, ids = model.config, torch.randint(64, (1, 5))
    whole = counted(model, ids)
    fp8kit.convert(model, include=["*.experts"])
    pairs = 5 * config.num_experts_per_tok * config.num_hidden_layers
    of_experts = 2 * pairs * 3 * config.hidden_size * config.moe_intermediate_size
    assert counted(model, ids) == whole > of_experts > 0


@pytest.mark.slow
def test_the_order_of_imports_does_not_matter() -> None:
    code = (
        "import torch, fp8kit\n"
        "layer = fp8kit.Fp8Linear.from_linear(torch.nn.Linear(64, 32))\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    layer(torch.randn(3, 64))\n"
        "assert counter.get_total_flops() == 2 * 3 * 64 * 32\n"
    )
    fresh.run(code)
