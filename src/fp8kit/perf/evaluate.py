"""Measure how far an FP8 model is from its dense original, layer by layer and at the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8kit.conversion.calibration import watching
from fp8kit.conversion.report import table
from fp8kit.errors import InvalidType, InvalidValue, check_number
from fp8kit.modules.linear import Fp8Linear

Batch = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any]
_WORST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error of one FP8 layer.

    Args:
        name: qualified name in the model.
        sqnr: signal-to-noise ratio in dB of the layer alone: both layers get the input that the
            dense one gets in its model. About 28 dB for W8A8 on well-behaved data.
        drift: the same in dB, but each layer gets the input of its own model, so the errors of all
            earlier layers count too; ``None`` where the two models did not call the layer alike.
    """

    name: str
    sqnr: float
    drift: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What ``evaluate`` measured.

    Args:
        layers: every FP8 layer that ran, those with the largest errors of their own first.
        output_sqnr: signal-to-noise ratio of the model's output in dB; NaN where the two models
            return different shapes, because they compute a length.
        kl: mean over tokens of KL(reference || model) in nats; ``None`` without logits.
        agreement: share of the tokens for which both rank the same token first, or ``None``.
        perplexity: that of the model; ``None`` unless batches have ``labels`` or ``input_ids``.
        reference_perplexity: that of the reference, likewise.
    """

    layers: tuple[LayerError, ...]
    output_sqnr: float
    kl: float | None
    agreement: float | None
    perplexity: float | None
    reference_perplexity: float | None

    def exclusions(self, min_sqnr: float) -> list[str] | None:
        """Return the layers whose own signal-to-noise ratio is below a bound, to leave them dense.

        Args:
            min_sqnr: the least signal-to-noise ratio of a layer, in dB.

        Returns:
            Names for ``exclude=`` of ``fp8kit.convert``, noisiest first. ``None`` stands for none:
            an empty list would switch the default exclusions off.

        Raises:
            ValueError: if ``min_sqnr`` is no finite number.

        Example:
            >>> fp8kit.convert(model, exclude=evaluation.exclusions(20))
        """
        check_number("min_sqnr", min_sqnr)
        return [layer.name for layer in self.layers if not layer.sqnr >= min_sqnr] or None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("layer", "SQNR dB", "drift dB")]
        for layer in self.layers[:_WORST_SHOWN]:
            drift = "" if layer.drift is None else f"{layer.drift:.1f}"
            rows.append((layer.name, f"{layer.sqnr:.1f}", drift))
        lines = [table(rows)]
        if len(self.layers) > _WORST_SHOWN:
            lines.append(f"({_WORST_SHOWN} worst of {len(self.layers)})")
        lines.append(f"output: SQNR {self.output_sqnr:.1f} dB")
        if self.kl is not None and self.agreement is not None:
            lines.append(
                f"next token: KL {self.kl:.2e} nats, first choice equal {self.agreement:.2%}"
            )
        if self.perplexity is not None and self.reference_perplexity is not None:
            change = self.perplexity / self.reference_perplexity - 1
            lines.append(
                f"perplexity: {self.reference_perplexity:.4f} -> {self.perplexity:.4f} "
                f"({change:+.2%})"
            )
        return "\n".join(lines)


def evaluate(model: nn.Module, reference: nn.Module, data: Iterable[Batch]) -> Evaluation:
    """Run an FP8 model and its dense original on the same data, and measure the difference.

    Both run in evaluation mode, without gradients, batch by batch. To measure drift, the layers'
    outputs for one batch are kept in memory. Where outputs have ``logits``, next tokens are
    compared, too, except those that an ``attention_mask`` excludes.

    Args:
        model: holds ``Fp8Linear`` layers.
        reference: the dense model, with the same names; on any device.
        data: batches: a tensor, positional arguments in a tuple or list, or keyword arguments in a
            mapping, all on the device of the models. The caller draws all random inputs.

    Returns:
        An ``Evaluation``: ``print`` it.

    Raises:
        TypeError: if one of the two is no module, or ``data`` is one batch instead of several.
        ValueError: if there is no FP8 layer or no data, if no FP8 layer ran, or if ``reference``
            lacks one of the layers, or has it in FP8 too.

    Example:
        >>> dense = copy.deepcopy(model)
        >>> fp8kit.convert(model)
        >>> print(fp8kit.evaluate(model, dense, [{"input_ids": ids}]))
    """
    for name, module in (("model", model), ("reference", reference)):
        if not isinstance(module, nn.Module):
            raise InvalidType(
                f"Got a {type(module).__name__} as {name}.",
                "The FP8 model and the dense one are compared.",
                "Pass both modules, then the batches.",
            )
    if isinstance(data, Tensor | Mapping | str | bytes) or not isinstance(data, Iterable):
        raise InvalidType(
            f"Got data of type {type(data).__name__}.",
            "It must be a list, or another iterable, of batches.",
            "Pass [batch].",
        )
    pairs = _pairs(model, reference)
    own, drift = {n: _Noise() for n in pairs}, {n: _Noise() for n in pairs}
    output, tokens = _Noise(), _Tokens()
    with torch.no_grad(), _evaluating(model), _evaluating(reference):
        for batch in data:
            seen: dict[str, list[Tensor]] = {name: [] for name in pairs}
            with watching(reference, pairs, _isolated(pairs, own, seen)):
                expected = _call(reference, batch)
            with watching(model, pairs, _drifting(drift, seen)):
                got = _call(model, batch)
            for name, left in seen.items():
                if left:  # the reference called the layer more often than the model
                    drift[name].valid = False
            output.add(_main_tensor(expected), _main_tensor(got))
            tokens.add(expected, got, batch)
    layers = [
        LayerError(n, own[n].sqnr(), drift[n].sqnr() if drift[n].valid else None)
        for n in pairs
        if own[n].calls
    ]
    if not layers:
        raise InvalidValue(
            f"No FP8 layer of {type(model).__name__} ran.",
            "data holds batches that reach the FP8 layers.",
            "Pass a list with at least one batch, e.g. [{'input_ids': ids}].",
        )
    layers.sort(key=lambda layer: (not math.isnan(layer.sqnr), layer.sqnr))
    return Evaluation(tuple(layers), output.sqnr(), *tokens.result())


class _Noise:
    """Energy of a signal and of its error."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.calls, self.valid = 0, True

    def add(self, expected: Tensor, got: Tensor) -> None:
        if expected.shape != got.shape:  # after another routing, or with a computed length
            self.valid = False
            return
        expected, got = expected.double(), got.to(expected.device).double()
        if expected.isinf().any():  # from a mask
            kept = ~(expected.isinf() & (expected == got))
            expected, got = expected[kept], got[kept]
        self.signal += expected.square().sum().item()
        self.noise += (got - expected).square().sum().item()
        self.calls += 1

    def sqnr(self) -> float:
        if not self.valid:
            return math.nan
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


