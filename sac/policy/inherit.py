"""What `extends` means: one line of files, nearest first, folded into one policy.

# Note [Inheritance]
A policy and its parents are put into one line: the file itself, its first parent and that one's parents, then the
second parent, and so on; a file that is reached twice counts where it comes last, so that it stands behind everything
that extends it. Then
- rules stand in the order of the line: a child's come before its parents', and the first match wins;
- a rule with an ``id`` hides the rules of the same id further down the line: that is how a child replaces one rule;
- ``default``, ``regions.blocks`` and ``regions.layers`` are those of the first file that sets them;
- ``sets`` of one name are joined, the child's ops first;
- ``name`` and ``models`` are the file's own: a child does not serve the families of its parent by itself;
- ``plan`` too: with rules of its own a child is not what its parent's plan was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sac.policy.model import Policy, Rule
from sac.policy.schema import Written


def join_lines(written: Written, parents: Sequence[tuple[Written, ...]]) -> tuple[Written, ...]:
    """Return the line of a file from the lines of its parents; see Note [Inheritance]."""
    line = [written, *(ancestor for parent in parents for ancestor in parent)]
    last = {id(one): place for place, one in enumerate(line)}
    return tuple(one for place, one in enumerate(line) if last[id(one)] == place)


def fold(line: Sequence[Written]) -> Policy:
    """Return the one policy that a line of files means; see Note [Inheritance]."""
    policies = [written.policy for written in line]
    child = policies[0]
    sets: dict[str, tuple[str, ...]] = {}
    for policy in policies:
        for name, ops in policy.sets.items():
            sets[name] = tuple(dict.fromkeys((*sets.get(name, ()), *ops)))
    default, blocks, layers = (_first_that_sets(key, policies) for key in ("default", "blocks", "layers"))
    marks = [policy.key_marks for policy in policies]
    inherited = {key: mark for one in reversed(marks) for key, mark in one.items() if key in _INHERITED}
    return replace(
        child,
        rules=_fold_rules(policies),
        default=default.default,
        blocks=blocks.blocks,
        layers=layers.layers,
        sets=sets,
        set_marks={name: mark for policy in reversed(policies) for name, mark in policy.set_marks.items()},
        extends=tuple(policy.name for policy in policies[1:]),
        key_marks=inherited | dict(child.key_marks),
    )


_INHERITED = ("default", "regions", "blocks", "layers", "sets")


def _first_that_sets(key: str, policies: Sequence[Policy]) -> Policy:
    return next((policy for policy in policies if key in policy.key_marks), policies[0])


def _fold_rules(policies: Sequence[Policy]) -> tuple[Rule, ...]:
    taken: dict[str, Rule] = {}
    for rule in (rule for policy in policies for rule in policy.rules):
        same = taken.get(rule.id)
        if same is None:
            taken[rule.id] = rule
        elif not ("id" in same.key_marks and "id" in rule.key_marks):
            # Ids that sac made up clash only when two files have one name: that hides nothing.
            free = next(f"{rule.id}.{n}" for n in range(2, len(taken) + 3) if f"{rule.id}.{n}" not in taken)
            taken[free] = replace(rule, id=free)
    return tuple(taken.values())
