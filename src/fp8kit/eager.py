"""The name under which files from before ``runtime.replay_cache`` hold an empty cache."""

from __future__ import annotations

from fp8kit.runtime.replay_cache import ReplayCache as Tapes  # noqa: F401
