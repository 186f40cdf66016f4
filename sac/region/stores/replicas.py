"""Whether all ranks of a group have the same tensor, bit for bit."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from sac.errors import Problem, RegionError
from sac.region.stores.placements import Origin

# Note [Checksum of bits]
#
# A tensor's bits are read as integers v_i, and summed with weights of their own: sum of v_i * w_i modulo 2^64, all w_i
# odd. A change of one element always changes the sum; other changes, and elements that change places, do but for one
# chance in about 2^60. Integers add up to the same in any order, so it does not matter how a device sums. Whether all
# ranks have one number is told by one all-reduce of its smallest value and of its largest, which is that of -x.

_CHUNK = 1 << 20  # elements weighted at once
_FACTOR = 0x5851F42D4C957F2D  # of Knuth's MMIX generator
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def check_same_on_all_ranks(flat: torch.Tensor, origin: Origin, group: Any) -> None:
    """Raise ``RegionError`` on every rank of ``group`` if shape, strides, dtype or bits differ between its ranks."""
    layout = origin.layout
    described = repr((tuple(layout.shape), layout.stride, layout.conjugate, layout.negative, str(flat.dtype)))
    digest = hashlib.blake2b(described.encode(), digest_size=7).digest()
    total = bit_checksum(flat)
    low, high = total & 0xFFFFFFFF, (total >> 32) & 0xFFFFFFFF  # halves: the negative of any is an int64 too
    own = torch.stack([total.new_tensor(int.from_bytes(digest, "big")), low, high])
    both = torch.cat([own, -own])
    dist.all_reduce(both, op=dist.ReduceOp.MIN, group=group)
    smallest, largest = both.tolist()[:3], (-both).tolist()[3:]
    if smallest == largest:
        return
    what = "shape, strides or dtype" if smallest[0] != largest[0] else "values"
    raise RegionError(
        Problem(
            origin.name(),
            f"its {what} are not the same on all {group.size()} ranks of the group that it is to be scattered over "
            "(is it split between them, as in sequence parallelism?)",
            fix="scatter what all ranks have whole: choose by `keep`, or keep the inputs of this region whole",
        )
    )


def bit_checksum(flat: torch.Tensor) -> torch.Tensor:
    """Return a sum over the bits of a flat tensor, one int64, that knows their order; see Note [Checksum of bits]."""
    words = flat.view(_WORDS[flat.element_size()]) if flat.numel() else flat.new_empty(0, dtype=torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + chunk.numel(), device=flat.device)
        weights.mul_(_FACTOR)
        weights.bitwise_xor_(weights >> 29).mul_(_FACTOR).bitwise_or_(1)
        total += (chunk * weights).sum()
    return total
