"""Time whole layers of experts, bf16 in and out: fp8kit, bf16 as Transformers runs it, and vLLM.

    python benchmarks/experts.py OUT.json [--models Mixtral,GLM | all] [--tokens 1,16,4096]
        [--vllm FOLDER] [--flashinfer FOLDER] [--seconds 110] [--quick]

The router's ids and weights are given, and there are no shared experts. Successive calls use other
copies of the weights, which are cold, and other routes (ids and weights). Routing is uniform, and
for some token counts also skewed: expert ``e`` is chosen in proportion to ``1 / (e + 1)``. Every
case is compared with fp32 products of its own weights before it is timed; if fp8kit or bf16 fails,
the run exits with an error. OUT.json is written after every row. `expert_peers.py` says what the
folder of vLLM holds; without it the result says that vLLM is absent. `grouped_peers.py` has the
other peers, which are timed if they can be imported, and `flashinfer_peer.py` says what
FlashInfer's folder holds; they need vLLM's folder too.

Triton and NVRTC would compile for minutes in one process. So ``--processes`` other processes first
run every case once, and the timed process finds the kernels in the caches on disk.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import fp8kit
from checking import Checked, reason
from expert_peers import (
    E4M3,
    Coded,
    Dense,
    ExpertLayer,
    Routes,
    Vllm,
    batched_mm,
    grouped_mm,
    load_vllm,
    silu_and_mul,
    transformers_case,
    unpacked,
)
from flashinfer_peer import FlashInfer, load_flashinfer, per_tensor, static_scales
from fp8kit.dispatch.backends import decide
from fp8kit.dispatch.device import capability
from fp8kit.formats import stack_scale_shape
from fp8kit.matmul.problem import m_bucket
from fp8kit.moe.problem import MOE_BACKENDS, ExpertsProblem
from fp8kit.ops.validation import activation_format
from fp8kit.perf.timing import QUICK, THOROUGH, Effort, Timer
from grouped_peers import GROUPED, serves, versions
from layers import EXPERTS, ExpertShape, bandwidth, experts_passes_us, experts_roofline_us
from linear import integers, own_failures
from summary import EXPERT_COMPARISONS, ratios
from timing import Case, copies_past_cache, environment, time_cases, write_results

TOKENS = "1,4,16,64,128,1024,4096"
SKEWED = (16, 128, 4096)
GROUPS = {"row": fp8kit.ROW, "block": fp8kit.BLOCK}
Loaded = TypeVar("Loaded")
# on normal data rounding input and intermediate to FP8 costs 4.4 %, and 6.2 % in the worst of a
# thousand tokens; bf16 costs 0.5 %, and 0.8 % in the worst token
DENSE_ERROR, FP8_ERROR = 0.02, 0.08
_MOST_COPIES, _TURNS, _FEW_TOKENS = 6, 12, 128
_MOST_GATHERED = 8e9  # bytes of weights that batched_mm copies; more takes as long as all others
_COMPILING_SECONDS = 45.0

Row = dict[str, Any]
Build = Callable[[ExpertLayer], Case]


def ours(kind: str) -> Build:
    """Return a builder of ``fp8kit.moe.experts`` on weights of one granularity."""

    def build(layer: ExpertLayer) -> Case:
        x, coded = layer.x, layer.coded[kind]
        return lambda i: fp8kit.moe.experts(x, *coded[i % len(coded)], *layer.routes[i])

    return build


def ours_static(layer: ExpertLayer) -> Case:
    """Build ``fp8kit.moe.experts`` with FlashInfer's static scales."""
    given = [scale.view(1, 1) for scale in static_scales(layer)]
    scales = dict(zip(("input_scale13", "input_scale2"), given, strict=True))
    copies = [
        [fp8kit.QTensor(w.data, w.scale[:, :1].contiguous(), fp8kit.TENSOR) for w in coded]
        for coded in layer.coded["tensor"]
    ]
    return lambda i: fp8kit.moe.experts(
        layer.x, *copies[i % len(copies)], *layer.routes[i], **scales
    )


# each case: the kind of weights from which its exact result is computed, and its builder
OURS: dict[str, tuple[str, Build]] = {f"fp8kit_{kind}": (kind, ours(kind)) for kind in GROUPS}
STATIC = "fp8kit_static"  # timed beside FlashInfer
DENSE: dict[str, tuple[str, Build]] = {
    "bf16_batched_mm": ("dense", partial(transformers_case, batched_mm)),
    "bf16_grouped_mm": ("dense", partial(transformers_case, grouped_mm)),
}


