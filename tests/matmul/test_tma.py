"""Operands for the tensor memory accelerator: what fits is passed on, everything else copied."""

from __future__ import annotations

import pytest
import torch

from fp8kit.matmul import tma


@pytest.mark.parametrize("shape", [(7, 3), (1, 5), (8, 1), (1, 1), (130, 33)], ids=str)
def test_scales_by_column_are_kept_and_others_copied(shape: tuple[int, int]) -> None:
    scale = torch.rand(shape)
    moved = tma.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.stride() == (1, -(-shape[0] // 4) * 4)
    assert tma.by_column(moved) is moved


def test_columns_at_other_distances_are_copied() -> None:
    scale = torch.rand(3, 7).t()
    assert scale.stride() == (1, 7)
    moved = tma.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.stride() == (1, 8)


def test_columns_off_a_boundary_are_copied() -> None:
    scale = torch.rand(3, 8).t()[1:6]
    assert scale.stride() == (1, 8)
    moved = tma.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.data_ptr() % tma.ALIGN == 0


@pytest.mark.parametrize("kind", ["fits", "strided", "off a boundary"])
def test_codes_are_aligned(kind: str) -> None:
    memory = torch.randint(0, 127, (4 * 32 + 1,), dtype=torch.uint8)
    codes = {
        "fits": memory[:-1].view(4, 32),
        "strided": memory[:-1].view(4, 32)[:, ::2],
        "off a boundary": memory[1:].view(4, 32),
    }[kind].view(torch.float8_e4m3fn)
    found = tma.aligned(codes)
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert found.is_contiguous()
    assert found.data_ptr() % tma.ALIGN == 0
    assert (found is codes) == (kind == "fits")
