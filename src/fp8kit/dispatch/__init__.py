"""Choose among backends: their order, measured times, and what the device can do."""
