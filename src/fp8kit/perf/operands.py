"""Layers to measure: shapes of models, random operands, and the calls of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8kit import functional
from fp8kit.dispatch.backends import choose
from fp8kit.errors import InvalidValue
from fp8kit.formats import QTensor, Scheme, fp8_format
from fp8kit.matmul.problem import DECODING, MATMUL_BACKENDS, MatmulProblem
from fp8kit.modules.entries import quantize_weight
from fp8kit.ops import bodies
from fp8kit.ops.validation import default_rounding
from fp8kit.perf.timing import copies_past_cache

Shape = tuple[int, int]

# (N, K) of the layers that people run; layers that read the same input are joined
MODEL_SHAPES: dict[str, tuple[Shape, ...]] = {
    "Llama 8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama 70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "Qwen 7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Qwen 32B": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "Mistral Small": ((6144, 5120), (5120, 4096), (65536, 5120), (5120, 32768)),
    "DeepSeek V3": (
        (4096, 7168),
        (7168, 2048),
        (2112, 7168),
        (24576, 1536),
        (32768, 512),
        (7168, 16384),
        (36864, 7168),
        (7168, 18432),
    ),
    "Flux": ((9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288), (21504, 3072)),
    "Wan 14B": ((15360, 5120), (5120, 5120), (13824, 5120), (5120, 13824)),
    "Llama 2 7B": ((11008, 4096), (4096, 11008)),
    "GPT-OSS 20B": ((5120, 2880), (2880, 4096)),
    "Falcon 7B": ((4672, 4544),),
    "Mamba-2 2.7B": ((10576, 2560),),
    "Mamba-2 130M": ((3352, 768),),
    "SigLIP So400m": ((4304, 1152), (1152, 4304)),
    "BERT base": ((3072, 768),),
    "SmolLM2 135M": ((960, 576),),
    "VGG-16": ((4096, 25088), (1000, 4096)),
    "GPT-2 XL": ((50257, 1600),),
    "Qwen 0.5B": ((151936, 896),),
    "small": ((1024, 1024), (2048, 2048), (4096, 1024), (1024, 4096)),
}


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of a layer: an input, and so many copies of the weight that no cache holds them.

    ``x`` is bf16 ``[M, K]``, ``input_scale`` is for static schemes, ``accum`` is ``"precise"`` or
    ``"fast"``.
    """

    scheme: Scheme
    x: Tensor
    weights: Sequence[QTensor]
    input_scale: Tensor | None
    accum: str

    def problem(self) -> MatmulProblem:
        """Describe the layer's product, as dispatch sees it."""
        x, scheme = self.x, self.scheme
        codes = None if scheme.activation is None else scheme.dtype
        groups = (scheme.activation, scheme.weight)
        options = (x.dtype, None, self.accum, False, codes)
        return MatmulProblem.of(x, self.weights[0].data, groups, *options)

    @property
    def rounding(self) -> str:
        """The rounding of the input's scales."""
        return default_rounding(self.scheme.activation, self.scheme.ue8m0)

    def quantized(self) -> tuple[Tensor, Tensor | None]:
        """Quantize the input as the layer does."""
        activation, dtype = self.scheme.activation, self.scheme.dtype
        how = (self.input_scale, None, self.rounding)
        return bodies.quantize_input(self.x, activation, dtype, *how)

    def layer(self, backend: str, configuration: str = "") -> Callable[[int], Tensor]:
        """Return the whole layer on one backend: quantize the input, multiply by copy ``i``."""
        x, w = self.scheme.activation, self.scheme.weight
        groups = (None if x is None else (x.rows, x.cols), (w.rows, w.cols))
        options = (*groups, self.rounding, self.accum, False)

        def run(i: int) -> Tensor:
            weight = self.weights[i]
            constants = (weight.data, weight.scale, None, self.input_scale, None)
            return bodies.linear(
                self.x, *constants, *options, backend=backend, configuration=configuration
            )

        return run


def operands(
    dense: Sequence[Tensor], m: int, scheme: Scheme, accum: str, weights: Sequence[QTensor] = ()
) -> Operands:
    """Quantize copies of a weight and draw an input.

    ``dense`` are copies of a bf16 weight ``[N, K]``, ``weights`` the quantized copies, if they
    exist already.
    """
    x = torch.randn(m, dense[0].shape[1], device=dense[0].device, dtype=torch.bfloat16)
    scale = None
    if scheme.static:
        scale = (x.abs().max().float() / fp8_format(scheme.dtype).max).reshape(1, 1)
    return Operands(scheme, x, weights or [quantize_weight(w, scheme) for w in dense], scale, accum)


def dense_weights(shape: Shape, device: torch.device) -> list[Tensor]:
    """Draw so many copies of a bf16 weight ``(N, K)`` that no cache holds their FP8 codes."""
    n, k = shape
    copies = copies_past_cache(n * k, device)
    return [torch.randn(n, k, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]


def dense_layer(x: Tensor, weights: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """Return the bf16 layer with which FP8 is compared."""
    return lambda i: F.linear(x, weights[i])


def candidates(problem: MatmulProblem) -> list[tuple[str, str]]:
    """Return backend and configuration of every candidate for a problem.

    Backends that decode the weight first are candidates only where no other one fits.
    """
    found = []
    for name, *_ in MATMUL_BACKENDS:
        chosen = choose(MATMUL_BACKENDS, replace(problem, configuration=None), name).implementation
        if chosen is not None:
            found += [(name, cut) for cut in ("", *chosen.configurations(problem))]
    fitting = [c for c in found if c[0] not in DECODING]
    return fitting or [c for c in found if c[0] != "reference"] or found


def parse_shapes(text: str) -> list[Shape]:
    """Read shapes: ``NxK`` or names of ``MODEL_SHAPES``, separated by commas."""
    shapes: list[Shape] = []
    for word in (w.strip() for w in text.split(",")):
        if word in MODEL_SHAPES:
            shapes += MODEL_SHAPES[word]
            continue
        try:
            n, k = map(int, word.lower().split("x"))
        except ValueError:
            n = k = 0
        if n < 1 or k < 1:
            raise InvalidValue(
                f"Got the shape {word!r}.",
                f"Shapes are NxK, or one of {', '.join(MODEL_SHAPES)}.",
                "Write output features first, e.g. 4096x14336.",
            )
        shapes.append((n, k))
    return list(dict.fromkeys(shapes))


def exact_rows(operand: Operands, rows: Tensor) -> Tensor:
    """Multiply some rows of the dequantized operands in fp32: the result to compare with.

    ``rows`` are int64 indices of rows of the input; the result is fp32 ``[len(rows), N]``.
    """
    data, scale = operand.quantized()
    weight = functional.dequantize(operand.weights[0])
    if scale is None or operand.scheme.activation is None:
        x = data.index_select(0, rows).float()
    else:
        q = QTensor(data, scale, operand.scheme.activation)
        x = functional.dequantize(q).index_select(0, rows)
    return x @ weight.t()
