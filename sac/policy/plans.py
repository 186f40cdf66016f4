"""The key ``plan`` of a policy: what a computed policy was computed for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sac.policy.matchers import read_layers, read_patterns
from sac.policy.model import Plan, PlannedRegion
from sac.policy.nodes import Findings, ListNode, MapNode, Node, Scalar, describe
from sac.policy.scalars import lacks, read_entries, read_text

PLAN_KEYS = ("made_for", "regions")
PLANNED_KEYS = ("blocks", "layers", "signature")
_SIGNATURE = re.compile(r"[0-9a-f]{16}")


def read_plan(node: Node, findings: Findings) -> Plan | None:
    """Return what a policy was computed for; every problem in it goes into ``findings``."""
    entries = read_entries(node, "plan", PLAN_KEYS, findings)
    if not isinstance(node, MapNode):
        return None
    _require(PLAN_KEYS, node, "plan", PLAN_KEYS, findings)
    made_for = read_text(entries["made_for"], "plan.made_for", findings) if "made_for" in entries else None
    regions = _read_planned_regions(entries["regions"], findings) if "regions" in entries else ()
    return Plan(made_for or "", regions)


def _read_planned_regions(node: Node, findings: Findings) -> tuple[PlannedRegion, ...]:
    if not isinstance(node, ListNode):
        fix = 'start each entry with "- "' if isinstance(node, MapNode) else "write [] for none"
        findings.add(node.mark, f"plan.regions is {describe(node)}", expected="a list of regions", fix=fix)
        return ()
    regions = (_read_region(item, findings) for item in node.items)
    return tuple(region for region in regions if region is not None)


def _read_region(node: Node, findings: Findings) -> PlannedRegion | None:
    what = "an entry of plan.regions"
    entries = read_entries(node, what, PLANNED_KEYS, findings)
    if not isinstance(node, MapNode):
        return None
    _require(("blocks", "signature"), node, what, PLANNED_KEYS, findings)
    return PlannedRegion(
        blocks=read_patterns(entries["blocks"], "blocks", findings) if "blocks" in entries else (),
        layers=read_layers(entries["layers"], "layers", findings) if "layers" in entries else None,
        signature=_read_signature(entries["signature"], findings) if "signature" in entries else "",
        mark=node.mark,
    )


def _require(keys: Sequence[str], node: MapNode, what: str, legal: Sequence[str], findings: Findings) -> None:
    for key in keys:
        if lacks(key, node, legal):
            fix = f"add {key}, or write the plan again with `sac plan`"
            findings.add(node.mark, f"{what} has no {key}", expected=f"a mapping of {', '.join(legal)}", fix=fix)


def _read_signature(node: Node, findings: Findings) -> str:
    """Return the signature as it was written; sixteen digits may also read as a number."""
    text = node.text if isinstance(node, Scalar) and node.kind in ("text", "int", "float") else ""
    if _SIGNATURE.fullmatch(text):
        return text
    fix = "copy it from what `sac plan` wrote, with quotes around it"
    findings.add(node.mark, f"signature is {describe(node)}", expected="sixteen digits out of 0-9 and a-f", fix=fix)
    return ""
