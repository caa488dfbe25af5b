"""The plan of a streamed conversion: all bytes of the result are planned before one is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fp8kit.checkpoint.dialects import JsonObject, Source, Spec
from fp8kit.checkpoint.exporting import on_disk, with_quantization
from fp8kit.checkpoint.schema.naming import named
from fp8kit.checkpoint.schema.pairing import interpret
from fp8kit.checkpoint.schema.targets import dialect_for, output_heads
from fp8kit.checkpoint.storage.layout import Layout, Shard, plan_shards
from fp8kit.checkpoint.storage.matrices import Matrix
from fp8kit.checkpoint.storage.reader import STEMS, Checkpoint
from fp8kit.checkpoint.streaming.layer_selection import Selection
from fp8kit.checkpoint.streaming.recipe import Recipe
from fp8kit.errors import CheckpointError
from fp8kit.formats import FLOATS, TENSOR, Scheme
from fp8kit.modules.parameters import empty_tensors


@dataclass(frozen=True, slots=True)
class Item:
    """One weight to quantize, or one tensor to copy.

    ``name`` and ``dtype`` are those of the codes, or of the copy; ``scale`` names the scales, and
    is empty for a copy.
    """

    name: str
    matrix: Matrix
    scale: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``first`` to ``last`` (exclusive) of an item, which one worker handles in one go."""

    item: Item
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Bytes of the source."""
        return (self.last - self.first) * self.item.matrix.row_bytes


@dataclass(frozen=True, slots=True)
class Work:
    """A whole conversion: what is written where, and from what.

    ``layout`` has every tensor of the result, ``items`` the weights to quantize and the tensors to
    copy, by the name on disk of codes or copy.
    """

    scheme: Scheme
    layout: Layout
    shards: tuple[Shard, ...]
    items: dict[str, Item]
    config: JsonObject = field(default_factory=dict)

    def items_of(self, index: int) -> list[Item]:
        """List the items of one shard, in the order of the source."""
        found = [self.items[n] for n in self.shards[index].starts if n in self.items]
        return sorted(found, key=lambda i: (i.matrix.shard, i.matrix.offset))

    def source_bytes(self, index: int) -> int:
        """Return the source bytes of one shard; those that are read twice count once."""
        return sum(i.matrix.nbytes for i in self.items_of(index))

    def slices(self, index: int) -> Iterator[Slice]:
        """Cut the work for one shard into slices of whole groups, about ``SLICE_BYTES`` each.

        A weight with one scale is one slice: its maximum has to be known before its first code.
        """
        group = self.scheme.weight
        for item in self.items_of(index):
            matrix = item.matrix
            if item.scale and group == TENSOR:
                yield Slice(item, 0, matrix.rows)
                continue
            for first, last in matrix.slices(group.rows if item.scale else 1):
                yield Slice(item, first, last)

    def digest(self) -> str:
        """Return a hash of the whole plan: equal plans write equal files."""
        found = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for shard in self.shards:
            found.update(shard.file.encode())
            found.update(shard.header)
        for name in sorted(self.items):
            found.update(repr(self.items[name]).encode())
        return found.hexdigest()


def plan_work(checkpoint: Checkpoint, recipe: Recipe, choice: Selection) -> Work:
    """Lay out the result of a conversion.

    Raises ``CheckpointError`` if tensors of the source would be taken for scales of the result.
    """
    scheme = recipe.resolved
    dialect = dialect_for(recipe.target, scheme, checkpoint.config)
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    items = {}
    for layer, matrix in choice.matrices.items():
        places = []
        for kind, empty in empty_tensors((matrix.rows, matrix.cols), scheme, "meta").items():
            name, stored = on_disk(named(layer, kind), empty, dialect, scheme)
            layout[name] = (stored.dtype, tuple(stored.shape))
            places.append(name)
        items[places[0]] = Item(places[0], matrix, places[1], scheme.dtype)
    for name in choice.copies:
        if name in layout:
            raise _left_over(checkpoint, f"{name} would be in the result twice.")
        info = checkpoint.tensors[name]
        dtype = (recipe.dtype or info.dtype) if info.dtype in FLOATS else info.dtype
        layout[name] = (dtype, info.shape)
        items[name] = Item(name, Matrix.of(info), "", dtype)
    high = recipe.dtype or checkpoint.dtype
    heads = dict.fromkeys(output_heads(choice.matrices), scheme)
    quantization = dialect.render(Spec(scheme, tuple(choice.ignore), others=heads))
    config = with_quantization(checkpoint.config, quantization, high)
    # raised now, and not when the finished files are read back
    for problem in interpret(Source(config, layout)).problems:
        raise _left_over(checkpoint, f"The result could not be read: {problem}")
    stem = next((s for s in STEMS if checkpoint.shards[0].startswith(s)), STEMS[0])
    texts = {name: text for name, text in checkpoint.metadata.items() if "hash" not in name}
    shards = plan_shards(layout, recipe.max_shard_bytes, stem, texts)
    return Work(scheme, layout, tuple(shards), items, config)


def _left_over(checkpoint: Checkpoint, what: str) -> CheckpointError:
    return CheckpointError(
        what,
        "Weights in high precision have no scales beside them.",
        f"Remove the tensors that an earlier quantization left in {checkpoint.path}.",
    )
