"""Small checkpoints for tests: the nano model, a tiny ``Ragged`` module, and edits of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8kit
from fp8kit.io.models import save

NANO = Path(__file__).parents[1] / "examples" / "nano"
SHARD = "model.safetensors"


class Ragged(nn.Module):
    """Odd sides, a bias, a tied head, a buffer, and a layer used under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 129)
        self.up = nn.Linear(129, 203)
        self.down = nn.Linear(203, 129, bias=False)
        self.again = self.up
        self.norm = nn.LayerNorm(129)
        self.lm_head = nn.Linear(129, 97, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([3, 4]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.down(torch.relu(self.again(x)))
        return self.lm_head(self.norm(x))


def ragged(dtype: torch.dtype = torch.bfloat16) -> Ragged:
    return Ragged().to(dtype).eval()


def converted(scheme: str = "FP8_DYNAMIC") -> Ragged:
    model = ragged()
    calibrate = (lambda m: m(torch.arange(97))) if scheme == "FP8" else None
    fp8kit.convert(model, scheme, calibrate=calibrate)
    return model


def saved(path: Path, scheme: str = "FP8_DYNAMIC", **options: Any) -> Path:
    save(converted(scheme), path, **options)
    return path


def edit_tensors(path: Path, shard: str = SHARD, **changes: Tensor | None) -> None:
    """Rewrite a shard with other tensors; ``None`` removes one, dots are written as ``__``."""
    state = load_file(path / shard)
    for key, value in changes.items():
        name = key.replace("__", ".")
        state.pop(name, None)
        if value is not None:
            state[name] = value
    save_file(state, path / shard, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps(content))


def all_bytes(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def read(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint."""
    found: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found
