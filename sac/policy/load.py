"""Load a policy from a shipped name, a path or a mapping, together with the files that it extends."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TypeAlias

from sac.errors import PolicyError, Problem, listing, nearest
from sac.policy.model import SCHEMA, Policy, Rule, dump_policy
from sac.policy.read import Parents, read_policy
from sac.policy.syntax import Findings, SourceLocation, compose_yaml, node_from_value, shown

# -- `extends`: merging a policy with its parents

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


_SET_ONCE = ("default", "blocks", "layers")


def fold(policies: Sequence[Policy]) -> Policy:
    """Merge a line of files into one policy; see Note [Inheritance]."""
    child = policies[0]
    sets: dict[str, tuple[str, ...]] = {}
    for policy in policies:
        for name, ops in policy.sets.items():
            sets[name] = tuple(dict.fromkeys((*sets.get(name, ()), *ops)))
    locations: dict[str, SourceLocation] = {}
    set_locations: dict[str, SourceLocation] = {}
    for policy in reversed(policies):
        inherited = (*_SET_ONCE, "regions", "sets") if policy is not child else (*policy.key_locations,)
        locations |= {key: location for key, location in policy.key_locations.items() if key in inherited}
        set_locations |= policy.set_locations
    setters = {key: next((one for one in policies if key in one.key_locations), child) for key in _SET_ONCE}
    return replace(
        child,
        rules=_fold_rules(policies),
        **{key: getattr(setter, key) for key, setter in setters.items()},
        sets=sets,
        set_locations=set_locations,
        extends=tuple(policy.name for policy in policies[1:]),
        key_locations=locations,
    )


def _fold_rules(policies: Sequence[Policy]) -> tuple[Rule, ...]:
    taken: dict[str, Rule] = {}
    for rule in (rule for policy in policies for rule in policy.rules):
        same = taken.get(rule.id)
        if same is None:
            taken[rule.id] = rule
        elif not ("id" in same.key_locations and "id" in rule.key_locations):
            # Ids that sac generated clash only if two files have the same name; then no rule is hidden.
            free = next(f"{rule.id}.{n}" for n in range(2, len(taken) + 3) if f"{rule.id}.{n}" not in taken)
            taken[free] = replace(rule, id=free)
    return tuple(taken.values())


# -- Shipped policies, and file lookup by name or path

_ENDINGS = (".yaml", ".yml")


def shipped_directory() -> Path:
    """Return the directory of the shipped policies: ``policies/`` of a checkout run in place, or package data."""
    beside = Path(__file__).resolve().parents[2] / "policies"
    return beside if (beside / "general.yaml").exists() else Path(str(resources.files("sac.policies")))


def shipped_policies() -> tuple[str, ...]:
    """Return the names of the shipped policies, sorted."""
    return tuple(sorted(path.stem for path in shipped_directory().glob("*.yaml")))


def is_shipped(location: SourceLocation) -> bool:
    """Return whether ``location`` is in a shipped policy and not in a user's file."""
    return Path(location.file).parent == shipped_directory()


def looks_like_path(text: str) -> bool:
    """Return whether ``text`` is a file path, as opposed to the name of a shipped policy."""
    return text.lower().endswith(_ENDINGS) or any(sep in text for sep in (os.sep, os.altsep) if sep)


def find_file(text: str, base: Path, location: SourceLocation, findings: Findings) -> Path | None:
    """Return the file that ``text`` refers to: a shipped policy, or a path (relative to ``base``)."""
    if not looks_like_path(text):
        return _find_shipped(text, location, findings)
    try:
        path = base / os.path.expanduser(text)
        path.stat()  # not exists(): the errors that it suppresses differ between versions of Python
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        near = nearest(Path(text).stem, shipped_policies())
        fix = f'the shipped policy is written "{near}", without a path' if near else "check the path"
        findings.add(location, f'there is no file "{shown(text)}"', nearest=near, fix=fix)
        return None
    except OSError as error:
        findings.add(location, f'the file "{shown(text)}" cannot be reached: {error.strerror}', fix="check the path")
        return None
    return path


def _find_shipped(name: str, location: SourceLocation, findings: Findings) -> Path | None:
    names = shipped_policies()
    word = name.strip().lower().replace("-", "_")
    if word in names:
        return shipped_directory() / f"{word}.yaml"
    fix = 'to name a file, give a path that ends in .yaml or has a "/" in it'
    found = f'no shipped policy is called "{shown(name)}"'
    findings.add(location, found, expected=listing(names), nearest=nearest(word, names), fix=fix)
    return None


# -- Loading policies

__all__ = ["PolicySource", "dump_policy", "load_policy", "shipped_policies"]

PolicySource: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | Policy"

MAX_BYTES = 1024 * 1024
MAX_LINEAGE = 16


