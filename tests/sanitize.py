"""Run every kernel of the package under NVIDIA's compute-sanitizer, and fail on what it finds.

    python tests/sanitize.py [--tools memcheck,racecheck] [--sanitizer PATH]

Needs a GPU and ``compute-sanitizer``, from the CUDA toolkit or ``pip install
nvidia-cuda-sanitizer-api``. Only kernels of the package are instrumented. A tool counts only after
it has found the fault of a kernel that is broken on purpose, and a run only if it launched every
kernel. torch's caching allocator is off: it cuts tensors from one large block, so that an access
beyond a tensor would stay inside the block and pass unnoticed. Errors that calls into the driver
return are not reported: the bindings look for entry points that older drivers do not have.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8kit
from fp8kit import fused
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape
from fp8kit.fused import triton as fused_triton
from fp8kit.fused import triton_attention
from fp8kit.matmul import triton_gemm
from fp8kit.matmul.hopper import gemm, heuristics
from fp8kit.matmul.problem import MatmulOperands, MatmulProblem
from fp8kit.moe import Activation, triton_top_k
from fp8kit.moe import operators as expert_operators
from fp8kit.moe import triton as moe_triton
from fp8kit.moe.hopper import dot_products
from fp8kit.moe.hopper import experts as hopper_experts
from fp8kit.moe.top_k import Formula
from fp8kit.quantizers import triton
from fp8kit.runtime import cuda_launch
from fp8kit.runtime.weight_hazards import mark_synchronized
from grouped_configs import CONFIGS as GROUPED_CONFIGS
from slow_experts import operator_arguments, random_layer
from tile_configs import CONFIGS

Calls = dict[str, Callable[[], object]]

TRITON_KERNELS = (
    "_rows_kernel",
    "_groups_kernel",
    "_blocks_kernel",
    "_amax_kernel",
    "_tensor_kernel",
    "_norm_kernel",
    "_plain_norm_kernel",
    "_activation_kernel",
    "_rotary_kernel",
    "_attend_kernel",
    "_combine_kernel",
    "product_kernel",
    "sum_kernel",
    "grouped_kernel",
    "activated_kernel",
    "combine_kernel",
    "_choose_kernel",
)
EXPERT_KERNELS = ("sort_and_quantize", "grouped_gemm", "combine_rows", "gates_and_ups", "downs")
OWN_KERNELS = ("hopper_gemm", "cluster_rows_kernel", *EXPERT_KERNELS)
KERNELS = (*OWN_KERNELS, *TRITON_KERNELS)
TOOLS = ("memcheck", "racecheck")
FOUND = 7  # exit status of the sanitizer if it finds something
E4M3 = torch.float8_e4m3fn
PAIRS: tuple[tuple[GroupShape | None, GroupShape], ...] = (
    (ROW, ROW),
    (ROW, TENSOR),
    (GROUP128, BLOCK),
    (MX, MX),
    (None, ROW),
)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BROKEN = {
    "memcheck": "y[64] = threadIdx.x;",
    "racecheck": "__shared__ int s[64]; s[threadIdx.x] = 1; y[threadIdx.x] = s[63 - threadIdx.x];",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tools, print their findings, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="separated by commas")
    parser.add_argument("--sanitizer", default="", help="path of compute-sanitizer")
    parser.add_argument("--program", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.program == "kernels":
        return run_kernels()
    if arguments.program:
        return run_broken(arguments.program)
    sanitizer = arguments.sanitizer or find_sanitizer()
    if not sanitizer:
        return _say("compute-sanitizer is not here; pip install nvidia-cuda-sanitizer-api", 2)
    verdicts = [check(sanitizer, tool) for tool in arguments.tools.split(",")]
    for verdict in filter(None, verdicts):
        _say(verdict)
    return 1 if any(verdicts) else _say(f"{len(KERNELS)} kernels, nothing found", 0)


def check(sanitizer: str, tool: str) -> str:
    """Return the findings of one tool, or why its run proves nothing; empty if all is well.

    Args:
        sanitizer: path of ``compute-sanitizer``.
        tool: ``"memcheck"`` or ``"racecheck"``.
    """
    status, output = sanitize(sanitizer, tool, ("broken",), tool)
    if status != FOUND or not findings(output):  # a program that fails is counted as an error, too
        return f"{tool}: finds nothing in a kernel that is broken, so it proves nothing"
    status, output = sanitize(sanitizer, tool, KERNELS, "kernels")
    found = findings(output)
    if found:
        return f"{tool}: {found} findings"
    if found is None or status:
        return f"{tool}: did not come to its end, status {status}"
    return ""


def sanitize(sanitizer: str, tool: str, kernels: Sequence[str], program: str) -> tuple[int, str]:
    """Run a program of this file under a tool that instruments the named kernels.

    A run takes minutes, so each line is also printed as it comes.

    Returns:
        The exit status, and the output of tool and program together.
    """
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    options += ["--target-processes", "application-only", "--destroy-on-device-error", "kernel"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no", "--padding", "64"]
    for name in kernels:
        options += ["--kernel-name", f"kernel_substring={name}"]
    lines = []
    with subprocess.Popen(
        [sanitizer, *options, sys.executable, __file__, "--program", program],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line)
            _say(line.rstrip("\n"))
    return running.returncode, "".join(lines)


def findings(output: str) -> int | None:
    """Return how many errors or hazards a tool reports; ``None`` if it printed no summary."""
    counts = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) ", output, re.MULTILINE)
    return sum(map(int, counts)) if counts else None


def find_sanitizer() -> str:
    """Return the path of ``compute-sanitizer``, from PATH or NVIDIA's packages; empty if absent."""
    found = shutil.which("compute-sanitizer")
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia and nvidia.submodule_search_locations) or ():
        packaged = sorted(Path(folder).glob("*/*/compute-sanitizer"))
        found = found or next((str(p) for p in packaged if os.access(p, os.X_OK)), None)
    return found or ""


