"""Time a stack of Flux blocks, diffusers' own code, random weights.

    python benchmarks/diffusion.py OUT.json

Every variant runs in a process of its own: bf16, fp8kit, torchao's row-wise FP8, and diffusers' own
FP8, `enable_layerwise_casting`, which stores weights in FP8 and multiplies in bf16. By default
torchao has Inductor tune its kernels by coordinate descent, which takes minutes here; `torchao
untuned` does not. `eager` is the model as it is, `compiled` the model after
`compile_repeated_blocks`, as diffusers recommends. The host waits for each of these calls. In a
`loop` it waits once in eight, as pipelines queue their denoising steps. `captured` is the compiled
model in a CUDA graph, without the host's time.
Torchao takes part with `TORCHAO=1`, or the folder that holds it.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

import fp8kit
from peers import quantize_by_torchao
from processes import (
    Case,
    Plan,
    Prepared,
    check_fp8,
    compare,
    graph_us,
    memory,
    run_first_calls,
    wall_us,
)
from timing import write_results

UNTUNED = "torchao untuned"
VARIANTS = ("fp8kit", "torchao", UNTUNED, "layerwise casting", "bf16")
WAYS = ("eager", "compiled", "loop", "captured")
STEPS = 8  # calls of a loop
SCHEME = "FP8_DYNAMIC"
DOUBLE, SINGLE = 19, 38  # blocks of Flux


@dataclass(frozen=True)
class Setup:
    """The model that a process builds.

    Args:
        variant: one of ``VARIANTS``.
        double: number of blocks that process text and image apart.
        single: number of blocks that process them jointly.
        image: number of tokens of the image.
        text: number of tokens of the prompt.
        backend: backend of ``torch.compile``.
        tiny: build a model that is small enough for a CPU.
    """

    variant: str
    double: int
    single: int
    image: int
    text: int
    backend: str = "inductor"
    tiny: bool = False


def transformer(setup: Setup, device: torch.device) -> Any:
    """Return a bf16 model with the same random weights at every call."""
    torch.manual_seed(0)
    sizes = {"attention_head_dim": 32, "num_attention_heads": 4} if setup.tiny else {}
    sizes |= {"joint_attention_dim": 128, "axes_dims_rope": (8, 12, 12)} if setup.tiny else {}
    blocks = {"num_layers": setup.double, "num_single_layers": setup.single}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # fp32 parameters of three variants would not fit
    try:
        with device:
            model = diffusers.FluxTransformer2DModel(**blocks, guidance_embeds=True, **sizes)
    finally:
        torch.set_default_dtype(before)
    return model.to(torch.bfloat16).eval()


def build(setup: Setup) -> Stack:
    """Build one variant on the GPU, or on the CPU where there is none.

    Raises:
        DeclinedError: if the variant is torchao's and torchao is absent.
        ValueError: if the variant should have FP8 weights and has none.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # a small model runs first: no variant is charged for what torch loads at its first calls
    twin = Stack(transformer(replace(setup, double=1, single=1), device), setup, device)
    twin.prepare(Case("eager", 1, setup.image))
    model = transformer(setup, device)
    if setup.variant == "fp8kit":
        fp8kit.convert(model, SCHEME)
        fp8kit.warmup(model, m=[setup.text, setup.image, setup.text + setup.image])
    elif setup.variant in ("torchao", UNTUNED):
        for blocks in (model.transformer_blocks, model.single_transformer_blocks):
            quantize_by_torchao(blocks, tuned=setup.variant != UNTUNED)
    elif setup.variant == "layerwise casting":
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16)
    check_fp8(model, wanted=setup.variant != "bf16")
    return Stack(model, setup, device)


class Stack:
    """A transformer to time, a ``Subject`` of ``processes``."""

    def __init__(self, model: Any, setup: Setup, device: torch.device) -> None:
        self._model, self._setup, self._device = model, setup, device
        self._run, self._compiled = self._call(), False

    def about(self) -> dict[str, Any]:
        """Return sizes."""
        return memory(self._model)

    @torch.no_grad()
    def prepare(self, case: Case) -> Prepared:
        """Run the model until its time is steady; a compiled model stays compiled.

        Raises:
            RuntimeError: if the model should have been compiled and was not.
        """
        if case.way == "eager":
            return run_first_calls(self._run, self._device)
        if not self._compiled:
            self._model.compile_repeated_blocks(backend=self._setup.backend)
            self._compiled = True
        found, counters = run_first_calls(self._run, self._device), torch._dynamo.utils.counters
        if not counters["stats"]["unique_graphs"]:
            raise RuntimeError("torch.compile gave no graph")
        breaks = sum(counters["graph_break"].values())
        return replace(found, facts={**counters["stats"], "graph_breaks": breaks})

    @torch.no_grad()
    def measure(self, case: Case) -> float:
        """Return the microseconds of a forward pass."""
        if case.way == "captured":
            return graph_us(self._run, self._device)
        return wall_us(self._run, self._device, in_a_row=STEPS if case.way == "loop" else 1)

    def _call(self) -> Callable[[], Tensor]:
        setup, config = self._setup, self._model.config
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            numbers = torch.randn(*shape, generator=generator)
            return numbers.to(self._device, torch.bfloat16)

        inputs = {
            "hidden_states": random(1, setup.image, config.in_channels),
            "encoder_hidden_states": random(1, setup.text, config.joint_attention_dim),
            "pooled_projections": random(1, config.pooled_projection_dim),
            "img_ids": torch.zeros(setup.image, 3, device=self._device),
            "txt_ids": torch.zeros(setup.text, 3, device=self._device),
            "timestep": torch.full((1,), 0.5, device=self._device, dtype=torch.bfloat16),
            "guidance": torch.full((1,), 3.5, device=self._device, dtype=torch.bfloat16),
        }
        inputs["img_ids"][:, 1] = torch.arange(setup.image, device=self._device)
        return lambda: self._model(**inputs, return_dict=False)[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the result file after each line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--double", type=int, default=4, help="blocks of text and image apart")
    parser.add_argument("--single", type=int, default=8, help="blocks that join them")
    parser.add_argument("--image", type=int, default=4096, help="tokens of the image")
    parser.add_argument("--text", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=90, help="seconds to prepare one way")
    parser.add_argument("--tiny", action="store_true", help="a model for a try on a CPU")
    chosen = parser.parse_args(argv)
    blocks = (chosen.double, chosen.single, chosen.image, chosen.text)
    lines = [Case(way, 1, chosen.image) for way in chosen.ways]
    plans = [
        Plan(
            v,
            tuple(lines),
            functools.partial(build, Setup(v, *blocks, chosen.backend, chosen.tiny)),
        )
        for v in chosen.variants
    ]
    threads = max(2, (os.cpu_count() or 1) // len(plans))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    facts = {
        "what": f"Flux shape, {chosen.double} of {DOUBLE} and {chosen.single} of {SINGLE} blocks, "
        f"{chosen.image} tokens of an image and {chosen.text} of text, random weights; in a loop "
        f"the host waits once in {STEPS} calls, as pipelines queue their denoising steps",
        "scheme": SCHEME,
        "diffusers": diffusers.__version__,
    }

    def write(rows: list[dict[str, Any]], variants: dict[str, Any]) -> None:
        write_results(chosen.out, rows, variants=variants, **facts)

    compare(plans, [[line] for line in lines], write, chosen.rounds, chosen.limit)


if __name__ == "__main__":
    main()
