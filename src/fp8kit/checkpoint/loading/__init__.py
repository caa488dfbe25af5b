"""Put the tensors of a checkpoint into a model."""
