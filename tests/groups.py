"""Groups of layers that nothing else holds, as a model would."""

from __future__ import annotations

from collections.abc import Sequence

import fp8kit
from fp8kit.modules.shared_input import SharedInput


class Group(SharedInput):
    """A group that keeps its layers, which must stay for as long as a test has the group."""

    def __init__(self, layers: Sequence[fp8kit.Fp8Linear]) -> None:
        super().__init__(layers, unchanging=True)
        self.layers = layers
