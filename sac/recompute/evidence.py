"""Evidence: what earlier calls have shown. It saves time in later calls and never changes a result."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from sac.recompute.schedule import TapeLayout
from sac.recompute.table import CallSite, DecisionTable
from sac.recompute.whole_modules import ModuleEvidence
from sac.region.survey import Surveys

# Note [Evidence]
#
# Evidence is what earlier calls of a region have shown. It saves time in later calls and never changes a result.
#
# If rules decide on ops, or the user sets `engine: replay`, every call runs under a recorder. In `full`, and if all
# rules match whole modules, most regions do not need a recorder, and a recorder would be the largest overhead. So only
# the first call with each input signature runs under one. Later calls with the same signature enter no dispatch mode if
# that first call had none of these: a routing op, a generator passed by the caller, a write to an external tensor, a
# last op that writes to a tensor that autograd has saved. (With the native library, ordinary routing ops do not count:
# it holds what they choose, see Note [Watched calls].) Two calls have the same signature if their dtypes, shapes,
# `requires_grad` flags and plain values are equal and the function consists of the same parts (Note [Which function is
# it]). Evidence is per region.
#  - A call that read a tensor's value, or drew random numbers from Python or NumPy, may have branched on that. It is
#    no evidence for other calls, unless the library watches these.
#  - Once a region has needed a recorder, all its later calls have one.
#  - The state that a call without a recorder can reach is recorded first and restored later (Note [Python state], Note
#    [Buffers advance once]). If the call wrote to memory of which there is no copy, its activations are kept (Note [The
#    walk of a region]). With the native library, such a call is watched (Note [Watched calls]). For what is not seen
#    without it, see docs/limits.md.
#
# Example. A layer uses `torch.rand(()).item()` to skip itself with probability 0.5, and ends in an `rrelu`. The first
# call skips the layer, so `rand` is the only op that runs. That call read a value, so without the library the next call
# is recorded too. Since the layer's code names `rrelu`, so is every later call, with the library and without it.

_MOST = 1024  # input signatures that are remembered; with variable lengths there is no other bound

Signature = Any


class RegionEvidence:
    """Evidence from the calls of one region. A copy starts without it: signatures hold weak references.

    ``needs_recorder``: a call needed a recorder, or would have: all later calls have one. ``chooses``: later calls need
    one to hold what they choose, unless a watch does (Note [Watched calls]).
    """

    def __init__(self, *, needs_recorder: bool = False, chooses: bool = False) -> None:
        self.needs_recorder = needs_recorder
        self.chooses = chooses
        self.function_keys: dict[Hashable, object] = {}  # parts of the function in a call -> its function key
        self.needs_no_mode: dict[Signature, None] = {}  # input signatures whose calls need no dispatch mode
        self.may_branch: dict[Signature, None] = {}  # those whose calls need none if the library watches them
        self.modules: dict[Signature, ModuleEvidence] = {}  # on modules saved as a whole
        self.verified: dict[Signature, None] = {}  # signatures of which one call has been compared with its replay
        self.surveys = Surveys()  # what the modules' Python can reach

    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, (self.needs_recorder, self.chooses)

    def require_recorder(self) -> None:
        """Record all later calls, since a call without a recorder wrote to something."""
        self.needs_no_mode.clear()
        self.may_branch.clear()
        self.modules.clear()
        self.needs_recorder = True


def _copied(needs_recorder: bool, chooses: bool = False) -> RegionEvidence:
    return RegionEvidence(needs_recorder=needs_recorder, chooses=chooses)


# Of calls under ``sac.context_fn``, which knows neither region nor signature.
MODULE_EVIDENCE: weakref.WeakKeyDictionary[DecisionTable, ModuleEvidence] = weakref.WeakKeyDictionary()


class GroupEvidence:
    """Evidence that the regions of a group share. ``not_replayable``: why they are not replayed; ``serves``: Python
    that ran again has never found other values than the forward, served with what was saved.

    ``constants`` and ``calls_on_inputs`` decide only what is kept, and a kept value is right in any call. On a device,
    ``constants`` can make a call keep less: if a kernel writes to such a tensor in a later call only, the replayed
    value differs, and every call compares it (`verify`).
    """

    def __init__(self) -> None:
        self.not_replayable = ""
        self.serves = True
        self.layouts: dict[Signature, TapeLayout] = {}
        # Call site and entry -> shape of the factory result made there, and whether it was a constant when it was read.
        self.constants: dict[tuple[CallSite, int], tuple[torch.Size, bool]] = {}
        self.calls_on_inputs: set[tuple[CallSite, int]] = set()  # calls whose results depended on more than parameters


def remember(known: dict[Any, Any], key: Any, value: Any = None) -> None:
    """Put ``value`` under ``key``; a table that is full is emptied first."""
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
