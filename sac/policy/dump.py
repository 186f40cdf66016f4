"""Convert a policy to YAML."""

from __future__ import annotations

import yaml

from sac.policy.model import Calls, Dim, Layers, PlannedRegion, PlanSection, Policy, Rule
from sac.policy.patterns import PathPattern
from sac.policy.read import SCHEMA
from sac.policy.syntax import plain_type


def dump_policy(policy: Policy) -> str:
    """Return ``policy`` as a YAML text that loads to an equal policy.

    The text is self-contained: rules inherited by ``extends`` are written out.
    """
    written: dict[str, object] = {"schema": SCHEMA, "name": policy.name}
    if policy.models:
        written["models"] = list(policy.models)
    if policy.sets:
        written["sets"] = {name: list(ops) for name, ops in policy.sets.items()}
    regions: dict[str, object] = {}
    if policy.blocks:
        regions["blocks"] = [pattern.text for pattern in policy.blocks]
    if not policy.layers.is_all:
        regions["layers"] = _layers(policy.layers)
    if regions:
        written["regions"] = regions
    if policy.plan is not None:
        written["plan"] = _plan(policy.plan)
    written["default"] = policy.default.value
    written["rules"] = [_rule(rule) for rule in policy.rules]
    return yaml.dump(written, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 (handled by PyYAML) or YAML 1.2 (handled here) would not read as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def write_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if plain_type(text) != "text" else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.write_text)


def _plan(plan: PlanSection) -> dict[str, object]:
    return {"made_for": plan.made_for, "regions": [_planned_region(one) for one in plan.regions]}


def _planned_region(region: PlannedRegion) -> dict[str, object]:
    written: dict[str, object] = {"blocks": _patterns(region.blocks)}
    if region.layers is not None:
        written["layers"] = _layers(region.layers)
    return written | {"signature": region.signature}


def _patterns(patterns: tuple[PathPattern, ...]) -> object:
    return patterns[0].text if len(patterns) == 1 else [pattern.text for pattern in patterns]


def _rule(rule: Rule) -> dict[str, object]:
    written: dict[str, object] = {"id": rule.id}
    if rule.ops:
        written["ops"] = rule.ops[0] if len(rule.ops) == 1 else list(rule.ops)
    if rule.blocks:
        written["blocks"] = _patterns(rule.blocks)
    if rule.module is not None:
        written["module"] = rule.module.text
    if rule.layers is not None:
        written["layers"] = _layers(rule.layers)
    if rule.call is not None:
        written["call"] = _call(rule.call)
    if rule.shape is not None:
        written["shape"] = [_dim(dim) for dim in rule.shape]
    if rule.dtype:
        written["dtype"] = list(rule.dtype)
    if rule.min_bytes:
        written["min_bytes"] = rule.min_bytes
    if rule.optional:
        written["optional"] = True
    written["do"] = str.__str__(rule.do)  # a Decision is a str too, but prints as its name
    return written


def _layers(layers: Layers) -> object:
    if layers.is_all:
        return "all"
    if layers.ranges is not None:
        return [low if low == high else f"{low}-{high}" for low, high in layers.ranges]
    if layers.every is not None:
        return {"every": layers.every, "offset": layers.offset}
    if layers.fraction is not None:
        return {"fraction": layers.fraction}
    return {"first": layers.first} if layers.first is not None else {"last": layers.last}


def _call(call: Calls) -> object:
    if call.index is not None:
        return {"index": sorted(call.index)}
    return {"every": call.every or 1, "offset": call.offset if call.every else 0}


def _dim(dim: Dim) -> object:
    if dim.op in ("any", "..."):
        return "_" if dim.op == "any" else "..."
    return dim.size if dim.op == "==" else f"{dim.op}{dim.size}"
