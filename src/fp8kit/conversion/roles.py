"""The roles of linear layers that stay in high precision, such as output heads and routers.

A role follows from the class that holds the layer, in libraries whose classes tell, and from the
layer's name elsewhere (``patterns.DEFAULT_EXCLUDE``). Classes are recognised by their names and
those of their Python modules: no library is imported to look for its models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8kit.conversion.patterns import TOWERS, roles_by_name
from fp8kit.modules.dense import as_linear, is_linear
from fp8kit.modules.libraries import is_transformers

_HEAD, _PROJECTOR, _TIME = "output head", "projector", "time embedding"
_OF_PLACES = re.compile(r"pos|wpe$")  # names of position embeddings
# fields of a config with the number of output values of a task
_COUNT = re.compile(r"(\w+_)?vocab_size|num_(\w+_)?labels")
_SENSES = {
    "pixel_values": TOWERS[0],
    "pixel_values_videos": TOWERS[0],
    "input_features": TOWERS[1],
    "input_values": TOWERS[1],
}
# classes of diffusers whose every linear layer prepares an input or a condition
_PREPARING = (
    (re.compile(r"Ada(LayerNorm|GroupNorm|LN)|Modulation|NormZero|NormContinuous"), "modulation"),
    (re.compile(r"Embed(ding|der|s)?s?$|TextProjection$|ImageProjection$"), "embedding"),
)
# classes, in any code, whose linear layers read a condition: one row for all tokens
_CONDITIONED = re.compile(
    r"Ada(ptive)?_?(Layer|RMS|Group|Instance)?_?(Norm|Scale)|Ada[LIG]N|FiLM|"
    r"Mapping(Net|FeedForward)|TimestepBlock$"
)
# classes, in any code, that cut an output head into parts, the rarer words with fewer columns
_CUT_HEAD = re.compile(r"Adaptive(Log)?Softmax(WithLoss)?$")
_TIMED = re.compile(r"Time([sS]teps?)?(?!Series)([A-Z]\w*)?Embed(d(ing|er))?s?(ND)?_?$")
# names of the first and last layers of a diffusers model; inside its blocks they mean other layers
_ENDS = (
    (re.compile(r"proj_in$"), "embedding"),
    (
        re.compile(
            r"(proj_out(_\d+)?|(all_)?final_layer(\..*)?|final_linear|proj_to_clip_embeddings)$"
        ),
        "final projection",
    ),
)


def layer_roles(model: nn.Module) -> dict[str, str]:
    """Return the roles of the linear layers that the defaults keep in high precision, by name.

    A layer that is used under several names has each of them. Weights may be on the meta device.
    """
    linears = {n: m for n, m in model.named_modules(remove_duplicate=False) if is_linear(m)}
    found = roles_by_name(linears)
    if _sense(model):  # the tower is the model
        found = {name: role for name, role in found.items() if role not in TOWERS}
    for name, module in model.named_modules(remove_duplicate=False):
        for library, roles_in in _LIBRARIES.items():
            if type(module).__module__.startswith(f"{library}."):
                for path, role in roles_in(module):
                    _assign(found, linears, _joined(name, path), role)
        for path in _conditioned(module):
            _assign(found, linears, _joined(name, path), "modulation")
        if _TIMED.search(type(module).__name__):
            _assign(found, linears, name, _TIME)
        for path in _after_sines(module):
            _assign(found, linears, _joined(name, path), _TIME)
        if _CUT_HEAD.search(type(module).__name__):
            _assign(found, linears, name, _HEAD)
    for name, module in _outermost(model):
        for path, _ in module.named_modules():
            for pattern, role in _ENDS:
                if pattern.match(path):
                    _assign(found, linears, _joined(name, path), role)
    if _HEAD not in found.values():
        found |= dict.fromkeys(_words_as_outputs(model, linears), _HEAD)
    return found


def _conditioned(module: nn.Module) -> Iterator[str]:
    """Find child layers that turn a condition into shifts and scales, in code of any library.

    DiTs and U-Nets write them as an activation, one layer, and maybe a reshape.
    """
    if _CONDITIONED.search(type(module).__name__):  # it may hold a whole block, too
        yield from (name for name, child in module.named_children() if is_linear(child))
    parts = module.named_children() if type(module) is nn.Sequential else ()
    steps = [(n, m) for n, m in parts if type(m).__name__ not in ("Unflatten", "Rearrange")]
    if [type(m) in (nn.SiLU, nn.Mish) for _, m in steps] == [True, False]:
        yield from (name for name, step in steps if isinstance(step, nn.Linear))


def _after_sines(module: nn.Module) -> Iterator[str]:
    """Find the child that reads the sines of a time step: two layers, as wide as what is before.

    Denoisers of speech name the sines ``diffusion_embedding``, and these layers only ``mlp``.
    """
    # named_children hashes its modules, which proxies do not allow
    children = ((n, m) for n, m in module._modules.items() if m is not None)
    for (before, sines), (name, mlp) in itertools.pairwise(children):
        if type(mlp) is not nn.Sequential or roles_by_name([before]).get(before) != _TIME:
            continue
        two = [isinstance(step, nn.Linear) for step in mlp] == [True, False, True]
        widths = {value for value in vars(sines).values() if type(value) is int}
        held = next(sines.parameters(), None)
        if two and held is None and as_linear(mlp[0]).in_features in widths:
            yield name


def _words_as_outputs(model: nn.Module, linears: Mapping[str, nn.Module]) -> list[str]:
    """Return the output head, the one layer in the shape of a word embedding outside all blocks.

    Containers of a library may number the parts of a head, as blocks are numbered. So where no
    layer outside has this shape, the last layer of the model is the head if it alone has it.
    """
    named = model.named_modules()
    words = [m for n, m in named if isinstance(m, nn.Embedding) and not _OF_PLACES.search(n)]
    tables = [m.weight for m in words]
    found = [
        name
        for name, linear in linears.items()
        for weight in [as_linear(linear).weight]
        if any(weight.shape == t.shape for t in tables)
        and not is_traceable_wrapper_subclass(weight)  # has no address, and stays dense anyway
        and (weight.is_meta or all(weight.data_ptr() != t.data_ptr() for t in tables))  # tied
    ]
    outside = [n for n in found if not any(part.isdecimal() for part in n.split(".")[:-1])]
    found = outside or (found if found == [*linears][-1:] else [])
    return found if len({linears[name] for name in found}) == 1 else []


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the diffusers models that are not part of another diffusers model."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        mixin = any(c.__name__ == "ModelMixin" for c in type(module).__mro__)
        if mixin and not name.startswith(inside):
            yield name, module
            inside += (f"{name}." if name else "",)


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _assign(found: dict[str, str], linears: Iterable[str], path: str, role: str) -> None:
    """Set the role of layers at or below a path that have none; an empty role removes theirs."""
    for name in linears:
        if not path or name == path or name.startswith(f"{path}."):
            if role:
                found.setdefault(name, role)
            else:
                found.pop(name, None)


def _in_transformers(module: nn.Module) -> Iterator[tuple[str, str]]:
    if type(module).__name__ == "FocalNetModulation":  # in the place of attention
        yield "", ""
    if not is_transformers(module):
        return
    paths = {id(m): n for n, m in module.named_modules()}
    head = _output_embeddings(module)
    if head is not None and id(head) in paths:
        yield paths[id(head)], _HEAD
    parts = {n: m for n, m in module.named_modules() if n and is_transformers(m)}
    if parts:
        outputs = _output_sizes(getattr(module, "config", None))
        for name, linear in module.named_modules():
            inside = any(name.startswith(f"{part}.") for part in parts)
            if isinstance(linear, nn.Linear) and not inside and linear.out_features in outputs:
                yield name, _HEAD
    yield from _towers(module)


def _output_embeddings(module: Any) -> object:
    try:
        return module.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # of models without
        return None


def _output_sizes(config: Any) -> set[int]:
    """Return the output sizes of a config's tasks: words, classes, and classes plus "none"."""
    words, labels = (getattr(config, name, None) for name in ("vocab_size", "num_labels"))
    fields = getattr(config, "__dict__", {})
    counts = [value for name, value in fields.items() if _COUNT.fullmatch(name)]
    counts += [words, labels, labels + 1 if isinstance(labels, int) else None]
    return {count for count in counts if isinstance(count, int)}


