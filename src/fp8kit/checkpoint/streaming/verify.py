"""Compare a quantized checkpoint with what it was made from, tensor by tensor."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8kit.checkpoint.schema.layers import Layer
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.storage import nvfp4
from fp8kit.checkpoint.storage.matrices import Matrix, MatrixFile, stacked_experts
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.conversion.report import table
from fp8kit.errors import CheckpointError
from fp8kit.formats import E4M3FN, MX, TENSOR, GroupShape, QTensor
from fp8kit.functional import dequantize, quantize
from fp8kit.modules.entries import quantize_weight
from fp8kit.quantizers.reference import expand_scale

_WORST = 10
# (first row, one past the last row, rows of the source, rows of the result)
Pairs = Iterator[tuple[int, int, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of the result against its source.

    Args:
        name: of the tensor, in this package's naming.
        kind: ``"fp8"`` for codes, ``"copy"`` for a tensor that stayed in high precision.
        sqnr_db: signal to quantization noise in decibels; infinite if nothing differs.
        relative: norm of the error over norm of the source.
        largest: the largest error of an element.
        exact: quantizing the source again gives the same codes and scales, or the copy is equal.
        problem: what is wrong; empty if nothing is.
    """

    name: str
    kind: str
    sqnr_db: float
    relative: float
    largest: float
    exact: bool
    problem: str = ""


