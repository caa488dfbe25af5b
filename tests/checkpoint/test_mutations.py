"""Mutated configs, headers and names: each is read, or refused as damage; nothing else happens."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import torch

from fp8kit.checkpoint.dialects import Source
from fp8kit.checkpoint.schema.pairing import Reading, interpret
from golden.generate import goldens
from golden.layout import Golden

CASES = 3000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 32, 128, 10**30, 0.5, float("nan"), float("inf")),
    *("", "x", "fp8", "tensor", "re:(", "re:.*", "a" * 5000, "1x32", "128x128", "FP8", "E4M3"),
    *([], [[]], [1], [128, 128], [float("nan"), 2], ["a"], {}, {"a": {}}, {"_type": "PerBlock"}),
)
DTYPES = (torch.float8_e4m3fn, torch.float32, torch.uint8, torch.int8, torch.float8_e8m0fnu)


def places(content: Any) -> list[tuple[Any, Any]]:
    """List every place in a JSON document as its holder and its key."""
    found = []
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        found.append((content, key))
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


def mutate(content: Any, chance: random.Random) -> None:
    holder, key = chance.choice(places(content))
    if chance.random() < 0.15 and isinstance(holder, dict):
        holder[str(chance.choice(VALUES))] = holder.pop(key)
    elif chance.random() < 0.15:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(chance.choice(VALUES))


def source_of(golden: Golden) -> Source:
    config = {"quantization_config": golden.quantization} if golden.quantization else {}
    kinds = {n: (t.dtype, tuple(t.shape)) for n, t in golden.tensors.items()}
    documents = copy.deepcopy(golden.extra)
    config |= documents.pop("config.json", {})
    return Source(copy.deepcopy(config), kinds, documents, dict(golden.metadata))


def mutated(source: Source, chance: random.Random) -> Source:
    """Change one value in a config, one description in a header, or one tensor."""
    what = chance.random()
    document = {"config": source.config, "documents": dict(source.documents)}
    metadata, kinds = dict(source.metadata), dict(source.kinds)
    if metadata and what < 0.6:
        name = chance.choice(list(metadata))
        described = json.loads(metadata[name])
        if isinstance(described, dict | list) and described:
            mutate(described, chance)
        metadata[name] = json.dumps(described) if chance.random() < 0.9 else metadata[name][:-2]
    elif what < 0.6:
        mutate(document, chance)
    else:
        name = chance.choice(list(kinds))
        dtype, shape = kinds.pop(name)
        sides = [chance.choice((0, 1, 2, 3, 128, 2**40, n)) for n in shape]
        new = chance.choice((name, f"{name}_inv", f"{name}_scale", name.replace("scale", "weight")))
        kinds[new] = (chance.choice((dtype, *DTYPES)), tuple(sides[: chance.choice((1, 2, 3, 9))]))
    config, documents = document.get("config"), document.get("documents")
    return Source(
        config if isinstance(config, dict) else {},
        kinds,
        {n: d for n, d in documents.items() if isinstance(d, dict)}
        if isinstance(documents, dict)
        else {},
        metadata,
    )


def sound(found: Reading, source: Source) -> bool:
    """Return whether every tensor is accounted for and every layer has what it needs."""
    if found.problems:
        return all(isinstance(p, str) and len(p) < 10_000 for p in found.problems)
    for layer in found.layers.values():
        names = [n for n in (layer.weight, layer.scale, layer.input_scale) if n is not None]
        if not all(n in found.tensors for n in names):
            return False
        if layer.scheme.static != (layer.input_scale is not None):
            return False
    return set(found.tensors.values()) <= set(source.kinds)


def test_mutations_are_read_or_refused() -> None:
    chance, all_goldens = random.Random(0), list(goldens().values())
    refused = 0
    for _ in range(CASES):
        source = mutated(source_of(chance.choice(all_goldens)), chance)
        found = interpret(source)
        assert sound(found, source)
        refused += bool(found.problems)
    assert CASES / 10 < refused < CASES * 9 / 10


def test_the_originals_are_sound() -> None:
    for name, golden in goldens().items():
        if "-" in name and "fp4" in name:  # which the reader unpacks before it interprets the rest
            continue
        found = interpret(source_of(golden))
        assert found.problems == []
        assert sound(found, source_of(golden))
