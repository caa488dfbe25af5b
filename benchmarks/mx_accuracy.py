"""Measure the accuracy of MX, and what rebasing changes: perplexity, and counts of changed values.

    python benchmarks/mx_accuracy.py --model nano=DIR --model moe=DIR --text FILE

Every linear layer and expert except output head and routers multiplies operands that were quantized
and dequantized, in fp32, so that only the formats differ. Rebasing moves MX codes to a coarser
power-of-two scale. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fp8kit
from fp8kit.formats import BLOCK, GROUP128, MX, ROW, GroupShape, QTensor

LENGTH, BATCH = 512, 4
Fake = Callable[[Tensor], Tensor]


def quantized(group: GroupShape, role: str, rounding: str | None = None) -> Fake:
    def fake(x: Tensor) -> Tensor:
        q = fp8kit.quantize(x, group, role=role, scale_rounding=rounding)
        return fp8kit.dequantize(q, x.dtype)

    return fake


def rebased(group: GroupShape, rounding: str) -> Fake:
    def fake(w: Tensor) -> Tensor:
        q = fp8kit.quantize(w, MX, role="weight", scale_rounding=rounding)
        return fp8kit.dequantize(fp8kit.rebase(q, group).q, w.dtype)

    return fake


def same(x: Tensor) -> Tensor:
    return x


VARIANTS: dict[str, tuple[Fake, Fake]] = {
    "bf16 checkpoint": (same, same),
    "FP8_DYNAMIC": (quantized(ROW, "weight"), quantized(ROW, "activation")),
    "FP8_BLOCK": (quantized(BLOCK, "weight"), quantized(GROUP128, "activation")),
    "MX floor, MX activations": (
        quantized(MX, "weight", "floor"),
        quantized(MX, "activation", "floor"),
    ),
    "MX up, MX activations": (quantized(MX, "weight", "up"), quantized(MX, "activation", "up")),
    "MX floor, 16-bit activations": (quantized(MX, "weight", "floor"), same),
    "MX up, 16-bit activations": (quantized(MX, "weight", "up"), same),
    "MX floor, rebased to rows": (rebased(ROW, "floor"), quantized(ROW, "activation")),
    "MX up, rebased to rows": (rebased(ROW, "up"), quantized(ROW, "activation")),
    "MX up, rebased to blocks": (rebased(BLOCK, "up"), quantized(GROUP128, "activation")),
}


def weights(model: Any) -> dict[str, Tensor]:
    """Return the matrices and stacks of experts that are quantized, by name."""
    head = model.get_output_embeddings().weight
    return {
        name: p
        for name, p in model.named_parameters()
        if p.dim() > 1
        and p is not head
        and not name.endswith(("embed_tokens.weight", "gate.weight"))
    }


@contextmanager
def computing(model: Any, weight: Fake, activation: Fake) -> Iterator[None]:
    """Make a model compute on fake-quantized operands while the block runs."""
    found = weights(model)
    kept = {name: p.data for name, p in found.items()}
    for p in found.values():
        p.data = weight(p.data)
    ours = {p.data.untyped_storage().data_ptr() for p in found.values()}
    dense = F.linear

    def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return dense(activation(x) if w.untyped_storage().data_ptr() in ours else x, w, bias)

    F.linear = linear
    try:
        yield
    finally:
        F.linear = dense
        for name, p in found.items():
            p.data = kept[name]


def perplexity(model: Any, tokens: Tensor) -> float:
    losses = []
    for batch in tokens.split(BATCH):
        logits = model(batch).logits[:, :-1].float()
        losses.append(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    return math.exp(torch.stack(losses).mean().item())


def changes(matrices: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Count what rebasing changes, for both roundings and both granularities."""
    rows = []
    for rounding in ("floor", "up"):
        for name, group in (("row", ROW), ("128x128", BLOCK)):
            changed, values, worst = 0, 0, 0.0
            for matrix in matrices.values():
                q = fp8kit.quantize(matrix, MX, role="weight", scale_rounding=rounding)
                found = fp8kit.rebase(q, group)
                changed, values = changed + found.changed, values + matrix.numel()
                worst = max(worst, found.largest_change)
            rows.append(
                {"rounding": rounding, "group": name, "changed": changed, "values": values,
                     "largest_change": worst}
            )  # fmt: skip
    return rows


