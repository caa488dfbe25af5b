"""Models of diffusers: their own way of saving does not know FP8 codes and scales, and is refused.

diffusers reads quantized checkpoints of methods that it lists, and compressed-tensors is none.
"""

from __future__ import annotations

from typing import Any, NoReturn

from diffusers.models.modeling_utils import ModelMixin
from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from fp8kit.errors import CheckpointError, teach
from fp8kit.integrations.found import QuantizerOfLayers, restore_dense


class _Quantizer(DiffusersQuantizer):  # type: ignore[misc]
    """What diffusers asks about a model with FP8 layers."""

    is_trainable = True
    is_compileable = True

    @property
    def is_serializable(self) -> NoReturn:
        """Refuse ``save_pretrained``: what it writes would load as other numbers."""
        raise CheckpointError(
            teach(
                "Got save_pretrained of a diffusers model with FP8 layers.",
                "diffusers has no way to load codes and scales from what it would write.",
                "Save the model with fp8kit.save(model, directory); to load, build it dense and "
                "call fp8kit.load(directory, model). Save other parts of a pipeline one by one.",
            )
        )

    def dequantize(self, model: Any) -> Any:
        """Put dense layers in the place of FP8 ones."""
        restore_dense(model)
        return model

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        return model


def tell() -> None:
    """Let no diffusers model with FP8 layers be saved as if it were dense."""
    ModelMixin.hf_quantizer = QuantizerOfLayers(
        lambda _: _Quantizer(QuantizationConfigMixin("fp8kit"), pre_quantized=True)
    )
