"""Build a policy from nodes: every key, its legal values, and all errors of a file at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sac.errors import PolicyError, Problem, listing, nearest
from sac.policy.model import ALL, ALTERNATE, NAMING, SCHEMA, Decision, Layers, Policy, Rule
from sac.policy.patterns import PathPattern
from sac.policy.syntax import Node, all_problems

# -- Readers: each returns the value of a node, or raises a ``SacError`` with all of its problems

Reader: TypeAlias = Callable[[Node], Any]


def read_fields(
    node: Node,
    readers: Mapping[str, Reader],
    fixes: Mapping[str, str] = {},
    check: Callable[[Node, Mapping[str, Node]], None] = lambda node, nodes: None,
) -> dict[str, Any]:
    """Return the values of a mapping by key.

    ``fixes``: what to write instead of some keys that are not legal. ``check`` raises problems between keys; it is not
    called if a key is unknown, as what is missing is then likely misspelled.
    """
    if node.kind != "map":
        raise node.error(f"a mapping of {listing([*readers]) or 'names'}")
    nodes: dict[str, Node] = {}

    def read_entry(key: Node, value: Node) -> tuple[str, Any]:
        if key.kind != "text" or key.text not in readers:
            found = f"unknown key {key}" + (f" in {node.name}" if node.name else "")
            near = nearest(key.text, readers) if key.text not in fixes else ""
            fix = fixes.get(key.text, "" if near else "remove it")
            raise key.error(listing([*readers]), found=found, nearest=near, fix=fix)
        if nodes.setdefault(key.text, value) is not value:
            found = f"the key {key} is given twice; its first value is at {nodes[key.text].location}"
            raise key.error(found=found, fix="keep one of them")
        return key.text, readers[key.text](value)

    with all_problems() as attempt:
        values = [attempt(read_entry, key, value) for key, value in node.entries]
        if len(nodes) == len(values):
            attempt(check, node, nodes)
    return dict(values)


def each(reader: Reader) -> Reader:
    """Return a reader of one value or of a list of at least one, as a tuple."""

    def read(node: Node) -> tuple[Any, ...]:
        if not node.items:
            raise node.error("at least one")
        with all_problems() as attempt:
            values = [attempt(reader, item) for item in node.items]
        return tuple(values)

    return read


def read_text(node: Node) -> str:
    """Return a text exactly as written (``1.10`` stays ``1.10``)."""
    if node.kind == "text" and node.text.strip() and node.text.isprintable():
        return node.text.strip()
    raise node.error("text that can be printed")  # not a number or bool of Python: 1.10 is 1.1 by now


def _read_name(node: Node) -> str:
    name = read_text(node)
    if "," in name or " " in name:
        raise node.error("a name, without spaces and commas, or a list such as [first, second]")
    return name


def word_of(value: Any) -> str:
    """Return ``value`` as it is compared: stripped, in lower case, ``-`` as ``_``; ``""`` if it is not a string."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else ""


def read_as(form: Callable[[str], Any], expected: str, words: Sequence[str] = ()) -> Reader:
    """Return a reader of what ``form`` makes of a text.

    A text is refused if ``form`` returns None or raises ``ValueError`` with the reason; the nearest of ``words`` to it
    is in the message.
    """

    def read(node: Node) -> Any:
        found = ""
        try:
            value = form(node.text) if node.kind in ("text", "scalar") else None
        except ValueError as error:
            value, found = None, f"{node.name} is {node}: {error}"
        if value is None:
            raise node.error(expected, found=found, nearest=nearest(node.text, words) if node.kind == "text" else "")
        return value

    return read


def word(*words: str, legal: str = "") -> Reader:
    """Return a reader of one of ``words`` in any spelling; ``legal`` is the list in the message, by default these."""
    return read_as(lambda text: word_of(text) if word_of(text) in words else None, legal or listing(words), words)


def whole(least: int) -> Reader:
    """Return a reader of whole numbers not below ``least``."""
    legal = f"a whole number, {least} or more"
    return read_as(lambda text: int(text) if text.isdecimal() and int(text) >= least else None, legal)


read_bool = read_as(lambda text: {"true": True, "false": False}.get(word_of(text)), "true, false")


# -- Matchers of a rule: layers, calls, shapes, dtypes and module patterns

