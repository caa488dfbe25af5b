"""Patches for torch's model wrappers around FP8 layers: DDP, FSDP1 and ``AveragedModel``.

They broadcast, flatten or average all parameters, which is undefined for codes. Codes and their
scales are frozen. So DDP ignores them, and broadcasts those of the first rank as bytes;
``AveragedModel`` averages the rest; FSDP1 raises unless the caller lets it ignore them.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fp8kit.errors import UnsupportedError
from fp8kit.formats import FP8_FORMATS
from fp8kit.modules.libraries import wrap_once

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DDP reads it from the module that it wraps


def patch() -> None:
    """Patch DDP and ``AveragedModel``, and FSDP1 if it is loaded."""
    wrap_once(nn.parallel.DistributedDataParallel, "__init__", _distribute)
    wrap_once(torch.optim.swa_utils.AveragedModel, "update_parameters", _average)
    if _FSDP in sys.modules:
        wrap_once(sys.modules[_FSDP].FullyShardedDataParallel, "__init__", _shard)


def _frozen(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return codes and their scales, as ``(module, name, Parameter)``; biases are dense."""
    held = [(m, {n: p for n, p in m._parameters.items() if p is not None}) for m in model.modules()]
    return [
        (module, name, p)
        for module, own in held
        if any(p.dtype in FP8_FORMATS for p in own.values())
        for name, p in own.items()
        if not p.requires_grad and not name.endswith("bias")
    ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _distribute(own: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    held = {id(p): p for _, _, p in _frozen(module)}
    given = inspect.signature(own).bind(self, module, *args, **kwargs).arguments
    before = vars(module).get(_IGNORED, ())
    named = {n: p for n, p in module.named_parameters(remove_duplicate=False) if id(p) in held}
    if given.get("mixed_precision") is not None:
        for p in held.values():  # mixed precision casts every Parameter without this mark
            p._ddp_ignored = True  # type: ignore[attr-defined]
    setattr(module, _IGNORED, [*before, *named])
    try:
        own(self, module, *args, **kwargs)
    finally:
        setattr(module, _IGNORED, before) if before else delattr(module, _IGNORED)
    sent = {id(p): p for name, p in named.items() if name not in before}.values()
    for p in sent if given.get("init_sync", True) else ():
        arriving = _bytes(p).clone()
        dist.broadcast(arriving, group=self.process_group, group_src=0)
        p.copy_(arriving.view(p.dtype).view(p.shape))  # torch counts this write


def _shard(own: Any, self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    try:
        own(self, module, *args, **kwargs)
    except ValueError as error:
        if "dtype" not in str(error) or not _frozen(module):
            raise
        raise UnsupportedError(
            f"FullyShardedDataParallel got FP8 layers of {type(module).__name__}: {error}.",
            "It joins parameters into one tensor of one dtype; codes and scales differ.",
            "Pass ignored_states=[p for p in model.parameters() if not p.requires_grad], "
            "which leaves them whole on each rank; or use fully_shard.",
        ) from error


def _average(own: Any, self: Any, model: nn.Module) -> None:
    ours, theirs = _frozen(self.module), _frozen(model)
    pairs = [(p, q) for (*_, p), (*_, q) in zip(ours, theirs, strict=False)]
    same = all(torch.equal(_bytes(p), _bytes(q.to(p.device))) for p, q in pairs)
    if len(ours) != len(theirs) or not same:
        raise UnsupportedError(
            "AveragedModel.update_parameters got a model with other FP8 weights than its own.",
            "Codes have no average: they and their scales must be the same at every update.",
            "Average the dense model and convert the average; or train adapters and biases.",
        )
    for module, name, _ in (*ours, *theirs):
        module._parameters[name] = None
    try:
        own(self, model)
    finally:
        for module, name, p in (*ours, *theirs):
            module._parameters[name] = p  # type: ignore[assignment]
