"""What a region's forward met beside its inputs: random states, flags, modes, buffers, state of the user's own."""
