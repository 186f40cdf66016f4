"""`sac check`: the rules of a policy file, with what each means in this build of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sac.engine.table import resolve_policy
from sac.policy.load import load_policy
from sac.policy.model import Policy, Rule, limits_of
from sac.tables import Table, count_text, screen_width

COLUMNS = ("rule", "do", "ops", "names here", "only where", "of policy", "place")


@dataclass(frozen=True, slots=True)
class CheckedRule:
    """A rule and its op names: those that this build of torch has, and those that it lacks."""

    rule: Rule
    present: tuple[str, ...]
    missing: tuple[str, ...]


def check_file(source: str, *, verbose: bool, as_json: bool) -> int:
    """Print what the policy of a file or of a shipped name means; raises ``PolicyError`` with all problems."""
    policy = load_policy(source)
    rules = tuple(_checked(policy))
    if as_json:
        print(json.dumps(_as_dict(policy, rules), indent=2))
        return 0
    parents = f", extends {', '.join(policy.extends)}" if policy.extends else ""
    families = f", for {', '.join(policy.models)}" if policy.models else ""
    print(f"{policy.source}: policy {policy.name}{parents}{families}")
    table = Table(COLUMNS, tuple(map(_cells, rules)), right=("names here",), optional=("place", "of policy"))
    print(table.text(screen_width()))
    print(f"everything else: {policy.default.value}")
    _print_missing(rules, verbose=verbose)
    return 0


def _checked(policy: Policy) -> Iterator[CheckedRule]:
    for resolved in resolve_policy(policy).rules:
        missing = resolved.matcher.missing
        names = dict.fromkeys(entry.pattern.text for entry in resolved.matcher.entries)
        yield CheckedRule(resolved.rule, tuple(name for name in names if name not in missing), missing)


def _print_missing(rules: tuple[CheckedRule, ...], *, verbose: bool) -> None:
    missing = {checked.rule.id: checked.missing for checked in rules if checked.missing}
    if not missing:
        return
    if not verbose:
        count = len({name for names in missing.values() for name in names})
        print(f"{count_text(count, 'name')} not in this build of torch ({torch.__version__}): --verbose lists them")
        return
    print(f"\nnot in this build of torch ({torch.__version__}):")
    for rule_id, names in missing.items():
        print(f"  {rule_id}: {', '.join(names)}")


def _cells(checked: CheckedRule) -> tuple[str, ...]:
    rule = checked.rule
    here = f"{len(checked.present)} of {len(checked.present) + len(checked.missing)}" if rule.ops else "–"
    return (rule.id, rule.do, rule.what_text, here, "; ".join(limits_of(rule)), rule.origin, rule.where())


def _as_dict(policy: Policy, rules: tuple[CheckedRule, ...]) -> dict[str, object]:
    return {
        "policy": policy.name,
        "source": policy.source,
        "extends": list(policy.extends),
        "models": list(policy.models),
        "default": policy.default.value,
        "torch": torch.__version__,
        "rules": [
            {
                "id": checked.rule.id,
                "do": checked.rule.do,
                "ops": list(checked.rule.ops),
                "function": list(checked.rule.function),
                "unit": list(checked.rule.unit),
                "only_where": limits_of(checked.rule),
                "of_policy": checked.rule.origin,
                "place": checked.rule.where(),
                "names": list(checked.present),
                "missing": list(checked.missing),
            }
            for checked in rules
        ],
    }
