"""Compute a policy that fits a memory budget."""
