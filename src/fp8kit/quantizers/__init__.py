"""High precision in, FP8 codes and scales out: one module per implementation."""
