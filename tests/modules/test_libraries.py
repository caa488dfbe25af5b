"""Libraries that save models themselves are patched for FP8 layers, once they are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

import fp8kit
import fresh
from fp8kit.modules import libraries


def test_converting_loads_no_library() -> None:
    code = (
        "import sys, torch, fp8kit\n"
        "model = torch.nn.Sequential(torch.nn.Linear(128, 128))\n"
        "fp8kit.convert(model)\n"
        "assert not {'transformers', 'diffusers', 'peft', 'accelerate'} & sys.modules.keys()\n"
    )
    fresh.run(code)


def test_a_library_that_cannot_be_told_is_named_once(
    monkeypatch: pytest.MonkeyPatch, outdate: Callable[[ModuleType], None]
) -> None:
    monkeypatch.setattr(libraries, "_patched", set())  # another test may have patched them
    pytest.importorskip("transformers.modeling_utils")
    # its first processor is imported with another `transformers` in sys.modules from then on
    outdate(pytest.importorskip("fp8kit.integrations.transformers_saving").transformers)
    with pytest.warns(UserWarning, match=r"transformers is loaded.*for 5\.17 .*fp8kit\.save"):
        fp8kit.convert(nn.Sequential(nn.Linear(128, 128)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8kit.convert(nn.Sequential(nn.Linear(128, 128, dtype=torch.bfloat16)))


@pytest.mark.parametrize("first", ["fp8kit, diffusers", "diffusers, fp8kit"])
def test_diffusers_knows_the_method_once_both_are_imported(first: str) -> None:
    pytest.importorskip("diffusers")
    code = (
        f"import sys, {first}\n"
        "assert 'diffusers.models.modeling_utils' not in sys.modules\n"
        "assert 'fp8kit.integrations' not in sys.modules\n"
        "diffusers.FluxTransformer2DModel\n"
        "from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "assert 'fp8kit' in AUTO_QUANTIZER_MAPPING\n"
        "import huggingface_hub.hub_mixin, torch.utils.flop_counter\n"
        "spec = sys.modules['diffusers.models.modeling_utils'].__spec__\n"
        "assert type(spec.loader).__name__ == 'SourceFileLoader'\n"
        "assert not any('fp8kit' in type(f).__module__ for f in sys.meta_path)\n"
    )
    fresh.run(code)


@pytest.mark.parametrize(
    "first", ["fp8kit, huggingface_hub.hub_mixin", "huggingface_hub.hub_mixin, fp8kit"]
)
def test_the_mixin_is_told_once_both_are_imported(first: str) -> None:
    pytest.importorskip("huggingface_hub")
    code = (
        f"import {first}\n"
        "load = huggingface_hub.hub_mixin.PyTorchModelHubMixin._load_as_safetensor\n"
        "assert load.__globals__['__name__'] == 'fp8kit.integrations.huggingface_hub'\n"
    )
    fresh.run(code)


def test_diffusers_loaded_first_is_told_at_the_import() -> None:
    pytest.importorskip("diffusers")
    code = (
        "from diffusers.models.modeling_utils import ModelMixin\n"
        "from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING\n"
        "assert 'fp8kit' not in AUTO_QUANTIZER_MAPPING\n"
        "import fp8kit\n"
        "assert 'fp8kit' in AUTO_QUANTIZER_MAPPING\n"
    )
    fresh.run(code)


@pytest.mark.parametrize(
    "before",
    [
        "import fp8kit, diffusers",
        "import diffusers, fp8kit",
        "import diffusers; diffusers.PipelineQuantizationConfig; import fp8kit",
    ],
)
def test_a_pipeline_finds_the_method_by_its_name(before: str) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    code = (
        f"import sys\n{before}\n"
        "make = diffusers.PipelineQuantizationConfig\n"
        "assert 'fp8kit.integrations.diffusers' not in sys.modules\n"
        "config = make('fp8kit', {'scheme': 'FP8_BLOCK'}, ['transformer'])\n"
        "found = config._resolve_quant_config(True, 'transformer')\n"
        "assert type(found).__module__ == 'fp8kit.integrations.diffusers'\n"
        "found = config._resolve_quant_config(False, 'transformer')\n"
        "assert type(found).__module__ == 'fp8kit.integrations.transformers_quantizer'\n"
    )
    fresh.run(code)
