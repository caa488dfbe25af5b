"""FP8 codes times FP8 codes, with scales: one module per backend, chosen by ``dispatch``."""
