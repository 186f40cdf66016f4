"""What torch itself cannot do with the settings that this run was given; tests that need it are skipped, and say so."""

import os

import pytest

# torch 2.13: with ATEN_CPU_CAPABILITY=default, inductor writes `at::vec` into some kernels and leaves its header out.
vectorised_inductor = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch's inductor writes kernels that do not compile under ATEN_CPU_CAPABILITY=default",
)
