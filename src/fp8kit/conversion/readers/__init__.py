"""Which layers have their weight read by code that does not call them, found in that code."""
