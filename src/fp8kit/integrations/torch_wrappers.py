"""torch's wrappers of models: DDP, FSDP and averages of weights, around FP8 layers.

Each of them sends, flattens or averages all parameters alike, and none of that is defined for
codes. Codes and their scales are frozen, so the wrappers are told to pass them by: DDP trains the
rest, and gives each rank the codes of its first as bytes; an average averages the rest. FSDP1,
which joins parameters of one dtype, is refused in words unless it is told to ignore them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fp8kit.errors import UnsupportedError, teach
from fp8kit.formats import FP8_FORMATS

_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DDP looks for it on the module it gets
_OURS = "_knows_fp8"


def tell() -> None:
    """Let the wrappers of torch that are loaded know FP8 layers."""
    ddp = sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel
    _replace(ddp, "__init__", _distributed)
    average = sys.modules["torch.optim.swa_utils"].AveragedModel
    _replace(average, "update_parameters", _averaged)
    if _FSDP in sys.modules:
        _replace(sys.modules[_FSDP].FullyShardedDataParallel, "__init__", _flattened)


def _replace(kind: type, name: str, make: Callable[[Any], Any]) -> None:
    own = getattr(kind, name)
    if not hasattr(own, _OURS):
        wrapped = functools.wraps(own)(make(own))
        setattr(wrapped, _OURS, True)
        setattr(kind, name, wrapped)


def _holders(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold codes."""
    return [
        m
        for m in model.modules()
        if any(p is not None and p.dtype in FP8_FORMATS for p in m._parameters.values())
    ]


def _frozen(holder: nn.Module) -> dict[str, Tensor]:
    """Return codes and what belongs to them; biases are numbers of their own."""
    return {
        name: p
        for name, p in holder._parameters.items()
        if p is not None and not p.requires_grad and not name.endswith("bias")
    }


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _distributed(own: Any) -> Any:
    signature = inspect.signature(own)

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        held = {id(p): p for holder in _holders(module) for p in _frozen(holder).values()}
        if not held:
            own(self, module, *args, **kwargs)
            return
        given = signature.bind(self, module, *args, **kwargs).arguments
        before = vars(module).get(_IGNORED)
        named = module.named_parameters(remove_duplicate=False)
        names = [name for name, p in named if id(p) in held]
        setattr(module, _IGNORED, [*(before or ()), *names])
        if given.get("mixed_precision") is not None:
            for p in held.values():  # it casts parameters by themselves, and looks for this mark
                p._ddp_ignored = True  # type: ignore[attr-defined]
        try:
            own(self, module, *args, **kwargs)
        finally:
            delattr(module, _IGNORED)
            if before is not None:
                setattr(module, _IGNORED, before)
        if given.get("init_sync", True):
            for name, p in module.named_parameters():
                if id(p) in held and name not in (before or ()):
                    _send(p, self.process_group)

    return init


@torch.no_grad()
def _send(parameter: Tensor, group: Any) -> None:
    """Give all ranks the bytes of the first one, by a write that torch counts."""
    arriving = _bytes(parameter).clone()
    dist.broadcast(arriving, group=group, group_src=0)
    parameter.copy_(arriving.view(parameter.dtype).view(parameter.shape))


def _flattened(own: Any) -> Any:
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        try:
            own(self, module, *args, **kwargs)
        except ValueError as error:
            if "dtype" not in str(error) or not _holders(module):
                raise
            raise UnsupportedError(
                teach(
                    f"FullyShardedDataParallel got FP8 layers of {type(module).__name__}: {error}.",
                    "It joins parameters into one tensor of one dtype; codes and scales differ.",
                    "Pass ignored_states=[p for p in model.parameters() if not p.requires_grad], "
                    "which leaves them whole on each rank; or use fully_shard.",
                )
            ) from error

    return init


def _averaged(own: Any) -> Any:
    @torch.no_grad()
    def update_parameters(self: Any, model: nn.Module) -> None:
        pairs = list(zip(_holders(self.module), _holders(model), strict=False))
        if len(_holders(self.module)) != len(_holders(model)):
            raise _no_average("FP8 layers on one side, and others on the other")
        for average, present in pairs:
            theirs = _frozen(present)
            for name, p in _frozen(average).items():
                q = theirs[name].to(p.device)
                same = p.dtype == q.dtype and torch.equal(_bytes(p), _bytes(q))
                if not same and (self.n_averaged > 0 or p.dtype != q.dtype):
                    raise _no_average(f"another {name} of an FP8 layer than at the last update")
                if not same:
                    p.copy_(q)
        with _apart([module for pair in pairs for module in pair]):
            own(self, model)

    return update_parameters


@contextmanager
def _apart(holders: list[nn.Module]) -> Iterator[None]:
    """Take what is frozen out of modules for a while."""
    held = [(m, dict(m._parameters), _frozen(m)) for m in holders]
    for module, _, names in held:
        module._parameters.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for module, parameters, _ in held:
            module._parameters.update(parameters)


def _no_average(arrived: str) -> UnsupportedError:
    return UnsupportedError(
        teach(
            f"AveragedModel.update_parameters got {arrived}.",
            "Codes have no average: they and their scales must be the same at every update.",
            "Average the dense model and convert the average; or train adapters and biases only.",
        )
    )