LEGAL_LAYERS = 'all, {first: n}, {last: n}, {every: k, offset: j}, {fraction: f}, or a list such as ["0-7", "12"]'
LEGAL_PLANS = f"{LEGAL_LAYERS}; chunks of layers in mode full: sqrt, {{uniform: n}}"
LEGAL_DIM = '_ for any size, a size such as 128, "!=", ">=", "<=", ">", "<" and a size, or "..." as the first'
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_DIM = re.compile(r"_|\.\.\.|(!=|>=|<=|>|<|)[0-9]{1,18}")

_read_pattern = read_as(PathPattern.parse, 'a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"')
read_patterns = each(_read_pattern)
_POSITIVE, _OFFSET = whole(1), whole(0)
_FORMS: dict[str, Reader] = {
    **dict.fromkeys(("first", "last", "every"), _POSITIVE),
    "offset": _OFFSET,
    "fraction": read_as(lambda text: float(text) if 0 < float(text) <= 1 else None, "a number above 0, at most 1"),
}
_OTHER_FORMS = dict.fromkeys(("uniform", "sqrt"), "write chunks of layers in the config value, with `mode: full`")


def _choice(legal: str, forms: Mapping[str, Reader], words: Mapping[str, Layers]) -> Reader:
    """Return a reader of layers or calls: one of ``words``, one of ``forms``, or with words a list of ranges."""

    def read(node: Node) -> Layers:
        if node.kind == "list" and words:
            return Layers("numbers", each(_read_range)(node))
        if node.kind == "text" and word_of(node.text) in words:
            return words[word_of(node.text)]
        if node.kind != "map":
            fix = _OTHER_FORMS.get(word_of(node.text), "")
            raise node.error(legal, nearest="" if fix else nearest(node.text, words), fix=fix)
        values = read_fields(node, forms, _OTHER_FORMS)
        if len(values.keys() - {"offset"}) != 1 or ("offset" in values and "every" not in values):
            raise node.error(legal, found=f"{node.name} has {' and '.join(values) or 'nothing in it'}")
        offset = values.pop("offset", 0)
        chosen = Layers(*values.popitem(), offset)
        return ALL if chosen == Layers("uniform", 1) else chosen

    return read


def _range(text: str) -> tuple[int, int] | None:
    found = _RANGE.fullmatch(text)
    low, high = map(int, (found[1], found[2] or found[1])) if found else (1, 0)
    return (low, high) if low <= high else None


_read_range = read_as(_range, 'a layer such as 12, or a range such as "0-7" (both ends are meant)')
read_layers = _choice(LEGAL_LAYERS, _FORMS, {"all": ALL})
read_layer_spec = _choice(LEGAL_PLANS, {**_FORMS, "uniform": _POSITIVE}, {"all": ALL, "sqrt": Layers("uniform")})
_CALL = {"index": each(_OFFSET), "every": _POSITIVE, "offset": _OFFSET}


def _read_shape(node: Node) -> tuple[str | int, ...]:
    if node.kind != "list":
        raise node.error('a list such as [_, 128, ">=4096"]')
    if "..." in [item.text for item in node.items[1:]]:
        raise node.error(LEGAL_DIM, found=f'{node.name} has a "..." that is not the first')
    return tuple(_read_dims(node))


def _dim(text: str) -> str | int | None:
    text = text.replace(" ", "")
    return int(text) if text.isdecimal() else text if _DIM.fullmatch(text) else None


_read_dims = each(read_as(_dim, LEGAL_DIM))


# -- Rules

DO_WORDS = (*(decision.value for decision in Decision), ALTERNATE)
_read_names = each(_read_name)
_RULE: dict[str, Reader] = {
    "id": read_text,
    "ops": _read_names,
    "function": _read_names,
    "unit": _read_names,
    "blocks": read_patterns,
    "module": lambda node: PathPattern.parse(*(pattern.text for pattern in read_patterns(node))),
    "layers": read_layers,
    "call": _choice("{index: n}, {index: [n, m]} or {every: k, offset: j}, counted from 0", _CALL, {}),
    "shape": _read_shape,
    "dtype": each(word(*DTYPES)),
    "optional": read_bool,
    "do": word(*DO_WORDS),
}
RULE_KEYS = tuple(_RULE)
_NOT_IN_RULES = {
    "<<": "write the keys out, or put shared rules into a policy of their own and use `extends`",
    **{do: f'write "do: {do}"' for do in DO_WORDS},
}


