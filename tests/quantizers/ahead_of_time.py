"""Compile quantizers and fused kernels for sm90 without a GPU; print resources and counts as JSON.

The launchers run on a CPU. Instead of starting its kernel, a launch compiles it with the arguments
that it would pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from ahead import compiled_for, counts, dumped
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, TENSOR, GroupShape, min_scale
from fp8kit.fused import triton as fused_triton
from fp8kit.fused import triton_activations, triton_norms, triton_plain_norm
from fp8kit.fused.problem import CodesFormat
from fp8kit.quantizers import triton as plain
from fp8kit.quantizers import triton_groups, triton_rows, triton_tensor

E4M3 = torch.float8_e4m3fn
GROUPS = {"row": ROW, "group": GROUP128, "column": GROUP128, "static": TENSOR}
PLAIN = (triton_groups, triton_rows, triton_tensor)
# cases that mask columns, by a constant or by a loop's bound; only these are disassembled, because
# that takes half a second each
DISASSEMBLED = (
    *(f"{kind} 1025 row {dtype}" for kind in ("rms", "gated") for dtype in ("bf16", "fp16")),
    *("gelu 14336 row", "quantize 14336 row", "quantize 14336 block"),
)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "u8",
}
COUNTED = {
    "divisions": r"\bdiv\.(?:rn|full)",
    "barriers": r"\bbar(?:rier)?\.(?:cta\.)?sync",
    "paired_maxima": r"max\.[su]16x2",
    "paired_products": r"fma\.rn\.bf16x2",
    "conversions_to_codes": r"cvt\.rn\.satfinite\.e4m3x2",
    "waits": r"griddepcontrol\.wait",
    "prefetches": r"cp\.async\.bulk\.prefetch\.L2",
    "prefetches_before_the_wait": r"cp\.async\.bulk\.prefetch\.L2(?s:.*)griddepcontrol\.wait",
}


def main() -> None:
    """Print one JSON object: counts by case."""
    found = {}
    for module in (*PLAIN, triton_activations, triton_norms, triton_plain_norm):
        module.overlaps = lambda device: True  # as on the GPU that kernels are compiled for
    for name, case in cases().items():
        compiled: list[Any] = []
        JITFunction.run = lambda self, *a, _to=compiled, **k: _to.append(built(self, a, k))
        case()
        (kernel,) = compiled
        found[name] = counts(kernel, COUNTED)
        if name in DISASSEMBLED:
            found[name]["relus"] = dumped(kernel.asm["cubin"], "-sass").count(".RELU")
    sys.stdout.write(json.dumps(found) + "\n")


def cases() -> dict[str, Callable[[], object]]:
    """Return the launches by name: a producer, K and the granularity."""
    todo: dict[str, Callable[[], object]] = {}
    for k in (4096, 8192):
        x, w = torch.empty(4096, k).bfloat16(), torch.empty(k).bfloat16()
        pair = (w[None], w[None])
        for kind, group in GROUPS.items():
            t = codes_format(group, kind)
            if k == 4096 or kind == "row":
                todo[f"rms {k} {kind}"] = lambda x=x, w=w, t=t: fused_triton.rms_norm(
                    x, None, w, 1e-6, 0.0, "stepwise", t
                )
            if k == 4096 and kind in ("row", "static"):
                todo[f"add_rms {k} {kind}"] = lambda x=x, w=w, t=t: fused_triton.rms_norm(
                    x, x, w, 1e-6, 0.0, "stepwise", t
                )
            if k == 8192 or kind == "row":
                todo[f"adaptive {k} {kind}"] = lambda x=x, p=pair, t=t: fused_triton.layer_norm(
                    x[None], None, None, p, 1e-6, "stepwise", t
                )
    for rows, k in ((64, 8192), (4096, 128)):
        x, w = torch.empty(rows, k).bfloat16(), torch.empty(k).bfloat16()
        todo[f"plain {k}"] = lambda x=x, w=w: fused_triton.rms_normed(x, w, 1e-6, 0.0, "stepwise")
    for dtype in (torch.bfloat16, torch.float16):  # a last tile that one column reaches
        x, w = torch.empty(512, 1025, dtype=dtype), torch.empty(1025, dtype=dtype)
        t, name = codes_format(ROW, "row"), f"1025 row {TYPES[dtype]}"
        todo[f"rms {name}"] = lambda x=x, w=w, t=t: fused_triton.rms_norm(
            x, None, w, 1e-6, 0.0, "stepwise", t
        )
        todo[f"gated {name}"] = lambda x=x, t=t: fused_triton.activation("silu", x, x, t)
    x, w = torch.empty(4096, 4096).bfloat16(), torch.empty(4096).bfloat16()
    mx = CodesFormat(None, MX, E4M3, 0.0, None, "floor", "column")
    todo["rms 4096 mx column"] = lambda x=x: fused_triton.rms_norm(
        x, None, w, 1e-6, 0.0, "stepwise", mx
    )
    wide = torch.empty(4096, 14336).bfloat16()
    for kind, group in GROUPS.items():
        t = codes_format(group, kind)
        todo[f"gelu 14336 {kind}"] = lambda t=t: fused_triton.activation("gelu", wide, None, t)
        if kind != "static":
            options = (group, E4M3, t.min_scale, None, "exact", t.scale_layout)
            todo[f"quantize 14336 {kind}"] = lambda o=options: plain.quantize(wide, *o)
    block = (BLOCK, E4M3, min_scale(BLOCK, E4M3, "weight"), None, "exact")
    todo["quantize 14336 block"] = lambda: plain.quantize(wide, *block)
    todo["quantize 14336 static"] = lambda: plain.quantize_static(
        wide, torch.empty(1, 1), TENSOR, E4M3
    )
    return todo


def codes_format(group: GroupShape, kind: str) -> CodesFormat:
    """Return the ``CodesFormat`` of a fused kernel: how it quantizes its result."""
    scale = torch.empty(1, 1) if group == TENSOR else None
    layout = "column" if kind == "column" else "row"
    floor = min_scale(group, E4M3, "activation")
    return CodesFormat(scale, group, E4M3, floor, None, "exact", layout)


def built(kernel: Any, arguments: tuple[object, ...], options: dict[str, Any]) -> Any:
    """Compile as the launcher would, for sm90: ones are constants, multiples of 16 are known."""
    signature, constants, known = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[i] if i < len(arguments) else options.pop(name)
        counts = i < len(arguments) and type(value) is int and name not in ("M", "rows_per_batch")
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        elif i >= len(arguments) or value is None or (counts and value == 1):
            signature[name], constants[(i,)] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (counts and int(str(value)) % 16 == 0):
            known[(i,)] = [["tt.divisibility", 16]]
    chosen = {k: v for k, v in options.items() if k not in ("grid", "warmup") and v is not None}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=known)
    return compiled_for((9, 0), source, chosen)


if __name__ == "__main__":
    main()
