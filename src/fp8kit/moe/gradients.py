"""The backward of the experts: through the dequantized weights, as if nothing were rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kit.moe.loop import used
from fp8kit.moe.pairs import sorted_pairs
from fp8kit.moe.problem import ExpertOperands, ExpertsProblem, ExpertWeights
from fp8kit.quantizers import reference as quantizer


def layer_backward(
    grad: Tensor, operands: ExpertOperands, problem: ExpertsProblem
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and of the router's weights.

    Experts are dequantized to ``float32`` one at a time. The host reads the counts of tokens.
    ``grad`` is float ``[M, H]``; the results are ``[M, H]`` in the dtype of the input, and
    ``float32 [M, k]``.
    """
    operands = operands.placed(problem.experts)
    x, ids, weights = operands.x, operands.ids, operands.weights
    pairs, k = sorted_pairs(ids, problem.experts), ids.shape[1]
    rows = torch.zeros(ids.numel(), problem.hidden, dtype=torch.float32, device=x.device)
    of_weights = torch.zeros(ids.numel(), dtype=torch.float32, device=x.device)
    for expert, start, stop in used(pairs.offsets):
        chosen = pairs.order[start:stop]
        token, factor = chosen // k, weights.reshape(-1)[chosen].unsqueeze(1)
        given, upstream = x[token].float(), grad[token].float()
        w13, w2 = (_dense(w, expert, problem) for w in (operands.w13, operands.w2))
        p = (given * factor if problem.router_weight_on_input else given) @ w13.t()
        p = p if operands.w13.bias is None else p + operands.w13.bias[expert].float()
        behind = upstream if problem.router_weight_on_input else upstream * factor
        at_input = problem.activation.backward(p, behind @ w2) @ w13
        if problem.router_weight_on_input:
            of_weights[chosen] = (at_input * given).sum(1)
            rows[chosen] = at_input * factor
        else:
            q = problem.activation(p) @ w2.t()
            q = q if operands.w2.bias is None else q + operands.w2.bias[expert].float()
            of_weights[chosen] = (upstream * q).sum(1)
            rows[chosen] = at_input
    grad_x = rows.view(*ids.shape, -1).sum(1).to(x.dtype)
    return grad_x, of_weights.view(ids.shape)


def _dense(w: ExpertWeights, expert: int, problem: ExpertsProblem) -> Tensor:
    return quantizer.dequantize(w.data[expert], w.scale[expert], problem.w_group, torch.float32)