def _read_rules(node: Node) -> tuple[Rule, ...]:
    if node.kind != "list":
        raise node.error('a list of rules, each of which starts with "- "')
    rules: list[Rule] = []

    def read(item: Node) -> None:
        fields = read_fields(item, _RULE, _NOT_IN_RULES, _check_rule)
        rules.append(rule := Rule(**{"id": ""} | fields, location=item.location, key_locations=item.locations()))
        for earlier in rules[:-1]:
            if rule.id and rule.id == earlier.id:
                found = f'the id "{rule.id}" is given twice; the first is at {earlier.where("id")}'
                raise PolicyError(Problem(rule.where("id"), found, fix="give each rule its own id"))
            if earlier.takes_all_of(rule):
                found = f"this rule can never fire: the rule at {earlier.where()} matches all it matches"
                raise item.error(found=found, fix="put it before that rule, or remove it")

    with all_problems() as attempt:
        for item in node.items:
            attempt(read, item)
    return tuple(rules)


def _check_rule(node: Node, nodes: Mapping[str, Node]) -> None:
    naming = [key for key in NAMING if key in nodes]
    if "do" not in nodes:
        raise node.error(listing(DO_WORDS), found="this rule says nothing to do", fix='add "do: save"')
    if len(naming) > 1 or not (naming or "module" in nodes):
        found = f"this rule has {' and '.join(naming) or 'neither ops nor module'}"
        raise node.error(f"one of {listing(NAMING)}, or module alone", found=found)
    if not naming and nodes["do"].text == ALTERNATE:
        raise nodes["do"].error(listing(DO_WORDS[:-1]), found="alternate counts calls of ops, but this rule has no ops")
    for key in nodes.keys() & {"call", "shape", "dtype"} if not naming else ():
        found = f"{key} applies to the output of an op, but this rule has no ops"
        raise nodes[key].error(found=found, fix=f'remove {key}, or add ops, such as "ops: matmul"')


# -- Policy files, schema ``sac/v1``


def _read_sets(node: Node) -> dict[str, Any]:
    names = [key.text for key, _ in node.entries]
    readers = {name: _read_names for name in names if re.fullmatch(r"\w[\w-]*", name)}  # otherwise it could be an op
    return read_fields(node, readers, dict.fromkeys(names, "name a set with letters, digits, _ and -"))


_read_default = word(*DO_WORDS[:-1])
_REGIONS: dict[str, Reader] = {"blocks": read_patterns, "layers": read_layers}
_POLICY: dict[str, Reader] = {
    "schema": word(SCHEMA),
    "name": read_text,
    "extends": each(read_text),
    "models": each(read_text),
    "sets": _read_sets,
    "regions": lambda node: read_fields(node, _REGIONS),
    "default": lambda node: Decision(_read_default(node)),
    "rules": _read_rules,
}
POLICY_KEYS = tuple(_POLICY)


def read_policy(node: Node, fallback_name: str, source: str, read_parents: Reader) -> tuple[Policy, Any]:
    """Return the policy in ``node``, and what ``read_parents`` makes of its ``extends``, None if it has none.

    ``fallback_name`` is the policy's name if it has no ``name``; a rule without an id gets the id ``<name>.<n>``,
    counted from 1. An entry in ``Policy.key_locations`` means that the file itself sets the key.
    """
    values = read_fields(node, _POLICY | {"extends": read_parents}, check=_check_policy)
    name = values.setdefault("name", fallback_name)
    parents, regions, rules, _ = (values.pop(key, None) for key in ("extends", "regions", "rules", "schema"))
    numbered = enumerate(rules or (), start=1)
    values["rules"] = tuple(replace(rule, id=rule.id or f"{name}.{n}", origin=name) for n, rule in numbered)
    return Policy(**values, **(regions or {}), source=source, key_locations=node.locations()), parents


def _check_policy(node: Node, nodes: Mapping[str, Node]) -> None:
    if "schema" not in nodes and not isinstance(node.value, Mapping):  # in Python it may be left out
        raise node.error(SCHEMA, found="the policy does not name its schema", fix=f'add "schema: {SCHEMA}"')
    if not nodes.keys() & {"rules", "extends", "default"}:
        fix = 'add rules; "rules: []" means the default for every op'
        raise node.error("rules, extends, default", found="the policy has no rules", fix=fix)