def _towers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Find the vision and audio towers of a language model, and the projectors behind them."""
    senses = {n: _sense(m) for n, m in module.named_children()}
    speaks = [n for n, m in module.named_children() if _main_input(m) == "input_ids"]
    if _main_input(module) != "input_ids" or not speaks or not any(senses.values()):
        return
    for name, child in module.named_children():
        if senses[name]:
            yield name, senses[name]
        elif not is_transformers(child):
            yield name, _PROJECTOR


def _sense(module: nn.Module) -> str:
    """Return which tower a model is; empty if it, or a model inside it, takes text."""
    speaks = any(_main_input(m) == "input_ids" for m in module.modules())
    return "" if speaks else _SENSES.get(_main_input(module), "")


def _main_input(module: nn.Module) -> str:
    return str(getattr(module, "main_input_name", "")) if is_transformers(module) else ""


def _in_diffusers(module: nn.Module) -> Iterator[tuple[str, str]]:
    for pattern, role in _PREPARING:
        if pattern.search(type(module).__name__):
            yield "", role
            return


def _in_timm(module: Any) -> Iterator[tuple[str, str]]:
    if not hasattr(module, "get_classifier"):
        return
    paths = {id(m): n for n, m in module.named_modules()}
    head = module.get_classifier()
    for layer in head if isinstance(head, (tuple, list, nn.ModuleList)) else [head]:
        if id(layer) in paths:
            yield paths[id(layer)], _HEAD


def _in_torchvision(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Find the last layer of a classifier; its other layers lose the role of their name."""
    *_, last = ("", *(n for n, _ in module.named_children()))
    if last in ("fc", "classifier", "head", "heads"):
        end = module.get_submodule(last)
        linears = [n for n, m in end.named_modules() if isinstance(m, nn.Linear)]
        yield last, ""
        if linears:
            yield _joined(last, linears[-1]), _HEAD


def _in_audiocraft(module: nn.Module) -> Iterator[tuple[str, str]]:
    if type(module).__name__ == "LMModel":  # of MusicGen, and of Moshi
        yield "linears", _HEAD
        yield "text_linear", _HEAD


_LIBRARIES = {
    "transformers": _in_transformers,
    "diffusers": _in_diffusers,
    "timm": _in_timm,
    "torchvision": _in_torchvision,
    "audiocraft": _in_audiocraft,
    "moshi": _in_audiocraft,
}
