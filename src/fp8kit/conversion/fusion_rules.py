"""Which module feeds which layers: in blocks whose code is known, and by users' own rules.

``"norm1 -> attn.q attn.k attn.v"`` is a link: these three linear layers of a block, in this order,
and nothing else, read the result of its norm or activation ``norm1``. ``"act +> out"``, in known
blocks only, means that ``out`` reads ``act`` behind other columns, as many as ``out`` returns. In a
link without arrow, ``"attn.k attn.v"``, the layers read one tensor. Paths start at the block.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8kit.conversion.calibration import eagerly
from fp8kit.conversion.fusible_modules import computed_activation
from fp8kit.conversion.model_families import BLOCKS
from fp8kit.conversion.patterns import check_expression, names_block
from fp8kit.errors import ConversionError, InvalidType, InvalidValue, some_of

# settings on the path that must be off, where they exist: else other code reads the tensor, too
_OFF: dict[str, tuple[object, ...]] = {
    "fused_projections": (False,),
    "spatial_norm": (None,),
    "group_norm": (None,),
    "residual_connection": (False,),
    "only_cross_attention": (False, None),
    "pos_embed": (None,),
    "norm_type": ("layer_norm",),
    "_chunk_size": (None,),
}
_PROCESSORS = (
    *("FluxAttnProcessor", "JointAttnProcessor2_0", "AttnProcessor2_0"),
    *("Flux2ParallelSelfAttnProcessor", "Flux2KVParallelSelfAttnProcessor"),
)


@dataclass(frozen=True, slots=True)
class Link:
    """Layers of one block that read one tensor, and the module that computes it.

    ``block`` is empty for the model itself. ``producer`` and ``consumers`` are paths in the block,
    consumers in call order; without a producer they only share an input. ``family`` is true for a
    link of ``BLOCKS``, false for a user's. ``concatenated`` is true for ``+>``.
    """

    block: str
    producer: str | None
    consumers: tuple[str, ...]
    family: bool = False
    concatenated: bool = False

    @staticmethod
    def parse(block: str, rule: str, family: bool = False) -> Link:
        """Read ``"producer -> layer layer"`` or ``"layer layer"``, or raise a ``ValueError``."""
        concatenated = family and "+>" in rule
        head, arrow, tail = rule.rpartition("+>" if concatenated else "->")
        sources, layers = head.split(), tail.split()
        if len(sources) != bool(arrow) or len(layers) < (1 if arrow else 2):
            raise InvalidValue(
                f"Got the fusion rule {rule!r}.",
                "A rule is 'norm -> layer layer ...', or 'layer layer ...' with two or more.",
                "Write paths from the block, separated by spaces.",
            )
        source = sources[0] if sources else None
        return Link(block, source, tuple(layers), family, concatenated)

    def name(self, path: str) -> str:
        """Return the qualified name of a path in the block."""
        return f"{self.block}.{path}".strip(".")

    @property
    def source(self) -> str:
        """Qualified name of the producer; of the block, if the link has no producer."""
        return self.name(self.producer or "")

    @property
    def layers(self) -> tuple[str, ...]:
        """Qualified names of the consumers."""
        return tuple(map(self.name, self.consumers))

    def unchanged(self, model: nn.Module) -> list[tuple[nn.Module, str, object]]:
        """Return ``(module, attribute, value)`` on the paths from the block to linked modules."""
        found: dict[tuple[int, str], tuple[nn.Module, str, object]] = {}
        for path in (*self.consumers, *filter(None, [self.producer])):
            module = model.get_submodule(self.block)
            for step in path.split("."):
                settings = ("processor", *_OFF) if self.family else ()
                for name in (*(s for s in settings if hasattr(module, s)), step):
                    found[id(module), name] = (module, name, getattr(module, name))
                module = getattr(module, step)
        return list(found.values())


def family_links(model: nn.Module) -> list[Link]:
    """Return the links of every block whose code is known and has the settings it was read for."""
    links = []
    for name, module in model.named_modules():
        full = f"{type(module).__module__}.{type(module).__qualname__}"
        for pattern, rules in BLOCKS.items():
            if fnmatch.fnmatchcase(full, pattern):
                found = [Link.parse(name, rule, family=True) for rule in rules]
                links += [link for link in found if _is_as_read(model, link)]
    return links


def _is_as_read(model: nn.Module, link: Link) -> bool:
    block = model.get_submodule(link.block)
    if any(_at(block, p) is None for p in (link.producer or "", *link.consumers)):
        return False
    for _, name, value in link.unchanged(model):
        if name in _OFF and value not in _OFF[name]:
            return False
        if name == "processor" and type(value).__name__ not in _PROCESSORS:
            return False
    if link.consumers == ("attn2.to_q",):
        # without encoder states attn2 is self-attention, so that to_k reads the norm as well
        to_q, to_k = _at(block, "attn2.to_q"), _at(block, "attn2.to_k")
        return getattr(to_q, "in_features", 0) != getattr(to_k, "in_features", 0)
    return True


def given_links(model: nn.Module, rules: Mapping[str, Sequence[str]]) -> list[Link]:
    """Return the links of a user's rules, which are listed by patterns of blocks (``names_block``).

    Raises ``ConversionError`` if a pattern matches no module, or a path no linear layer;
    ``ValueError`` if a rule cannot be parsed; and ``TypeError`` for a single rule instead of a
    list.
    """
    names = [name for name, _ in model.named_modules()]
    links = []
    for pattern, texts in rules.items():
        if isinstance(texts, str):
            raise InvalidType(
                f"Got the rule {texts!r} for the blocks {pattern!r}.",
                "Each pattern has a list of rules.",
                f"Pass [{texts!r}].",
            )
        check_expression("fusion", pattern)
        blocks = [n for n in names if names_block(pattern, n)]
        if not blocks:
            raise ConversionError(
                f"The fusion pattern {pattern!r} matches no module.",
                f"The model's modules are {some_of(names[1:])}.",
                "Name the blocks that hold the norms and layers, e.g. 'layers.*'; a '*' stays "
                "within one component of a name, and what follows 're:' is the whole name.",
            )
        links += [Link.parse(block, text) for block in blocks for text in texts]
    for link in links:
        _check_paths(model, link)
    return links


def _check_paths(model: nn.Module, link: Link) -> None:
    block = model.get_submodule(link.block)
    paths = [*((link.producer,) if link.producer else ()), *link.consumers]
    missing = [link.name(p) for p in paths if _at(block, p) is None]
    layers = {p: _at(block, p) for p in link.consumers}
    odd = {p: type(m).__name__ for p, m in layers.items() if not isinstance(m, nn.Linear)}
    other = [f"{link.name(p)} ({kind})" for p, kind in odd.items()]
    widths = {getattr(m, "in_features", 0) for m in layers.values()}
    if missing or other or len(widths) > 1:
        wrong = missing or other or link.layers
        problem = "do not exist" if missing else "are not linear layers" if other else "differ in K"
        raise ConversionError(
            f"Layers of a fusion rule {problem}: {some_of(wrong)}.",
            "Layers that share an input are linear layers of equal K; paths start at their block.",
            "Correct the paths, or narrow the pattern of the blocks.",
        )


def verify_links(
    model: nn.Module, links: Iterable[Link], run: Callable[[nn.Module], object]
) -> None:
    """Run a model with NaN in place of each producer's result, as it will run once fused.

    The consumers get the real tensor; any other reader gets NaN. Raises ``ConversionError`` if
    there is another reader, a consumer got another tensor, or a producer never ran.
    """
    checked = [link for link in links if link.producer is not None]
    watch = _RunWatch(model, checked)
    try:
        with torch.no_grad(), eagerly():
            run(model)
    finally:
        for handle in watch.handles:
            handle.remove()
    watch.check()


class _RunWatch:
    """Hooks that swap tensors for NaN and back, and look for NaN in all inputs and results."""

    def __init__(self, model: nn.Module, links: Sequence[Link]) -> None:
        self.links = links
        self.real: dict[str, tuple[Tensor, Tensor]] = {}  # producer to stand-in and tensor
        self.inputs: dict[str, tuple[Tensor, Tensor]] = {}  # activation to input and a copy
        self.written: tuple[str, str] | None = None
        self.reads: dict[str, int] = {}
        self.stray: tuple[str, list[str]] | None = None
        self.handles: list[Any] = []
        for name, module in model.named_modules():
            self.handles.append(
                module.register_forward_pre_hook(self._inputs(name), with_kwargs=True)
            )
            self.handles.append(module.register_forward_hook(self._outputs(name, module)))

    def check(self) -> None:
        """Raise ``ConversionError`` for the first violation that the run has shown."""
        if self.stray is not None:
            name, live = self.stray
            where = name or "the model"
            self._refuse(f"{where} met NaN: it or code before it reads {some_of(live)}")
        if self.written is not None:
            producer, layer = self.written
            self._refuse(f"the input of {producer} is written before {layer} reads its result")
        for link in self.links:
            made = self.reads.get(link.source, 0)
            for layer in link.layers:
                if not made or self.reads.get(layer, 0) != made:
                    self._refuse(
                        f"{link.source} ran {made} times, and {layer} read its result "
                        f"{self.reads.get(layer, 0)} times"
                    )

    def _refuse(self, what: str) -> None:
        raise ConversionError(
            f"A fusion rule does not hold in the calibration run: {what}.",
            "What a fused norm or activation gives is read by the named layers, once each, and "
            "by nothing else.",
            "Add the missing layers to the rule, or drop it.",
        )

    def _inputs(self, name: str) -> Callable[..., Any]:
        mine = [k.source for k in self.links if name in k.layers]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for producer in mine:
                stand_in, real = self.real.get(producer, (None, None))
                if stand_in is not None and (args or (kwargs.get("input"),))[0] is stand_in:
                    self.reads[name] = self.reads.get(name, 0) + 1
                    if producer in self.inputs and not torch.equal(*self.inputs[producer]):
                        self.written = producer, name
                    return (real,), {}
            self._look(name, (*args, *kwargs.values()))
            return None

        return hook

    def _outputs(self, name: str, module: nn.Module) -> Callable[..., Any]:
        producer = name in {k.source for k in self.links}
        waits = producer and computed_activation(module) is not None  # its consumer computes it

        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            parts = out if isinstance(out, tuple) else (out,)
            self._look(name, parts)
            if not producer:
                return None
            stand_in = torch.full_like(parts[0], torch.nan)
            self.real[name] = (stand_in, parts[0])
            if args and waits:
                self.inputs[name] = (args[0], args[0].clone())
            self.reads[name] = self.reads.get(name, 0) + 1
            return (stand_in, *parts[1:]) if isinstance(out, tuple) else stand_in

        return hook

    def _look(self, name: str, values: Iterable[Any]) -> None:
        known = [stand_in for stand_in, _ in self.real.values()]
        for value in values:
            if self.stray is None and isinstance(value, Tensor) and value.is_floating_point():
                if not any(value is k for k in known) and value.isnan().any():
                    self.stray = (name, list(self.real))


def _at(block: nn.Module, path: str) -> nn.Module | None:
    try:
        return block.get_submodule(path)
    except AttributeError:
        return None
