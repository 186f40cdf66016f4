"""The optional C++ library: what it is compiled for, where it lies, how it is compiled, tested and loaded."""
