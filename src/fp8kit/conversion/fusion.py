"""Put fused norms, activations, feed-forwards and routers into a converted model, by ``Link``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from torch import nn

from fp8kit.conversion import fusible_modules
from fp8kit.conversion.fusion_rules import Link, family_links, given_links, verify_links
from fp8kit.conversion.routers import fuse_routers
from fp8kit.conversion.siblings import share_inputs
from fp8kit.errors import ConversionError, check_choice, some_of
from fp8kit.formats import Scheme
from fp8kit.modules.codes_calls import takes_codes
from fp8kit.modules.consumers import Consumers
from fp8kit.modules.decoder_layer import install_residual_forwards
from fp8kit.modules.expert_tensors import ExpertTensors
from fp8kit.modules.fused_module import Fused
from fp8kit.modules.joining import can_share
from fp8kit.modules.library_experts import LibraryExperts
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.own_forward import drop_forward, own_forward, set_forward
from fp8kit.modules.shared_input import SharedInput

_LEVELS = ("none", "inputs", "all")
_FUSE = "Pass one of these words, or a mapping from blocks to rules for code of your own."


def level(fuse: str | Mapping[str, Sequence[str]]) -> int:
    """Return the level of fusion: 0 ``"none"``, 1 ``"inputs"``, 2 ``"all"`` or a mapping."""
    if isinstance(fuse, Mapping):
        return _LEVELS.index("all")
    check_choice("fuse", fuse, _LEVELS, _FUSE)
    return _LEVELS.index(fuse)


def user_links(
    model: nn.Module,
    rules: Mapping[str, Sequence[str]],
    run: Callable[[nn.Module], object] | None,
) -> list[Link]:
    """Read and check a user's fusion rules for a dense model.

    With ``run`` the rules are also tried in a run. Raises ``ConversionError`` if a rule names a
    module that does not exist or a producer without a fused form, puts a layer into a second group,
    or does not hold in the run.
    """
    links = given_links(model, rules)
    _check_apart(links)
    for link in links:
        producer = model.get_submodule(link.source)
        known = isinstance(producer, Fused) or fusible_modules.can_produce(producer)
        if link.producer is not None and not known:
            raise ConversionError(
                f"Got {link.source} ({type(producer).__name__}) before an arrow.",
                "SiLU, GELU, layer norms and RMS norms can write FP8, norms of one tensor, along "
                f"one dimension, with the epsilon in {' or '.join(fusible_modules.EPSILONS)}; an "
                "RMS norm has a weight, and computes in fp32 (x.float()).",
                "Name one of these, or only the layers, which then share their input.",
            )
    if run is not None:
        verify_links(model, links, run)
    return links


def _check_apart(links: Sequence[Link]) -> None:
    seen: dict[str, Link] = {}
    for link in links:
        for name in link.layers:
            other = seen.setdefault(name, link)
            if other.layers != link.layers:
                raise ConversionError(
                    f"Got {name} together with {some_of(other.layers)}, and in another rule "
                    f"together with {some_of(link.layers)}.",
                    "A layer shares its input with one group of layers.",
                    "Name all layers that read one tensor in one rule.",
                )


def idle_links(
    model: nn.Module, links: Iterable[Link], scheme: Scheme, converted: Sequence[str]
) -> list[str]:
    """Return a note for each link without effect: layers that stay dense, or an unfit scheme."""
    notes = []
    for link in links:
        layers = {name: model.get_submodule(name) for name in link.layers}
        becomes = {n: layer.scheme for n, layer in layers.items() if isinstance(layer, Fp8Linear)}
        becomes |= dict.fromkeys(set(layers) & set(converted), scheme)
        dense = [name for name in layers if name not in becomes]
        what = " ".join(link.layers) if link.producer is None else link.source
        fits = can_share if link.producer is None else takes_codes
        unfit = [str(becomes[n]) for n in layers if n in becomes and not fits(becomes[n])]
        if dense:
            notes.append(f"Not fused: {what}, because {some_of(dense)} is not converted.")
        elif unfit:
            notes.append(
                f"Not fused: {what}, because {unfit[0]} quantizes inputs in another way than per "
                "token or in groups of 128, each from its data."
            )
    return notes


def fuse_producers(model: nn.Module, links: Iterable[Link] = ()) -> list[str]:
    """Let norms, activations and feed-forwards write FP8 where all their readers are known.

    Readers are known in blocks of ``model_families.BLOCKS``, in diffusers' ``FeedForward``, and by
    users' rules (``links``). Routers beside FP8 experts get one kernel for their choice, RMS norms
    and rotary embeddings one launch. Returns the names of all modules that were changed.
    """
    families = family_links(model)
    blocks = {link.block for link in families}
    replaced = _fuse_feed_forwards(model, blocks)
    replaced += [link.source for link in (*links, *families) if _fuse_linked(model, link)]
    replaced += _fuse_plain(model)
    install_residual_forwards(model.get_submodule(name) for name in sorted(blocks))
    return replaced


def _fuse_feed_forwards(model: nn.Module, blocks: Container[str]) -> list[str]:
    """Fuse feed-forwards, of which ``blocks`` have one as ``mlp``, and routers beside experts."""
    replaced: list[str] = []
    for name, module in list(model.named_modules()):
        parent = name.rpartition(".")[0]
        if isinstance(module, LibraryExperts) and name:
            replaced += fuse_routers(model.get_submodule(parent), parent)
        if isinstance(module, (Fused, nn.ModuleList)) or not name:
            continue
        in_block = parent in blocks and name.endswith("mlp")
        known = in_block or fusible_modules.is_feed_forward(module)
        fused = fusible_modules.fuse_feed_forward(module) if known else None
        if fused is not None and fused.is_converted():
            model.set_submodule(name, fused)
            replaced.append(name)
    return replaced


def _fuse_linked(model: nn.Module, link: Link) -> bool:
    """Replace the norm or activation of a link by one that writes FP8; return whether it fits."""
    module = model.get_submodule(link.source)
    members = [model.get_submodule(name) for name in link.layers]
    layers = [m for m in members if isinstance(m, Fp8Linear) and takes_codes(m.scheme)]
    if link.producer is None or isinstance(module, Fused) or len(layers) < len(members):
        return False
    if len(layers) == 1 and layers[0].shared is None:
        share_inputs(model, [link.layers])
    group = layers[0].shared
    if not isinstance(group, SharedInput) or list(group.members) != layers:
        return False
    if own_forward(module) is not None:
        drop_forward(module)
    consumers = Consumers(group, link.unchanged(model))
    fused = fusible_modules.make_producer(module, consumers, link.concatenated)
    if fused is None:
        return False
    model.set_submodule(link.source, fused)
    # again, with the fused producer in its place: a wrapper around it is then noticed
    fused.consumers = Consumers(group, link.unchanged(model))
    return True


def _fuse_plain(model: nn.Module) -> list[str]:
    """Give norms and rotary embeddings of a model with FP8 layers a ``forward`` of one launch."""
    if not any(isinstance(module, (Fp8Linear, ExpertTensors)) for module in model.modules()):
        return []
    replaced = []
    for name, module in model.named_modules():
        own = fusible_modules.norm_forward(module) or fusible_modules.rotary_forward(module)
        if own is not None:
            set_forward(module, own)
            replaced.append(name)
    return replaced
