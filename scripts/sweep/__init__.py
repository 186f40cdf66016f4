"""The parts of ``scripts/hf_sweep.py``."""