def run_kernels() -> int:
    """Launch every kernel of the package; fail if one was not reached."""
    seen: set[str] = set()
    with noted(seen):
        for name, call in {**triton_calls("cuda"), **own_calls(), **hopper_expert_calls()}.items():
            call()
            torch.cuda.synchronize()
            _say(name)
    missing = sorted(set(KERNELS) - seen)
    return _say(f"never launched: {', '.join(missing)}", 1) if missing else 0


def run_broken(tool: str) -> int:
    """Launch a kernel with the fault that the tool must find: an overrun by one, or a race."""
    y = torch.zeros(64, dtype=torch.int32, device="cuda")
    source = f'extern "C" __global__ void broken(int* y) {{ {BROKEN[tool]} }}'
    kernel = cuda_launch.Kernel(source, "broken", 64, 1, 0, y.device)
    with contextlib.suppress(RuntimeError):  # the tool may end the kernel, which is an error too
        kernel.launch(1, (cuda_launch.pointer(y),), overlap=False)
        torch.cuda.synchronize()
    return 0


@contextlib.contextmanager
def noted(seen: set[str]) -> Iterator[None]:
    """Add the names of kernels to ``seen`` as they are launched."""
    undo: list[Callable[[], None]] = []

    def swap(holder: Any, name: str, new: Any) -> None:
        old = getattr(holder, name)
        undo.append(lambda: setattr(holder, name, old))
        setattr(holder, name, new)

    launch = cuda_launch.Kernel.launch

    def launched(self: cuda_launch.Kernel, *arguments: Any, **options: Any) -> None:
        seen.add(self.name)
        launch(self, *arguments, **options)

    swap(cuda_launch.Kernel, "launch", launched)
    assert fused_triton.__name__ in sys.modules  # else dispatch would load it too late to watch
    for module in [m for n, m in sys.modules.items() if n.startswith("fp8kit.")]:
        for name in set(TRITON_KERNELS) & set(vars(module)):
            found = getattr(module, name)
            if hasattr(found, "fn"):  # else a function that compiles a CUDA kernel of this name
                swap(module, name, Watched(found, seen))
    try:
        yield
    finally:
        for step in undo:
            step()


class Watched:
    """A kernel of Triton that notes its launches."""

    def __init__(self, kernel: Any, seen: set[str]) -> None:
        self._kernel, self._seen = kernel, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: Any) -> Any:
        self._seen.add(self._kernel.fn.__name__)
        return self._kernel[grid]


