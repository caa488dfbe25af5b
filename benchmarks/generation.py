"""Time whole language models, real Transformers code, random weights.

    python benchmarks/generation.py llama OUT.json
    python benchmarks/generation.py qwen OUT.json --layers 8

Each variant (bf16, fp8kit, torchao's row-wise FP8) has processes of its own and runs in these ways:

* `forward`: one token, and a long prompt, without a cache, as the model's first calls.
* `generate`: Transformers' greedy decoding with the cache that it makes by itself.
* `compiled`: `generate(cache_implementation="static")`, which compiles the decoding by itself.
* `step`: the forward pass of one token with a static cache, eager.
* `captured`: the same as `step`, in a CUDA graph.
* `prefill`: the forward pass of a long prompt, eager; `prefill captured`: the same in a CUDA graph.

A model with a part of the real one's layers gets the same part of its vocabulary, so that the cost
of the head stays in proportion. Torchao takes part with `TORCHAO=1`, or the folder that holds it.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import fp8kit
from llama_layer import llama_8b
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

PROMPT, LONG_PROMPT = 16, 4096
ROOM = 112  # tokens that fit into a static cache behind the prompt
NEW_TOKENS = {"generate": 24, "compiled": 48}
UNSTEADY = 8  # the first steps of a call, in which graphs may still be recorded
CHOSEN = 1e4  # the score of the forced token, higher than any other
SCHEME = "FP8_DYNAMIC"


@dataclass(frozen=True)
class Model:
    """A language model, of which the benchmark builds some or all layers.

    Args:
        name: name for titles.
        layers: number of layers of the whole model.
        vocabulary: size of the whole model's vocabulary.
        config: returns the configuration of one layer.
        variants: by variant, the ways in which it runs.
    """

    name: str
    layers: int
    vocabulary: int
    config: Callable[[], Any]
    variants: dict[str, tuple[str, ...]]


def qwen3_30b() -> Any:
    """Return the configuration of one layer of Qwen3-30B-A3B."""
    return transformers.Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    )


WAYS = ("forward", "generate", "step", "captured", "prefill", "prefill captured", "compiled")
COMPILED = "compiled"
DECODING = ("generate", "step", "captured", COMPILED)
ATTENTION = "fp8kit attention"  # beside FP8 layers, attention that repeats no keys and values
MODELS = {
    "llama": Model(
        "Llama-8B",
        32,
        128256,
        llama_8b,
        {
            "fp8kit": WAYS,
            ATTENTION: DECODING,
            "torchao": ("compiled",),  # it asks to be compiled
            "bf16": WAYS,
        },
    ),
    # Transformers' own choice is grouped_mm, which `generate` replaces by batched_mm for decoding
    "qwen": Model(
        "Qwen3-30B-A3B",
        48,
        151936,
        qwen3_30b,
        {
            "fp8kit": WAYS,
            ATTENTION: DECODING,
            "bf16": WAYS,
            "bf16 batched_mm": ("step", "captured"),
        },
    ),
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 128}
TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Setup:
    """The model that a process builds.

    Args:
        model: a key of ``MODELS``.
        variant: one of its variants.
        layers: number of layers to build.
        cases: the cases to time; their kernels are compiled while the model is built.
        tiny: build a model that is small enough for a CPU.
    """

    model: str
    variant: str
    layers: int
    cases: tuple[Case, ...]
    tiny: bool = False


def configuration(setup: Setup) -> Any:
    """Return the configuration with some of the layers, and the same part of the vocabulary."""
    model = MODELS[setup.model]
    config = model.config()
    config.num_hidden_layers = setup.layers
    config.vocab_size = -(-model.vocabulary * setup.layers // model.layers // 64) * 64
    for name, size in {**TINY, **TINY_HEADS, **TINY_EXPERTS}.items() if setup.tiny else ():
        if hasattr(config, name):
            setattr(config, name, size)
    return config


@torch.no_grad()
def dense(config: Any, variant: str, device: torch.device) -> Any:
    """Return a bf16 model with the same random weights at every call.

    As in a trained model, each layer adds little to its input. If layers outweighed their inputs,
    rounding errors would grow from layer to layer, and results could not be compared.
    """
    torch.manual_seed(0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.get_input_embeddings().weight.normal_()
    for name, weight in model.named_parameters():
        if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
            weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    if variant.startswith("bf16 "):
        model.set_experts_implementation(variant.removeprefix("bf16 "))
    return model


def build(setup: Setup) -> Language:
    """Build one variant of a model on the GPU, or on the CPU where there is none.

    Raises:
        DeclinedError: if the variant is torchao's and torchao is absent.
        ValueError: if the variant should have FP8 weights and has none.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = configuration(setup)
    first = [case for case in setup.cases if case.way == "forward"]
    if first:
        # one layer runs first: no variant is charged for what torch loads at its first calls
        config.num_hidden_layers = 1
        twin = Language(dense(config, setup.variant, device), device)
        for case in first:
            twin.prepare(case)
        config.num_hidden_layers = setup.layers
    model = dense(config, setup.variant, device)
    if setup.variant.startswith("fp8kit"):
        fp8kit.convert(model, SCHEME)
        if setup.variant == ATTENTION:
            model.set_attn_implementation("fp8kit_sdpa")
        rows = {case.batch * tokens for case in setup.cases for tokens in (case.tokens, PROMPT)}
        fp8kit.warmup(model, m=sorted(rows))
    elif setup.variant == "torchao":
        quantize_by_torchao(model.model)
    check_fp8(model, wanted=not setup.variant.startswith("bf16"))
    return Language(model, device)


