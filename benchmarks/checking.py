"""Check cases before they are timed: a wrong result or a failed graph capture excludes a case."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from timing import Case

_COLUMNS = 128


@dataclass
class Checked:
    """The checked cases of one layer and row count.

    Args:
        cases: the cases that may be timed, by name.
        errors: by name, the error of the whole result relative to the exact product.
        failed: by name, the reason why a case may not be timed.
    """

    cases: dict[str, Case] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, case: Case, exact: Tensor, limit: float) -> None:
        """Run a case once, compare its result, capture it, and add it to ``cases`` or ``failed``.

        Args:
            name: name of the case.
            case: called with 0, returns ``[M, N]`` for the first copy of the weight.
            exact: fp32 ``[M, N]``.
            limit: the largest relative error of any row and of any 128 columns.
        """
        try:
            y = case(0)
            assert isinstance(y, Tensor)
            assert y.shape == exact.shape
            whole, worst = relative_errors(y, exact)
            if not worst < limit:
                self.failed[name] = f"relative error {worst:.3g} in the worst part of the result"
                return
            if y.is_cuda:
                capture_once(case)
        except Exception as broken:
            # a kernel that does not serve a shape is a result, and must not end the run
            self.failed[name] = reason(broken)
            return
        self.cases[name], self.errors[name] = case, whole


def relative_errors(y: Tensor, exact: Tensor) -> tuple[float, float]:
    """Compare a result with the exact one.

    A wrong edge would vanish in the norm of the whole result, so rows and slices of columns are
    also compared on their own.

    Args:
        y: any float dtype ``[M, N]``.
        exact: fp32 ``[M, N]``.

    Returns:
        The error of the whole and the largest of any row or any 128 columns, relative to the norm
        of the exact values there.
    """
    wrong, right = (y.float() - exact).square_(), exact.square()
    width = min(_COLUMNS, exact.shape[1])
    starts = [*range(0, exact.shape[1] - width, width), exact.shape[1] - width]
    columns = torch.tensor(starts, device=exact.device)[:, None]
    columns = columns + torch.arange(width, device=exact.device)
    by_column = wrong.sum(0)[columns].sum(1) / right.sum(0)[columns].sum(1)
    by_row = wrong.sum(1) / right.sum(1)
    whole = wrong.sum() / right.sum()
    worst = torch.maximum(by_column.max(), by_row.max())
    return float(whole.sqrt()), float(worst.sqrt())


def capture_once(case: Case) -> None:
    """Capture two calls and replay them: a case that cannot be captured raises here."""
    torch.cuda.synchronize()
    stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            case(0)
            case(1)
    finally:
        # a failed capture leaves its own stream current
        torch.cuda.set_stream(stream)
    graph.replay()
    torch.cuda.synchronize()


def reason(broken: BaseException) -> str:
    """Return the first line of an error, short enough for a table."""
    return f"{type(broken).__name__}: {broken}".strip().splitlines()[0][:200]
