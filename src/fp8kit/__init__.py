"""FP8 (W8A8) linear layers for any PyTorch model: convert, run, save and load.

The data flow, which is also the order of the modules::

    formats     GroupShape, Scheme, QTensor: what a quantized tensor is
    quantizers  high precision -> codes and scales
    matmul      codes x codes -> high precision, by the best backend that fits
    ops         the registered operators that torch.compile sees
    functional  quantize, dequantize, scaled_mm, linear: checked entry points
    modules     Fp8Linear: its state_dict is the checkpoint
    conversion  plan and convert: dense layers become FP8 layers
    checkpoint  dialects of files on disk
    model_io    save and load: models to and from directories
    weight_loading  load_weights: tensors as they arrive, in place
    checkpoint_io  quantize_checkpoint, verify_checkpoint: directories of any size
    bench       measuring, tuning, warming up
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING

if "torch" not in sys.modules:
    # Nothing here needs numpy: torch shall not miss it at every command. Filters are not restored
    # as a whole, because torch adds some of its own.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    _of_numpy = warnings.filters[0]
    import torch  # noqa: F401

    warnings.filters.remove(_of_numpy)  # type: ignore[attr-defined]

# These at once: an exported program finds its operators in torch's registry, by no name of ours.
# Everything else is imported when it is asked for.
from fp8kit import fused_ops  # noqa: F401
from fp8kit.ops import schemas  # noqa: F401

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fp8kit.bench.warming import warmup as warmup
    from fp8kit.checkpoint.recipe import Recipe as Recipe
    from fp8kit.checkpoint_io import quantize_checkpoint as quantize_checkpoint
    from fp8kit.checkpoint_io import verify_checkpoint as verify_checkpoint
    from fp8kit.conversion import Plan as Plan
    from fp8kit.conversion import convert as convert
    from fp8kit.conversion import plan as plan
    from fp8kit.errors import CheckpointError as CheckpointError
    from fp8kit.errors import ConversionError as ConversionError
    from fp8kit.errors import UnsupportedError as UnsupportedError
    from fp8kit.explanation import explain as explain
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
    from fp8kit.functional import dequantize as dequantize
    from fp8kit.functional import linear as linear
    from fp8kit.functional import quantize as quantize
    from fp8kit.functional import scaled_mm as scaled_mm
    from fp8kit.model_io import load as load
    from fp8kit.model_io import save as save
    from fp8kit.modules.linear import Fp8Linear as Fp8Linear
    from fp8kit.report import Report as Report
    from fp8kit.selection import DEFAULT_EXCLUDE as DEFAULT_EXCLUDE
    from fp8kit.weight_loading import load_weights as load_weights
else:
    _HOMES = {
        "bench.warming": "warmup",
        "checkpoint.recipe": "Recipe",
        "checkpoint_io": "quantize_checkpoint verify_checkpoint",
        "conversion": "Plan convert plan",
        "errors": "CheckpointError ConversionError UnsupportedError",
        "explanation": "explain",
        "formats": "BLOCK GROUP128 MX ROW SCHEMES TENSOR GroupShape QTensor Scheme scale_shape",
        "functional": "dequantize linear quantize scaled_mm",
        "model_io": "load save",
        "modules.linear": "Fp8Linear",
        "report": "Report",
        "selection": "DEFAULT_EXCLUDE",
        "weight_loading": "load_weights",
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
    __all__ = sorted(_HOME_OF)

    def __getattr__(name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"module 'fp8kit' has no attribute {name!r}")
        home = f"fp8kit.{_HOME_OF.get(name, name)}"
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name != home:
                raise
            raise AttributeError(f"module 'fp8kit' has no attribute {name!r}") from None
        globals()[name] = found = getattr(module, name) if name in _HOME_OF else module
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
