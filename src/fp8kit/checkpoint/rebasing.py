"""Which MX weights of a checkpoint can be rebased to coarser scales, and how others are written."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fp8kit.checkpoint.dialects import COMPRESSED_TENSORS
from fp8kit.checkpoint.loading.merged_weights import Fp8Weight, rows_of
from fp8kit.checkpoint.schema.decoding import check_codes
from fp8kit.checkpoint.schema.naming import experts_of
from fp8kit.checkpoint.schema.targets import misfit
from fp8kit.checkpoint.storage.reader import Checkpoint
from fp8kit.checkpoint.translated import TranslatedMatrix, Translation
from fp8kit.conversion.model_families import MERGED_BY_ENGINES
from fp8kit.errors import some_of
from fp8kit.formats import MX, MX_FORMS, SCHEMES, QTensor, Scheme
from fp8kit.quantizers.rebase import rebase, told_change

_BLOCK, _WEIGHT_ONLY = SCHEMES["FP8_BLOCK"], MX_FORMS["MXFP8_WEIGHT_ONLY"]
_TOLD = 20  # layers in one warning


def fall_back(job: Translation, target: str | None) -> list[str]:
    """Find weights that rebasing would change too much, and choose what is written instead.

    That is blocks, else MX with 16-bit activations, else high precision: the first that the dialect
    and the target support. Layers that engines merge, and the experts of a layer, get one scheme. A
    warning names these layers, and another counts the values of the others that change. Returns the
    names of layers that are written in high precision.
    """
    mx = [m for m in job.matrices if m.layer.group == MX and m.scheme.weight != MX]
    told, dense = dict[str, str](), list[str]()
    for key, reason in _losses(job.checkpoint, mx, told).items():
        team = dict.fromkeys(m for m in mx if _team(m) == key)
        names = [m.name for m in team]
        job.matrices = [m for m in job.matrices if m not in team]
        for scheme in _instead(job, target, team):
            others = [replace(m, scheme=scheme) for m in team]
            if not _losses(job.checkpoint, others, told):
                job.matrices += others
                break
        else:
            job.unfit += team
            dense += names
            scheme = None
        warnings.warn(
            f"{reason}; written {f'as {scheme}' if scheme else 'in high precision'}: "
            f"{some_of(names)}.",
            stacklevel=3,
        )
    changed = [f"{n}: {change}" for n, change in told.items() if n not in dense]
    if changed:
        more = f"; and {len(changed) - _TOLD} more" if len(changed) > _TOLD else ""
        listed = "; ".join(changed[:_TOLD]) + more
        warnings.warn(f"Rebasing changed {len(changed)} weights. {listed}.", stacklevel=3)
    return dense


def weights_of(
    checkpoint: Checkpoint, matrices: Iterable[TranslatedMatrix]
) -> Iterator[tuple[TranslatedMatrix, QTensor]]:
    """Yield matrices with their weights in the source, layer by layer; a stack is read once."""
    by_layer: dict[str, list[TranslatedMatrix]] = defaultdict(list)
    for m in matrices:
        by_layer[m.layer.name].append(m)
    for held in by_layer.values():
        layer = held[0].layer
        codes, scale = checkpoint.read(layer.weight), checkpoint.read(layer.scale)
        check_codes(codes, f"{checkpoint.tensors[layer.weight].shard}: {layer.weight}")
        for m in held:
            i = m.expert if m.expert >= 0 else slice(None)
            whole = QTensor(codes[i], scale[i], layer.group)
            yield m, whole if m.whole else rows_of(Fp8Weight(whole), m.first, m.last, m.name).q


def _instead(
    job: Translation, target: str | None, team: Iterable[TranslatedMatrix]
) -> Iterator[Scheme]:
    """Yield the schemes that a team (see ``_team``) may have in place of the requested one."""
    if job.dialect is not COMPRESSED_TENSORS or any(experts_of(m.name) for m in team):
        return
    blocks = [misfit(str(target), _BLOCK, m.name, m.shape) for m in team]
    if not any(blocks) and all(m.scheme.activation for m in team):
        yield _BLOCK
    if target in ("vllm", None):  # no other engine has MX in this dialect
        yield _WEIGHT_ONLY


def _losses(
    checkpoint: Checkpoint, matrices: Iterable[TranslatedMatrix], told: dict[str, str]
) -> dict[tuple[str, ...], str]:
    """Record in ``told`` what rebasing changes; return by team why that is too much, if it is."""
    lost: dict[tuple[str, ...], str] = {}
    for m, q in weights_of(checkpoint, matrices):
        told.pop(m.name, None)
        if m.scheme.weight == MX:
            continue
        found = rebase(q, m.scheme.weight)
        if found.changed:
            told[m.name] = told_change([found])
        if found.loses:
            reason = f"{m.name}: one power of two per {m.scheme.weight} {found.loses}"
            lost.setdefault(_team(m), reason)
    return lost


def _team(m: TranslatedMatrix) -> tuple[str, ...]:
    """Return a key that is the same for all layers that must have one scheme."""
    if experts := experts_of(m.name):
        return (experts,)
    parent, _, last = m.name.rpartition(".")
    return parent, *MERGED_BY_ENGINES.get(last, (last,))
