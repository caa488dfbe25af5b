"""Finds writes into copies that a cache layer has decoded, where they would be lost."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fp8kit.errors import UnsupportedError


class DecodedCopies:
    """The copies of one tensor of a cache layer that code has read.

    They are plain tensors, which compilers take, so a write is found only when the layer is used
    again, by torch's count of changes. Nothing keeps a copy in memory. Not found are writes under
    ``torch.inference_mode``, in compiled code that reads the layer itself, and through ``data`` or
    ``detach()``. Copies of this object watch nothing.
    """

    def __init__(self) -> None:
        self._watched: list[weakref.finalize[..., Any]] = []
        self._written = False

    def __reduce__(self) -> Any:
        """Copy and pickle as a new object."""
        return type(self), ()

    def watch(self, copied: Tensor) -> Tensor:
        """Return the copy, and watch it and its views for as long as they live."""
        if not (torch.compiler.is_compiling() or copied.is_inference()):
            same = copied.detach()  # has the copy's count of changes
            watcher = weakref.finalize(copied, self._look, same, same._version)
            watcher.atexit = False
            self._watched = [w for w in self._watched if w.alive] + [watcher]
        return copied

    def forget(self) -> None:
        """Accept what was written."""
        for watcher in self._watched:
            watcher.detach()
        self._watched, self._written = [], False

    def refuse_writes(self, name: str) -> None:
        """Raise ``UnsupportedError``, once, if code has written into a copy."""
        if torch.compiler.is_compiling():
            return
        for alive in (w.peek() for w in self._watched):
            if alive is not None:
                self._look(*alive[2])
        if self._written:
            self.forget()
            raise UnsupportedError(
                f"Code has written into {name} of an FP8 cache layer in place.",
                f"Reading {name} gives a decoded copy: the cache has not changed.",
                f"Assign what is changed: `changed = layer.{name}`, change it, then "
                f"`layer.{name} = changed`.",
            )

    def _look(self, same: Tensor, version: int) -> None:
        self._written |= same._version != version
