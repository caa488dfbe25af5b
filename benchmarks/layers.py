"""The layers that benchmarks measure, and their roofline: the least time that a layer can take."""

from __future__ import annotations

from typing import NamedTuple

# (N, K) by model and layer; q/k/v and gate/up are joined
SHAPES = {
    "8b.qkv": (6144, 4096),
    "8b.o": (4096, 4096),
    "8b.gate_up": (28672, 4096),
    "8b.down": (4096, 14336),
    "70b.qkv": (10240, 8192),
    "70b.o": (8192, 8192),
    "70b.gate_up": (57344, 8192),
    "70b.down": (8192, 28672),
    "ds.gate_up": (4096, 7168),
    "ds.down": (7168, 2048),
    "dit.qkv": (9216, 3072),
    # odd: N or K is no multiple of 128, or one is much larger, or the layer cannot fill a GPU
    "odd.bert_fc1": (3072, 768),
    "odd.smollm_qkv": (960, 576),  # SmolLM2 135M: 9 heads and 2 times 3 of 64
    "odd.siglip_fc1": (4304, 1152),  # SigLIP So400m
    "odd.siglip_fc2": (1152, 4304),
    "odd.mamba2_in": (10576, 2560),  # Mamba-2 2.7B: 2 * 5120 + 2 * 128 + 80
    "odd.falcon_qkv": (4672, 4544),  # Falcon 7B: 71 heads and one for k and v, of 64
    "odd.gpt_oss_qkv": (5120, 2880),  # GPT-OSS 20B
    "odd.gpt_oss_o": (2880, 4096),
    "odd.llama2_gate": (11008, 4096),  # Llama 2 7B, not joined
    "odd.llama2_down": (4096, 11008),
    "odd.ds_qkv_a": (2112, 7168),  # DeepSeek V3: ranks 1536 and 512, and 64 of rotary keys
    "odd.ds_kv_b": (32768, 512),
    "odd.vgg16_fc6": (4096, 25088),
    "odd.vgg16_head": (1000, 4096),
    "odd.mamba2_130m_in": (3352, 768),
    "odd.gpt2_xl_head": (50257, 1600),
    "odd.qwen_0.5b_head": (151936, 896),
}
MODELS = {
    "8b": "Llama 8B",
    "70b": "Llama 70B",
    "ds": "DeepSeek V3",
    "dit": "Flux",
    "odd": "odd shapes",
}


class ExpertShape(NamedTuple):
    """A layer of experts with gates: each has weights ``[2 I, H]`` and ``[H, I]``."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def expert_weights(self) -> int:
        """Return the number of weights of one expert."""
        return 3 * self.hidden * self.intermediate


EXPERTS = {
    "Mixtral-8x7B": ExpertShape(8, 2, 4096, 14336),
    "Qwen3-30B-A3B": ExpertShape(128, 8, 2048, 768),
    "Qwen3.5-35B-A3B": ExpertShape(256, 8, 2048, 512),
    "GPT-OSS-120B": ExpertShape(128, 4, 2880, 2880),
    "GLM-4.5-Air": ExpertShape(128, 8, 4096, 1408),
    "DeepSeek-V3-TP8": ExpertShape(256, 8, 7168, 256),
}
# bytes and operations per second that an H200 reaches in practice, not those of its data sheet; an
# H100 has the same cores and slower memory
BANDWIDTH, FLOPS = 4.3e12, 1400e12
_H100_BANDWIDTH = 3.0e12


def bandwidth(device: str) -> float:
    """Return the bytes per second that a device of this name reaches; an H200's if unknown."""
    return _H100_BANDWIDTH if "H100" in device else BANDWIDTH


def chosen(prefixes: str) -> dict[str, tuple[int, int]]:
    """Return the layers whose name starts with one of the prefixes.

    Args:
        prefixes: separated by commas, such as ``"8b,odd.llama2"``, or ``"all"``.

    Raises:
        SystemExit: if no layer starts with a prefix.
    """
    words = [w.strip() for w in prefixes.split(",")]
    for word in words:
        if word != "all" and not (word and any(name.startswith(word) for name in SHAPES)):
            raise SystemExit(f"no layer starts with {word!r}: known are {', '.join(SHAPES)}")
    if "all" in words:
        return SHAPES
    return {name: shape for name, shape in SHAPES.items() if name.startswith(tuple(words))}


def roofline_us(m: int, n: int, k: int) -> float:
    """Return the least microseconds of a linear layer, 16 bit in and out, FP8 weight ``[n, k]``."""
    return max((n * k + 2 * m * k + 2 * m * n) / BANDWIDTH, 2 * m * n * k / FLOPS) * 1e6


def experts_roofline_us(
    shape: ExpertShape, tokens: int, touched: float, speed: float = BANDWIDTH
) -> float:
    """Return the least microseconds of the two GEMMs of a layer of experts.

    Args:
        shape: sizes of the layer.
        tokens: number of tokens; each goes to ``top_k`` experts.
        touched: number of experts that have a token; their FP8 weights are read once.
        speed: bytes per second of the device.
    """
    operations = 2 * tokens * shape.top_k * shape.expert_weights
    return max(touched * shape.expert_weights / speed, operations / FLOPS) * 1e6


def experts_passes_us(shape: ExpertShape, tokens: int, speed: float = BANDWIDTH) -> float:
    """Return the least microseconds of the passes over memory before and after the GEMMs.

    The first one reads the input in 16 bit and writes it in FP8. The last one reads the ``top_k``
    results of each token and writes their sum, in 16 bit.
    """
    return tokens * shape.hidden * (2 + 1 + 2 * shape.top_k + 2) / speed * 1e6
