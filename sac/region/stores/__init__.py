"""Where the inputs of a region lie between forward and backward, when not where the caller holds them."""
