"""Flags in another module, which tests change."""

LOUD = False


class Flags:
    loud = False
