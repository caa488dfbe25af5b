"""Measuring: timing cases against each other, benchmarks, tuning, warming up."""