class _Tokens:
    """Sums over the tokens of two models that return logits."""

    def __init__(self) -> None:
        self.kl = self.equal = self.compared = 0.0
        self.losses, self.predicted = torch.zeros(2, dtype=torch.float64), 0

    def add(self, expected: Any, got: Any, batch: Batch) -> None:
        wanted, found = getattr(expected, "logits", None), getattr(got, "logits", None)
        if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
            return
        if wanted.shape != found.shape:
            return
        p = wanted.float().log_softmax(-1)
        q = found.float().to(p.device).log_softmax(-1)
        kept = _kept_tokens(batch, p)
        ratio = torch.where(p == q, 0.0, p - q)  # also where a mask makes both -inf
        self.kl += (p.exp() * ratio).sum(-1)[kept].sum().item()
        self.equal += (p.argmax(-1) == q.argmax(-1))[kept].sum().item()
        self.compared += kept.sum().item()
        labels = _labels(batch, p)
        if labels is None:
            return
        asked = (labels[:, 1:] != -100) & kept[:, 1:]
        for i, log_probability in enumerate((p, q)):
            chosen = log_probability[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
            self.losses[i] -= chosen[asked].sum().item()
        self.predicted += int(asked.sum().item())

    def result(self) -> tuple[float | None, float | None, float | None, float | None]:
        kl = agreement = perplexity = reference = None
        if self.compared:
            kl, agreement = self.kl / self.compared, self.equal / self.compared
        if self.predicted:
            reference, perplexity = (self.losses / self.predicted).exp().tolist()
        return kl, agreement, perplexity, reference


def _pairs(model: nn.Module, reference: nn.Module) -> dict[str, Fp8Linear]:
    """Return the FP8 layers by name; raise unless ``reference`` has each as a dense layer."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Fp8Linear)}
    if not layers:
        raise InvalidValue(
            f"{type(model).__name__} holds no Fp8Linear.",
            "The model to evaluate has FP8 layers.",
            "Pass the converted model first and the dense one second.",
        )
    dense = dict(reference.named_modules())
    unfit = [n for n in layers if n not in dense or isinstance(dense[n], Fp8Linear)]
    if unfit:
        named = ", ".join(unfit[:3])
        raise InvalidValue(
            f"The reference has no dense layer for {len(unfit)} FP8 layers: {named}.",
            "It must be the dense original of the model, with the same names.",
            "Copy the model before fp8kit.convert, or load the original checkpoint.",
        )
    return layers


def _isolated(
    layers: dict[str, Fp8Linear], own: dict[str, _Noise], seen: dict[str, list[Tensor]]
) -> Callable[[str, Tensor, Tensor], None]:
    def compare(name: str, x: Tensor, y: Tensor) -> None:
        layer = layers[name]
        x = x.to(layer.codes.device)
        layer.check_input(x)
        own[name].add(y, layer.compute(x))
        seen[name].append(y)

    return compare


def _drifting(
    drift: dict[str, _Noise], seen: dict[str, list[Tensor]]
) -> Callable[[str, Tensor, Tensor], None]:
    def compare(name: str, _: Tensor, y: Tensor) -> None:
        if seen[name]:
            drift[name].add(seen[name].pop(0), y)
        else:
            drift[name].valid = False

    return compare


@contextmanager
def _evaluating(model: nn.Module) -> Any:
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _call(model: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _main_tensor(output: Any) -> Tensor:
    """Return the logits of an output, or its first float tensor."""
    logits = getattr(output, "logits", None)
    leaves = [logits] if isinstance(logits, Tensor) else tree_leaves(output)
    found = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
    if not found:
        raise InvalidValue(
            f"The model returned {type(output).__name__} without a float tensor.",
            "Outputs are compared by their first float tensor.",
            "Pass a model, or a small module around it, that returns a tensor.",
        )
    return found[0]


def _kept_tokens(batch: Batch, logits: Tensor) -> Tensor:
    """Return which positions ``[...]`` of logits ``[..., V]`` are not padding."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1]:
        return mask.to(logits.device).bool()
    return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)


def _labels(batch: Batch, logits: Tensor) -> Tensor | None:
    """Return the tokens ``[B, T]`` whose successors ``logits [B, T, V]`` predict, if given."""
    if not isinstance(batch, Mapping) or logits.ndim != 3:
        return None
    labels = batch.get("labels", batch.get("input_ids"))
    if not isinstance(labels, Tensor) or labels.shape != logits.shape[:-1]:
        return None
    # logits over other classes do not predict tokens
    return labels.to(logits.device) if (labels < logits.shape[-1]).all() else None
