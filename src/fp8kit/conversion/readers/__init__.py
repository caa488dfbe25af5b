"""Find layers whose weight is read by code, or held by an object, that does not call them."""
