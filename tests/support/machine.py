"""What torch itself cannot do with the settings that this run was given; tests that need it are skipped, and say so."""

import functools
import os

import pytest
import torch
from torch.nn import functional as F

# torch 2.13: with ATEN_CPU_CAPABILITY=default, inductor writes `at::vec` into some kernels and leaves its header out.
vectorised_inductor = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch's inductor writes kernels that do not compile under ATEN_CPU_CAPABILITY=default",
)


@functools.cache
def missing_in_bfloat16_attention() -> str:
    """Return what torch says to attention in bfloat16 on this CPU, "" if it runs.

    torch 2.13 asks the processor whether a kernel can be used that ATEN_CPU_CAPABILITY has switched off.
    """
    heads = torch.ones(1, 2, 64, 16, dtype=torch.bfloat16)
    try:
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
