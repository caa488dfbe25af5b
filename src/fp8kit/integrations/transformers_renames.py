"""Let the scales of a layer follow its weight through Transformers' rules, which name weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming

_SCALE = re.compile(r"\b(weight_scale|weight_scale_inv|weight_exponents|input_scale)$")
_WEIGHT = re.compile(r"\bweight$")


class _OfLayer(WeightRenaming):  # type: ignore[misc]
    """A rule that renames the scales of a layer as it renames the weight.

    Biases keep to the rules that name them: where none does, Transformers writes and reads a bias
    under its name in the model.
    """

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern that matched, if any."""
        scale = _SCALE.search(source_key)
        if scale is not None:
            weight, pattern = super().rename_source_key(f"{source_key[: scale.start()]}weight")
            if _WEIGHT.search(weight):
                return _WEIGHT.sub(scale[0], weight), pattern
        name, pattern = super().rename_source_key(source_key)
        return name, pattern


def with_scales(rules: Iterable[Any]) -> list[Any]:
    """Return rules of a model by which scales follow their weight, also when they are reversed.

    Rules of other classes, for prefixes and groups of names, match scales as they are.
    """
    return [_of_layer(rule) if type(rule) is WeightRenaming else rule for rule in rules]


def _of_layer(rule: Any) -> _OfLayer:
    found = _OfLayer([*rule._original_source_patterns], [*rule._original_target_patterns])
    found.scope_prefix, found.base_model_prefix = rule.scope_prefix, rule.base_model_prefix
    return found


@contextmanager
def scales_follow(model: Any) -> Iterator[None]:
    """Let ``revert_weight_conversion`` temporarily rename scales as it renames weights."""
    held = rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # no file was loaded into the model: the rules that Transformers takes then
        every = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in every if not isinstance(rule, PrefixChange)]
    if not rules:
        yield
        return
    model._weight_conversions = with_scales(rules)
    try:
        yield
    finally:
        model._weight_conversions = held
