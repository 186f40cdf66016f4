"""The command line, comparison of modes, and pictures."""
