"""What people save by hand: the baselines of a plan, and options of its search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from sac.ops.names import resolve_ops
from sac.ops.registry import find_op
from sac.planner.choices import Choice
from sac.planner.profile import RegionProfile

# Note [Choices by hand]
#
# The Pareto-optimal save options of a region (pareto.py) are best in what a region holds and what it recomputes. The
# peak of a step also counts what is alive for a moment, so a choice that is worse in both can have the lower peak. So
# that no plan is dominated by what people choose without a planner, their choices are options of the search too: the
# save-set `selective` has for each region, attention with every product, and attention with every second product. If
# the search finds nothing within a budget, or only what is slower, these choices for all regions, and full in every
# n-th layer, are tried as they are (plan_file.py).

SELECTIVE = "selective"  # the shipped policy of the model's family
ATTENTION_ALTERNATE = "attention + every 2nd matmul"
ATTENTION_MATMULS = "attention + all matmuls"

_PRODUCTS = ("matmul", "grouped_matmul", "low_precision_matmul")

SavedByPath = Mapping[str, frozenset[int]]  # path of a region -> the entries it saves


def saved_by_hand(profiles: Sequence[RegionProfile], shipped: SavedByPath) -> Mapping[str, SavedByPath]:
    """Return what each choice by hand saves in each region; ``shipped``: what the policy of the model's family saves.

    Attention and matrix products are the ops of the save-sets of these names. Every second product means the 1st, 3rd,
    5th … in forward order, as with ``do: alternate``.
    """
    attention, products = resolve_ops(("attention",)), resolve_ops(_PRODUCTS)

    def usual(profile: RegionProfile, label: str) -> Iterator[int]:
        turn = 0
        for entry in profile.candidates:
            op = find_op(entry.op)
            if op is not None and attention.matches(op):
                yield entry.number
            elif op is not None and products.matches(op):
                if label == ATTENTION_MATMULS or turn % 2 == 0:
                    yield entry.number
                turn += 1

    found = {SELECTIVE: shipped}
    for label in (ATTENTION_ALTERNATE, ATTENTION_MATMULS):
        of_profile = [(profile.paths, frozenset(usual(profile, label))) for profile in profiles]
        found[label] = {path: entries for paths, entries in of_profile for path in paths}
    return MappingProxyType(found)


def with_choices_by_hand(
    choices: Sequence[Choice],
    profile: RegionProfile,
    by_hand: Mapping[str, SavedByPath],
    choice: Callable[[frozenset[int], str], Choice],
) -> tuple[Choice, ...]:
    """Return the choices of a region group and those by hand that are not among them, by the bytes they hold.

    ``choice`` returns that of saving the given entries, with a label. No checkpointing stays the last.
    """
    *found, none = choices
    known = {one.keep.saved for one in found if one.keep is not None}
    for label, saved in by_hand.items():
        for entries in {saved[path]: None for path in profile.paths}:
            if entries not in known:
                found.append(choice(entries, label))
                known.add(entries)
    return (*sorted(found, key=lambda one: (one.bytes, -one.seconds)), none)
