"""Write the benchmark tables of the documents from the result files, or check them.

    python benchmarks/tables.py [--check]

The README gets a few row counts between two marks, `docs/benchmarks.md` all tables. Each result
file has one function here that renders it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from layers import MODELS
from summary import (
    COMPARISONS,
    EXPERT_COMPARISONS,
    MX_COMPARISONS,
    Comparisons,
    Row,
    Summary,
    compared,
    ratios,
    split_odd_shapes,
    summarize,
    unmeasured,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
SHOWN = (1, 16, 64, 256, 1024, 4096)  # row counts in the README
INTRODUCTION = """# Benchmarks

Written by `python benchmarks/tables.py` from `benchmarks/results/`. Times are medians of CUDA
graphs. Calls rotate over copies of the weight, so that none is in the L2 cache, and all candidates
of a line take turns in one run. Sums are precise unless a heading says otherwise; peers run as
they ship. The roofline is the longer of two times: moving the bytes at 4.3 TB/s, or computing at
1400 TFLOPS. What was tried is in [performance.md](performance.md).

`make bench` measures on a GPU machine and `make tables` writes this page; the heads of
`benchmarks/peers.py` and `benchmarks/expert_peers.py` say how to bring the peers.
"""
LIBRARIES = {
    "vllm": "vLLM",
    "deepgemm": "DeepGEMM",
    "deep_gemm": "DeepGEMM (SGLang's)",
    "flashinfer": "FlashInfer",
    "torch": "torch",
    "torchao": "torchao",
}
DECODER_LAYER = (
    "A Llama-8B decoder layer, Transformers' own code, random weights; microseconds and speed-up "
    "over bf16."
)
EAGER_LAYER = (
    "`separate`: FP8 layers alone. `shared`: siblings share their input. `fused`: norms and "
    "activations write FP8 too."
)
KINDS = {
    "row": "Per-token activations by per-row weights (`FP8_DYNAMIC`)",
    "row_fast": 'The same with `accum="fast"`',
    "tensor": "Per-token activations by one weight scale (`FP8_TENSOR`)",
    "block": "1x128 groups by 128x128 blocks (`FP8_BLOCK`), against peers with block scales",
    "weight_only": "16-bit activations by per-row weights (`FP8_WEIGHT_ONLY`)",
    "static": "One scale each, calibrated for the input (`FP8`), against peers with the same",
    "quantized": "The GEMM alone, per-token by per-row codes, against peers' GEMMs",
}

FIRST = ("forward", "eager")  # ways whose first call is the first call of the model
EXPERT_KINDS = {
    "row": "Per-token activations by per-row weights",
    "block": "1x128 groups by 128x128 blocks",
    "static": "Static scales per tensor",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write both documents, or report which of them are not current."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    readme = README.read_text()
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    for path, wanted in ((README, between_marks(readme, compact(found))), (DOCUMENT, full(found))):
        if not check:
            path.write_text(wanted)
        elif not path.is_file() or path.read_text() != wanted:
            name = path.relative_to(ROOT)
            raise SystemExit(f"{name} is not what `python benchmarks/tables.py` writes. Run it.")


def between_marks(text: str, tables: str) -> str:
    """Replace the text between the two marks."""
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{tables}\n{END}{rest.split(END)[1]}"


def compact(found: dict[str, Any]) -> str:
    """Render the README's tables: some row counts, layers of experts, and a decoder layer."""
    parts, sources = [], dict[str, list[str]]()
    for name, render in COMPACT.items():
        if name in found:
            parts.append(render(found[name]))
            sources.setdefault(conditions(found[name]), []).append(f"`{name}.json`")
    said = (f"{', '.join(files)} on {where}" for where, files in sources.items())
    return "\n".join([*parts, f"Measured in `benchmarks/results`: {'; '.join(said)}.\n"])


def full(found: dict[str, Any]) -> str:
    """Render the tables of all result files."""
    parts = [INTRODUCTION]
    for name, (title, render) in SECTIONS.items():
        if name in found:
            parts.append(f"## {title}\n\n{render(found[name])}{source(name, found[name])}")
    return "\n".join(parts)


def conditions(found: dict[str, Any]) -> str:
    """Return a phrase with the device and versions of a measurement."""
    where = f"{found['device']}, torch {found['torch']}"
    if "triton" in found:
        where = f"one {where}, Triton {found['triton']}"
    if "conditions" in found:
        where += f", {found['conditions']}"
    return where


