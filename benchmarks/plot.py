"""Draw the part of the roofline that whole layers reach, from the result file.

    python benchmarks/plot.py [--check]

The figure contains a fingerprint of its numbers. ``--check`` compares only the fingerprint, because
versions of matplotlib draw the same numbers in different bytes; so it needs no matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from summary import curves, split_odd_shapes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "linear.json"
PLOT = ROOT / "docs" / "images" / "roofline.svg"
STYLES = {
    "fp8kit": {"color": "#0b6e4f", "linewidth": 2.4, "marker": "o"},
    "fp8kit, fast": {"color": "#0b6e4f", "linewidth": 1.4, "marker": "o", "linestyle": "--"},
    "best peer": {"color": "#c05621", "linewidth": 1.8, "marker": "s"},
    "bf16": {"color": "#6b7280", "linewidth": 1.8, "marker": "^"},
}

Curves = dict[str, list[tuple[int, float]]]


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the figure, or report that the existing one shows other numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    found = curves(split_odd_shapes(json.loads(RESULTS.read_text())["rows"])[0])
    if parser.parse_args(argv).check:
        if not PLOT.is_file() or fingerprint(found) not in PLOT.read_text():
            raise SystemExit(
                f"{PLOT.relative_to(ROOT)} does not show {RESULTS.relative_to(ROOT)}. "
                "Run `python benchmarks/plot.py`."
            )
        return
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    PLOT.write_text(svg(found))


def fingerprint(found: Curves) -> str:
    """Return a digest of the numbers, rounded to what is visible in the figure."""
    points = {name: [(m, round(y, 3)) for m, y in line] for name, line in found.items()}
    digest = hashlib.sha256(json.dumps(points, sort_keys=True).encode())
    return f"fp8kit-{digest.hexdigest()[:16]}"


def figure(found: Curves) -> Figure:
    """Draw the curves over a logarithmic axis of rows."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = drawn.add_subplot()
    for name, style in STYLES.items():
        if name in found:
            axes.plot(*zip(*found[name], strict=True), label=name, markersize=4, **style)
    # labels at powers of two alone: that of 96 would overlap the one of 128
    counts = sorted({m for line in found.values() for m, _ in line if m & (m - 1) == 0})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(m) for m in counts])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.set_xlabel("rows of the input (M)")
    axes.set_ylabel("of the roofline")
    axes.set_title("Whole linear layers: geometric mean over layers", fontsize=10)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    return drawn


def svg(found: Curves) -> str:
    """Return the figure as text that depends only on the numbers and matplotlib's version."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fp8kit"}):
        metadata = {"Date": None, "Description": fingerprint(found)}
        figure(found).savefig(out, format="svg", metadata=metadata)
    # matplotlib ends lines of paths with blanks
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


if __name__ == "__main__":
    main()
