"""Load a policy from a shipped name, a path or a mapping, together with the files that it extends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from sac.errors import listing, nearest
from sac.policy.model import Policy, Rule
from sac.policy.read import each, read_policy, word_of
from sac.policy.syntax import Node, compose_yaml, node_of

PolicySource: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | Policy"

# Note [Inheritance]
#
# A policy and its parents form one line of files, nearest first: the file itself, its first parent and that parent's
# parents, then the second parent, and so on. A file that is reached twice counts at its last position, after everything
# that extends it. The files are merged as follows:
# - Rules are in the order of the line: a child's rules come before its parents', and the first match wins.
# - A rule with an ``id`` hides rules with the same id later in the line, so a child can replace a single rule.
# - ``default``, ``regions.blocks`` and ``regions.layers`` come from the first file that sets them.
# - ``sets`` with the same name are joined, the child's ops first.
# - ``name`` and ``models`` are not inherited: a child does not serve the families of its parent by itself.


def load_policy(source: PolicySource, *, where: str = "policy") -> Policy:
    """Return the policy that ``source`` refers to or contains, merged with the policies that it extends.

    ``source``: the name of a shipped policy; a path (a ``PathLike``, or a string that ends in ``.yaml`` or ``.yml`` or
    contains a separator); a mapping with the content of a YAML file, in which ``schema`` is optional and relative paths
    start at the working directory; or a ``Policy``, which is returned unchanged. ``where`` is the name of the argument
    in messages. See Note [Inheritance]. Raises ``PolicyError`` with every problem of the policy and of its parents.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        return _merged(_line_of(node_of(source, where), "inline", where, Path()))
    if isinstance(source, os.PathLike):
        source = os.path.join(os.curdir, os.fsdecode(source))  # a path, also without an ending; absolute ones stay
    if isinstance(source, str):
        return _merged(_line_of_file(node_of(source, where), Path()))
    expected = f"a path, a mapping, a Policy, or one of {listing(shipped_policies())}"
    raise node_of(source, where).error(expected, found=f"a policy is meant, this is {node_of(source, where)}")


# -- Shipped policies, and files


def shipped_directory() -> Path:
    """Return the directory of the shipped policies: ``policies/`` of a checkout run in place, or package data."""
    beside = Path(__file__).resolve().parents[2] / "policies"
    return beside if (beside / "general.yaml").exists() else Path(str(resources.files("sac.policies")))


def shipped_policies() -> tuple[str, ...]:
    """Return the names of the shipped policies, sorted."""
    return tuple(sorted(path.stem for path in shipped_directory().glob("*.yaml")))


def is_shipped(location: str) -> bool:
    """Return whether ``location`` is in a shipped policy and not in a user's file."""
    return location.startswith(f"{shipped_directory()}{os.sep}")


def looks_like_path(text: str) -> bool:
    """Return whether ``text`` is a file path, as opposed to the name of a shipped policy."""
    return text.lower().endswith((".yaml", ".yml")) or any(sep in text for sep in (os.sep, os.altsep) if sep)


def _line_of_file(node: Node, base: Path, trail: tuple[Path, ...] = ()) -> list[Policy]:
    """Return the line of the file that ``node`` names: a shipped policy, or a path relative to ``base``.

    ``trail`` holds the files whose `extends` led to it.
    """
    names, name = shipped_policies(), word_of(node.text)
    if looks_like_path(node.text):
        path = base / os.path.expanduser(node.text)
    elif name in names:
        path = shipped_directory() / f"{name}.yaml"
    else:
        fix = 'to name a file, give a path that ends in .yaml or has a "/" in it'
        found = f"no shipped policy is called {node}"
        raise node.error(listing(names), found=found, nearest=nearest(name, names), fix=fix)
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= 2**20):  # a pipe would never end
            raise OSError("it is not a regular file of at most 1 MiB")
        resolved, data = path.resolve(), path.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; a loop of links
        found = f"the file {node} cannot be read: {getattr(error, 'strerror', None) or error}"
        near = nearest(path.stem, names)
        raise node.error(found=found, nearest=near, fix="" if near else "check the path") from None
    if resolved in trail or len(trail) == 16:
        fix = "remove one of these `extends`"
        raise node.error(found=f"extends goes in a circle or through more than 16 files: back to {path}", fix=fix)
    return _line_of(compose_yaml(data, str(path)), path.stem, str(path), path.parent, (*trail, resolved))


def _line_of(node: Node, name: str, source: str, base: Path, trail: tuple[Path, ...] = ()) -> list[Policy]:
    policy, parents = read_policy(node, name, source, each(lambda parent: _line_of_file(parent, base, trail)))
    line = [policy]
    for ancestors in parents or ():
        line = [one for one in line if one.source not in {parent.source for parent in ancestors}] + ancestors
    return line


# -- Merging a policy with its parents, see Note [Inheritance]

_SET_ONCE = {"default": "default", "regions.blocks": "blocks", "regions.layers": "layers"}


def _merged(line: Sequence[Policy]) -> Policy:
    rules: dict[str, Rule] = {}
    sets: dict[str, tuple[str, ...]] = {}
    set_by: dict[str, Policy] = {key: policy for policy in reversed(line) for key in policy.key_locations}
    values: dict[str, Any] = {field: getattr(set_by[key], field) for key, field in _SET_ONCE.items() if key in set_by}
    locations = {key: policy.key_locations[key] for key, policy in set_by.items()}
    for policy in line:
        for name, ops in policy.sets.items():
            sets[name] = tuple(dict.fromkeys((*sets.get(name, ()), *ops)))
        for rule in policy.rules:
            if any(earlier.takes_all_of(rule) for earlier in rules.values()):
                continue  # a child's rule may cover its parent's
            free = rule.id
            while free in rules and not ("id" in rules[free].key_locations and "id" in rule.key_locations):
                free += ".2"  # ids that sac generated clash only if two files have the same name: no rule is hidden
            rules.setdefault(free, replace(rule, id=free))
    extends = tuple(policy.name for policy in line[1:])
    return replace(line[0], **values, rules=tuple(rules.values()), sets=sets, extends=extends, key_locations=locations)
