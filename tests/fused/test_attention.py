"""Attention of one token, compared with float64: masks, chunks, strides, fallbacks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fp8kit.fused import attention
from fp8kit.fused.attention import AttentionProblem
from grids import pairwise
from numerics import ATTENTION_ERROR, assert_bits_equal, relative_error

kernel = pytest.importorskip("fp8kit.fused.triton_attention")
from fp8kit.quantizers.triton_encode import INTERPRETED  # noqa: E402

# batch, heads, key heads, tokens, width of keys and of values
SIZES = (
    (2, 8, 2, 7, 64, 64),
    (1, 4, 4, 129, 128, 128),
    (3, 12, 2, 600, 80, 64),
    (2, 2, 1, 1, 192, 128),
    (1, 40, 1, 256, 16, 256),
)
SCALE = 0.3


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cpu" and not INTERPRETED.value:
        pytest.skip("a GPU is present, so the kernel is compiled for it")
    return device


def operands(
    size: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, shared, tokens, width, value_width = size
    q = torch.randn(batch, 1, heads, width, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(batch, shared, tokens, width, device=device).to(dtype)
    return q, k, torch.randn(batch, shared, tokens, value_width, device=device).to(dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float = SCALE) -> Tensor:
    batch, heads = q.shape[:2]
    groups = q.double().reshape(batch, k.shape[1], heads // k.shape[1], -1)
    seen = torch.ones(1, dtype=torch.bool, device=q.device) if mask is None else mask
    scores = (groups @ k.double().mT * scale).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)
    if mask is not None:
        v = v.masked_fill(~mask.mT, 0.0)
    return (weights @ v.double()).reshape(batch, 1, heads, -1)


@pytest.mark.parametrize(
    ("size", "dtype", "masks"), pairwise(SIZES, (torch.bfloat16, torch.float16), (0, 1, 2))
)
def test_results_are_those_of_float64(
    size: tuple[int, ...], dtype: torch.dtype, masks: int, device: torch.device
) -> None:
    q, k, v = operands(size, device, dtype)
    rows = size[0] if masks == 2 else 1
    mask = None if not masks else torch.rand(rows, 1, 1, size[3], device=device) < 0.7
    if mask is not None:
        mask[..., 0] = True
    y = kernel.attend(q, k, v, mask, SCALE)
    assert y.shape == (size[0], 1, size[1], size[5])
    assert y.is_contiguous()
    assert relative_error(y, exact(q, k, v, mask)) <= ATTENTION_ERROR[dtype]


def test_the_comparison_can_fail(device: torch.device) -> None:
    q, k, v = operands(SIZES[0], device)
    y = kernel.attend(q, k, v, None, 0.1)
    for wrong in (exact(q, k, v, None, 0.12), exact(q, k[:, :, 1:], v[:, :, 1:], None, 0.1)):
        assert relative_error(y, wrong) > ATTENTION_ERROR[torch.bfloat16]


@pytest.mark.parametrize("tokens", [5, 300])
def test_hidden_tokens_are_not_read(tokens: int, device: torch.device) -> None:
    q, k, v = operands((2, 4, 2, tokens, 32, 32), device)
    mask = torch.rand(2, 1, 1, tokens, device=device) < 0.5
    mask[..., 0] = True
    y = kernel.attend(q, k, v, mask, SCALE)
    k.masked_fill_(~mask.mT, torch.nan)
    v.masked_fill_(~mask.mT, torch.inf)
    assert_bits_equal(kernel.attend(q, k, v, mask, SCALE), y)


@pytest.mark.parametrize("tokens", [4, 200])
def test_a_sequence_that_looks_nowhere_gives_zeros(tokens: int, device: torch.device) -> None:
    q, k, v = operands((2, 4, 2, tokens, 32, 32), device)
    mask = torch.ones(2, 1, 1, tokens, dtype=torch.bool, device=device)
    mask[0] = False
    y = kernel.attend(q, k, v, mask, SCALE)
    assert not y[0].any()
    assert y[1].any()
    assert not kernel.attend(q, k[:, :, :0], v[:, :, :0], None, SCALE).any()
    assert kernel.attend(q[:0], k[:0], v[:0], None, SCALE).shape == (0, 1, 4, 32)


def test_bits_depend_neither_on_other_sequences_nor_on_room(device: torch.device) -> None:
    q, k, v = operands((3, 4, 2, 150, 32, 32), device)
    mask = torch.rand(3, 1, 1, 150, device=device) < 0.5
    y = kernel.attend(q, k, v, mask, SCALE)
    assert_bits_equal(kernel.attend(q[1:2], k[1:2], v[1:2], mask[1:2], SCALE), y[1:2])
    room = [torch.cat((x, x.new_full((3, 2, 400, 32), torch.nan)), 2) for x in (k, v)]
    longer = torch.cat((mask, mask.new_zeros(3, 1, 1, 400)), 3)
    assert_bits_equal(kernel.attend(q, *room, longer, SCALE), y)


def test_operands_may_be_apart(device: torch.device) -> None:
    q, k, v = operands((2, 4, 2, 9, 32, 32), device)
    mask = torch.rand(2, 1, 1, 9, device=device) < 0.8
    y = kernel.attend(q, k, v, mask, SCALE)
    apart = [torch.cat((x, x), -1)[..., :32] for x in (q, k, v)]
    turned = [x.mT.contiguous().mT for x in (k, v)]
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    wide = torch.stack((mask, mask), -1)[..., 0]
    for given in ((*apart, mask), (q, *turned, mask), (q, *by_token, mask), (q, k, v, wide)):
        assert_bits_equal(kernel.attend(*given, SCALE), y)
    one = mask[:1].expand(2, 1, 1, 9)
    assert_bits_equal(kernel.attend(q, k, v, one, SCALE), kernel.attend(q, k, v, mask[:1], SCALE))


def test_large_scores_stay_finite(device: torch.device) -> None:
    q, k, v = operands((1, 2, 1, 40, 64, 64), device)
    y = kernel.attend(q * 100, k * 100, v, None, 1.0)
    assert y.isfinite().all()
    chosen = (q * 100).double().squeeze(2) @ (k * 100).double()[0, 0].mT
    assert_bits_equal(y[0, 0], v[0, 0][chosen[0].argmax(-1)])


@pytest.mark.parametrize("attend", [attention.attend, kernel.attend])
def test_there_may_be_no_sequence(attend: Callable[..., Tensor], device: torch.device) -> None:
    q, k, v = operands((0, 4, 2, 5, 16, 32), device)
    assert attend(q, k, v, None, SCALE).shape == (0, 1, 4, 32)


def test_torch_computes_the_same(device: torch.device) -> None:
    q, k, v = operands(SIZES[2], device)
    mask = torch.rand(3, 1, 1, 600, device=device) < 0.7
    y = attention.attend(q, k, v, mask, SCALE)
    assert relative_error(y, exact(q, k, v, mask)) <= ATTENTION_ERROR[torch.bfloat16]


def test_the_operator_takes_what_fits(device: torch.device) -> None:
    q, k, v = operands(SIZES[0], device)
    expected = kernel.attend(q, k, v, None, SCALE)
    torch.library.opcheck(torch.ops.fp8kit.attention_of_one_token, (q, k, v, None, SCALE))
    y = attention.ATTEND(q, k, v, None, SCALE)
    assert relative_error(y, expected.double()) <= 2 * ATTENTION_ERROR[torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 512}, "512"),
        ({"group": 128}, "128 heads"),
    ],
)
def test_what_the_kernel_declines(changes: dict[str, object], reason: str) -> None:
    facts = {
        "group": 4, "head_dim": 64, "value_dim": 64, "dtype": torch.bfloat16,
        "device_type": "cuda", "capability": (9, 0),
    }  # fmt: skip
    assert kernel.supports(AttentionProblem(**facts)) is None  # type: ignore[arg-type]
    said = kernel.supports(AttentionProblem(**facts | changes))  # type: ignore[arg-type]
    assert said is not None
    assert reason in said
