"""Stacks of experts ``[E, N, K]``: how modules store them; quantize, check and rearrange them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kit.errors import (
    InvalidType,
    InvalidValue,
    check_choice,
    check_strided,
    check_switch,
    teach,
)
from fp8kit.formats import MX, QTensor, Scheme
from fp8kit.modules.entries import quantize_weight
from fp8kit.moe.activation import Activation
from fp8kit.moe.pairs import NOWHERE
from fp8kit.ops.validation import check_quantized

_CALLS = ("routed", "sorted")


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """How a class of experts stores its two stacks, and what it computes with them.

    Args:
        up: name of the Parameter of gates and ups, ``[E, 2 I, H]``, or of ups alone ``[E, I, H]``.
        down: name of the Parameter ``[E, H, I]``. Biases, if any, are the Parameters ``<up>_bias
            [E, 2 I]`` and ``<down>_bias [E, H]``.
        activation: what is computed between the two products; with ``None`` the module's own
            ``_apply_gate`` or ``act_fn`` is called between two products, unfused.
        transposed: the dense stacks are ``[E, H, 2 I]`` and ``[E, I, H]``.
        call: ``"routed"`` if ``forward`` takes tokens ``[M, H]``, ids and weights ``[M, k]``;
            ``"sorted"`` if it takes ``[E * M, H]``, with equally many rows for each expert.

    Raises:
        TypeError: if ``activation`` or ``transposed`` is of another type.
        ValueError: if the names are not two, or ``call`` is another word.

    Example:
        >>> ExpertStacks("w13", "w2", Activation("gelu"))
    """

    up: str = "gate_up_proj"
    down: str = "down_proj"
    activation: Activation | None = Activation()  # noqa: RUF009
    transposed: bool = False
    call: str = "routed"

    def __post_init__(self) -> None:
        if not all(isinstance(name, str) for name in self.names) or self.up == self.down:
            raise InvalidValue(
                f"Got up={self.up!r:.80} and down={self.down!r:.80}.",
                "They are the names of two Parameters.",
                "Pass those of the module, such as 'gate_up_proj' and 'down_proj'.",
            )
        if not isinstance(self.activation, Activation | None):
            raise InvalidType(
                f"Got activation={self.activation!r:.80}.",
                "It is an fp8kit.moe.Activation, or None for the module's own.",
                "Pass fp8kit.moe.Activation('silu'), for example.",
            )
        check_switch("transposed", self.transposed)
        remedy = "Pass 'routed' for forward(tokens, ids, weights)."
        check_choice("call", self.call, _CALLS, remedy)

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two stacks."""
        return self.up, self.down


def quantize_stack(
    dense: Tensor | Iterable[Tensor], scheme: Scheme, transposed: bool, dtypes: list[torch.dtype]
) -> QTensor:
    """Quantize dense experts one by one into one stack.

    ``dense`` is bf16, fp16 or fp32 ``[E, N, K]``, or an iterable of matrices; matrices are
    ``[K, N]`` if ``transposed``. For a rebased scheme the result has MX scales. The dtype of the
    first matrix is appended to ``dtypes``. Raises ``TypeError`` if a matrix is no float tensor, and
    ``ValueError`` if there is none.
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
    """Return E, H and I of the second stack ``[E, H, I]``; raises if it is no such stack."""
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
    """Refuse codes whose shape is not ``wanted``, which follows from the second stack."""
    if tuple(q.shape) != wanted:
        raise InvalidValue(
            f"Got {name} of shape {tuple(q.shape)}.",
            f"The layer, by the shape of its down_proj, needs {name} {wanted}.",
            "Check gated= of the activation, and that the last dimension is summed over.",
        )


def check_pair(name: str, pair: object) -> None:
    """Refuse anything but ``None`` or a pair: for each product a tensor or ``None``."""
    two = list(pair) if isinstance(pair, tuple | list) else [pair]
    if pair is None or (len(two) == 2 and all(t is None or isinstance(t, Tensor) for t in two)):
        return
    raise InvalidType(
        f"Got {name}={pair!r:.80}.",
        "They must be two tensors, one for each product.",
        "Pass (of gate_up, of down), or leave them out.",
    )


def slots_of(placement: Tensor) -> list[int]:
    """Return the expert id for each row of a stack; raises if this is no vector of ids."""
    arrived = f"Got placement={placement!r:.80}."
    required = "It must be a vector of ids: one for each row of the stack."
    remedy = "Pass torch.tensor([0, 1, 2, 3, 3]), for example."
    try:
        held = torch.as_tensor(placement)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidType(arrived, required, remedy) from error
    check_strided("a placement", held)
    if held.dim() != 1 or held.dtype not in (torch.int32, torch.int64):
        arrived = f"Got a placement of {held.dtype} and shape {tuple(held.shape)}."
        raise InvalidType(arrived, required, remedy)
    return list(map(int, held.tolist()))


def rearranged(expert_map: Tensor | None, rows: int, layer: str) -> str:
    """Return why weights in the order of ids do not fit a layer's rows; empty if they do."""
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
    """Return, for each row of the next stack, the row of the present stack to copy.

    ``slots`` has the id for each row of the next stack. ``homes`` has a row of the present stack
    for each id, -1 if none holds it. Raises ``ValueError`` if an id is unknown or not held.
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

    The length depends only on the numbers of rows and ids, so another placement fits into the same
    table. ``slots`` has the id for each row of the stack; there are ``ids`` ids in all.
    """
    width = len(slots) - ids + 1 if len(slots) >= ids else len(slots)
    rows = [[row for row, held in enumerate(slots) if held == i] or [NOWHERE] for i in range(ids)]
    return [[found[turn % len(found)] for turn in range(width)] for found in rows]
