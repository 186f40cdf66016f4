"""Which modules of a model become regions, and putting sac on them."""
