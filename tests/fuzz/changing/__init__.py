"""Random programs that change between steps, written as Python source from a seed."""
