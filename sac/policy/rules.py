"""One rule of a policy: its node to a ``Rule``, and the rules of a file that can never fire."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sac.policy.matchers import read_call, read_dtypes, read_layers, read_pattern, read_patterns, read_shape
from sac.policy.model import ALTERNATE, Decision, Rule
from sac.policy.nodes import Findings, ListNode, MapNode, Node, describe
from sac.policy.scalars import lacks, read_bool, read_bytes, read_entries, read_names, read_text, read_word

RULE_KEYS = ("id", "ops", "blocks", "module", "layers", "call", "shape", "dtype", "min_bytes", "optional", "do")
DO_WORDS = (*(decision.value for decision in Decision), ALTERNATE)
_ABOUT_ONE_OP = ("call", "shape", "dtype", "min_bytes")


def read_rules(node: Node | None, policy_name: str, findings: Findings) -> tuple[Rule, ...]:
    """Return the rules of one file; a rule without an id is called ``<policy's name>.<n>``, counted from 1."""
    if node is None:
        return ()
    if not isinstance(node, ListNode):
        fix = 'start each rule with "- "' if isinstance(node, MapNode) else "write [] for no rules"
        findings.add(node.mark, f"rules is {describe(node)}", expected="a list of rules", fix=fix)
        return ()
    rules, sound = [], []
    for number, item in enumerate(node.items, start=1):
        problems = len(findings)
        rule = _read_rule(item, f"{policy_name}.{number}", policy_name, findings)
        if rule is not None:
            rules.append(rule)
            sound += [rule] if len(findings) == problems else []  # a broken matcher reads as "matches everything"
    _find_double_ids(rules, findings)
    _find_shadowed(sound, findings)
    return tuple(rules)


def _read_rule(node: Node, fallback_id: str, origin: str, findings: Findings) -> Rule | None:
    """Return the rule, None when it is no mapping or says nothing to do."""
    entries = read_entries(node, "a rule", RULE_KEYS, findings)
    if not isinstance(node, MapNode):
        return None
    do = read_word(entries["do"], "do", DO_WORDS, findings) if "do" in entries else None
    if lacks("do", node, RULE_KEYS):
        findings.add(node.mark, "this rule says nothing to do", expected=", ".join(DO_WORDS), fix='add "do: save"')
    if lacks("ops", node, RULE_KEYS):
        _check_speaks_of_module(node, entries, findings)
    names = read_names(entries["ops"], "ops", findings) if "ops" in entries else ()
    return Rule(
        id=(read_text(entries["id"], "id", findings) if "id" in entries else None) or fallback_id,
        do=do or Decision.RECOMPUTE.value,
        ops=tuple(name for name, _ in names),
        blocks=read_patterns(entries["blocks"], "blocks", findings) if "blocks" in entries else (),
        module=read_pattern(entries["module"], "module", findings) if "module" in entries else None,
        layers=read_layers(entries["layers"], "layers", findings) if "layers" in entries else None,
        call=read_call(entries["call"], "call", findings) if "call" in entries else None,
        shape=read_shape(entries["shape"], "shape", findings) if "shape" in entries else None,
        dtype=read_dtypes(entries["dtype"], "dtype", findings) if "dtype" in entries else (),
        min_bytes=(read_bytes(entries["min_bytes"], "min_bytes", findings) if "min_bytes" in entries else None) or 0,
        optional=bool(read_bool(entries["optional"], "optional", findings)) if "optional" in entries else False,
        mark=node.mark,
        key_marks={key: value.mark for key, value in entries.items()},
        op_marks=tuple(mark for _, mark in names),
        origin=origin,
    )


def _check_speaks_of_module(node: MapNode, entries: dict[str, Node], findings: Findings) -> None:
    """A rule without ops speaks of a module as a whole: it needs the module, and has no one op to measure."""
    if lacks("module", node, RULE_KEYS):
        fix = 'add ops, such as "ops: matmul"; "*" means every op that can be saved'
        findings.add(node.mark, "this rule has neither ops nor module", expected="ops, module, or both", fix=fix)
        return
    for key in _ABOUT_ONE_OP:
        if key in entries:
            found = f"{key} speaks of one op's output, but this rule has no ops"
            findings.add(entries[key].mark, found, fix=f'remove {key}, or add ops, such as "ops: matmul"')


def _find_double_ids(rules: Sequence[Rule], findings: Findings) -> None:
    first: dict[str, Rule] = {}
    for rule in rules:
        if rule.id in first:
            mark = rule.key_marks.get("id", rule.mark)
            found = f'the id "{rule.id}" is given twice; the first is at {first[rule.id].where("id")}'
            findings.add(mark, found, fix="give each rule its own id")
        first.setdefault(rule.id, rule)


def _find_shadowed(rules: Sequence[Rule], findings: Findings) -> None:
    """Find rules that can never fire because an earlier one takes all that they match, by their text alone."""
    for place, later in enumerate(rules):
        for earlier in rules[:place]:
            if takes_all_of(earlier, later):
                found = (
                    f'the rule "{later.id}" can never fire: "{earlier.id}" at {earlier.where()} matches all it matches'
                )
                fix = f'put "{later.id}" before "{earlier.id}", or remove it'
                findings.add(later.mark, found, fix=fix)
                break


def takes_all_of(earlier: Rule, later: Rule) -> bool:
    """Return whether ``earlier`` matches all that ``later`` matches, as far as their texts tell."""
    if earlier.speaks_of_module != later.speaks_of_module:
        return False
    return (
        _has_all_blocks_of(earlier, later)
        and (earlier.module in (None, later.module) or earlier.module.text == "**")
        and (earlier.layers in (None, later.layers) or earlier.layers.is_all)
        and earlier.call in (None, later.call)
        and earlier.shape in (None, later.shape)
        and (not earlier.dtype or (bool(later.dtype) and set(later.dtype) <= set(earlier.dtype)))
        and earlier.min_bytes <= later.min_bytes
        and all(any(_names_at_least(wide, narrow) for wide in earlier.ops) for narrow in later.ops)
    )


def _has_all_blocks_of(earlier: Rule, later: Rule) -> bool:
    if not earlier.blocks or any(pattern.text == "**" for pattern in earlier.blocks):
        return True
    return bool(later.blocks) and set(later.blocks) <= set(earlier.blocks)


def _names_at_least(wide: str, narrow: str) -> bool:
    """Whether ``wide`` names every op that ``narrow`` names: the same, ``*``, a glob over it, or its packet."""
    wide, narrow = wide.replace("::", "."), narrow.replace("::", ".")
    if wide in ("*", narrow):
        return True
    if "." not in narrow:
        return False  # a save-set: what is in it is not told by its name
    return narrow.startswith(f"{wide}.") if not set("*?[") & set(wide) else fnmatchcase(narrow, wide)
