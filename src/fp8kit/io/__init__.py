"""Load, save, quantize and verify: models and checkpoints in directories."""
