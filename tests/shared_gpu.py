"""Repeat layers of experts and linear layers with few tokens, and count results that differ.

``python shared_gpu.py SEED SECONDS`` prints the number of calls, and of those whose bits differ
from the first call of the same layer and tokens. Run several at once: the GPU then switches between
processes while kernels run.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fp8kit
from fp8kit import moe
from fp8kit.formats import BLOCK, GROUP128, ROW
from numerics import bits
from slow_experts import on_device, random_layer

TOGETHER = 40  # calls between two looks at the clock


def expert_calls() -> list[Callable[[], Tensor]]:
    """Return layers of experts: one token, GEMMs in one kernel, and in two."""
    calls = []
    for groups in ((ROW, ROW), (GROUP128, BLOCK)):
        layer = on_device(random_layer(groups, sizes=(5, 192, 256)), "cuda")
        for tokens in (1, 40, 42, 43):
            x = torch.randn(tokens, 192, dtype=torch.bfloat16, device="cuda")
            ids = torch.randint(0, 5, (tokens, 3), device="cuda")
            weights = torch.rand(tokens, 3, device="cuda")
            given = (x, layer.w13, layer.w2, ids, weights)
            calls.append(lambda given=given: moe.experts(*given, backend="hopper_experts"))
    return calls


def linear_calls() -> list[Callable[[], Tensor]]:
    """Return linear layers."""
    calls = []
    for k, n in ((1024, 1024), (4096, 6144)):
        dense = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="cuda")
        layer = fp8kit.Fp8Linear.from_linear(dense, "FP8_DYNAMIC").requires_grad_(False)
        for rows in (1, 16, 64):
            x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
            calls.append(lambda layer=layer, x=x: layer(x))
    return calls


def main() -> None:
    """Print the counts of calls and of differing results, after the given seconds."""
    seed, seconds = int(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(seed)
    rng = random.Random(seed)
    calls = [*expert_calls(), *linear_calls()]
    first = [bits(call()).clone() for call in calls]
    differing, count = torch.zeros((), dtype=torch.int64, device="cuda"), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(TOGETHER):
            i = rng.randrange(len(calls))
            differing += (bits(calls[i]()) != first[i]).any()
        count += TOGETHER
        torch.cuda.synchronize()
    print(count, int(differing))


if __name__ == "__main__":
    main()