def load_policy(source: PolicySource, *, where: str = "policy") -> Policy:
    """Return the policy that ``source`` refers to or contains, merged with the policies that it extends.

    ``source`` is one of:

    - the name of a shipped policy;
    - a path: a ``PathLike``, or a string that ends in ``.yaml`` or ``.yml`` or contains a separator;
    - a mapping with the content of a YAML file; ``schema`` is optional, and relative paths in ``extends`` start at the
      working directory;
    - a ``Policy``, which is returned unchanged.

    ``where`` is the name of the argument in messages. Note [Inheritance] describes how parents are merged.

    Raises:
        PolicyError: lists every problem of the policy and of its parents.
    """
    if isinstance(source, Policy):
        return source
    lineage = _Lineage()
    if isinstance(source, Mapping):
        line = lineage.of_mapping(source, where)
    else:
        line = lineage.of_file(_top_file(source, where), ())
    if lineage.problems:
        raise PolicyError(lineage.problems)
    return fold(line)


def _top_file(source: object, where: str) -> Path:
    findings, location = Findings(), SourceLocation(where)
    if isinstance(source, os.PathLike):
        source = os.fsdecode(source)
        source = source if os.sep in source else os.path.join(os.curdir, source)
    if not isinstance(source, str) or not source.strip():
        expected = f"a path, a mapping, a Policy, or one of {listing(shipped_policies())}"
        found = "an empty name" if isinstance(source, str) else f"a value of type {type(source).__name__}"
        findings.stop(location, f"a policy is meant, this is {found}", expected=expected)
    path = find_file(source, Path(), location, findings)
    if path is None:
        raise PolicyError(findings.problems())
    return path


class _Lineage:
    """Reads a policy and its ancestors, each file once, and collects the problems of all of them."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._lines: dict[Path, list[Policy]] = {}

    def of_mapping(self, source: Mapping[str, object], where: str) -> list[Policy]:
        findings = Findings()
        policy, parents = read_policy(
            node_from_value(source, where, findings), "inline", where, findings, needs_schema=False
        )
        return self._with_parents(policy, parents, Path(), (), findings)

    def of_file(self, path: Path, trail: tuple[Path, ...]) -> list[Policy]:
        """Return the line of one file; ``trail`` holds the files whose `extends` led to it."""
        key = path.resolve()
        if key not in self._lines:
            self._lines[key] = []
            findings = Findings()
            try:
                policy, parents = _read_file(path, findings)
            except PolicyError as error:
                self.problems += error.problems
            else:
                self._lines[key] = self._with_parents(policy, parents, path.parent, (*trail, path), findings)
        return self._lines[key]

    def _with_parents(
        self, policy: Policy, parents: Parents, base: Path, trail: tuple[Path, ...], findings: Findings
    ) -> list[Policy]:
        line = [policy]
        files = [self._parent(name, location, base, trail, findings) for name, location in parents]
        self.problems += findings.problems()
        for path in files:
            ancestors = [] if path is None else self.of_file(path, trail)
            line = [one for one in line if all(one is not ancestor for ancestor in ancestors)] + ancestors
        return line

    def _parent(
        self, name: str, location: SourceLocation, base: Path, trail: tuple[Path, ...], findings: Findings
    ) -> Path | None:
        path = find_file(name, base, location, findings)
        if path is None:
            return None
        same = [where for where, earlier in enumerate(trail) if earlier.resolve() == path.resolve()]
        if same:
            chain = " -> ".join(str(one) for one in (*trail[same[0] :], path))
            findings.add(location, f"extends goes in a circle: {chain}", fix="remove one of these `extends`")
        elif len(trail) >= MAX_LINEAGE:
            findings.add(location, f"extends goes more than {MAX_LINEAGE} files deep", fix="join some of the files")
        else:
            return path
        return None


def _read_file(path: Path, findings: Findings) -> tuple[Policy, Parents]:
    """Return the policy of a file; never reads more than ``MAX_BYTES`` + 1, whatever size the file claims."""
    location = SourceLocation(str(path))
    if not path.is_file():
        what = "this is a directory, not a policy file" if path.is_dir() else "this is not a regular file"
        findings.stop(location, what, fix="name a policy file")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            findings.stop(location, "the file is longer than 1 MiB", fix="name a policy file; they have a few kB")
        text = data.decode("utf-8-sig")
    except OSError as error:
        findings.stop(location, f"the file cannot be read: {error.strerror}", fix="check its permissions")
    except UnicodeDecodeError as error:
        where = SourceLocation(str(path), error.object.count(b"\n", 0, error.start) + 1, 1)
        found = f"the byte 0x{error.object[error.start]:02x} is not UTF-8"
        findings.stop(where, found, fix="save the file as UTF-8")
    root = compose_yaml(text, str(path), findings)
    if root is None:
        findings.stop(location, "the file is empty", fix=f'start with "schema: {SCHEMA}" and "rules:"')
    return read_policy(root, path.stem, str(path), findings, needs_schema=True)
