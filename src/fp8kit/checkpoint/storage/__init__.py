"""How a checkpoint lies on disk: headers, shards, directories."""
