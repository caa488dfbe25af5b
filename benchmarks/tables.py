"""Write the benchmark tables of the README from the result files, or check that they are current.

python benchmarks/tables.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"


def main() -> None:
    """Replace what stands between the two marks in the README."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = f"{head}{BEGIN}\n{tables()}{END}{tail}"
    if "--check" in sys.argv:
        if wanted != text:
            raise SystemExit("README.md is not what `python benchmarks/tables.py` writes. Run it.")
    else:
        README.write_text(wanted)


def tables() -> str:
    """Render every result file that is there."""
    parts = []
    for name, render in (
        ("linear", linear),
        ("quantizers", quantizers),
        ("decoder_layer", layer),
        ("compiled", compiled_layer),
        ("host", host),
    ):
        file = RESULTS / f"{name}.json"
        if file.is_file():
            found = json.loads(file.read_text())
            where = f"{found['device']}, torch {found['torch']}, Triton {found['triton']}"
            parts.append(
                f"{render(found)}\nMeasured on one {where} (`benchmarks/results/{file.name}`).\n"
            )
    file = RESULTS / "streaming.json"
    if file.is_file():
        parts.append(streaming(json.loads(file.read_text())))
    return "\n" + "\n".join(parts) + "\n"


def linear(found: dict[str, Any]) -> str:
    """Whole linear layers: microseconds, and ratios to bf16 and to the best peer."""
    lines = [
        "### A whole linear layer",
        "",
        "bf16 in, bf16 out, per-token activations by per-row weights, precise accumulation; the "
        "peers as they ship. Microseconds; cold weights, CUDA graph.",
        "",
        "| layer | M | bf16 | best peer | fp8kit | × bf16 | × best peer | of the roofline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if not row["shape"].startswith("8b") or row["m"] == 1024:
            continue
        times = row["us"]
        ours, dense = times["fp8kit_row"], times["bf16"]
        peers = {n: t for n, t in times.items() if not n.startswith(("fp8kit", "bf16"))}
        best = min(peers, key=peers.__getitem__) if peers else ""
        peer = f"{peers[best]:.1f} ({best})" if peers else "–"
        ratio = f"{peers[best] / ours:.2f}" if peers else "–"
        lines.append(
            f"| {row['shape']} {row['n']}×{row['k']} | {row['m']} | {dense:.1f} | {peer}"
            f" | {ours:.1f} | {dense / ours:.2f} | {ratio} | {row['roofline_us'] / ours:.0%} |"
        )
    lines += ["", *means(found["rows"])]
    return "\n".join(lines) + "\n"


def means(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric means over all measured layers, per M."""
    layers = len({row["shape"] for row in rows})
    lines = [
        f"Geometric means over all {layers} measured layers (Llama 8B and 70B, DeepSeek, DiT):",
        "",
        "| M | × bf16 | × best peer | of the roofline |",
        "|---|---|---|---|",
    ]
    for m in sorted({row["m"] for row in rows}):
        dense, peers, roof = [], [], []
        for row in rows:
            if row["m"] == m:
                times = row["us"]
                ours = times["fp8kit_row"]
                dense.append(times["bf16"] / ours)
                roof.append(row["roofline_us"] / ours)
                others = [t for n, t in times.items() if not n.startswith(("fp8kit", "bf16"))]
                peers += [min(others) / ours] if others else []
        ratio = f"{geometric_mean(peers):.2f}" if peers else "–"
        lines.append(
            f"| {m} | {geometric_mean(dense):.2f} | {ratio} | {geometric_mean(roof):.0%} |"
        )
    return lines


def quantizers(found: dict[str, Any]) -> str:
    """Quantizers: bandwidth, counting bytes read and codes written."""
    lines = [
        "### Quantizing activations",
        "",
        "TB/s counting 2 bytes read and 1 written per element; microseconds for few rows.",
        "",
        "| granularity | M | K | µs | TB/s | × vLLM |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if row["m"] not in (1, 4096) or row["k"] not in (4096, 14336):
            continue
        peer = f"{row['vllm_us'] / row['us']:.2f}" if row.get("vllm_us") else "–"
        lines.append(
            f"| {row['kernel']} | {row['m']} | {row['k']} | {row['us']:.2f} | {row['tbps']:.2f}"
            f" | {peer} |"
        )
    return "\n".join(lines) + "\n"


def compiled_layer(found: dict[str, Any]) -> str:
    """The same layer under ``torch.compile``."""
    return layer(found, "### The same under torch.compile")


def layer(found: dict[str, Any], title: str = "### A Llama-8B decoder layer") -> str:
    """A decoder layer: microseconds of each variant."""
    names = list(found["rows"][0]["us"])
    lines = [
        title,
        "",
        "Transformers' own code, random weights, CUDA graph; microseconds and speed-up over bf16.",
        "",
        f"| M | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for row in found["rows"]:
        times = row["us"]
        cells = [f"{t:.0f} ({times['bf16'] / t:.2f}×)" for t in times.values()]
        lines.append(f"| {row['m']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def host(found: dict[str, Any]) -> str:
    """An eager call: what it costs the host, and how that compares with the dense layer."""
    names = [n for n in found["rows"][0]["us"] if not n.endswith("operator") and n != "nn.Linear"]
    lines = [
        "### The host's time of an eager call",
        "",
        "Microseconds until the CPU may go on, and ratio to `F.linear`; FP8 as modules.",
        "",
        f"| M | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for row in found["rows"]:
        times = row["us"]
        cells = [f"{times[n]:.1f} ({times[n] / times['F.linear']:.2f}×)" for n in names]
        lines.append(f"| {row['m']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def streaming(found: dict[str, Any]) -> str:
    """Streamed conversions of the largest checkpoint against copies of the same bytes."""
    lines = [
        "### Quantizing a checkpoint on a CPU",
        "",
        "GB/s of bf16 read; against copying the same files with safetensors (without a sync, and "
        "synced to disk as the conversion is) in the same run.",
        "",
        "| checkpoint | scheme | GB/s | × copy | × synced copy | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    largest = max(row["gigabytes"] for row in found["rows"])
    for row in found["rows"]:
        if not row["case"].startswith("copy") and row["gigabytes"] == largest:
            lines.append(
                f"| {row['gigabytes']:.1f} GB | {row['case']} | {row['gb_per_s']:.2f}"
                f" | {row['of_copy']:.2f} | {row['of_copy_synced']:.2f}"
                f" | {row['peak_gb']:.2f} GB |"
            )
    where = f"{found['device']}, torch {found['torch']}"
    lines += ["", f"Measured on {where} (`benchmarks/results/streaming.json`)."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
