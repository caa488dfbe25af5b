"""Classes under their paths in earlier versions, so that old pickles load.

A pickle names a class by module and name. ``register`` puts a substitute for each old module into
``sys.modules``. The substitute imports the new module when a class is looked up, so importing this
package imports none of them. A class that moves after a release gets a row here.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# old module -> new module
MODULES = {
    "fp8kit.checkpoint.recipe": "fp8kit.checkpoint.streaming.recipe",
    "fp8kit.eager": "fp8kit.runtime.replay_cache",
    "fp8kit.modules.formulas": "fp8kit.modules.norm_formula",
    "fp8kit.modules.fused": "fp8kit.modules.fused_producers",
    "fp8kit.modules.fused_diffusers": "fp8kit.modules.diffusers_producers",
    "fp8kit.modules.residual": "fp8kit.modules.decoder_layer",
    "fp8kit.modules.shared": "fp8kit.modules.shared_input",
    "fp8kit.modules.stacked_experts": "fp8kit.modules.library_experts",
    "fp8kit.moe.choice": "fp8kit.moe.top_k",
    "fp8kit.report": "fp8kit.conversion.report",
}
# (old module, old name) -> new name
NAMES = {("fp8kit.eager", "Tapes"): "ReplayCache"}


class _OldModule(ModuleType):
    """A module that is gone; it looks its names up in the module that has them now."""

    def __getattr__(self, name: str) -> Any:
        """Return the class that had this name here."""
        if name.startswith("__"):
            raise AttributeError(name)
        module = importlib.import_module(MODULES[self.__name__])
        return getattr(module, NAMES.get((self.__name__, name), name))


def register() -> None:
    """Make the old modules importable."""
    for name in MODULES:
        sys.modules.setdefault(name, _OldModule(name))