def source(name: str, found: dict[str, Any]) -> str:
    """Return a sentence that names the result file, device and versions."""
    return f"\nMeasured on {conditions(found)} (`benchmarks/results/{name}.json`).\n"


def table(columns: list[str], lines: list[list[str]]) -> str:
    """Render a Markdown table."""
    head, *body = [f"| {' | '.join(cells)} |\n" for cells in (columns, *lines)]
    return f"{head}{'|---' * len(columns)}|\n{''.join(body)}"


def models(rows: Sequence[Row]) -> str:
    """Return the models whose layers were measured, and the number of layers per row count."""
    prefixes = {row["shape"].split(".")[0] for row in rows}
    names = ", ".join(text for prefix, text in MODELS.items() if prefix in prefixes)
    counts = Counter(row["m"] for row in rows).values()
    least, most = min(counts), max(counts)
    return f"{most if least == most else f'{least} to {most}'} layers ({names})"


def libraries(rows: Sequence[Row]) -> str:
    """Return the names of the peers' libraries that were measured."""
    prefixes = {name.split("_")[0] for row in rows for name in row["us"]}
    return ", ".join(text for prefix, text in LIBRARIES.items() if prefix in prefixes)


def overview(every: list[Row]) -> str:
    """Some row counts: row-wise and block-wise against their peers, and bf16."""
    rows, _ = split_odd_shapes(every)
    row, block = ({line.m: line for line in summarize(rows, kind)} for kind in ("row", "block"))
    others = f"the best peer ({libraries(rows)})" if libraries(rows) else "the best peer"
    title = (
        f"Whole linear layers, bf16 in and out, {models(rows)}. Each ratio is the time of {others} "
        "or of bf16 divided by fp8kit's: above 1 fp8kit is faster. Geometric mean over the layers, "
        "and the worst layer in brackets. M: rows of the input. fp8kit's sums are precise; "
        "peers run as they ship.\n\n"
    )
    columns = ["M", "row-wise: best peer / fp8kit", "bf16 / fp8kit", "of the roofline"]
    columns += ["block-wise: best block peer / fp8kit", "bf16 / fp8kit"]
    lines = []
    for m, line in row.items():
        if m in SHOWN:
            cells = [str(m), peer_cell(line), dense_cell(line), f"{line.roofline:.0%}"]
            lines.append([*cells, peer_cell(block.get(m)), dense_cell(block.get(m))])
    return title + table(columns, lines)


def peer_cell(line: Summary | None) -> str:
    """Return mean and worst ratio to the best peer."""
    if line is None or line.of_peer is None or line.worst_of_peer is None:
        return "–"
    return f"{line.of_peer:.2f} ({line.worst_of_peer[0]:.2f})"


def dense_cell(line: Summary | None) -> str:
    """Return mean and worst ratio to bf16."""
    return "–" if line is None else f"{line.of_bf16:.2f} ({line.worst_of_bf16[0]:.2f})"


def experts_overview(found: dict[str, Any]) -> str:
    """Layers of experts under uniform routing: row-wise and block-wise against vLLM, and bf16."""
    rows = [row for row in found["rows"] if row["routing"] == "uniform"]
    row, block = (
        {line.m: line for line in summarize(rows, kind, EXPERT_COMPARISONS)}
        for kind in ("row", "block")
    )
    columns = ["tokens", "row-wise: best peer / fp8kit", "bf16 / fp8kit", "of the roofline"]
    columns += ["block-wise: best peer / fp8kit", "bf16 / fp8kit"]
    lines = []
    for m in [m for m in SHOWN if m in row]:
        line = row[m]
        cells = [str(m), peer_cell(line), dense_cell(line), f"{line.roofline:.0%}"]
        lines.append([*cells, peer_cell(block.get(m)), dense_cell(block.get(m))])
    names = ", ".join(dict.fromkeys(row["shape"] for row in rows))
    beside = any("flashinfer_cutlass" in row["us"] for row in rows)
    flashinfer = (
        " A peer here too is FlashInfer, whose layer has static scales and promotes no sums."
        if beside
        else ""
    )
    text = (
        f"Whole layers of experts, bf16 in and out, ids and weights given ({names}), compared as "
        f"above; of Transformers' bf16 layers the faster.{flashinfer}\n\n"
    )
    return text + table(columns, lines)


