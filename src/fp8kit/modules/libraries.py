"""Libraries that save or change models by means of their own are told of FP8 layers.

Their ``save_pretrained`` writes the ``state_dict`` and a config; of codes without a config they
would make a dense model of wrong numbers. PEFT puts layers of its own around ours, and computes
with their weights when it merges. A library that is not loaded is not touched.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from fp8kit.errors import UnsupportedError, teach

# a module that defines what a library makes, and what tells that library
_TOLD_BY = {
    "transformers.modeling_utils": "fp8kit.integrations.transformers_quantizer",
    "diffusers.models.modeling_utils": "fp8kit.integrations.diffusers",
    "peft.tuners.lora.model": "fp8kit.integrations.peft",
}
_told: set[str] = set()


def tell_libraries() -> None:
    """Prepare the libraries that are loaded for models with FP8 layers.

    A version that cannot be told is named in a warning, once.
    """
    for library, telling in _TOLD_BY.items():
        if library in sys.modules and library not in _told:
            _told.add(library)
            try:
                importlib.import_module(telling).tell()
            except (ImportError, UnsupportedError) as error:
                name = library.partition(".")[0]
                warnings.warn(
                    teach(
                        f"FP8 layers are made while {name} is loaded, which cannot be told: "
                        f"{str(error).rstrip('.')}.",
                        f"{name} takes them for dense, also where it saves or merges them.",
                        "Save such models with fp8kit.save, or upgrade it.",
                    ),
                    stacklevel=2,
                )