class Steps(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that times each step and forces the same tokens for every variant.

    Args:
        tokens: ``[steps, batch, 1]``.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens, self.times = tokens, list[float]()
        self.scores = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores in which the next of the given tokens wins."""
        del input_ids
        self.scores, step = scores, len(self.times)
        self.times.append(time.perf_counter())
        return scores.scatter(1, self._tokens[step], CHOSEN)

    def step_us(self) -> float:
        """Return the mean time of a step, without the first steps."""
        steady = self.times[UNSTEADY:]
        return (steady[-1] - steady[0]) * 1e6 / (len(steady) - 1)


class Language:
    """A causal language model to time, a ``Subject`` of ``processes``."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model, self._device = model, device
        self._calls: dict[Case, Callable[[], Tensor]] = {}
        self._steps: dict[Case, Steps] = {}
        self._decoders: dict[int, Callable[[], Tensor]] = {}

    def about(self) -> dict[str, Any]:
        """Return sizes, and how experts are computed."""
        found: dict[str, Any] = memory(self.model)
        experts = self.model.get_experts_implementation()
        return {**found, "experts": experts} if hasattr(self.model.config, "num_experts") else found

    @torch.no_grad()
    def prepare(self, case: Case) -> Prepared:
        """Run a case until its time is steady.

        Raises:
            RuntimeError: if Transformers should have compiled the decoding and did not.
        """
        call = self._calls[case] = self._call(case)
        found = run_first_calls(call, self._device)
        if case.way != COMPILED:
            return found
        counters = torch._dynamo.utils.counters
        graphs = counters["stats"]["unique_graphs"]
        if not graphs:
            raise RuntimeError("Transformers did not compile the decoding")
        skips = counters["inductor"]["cudagraph_skips"]
        return replace(found, facts={"graphs": graphs, "cudagraph_skips": skips})

    @torch.no_grad()
    def measure(self, case: Case) -> float:
        """Return the microseconds of a forward pass, or of a step of ``generate``."""
        call = self._calls[case]
        if case in self._steps:
            call()
            return self._steps[case].step_us()
        return (
            graph_us(call, self._device) if "captured" in case.way else wall_us(call, self._device)
        )

    def _call(self, case: Case) -> Callable[[], Tensor]:
        if case.way in NEW_TOKENS:
            return self._generation(case)
        if case.way in ("step", "captured"):
            if case.batch not in self._decoders:
                self._decoders[case.batch] = self._decoder(case.batch)
            return self._decoders[case.batch]
        prompt = self.tokens(case.batch, case.tokens)
        options = {"logits_to_keep": 1, "use_cache": case.way != "forward"}
        return lambda: self.model(prompt, **options).logits[:, -1]

    def _generation(self, case: Case) -> Callable[[], Tensor]:
        prompt, count = self.tokens(case.batch, PROMPT), NEW_TOKENS[case.way]
        chosen = self.tokens(case.batch, count).t()[..., None]
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": count}
        if case.way == COMPILED:
            options["cache_implementation"] = "static"
            if self._device.type == "cpu":  # where Transformers compiles only if it is asked to
                options["compile_config"] = transformers.CompileConfig(backend="eager", mode=None)
                options["compile_config"]._compile_all_devices = True

        def generate() -> Tensor:
            steps = self._steps[case] = Steps(chosen)
            choosing = LogitsProcessorList([steps])
            self.model.generate(prompt, do_sample=False, logits_processor=choosing, **options)
            return steps.scores

        return generate

    def _decoder(self, batch: int) -> Callable[[], Tensor]:
        """Return the forward pass of one token behind a prompt, the same token in every call."""
        model, config = self.model, self.model.config
        cache = transformers.StaticCache(config=config, max_cache_len=PROMPT + ROOM)
        model(self.tokens(batch, PROMPT), past_key_values=cache)
        lengths = torch.full((len(cache.layers),), PROMPT, device=self._device)
        for layer, length in zip(cache.layers, lengths.unbind(), strict=True):
            layer.cumulative_length = length  # views of one tensor, so one kernel resets the cache
        token = self.tokens(batch, 1)

        def decode() -> Tensor:
            lengths.fill_(PROMPT)
            return model(token, past_key_values=cache).logits[:, -1]

        return decode

    def tokens(self, batch: int, count: int) -> Tensor:
        """Return random ids ``[batch, count]``, the same ones at every call."""
        generator = torch.Generator().manual_seed(batch * count)
        most = self.model.config.vocab_size
        return torch.randint(most, (batch, count), generator=generator).to(self._device)


def cases(ways: Sequence[str], batches: Sequence[int], prompt: int) -> list[Case]:
    """Return the lines of the table."""
    found = []
    for way in ways:
        found += [Case(way)] if way == "forward" else []
        long = way == "forward" or way.startswith("prefill")
        found += [Case(way, 1, prompt)] if long else [Case(way, batch) for batch in batches]
    return found


def plans(
    model: str, layers: int, every: Sequence[Case], tiny: bool, variants: Sequence[str] = ()
) -> list[Plan]:
    """Return the processes to start; each compiles at most one model.

    The first process of a variant also takes all cases that are not compiled.

    Args:
        model: a key of ``MODELS``.
        layers: number of layers to build.
        every: the lines of the table.
        tiny: build a model that is small enough for a CPU.
        variants: some or all of the model's variants. Quantized ones come first, because they take
            more memory while they are built than later.
    """
    found = []
    compiled = [case for case in every if case.way == COMPILED]
    others = [case for case in every if case.way != COMPILED]
    for variant, ways in MODELS[model].variants.items():
        if variants and variant not in variants:
            continue
        groups = [[*others, *compiled[:1]], *([case] for case in compiled[1:])]
        for group in groups:
            chosen = tuple(case for case in group if case.way in ways)
            if chosen:
                setup = Setup(model, variant, layers, chosen, tiny)
                found.append(Plan(variant, chosen, functools.partial(build, setup)))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a model and write the result file after each line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="how many of the model's; all if not said")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--variants", nargs="+", default=(), help="some of the columns")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt", type=int, default=LONG_PROMPT)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=150, help="seconds to prepare one phase")
    parser.add_argument("--tiny", action="store_true", help="a model for a try on a CPU")
    chosen = parser.parse_args(argv)
    model = MODELS[chosen.model]
    layers = chosen.layers or model.layers
    every = cases(chosen.ways, chosen.batches, chosen.prompt)
    processes = plans(chosen.model, layers, every, chosen.tiny, chosen.variants)
    if not processes:
        parser.error(f"variants of {chosen.model} are {', '.join(model.variants)}")
    threads = max(2, (os.cpu_count() or 1) // len(processes))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    config = configuration(Setup(chosen.model, "bf16", layers, (), chosen.tiny))
    facts = {
        "what": f"{model.name} shape, {layers} of {model.layers} layers, random weights",
        "vocabulary": f"{config.vocab_size} of {model.vocabulary}",
        "scheme": SCHEME,
        "transformers": transformers.__version__,
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
    }

    def write(rows: list[dict[str, Any]], variants: dict[str, Any]) -> None:
        write_results(chosen.out, rows, variants=variants, **facts)

    phases = [[case for case in every if (case.way == COMPILED) == late] for late in (False, True)]
    compare(processes, phases, write, chosen.rounds, chosen.limit)


if __name__ == "__main__":
    main()
