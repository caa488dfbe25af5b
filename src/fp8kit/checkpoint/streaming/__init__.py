"""Quantize checkpoints of any size, tensor by tensor, and resume."""