def experts(found: dict[str, Any]) -> str:
    """Layers of experts: means over models for each case and routing, then every model."""
    parts = [
        "bf16 in and out, ids and weights of the router given, no shared experts. The roofline "
        "reads the FP8 weights of the experts that have a token, or computes; behind the slash, "
        "quantizing the input and adding the results of each token count, too. Skewed: expert `e` "
        "is chosen in proportion to 1 / (e + 1). bf16 is the faster of Transformers' `batched_mm` "
        f"and `grouped_mm`. {present(found)}".rstrip()
    ]
    routings = dict.fromkeys(row["routing"] for row in found["rows"])
    for kind in EXPERT_COMPARISONS:
        for routing in routings:
            rows = [row for row in found["rows"] if row["routing"] == routing]
            lines = summarize(rows, kind, EXPERT_COMPARISONS)
            if lines:
                title = f"### {EXPERT_KINDS[kind]}, {routing} routing"
                parts.append(f"{title}\n\n{summary_table(lines)}".rstrip())
    parts += ["### Every layer of experts", every_expert_layer(found["rows"]).rstrip()]
    missing = unmeasured(found["rows"])
    if missing:
        parts += ["### What did not run", failures(missing).rstrip()]
    return "\n\n".join(parts) + "\n"


def every_expert_layer(rows: list[Row]) -> str:
    """Microseconds of every layer of experts, routing and token count."""
    kinds = [k for k in EXPERT_COMPARISONS if any(f"fp8kit_{k}" in row["us"] for row in rows)]
    columns = ["tokens", "routing", "experts", "roofline", "bf16"]
    for kind in kinds:
        columns += [kind, "of the roofline", "best peer"]
    parts = ["Microseconds.\n"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        lines = []
        mine = [row for row in rows if row["shape"] == shape]
        for row in mine:
            times, roofline = row["us"], row["roofline_us"]
            dense = [us for name, us in times.items() if name.startswith("bf16")]
            lines.append([str(row["m"]), row["routing"], f"{row['touched']:.1f}"])
            lines[-1] += [f"{roofline:.1f} / {row['roofline_with_passes_us']:.1f}"]
            lines[-1] += [micro(min(dense, default=None))]
            for kind in kinds:
                us = times.get(f"fp8kit_{kind}")
                lines[-1] += [micro(us), "–" if us is None else f"{roofline / us:.0%}"]
                lines[-1] += [named_peer(row, kind, EXPERT_COMPARISONS)]
        sizes = f"{mine[0]['experts']} experts, top {mine[0]['top_k']}, H {mine[0]['hidden']}"
        title = f"**{shape}**, {sizes}, I {mine[0]['intermediate']}"
        parts.append(f"{title}\n\n{table(columns, lines)}")
    return "\n".join(parts)


def linear(found: dict[str, Any]) -> str:
    """Whole linear layers: per row count for each case, then every layer."""
    rows, odd = split_odd_shapes(found["rows"])
    parts = [
        f"bf16 in and out, {models(rows)}. Ratios are the other's time divided by fp8kit's, "
        "geometric mean and worst layer: above 1 fp8kit is faster. Unless a heading says "
        f"otherwise, the best peer is the fastest, whatever its scales. {present(found)}".rstrip(),
    ]
    for kind, title in KINDS.items():
        lines = summarize(rows, kind)
        if lines:
            parts.append(f"### {title}\n\n{summary_table(lines)}".rstrip())
    for kind in ("row", "block") if odd else ():
        title = f"### Odd shapes, {KINDS[kind][:1].lower()}{KINDS[kind][1:]}"
        parts.append(f"{title}\n\n{summary_table(summarize(odd, kind))}".rstrip())
    parts += ["### Every layer", every_layer(found["rows"]).rstrip()]
    missing = unmeasured(found["rows"])
    if missing:
        parts += ["### What did not run", failures(missing).rstrip()]
    return "\n\n".join(parts) + "\n"


def present(found: dict[str, Any]) -> str:
    """Return the versions of the peers, if the result file has them."""
    names = {name: found.get("peers", {}).get(name) for name in LIBRARIES}
    known = [f"{LIBRARIES[name]} ({version})" for name, version in names.items() if version]
    return f"Peers: {', '.join(known)}." if known else ""


def summary_table(lines: list[Summary]) -> str:
    """One case: geometric means over layers and the worst of them."""
    with_peers = any(line.of_peer is not None for line in lines)
    columns = ["M", "layers", "of the roofline", "bf16 / fp8kit", "worst"]
    columns += ["best peer / fp8kit", "worst"] if with_peers else []
    cells = []
    for line in lines:
        ratio, shape = line.worst_of_bf16
        cells.append([str(line.m), str(line.layers), f"{line.roofline:.0%}", f"{line.of_bf16:.2f}"])
        cells[-1] += [f"{ratio:.2f} ({shape})"]
        if with_peers and line.of_peer is not None and line.worst_of_peer is not None:
            ratio, shape = line.worst_of_peer
            cells[-1] += [f"{line.of_peer:.2f}", f"{ratio:.2f} ({shape})"]
        elif with_peers:
            cells[-1] += ["–", "–"]
    return table(columns, cells)


def every_layer(rows: list[Row]) -> str:
    """Microseconds of every layer and row count, with the fastest peers by name."""
    kinds = [k for k in COMPARISONS if any(f"fp8kit_{k}" in row["us"] for row in rows)]
    columns = ["M", "roofline", "bf16", *(k.replace("_", " ") for k in kinds)]
    columns += ["best peer", "best block peer"]
    parts = ["Microseconds.\n"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        cells = []
        for row in mine:
            times = row["us"]
            cells.append([str(row["m"]), f"{row['roofline_us']:.1f}", micro(times.get("bf16"))])
            cells[-1] += [micro(times.get(f"fp8kit_{kind}")) for kind in kinds]
            cells[-1] += [named_peer(row, "row"), named_peer(row, "block")]
        parts.append(f"**{shape}**, {mine[0]['n']}×{mine[0]['k']}\n\n{table(columns, cells)}")
    return "\n".join(parts)


def micro(us: float | None) -> str:
    """Write microseconds, or a dash where nothing was measured."""
    return "–" if us is None else f"{us:.1f}"


def named_peer(row: Row, kind: str, comparisons: Comparisons = COMPARISONS) -> str:
    """Write time and name of the fastest peer of a case."""
    found = ratios(row, kind, comparisons)
    if found is None or not found.peer:
        return "–"
    return f"{row['us'][found.peer]:.1f} ({found.peer})"


def failures(missing: dict[tuple[str, str], list[str]]) -> str:
    """Return which cases could not be timed, where, and why."""
    lines = []
    for (name, why), places in missing.items():
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        lines.append([f"`{name}`", shown, why.replace("|", "\\|")])
    return table(["case", "where", "why"], lines)


def quantizers(found: dict[str, Any]) -> str:
    """Quantizers: bandwidth, counting bytes read and codes written."""
    lines = []
    for row in found["rows"]:
        if row["m"] not in (1, 4096) or row["k"] not in (4096, 14336):
            continue
        lines.append([row["kernel"], str(row["m"]), str(row["k"])])
        lines[-1] += [f"{row['us']:.2f}", f"{row['tbps']:.2f}"]
        lines[-1] += [f"{row['vllm_us'] / row['us']:.2f}" if row.get("vllm_us") else "–"]
    text = "TB/s counting 2 bytes read and 1 written per element; microseconds for few rows.\n\n"
    return text + table(["granularity", "M", "K", "µs", "TB/s", "× vLLM"], lines)


def fused(found: dict[str, Any]) -> str:
    """Norms and activations that write FP8, against the same in two steps and without FP8."""
    lines = []
    for row in found["rows"]:
        if row["m"] in (16, 4096):
            lines.append([row["case"], str(row["m"]), row["group"], f"{row['us']:.2f}"])
            lines[-1] += [f"{row['tb_per_s']:.2f}", f"{row['unfused_us'] / row['us']:.2f}"]
            lines[-1] += [f"{row['alone_us'] / row['us']:.2f}"]
    text = (
        "`unfused`: torch's function and then a quantizer. `alone`: torch's function without one."
        "\n\n"
    )
    columns = [
        "function and K",
        "M",
        "granularity",
        "µs",
        "TB/s",
        "unfused / fp8kit",
        "alone / fp8kit",
    ]
    return text + table(columns, lines)


def mx_speed(found: dict[str, Any]) -> str:
    """Layers of an MXFP8 weight against the default scheme and bf16."""
    columns, lines = ["M"], {}
    for name, (over, under) in MX_COMPARISONS.items():
        by_rows = compared(found["rows"], over, under)
        columns += [name, "least", "largest"] if by_rows else []
        for m, (mean, least, most) in by_rows.items():
            cells = lines.setdefault(m, [str(m)])
            cells += [f"{mean:.3f}", *(f"{part:.3f} ({shape})" for part, shape in (least, most))]
    text = (
        f"Layers as modules, {models(found['rows'])}. Times divided as the columns say, geometric "
        "mean, least and largest layer.\n\n"
    )
    return text + table(columns, [*lines.values()])


def layer(found: dict[str, Any]) -> str:
    """A decoder layer: microseconds of each variant, and speed-up over bf16."""
    lines = []
    for row in found["rows"]:
        times = row["us"]
        lines.append([str(row["m"])])
        lines[-1] += [f"{t:.0f} ({times['bf16'] / t:.2f}×)" for t in times.values()]
    return table(["M", *found["rows"][0]["us"]], lines)


def decoder_layer(found: dict[str, Any]) -> str:
    """A decoder layer as Transformers runs it."""
    return f"{DECODER_LAYER} {EAGER_LAYER}\n\n{layer(found)}"


def compiled(found: dict[str, Any]) -> str:
    """The same layer under ``torch.compile``."""
    return f"{DECODER_LAYER}\n\n{layer(found)}"


def trials(found: dict[str, Any]) -> str:
    """A decoder layer as shipped, and without one part of the fusion at a time."""
    columns = ["model", "M", "bf16", "fused", "siblings not joined", "residual sum apart"]
    lines = []
    for row in found["rows"]:
        if row["m"] in (1, 64, 512, 4096):
            times = row["us"]
            cases = (times[name] for name in ("bf16", "fused", "fused nojoin", "fused nores"))
            lines.append([row["model"], str(row["m"]), *(micro(us) for us in cases)])
    text = "Llama decoder layers of two sizes, microseconds: as shipped, and without one part.\n\n"
    return text + table(columns, lines)


def host(found: dict[str, Any]) -> str:
    """An eager call: what it costs the host, and how that compares with the dense layer."""
    names = [n for n in found["rows"][0]["us"] if not n.endswith("operator") and n != "nn.Linear"]
    lines = []
    for row in found["rows"]:
        times = row["us"]
        lines.append([str(row["m"])])
        lines[-1] += [f"{times[n]:.1f} ({times[n] / times['F.linear']:.2f}×)" for n in names]
    text = "Microseconds until the CPU may go on, and ratio to `F.linear`; FP8 as modules.\n\n"
    return text + table(["M", *names], lines)


def streaming(found: dict[str, Any]) -> str:
    """Streamed conversions of the largest checkpoint against copies of the same bytes."""
    largest, lines = max(row["gigabytes"] for row in found["rows"]), []
    for row in found["rows"]:
        if not row["case"].startswith("copy") and row["gigabytes"] == largest:
            lines.append([f"{row['gigabytes']:.1f} GB", row["case"], f"{row['gb_per_s']:.2f}"])
            lines[-1] += [f"{row['of_copy']:.2f}", f"{row['of_copy_synced']:.2f}"]
            lines[-1] += [f"{row['peak_gb']:.2f} GB"]
    text = (
        "GB/s of bf16 read; against copying the same files with safetensors (without a sync, and "
        "synced to disk as the conversion is) in the same run.\n\n"
    )
    columns = ["checkpoint", "scheme", "GB/s", "× copy", "× synced copy", "peak memory"]
    return text + table(columns, lines)


def lora(found: dict[str, Any]) -> str:
    """LoRA training on an FP8 base against the same on its bf16 weights, one line per seed."""
    lines = []
    for seed, dense in enumerate(found["bf16"]):
        difference = found["fp8_minus_bf16"][seed]
        lines.append([str(seed), f"{dense:.4f}", f"{dense + difference:.4f}", f"{difference:+.4f}"])
    text = (
        f"Mean loss of the last {found['mean_loss_of_the_last']} of {found['steps']} steps, "
        "`examples/nano`, rank 8 on every linear layer; both bases see the same batches. The "
        f"standard deviation over seeds is {found['spread_over_seeds']:.4f}.\n\n"
    )
    return text + table(["seed", "bf16 base", "FP8_DYNAMIC base", "difference"], lines)


def whole_model(found: dict[str, Any]) -> str:
    """A whole model: tokens per second of each variant, its memory, and its first calls."""
    rows = found["rows"]
    seen = {variant for row in rows for variant in row["us"]}
    variants = sorted(seen, key=lambda v: (not v.startswith("bf16"), v))
    failed = sorted({f"{v}: {why}" for row in rows for v, why in row["failed"].items()})

    def lines(cell: Callable[[Row, str], str], chosen: list[Row]) -> str:
        cells = [[cell(row, v) if v in row["us"] else "–" for v in variants] for row in chosen]
        heads = [[row["way"], str(row["batch"]), str(row["tokens"])] for row in chosen]
        columns = ["way", "sequences", "tokens of each", *variants]
        return table(columns, [[*h, *c] for h, c in zip(heads, cells, strict=True)]).rstrip()

    first = [row for row in rows if row["way"] in FIRST]
    parts = [
        f"{found['what'][:1].upper()}{found['what'][1:]}; FP8 is `{found['scheme']}`. Tokens per "
        "second of all sequences together, and speed-up over bf16. Captured cases are timed on the "
        "GPU, all others by the host's clock.",
        lines(rate, rows),
        "The most memory in GB, with all weights.",
        lines(lambda row, v: f"{row['peak_gb'][v]:.1f}", rows),
    ]
    if first:
        parts += [
            "The first call divided by a later one; fp8kit was warmed up before. No memory is "
            "cached then: what a first call allocates comes from the driver.",
            lines(lambda row, v: f"{row['first_us'][v] / row['us'][v]:.1f}", first),
        ]
    parts += [f"Did not run: {why}" for why in failed]
    return "\n\n".join(parts) + "\n"


def rate(row: Row, variant: str) -> str:
    """Write tokens per second, with the speed-up over bf16 where that was measured."""
    us = row["us"].get(variant)
    if us is None:
        return "–"
    text = f"{row['batch'] * row['tokens'] * 1e6 / us:.0f}"
    return f"{text} ({row['us']['bf16'] / us:.2f}×)" if "bf16" in row["us"] else text


COMPACT: dict[str, Callable[[dict[str, Any]], str]] = {
    "linear": lambda found: overview(found["rows"]),
    "experts": experts_overview,
    "decoder_layer": decoder_layer,
}
SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "linear": ("Whole linear layers", linear),
    "linear_odd": ("Whole linear layers of odd shapes", linear),
    "mx_speed": ("Layers with an MXFP8 weight", mx_speed),
    "mx_humming": ("Layers with an MXFP8 weight, beside Humming's", mx_speed),
    "experts": ("Whole layers of experts", experts),
    "experts_more_peers": (
        "Whole layers of experts beside DeepGEMM and FlashInfer, with earlier kernels",
        experts,
    ),
    "experts_h100": ("Whole layers of experts on an H100, with later kernels", experts),
    "experts_h100_newest": ("Whole layers of experts on an H100, with the newest kernels", experts),
    "quantizers": ("Quantizing activations", quantizers),
    "fused": ("Norms and activations that write FP8", fused),
    "decoder_layer": ("A Llama-8B decoder layer", decoder_layer),
    "trials": ("What parts of the fusion save", trials),
    "compiled": ("The decoder layer under torch.compile", compiled),
    "compiled_h100": (
        "The decoder layer under torch.compile on an H100, with activations that write FP8",
        compiled,
    ),
    "generation_llama": ("A Llama-8B, as Transformers runs it", whole_model),
    "generation_llama_h100": ("A Llama-8B on an H100, with later kernels", whole_model),
    "generation_llama_eager": ("The whole Llama-8B on an H100, eager and captured", whole_model),
    "generation_compiled": ("The whole Llama-8B, all 32 layers", whole_model),
    "generation_llama_h200": ("The whole Llama-8B on an H200", whole_model),
    "generation_torchao": ("The whole Llama-8B on an H200, beside torchao", whole_model),
    "generation_qwen": ("A mixture of experts, as Transformers runs it", whole_model),
    "diffusion": ("A Flux transformer, as diffusers runs it", whole_model),
    "diffusion_h200": ("The whole Flux transformer, compiled, on an H200", whole_model),
    "diffusion_h100": ("The whole Flux transformer, compiled, on an H100", whole_model),
    "host": ("The host's time of an eager call", host),
    "streaming": ("Quantizing a checkpoint on a CPU", streaming),
    "lora": ("LoRA training on an FP8 base", lora),
}


if __name__ == "__main__":
    main()
