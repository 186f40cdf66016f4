"""Other systems' checkpointing APIs, implemented by this package: only the import line changes."""
