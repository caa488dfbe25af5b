"""Layers that hold FP8 weights as ordinary Parameters: their ``state_dict`` is the checkpoint."""
