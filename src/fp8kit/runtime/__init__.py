"""What runs kernels: launches recorded and repeated, and what makes that safe."""
