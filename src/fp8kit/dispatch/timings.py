"""Measured times of linear layers per device: the shipped table, and what ``fp8kit tune`` adds.

A time is that of a whole linear layer with 16-bit input and output and with weights that are not in
a cache, for each backend and for a dense bf16 layer. A table applies only to the layers in it. Its
row counts are up to a factor of four apart; a row count in between uses the times of one within a
factor of two. For any other layer dispatch follows the order of its backends, which on an H200 is
within half a per cent of the best choice on average.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from fp8kit.errors import InvalidValue
from fp8kit.runtime import settings
from fp8kit.runtime.atomic_files import write_whole

SCHEMA = 1
DENSE = "bf16"
REJECTED = math.inf  # the time of a candidate whose result was wrong
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")  # from CUDA 13 on, and before
_KERNEL_FOLDERS, _KERNEL_SUFFIXES = (
    ("runtime", "quantizers", "matmul", "fused"),
    (".py", ".cu", ".cuh"),
)
_COLUMNS = ("scales", "accum", "m", "n", "k", "us")


@dataclass(frozen=True, slots=True)
class Case:
    """A linear layer at one row count: the key of a table's row.

    ``scales`` are the granularities of activation and weight, e.g. ``"row*row"``, and ``accum`` is
    ``"precise"`` or ``"fast"``; ``m`` counts rows of the input, ``n`` output and ``k`` input
    features.
    """

    scales: str
    accum: str
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The times of one layer in a table.

    ``m`` is the row count at which the layer was measured. ``us`` maps candidates (``"backend"`` or
    ``"backend:configuration"``, and ``"bf16"`` for the dense layer) to microseconds, or to
    ``REJECTED`` for a candidate that may not run.
    """

    m: int
    us: Mapping[str, float]


@dataclass(slots=True)
class Table:
    """Measured times of one device.

    ``bandwidth`` is what the GPU's memory delivers in bytes per second, ``flops`` the FP8
    operations per second that the GPU sustains. ``rows`` has microseconds, or ``REJECTED``, by
    layer and candidate. ``facts`` tell where and when: versions, driver, commit.
    """

    device: str
    bandwidth: float
    flops: float
    rows: dict[Case, dict[str, float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def roofline(self, case: Case, candidate: str = "") -> float:
        """Return the least microseconds that a layer's bytes and operations allow.

        A dense layer, ``"bf16"``, reads twice the weight bytes and computes at half the rate; any
        other candidate is FP8.
        """
        wide = 2 if candidate == DENSE else 1
        m, n, k = case.m, case.n, case.k
        moved = wide * n * k + 2 * m * k + 2 * m * n
        return max(moved / self.bandwidth, wide * 2 * m * n * k / self.flops) * 1e6

    def find(self, case: Case) -> Measured | None:
        """Return the times of a layer, measured at its row count or within an octave of it."""
        for m in (case.m, 2 * case.m, case.m // 2):
            us = self.rows.get(replace(case, m=m))
            if us is not None:
                return Measured(m, us)
        return None

    def merge(self, other: Table) -> None:
        """Take over the rows of a newer table of the same device."""
        for case, times in other.rows.items():
            self.rows[case] = {**self.rows.get(case, {}), **times}
        self.facts = {**self.facts, **other.facts}

    def to_json(self) -> str:
        """Return the table as JSON, with one row per line."""
        head = {"schema": SCHEMA, "device": self.device, **self.facts}
        head |= {"bandwidth": self.bandwidth, "flops": self.flops, "columns": list(_COLUMNS)}
        order = sorted(self.rows, key=lambda c: (c.scales, c.accum, c.n, c.k, c.m))
        lines = []
        for c in order:
            times = {
                name: None if us == REJECTED else round(us, 2)
                for name, us in sorted(self.rows[c].items())
            }
            lines.append(json.dumps([c.scales, c.accum, c.m, c.n, c.k, times]))
        text = json.dumps(head, indent=1)[:-2]
        return f'{text},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"

    @staticmethod
    def from_json(text: str) -> Table:
        """Read what ``to_json`` wrote; raise ``ValueError`` for any other text or schema."""
        try:
            data = json.loads(text)
            schema, columns = data.pop("schema"), data.pop("columns")
            if schema != SCHEMA or tuple(columns) != _COLUMNS:
                raise ValueError(f"schema {schema!r}, columns {columns!r}")
            table = Table(
                data.pop("device"), float(data.pop("bandwidth")), float(data.pop("flops"))
            )
            for scales, accum, m, n, k, us in data.pop("rows"):
                case = Case(str(scales), str(accum), int(m), int(n), int(k))
                times = {str(name): None if t is None else float(t) for name, t in us.items()}
                right = all(t is None or 0 < t < math.inf for t in times.values())
                if min(m, n, k) < 1 or not right or times.get(DENSE, 1.0) is None:
                    raise ValueError(f"row {case} {times}")
                table.rows[case] = {name: REJECTED if t is None else t for name, t in times.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidValue(
                f"Not a table of measured times: {error!r}.",
                f"Schema {SCHEMA} has the columns {', '.join(_COLUMNS)}.",
                "Write a new one with fp8kit tune.",
            ) from error
        table.facts = data
        return table

    def write(self, path: Path) -> None:
        """Write the table; it appears whole or not at all."""
        write_whole(path, self.to_json().encode())


@functools.cache
def table_for(device: str) -> Table | None:
    """Return the table of a device: the shipped one, overridden by what ``tune`` measured."""
    if not device:
        return None
    shipped = resources.files("fp8kit").joinpath("dispatch", "tables", f"{_slug(device)}.json")
    table = Table.from_json(shipped.read_text()) if shipped.is_file() else None
    tuned = _read_tuned(device) if (settings.CACHE_DIR / "tables").is_dir() else None
    if table is None or tuned is None:
        return table or tuned
    table.merge(tuned)
    return table


def tuned_path(device: str) -> Path:
    """Return the file for the tuned times of a device, named by a hash of ``fingerprint()``."""
    key = "\0".join((str(SCHEMA), device, *fingerprint().values()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return settings.CACHE_DIR / "tables" / f"{_slug(device)}-{digest}.json"


@functools.cache
def fingerprint() -> dict[str, str]:
    """Return what a time depends on besides device and layer: driver, versions, kernels."""
    return {
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "deep_gemm": version("deep_gemm", "vllm"),  # vLLM brings a copy
        "cuda_bindings": version("cuda-bindings"),
        "nvrtc": version(*_NVRTC),
        "kernels": kernel_digest(resources.files("fp8kit")),
    }


def kernel_digest(package: Traversable) -> str:
    """Return a digest of every kernel source of the package, in kernel folders at any depth."""
    digest = hashlib.sha256()
    pending = [(name, package.joinpath(name)) for name in reversed(_KERNEL_FOLDERS)]
    while pending:
        path, entry = pending.pop()
        if entry.is_dir():
            children = sorted(entry.iterdir(), key=lambda child: child.name, reverse=True)
            pending += [(f"{path}/{child.name}", child) for child in children]
        elif path.endswith(_KERNEL_SUFFIXES):
            digest.update(path.encode() + b"\0" + entry.read_bytes())
    return digest.hexdigest()[:16]


def _read_tuned(device: str) -> Table | None:
    path = tuned_path(device)
    try:
        return Table.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is not used: {error}", stacklevel=2)
        return None


def _slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return f"CUDA {torch.version.cuda}"
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else text.strip()


def version(*packages: str) -> str:
    """Return the version of the first of these distributions that is installed."""
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "none"
