"""Checkpoints on disk: dialects, reading, writing, inspecting."""
