"""MX checkpoints: MXFP8 weights that other scales hold well, badly or not at all; MXFP4 weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import fp8kit
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.formats import MX, QTensor

N, K = 128, 256
CONFIG = {
    "quantization_config": {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
    }
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K, bias=False)
        nn.init.normal_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def directory(path: Path, weights: dict[str, QTensor]) -> Path:
    tensors = {f"{n}.weight": q.data for n, q in weights.items()}
    tensors |= {f"{n}.weight_scale_inv": q.scale for n, q in weights.items()}
    tensors["up.bias"] = torch.zeros(N)
    layout = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
    write_checkpoint(path, layout, tensors.items(), config=CONFIG)
    return path


def trained() -> dict[str, QTensor]:
    torch.manual_seed(0)
    shapes = {"up": (N, K), "down": (K, N)}
    found = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape) * 0.02
        weight[weight.abs() < 1e-4] = 0  # the smallest values of a row would lose bits
        found[name] = fp8kit.quantize(weight, MX, role="weight")
    return found


def outlying(kind: str) -> dict[str, QTensor]:
    """Return weights of which ``up`` has columns, or values in every group, far larger."""
    found = trained()
    wild = torch.randn(N, K) * 0.02
    wild[:, : 128 if kind == "columns" else 1] *= 2.0**12
    if kind == "everywhere":
        wild[:, ::64] *= 2.0**14
    return found | {"up": fp8kit.quantize(wild, MX, role="weight")}


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CT = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
                "group_size": 32, "dynamic": False, "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": ["lm_head"],
}  # fmt: skip


def packed(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes ``[..., K / 2]``, exponents ``[..., K / 32]``, and their values."""
    codes = torch.randint(0, 16, shape)
    exponents = torch.randint(110, 124, (*shape[:-1], shape[-1] // 32))
    values = torch.tensor([*E2M1, *(-v for v in E2M1)])[codes]
    values = values * 2.0 ** (exponents - 127).repeat_interleave(32, -1)
    pairs = codes[..., 0::2] + 16 * codes[..., 1::2]  # the first value is the low half
    return pairs.to(torch.uint8), exponents.to(torch.uint8), values
