"""Load a model in a process of its own and print what it took: run as a script by the tests.

The growth of the resident set is counted from just before the load, after a small one has warmed
up whatever is made once; the kernel's high-water mark sees what lived between two looks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import fp8kit


def resident(field: str) -> int:
    """Read VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


class Block(nn.Module):
    def __init__(self, width: int, joined: bool) -> None:
        super().__init__()
        if joined:
            self.gate_up_proj = nn.Linear(width, 4 * width, bias=False)
        else:
            self.gate_proj = nn.Linear(width, 2 * width, bias=False)
            self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)


def on_meta(path: Path, joined: bool) -> nn.Module:
    shape = json.loads((path / "shape.json").read_text())
    with torch.device("meta"):
        blocks = [Block(shape["width"], joined) for _ in range(shape["blocks"])]
        return nn.Sequential(*blocks).bfloat16()


def naive(path: Path) -> nn.Module:
    """What the bound must catch: the whole model in high precision first."""
    model = on_meta(path, False).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    fp8kit.convert(model)
    return model


WAYS = {
    "quantize": lambda path: fp8kit.load(path, on_meta(path, False), scheme="FP8_DYNAMIC"),
    "join": lambda path: fp8kit.load(path, on_meta(path, True), scheme="FP8_DYNAMIC"),
    "fp8": lambda path: fp8kit.load(path, on_meta(path, False)),
    "hf-quantize": lambda path: fp8kit.load(path, scheme="FP8_DYNAMIC"),
    "hf-fp8": fp8kit.load,
    "naive": naive,
}


def main(way: str, small: str, large: str) -> None:
    """Load the small checkpoint, then the large one, and print the growth for the large one."""
    torch.set_num_threads(1)
    warm = WAYS[way](Path(small))
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = resident("VmRSS")
    model = WAYS[way](Path(large))
    peak = resident("VmHWM") - before
    again = 0
    if not way.startswith(("hf", "naive")):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        fp8kit.load(Path(large), model)
        again = resident("VmHWM") - before
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    result = {"peak": peak, "final": sum(tensors.values()), "reload": again, "warm": bool(warm)}
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
