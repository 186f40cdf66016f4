"""Regions without per-op decisions."""
