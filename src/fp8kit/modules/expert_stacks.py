"""Quantize stacks of experts one by one, and rearrange them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fp8kit.errors import InvalidType, InvalidValue, teach
from fp8kit.formats import MX, QTensor, Scheme
from fp8kit.modules.entries import quantize_weight
from fp8kit.moe.pairs import NOWHERE
from fp8kit.ops.validation import check_quantized


def quantize_stack(
    dense: Tensor | Iterable[Tensor], scheme: Scheme, transposed: bool, dtypes: list[torch.dtype]
) -> QTensor:
    """Quantize dense experts one by one into one stack.

    They are bf16, fp16 or fp32 ``[E, N, K]``, or one matrix after the other, each ``[K, N]`` if
    ``transposed``; the result of a rebased scheme is in MX groups. ``dtypes`` gets the dtype that
    the first one has. Raises ``TypeError`` if a matrix is no float tensor, and ``ValueError`` if
    there is none.
    """
    if not isinstance(dense, Iterable) or (isinstance(dense, Tensor) and not dense.dim()):
        raise InvalidType(
            f"Got {dense!r:.80} as dense experts.",
            "They are a tensor [E, N, K], or matrices [N, K], one after the other.",
            "Pass weights, such as [layer.weight for layer in layers].",
        )
    matrices: Sequence[Tensor] | Tensor = dense if isinstance(dense, Tensor) else list(dense)
    data: Tensor | None = None
    scale: Tensor | None = None
    for i, matrix in enumerate(matrices):
        if not isinstance(matrix, Tensor):
            raise InvalidType(
                f"Got a {type(matrix).__name__} as an expert's matrix.",
                "It must be a tensor [N, K].",
                "Pass weights, such as [layer.weight for layer in layers].",
            )
        matrix = matrix.detach()
        q = quantize_weight(matrix.t() if transposed else matrix, scheme)
        if data is None or scale is None:
            data = q.data.new_empty(len(matrices), *q.data.shape)
            scale = q.scale.new_empty(len(matrices), *q.scale.shape)
            dtypes.append(matrix.dtype)
        data[i].copy_(q.data)
        scale[i].copy_(q.scale)
    if data is None or scale is None:
        raise InvalidValue(
            "Got no experts.", "A layer has at least one.", "Pass [E, N, K] with E >= 1."
        )
    return QTensor(data, scale, MX if scheme.rebased else scheme.weight)


def stack_extents(down: QTensor) -> tuple[int, int, int]:
    """Return E, H and I of the second weights ``[E, H, I]``; raises if they are none."""
    check_quantized("down", down)
    if len(down.shape) != 3:
        raise InvalidValue(
            f"Got down of shape {tuple(down.shape)}.",
            "The experts' second weights are [E, H, I].",
            "Stack them.",
        )
    count, hidden, intermediate = down.shape
    return count, hidden, intermediate


def check_extents(name: str, q: QTensor, wanted: tuple[int, ...]) -> None:
    """Refuse codes of another shape than the one that follows from the second weight."""
    if tuple(q.shape) != wanted:
        raise InvalidValue(
            f"Got {name} of shape {tuple(q.shape)}.",
            f"The layer, by the shape of its down_proj, needs {name} {wanted}.",
            "Check gated= of the activation, and that the last dimension is summed over.",
        )


def check_pair(name: str, pair: object) -> None:
    """Refuse what is not one tensor for each of the two products; ``None`` is neither."""
    two = list(pair) if isinstance(pair, tuple | list) else [pair]
    if pair is None or (len(two) == 2 and all(t is None or isinstance(t, Tensor) for t in two)):
        return
    raise InvalidType(
        f"Got {name}={pair!r:.80}.",
        "They must be two tensors, one for each product.",
        "Pass (of gate_up, of down), or leave them out.",
    )


def slots_of(placement: Tensor) -> list[int]:
    """Return the ids that the rows of a stack will hold; raises if they are no vector of ids."""
    held = torch.as_tensor(placement)
    if held.dim() != 1 or held.dtype not in (torch.int32, torch.int64):
        raise InvalidType(
            f"Got a placement of {held.dtype} and shape {tuple(held.shape)}.",
            "It must be a vector of ids: one for each row of the stack.",
            "Pass torch.tensor([0, 1, 2, 3, 3]), for example.",
        )
    return list(map(int, held.tolist()))


def rearranged(expert_map: Tensor | None, rows: int, layer: str) -> str:
    """Return why weights in the order of ids do not load into a layer; empty if they do."""
    if expert_map is None:
        return ""
    order = torch.arange(rows, device=expert_map.device).unsqueeze(1)
    if expert_map.shape == order.shape and bool((expert_map == order).all()):
        return ""
    return teach(
        f"The experts of {layer or 'the layer'} were rearranged by place().",
        "Weights come in the order of the ids.",
        "Call layer.place(torch.arange(layer.num_ids)), load, and place them again.",
    )


def placed_rows(slots: list[int], homes: list[int]) -> list[int]:
    """Return the row of the present stack that each row of the next one is copied from.

    ``slots`` are the ids that rows of the next stack hold, ``homes`` a row of the present stack for
    each id, -1 if it is not held. Raises ``ValueError`` if an id is unknown or not held.
    """
    lost = [i for i in slots if not 0 <= i < len(homes) or homes[i] < 0]
    if lost or not slots:
        raise InvalidValue(
            f"Got a placement {slots[:16]} with ids {lost[:8]} that are not held here.",
            f"It names the id in 0 .. {len(homes) - 1} that each row of the stack will hold.",
            "Place only what this layer holds.",
        )
    return [homes[i] for i in slots]


def expert_table(slots: list[int], ids: int) -> list[list[int]]:
    """Return for each id the rows that hold it, repeated to one length; -1 if none does.

    The length follows from the number of rows and ids alone, so that another placement fits into
    the same table. ``slots`` are the ids that rows of the stack hold, of ``ids`` in all.
    """
    width = len(slots) - ids + 1 if len(slots) >= ids else len(slots)
    rows = [[row for row, held in enumerate(slots) if held == i] or [NOWHERE] for i in range(ids)]
    return [[found[turn % len(found)] for turn in range(width)] for found in rows]
