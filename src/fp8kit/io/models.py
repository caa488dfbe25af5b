"""``save`` and ``load``: whole models to and from checkpoint directories."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8kit.checkpoint import exporting
from fp8kit.checkpoint.dialects import JsonObject, Kinds
from fp8kit.checkpoint.loading import into_module
from fp8kit.checkpoint.quantization_config import announce, refuse_unloadable, warn_of_stacks
from fp8kit.checkpoint.schema.naming import experts_of
from fp8kit.checkpoint.storage.layout import MAX_SHARD_BYTES
from fp8kit.checkpoint.storage.nvfp4 import conversion_notes
from fp8kit.checkpoint.storage.reader import Checkpoint, open_checkpoint
from fp8kit.checkpoint.storage.refusals import check_name
from fp8kit.checkpoint.storage.writer import write_checkpoint
from fp8kit.conversion.patterns import LayerFilter
from fp8kit.errors import (
    CheckpointError,
    InvalidType,
    InvalidValue,
    as_path,
    check_switch,
    some_of,
    teach,
)
from fp8kit.formats import MX_FORMS, SCHEMES, Scheme
from fp8kit.io.arguments import as_device, check_missing, check_widths
from fp8kit.modules.libraries import bare, is_transformers
from fp8kit.modules.linear import Fp8Linear
from fp8kit.modules.mx_forms import named_form
from fp8kit.modules.parameters import outside_inference_mode
from fp8kit.modules.weight_parts import recode_for_devices
from fp8kit.ops.validation import check_precision


def save(
    model: nn.Module,
    destination: str | Path,
    *,
    target: str = "vllm",
    source: str | Path | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Save a converted model so that the target loads it; it appears complete or not at all.

    Args:
        model: a Transformers model or any other module, with ``Fp8Linear`` layers; of a wrapper by
            ``torch.compile`` or DDP, the wrapped model is saved.
        destination: directory to make.
        target: who will load it: ``"vllm"``, ``"sglang"`` or ``"transformers"``; fp8kit reads
            them all.
        source: directory whose tokenizer and the like are copied; by default the one a
            Transformers model was loaded from.
        overwrite: replace a destination that is a checkpoint.
        max_shard_bytes: start a new file before this size is exceeded.

    Returns:
        The names of the files.

    Raises:
        ValueError: for an unknown target, or a ``max_shard_bytes`` that is not positive.
        TypeError: if ``model`` is no module, ``overwrite`` no switch, or a path of another type.
        CheckpointError: if the model has no FP8 layers, layers that the target cannot load,
            adapters, or tensors of its own under names of scales; if ``source`` does not exist; if
            the destination is the source, or exists and may not be replaced.

    Example:
        >>> fp8kit.convert(model)
        >>> fp8kit.save(model, "dir", target="vllm", source="bf16-dir")
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(
            f"Got a {type(model).__name__} as the model.",
            "A model with FP8 layers is saved.",
            "Pass the module that fp8kit.convert or fp8kit.load gave.",
        )
    if source is not None:
        check_name(as_path(source, "source"))
    if source is not None and not as_path(source, "source").is_dir():
        raise CheckpointError(
            f"There is no directory {source}.",
            "source= is the one whose tokenizer and the like are copied.",
            "Check the path, or leave source out and copy these files yourself.",
        )
    with bare(model) as model:
        is_hf = is_transformers(model)
        exported = integration().export(model) if is_hf else exporting.export_module(model)
        if is_hf:
            known = Path(str(getattr(model, "name_or_path", "") or ""))
            source = source or (known if known.name and known.is_dir() else None)
        refuse_unloadable(exported.whole_stacks if is_hf else [], target)
        announced = announce(model, exported, target)
        warn_of_stacks(exported.whole_stacks)
        tensors = dict(announced.on_disk(n, t) for n, t in exported.tensors.items())
        exporting.refuse_reserved(model, tensors)
        quantization = announced.config(exported.dense)
        kinds = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
        if is_hf and target == "transformers":
            quantization = integration().accepted_of(model, quantization, kinds, announced.dtype)
        return write_checkpoint(
            destination,
            kinds,
            tensors.items(),
            config=exporting.with_quantization(exported.config, quantization, announced.dtype),
            source=source,
            texts=exported.texts,
            overwrite=overwrite,
            max_shard_bytes=max_shard_bytes,
        )


def load(
    source: str | Path,
    model: nn.Module | None = None,
    *,
    scheme: Scheme | str | None = None,
    include: Sequence[str] | LayerFilter | None = None,
    exclude: Sequence[str] | LayerFilter | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    widths: Mapping[str, Sequence[int]] | None = None,
    missing: Sequence[str] = (),
) -> Any:
    """Load an FP8 checkpoint bit for bit, or quantize a high-precision one while loading it.

    NVFP4 weights are quantized to ``scheme``, by default FP8_DYNAMIC; a warning states the error.
    Each tensor is read, quantized and placed before the next one. q/k/v, gate/up and experts may be
    joined in the checkpoint, in the model, or in both. FP8 weights are decoded, and a warning names
    them, if the model has no linear layer for them, or has code that reads that layer's weight.

    Args:
        source: a checkpoint directory.
        model: the module to fill, in place; its parameters may be on meta. Without it, the
            directory must be one of Transformers, whose model is built.
        scheme: what a high-precision checkpoint becomes, by the rules of ``fp8kit.plan``. For MXFP8
            it says how the layers compute, by default in the way that is fastest on the device:
            ``"FP8_DYNAMIC"`` (or ``"MXFP8_ROW"``), ``"FP8_BLOCK"`` and ``"FP8_WEIGHT_ONLY"`` rebase
            the weights, ``"MXFP8_WEIGHT_ONLY"`` and ``"MXFP8_EMULATED"`` do not.
        include: as in ``fp8kit.plan``; only with ``scheme``.
        exclude: as in ``fp8kit.plan``; only with ``scheme``.
        device: where the model goes.
        dtype: the model's high precision; by default the checkpoint's.
        strict: raise instead of warning about tensors the model does not use, and for layers that
            cannot be quantized.
        widths: rows of the parts of fused FP8 layers that have one scale for each part, by patterns
            of their names, such as ``{"*.in_proj": (256, 256, 64)}``; ``qkv_proj`` and
            ``gate_up_proj`` are known without.
        missing: patterns of layers of ``model`` that keep their values if the checkpoint has none
            for them, such as ``["score"]`` for a new head.

    Returns:
        The model; one of Transformers is in eval mode and has its generation config.

    Raises:
        CheckpointError: if the checkpoint is damaged, of an unknown dialect, has another scheme
            than ``scheme``, or does not fit the model; if code that only ``load_state_dict`` of
            ``model`` runs changes values.
        ConversionError: as ``fp8kit.plan`` raises it.
        ImportError: if Transformers is needed and is not there, or is too old.
        TypeError: if ``source`` is no path, ``model`` no module, ``dtype`` no dtype, ``widths`` no
            mapping, or ``strict`` no switch.
        ValueError: for an unknown scheme, an FP8 ``dtype``, a ``device`` that is not here, or
            ``missing`` without ``model``.

    Example:
        >>> model = fp8kit.load("fp8-dir", device="cuda")
        >>> model = fp8kit.load("bf16-dir", scheme="FP8_DYNAMIC", exclude=["*.o_proj"])
    """
    if not isinstance(model, nn.Module | None):
        raise InvalidType(
            f"Got {model!r:.80} as the model.",
            "The second argument is the module to fill; a scheme has a keyword.",
            "Pass scheme='FP8_DYNAMIC' or the like by name.",
        )
    check_precision(dtype)
    check_switch("strict", strict)
    where = as_device(device)
    wanted = None if scheme is None else Scheme.of(scheme).stored
    check_widths(widths)
    check_missing(missing, model is None)
    checkpoint = open_checkpoint(source, widths, wanted)
    _check_request(checkpoint, model, scheme, include, exclude)
    form = None if scheme is None else named_form(Scheme.of(scheme), bool(checkpoint.spec))
    options: dict[str, Any] = {"device": where, "dtype": dtype, "strict": strict, "form": form}
    with outside_inference_mode():
        if model is None:
            hf = integration()
            config = None
            if checkpoint.spec is None:
                config = hf.Fp8KitConfig(_preset(scheme), include, exclude, strict)
            made, filled = hf.load(checkpoint, config, **options)
            _finish(checkpoint, made)
        else:
            made, plan_options = model, None
            if scheme is not None and checkpoint.spec is None:
                plan_options = into_module.PlanOptions(scheme, include, exclude, strict)
            with bare(model) as inner:
                checkpoint = _named_as_in(inner, checkpoint)
                filled = into_module.fill(
                    inner, checkpoint, plan_options, missing=missing, **options
                )
                _finish(checkpoint, inner)
    for note in _notes(checkpoint, filled):
        warnings.warn(note, stacklevel=2)
    return made


def require_fp8(source: Path) -> Path:
    """Return the path of an FP8 checkpoint; raises ``CheckpointError`` if it is not FP8."""
    if open_checkpoint(source).spec is None:
        raise CheckpointError(
            f"{source} is in high precision.",
            "An FP8 checkpoint is needed.",
            f"Make one: fp8kit quantize {source} DESTINATION.",
        )
    return source


def integration(name: str = "transformers") -> ModuleType:
    """Import a module of ``fp8kit.integrations`` that needs Transformers.

    It is imported on first use, because Transformers is optional. Raises ``ImportError`` if that is
    not installed, or lacks what is needed.
    """
    try:
        return importlib.import_module(f"fp8kit.integrations.{name}")
    except ImportError as error:
        # a name that an older Transformers lacks raises a plain ImportError
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        arrived = {
            "transformers": "Transformers is not installed.",
            "numpy": "numpy is not installed, and Transformers needs it.",
        }.get(absent or "", f"Transformers is unfit: {error}.")
        wanted = "numpy" if absent == "numpy" else "'fp8kit[transformers]'"
        raise ImportError(
            teach(
                arrived,
                "Loading a model by its directory alone needs Transformers 5.17 or later.",
                f"Run pip install {wanted}, or pass a module of your own: "
                "fp8kit.load(dir, model=...).",
            ),
            name=error.name,
        ) from error


def accepted(checkpoint: Checkpoint, quantization: JsonObject, kinds: Kinds) -> JsonObject:
    """Return the quantization config with which Transformers loads the result of a conversion.

    ``checkpoint`` is the source, from whose ``config.json`` the model is built; ``kinds`` has dtype
    and shape of each tensor of the result. Raises ``CheckpointError`` if ``transformers_trial``
    finds that Transformers would not load it.
    """
    if not {"architectures", "model_type"} <= checkpoint.config.keys():
        return quantization  # no model is named: only fp8kit.load(dir, model) loads it
    try:
        hf = integration()
    except ImportError as error:
        warnings.warn(f"That Transformers loads the result is not checked: {error}", stacklevel=3)
        return quantization
    return hf.accepted(partial(hf.skeleton, checkpoint), quantization, kinds)


def _named_as_in(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint under the names in a Transformers model, by Transformers' own rules."""
    if not is_transformers(model):
        return checkpoint
    try:
        hf = integration()
    except ImportError:  # an older Transformers: only names that agree already load
        return checkpoint
    return hf.in_model(checkpoint, model)