def triton_calls(device: str) -> Calls:
    """Return calls of every Triton kernel in its variants, on small ragged shapes."""
    calls: Calls = {}
    x = torch.randn(5, 264, device=device).bfloat16()
    weight = torch.randn(264, device=device).bfloat16()
    floor = 1e-10
    for group in (ROW, TENSOR, GROUP128, BLOCK, MX):
        rounding = "floor" if group == MX else "exact"
        scale = fp8kit.quantize(x, group).scale
        arguments = (x, group, E4M3, floor, None, rounding)
        calls[f"quantize {group}"] = lambda a=arguments: triton.quantize(*a)
        calls[f"static {group}"] = lambda g=group, s=scale: triton.quantize_static(x, s, g, E4M3)
        if group.rows == 1 and group.cols > 0:
            calls[f"by column {group}"] = lambda a=arguments: triton.quantize(*a, "column")
    # large enough for prefetches, with ragged ends; the interpreter prefetches nothing and is slow
    large = torch.randn(2051, 4100, device=device).bfloat16() if device == "cuda" else x
    for group in (ROW, TENSOR, GROUP128, BLOCK):
        calls[f"quantize {large.numel()} in {group}"] = lambda g=group: triton.quantize(
            large, g, E4M3, floor, None, "exact"
        )
    strided = torch.randn(264, 5, device=device).t()
    calls["quantize tensor, strided"] = lambda: triton.quantize(
        strided, TENSOR, E4M3, floor, None, "exact"
    )
    for group in (ROW, GROUP128):
        calls |= {
            f"rms norm {group}": lambda g=group: fused.rms_norm_quantize(x, weight, group=g),
            f"add, norm {group}": lambda g=group: fused.add_rms_norm_quantize(
                x, x, weight, group=g
            ),
            f"layer norm {group}": lambda g=group: fused.layer_norm_quantize(x, weight, group=g),
            f"silu {group}": lambda g=group: fused.silu_mul_quantize(x, x, group=g),
        }
    calls |= attention_calls(device)
    calls["rms norm, heads"] = lambda: fused_triton.rms_normed(
        x[:, : x.shape[1] // 3 * 3].unflatten(1, (3, -1))[:, 1:],
        weight[: x.shape[1] // 3], 1e-6, 1.0, "once",
    )  # fmt: skip
    by_column = {"group": GROUP128, "scale_layout": "column"}
    calls["rms norm, by column"] = lambda: fused.rms_norm_quantize(x, weight, **by_column)
    calls["silu, by column"] = lambda: fused.silu_mul_quantize(x, x, **by_column)
    # fewer and smaller shapes for the interpreter, which is slow
    rows, n, k = ((3, 70), 200, 1040) if device == "cuda" else ((3,), 40, 1040)
    for pair in PAIRS:
        for m in rows:
            for invariant in (False, True):
                operands = quantized(m, n, k, pair, device)
                problem = described(operands, pair, None, torch.bfloat16, invariant)
                if triton_gemm.supports(problem) is None:
                    calls[f"triton product {m} {problem}"] = lambda o=operands, g=pair, p=problem: (
                        triton_gemm.run(MatmulOperands(*o), p)
                    )
    return calls | expert_calls(device)


def attention_calls(device: str) -> Calls:
    """Return calls of rotary embedding and of the attention of one token, on ragged shapes."""
    with torch.device(device):
        q, k, v = (torch.randn(2, n, 150, 24).bfloat16() for n in (6, 2, 2))
        cos, sin = torch.randn(2, 2, 150, 24).bfloat16()
        mask = torch.rand(2, 1, 1, 150) < 0.5
    turned = (q, k, cos, sin)
    if device != "cuda":  # the interpreter takes the kernel's programs one by one
        turned = tuple(t[..., :5, :] for t in turned)
    return {
        "rotary": lambda: fused_triton.rotated(*turned),
        "attention": lambda: triton_attention.attend(q[:, :, :1], k, v, mask, 0.2),
        "attention, one chunk": lambda: triton_attention.attend(
            q[:, :, :1], k[:, :, :9], v[:, :, :9], None, 0.2
        ),
    }


def expert_calls(device: str) -> Calls:
    """Return calls of experts and routing, on ragged shapes; ids include -1, and omit an expert."""
    calls: Calls = {}
    for number, pair in enumerate((PAIRS[0], PAIRS[2], PAIRS[4])):
        activation = Activation(interleaved=number % 2 == 1)
        with torch.device(device):
            layer = random_layer(pair, activation, (3, 72, 136), biases=number % 2 == 0)
            x, weights = torch.randn(9, 72).bfloat16(), torch.rand(9, 2)
            ids = torch.randint(-1, 2, (9, 2))
        given = operator_arguments(layer, x, ids, weights)
        operands, problem, _ = expert_operators.described(given)
        calls[f"{problem}"] = lambda o=operands, p=problem: moe_triton.experts(o, p)
    for experts, top_k, scoring in ((5, 3, "softmax"), (60, 9, "sigmoid")):
        bias = torch.randn(experts, device=device) if scoring == "sigmoid" else None
        formula = Formula(top_k, scoring, True, 1.0, torch.float32)
        logits = torch.randn(3, experts, device=device)
        calls[f"choose {formula}"] = lambda given=(logits, bias, formula): triton_top_k.choose(
            *given
        )
    return calls


def hopper_expert_calls(device: str = "cuda") -> Calls:
    """Return calls of the CUDA kernels of experts: every configuration, and dot products."""
    calls: Calls = {}
    # tokens and I; above 512 large tiles do not gather, above 2048 they have a kernel per product
    sizes = ((3, 256), (90, 256), (90, 640), (90, 2176))
    configurations = [
        *itertools.product(sizes, GROUPED_CONFIGS),
        ((1, 256), None),
        ((3, 256), None),
    ]
    for pair, ((tokens, inner), config) in itertools.product((PAIRS[0], PAIRS[2]), configurations):
        if config is not None and inner > 512:
            if config.copies_rows if inner == 640 else config.takes_turns:
                continue
        with torch.device(device):
            layer = random_layer(pair, sizes=(3, 144, inner), biases=tokens <= 3)
            x, weights = torch.randn(tokens, 144).bfloat16(), torch.rand(tokens, 2)
            ids = torch.randint(-1, 2, (tokens, 2))
        given = operator_arguments(layer, x, ids, weights)
        operands, problem, _ = expert_operators.described(given)
        calls[f"{config} {tokens} {problem}"] = lambda o=operands, p=problem, c=config: (
            hopper_experts.experts(o, p, c) if c else dot_products.experts(o, p)
        )
    return calls


def own_calls(device: str = "cuda", drawn: Callable[..., tuple[Any, ...]] | None = None) -> Calls:
    """Return calls of the CUDA kernels: the GEMM in every configuration, scale kind and dtype.

    Args:
        device: where operands lie.
        drawn: returns operands as ``quantized`` does, which is the default.
    """
    drawn = drawn or quantized
    calls: Calls = {}
    for k, dtype in itertools.product((24, 7168, 40000), FLOATS):
        x = torch.randn(3, k, device=device).to(dtype)
        calls[f"rows of {k} {dtype}"] = lambda x=x: fp8kit.quantize(x)
    for number, config in enumerate(CONFIGS):
        for pair in (PAIRS[0], PAIRS[2]):
            several = (80 * config.tokens + 3, 200, 144)  # tiles per block, which TMA stores
            if config.launch.cluster_sync_every and pair == PAIRS[0]:
                several = (140 * config.tokens + 3, 200, 528)  # which synchronize in two full waves
            for m, n, k in ((config.tokens + 1, 200, 1040), (1, 7, 16), several):
                out = FLOATS[number % (2 if m == several[0] else 3)]
                bias = torch.randn(n, device=device).to(FLOATS[(number + m) % 3])
                operands = drawn(m, n, k, pair, device)
                problem = described(operands, pair, bias, out, False)
                calls[f"{config!r} {problem}"] = (
                    lambda c=config, o=operands, b=bias, g=pair, p=problem: gemm_of_codes(
                        c, o, b, g, p
                    )
                )
    # one block, clusters of two and three, two warpgroups, more tiles than blocks, whole or split
    shapes = ((200, 1040), (1024, 2048), (2048, 4096), (12000, 144), (26000, 1040), (34816, 2560))
    for pair, m, (n, k) in itertools.product((PAIRS[0], PAIRS[2]), (1, 3), shapes):
        record = gemm.device_record(0)
        if heuristics.choose_quantizing(m, n, k, record, pair == PAIRS[2]) is None:
            continue
        x = torch.randn(m, k, device=device).to(FLOATS[m // 2])
        operands = drawn(m, n, k, pair, device)
        problem = described(operands, pair, None, torch.bfloat16, False)
        calls[f"{m} quantized in {problem}"] = lambda x=x, o=operands, g=pair, p=problem: (
            gemm_of_dense(x, o[2:], g, p)
        )
    return calls


def gemm_of_dense(
    x: Tensor, w_q: tuple[Tensor, Tensor], pair: Any, problem: MatmulProblem
) -> Tensor:
    """Quantize and multiply in the Hopper GEMM."""
    mark_synchronized(w_q[0])
    y = gemm.quantize_in_gemm(MatmulOperands(x, None, *w_q), problem, 1e-12)
    assert y is not None
    return y


def gemm_of_codes(
    config: Any, operands: Any, bias: Tensor, pair: Any, problem: MatmulProblem
) -> Tensor:
    """Multiply by the Hopper GEMM in a given configuration."""
    mark_synchronized(operands[2])  # as in every call but the first: the weight is read early
    return gemm.run(MatmulOperands(*operands, bias), problem, config)


def quantized(m: int, n: int, k: int, pair: Any, device: str) -> tuple[Any, ...]:
    """Draw operands: ``x``, its scales, ``w`` and its scales."""
    x = torch.randn(m, k, device=device).bfloat16()
    w = fp8kit.quantize(torch.randn(n, k, device=device), pair[1], role="weight")
    if pair[0] is None:
        return x, None, w.data, w.scale
    x_q = fp8kit.quantize(x, pair[0])
    return x_q.data, x_q.scale, w.data, w.scale


def described(
    operands: Any, pair: Any, bias: Tensor | None, out: torch.dtype, invariant: bool
) -> MatmulProblem:
    """Describe a product."""
    x, _, w, _ = operands
    return MatmulProblem.of(x, w, pair, out, bias, "precise", invariant)


def _say(text: str, status: int = 0) -> int:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
