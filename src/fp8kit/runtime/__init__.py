"""Compile, launch, record and replay kernels, and decide when a replay or prefetch is safe."""