def measured(folder: str, text: str, sequences: int) -> dict[str, Any]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    tokens = ids[: sequences * LENGTH].view(-1, LENGTH)
    found = {}
    for name, (weight, activation) in VARIANTS.items():
        with torch.no_grad(), computing(model, weight, activation):
            found[name] = perplexity(model, tokens)
        print(name, found[name], flush=True)
    matrices = {n: p.detach() for n, p in weights(model).items()}
    return {"tokens": tokens.numel(), "perplexity": found, "rebase": changes(matrices)}


def against_integers(blocks: int) -> dict[str, int]:
    """Compare ``quantize`` with plain integers, block by block, over every exponent of fp32."""
    wrong, done = {"floor": 0, "up": 0}, 0
    while done < blocks:
        count = min(20000, blocks - done)
        bits = torch.randint(0, 2**31, (count, 32), generator=torch.Generator().manual_seed(done))
        near = torch.randint(0, 254, (count, 1)) - torch.randint(0, 12, (count, 32))
        keep = torch.rand(count, 1) < 0.2  # blocks of arbitrary exponents; others have close ones
        bits = torch.where(keep, bits, (bits & 0x7FFFFF) | (near.clamp(min=0) << 23))
        sign = torch.randint(0, 2, bits.shape) << 31
        x = (bits | sign).to(torch.int64).clone()
        x = torch.where(x >= 2**31, x - 2**32, x).to(torch.int32).view(torch.float32)
        for rounding in wrong:
            q = fp8kit.quantize(x, MX, scale_rounding=rounding)
            exponents, codes = integers(x, rounding)
            bad = (q.scale.squeeze(1).int() != exponents) | (
                q.data.view(torch.uint8).int() != codes
            ).any(1)
            wrong[rounding] += int(bad.sum())
        done += count
    return {"blocks": done, **{f"wrong_{k}": v for k, v in wrong.items()}}


