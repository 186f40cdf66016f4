"""Regions in what ``torch.compile`` traces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac.region.eager import kept_out_of_graphs
from sac.selective.contexts import checkpoint_contexts
from sac.selective.table import Table

# Note [Regions under torch.compile]
#
# Our frame cannot be traced. Inside a compiled function a region is a call of `torch.utils.checkpoint`, which Dynamo
# puts into its graph, with our decisions as tags for the partitioner. What only our frame can do
# (`Settings.needs_frame`) is not dropped: such a region runs in eager, as a call that Dynamo does not look into. That
# breaks the graph there; under `fullgraph=True` it is torch's own error, which gives our reason.

_TAKEN = {"function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}


def run_traced(function: Callable[..., Any], table: Table, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run ``function(*args, **kwargs)`` as a region of a graph that is being traced."""
    contexts = partial(checkpoint_contexts, table, in_graph=True)  # no path: Dynamo would compile each region anew
    if not _TAKEN.isdisjoint(kwargs):  # the function's own, which torch would take for its own
        function, kwargs = partial(function, **kwargs), {}
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


run_in_eager = kept_out_of_graphs(
    "sac runs this region in eager: inputs that are kept elsewhere, trackers, generators, state providers and "
    "use_reentrant cannot be put into a graph",
)
