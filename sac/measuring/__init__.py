"""Models from a spec, steps of training under each mode, and what they cost: bytes, FLOPs, seconds."""
