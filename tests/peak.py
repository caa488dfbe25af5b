"""Load a model in a process of its own and print the memory that it took; run by the tests.

The growth of the resident set counts from just before the load, after the load of a small model
has made whatever is made once. The peak is the kernel's high-water mark, which misses nothing. That
mark includes pages of mapped files, which can be dropped at any time: where Transformers reads the
files itself, by mapping them, anonymous memory (RssAnon) is sampled every millisecond instead.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import threading
from pathlib import Path

import torch
from torch import nn

import fp8kit

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


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
    """Build the whole model in high precision first, which the test's bound must catch."""
    model = on_meta(path, False).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    fp8kit.convert(model)
    return model


def from_pretrained(path: Path) -> nn.Module:
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    model: nn.Module = auto.from_pretrained(path, quantization_config=fp8kit.Fp8KitConfig())
    return model


WAYS = {
    "quantize": lambda path: fp8kit.load(path, on_meta(path, False), scheme="FP8_DYNAMIC"),
    "join": lambda path: fp8kit.load(path, on_meta(path, True), scheme="FP8_DYNAMIC"),
    "mx": lambda path: fp8kit.load(path, on_meta(path, False), scheme="MXFP8"),
    "fp8": lambda path: fp8kit.load(path, on_meta(path, False)),
    "hf-quantize": lambda path: fp8kit.load(path, scheme="FP8_DYNAMIC"),
    "hf-fp8": fp8kit.load,
    "hf-from-pretrained": from_pretrained,
    "naive": naive,
}


class Watched:
    """Measure the most anonymous memory that the process has while the block runs, in bytes."""

    def __enter__(self) -> Watched:
        self.peak, self.over = resident("RssAnon"), threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.over.wait(1e-3):
            self.peak = max(self.peak, resident("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def main(way: str, small: str, large: str) -> None:
    """Load the small checkpoint, then the large one, and print the growth for the large one."""
    torch.set_num_threads(1)
    # memory that malloc keeps after it is freed would count as taken
    malloc = ctypes.CDLL(None)
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        malloc.mallopt(option, 65536)
    warm = WAYS[way](Path(small))
    malloc.malloc_trim(0)  # the load could reuse memory that imports have freed, unseen
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before, own = resident("VmRSS"), resident("RssAnon")
    with Watched() as watched:
        model = WAYS[way](Path(large))
    watched_peak = watched.peak - own
    peak = watched_peak if way == "hf-from-pretrained" else resident("VmHWM") - before
    again = 0
    if not way.startswith(("hf", "naive")):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        fp8kit.load(Path(large), model)
        again = resident("VmHWM") - before
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    result = {"peak": peak, "final": sum(tensors.values()), "reload": again, "warm": bool(warm)}
    result["watched"] = watched_peak
    print(json.dumps(result))  # noqa: T201
