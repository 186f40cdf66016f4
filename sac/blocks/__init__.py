"""Find the modules of a model that become regions, and install regions on them."""