def peer_cases(vllm: Vllm | None, shape: ExpertShape, tokens: int) -> dict[str, tuple[str, Build]]:
    """Return the cases of the peers that are available and serve a layer and a token count.

    All need vLLM, whose quantizers run around the GEMMs of torch and DeepGEMM.
    """
    if vllm is None:
        return {}
    kinds = {"vllm_channel": "row", "vllm_block": "block"}
    found: dict[str, tuple[str, Build]] = {
        name: (kind, partial(vllm.case, kind)) for name, kind in kinds.items()
    }
    w13, present = (shape.experts, 2 * shape.intermediate, shape.hidden), versions()
    for name, (kind, package, build) in GROUPED.items():
        if package in present and serves(name, w13, tokens):
            found[name] = (kind, partial(build, vllm))
    return found


@dataclass(frozen=True)
class Bench:
    """What a run measures.

    Args:
        vllm: vLLM, if it could be loaded.
        device: where to measure.
        flashinfer: FlashInfer's CUTLASS layers, if it could be loaded.
        effort: how long to measure each case.
        timer: the function that times cases.
    """

    vllm: Vllm | None
    device: torch.device
    flashinfer: FlashInfer | None = None
    effort: Effort = THOROUGH
    timer: Timer = time_cases

    def cases(self, shape: ExpertShape, tokens: int) -> dict[str, tuple[str, Build]]:
        """Return the cases that serve a layer and a token count."""
        found = DENSE | OURS | peer_cases(self.vllm, shape, tokens)
        if self.flashinfer is not None and self.vllm is not None:
            found[STATIC] = ("tensor", ours_static)
            found |= self.flashinfer.cases(self.vllm, self.timer)
        if not blocks_fit(shape):
            found = {name: case for name, case in found.items() if case[0] != "block"}
        if 2 * tokens * shape.top_k * shape.expert_weights > _MOST_GATHERED:
            del found["bf16_batched_mm"]
        return found


def main(argv: Sequence[str] | None = None, timer: Timer = time_cases) -> None:
    """Measure, print a line per layer, routing and token count, and write the result file."""
    arguments = parse(argv)
    start = time.monotonic()
    deadline = start + arguments.seconds
    device = torch.device(arguments.device)
    effort = QUICK if arguments.quick else THOROUGH
    with tempfile.TemporaryDirectory() as folder:
        libraries = unpacked(arguments.vllm, Path(folder)) if arguments.vllm else []
        if arguments.processes and device.type == "cuda":
            compile_ahead(arguments, libraries)
            print(f"compiled ahead in {time.monotonic() - start:.0f} s", flush=True)
        vllm, absent = peer(arguments.vllm, libraries, device)
        flashinfer, why = flashinfer_peer(arguments.flashinfer, Path(folder), vllm)
        facts = {
            "what": "layers of experts, bf16 in and out, microseconds",
            "peers": peer_versions(vllm, flashinfer),
            "absent": absent | why,
            "vllm_operators": {} if vllm is None else vllm.operators,
            "effort": f"{effort.rounds} rounds of {effort.round_ms:g} ms",
        }
        measured = measure_all(
            Bench(vllm, device, flashinfer, effort, timer),
            arguments.models,
            arguments.tokens,
            deadline,
        )
        rows: list[Row] = []
        for row in measured:
            rows.append(row)
            report(row)
            facts["seconds"] = round(time.monotonic() - start)
            write_results(arguments.out, rows, **facts)
    broken = [f"{row['shape']} m={row['m']}: {n}" for row in rows for n in own_failures(row)]
    if broken:
        raise SystemExit("fp8kit or bf16 failed, see above: " + "; ".join(broken))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path)
    add("--models", type=model_names, default=dict(EXPERTS), help="starts of names, or all")
    add("--tokens", type=integers, default=integers(TOKENS))
    add("--vllm", type=absolute, help="folder with vLLM's package and compiled operators")
    add("--flashinfer", type=absolute, help="folder with FlashInfer's compiled layers")
    add("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)),
        help="that compile beforehand; 0 compiles when a kernel is needed")  # fmt: skip
    add("--seconds", type=float, default=float("inf"), help="nothing starts later than this")
    add("--quick", action="store_true", help="a quarter of the time for each case")
    add("--device", default="cuda", help="a CPU shows that everything runs, and no more")
    return parser.parse_args(argv)


def absolute(text: str) -> Path:
    """Read a path and make it absolute, for other processes and the dynamic linker."""
    return Path(text).resolve()


