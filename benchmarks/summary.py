"""Summarize result files: ratios to peers, to bf16 and to the roofline, and their means.

``COMPARISONS`` says which peers each case of fp8kit is compared with. Plain Python, so that tables
and plots need neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

Row = dict[str, Any]
Comparisons = Mapping[str, tuple[str, ...]]

_BLOCK_PEERS = ("vllm_block", "torch_block", "deepgemm_block")
# whoever uses the default scheme could use any of these instead
_PEERS = (
    "vllm_row",
    "vllm_tensor",
    "torch_row_fast",
    "torchao_row",
    "torchao_tensor",
    *_BLOCK_PEERS,
)
# each case of fp8kit, and the peers that do the same work
COMPARISONS: dict[str, tuple[str, ...]] = {
    "row": _PEERS,
    "row_fast": _PEERS,
    "tensor": _PEERS,
    "block": _BLOCK_PEERS,
    "weight_only": (),
    "static": ("vllm_static",),
    "quantized": ("vllm_quantized", "torch_quantized_fast"),
}
# of `mx_speed.py`: the cases whose times are divided, first by second
MX_COMPARISONS = {
    "MXFP8 / FP8_DYNAMIC": ("MXFP8", "FP8_DYNAMIC"),
    "bf16 / MXFP8": ("bf16", "MXFP8"),
    "Humming / MXFP8": ("humming", "MXFP8"),
}
# the same as COMPARISONS, for layers of experts
_EXPERT_BLOCK_PEERS = (
    "vllm_block",
    "deepgemm_contiguous",
    "deepgemm_masked",
    "flashinfer_block",
    "flashinfer_mono",
)
EXPERT_COMPARISONS: dict[str, tuple[str, ...]] = {
    "row": ("vllm_channel", "torch_grouped_row", "flashinfer_cutlass", *_EXPERT_BLOCK_PEERS),
    "block": _EXPERT_BLOCK_PEERS,
    "static": ("flashinfer_cutlass",),
}
# bf16 counts as the fastest of these
_DENSE = ("bf16", "bf16_batched_mm", "bf16_grouped_mm")


@dataclass(frozen=True)
class Ratios:
    """One case of fp8kit for one layer and row count: ratios of other times to its own.

    Args:
        shape: name of the layer.
        us: microseconds of fp8kit.
        of_bf16: bf16's time divided by fp8kit's.
        roofline: least possible time divided by fp8kit's.
        peer: name of the fastest peer, empty if there is none.
        of_peer: that peer's time divided by fp8kit's, 0 if there is none.
    """

    shape: str
    us: float
    of_bf16: float
    roofline: float
    peer: str = ""
    of_peer: float = 0.0


@dataclass(frozen=True)
class Summary:
    """One case of fp8kit at one row count, over all layers; means are geometric.

    Args:
        m: number of rows.
        layers: number of layers that were measured.
        roofline: mean part of the roofline.
        of_bf16: mean of bf16's time divided by fp8kit's.
        worst_of_bf16: the least of these ratios, and its layer.
        of_peer: mean of the best peer's time divided by fp8kit's, over the layers that have a peer;
            ``None`` if none has.
        worst_of_peer: the least of these ratios, and its layer.
    """

    m: int
    layers: int
    roofline: float
    of_bf16: float
    worst_of_bf16: tuple[float, str]
    of_peer: float | None
    worst_of_peer: tuple[float, str] | None


def best(times: dict[str, float], names: Iterable[str]) -> str:
    """Return the name of the fastest of some cases; empty if none was measured."""
    return min((n for n in names if n in times), key=times.__getitem__, default="")


def ratios(row: Row, kind: str, comparisons: Comparisons = COMPARISONS) -> Ratios | None:
    """Compare one case of fp8kit with the peers that do the same; ``None`` if not measured."""
    times = row["us"]
    us, dense = times.get(f"fp8kit_{kind}"), best(times, _DENSE)
    if us is None or not dense:
        return None
    peer = best(times, comparisons[kind])
    of_peer = times[peer] / us if peer else 0.0
    return Ratios(row["shape"], us, times[dense] / us, row["roofline_us"] / us, peer, of_peer)


def split_odd_shapes(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """Split rows into models' layers and odd shapes; odd ones count in means only if alone."""
    models = [row for row in rows if not row["shape"].startswith("odd.")]
    odd = [row for row in rows if row["shape"].startswith("odd.")]
    return (models, odd) if models else (odd, [])


def summarize(
    rows: Sequence[Row], kind: str, comparisons: Comparisons = COMPARISONS
) -> list[Summary]:
    """Return a ``Summary`` per row count for one case of fp8kit."""
    lines = []
    for m in sorted({row["m"] for row in rows}):
        here = [ratios(row, kind, comparisons) for row in rows if row["m"] == m]
        found = [r for r in here if r is not None]
        if not found:
            continue
        peers = [(r.of_peer, r.shape) for r in found if r.peer]
        lines.append(
            Summary(
                m,
                len(found),
                geometric_mean(r.roofline for r in found),
                geometric_mean(r.of_bf16 for r in found),
                min((r.of_bf16, r.shape) for r in found),
                geometric_mean(ratio for ratio, _ in peers) if peers else None,
                min(peers) if peers else None,
            )
        )
    return lines


def compared(
    rows: Sequence[Row], over: str, under: str
) -> dict[int, tuple[float, tuple[float, str], tuple[float, str]]]:
    """Divide the times of one case by those of another.

    Returns:
        By row count, the geometric mean of the ratios over layers, and the least and the largest
        ratio, each with its layer. Layers that lack one of the two cases do not count.
    """
    found = {}
    for m in sorted({row["m"] for row in rows}):
        both = [(r["us"], r["shape"]) for r in rows if r["m"] == m and {over, under} <= {*r["us"]}]
        parts = [(us[over] / us[under], shape) for us, shape in both]
        if parts:
            found[m] = (geometric_mean(part for part, _ in parts), min(parts), max(parts))
    return found


def curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return the part of the roofline over M for fp8kit, the best peer and bf16.

    Only layers that have all three count, so that the curves can be compared.

    Returns:
        By name, points ``(M, geometric mean)``; fast accumulation where all layers have it.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for m in sorted({row["m"] for row in rows}):
        parts: dict[str, list[float]] = {}
        for row in rows:
            ours = ratios(row, "row") if row["m"] == m else None
            if ours is None or not ours.peer:
                continue
            roof, times = row["roofline_us"], row["us"]
            parts.setdefault("fp8kit", []).append(roof / times["fp8kit_row"])
            parts.setdefault("best peer", []).append(roof / times[ours.peer])
            parts.setdefault("bf16", []).append(roof / times["bf16"])
            if "fp8kit_row_fast" in times:
                parts.setdefault("fp8kit, fast", []).append(roof / times["fp8kit_row_fast"])
        layers = len(parts.get("fp8kit", ()))
        for name, values in parts.items():
            if len(values) == layers:
                found.setdefault(name, []).append((m, geometric_mean(values)))
    return found


def unmeasured(rows: Sequence[Row]) -> dict[tuple[str, str], list[str]]:
    """Return the layers and row counts that failed, by case and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, why in row.get("failed", {}).items():
            found.setdefault((name, why), []).append(f"{row['shape']} M={row['m']}")
    return found
