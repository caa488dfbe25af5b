"""FP8 (W8A8) linear layers for any PyTorch model: convert, run, save and load.

The data flow, which is also the order of the folders::

    errors       what is raised, in three parts
    formats      GroupShape, Scheme, QTensor: what a quantized tensor is
    runtime      compile, launch, record and replay kernels; settings; files that appear whole
    dispatch     which backend runs: their order, measured times, capabilities of the device
    quantizers   high precision -> codes and scales
    matmul       codes x codes -> high precision, by the best backend that fits
    ops          the registered operators that torch.compile sees, and their checks
    functional   quantize, dequantize, scaled_mm, linear: checked entry points
    fused        norms and activations that write FP8, rotary embedding, attention of one token
    moe          mixture of experts: routing, the layer of experts, grouped products
    modules      Fp8Linear: its state_dict is the checkpoint
    conversion   plan and convert: dense layers become FP8 layers
    checkpoint   dialects, what tensors mean, how they lie on disk, streaming
    integrations Transformers, diffusers, PEFT, accelerate, KV caches, Ray
    io           load, save, quantize_checkpoint, verify_checkpoint, load_weights
    perf         measure, tune, warm up, explain, evaluate
    compat       names that people already call
    cli          the command line
"""

import importlib
import sys
import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING

if "torch" not in sys.modules:
    # This package needs no numpy, so torch's warning about its absence is silenced during the
    # import. Only this filter is removed afterwards, because torch adds filters of its own.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    _of_numpy = warnings.filters[0]
    import torch  # noqa: F401

    warnings.filters.remove(_of_numpy)  # type: ignore[attr-defined]

# Imported at once, because an exported program looks its operators up in torch's registry and
# names no module of this package. Everything else is imported on first access.
from fp8kit.errors import teach as _teach
from fp8kit.fused import attention as _of_attention  # noqa: F401
from fp8kit.fused import operators  # noqa: F401
from fp8kit.io import moved_classes
from fp8kit.modules.libraries import register_when_loaded
from fp8kit.moe import operators as _of_experts  # noqa: F401
from fp8kit.ops import schemas  # noqa: F401

moved_classes.register()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fp8kit.checkpoint.inspection import inspect as inspect
    from fp8kit.checkpoint.streaming.recipe import Recipe as Recipe
    from fp8kit.conversion.experts import register_experts as register_experts
    from fp8kit.conversion.patterns import DEFAULT_EXCLUDE as DEFAULT_EXCLUDE
    from fp8kit.conversion.plan import Plan as Plan
    from fp8kit.conversion.plan import convert as convert
    from fp8kit.conversion.plan import plan as plan
    from fp8kit.conversion.report import Report as Report
    from fp8kit.errors import CheckpointError as CheckpointError
    from fp8kit.errors import ConversionError as ConversionError
    from fp8kit.errors import UnsupportedError as UnsupportedError
    from fp8kit.formats import BLOCK as BLOCK
    from fp8kit.formats import GROUP128 as GROUP128
    from fp8kit.formats import MX as MX
    from fp8kit.formats import ROW as ROW
    from fp8kit.formats import SCHEMES as SCHEMES
    from fp8kit.formats import TENSOR as TENSOR
    from fp8kit.formats import GroupShape as GroupShape
    from fp8kit.formats import QTensor as QTensor
    from fp8kit.formats import Scheme as Scheme
    from fp8kit.formats import scale_shape as scale_shape
    from fp8kit.formats import stack_scale_shape as stack_scale_shape
    from fp8kit.functional import dequantize as dequantize
    from fp8kit.functional import linear as linear
    from fp8kit.functional import quantize as quantize
    from fp8kit.functional import scaled_mm as scaled_mm
    from fp8kit.integrations.kv_cache import Fp8Cache as Fp8Cache
    from fp8kit.integrations.kv_cache import Fp8StaticCache as Fp8StaticCache
    from fp8kit.integrations.transformers_quantizer import Fp8KitConfig as Fp8KitConfig
    from fp8kit.io.arriving_tensors import load_weights as load_weights
    from fp8kit.io.checkpoints import quantize_checkpoint as quantize_checkpoint
    from fp8kit.io.checkpoints import ray_runner as ray_runner
    from fp8kit.io.checkpoints import verify_checkpoint as verify_checkpoint
    from fp8kit.io.models import load as load
    from fp8kit.io.models import save as save
    from fp8kit.io.translation import convert_checkpoint as convert_checkpoint
    from fp8kit.modules.expert_stacks import ExpertStacks as ExpertStacks
    from fp8kit.modules.experts import Fp8Experts as Fp8Experts
    from fp8kit.modules.linear import Fp8Linear as Fp8Linear
    from fp8kit.modules.weight_parts import join_scales as join_scales
    from fp8kit.modules.weight_parts import recode as recode
    from fp8kit.modules.weight_parts import requantize as requantize
    from fp8kit.moe.functional import grouped_scaled_mm as grouped_scaled_mm
    from fp8kit.perf.evaluate import Evaluation as Evaluation
    from fp8kit.perf.evaluate import evaluate as evaluate
    from fp8kit.perf.explain import explain as explain
    from fp8kit.perf.warmup import warmup as warmup
    from fp8kit.quantizers.rebase import rebase as rebase
    from fp8kit.quantizers.scale_layout import swizzle_scales as swizzle_scales
    from fp8kit.quantizers.scale_layout import unswizzle_scales as unswizzle_scales