@dataclass(slots=True)
class Verification:
    """How closely a quantized checkpoint matches its source.

    Args:
        compared: one entry per tensor of the result; scales belong to their weights.
        missing: tensors of the source that the result lacks.
        extra: tensors of the result without a counterpart in the source.
    """

    compared: list[Comparison] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """One sentence for everything that is wrong."""
        found = [f"{c.name}: {c.problem}." for c in self.compared if c.problem]
        found += [f"{n}: in the source, not in the result." for n in self.missing]
        return found + [f"{n}: in the result, not in the source." for n in self.extra]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON; infinite figures become ``None``."""
        rows = [asdict(c) for c in self.compared]
        figures = ("sqnr_db", "relative", "largest")
        for row in rows:
            row |= {k: None for k in figures if not math.isfinite(row[k])}
        return {
            "ok": not self.problems,
            "missing": self.missing,
            "extra": self.extra,
            "problems": self.problems,
            "tensors": rows,
        }

    def __str__(self) -> str:
        codes = sorted((c for c in self.compared if c.kind == "fp8"), key=lambda c: c.sqnr_db)
        rows = [("layer", "SQNR dB", "relative", "largest", "requantized")]
        for c in codes[:_WORST]:
            again = "equal" if c.exact else "differs"
            rows.append(
                (c.name, f"{c.sqnr_db:.1f}", f"{c.relative:.4f}", f"{c.largest:.3g}", again)
            )
        exact = sum(c.exact for c in codes)
        lines = [table(rows)]
        if len(codes) > _WORST:
            lines.append(f"({_WORST} worst of {len(codes)})")
        lines.append(
            f"{len(codes)} FP8 layers, {exact} of them equal to a new quantization; "
            f"{len(self.compared) - len(codes)} tensors kept; {len(self.problems)} problems"
        )
        return "\n".join([*lines, *self.problems])


def check_pair(source: Checkpoint, result: Checkpoint) -> None:
    """Raise ``CheckpointError`` unless the source is in high precision and the result is FP8."""
    if source.spec is not None or result.spec is None:
        first, second = ("FP8" if c.spec else "in high precision" for c in (source, result))
        what = f"{source.path} is {first}, and {result.path} is {second}."
        if source.path == result.path:
            what = f"{source.path} was given twice."
        raise CheckpointError(
            what,
            "The first checkpoint is in high precision, the second one is FP8.",
            "Pass the source first, then what was made of it.",
        )


def verify(
    source: Checkpoint,
    result: Checkpoint,
    *,
    workers: int = 1,
    progress: Callable[[int], object] = lambda _: None,
) -> Verification:
    """Compare every tensor of a quantized checkpoint with its source.

    A weight is wrong if an element is farther from the source than rounding to FP8, or to the FP4
    that the file holds, explains: half a unit in the last place, or half a subnormal step. Whether
    the codes are those that this package would write is only reported. ``progress`` is called
    with the bytes of the source that were compared. Raises ``CheckpointError`` if the source is
    FP8, or the result is not.
    """
    check_pair(source, result)
    # exporters may name experts after Transformers' modules, and not after the source's files
    result = max(
        (result, result.for_engines()), key=lambda c: len(c.tensors.keys() & source.tensors.keys())
    )
    found = Verification()
    places = _sources(source, result, found)
    job = _Comparison(source, result, places, progress)
    layers = [x for x in result.layers.values() if x.weight in places]
    coded = {x.weight for x in layers}
    copied = [n for n in places if n not in coded]
    with ThreadPoolExecutor(workers) as pool:
        found.compared += pool.map(job.codes, layers)
        found.compared += pool.map(job.copy, copied)
    found.compared.sort(key=lambda c: c.name)
    return found


class _Comparison:
    """Compares single tensors, each from newly opened files, because threads share no file."""

    def __init__(
        self,
        source: Checkpoint,
        result: Checkpoint,
        places: Mapping[str, Matrix],
        progress: Callable[[int], object],
    ) -> None:
        self._source, self._result, self._places = source, result, places
        self._progress, self._lock = progress, threading.Lock()

    def codes(self, layer: Layer) -> Comparison:
        """Compare FP8 codes and their scales with the weight they stand for."""
        name, group = layer.weight, layer.group
        info, matrix = self._result.tensors[name], self._places[name]
        nv = info.columns if isinstance(info, nvfp4.ConvertedPart) else 0
        stored, halves = Matrix.of(info), info.packed or nv > 0
        if self._shape(name) != info.shape:
            return _differing(name, "fp8", self._shape(name), info.shape)
        scale = self._result.read(layer.scale)
        plain = len(layer.shape) == 2 and layer.codes == E4M3FN.dtype and not layer.transposed
        plain = plain and not halves
        pairs = self._pairs(matrix, stored, max(1, group.rows)) if plain else self._whole(layer)
        signal = noise = largest = 0.0
        outside, exact = 0, True
        for first, last, dense, codes in pairs:
            rows = slice(first // group.rows, -(-last // group.rows))
            q = QTensor(codes, scale if group == TENSOR or not plain else scale[rows], group)
            error = (dequantize(q) - dense.float()).abs()
            signal += float(dense.float().square().sum(dtype=torch.float64))
            noise += float(error.square().sum(dtype=torch.float64))
            largest = max(largest, float(error.max()))
            bound = _nvfp4_bound(dense, q, nv) if nv else _bound(dense, q, halves)
            outside += int((~(error <= bound)).sum())
            if group != TENSOR:
                again = _quantized(dense, layer)
                same = torch.equal(again.scale, q.scale) and _bits_equal(again.data, q.data)
                exact = exact and same
            self._count(dense)
        if group == TENSOR:
            exact = plain and self._same_tensor(layer, matrix, stored, scale)
        problem = f"{outside} elements are farther from the source than rounding explains"
        return Comparison(
            name,
            "fp8",
            10 * math.log10(signal / noise) if noise and signal else math.inf,
            math.sqrt(noise / signal) if signal else math.inf if noise else 0.0,
            largest,
            exact,
            problem if outside else "",
        )

    def copy(self, name: str) -> Comparison:
        """Compare a tensor that stayed in high precision, perhaps in another dtype."""
        info, matrix = self._result.tensors[name], self._places[name]
        if info.shape != self._shape(name):
            return _differing(name, "copy", self._shape(name), info.shape)
        stored = Matrix.of(info)
        same, largest = True, 0.0
        for _, _, dense, kept in self._pairs(matrix, stored, 1):
            if not _bits_equal(dense.to(kept.dtype), kept):
                same = False
                difference = (dense.to(torch.float64) - kept.to(torch.float64)).abs()
                largest = max(largest, float(difference.nan_to_num(math.inf).max()))
            self._count(dense)
        problem = "" if same else "it was to stay as it is, and differs"
        return Comparison(name, "copy", math.inf, 0.0, largest, same, problem)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a tensor has in the source."""
        if name in self._source.tensors:
            return self._source.tensors[name].shape
        return self._places[name].rows, self._places[name].cols

    def _whole(self, layer: Layer) -> Pairs:
        """Read a stack, or codes that have to be decoded first, in one piece."""
        dense = self._source.read(layer.weight)
        dense = dense.transpose(-1, -2) if layer.transposed else dense
        yield 0, layer.shape[-2], dense, self._result.read(layer.weight)

    def _pairs(self, matrix: Matrix, stored: Matrix, rows: int) -> Pairs:
        ours, theirs = MatrixFile(self._source.path), MatrixFile(self._result.path)
        with closing(ours), closing(theirs):
            for first, last in matrix.slices(rows):
                yield first, last, ours.rows(matrix, first, last), theirs.rows(stored, first, last)

    def _same_tensor(self, layer: Layer, matrix: Matrix, stored: Matrix, scale: Tensor) -> bool:
        """Return whether quantizing with one scale for the whole weight gives the same result."""
        peaks = [float(d.abs().amax()) for _, _, d, _ in self._pairs(matrix, stored, 1)]
        whole = quantize_weight(torch.tensor(peaks).amax().reshape(1, 1), layer.scheme)
        if not torch.equal(whole.scale, scale):
            return False
        return all(
            _bits_equal(quantize(d, TENSOR, dtype=c.dtype, scale=scale).data, c)
            for _, _, d, c in self._pairs(matrix, stored, 1)
        )

    def _count(self, dense: Tensor) -> None:
        with self._lock:
            self._progress(dense.nbytes)


