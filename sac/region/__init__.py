"""One checkpointed call: what it keeps between forward and backward, and how it is run again."""
