"""The Hopper GEMM: one persistent CUDA C++ kernel, its tile configurations, and their choice."""
