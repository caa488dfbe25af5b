"""The decision for every layer and its reason: one record per layer, as table, text or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fp8kit.errors import ConversionError, counted, teach

if TYPE_CHECKING:
    from torch import nn

ALREADY = "already FP8"
TIED = "its weight is tied to another parameter"
_MIB = 2**20


def tied_to(parameter: str) -> str:
    """Return the reason for a layer whose weight is tied to ``parameter``."""
    return f"its weight is tied to {parameter}"


@dataclass(slots=True)
class Record:
    """One layer's decision.

    Args:
        name: qualified module name.
        kind: class of the module.
        shape: shape of its weight.
        action: ``"convert"`` or ``"skip"``.
        reason: why it is skipped, or what to know about the conversion; may be empty.
        bytes_before: size of its parameters now.
        bytes_after: size of its parameters after conversion.
        aliases: other names under which the same module is used.
        warning: the reason deserves attention; ``strict`` turns it into an error.
        experts: how many matrices each stack of a module of experts has; 0 for a linear layer.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    action: str
    reason: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    aliases: tuple[str, ...] = ()
    warning: bool = False
    experts: int = 0

    @property
    def is_fp8(self) -> bool:
        """Whether the layer was FP8 already before the conversion."""
        return self.kind == "Fp8Linear" or (self.experts > 0 and self.reason == ALREADY)

    def skip(self, reason: str, warning: bool = False) -> None:
        """Turn the decision to convert this layer into a skip."""
        self.action, self.reason, self.warning = "skip", reason, warning
        self.bytes_after = self.bytes_before


@dataclass(slots=True)
class Report:
    """All decisions about one model, and the sizes that follow from them.

    Args:
        scheme: name of the scheme.
        records: one per layer that was examined, excluded ones too, in model order.
        model_bytes_before: size of all parameters and buffers before.
        notes: sentences about the whole model.
        groups: names of layers that share one quantized input, in call order.
        fused: names of norms, activations, routers and others that got fused kernels.
        model: the converted copy of the model, if one was asked for.

    Example:
        >>> report = fp8kit.convert(model)
        >>> print(report.summary())
    """

    scheme: str
    records: list[Record] = field(default_factory=list)
    model_bytes_before: int = 0
    notes: list[str] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    fused: list[str] = field(default_factory=list)
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def converted(self) -> list[Record]:
        """Records of the layers that become FP8."""
        return [r for r in self.records if r.action == "convert"]

    @property
    def linears(self) -> list[Record]:
        """Records of the linear layers that become FP8."""
        return [r for r in self.converted if not r.experts]

    @property
    def stacks(self) -> list[Record]:
        """Records of the modules of experts that become FP8."""
        return [r for r in self.converted if r.experts]

    @property
    def skipped(self) -> list[Record]:
        """Records of the layers that stay as they are."""
        return [r for r in self.records if r.action == "skip"]

    @property
    def model_bytes_after(self) -> int:
        """Size of all parameters and buffers after conversion."""
        return self.model_bytes_before + sum(r.bytes_after - r.bytes_before for r in self.converted)

    def nothing(self) -> str:
        """Say that no layer is FP8, and why; empty if one is, or will be."""
        if self.converted or any(r.is_fp8 for r in self.records):
            return ""
        if not self.skipped:
            return teach(
                "No layer becomes FP8: the model holds no linear layer.",
                "FP8 takes over nn.Linear layers and stacks of experts.",
                "Pass the model that holds them.",
            )
        return teach(
            f"No layer becomes FP8: {self.reasons()}.",
            "FP8 takes over linear layers, and stacks of experts, that nothing keeps dense.",
            "print(fp8kit.plan(model)) lists every layer with its reason.",
        )

    def reasons(self) -> str:
        """Return the three most frequent reasons of skipped layers, with counts."""
        found = Counter(r.reason for r in self.skipped).most_common(3)
        return ", ".join(f"{reason} ({count})" for reason, count in found) or "it holds none"

    def refuse_blocked(self) -> None:
        """Carry out ``strict``: raise if a considered layer cannot be converted.

        The ``ConversionError`` names all such layers. Raises it also if no layer would become FP8.
        """
        blocked = [r for r in self.skipped if r.warning]
        if blocked:
            lines = "\n".join(f"  {r.name}: {r.reason}" for r in blocked)
            layers = counted(len(blocked), "layer")
            raise ConversionError(
                f"strict=True, and {layers} cannot be converted:\n{lines}\n",
                "Every considered layer must be convertible.",
                "Exclude these layers by name, or drop strict.",
            )
        if nothing := self.nothing():
            raise ConversionError(nothing)

    def summary(self) -> str:
        """Return one line: scheme, number of layers, and bytes before and after."""
        fp8 = [r for r in self.records if r.action == "convert" or r.is_fp8]
        high = self.model_bytes_before - sum(r.bytes_before for r in fp8)
        share = high / self.model_bytes_before if self.model_bytes_before else 0.0
        stacks = f" and {counted(len(self.stacks), 'module')} of experts" if self.stacks else ""
        return (
            f"{self.scheme}: {counted(len(self.linears), 'layer')}{stacks} converted, "
            f"{len(self.skipped)} skipped; "
            f"{self.model_bytes_before / _MIB:.1f} MiB -> {self.model_bytes_after / _MIB:.1f} MiB; "
            f"{share:.0%} of the original bytes stay in high precision"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return {
            "scheme": self.scheme,
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "notes": list(self.notes),
            "groups": [list(g) for g in self.groups],
            "fused": list(self.fused),
            "records": [asdict(r) for r in self.records],
        }

    def _sharing(self, name: str) -> str:
        for group in self.groups:
            if name in group:
                others = (n.rpartition(".")[2] for n in group if n != name)
                return f"shares its input with {', '.join(others)}"
        return ""

    def __str__(self) -> str:
        rows = [("layer", "weight", "action", "MiB", "note")]
        for r in self.records:
            size = f"{r.bytes_before / _MIB:.2f}"
            if r.action == "convert":
                size += f" -> {r.bytes_after / _MIB:.2f}"
            also = f"also {', '.join(r.aliases)}" if r.aliases else ""
            note = "; ".join(filter(None, (r.reason, also, self._sharing(r.name))))
            rows.append((r.name, "x".join(map(str, r.shape)), r.action, size, note))
        notes = list(self.notes)
        if self.fused:
            notes.append(f"Fused on a GPU, {len(self.fused)} in all: {', '.join(self.fused)}.")
        return "\n".join([table(rows), *notes, self.summary()])


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Lay out rows of text in columns; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)
