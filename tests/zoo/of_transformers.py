"""The zoo's models of Transformers: one class per model type, with a head if there is one."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from zoo.architecture import Architecture
from zoo.transformers_inputs import inputs_of
from zoo.transformers_sizes import tiny_config

# a model type is represented by its class for the first of these tasks that it has
TASKS = (
    "MASKED_LM",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
    "TIME_SERIES_PREDICTION",
    "MASK_GENERATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "TOKEN_CLASSIFICATION",
    "PRETRAINING",
)
# more models whose code reads a layer's weight: text in brackets, model type, class, config fields
VARIANTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        " (slow but exact)",
        "bloom",
        "BloomForCausalLM",
        {"pretraining_tp": 2, "slow_but_exact": True},
    ),
    ("", "detr", "DetrForSegmentation", {}),
    ("", "mobilebert", "MobileBertForPreTraining", {}),
)


def architectures() -> list[Architecture]:
    """Return one architecture per model type of the auto classes, and ``VARIANTS``."""
    every = [("", kind, name, {}) for kind, name in classes().items()]
    return [
        Architecture(f"transformers/{name}{word}", partial(_build, kind, name, fields), inputs_of)
        for word, kind, name, fields in (*every, *VARIANTS)
    ]


def classes() -> dict[str, str]:
    """Return the name of a class for every model type."""
    every: dict[str, str] = {}
    names = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS]
    for name in (*names, "MODEL_MAPPING_NAMES"):
        for kind, cls in getattr(modeling_auto, name, {}).items():
            every.setdefault(kind, cls if isinstance(cls, str) else cls[-1])
    unique: dict[str, str] = {}
    for kind, name in every.items():
        if name not in unique.values():
            unique[kind] = name
    return unique


def _build(kind: str, name: str, fields: dict[str, Any]) -> nn.Module:
    made = getattr(transformers, name)
    own = getattr(made.config_class, "model_type", None)  # of a part, where the class is of a part
    kind = own if own in CONFIG_MAPPING and own not in (kind, "") else kind
    model: nn.Module = made(tiny_config(kind, **fields))
    return model