def _finish(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Set on layers what a checkpoint says about them besides their tensors.

    That is the bound on the amax of activations, and the error of quantizing NVFP4 weights.
    """
    bound = checkpoint.spec.scale_ub if checkpoint.spec else None
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Linear):
            layer.scale_ub = layer.scale_ub if bound is None else bound
            if name in checkpoint.errors:
                error = f"NVFP4 quantized to FP8: relative error {checkpoint.errors[name]:.1e}"
                layer.form_note = "; ".join(filter(None, (error, layer.form_note)))
    recode_for_devices(model)


def _notes(checkpoint: Checkpoint, filled: into_module.Filled) -> list[str]:
    notes = [note for note in (checkpoint.announced_but_dense,) if note]
    if checkpoint.spec is None:
        return [*notes, *filled.notes(str(checkpoint.path))]
    errors = conversion_notes(checkpoint.errors, checkpoint.spec.scheme)
    return [*notes, *checkpoint.spec.unread, *filled.notes(str(checkpoint.path)), *errors]


def _preset(scheme: Scheme | str | None) -> str:
    assert scheme is not None
    found = Scheme.of(scheme)
    if (SCHEMES | MX_FORMS).get(found.name) != found:
        raise InvalidValue(
            f"Got a scheme of your own, {found.name!r}.",
            f"While a Transformers model loads, it is one of {', '.join(SCHEMES | MX_FORMS)}.",
            "Load the model in high precision, then fp8kit.convert(model, scheme).",
        )
    return found.name


def _check_request(
    checkpoint: Checkpoint,
    model: nn.Module | None,
    scheme: Scheme | str | None,
    include: Sequence[str] | LayerFilter | None,
    exclude: Sequence[str] | LayerFilter | None,
) -> None:
    wanted = None if scheme is None else Scheme.of(scheme)
    single = [n for n, x in checkpoint.layers.items() if experts_of(n) and len(x.shape) == 2]
    if model is None and checkpoint.config.get("model_type") == "gpt_oss" and single:
        raise CheckpointError(
            f"{some_of(single)} are FP8 experts of GPT-OSS, one by one.",
            "The model holds stacks of them, whose gates alternate with ups, and their biases.",
            "Start from its original checkpoint, in MXFP4 or high precision.",
        )
    if wanted is not None and checkpoint.announced_but_dense:
        raise CheckpointError(checkpoint.announced_but_dense)
    held = checkpoint.spec.scheme if checkpoint.spec else None
    fits = wanted is None or held is None or wanted.stored == held
    every, mx = {layer.scheme for layer in checkpoint.layers.values()}, SCHEMES["MXFP8"]
    if wanted is not None and held is not None and not fits:
        fits = replace(wanted, name=held.name) == held  # the same numbers under another name
        fits |= mx in every and wanted.stored == mx
        fits |= every == {mx} and named_form(wanted, of_fp8=True) is not None
    if not fits:
        raise CheckpointError(
            f"Got scheme={wanted} for {checkpoint.path}, which is {held}.",
            "Quantizing FP8 weights again would lose accuracy.",
            f"Leave scheme out to load it as {held}, "
            + ("name a form of its MX layers such as MXFP8_ROW, " if mx in every else "")
            + "or start from the original checkpoint.",
        )
    if held is not None and (include is not None or exclude is not None):
        raise CheckpointError(
            f"Got include or exclude for {checkpoint.path}, which is FP8 already.",
            "Its layers were chosen when it was made.",
            "Leave them out, or start from the original checkpoint.",
        )
    converted = model is not None and any(isinstance(m, Fp8Linear) for m in model.modules())
    if held is None and wanted is None and not converted:
        raise CheckpointError(
            f"{checkpoint.path} is in high precision, and no scheme was given.",
            "There is nothing FP8 to load.",
            "Pass scheme='FP8_DYNAMIC' to quantize it while loading.",
        )
