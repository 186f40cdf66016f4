"""Which compiled graph a call gets where several fit it: recomputation has to get the one that forward got."""

from __future__ import annotations

import sys

import torch

# Note [Graphs that both fit]
#
# Where `torch.compile` is used inside a region, Dynamo holds the graphs of one code object in a list and takes the
# first whose guards hold. As it comes, the list is in the order of last use, and a new graph is put in front. A second
# micro-batch of another length makes a dynamic graph, which fits the first micro-batch too: recomputation of that one
# then gets the dynamic graph, and forward had the static one. The two need not save the same tensors for their
# backward: an error at best, and wrong gradients if they only save them in another order.
#
# So from the first region on that runs in a process with Dynamo, the list is in the order of making, for the whole
# process. What fits first then stays what fits first. No result hangs on the order but ours; looking a graph up may
# take a few guards more. It is not turned on again: whether the user had turned it off cannot be asked, and a graph
# that is used outside regions as well would be moved there.

# Private name (torch 2.10 to 2.13), the one that torch's own message on this gives. Without it the error remains.
_set_by_last_use = getattr(getattr(torch._C._dynamo, "eval_frame", None), "_set_lru_cache", None)


def keep_order_of_graphs() -> None:
    """Let what Dynamo has compiled stay in the order in which it was compiled; see Note [Graphs that both fit]."""
    if _set_by_last_use is not None and "torch._dynamo" in sys.modules:
        _set_by_last_use(False)
