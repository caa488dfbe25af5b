"""What the tensors of a checkpoint mean: names, layers, pairs, decoding, targets."""