def model_names(text: str) -> dict[str, ExpertShape]:
    """Read prefixes of models' names, separated by commas, or ``all``."""
    words = text.split(",")
    for word in words:
        if word != "all" and not (word and any(name.startswith(word) for name in EXPERTS)):
            raise argparse.ArgumentTypeError(f"{word!r} starts none of {', '.join(EXPERTS)}")
    wanted = ("",) if "all" in words else tuple(words)
    return {name: shape for name, shape in EXPERTS.items() if name.startswith(wanted)}


def peer(
    folder: Path | None, libraries: list[Path], device: torch.device
) -> tuple[Vllm | None, dict[str, str]]:
    """Load vLLM, or return the reason why it is absent."""
    if folder is None:
        return None, {"vllm": "not asked for (--vllm FOLDER)"}
    return loaded("vllm", lambda: load_vllm(folder, libraries, device))


def flashinfer_peer(
    folder: Path | None, into: Path, vllm: Vllm | None
) -> tuple[FlashInfer | None, dict[str, str]]:
    """Load FlashInfer's layers, or return the reason why it is absent if it was asked for."""
    if folder is None:
        return None, {}
    if vllm is None:
        return None, {"flashinfer_cutlass": "needs vLLM, whose quantizer runs before it"}
    return loaded("flashinfer_cutlass", lambda: load_flashinfer(folder, into))


def loaded(name: str, load: Callable[[], Loaded]) -> tuple[Loaded | None, dict[str, str]]:
    """Load a library, or return the reason why it does not load: only its columns stay empty."""
    try:
        return load(), {}
    except Exception as broken:
        print(f"{name}: {reason(broken)}", flush=True)
        return None, {name: reason(broken)}


def peer_versions(vllm: Vllm | None, flashinfer: FlashInfer | None) -> dict[str, str]:
    """Return the versions of the peers, by name; all need vLLM."""
    if vllm is None:
        return {}
    own = {} if flashinfer is None else {"flashinfer": flashinfer.version}
    return {"vllm": vllm.version, **versions(), **own}


def compile_ahead(arguments: argparse.Namespace, libraries: list[Path]) -> None:
    """Run every case once in other processes, which leave their kernels in the caches on disk."""
    context = multiprocessing.get_context("spawn")
    setting = (arguments.vllm, libraries, arguments.device, arguments.flashinfer is not None)
    shapes = arguments.models.values()
    jobs = [(*setting, shape, m) for m in arguments.tokens for shape in shapes]
    stop = time.monotonic() + min(arguments.seconds / 2, _COMPILING_SECONDS)
    with context.Pool(min(arguments.processes, len(jobs))) as pool:
        waiting = [pool.apply_async(compile_quantizers, (arguments.device, s)) for s in shapes]
        waiting += [pool.apply_async(compile_cell, job) for job in jobs]
        for one in waiting:
            try:
                failed = one.get(max(0.0, stop - time.monotonic()))
            except multiprocessing.TimeoutError:
                print("not everything is compiled ahead", flush=True)
                return
            for case, why in failed.items():
                print(f"compiling {case}: {why}", flush=True)


@torch.no_grad()
def compile_quantizers(device_name: str, shape: ExpertShape) -> dict[str, str]:
    """Quantize the weights of a layer once, to compile the quantizers; return failures."""
    try:
        make_weights(torch.Generator(torch.device(device_name)).manual_seed(0), shape, most=1)
    except Exception as broken:
        # the measuring process meets the same error, and stops
        return {f"the weights of {shape}": reason(broken)}
    torch.cuda.empty_cache()
    return {}


_loaded: dict[Path | None, Vllm | None] = {}


@torch.no_grad()
def compile_cell(
    folder: Path | None,
    libraries: list[Path],
    device_name: str,
    static: bool,
    shape: ExpertShape,
    tokens: int,
) -> dict[str, str]:
    """Run the FP8 cases of one layer and token count once, to compile them; return failures."""
    device = torch.device(device_name)
    if folder not in _loaded:
        _loaded[folder] = peer(folder, libraries, device)[0]
    e, _, h, i = shape
    sizes = ((e, 2 * i, h), (e, h, i))
    codes = [torch.full(size, 1.0, device=device, dtype=E4M3) for size in sizes]
    coded = {}
    for kind, group in (GROUPS | ({"tensor": fp8kit.ROW} if static else {})).items():
        if kind != "block" or blocks_fit(shape):
            scales = [torch.ones(stack_scale_shape(c.shape, group), device=device) for c in codes]
            pair = (fp8kit.QTensor(c, s, group) for c, s in zip(codes, scales, strict=True))
            coded[kind] = [Coded(*pair)]
    generator = torch.Generator(device).manual_seed(0)
    x = normal(generator, tokens, h)
    layer = ExpertLayer(x, [routes(generator, shape, tokens, "uniform")], [], coded)
    failed = {}
    cases = OURS | peer_cases(_loaded[folder], shape, tokens) | {STATIC: ("tensor", ours_static)}
    for name, (kind, build) in cases.items():
        if kind in coded:
            try:
                build(layer)(0)
            except Exception as broken:
                # the measuring process meets the same error, and records it
                failed[f"{name} of {shape} m={tokens}"] = reason(broken)
    del layer, coded, codes
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return failed