def _sources(source: Checkpoint, result: Checkpoint, found: Verification) -> dict[str, Matrix]:
    """Find where each tensor of the result comes from, and note what has no counterpart."""
    places = {n: Matrix.of(i) for n, i in source.tensors.items() if n in result.tensors}
    used = set(places)
    stacks, _ = stacked_experts(source.tensors, str(source.config.get("model_type")))
    for experts, split in stacks.items():
        there = {named(n, "weight"): m for n, m in split.items()}
        if there.keys() <= result.tensors.keys():
            places |= there
            used |= {n for n in source.tensors if n.startswith(f"{experts}.") and n not in places}
    tied = source.config.get("tie_word_embeddings") is True
    found.extra = sorted(n for n in result.tensors if n not in places and not result.is_scale(n))
    found.missing = sorted(
        n for n in source.tensors if n not in used and not (tied and n.endswith("lm_head.weight"))
    )
    return places


def _bound(dense: Tensor, q: QTensor, halves: bool) -> Tensor:
    """Return the largest error of rounding to nearest, to FP4 if codes are ``halves`` of a byte."""
    facts = torch.finfo(q.data.dtype)
    eps, normal = (0.5, 1.0) if halves else (facts.eps, facts.smallest_normal)
    # MX by the floor rule clamps values above the largest code: by an eighth at most, and in FP4 by
    # a quarter, which is no more than rounding
    relative = eps if q.group == MX and not halves else eps / 2
    step = expand_scale(q.scale, tuple(q.shape), q.group) * (normal * eps / 2)
    size = dense.float().abs()
    # llm-compressor rounds quotients to bf16 before it rounds them to FP8
    return torch.maximum(size * relative, step) + size * 2.0**-8


def _nvfp4_bound(dense: Tensor, q: QTensor, columns: int) -> Tensor:
    """Return the largest error of FP4 by ``columns``, with rounded scales, plus that of FP8."""
    peaks = dense.float().abs().view(len(dense), -1, columns).amax(-1) / 6
    steps = QTensor(q.data, peaks.repeat_interleave(columns // 16, -1), GroupShape(1, 16))
    return 1.25 * (_bound(dense, q, False) + _bound(dense, steps, True))


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _quantized(dense: Tensor, layer: Layer) -> QTensor:
    if layer.group == layer.scheme.weight:
        return quantize_weight(dense, layer.scheme)
    return quantize(dense, layer.group, dtype=layer.scheme.dtype, role="weight")


def _differing(
    name: str, kind: str, source: tuple[int, ...], result: tuple[int, ...]
) -> Comparison:
    problem = f"its shape is {list(result)}, and {list(source)} in the source"
    return Comparison(name, kind, -math.inf, math.inf, math.inf, False, problem)
