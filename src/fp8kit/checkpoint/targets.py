"""Who shall load a checkpoint: which dialect each target gets, and what it cannot load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fp8kit.checkpoint.dialects import DIALECTS, Dialect
from fp8kit.errors import CheckpointError, did_you_mean, teach
from fp8kit.formats import BLOCK, Scheme

TARGETS: tuple[str, ...] = ("vllm", "sglang", "transformers")
# (scheme, target) -> why it cannot load there whatever the dialect, and what can
REFUSED: dict[tuple[str, str], tuple[str, str]] = {
    ("MXFP8", "vllm"): ("MX checkpoints are not written by this version", "FP8_DYNAMIC"),
    ("MXFP8", "sglang"): ("SGLang has no MXFP8 in compressed-tensors", "FP8_BLOCK or FP8_DYNAMIC"),
    ("MXFP8", "transformers"): ("MX checkpoints are not written by this version", "FP8_DYNAMIC"),
}
# linear layers that the serving engines merge into one, which then has one kind of weight
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_ENGINES = ("vllm", "sglang")


def dialect_for(target: str, scheme: Scheme) -> Dialect:
    """Choose the dialect in which a scheme is written for a target.

    Args:
        target: one of ``TARGETS``.
        scheme: what the layers hold.

    Returns:
        The dialect.

    Raises:
        ValueError: for an unknown target.
        CheckpointError: if the target cannot load the scheme, with the reason and an alternative.

    Example:
        >>> dialect_for("vllm", Scheme.of("FP8_DYNAMIC")).name
        'compressed-tensors'
    """
    if target not in TARGETS:
        raise ValueError(
            teach(
                f"Got target={target!r}.",
                f"Known targets are {', '.join(TARGETS)}.",
                "Pass the program that shall load the checkpoint." + did_you_mean(target, TARGETS),
            )
        )
    if (scheme.name, target) in REFUSED:
        reason, alternative = REFUSED[scheme.name, target]
        raise CheckpointError(
            teach(
                f"Got scheme {scheme} for target {target}.",
                f"It cannot load there: {reason}.",
                f"Convert the model with {alternative}.",
            )
        )
    return DIALECTS[0]


def check_layers(
    target: str,
    scheme: Scheme,
    quantized: Mapping[str, tuple[int, int]],
    dense: Iterable[str],
) -> None:
    """Refuse layers that the target could not load.

    Args:
        target: one of ``TARGETS``.
        scheme: what the quantized layers hold.
        quantized: names and weight shapes ``(N, K)`` of the quantized layers.
        dense: names of the linear layers left in high precision.

    Raises:
        CheckpointError: for 128x128 blocks with ragged edges, and for layers that serving engines
            merge of which only some are quantized.

    Example:
        >>> check_layers("vllm", Scheme.of("FP8_DYNAMIC"), {"a.q_proj": (64, 64)}, ["a.k_proj"])
        Traceback (most recent call last):
        fp8kit.errors.CheckpointError: ...
    """
    ragged = [n for n, shape in quantized.items() if scheme.weight == BLOCK and _ragged(shape)]
    if ragged:
        raise CheckpointError(
            teach(
                f"{len(ragged)} layers have sides that 128 does not divide, e.g. {ragged[0]}.",
                f"{target} loads 128x128 blocks without ragged edges only.",
                "Exclude these layers when converting, or use FP8_DYNAMIC.",
            )
        )
    if target not in _ENGINES:
        return
    left = set(dense)
    for name in quantized:
        parent, _, last = name.rpartition(".")
        for group in _MERGED:
            for sibling in group if last in group else ():
                other = f"{parent}.{sibling}" if parent else sibling
                if other in left:
                    raise CheckpointError(
                        teach(
                            f"{name} is FP8 and {other} is not.",
                            f"{target} merges {', '.join(group)} into one layer of one kind.",
                            "Include or exclude them together, or save for target='transformers'.",
                        )
                    )


def _ragged(shape: tuple[int, int]) -> bool:
    return shape[0] % 128 != 0 or shape[1] % 128 != 0
