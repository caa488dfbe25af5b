"""The experts on Hopper: sorted pairs, two grouped GEMMs, and the sum of each token's rows."""
