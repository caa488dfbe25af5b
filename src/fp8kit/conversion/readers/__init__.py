"""Find, in the source of a model, layers whose weight is read by code that does not call them."""
