"""The grammar of policy files, ``sac/v1``: from nodes to what one file says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sac.policy.matchers import read_layers, read_patterns
from sac.policy.model import Decision, Layers, Mark, Policy
from sac.policy.nodes import Findings, MapNode, Node, describe
from sac.policy.patterns import PathPattern
from sac.policy.plans import read_plan
from sac.policy.rules import read_rules
from sac.policy.scalars import lacks, read_entries, read_named, read_names, read_text, read_texts, read_word

SCHEMA = "sac/v1"
POLICY_KEYS = ("schema", "name", "extends", "models", "sets", "regions", "plan", "default", "rules")
REGION_KEYS = ("blocks", "layers")
_SET_NAME = re.compile(r"\w[\w-]*")


@dataclass(frozen=True, slots=True)
class Written:
    """What one file says by itself: its own rules and keys, and the parents it names, not yet looked up."""

    policy: Policy
    parents: tuple[tuple[str, Mark], ...]


def read_policy(node: Node, fallback_name: str, source: str, findings: Findings, *, needs_schema: bool) -> Written:
    """Return what ``node`` says; every problem in it goes into ``findings``.

    ``fallback_name`` is the policy's name when it has no ``name``. A key's mark in ``Policy.key_marks`` says that the
    file itself sets the key; ``blocks`` and ``layers`` have theirs beside ``regions``.
    """
    if not isinstance(node, MapNode):
        fix = f'start with "schema: {SCHEMA}"' if needs_schema else ""
        findings.stop(
            node.mark, f"the policy is {describe(node)}", expected=f"a mapping of {', '.join(POLICY_KEYS)}", fix=fix
        )
    entries = read_entries(node, "a policy", POLICY_KEYS, findings)
    _check_top(node, entries, findings, needs_schema=needs_schema)
    name = (read_text(entries["name"], "name", findings) if "name" in entries else None) or fallback_name
    blocks, layers, region_marks = _read_regions(entries.get("regions"), findings)
    sets, set_marks = _read_sets(entries.get("sets"), findings)
    default = read_word(entries["default"], "default", _DEFAULTS, findings) if "default" in entries else None
    parents = read_texts(entries["extends"], "extends", findings) if "extends" in entries else ()
    policy = Policy(
        name=name,
        rules=read_rules(entries.get("rules"), name, findings),
        default=Decision(default) if default else Decision.RECOMPUTE,
        models=_texts(entries.get("models"), "models", findings),
        sets=sets,
        set_marks=set_marks,
        blocks=blocks,
        layers=layers,
        plan=read_plan(entries["plan"], findings) if "plan" in entries else None,
        source=source,
        key_marks={key: value.mark for key, value in entries.items()} | region_marks,
    )
    return Written(policy, parents)


_DEFAULTS = tuple(decision.value for decision in Decision)


def _check_top(node: MapNode, entries: dict[str, Node], findings: Findings, *, needs_schema: bool) -> None:
    if "schema" in entries:
        read_word(entries["schema"], "schema", (SCHEMA,), findings)
    elif needs_schema and lacks("schema", node, POLICY_KEYS):
        findings.add(node.mark, "the policy does not name its schema", expected=SCHEMA, fix=f'add "schema: {SCHEMA}"')
    if all(lacks(key, node, POLICY_KEYS) for key in ("rules", "extends", "default")):
        fix = 'add rules; "rules: []" means the default for every op'
        findings.add(node.mark, "the policy has neither rules nor extends", expected="rules, extends, default", fix=fix)


def _texts(node: Node | None, what: str, findings: Findings) -> tuple[str, ...]:
    return tuple(text for text, _ in read_texts(node, what, findings)) if node is not None else ()


def _read_regions(node: Node | None, findings: Findings) -> tuple[tuple[PathPattern, ...], Layers, dict[str, Mark]]:
    entries = read_entries(node, "regions", REGION_KEYS, findings) if node is not None else {}
    blocks = read_patterns(entries["blocks"], "regions.blocks", findings) if "blocks" in entries else ()
    layers = read_layers(entries["layers"], "regions.layers", findings) if "layers" in entries else None
    return blocks, layers or Layers(), {key: value.mark for key, value in entries.items()}


def _read_sets(node: Node | None, findings: Findings) -> tuple[dict[str, tuple[str, ...]], dict[str, Mark]]:
    named = read_named(node, "sets", findings) if node is not None else []
    for key, _ in named:
        if not _SET_NAME.fullmatch(key.text):
            expected = "a word of letters, digits, _ and -"  # anything else could not be told from an op or a glob
            findings.add(key.mark, f"the name of a set is {describe(key)}", expected=expected)
    names = {key.text: read_names(value, f"sets.{key.text}", findings) for key, value in named}
    return {key: tuple(name for name, _ in ops) for key, ops in names.items()}, {key.text: key.mark for key, _ in named}