def integers(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 32 with integers alone, from the text of OCP MX 1.0 and OCP FP8 1.0."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    sign, field, fraction = bits >> 31, bits >> 23 & 255, bits & 0x7FFFFF
    # |x| = mantissa * 2^(place - 150), for normal and subnormal numbers
    mantissa = torch.where(field == 0, fraction, fraction | 0x800000)
    place = field.clamp(min=1)
    unreal = (field == 255).any(1)
    top = (bits & 0x7FFFFFFF).amax(1)
    peak, step = top & 0x7FFFFF, (top >> 23).clamp(min=1)
    peak = torch.where(top >> 23 == 0, peak, peak | 0x800000)
    length = sum((peak >> i > 0).long() for i in range(24))  # |x| < 2^(length + step - 150)
    exponent = length + step - 151 - 8 + 127  # floor(log2(amax)) - emax, biased
    if rounding == "up":  # the least exponent with amax <= 448 * 2^e: 448 = 7 * 2^6
        exact = torch.full_like(peak, -(10**6))
        for shift in (0, 1):
            e = length + step - 151 - 8 + shift
            # peak * 2^(step - 150) <= 7 * 2^(6 + e)
            power = 6 + e - step + 150
            fits = peak << 3 <= (7 << (power + 3).clamp(0, 40))
            exact = torch.where((exact < -(10**5)) & fits, e, exact)
        exponent = exact + 127
    exponent = torch.where(peak == 0, 0, exponent).clamp(0, 254)
    # code of |x| / 2^(e - 127), in steps: x = mantissa * 2^(place - 150 - e + 127)
    power = place - 23 - exponent[:, None]
    width = sum((mantissa >> i > 0).long() for i in range(24))
    binade = (width - 1 + power).clamp(min=-6)  # of the value; the smallest normal one is -6
    drop = binade - 3 - power  # bits below the last one kept
    kept = torch.where(drop > 0, mantissa >> drop.clamp(0, 40), mantissa << (-drop).clamp(0, 30))
    rest = mantissa - (kept << drop.clamp(0, 40))
    half = torch.ones_like(drop) << (drop - 1).clamp(0, 40)
    up = (drop > 0) & ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    up &= drop <= 30  # farther down nothing reaches one half
    kept = torch.where(drop > 30, 0, kept) + up
    code = torch.where(kept >= 8, (binade + 6) * 8 + kept, kept).clamp(max=0x7E)
    code = torch.where(mantissa == 0, 0, code) | sign << 7
    return torch.where(unreal, 255, exponent), torch.where(unreal[:, None], 0x7F, code)


def against_torchao(blocks: int) -> dict[str, int]:
    from torchao.prototype.mx_formats import mx_tensor

    modes = {
        "floor": mx_tensor.ScaleCalculationMode.FLOOR,
        "up": mx_tensor.ScaleCalculationMode.RCEIL,
    }
    found = {"blocks": blocks}
    x = torch.randn(blocks, 32) * torch.randint(-20, 20, (blocks, 1)).float().exp2()
    for rounding, mode in modes.items():
        scale, codes = mx_tensor.to_mx(x.bfloat16(), torch.float8_e4m3fn, 32, mode)
        q = fp8kit.quantize(x.bfloat16(), MX, scale_rounding=rounding)
        same_scale = scale.view(torch.uint8).reshape(-1) == q.scale.reshape(-1)
        same_codes = (codes.view(torch.uint8) == q.data.view(torch.uint8)).all(1)
        found[f"wrong_{rounding}"] = int((~(same_scale & same_codes)).sum())
    return found


def every_distance() -> dict[str, int]:
    """Compare ``rebase`` with fractions, for every code at every distance of exponents."""
    codes = [c for c in range(256) if c & 0x7F != 0x7F]
    value = {c: Fraction(torch.tensor([c], dtype=torch.uint8).view(torch.float8_e4m3fn).item())
             for c in codes}  # fmt: skip
    wrong = changed = pairs = 0
    for distance in range(254):
        data = torch.zeros(1, 64 + 224, dtype=torch.uint8)
        data[0, 0] = 0x7E
        data[0, 32 : 32 + len(codes)] = torch.tensor(codes, dtype=torch.uint8)
        exponents = torch.full((1, 9), 254 - distance, dtype=torch.uint8)
        exponents[0, 0] = 254
        held = fp8kit.rebase(QTensor(data.view(torch.float8_e4m3fn), exponents, MX)).q
        for code, byte in zip(codes, held.data.view(torch.uint8)[0, 32:].tolist(), strict=False):
            exact = value[code] / 2**distance
            pairs, changed = pairs + 1, changed + (exact != value[byte])
            wrong += abs(exact - value[byte]) > Fraction(1, 1024) or (
                (exact * 512).denominator == 1 and abs(exact) >= Fraction(1, 64)
                and exact != value[byte]
            )  # fmt: skip
    return {"pairs": pairs, "changed": changed, "wrong": wrong}


def swizzled(shapes: int) -> dict[str, int]:
    chance, wrong = random.Random(0), 0
    for _ in range(shapes):
        rows, cols = chance.randrange(1, 1000), chance.randrange(1, 60)
        scale = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
        flat = fp8kit.swizzle_scales(scale)
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        place = (r // 128 * -(-cols // 4) + c // 4) * 512
        place += r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        expected = torch.zeros_like(flat).index_copy_(0, place.flatten(), scale.flatten())
        back = fp8kit.unswizzle_scales(flat, scale.shape)
        wrong += not (torch.equal(flat, expected) and torch.equal(back, scale))
    return {"shapes": shapes, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", default=[], help="NAME=DIR")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/mx_accuracy.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = (
        json.loads(options.output.read_text()) if options.output.exists() else {}
    )
    found |= {"torch": torch.__version__, "python": platform.python_version(), "device": "cpu"}
    if options.blocks:
        found["integers"] = against_integers(options.blocks)
        found["torchao"] = against_torchao(100_000)
        found["distances"] = every_distance()
        found["swizzle"] = swizzled(1000)
        noise = torch.randn(4096, 4096) * 0.02
        found["random"] = {"rebase": changes({"w": noise})}
        print({k: found[k] for k in ("integers", "torchao", "distances", "swizzle")}, flush=True)
    text = options.text.read_text() if options.text else ""
    for name, _, folder in (m.partition("=") for m in options.model):
        found.setdefault("models", {})[name] = measured(folder, text, options.sequences)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
