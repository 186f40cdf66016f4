"""Policies as data, with source locations. Nothing here imports torch."""
