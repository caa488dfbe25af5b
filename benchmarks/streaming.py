"""Time ``quantize_checkpoint``, which streams, against copying the same bytes with safetensors.

python benchmarks/streaming.py benchmarks/results/streaming.json [--gigabytes 1 2 4] [--runs 3]

Makes Llama-shaped bf16 checkpoints of random weights in a temporary folder. Then three kinds of
processes alternate: copies of every file with safetensors (reading and writing bf16) that are left
in the page cache, such copies that are synced to the disk, and ``quantize_checkpoint``, which syncs
all that it writes. Times are taken inside the processes, after imports; the time of a whole
process, with the imports of torch and Transformers, is given as well. Memory is the operating
system's peak for the process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from timing import commit

HIDDEN, INTERMEDIATE, KV, VOCABULARY = 2048, 8192, 512, 32768
SHARD_BYTES = 10**9
PEAK = """
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(time.perf_counter() - start, time.process_time() - busy, peak)
"""
# earlier output is deleted right before, so that no case waits for memory that others filled
CLEAR = """
import os, shutil, sys, time
shutil.rmtree(sys.argv[2], ignore_errors=True)
os.sync()
start, busy = time.perf_counter(), time.process_time()
"""
COPY = """
import os, sys
from pathlib import Path
from safetensors.torch import load_file, save_file
source, destination, sync = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "sync"
CLEAR
destination.mkdir()
for file in sorted(source.glob("*.safetensors")):
    save_file(load_file(file), destination / file.name, metadata={"format": "pt"})
    if sync:
        with (destination / file.name).open("rb") as handle:
            os.fsync(handle)
"""
QUANTIZE = """
import sys
import fp8kit.integrations.transformers_facts
from fp8kit.io.checkpoints import Recipe, quantize_checkpoint
CLEAR
quantize_checkpoint(sys.argv[1], sys.argv[2], Recipe(sys.argv[3]), progress=False)
"""


def main() -> None:
    """Measure every size and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 2, 4])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where there is room; default: temporary")
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "device": f"{processor()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "load_average_before": os.getloadavg()[0],
        "rows": [],
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for size in arguments.gigabytes:
            source = Path(folder) / "source"
            total = make(source, int(size * 1e9))
            for row in measure(Path(folder), source, total, arguments.runs):
                found["rows"].append(row)
                print(json.dumps(row), flush=True)
            shutil.rmtree(source)
            arguments.result.write_text(json.dumps(found, indent=1) + "\n")


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    if Path("/proc/cpuinfo").is_file():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make(folder: Path, wanted: int) -> int:
    """Write a checkpoint of ``wanted`` bytes or more, in ``SHARD_BYTES`` files; return its size."""
    folder.mkdir()
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    layers = 0
    while 2 * sum(a * b for a, b in shapes.values()) < wanted:
        at = f"model.layers.{layers}"
        shapes |= {f"{at}.self_attn.{n}_proj": (HIDDEN, HIDDEN) for n in "qo"}
        shapes |= {f"{at}.self_attn.{n}_proj": (KV, HIDDEN) for n in "kv"}
        shapes |= {f"{at}.mlp.{n}_proj": (INTERMEDIATE, HIDDEN) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj"] = (HIDDEN, INTERMEDIATE)
        layers += 1
    norms = ["model.norm"]
    for n in ("input", "post_attention"):
        norms += [f"model.layers.{i}.{n}_layernorm" for i in range(layers)]
    parts = [{f"{n}.weight": torch.ones(HIDDEN).bfloat16() for n in norms}]
    places: dict[str, int] = {}
    total = 0
    for name, shape in shapes.items():
        if sum(t.nbytes for t in parts[-1].values()) > SHARD_BYTES:
            flush(folder, parts, places)
        # rows of different magnitudes, so that all scales differ
        parts[-1][f"{name}.weight"] = (torch.randn(shape) * torch.rand(shape[0], 1)).bfloat16()
        total += parts[-1][f"{name}.weight"].nbytes
    flush(folder, parts, places)
    count = len(parts) - 1
    index = {n: f"model-{i:05d}-of-{count:05d}.safetensors" for n, i in places.items()}
    for i in range(1, count + 1):
        (folder / f"{i}").rename(folder / f"model-{i:05d}-of-{count:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config(layers)))
    return total


def flush(folder: Path, parts: list[dict[str, torch.Tensor]], places: dict[str, int]) -> None:
    """Write the tensors at hand and start the next file."""
    save_file(parts[-1], folder / str(len(parts)), metadata={"format": "pt"})
    places |= dict.fromkeys(parts[-1], len(parts))
    parts[-1] = {}
    parts.append({})


def config(layers: int) -> dict[str, Any]:
    """Describe the model as Transformers does."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }


def measure(folder: Path, source: Path, total: int, runs: int) -> list[dict[str, Any]]:
    """Time copies and conversions alternately; the first run of each does not count."""
    cases = {
        "copy": (COPY, "cached"),
        "copy_synced": (COPY, "sync"),
        "FP8_DYNAMIC": (QUANTIZE, "FP8_DYNAMIC"),
        "FP8_BLOCK": (QUANTIZE, "FP8_BLOCK"),
        "FP8_TENSOR": (QUANTIZE, "FP8_TENSOR"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    busy: dict[str, list[float]] = {name: [] for name in cases}
    whole: dict[str, list[float]] = {name: [] for name in cases}
    peaks: dict[str, int] = dict.fromkeys(cases, 0)
    for run in range(runs + 1):
        for name, (code, option) in cases.items():
            script = code.replace("CLEAR", CLEAR) + PEAK
            command = [sys.executable, "-c", script, str(source), str(folder / name), option]
            start = perf_counter()
            out = subprocess.run(command, capture_output=True, text=True, check=True)
            process = perf_counter() - start
            time, cpu, peak = out.stdout.split()
            if run:
                seconds[name].append(float(time))
                busy[name].append(float(cpu))
                whole[name].append(process)
                peaks[name] = max(peaks[name], int(peak) * 1024)
    for name in cases:
        shutil.rmtree(folder / name)
    rates = {name: total / statistics.median(found) / 1e9 for name, found in seconds.items()}
    return [
        {
            "gigabytes": total / 1e9,
            "case": name,
            "seconds": seconds[name],
            "cpu_seconds": busy[name],
            "process_seconds": whole[name],
            "gb_per_s": rates[name],
            "of_copy": rates[name] / rates["copy"],
            "of_copy_synced": rates[name] / rates["copy_synced"],
            "peak_gb": peaks[name] / 1e9,
        }
        for name in cases
    ]


if __name__ == "__main__":
    main()
