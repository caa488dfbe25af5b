"""Codes, scales and files of the golden checkpoints, implemented independently of the package.

Neither the package nor the safetensors library is used, not even to write a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
}
CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
ARGS = {"num_bits": 8, "type": "float", "symmetric": True}
OUT, DOWN, GATE = (f"model.layers.0.{n}" for n in ("self_attn.o_proj", "mlp.down_proj", "mlp.gate"))
IGNORE = ["lm_head", GATE]
LEFT = {"ignored_layers": IGNORE, "modules_to_not_convert": IGNORE}


@dataclass
class Golden:
    """A checkpoint on disk, and what is in it.

    Args:
        tensors: name on disk to tensor.
        quantization: the quantization config; ``None`` if there is none.
        truth: values of the weight, fp32, by layer.
        schemes: name of the scheme by layer; a single name if all layers have the same.
        dialect: name of the dialect.
        writable: whether the package writes this dialect; it must then write exactly these bytes.
        extra: further JSON files.
        metadata: texts in the safetensors header.
        file: name of the safetensors file.
        inputs: scale of the activations by layer.
        cache: scales of the KV cache.
    """

    dialect: str
    schemes: str | dict[str, str]
    tensors: dict[str, Tensor]
    truth: dict[str, Tensor]
    quantization: dict[str, Any] | None = None
    writable: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    file: str = "model.safetensors"
    inputs: dict[str, float] = field(default_factory=dict)
    cache: dict[str, float] = field(default_factory=dict)


def value_of(byte: int) -> float:
    """Return the value of an e4m3fn code, by the OCP 8-bit floating point specification."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


_VALUES = torch.tensor([0.0 if b & 127 == 127 else value_of(b) for b in range(256)])


def codes(*shape: int, seed: int = 0) -> Tensor:
    """Return bytes that pass through all e4m3fn numbers; NaN is left out."""
    count = torch.arange(math.prod(shape)) * 37 + seed
    return (count % 127 + count // 127 % 2 * 128).to(torch.uint8).view(shape)


def fp8(bytes_: Tensor) -> Tensor:
    return bytes_.view(torch.float8_e4m3fn)


def scales(*shape: int, seed: int = 0) -> Tensor:
    """Return positive numbers without a pattern in their bits."""
    count = torch.arange(math.prod(shape), dtype=torch.float32) + seed
    return (0.01 + (count % 11) / 700).view(shape)


def exponents(*shape: int, seed: int = 0) -> Tensor:
    """Return E8M0 bytes around 1.0."""
    count = torch.arange(math.prod(shape)) + seed
    return (118 + count * 5 % 13).to(torch.uint8).view(shape)


def power(bytes_: Tensor) -> Tensor:
    return torch.tensor([2.0 ** (b - 127) for b in range(255)])[bytes_.long()]


def spread(scale: Tensor, shape: tuple[int, ...], rows: int, cols: int) -> Tensor:
    """Repeat each scale over its rows and columns, and crop the result to the shape."""
    wide = scale.repeat_interleave(rows, -2).repeat_interleave(cols, -1)
    return wide[..., : shape[-2], : shape[-1]]


def values(bytes_: Tensor, scale: Tensor) -> Tensor:
    return _VALUES[bytes_.long()] * scale


def dense_tensors() -> dict[str, Tensor]:
    """Return tensors in high precision: an embedding, a norm, a router."""
    return {
        "model.embed_tokens.weight": (torch.arange(24) / 8).view(3, 8).bfloat16(),
        "model.norm.weight": torch.ones(8).bfloat16(),
        f"{GATE}.weight": (torch.arange(16) / 4).view(2, 8).bfloat16(),
    }


W1, W2 = codes(24, 32), codes(20, 64, seed=5)


def by_tensor(weight_scale: str, input_scale: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return two layers with one weight scale each, and an input scale each if that has a name."""
    tensors, inputs = dense_tensors(), {}
    for i, (layer, w) in enumerate(((OUT, W1), (DOWN, W2))):
        tensors[f"{layer}.weight"] = fp8(w)
        tensors[f"{layer}.{weight_scale}"] = torch.full(shape, 0.015 + i / 64)
        if input_scale:
            inputs[layer] = 0.25 + i / 3
            tensors[f"{layer}.{input_scale}"] = torch.full(shape, inputs[layer])
    truth = {
        OUT: values(W1, torch.full((1, 1), 0.015)),
        DOWN: values(W2, torch.full((1, 1), 0.015 + 1 / 64)),
    }
    return {"tensors": tensors, "truth": truth, "inputs": inputs}


def by_row(weight_scale: str, *, column: bool = True) -> dict[str, Any]:
    s1, s2 = scales(24, 1), scales(20, 1, seed=3)
    tensors = dense_tensors() | {f"{OUT}.weight": fp8(W1), f"{DOWN}.weight": fp8(W2)}
    for layer, s in ((OUT, s1), (DOWN, s2)):
        tensors[f"{layer}.{weight_scale}"] = s if column else s.flatten()
    return {"tensors": tensors, "truth": {OUT: values(W1, s1), DOWN: values(W2, s2)}}


def by_block(weight_scale: str, scale: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """Return a layer of two rows of blocks and one of two columns, both ragged."""
    tensors, truth = dense_tensors(), {}
    for layer, w, shape in ((OUT, codes(136, 24), (2, 1)), (DOWN, codes(16, 200, seed=9), (1, 2))):
        e = exponents(*shape, seed=w.shape[0])
        s = power(e) if scale else scales(*shape)
        tensors |= {f"{layer}.weight": fp8(w), f"{layer}.{weight_scale}": scale(e) if scale else s}
        truth[layer] = values(w, spread(s, tuple(w.shape), 128, 128))
    return {"tensors": tensors, "truth": truth}


def by_mx(weight_scale: str, *, e8m0: bool = False) -> dict[str, Any]:
    tensors, truth = dense_tensors(), {}
    for layer, w in ((OUT, W1), (DOWN, W2)):
        e = exponents(w.shape[0], w.shape[1] // 32)
        stored = e.view(torch.float8_e8m0fnu) if e8m0 else e
        tensors |= {f"{layer}.weight": fp8(w), f"{layer}.{weight_scale}": stored}
        truth[layer] = values(w, spread(power(e), tuple(w.shape), 1, 32))
    return {"tensors": tensors, "truth": truth}


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    """Return a compressed-tensors config, as its documentation lists the keys."""
    group = {
        "targets": ["Linear"],
        "weights": {**ARGS, "dynamic": False, **weights},
        "input_activations": {**ARGS, **inputs} if inputs else None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORE,
        "kv_cache_scheme": None,
        **more,
    }


def write(golden: Golden, folder: Path) -> None:
    """Write one checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    files = dict(golden.extra)
    if golden.quantization is not None:
        files["config.json"] = CONFIG | {"quantization_config": golden.quantization}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    (folder / golden.file).write_bytes(packed(golden.tensors, golden.metadata))


def packed(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file: size of the header, header, data; wide dtypes come first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    data = b""
    for name in sorted(tensors, key=lambda n: (-tensors[n].itemsize, n)):
        raw = tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data
