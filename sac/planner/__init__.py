"""From a memory budget to a policy."""