def measure_all(
    bench: Bench, models: Mapping[str, ExpertShape], counts: Sequence[int], deadline: float
) -> Iterator[Row]:
    """Yield a result row per model, token count and routing, until the deadline."""
    # a failed capture leaves the default generator unusable, so random numbers come from this one
    generator = torch.Generator(bench.device).manual_seed(0)
    if bench.device.type == "cuda":
        # capturing a graph may collect garbage: exempt all objects that exist already
        gc.collect()
        gc.freeze()
    for name, shape in models.items():
        if time.monotonic() > deadline:
            print(f"{name}: skipped, out of time", flush=True)
            continue
        dense, coded = make_weights(generator, shape)
        if bench.flashinfer is not None:
            coded["tensor"] = [per_tensor(one) for one in dense]
        cells = [(m, "uniform") for m in counts] + [(m, "skewed") for m in counts if m in SKEWED]
        for m, routing in cells:
            if time.monotonic() > deadline:
                print(f"{name} m={m} {routing}: skipped, out of time", flush=True)
                continue
            turns = turns_for(m, len(dense))
            drawn = [routes(generator, shape, m, routing) for _ in range(turns)]
            x = normal(generator, m, shape.hidden)
            try:
                # hold no tensor here beyond this call: a large layer's weights fill the GPU
                found = measure(bench, shape, ExpertLayer(x, drawn, dense, coded))
            except torch.OutOfMemoryError as broken:
                print(f"{name} m={m} {routing}: skipped, {reason(broken)}", flush=True)
                torch.cuda.empty_cache()
                continue
            yield {"shape": name, "m": m, "routing": routing, **shape._asdict(), **found}
        del dense, coded
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def turns_for(tokens: int, copies: int) -> int:
    """Return the number of routes that calls alternate between, a multiple of ``copies``."""
    return copies * -(-_TURNS // copies) if tokens <= _FEW_TOKENS else copies


def make_weights(
    generator: torch.Generator, shape: ExpertShape, most: int = _MOST_COPIES
) -> tuple[list[Dense], dict[str, list[Coded]]]:
    """Draw the weights of all experts, and copy them until they exceed the device's cache."""
    e, top_k, h, i = shape
    count = min(most, copies_past_cache(top_k * shape.expert_weights, generator.device))
    # scaled so that the result of a GEMM is about as large as its input
    one = Dense(normal(generator, e, 2 * i, h) * h**-0.5, normal(generator, e, h, i) * i**-0.5)
    dense = [one, *(Dense(*(w.clone() for w in one)) for _ in range(count - 1))]
    coded = {}
    for kind, group in GROUPS.items():
        if kind != "block" or blocks_fit(shape):
            coded[kind] = [
                Coded(*(fp8kit.quantize(w, group, role="weight") for w in pair)) for pair in dense
            ]
    return dense, coded


def blocks_fit(shape: ExpertShape) -> bool:
    """Return whether both weights consist of whole 128x128 blocks, as in block-wise checkpoints."""
    return not shape.hidden % fp8kit.BLOCK.cols and not shape.intermediate % fp8kit.BLOCK.cols


def routes(generator: torch.Generator, shape: ExpertShape, tokens: int, routing: str) -> Routes:
    """Draw ``top_k`` distinct experts for each token, and weights that add up to one."""
    size, device = (tokens, shape.experts), generator.device
    # the top k of p / Exponential(1) are a sample without replacement, in proportion to p
    key = torch.empty(size, device=device).exponential_(generator=generator).reciprocal_()
    if routing == "skewed":
        key /= torch.arange(1, shape.experts + 1, device=device)
    ids = key.topk(shape.top_k).indices.int()
    logits = torch.randn(tokens, shape.top_k, generator=generator, device=device)
    return Routes(ids, logits.softmax(-1))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw a bf16 tensor."""
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.bfloat16)


@torch.no_grad()
def measure(bench: Bench, shape: ExpertShape, layer: ExpertLayer) -> Row:
    """Check and time every case of one layer and token count, against each other."""
    tokens = layer.x.shape[0]
    cases = bench.cases(shape, tokens)
    checked = Checked()
    for weights in {kind: None for kind, _ in cases.values()}:
        correct = exact(layer, weights)
        for name, (kind, build) in cases.items():
            if kind == weights:
                limit = DENSE_ERROR if kind == "dense" else FP8_ERROR
                checked.add(name, deferred(build, layer), correct, limit)
    times = bench.timer(checked.cases, len(layer.routes), bench.effort, bench.device)
    touched = sum(ids.unique().numel() for ids, _ in layer.routes) / len(layer.routes)
    speed = bandwidth(environment()["device"])
    roofline = experts_roofline_us(shape, tokens, touched, speed)
    found: Row = {"touched": touched, "roofline_us": roofline}
    found["roofline_with_passes_us"] = roofline + experts_passes_us(shape, tokens, speed)
    found["us"] = times
    found["of_roofline"] = {name: roofline / us for name, us in times.items()}
    row = {"shape": "", **found}
    compared = {k: ratios(row, k, EXPERT_COMPARISONS) for k in EXPERT_COMPARISONS}
    found["best_peer_by_ours"] = {k: r.of_peer for k, r in compared.items() if r and r.peer}
    found["relative_error"] = checked.errors
    found["backends"] = {
        f"fp8kit_{kind}": backend(layer, shape, kind) for kind in GROUPS if kind in layer.coded
    }
    return found | ({"failed": checked.failed} if checked.failed else {})


def deferred(build: Build, layer: ExpertLayer) -> Case:
    """Return a case that is built at its first call, where ``Checked`` records a failure."""
    built: list[Case] = []

    def run(i: int) -> object:
        if not built:
            built.append(build(layer))
        return built[0](i)

    return run


def exact(layer: ExpertLayer, kind: str) -> Tensor:
    """Compute the layer for the first routes in fp32, from bf16 or dequantized weights."""
    ids, weights = layer.routes[0]
    w13, w2 = layer.dense[0] if kind == "dense" else layer.coded[kind][0]
    y = torch.zeros(layer.x.shape, device=layer.x.device)
    for e in ids.unique().tolist():
        token, place = torch.where(ids == e)
        inner = silu_and_mul(layer.x[token].float() @ values(w13, e).t())
        y.index_add_(0, token, (inner @ values(w2, e).t()) * weights[token, place, None])
    return y


def values(stack: Tensor | fp8kit.QTensor, expert: int) -> Tensor:
    """Return the fp32 weight of one expert."""
    if isinstance(stack, Tensor):
        return stack[expert].float()
    codes, scale = stack.data[expert], stack.scale[expert]
    n, k = scale.shape
    grouped = codes.float().view(n, codes.shape[0] // n, k, codes.shape[1] // k)
    return (grouped * scale[:, None, :, None]).view(codes.shape)


def backend(layer: ExpertLayer, shape: ExpertShape, kind: str) -> str:
    """Return the name of the backend that dispatch chooses for a case of fp8kit."""
    group = GROUPS[kind]
    x_group, rounding = activation_format(group, None, None)
    device = layer.x.device
    problem = ExpertsProblem(
        m=m_bucket(layer.x.shape[0]), experts=shape.experts, top_k=shape.top_k,
        hidden=shape.hidden, intermediate=shape.intermediate,
        activation=fp8kit.moe.Activation(), x_group=x_group, w_group=group,
        x_dtype=layer.x.dtype, w_dtype=layer.coded[kind][0].w13.data.dtype,
        scale_rounding=rounding, static_input=False, static_intermediate=False,
        router_weight_on_input=False, batch_invariant=False, device_type=device.type,
        capability=capability(device),
    )  # fmt: skip
    return decide(MOE_BACKENDS, problem).backend


def report(row: Row) -> None:
    """Print one measurement: times, ratios to the best peers, what failed and why."""
    line = f"{row['shape']:>15} m={row['m']:<5} {row['routing']:<7}"
    line += f" roof {row['roofline_us']:7.1f} ({row['roofline_with_passes_us']:.1f})"
    line += "".join(f"  {name} {us:.1f}" for name, us in row["us"].items())
    for kind, ratio in row["best_peer_by_ours"].items():
        line += f"  | peer / {kind} {ratio:.2f}"
    for kind in EXPERT_COMPARISONS:
        if f"fp8kit_{kind}" in row["us"]:
            line += f"  {kind} {row['of_roofline'][f'fp8kit_{kind}']:.0%} of roof"
    line += "".join(f"\n    failed {n}: {why}" for n, why in row.get("failed", {}).items())
    print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
