"""Patch libraries that save or change models in their own way, so that they handle FP8 layers.

Their ``save_pretrained`` writes the ``state_dict`` and a config; codes without a quantization
config would load as a dense model with wrong numbers. PEFT wraps our layers, and computes with
their weights when it merges; accelerate casts tensors that it places into a model; torch's wrappers
broadcast or average weights. Each library has a module in ``integrations``, whose ``patch()`` does
the work. A library that is not loaded is not touched.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from fp8kit.errors import UnsupportedError, teach
from fp8kit.modules.decorators import copied

# a module of a library, and the module of ours that patches it
_PATCHED_BY = {
    "transformers.modeling_utils": "fp8kit.integrations.transformers_quantizer",
    "diffusers.models.modeling_utils": "fp8kit.integrations.diffusers",
    "peft.tuners.lora.model": "fp8kit.integrations.peft",
    "accelerate.utils.modeling": "fp8kit.integrations.accelerate",
    "huggingface_hub.hub_mixin": "fp8kit.integrations.huggingface_hub",
    "torch.nn.parallel.distributed": "fp8kit.integrations.torch_wrappers",
    "torch.utils.flop_counter": "fp8kit.integrations.flop_counter",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "fp8kit.integrations.torch_wrappers",
}
_patched: set[str] = set()
# finds quantization methods in its own dictionaries, not in plugins
_LOADING = "diffusers.models.modeling_utils"
# looks up a method by name, in diffusers and Transformers, before either has loaded a model
_CHOOSING = "diffusers.quantizers.pipe_quant_config"
# builds a dense model and fills it with codes before any FP8 layer exists
_MIXIN = "huggingface_hub.hub_mixin"
# counts the operators of layers that were made before it was loaded
_COUNTING = "torch.utils.flop_counter"
_METHOD = "fp8kit"
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")  # by torch.compile, for checkpointing


def register_when_loaded() -> None:
    """Patch libraries that may meet FP8 before a layer exists: now, or when they are loaded.

    Nothing is imported before diffusers imports its models, or is asked for the method ``fp8kit``.
    """
    following: dict[str, Callable[[ModuleType], None]] = {
        name: lambda module: _patch(module.__name__) for name in (_LOADING, _MIXIN, _COUNTING)
    }
    following[_CHOOSING] = _register_when_chosen
    for name in [n for n in following if n in sys.modules]:
        following.pop(name)(sys.modules[name])
    if following and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(following))


def _register_when_chosen(module: ModuleType) -> None:
    """Register the method in diffusers and Transformers when a pipeline's config asks for it."""
    kind = module.PipelineQuantizationConfig
    own = kind.post_init

    @functools.wraps(own)
    def post_init(config: Any) -> None:
        if config.quant_backend == _METHOD:
            for library in ("diffusers.models.modeling_utils", "transformers.modeling_utils"):
                if importlib.util.find_spec(library.partition(".")[0]):
                    _patch(library)
        own(config)

    kind.post_init = post_init


def on_demand(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a module and calls the module's function ``name``."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


def wrap_once(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Wrap a function of a class or module once: ``ours`` gets the original, then its arguments."""
    own = getattr(owner, name)
    if not hasattr(own, "_fp8kit"):

        @functools.wraps(own)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return ours(own, *args, **kwargs)

        wrapper._fp8kit = True  # type: ignore[attr-defined]
        setattr(owner, name, wrapper)


def wrap_in_place(function: FunctionType, ours: Callable[..., Any]) -> None:
    """Wrap a function of a module once, also for those that imported its name before.

    The function keeps its identity and its signature, and gets another body: ``ours`` gets the
    original, then its arguments. It must have no closure.
    """
    if hasattr(function, "_fp8kit"):
        return
    own = copied(function, function.__globals__, None)
    own.__annotations__ = function.__annotations__
    function.__wrapped__ = own  # type: ignore[attr-defined]  # read by inspect.signature
    function.__defaults__, function.__kwdefaults__ = None, {"_call": functools.partial(ours, own)}
    function.__code__ = _calling.__code__
    function._fp8kit = True  # type: ignore[attr-defined]


def _calling(*args: Any, _call: Callable[..., Any], **kwargs: Any) -> Any:
    return _call(*args, **kwargs)


def is_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of Transformers, without importing it."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.")
        for c in type(model).__mro__
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch's wrappers, which prefix the name of each tensor.

    These are ``torch.compile``, checkpointing, DDP, ``DataParallel`` and ``AveragedModel``.
    """
    averaged = torch.optim.swa_utils.AveragedModel
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, averaged)
    inner: nn.Module | None = model
    while inner is not None:
        model = inner
        names = ("module",) if isinstance(model, wrappers) else _WRAPPED
        inner = next((model._modules[n] for n in names if n in model._modules), None)
    return model


@contextmanager
def bare(model: nn.Module) -> Iterator[nn.Module]:
    """Unwrap a model, and temporarily all modules in it, so that tensors have unprefixed names."""
    model = unwrapped(model)
    wrapped = [
        (held, name, child, inner)
        for held in (module._modules for module in model.modules())
        for name, child in held.items()
        if child is not None and (inner := unwrapped(child)) is not child
    ]
    for held, name, _, inner in wrapped:
        held[name] = inner
    try:
        yield model
    finally:
        for held, name, child, _ in wrapped:
            held[name] = child


class _Finder(MetaPathFinder):
    """Finds modules as Python does, and calls a function after each has been executed.

    ``following`` maps names of modules to functions; each module is found here once.
    """

    def __init__(self, following: dict[str, Callable[[ModuleType], None]]) -> None:
        self._following = following

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with a loader that registers; ``None`` for all others."""
        if name not in self._following:
            return None
        then = self._following.pop(name)
        if not self._following:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, then)
        return spec


class _Loader(Loader):
    def __init__(self, own: Loader, then: Callable[[ModuleType], None]) -> None:
        self._own, self._then = own, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create what the module's own loader creates."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then call the function for it."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._own
        self._own.exec_module(module)
        self._then(module)


def patch_libraries() -> None:
    """Patch the loaded libraries, so that they handle models with FP8 layers.

    A library that cannot be patched is named in a warning, once.
    """
    for library in _PATCHED_BY:
        if library in sys.modules:
            _patch(library)


def _patch(library: str) -> None:
    if library in _patched:
        return
    _patched.add(library)
    try:
        module = importlib.import_module(_PATCHED_BY[library])
        if not hasattr(module, "patch"):  # it is being imported, and imports the library itself
            _patched.discard(library)
            return
        module.patch()
    except (ImportError, UnsupportedError) as error:
        name = library.partition(".")[0]
        warnings.warn(
            teach(
                f"FP8 layers are made while {name} is loaded, which cannot be told: "
                f"{str(error).rstrip('.')}.",
                f"{name} takes them for dense, also where it saves or merges them.",
                "Save such models with fp8kit.save, or upgrade it.",
            ),
            stacklevel=3,
        )
