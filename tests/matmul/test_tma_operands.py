"""Operands for TMA (tensor memory accelerator): those that fit are passed on, others copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8kit.matmul import tma_operands


@pytest.mark.parametrize("shape", [(7, 3), (1, 5), (8, 1), (1, 1), (130, 33)], ids=str)
def test_scales_by_column_are_kept_and_others_copied(shape: tuple[int, int]) -> None:
    scale = torch.rand(shape)
    moved = tma_operands.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.stride() == (1, -(-shape[0] // 4) * 4)
    assert tma_operands.by_column(moved) is moved


def test_columns_at_other_distances_are_copied() -> None:
    scale = torch.rand(3, 7).t()
    assert scale.stride() == (1, 7)
    moved = tma_operands.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.stride() == (1, 8)


def test_columns_off_a_boundary_are_copied() -> None:
    scale = torch.rand(3, 8).t()[1:6]
    assert scale.stride() == (1, 8)
    moved = tma_operands.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.data_ptr() % tma_operands.ALIGN == 0


@pytest.mark.parametrize("kind", ["fits", "strided", "off a boundary"])
def test_codes_are_aligned(kind: str) -> None:
    memory = torch.randint(0, 127, (4 * 32 + 1,), dtype=torch.uint8)
    codes = {
        "fits": memory[:-1].view(4, 32),
        "strided": memory[:-1].view(4, 32)[:, ::2],
        "off a boundary": memory[1:].view(4, 32),
    }[kind].view(torch.float8_e4m3fn)
    found = tma_operands.aligned(codes)
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert found.is_contiguous()
    assert found.data_ptr() % tma_operands.ALIGN == 0
    assert (found is codes) == (kind == "fits")


@pytest.mark.parametrize("rows", [1, 4])
def test_gaps_between_rows_of_codes_cost_no_copy(rows: int) -> None:
    memory = torch.randint(0, 127, (rows, 64), dtype=torch.uint8)

    def apart(step: int) -> Tensor:
        return memory.flatten()[: rows * step].view(rows, step)[:, :48]

    for step in (64, 48):
        codes = apart(step)
        assert tma_operands.aligned(codes) is codes
        assert tma_operands.row_pitch(codes) == (step if rows > 1 else 48)
    alike = memory[:1, :48].expand(4, 48)  # TMA cannot load overlapping rows
    assert tma_operands.aligned(alike).is_contiguous()
    odd = tma_operands.aligned(apart(56))
    assert (odd.data_ptr() == memory.data_ptr()) == (rows == 1)
    assert torch.equal(odd, apart(56))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((1, 5), (20, 4)), ((1, 5), (0, 8)), ((6, 1), (1, 1)), ((1, 1), (9, 3))],
    ids=str,
)
def test_a_stride_that_is_never_taken_costs_no_copy(
    shape: tuple[int, int], strides: tuple[int, int]
) -> None:
    scale = torch.rand(64).as_strided(shape, strides)
    moved = tma_operands.by_column(scale)
    assert moved.data_ptr() == scale.data_ptr()
    assert torch.equal(moved, scale)
    assert moved.stride(0) == 1
    assert moved.stride(1) % 4 == 0


def test_columns_that_overlap_are_copied() -> None:
    scale = torch.rand(8).as_strided((8, 3), (1, 0))
    moved = tma_operands.by_column(scale)
    assert torch.equal(moved, scale)
    assert moved.stride() == (1, 8)