else:
    _HOMES = {
        "checkpoint.inspection": "inspect",
        "io.translation": "convert_checkpoint",
        "perf.warmup": "warmup",
        "checkpoint.streaming.recipe": "Recipe",
        "io.checkpoints": "ray_runner quantize_checkpoint verify_checkpoint",
        "conversion.plan": "Plan convert plan",
        "conversion.experts": "register_experts",
        "errors": "CheckpointError ConversionError UnsupportedError",
        "perf.evaluate": "Evaluation evaluate",
        "perf.explain": "explain",
        "formats": "BLOCK GROUP128 MX ROW SCHEMES TENSOR GroupShape QTensor Scheme scale_shape "
        "stack_scale_shape",
        "functional": "dequantize linear quantize scaled_mm",
        "io.models": "load save",
        "modules.experts": "Fp8Experts",
        "modules.expert_stacks": "ExpertStacks",
        "modules.linear": "Fp8Linear",
        "integrations.transformers_quantizer": "Fp8KitConfig",
        "modules.weight_parts": "join_scales recode requantize",
        "moe.functional": "grouped_scaled_mm",
        "quantizers.rebase": "rebase",
        "quantizers.scale_layout": "swizzle_scales unswizzle_scales",
        "conversion.report": "Report",
        "conversion.patterns": "DEFAULT_EXCLUDE",
        "io.arriving_tensors": "load_weights",
        "integrations.kv_cache": "Fp8Cache Fp8StaticCache",
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
    # `import *` imports every name of __all__, and would fail at these without Transformers
    _missing = (
        set() if find_spec("transformers") else {"Fp8KitConfig", "Fp8Cache", "Fp8StaticCache"}
    )
    __all__ = sorted(_HOME_OF.keys() - _missing)

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module 'fp8kit' has no attribute {name!r}")
        home = f"fp8kit.{_HOME_OF.get(name, name)}"
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "transformers":
                arrived = f"fp8kit.{name} was asked for: {error}."
                required = "It is a class for Transformers 5.17 or later."
                remedy = "Run pip install 'fp8kit[transformers]'."
                text = _teach(arrived, required, remedy)
                raise ModuleNotFoundError(text, name=error.name) from error
            if error.name != home:
                raise
            raise AttributeError(f"module 'fp8kit' has no attribute {name!r}") from None
        globals()[name] = found = getattr(module, name) if name in _HOME_OF else module
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


register_when_loaded()
