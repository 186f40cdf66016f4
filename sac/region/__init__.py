"""One checkpointed call: the state that it keeps between forward and backward, and its recomputation."""
