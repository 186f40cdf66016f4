"""Build a policy from nodes: every key, its legal values, and all errors of a file at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from sac.errors import listing, nearest
from sac.policy.model import ALTERNATE, FIELDS, SCHEMA, Calls, Chunks, Decision, Dim, Layers, Policy, Rule
from sac.policy.patterns import PathPattern
from sac.policy.syntax import Findings, Node, SourceLocation, shown
from sac.tables import in_units

# -- Sizes in bytes as readable text

LEGAL_BYTES = 'a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"'
MAX_WHOLE = 2**63 - 1
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:e\+?[0-9]{1,2})?)\s*(?:(?:([kmgt])(i?))?b)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return ``text`` as bytes: a number, followed by nothing, ``B``, ``kB`` … ``TB`` or ``KiB`` … ``TiB``.

    Units are case-insensitive. Raises ``ValueError`` with the reason if ``text`` is not a whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or len(text) > 60:
        raise ValueError("it is not a number with a unit")
    number, prefix, binary = found.groups()
    size = Decimal(number) * (1024 if binary else 1000) ** " kmgt".index((prefix or " ").lower())
    if size > MAX_WHOLE:
        raise ValueError("it is more than 2**63 - 1 bytes")
    if size != int(size):
        raise ValueError("it is not a whole number of bytes")
    return int(size)


def bytes_text(count: int) -> str:
    """Return a byte count in binary units: ``1.5 MiB``."""
    return in_units(count, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


# -- Readers of mappings, texts, words and numbers: they add problems to the findings, and then return None

Reader: TypeAlias = Callable[[Node, str, Findings], Any]  # a value, what it is in messages, and the findings


def read_fields(
    node: Node,
    what: str,
    readers: Mapping[str, Reader],
    findings: Findings,
    *,
    prefix: str = "",
    fixes: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], dict[str, Node]]:
    """Return the values of a mapping by key, without those that cannot be read, and the nodes of all of its keys.

    Other keys than those of ``readers`` are findings; ``fixes``: of some of them. ``prefix`` precedes keys in messages.
    """
    if node.kind != "map":
        expected = f"a mapping of {listing([*readers]) or 'names'}"
        findings.refuse(node, what, expected, fix='write it as "key: value" pairs')
    known: dict[str, Node] = {}
    for key, value in node.entries:
        if not _is_name(key, what, findings):
            continue
        if key.text in readers:
            known[key.text] = value
            continue
        fix = (fixes or {}).get(key.text, "")
        near = "" if fix else nearest(key.text, readers)
        fix = fix or (f'write "{near}"' if near else "remove it")
        found = f'unknown key "{shown(key.text)}" in {what}'
        findings.add(key.location, found, expected=listing([*readers]), nearest=near, fix=fix)
    read = {key: readers[key](value, f"{prefix}{key}", findings) for key, value in known.items()}
    return {key: value for key, value in read.items() if value is not None}, known


def _has_only_known_keys(node: Node, known: Mapping[str, Node]) -> bool:
    return node.kind == "map" and len(known) == len(node.entries)  # otherwise what is missing is likely misspelled


def _is_name(key: Node, what: str, findings: Findings) -> bool:
    if key.text == "<<":
        fix = "write the keys out, or put the shared rules into a policy of their own and use `extends`"
        findings.add(key.location, 'merge keys ("<<") are not supported', fix=fix)
        return False
    if key.kind == "str" and key.text.isprintable() and key.text.strip():
        return True
    findings.refuse(key, f"a key of {what}", "text", fix="quote it if text is meant")
    return False


def each(reader: Reader) -> Reader:
    """Return a reader of one value or of a list of at least one, as a tuple."""

    def read(node: Node, what: str, findings: Findings) -> tuple[Any, ...]:
        if node.kind == "seq" and not node.items:
            findings.refuse(node, what, "at least one", fix="remove it, or name one")
        values = [reader(item, what, findings) for item in _items(node)]
        return tuple(value for value in values if value is not None)

    return read


def _items(node: Node) -> tuple[Node, ...]:
    return node.items if node.kind == "seq" else (node,)


def read_text(node: Node, what: str, findings: Findings) -> str | None:
    """Return a text exactly as written (``1.10`` stays ``1.10``)."""
    if node.kind not in ("str", "int", "float") or not node.text:
        findings.refuse(node, what, "text", fix="quote it if text is meant" if node.kind == "bool" else "")
    elif node.kind == "float" and not node.location.line:  # 1.10 is 1.1 by now
        findings.refuse(node, what, "text", fix="quote it where it is written")
    elif not node.text.isprintable() or node.text.strip() != node.text:
        fix = "remove what cannot be seen"
        findings.add(node.location, f"{what} has a line break, an outer space or a control character in it", fix=fix)
    else:
        return node.text
    return None


def _read_name(node: Node, what: str, findings: Findings) -> str | None:
    name = read_text(node, what, findings)
    if name is not None and ("," in name or " " in name):
        expected = "a name, without spaces and commas"
        findings.refuse(node, what, expected, fix="write several names as a list: [first, second]")
    return name


def word_of(value: Any) -> str:
    """Return ``value`` as it is compared: stripped, in lower case, ``-`` as ``_``; ``""`` if it is not a string."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else ""


def word(*words: str, legal: str = "") -> Reader:
    """Return a reader of one of ``words`` in any spelling; ``legal`` is the list in the message, by default these."""

    def read(node: Node, what: str, findings: Findings) -> str | None:
        if word_of(node.text) in words:
            return word_of(node.text)
        near = nearest(node.text, words) if node.kind == "str" else ""
        fix = f'write "{near}"' if near else ""
        if node.kind == "bool" and not node.location.line:
            fix = "quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
        findings.refuse(node, what, legal or listing(words), nearest=near, fix=fix)
        return None

    return read


def read_bool(node: Node, what: str, findings: Findings) -> bool | None:
    """Return ``true`` or ``false``; ``yes``, ``on``, 1 and quoted words are findings."""
    if node.kind == "bool" and node.text.lower() in ("true", "false"):
        return node.text.lower() == "true"
    findings.refuse(node, what, "true, false")
    return None


def _number(expected: str, form: Callable[[Decimal], Any], is_legal: Callable[[Decimal], bool]) -> Reader:
    def read(node: Node, what: str, findings: Findings) -> Any:
        try:
            number = Decimal(node.text if len(node.text) <= 40 else "nan")
        except ArithmeticError:
            number = Decimal("nan")
        is_number = number.is_finite() and is_legal(number)
        if is_number and node.kind != "str":
            return form(number)
        findings.refuse(node, what, expected, fix="remove the quotes" if is_number else "")
        return None

    return read


def whole(least: int) -> Reader:
    """Return a reader of whole numbers not below ``least``; ``1e3`` is one, ``"10"`` is not."""
    expected = f"a whole number, {least} or more"
    return _number(expected, int, lambda number: least <= number <= MAX_WHOLE and number == int(number))


# -- Matchers of a rule: layers, calls, shapes, dtypes and module patterns

_LEGAL_FORMS = "all, {first: n}, {block: n}, {last: n}, {every: k, offset: j}, {fraction: f}"
LEGAL_LAYERS = f'{_LEGAL_FORMS}, or a list such as ["0-7", "12"]'
LEGAL_PLANS = f'{_LEGAL_FORMS}, a list such as ["0-7", "12"], or chunks of layers: sqrt, {{uniform: n}}'
LEGAL_CALL = "{index: n}, {index: [n, m]} or {every: k, offset: j}, counted from 0"
LEGAL_SHAPE = 'a list such as [_, 128, ">=4096"], with _ for any size and "..." in front for any leading dimensions'
LEGAL_DIM = '_ for any size, a size such as 128, or "!=", ">=", "<=", ">", "<" and a size'
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_DTYPE_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
_DTYPE_ALIASES |= {"short": "int16", "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32"}
_RANGE = re.compile(r"([0-9]{1,18})(?:\s*(:|-|\.\.+|,|to|–|—)\s*([0-9]{1,18}))?")
_DIM = re.compile(r"(==|!=|>=|<=|>|<|)\s*([0-9]{1,18})")


def _read_pattern(node: Node, what: str, findings: Findings) -> PathPattern | None:
    if node.kind == "map":
        fix = 'quote it: unquoted braces are a mapping; patterns are written as in "{q_proj,k_proj}"'
        findings.refuse(node, what, "a pattern, or a list of them", fix=fix)
        return None
    text = "" if node.kind == "str" and not node.text else read_text(node, what, findings)
    try:
        return None if text is None else PathPattern.parse(text)
    except ValueError as error:
        expected = 'a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"'
        findings.add(node.location, f"{what} is {node}: {error}", expected=expected)
    return None


read_patterns = each(_read_pattern)


def read_module(node: Node, what: str, findings: Findings) -> PathPattern | None:
    """Return one pattern over module paths; a list of patterns becomes one pattern with alternatives."""
    patterns = read_patterns(node, what, findings)
    try:
        return PathPattern.any_of(pattern.text for pattern in patterns) if patterns else None
    except ValueError as error:
        findings.add(node.location, f"{what} is not a pattern: {error}", fix="write fewer patterns")
    return None


_POSITIVE, _OFFSET = whole(1), whole(0)
_FORMS: dict[str, Reader] = {
    **dict.fromkeys(("first", "block", "last", "every"), _POSITIVE),
    "offset": _OFFSET,
    "fraction": _number("a number above 0, at most 1", float, lambda number: 0 < number <= 1),
}
_CHUNKS_FIX = "write chunks of layers in the config value, under `layers`, with `mode: full`"


def _layers(legal: str, forms: Mapping[str, Reader], words: Mapping[str, Layers | Chunks]) -> Reader:
    """Return a reader of layers: one of ``words``, one of ``forms``, or a list of ranges."""

    def read(node: Node, what: str, findings: Findings) -> Layers | Chunks | None:
        if node.kind == "seq":
            return Layers(ranges=each(_read_range)(node, what, findings))
        if node.kind == "map":
            form = _read_one_form(node, what, legal, forms, findings)
            if "uniform" in form:
                return Layers() if form["uniform"] == 1 else Chunks(form["uniform"])
            return Layers(**{"first" if key == "block" else key: value for key, value in form.items()})  # as Megatron
        if word_of(node.text) in words:
            return words[word_of(node.text)]
        fix = _CHUNKS_FIX if word_of(node.text) == "sqrt" else _range_fix(node.text)
        if node.kind == "int":
            fix = f"write [{node.text}] for that layer alone, {{first: {node.text}}} for the first ones"
        near = nearest(node.text, words) if node.kind == "str" else ""
        findings.refuse(node, what, legal, nearest=near, fix=fix)
        return None

    return read


read_layers = _layers(LEGAL_LAYERS, _FORMS, {"all": Layers()})
read_layer_spec = _layers(LEGAL_PLANS, _FORMS | {"uniform": _POSITIVE}, {"all": Layers(), "sqrt": Chunks()})


def _read_one_form(
    node: Node, what: str, legal: str, forms: Mapping[str, Reader], findings: Findings
) -> dict[str, Any]:
    """Return the values of a mapping that has one form; ``offset`` belongs to ``every`` and is none."""
    read, nodes = read_fields(node, what, forms, findings, prefix=f"{what}.", fixes={"uniform": _CHUNKS_FIX})
    is_one = len(nodes.keys() - {"offset"}) == 1 and ("offset" not in nodes or "every" in nodes)
    if not is_one and _has_only_known_keys(node, nodes):
        found = f"{what} has {' and '.join(nodes) or 'nothing in it'}"
        findings.add(node.location, found, expected=legal, fix="choose one of the forms")
    return read


def _read_range(node: Node, what: str, findings: Findings) -> tuple[int, int] | None:
    found = _RANGE.fullmatch(node.text)
    if found and found[2] in (None, "-") and int(found[1]) <= int(found[3] or found[1]):
        return int(found[1]), int(found[3] or found[1])
    expected = 'a layer such as 12, or a range such as "0-7" (both ends are meant)'
    findings.refuse(node, f"an entry of {what}", expected, fix=_range_fix(node.text))
    return None


def _range_fix(text: str) -> str:
    found = _RANGE.fullmatch(text)
    if not found or found[3] is None:
        return ""
    low, high = sorted((int(found[1]), int(found[3])))
    return f'ranges are written as "{low}-{high}", in a list: ["{low}-{high}"]'


def read_call(node: Node, what: str, findings: Findings) -> Calls:
    """Return the chosen calls of an op: ``index``, or ``every`` with an ``offset``."""
    return Calls(**_read_one_form(node, what, LEGAL_CALL, _CALL, findings))


_CALL: dict[str, Reader] = {
    "index": lambda node, what, findings: frozenset(each(_OFFSET)(node, what, findings)),
    "every": _POSITIVE,
    "offset": _OFFSET,
}


def read_shape(node: Node, what: str, findings: Findings) -> tuple[Dim, ...]:
    """Return the dimensions of a shape pattern."""
    if node.kind != "seq" or not node.items:
        findings.refuse(node, what, LEGAL_SHAPE)
    dims = (_read_dim(item, what, findings, is_first=not index) for index, item in enumerate(node.items))
    return tuple(dim for dim in dims if dim is not None)


def _read_dim(node: Node, what: str, findings: Findings, *, is_first: bool) -> Dim | None:
    if node.text == "_" or (node.text == "..." and is_first):
        return Dim(node.text)
    if found := _DIM.fullmatch(node.text):
        return Dim(found[1] or "==", int(found[2]))
    fix = '"..." may be the first only' if node.text == "..." else ""
    findings.refuse(node, f"an entry of {what}", LEGAL_DIM, fix=fix)
    return None


def _read_dtype(node: Node, what: str, findings: Findings) -> str | None:
    name = node.text.lower().removeprefix("torch.")
    if _DTYPE_ALIASES.get(name, name) in DTYPES:
        return _DTYPE_ALIASES.get(name, name)
    findings.refuse(node, what, listing(DTYPES), nearest=nearest(name, DTYPES))
    return None


def read_dtypes(node: Node, what: str, findings: Findings) -> tuple[str, ...]:
    """Return dtype names as torch prints them, without ``torch.``; torch's short names (``half``) are accepted too."""
    return tuple(dict.fromkeys(each(_read_dtype)(node, what, findings)))


# -- Rules, and rules that can never fire

DO_WORDS = (*(decision.value for decision in Decision), ALTERNATE)
_RULE_FIXES = {
    "min_bytes": "remove it, or choose by `shape`",  # a key of earlier versions
    **{do: f'write "do: {do}"' for do in DO_WORDS},
}
_read_names = each(_read_name)
_RULE: dict[str, Reader] = {
    "id": read_text,
    "ops": _read_names,
    "function": _read_names,
    "unit": _read_names,
    "blocks": read_patterns,
    "module": read_module,
    "layers": read_layers,
    "call": read_call,
    "shape": read_shape,
    "dtype": read_dtypes,
    "optional": read_bool,
    "do": word(*DO_WORDS),
}
RULE_KEYS = tuple(_RULE)
_NAMING = ("ops", "function", "unit")  # at most one of them in a rule


def _read_rules(node: Node, policy_name: str, findings: Findings) -> tuple[Rule, ...]:
    """Return the rules of one file; a rule without an id gets the id ``<policy's name>.<n>``, counted from 1."""
    if node.kind != "seq":
        findings.refuse(node, "rules", "a list of rules", fix='start each rule with "- "')
    rules, sound = [], []
    for number, item in enumerate(node.items, start=1):
        problems = len(findings)
        rules.append(_read_rule(item, f"{policy_name}.{number}", policy_name, findings))
        sound += rules[-1:] if len(findings) == problems else []  # a broken matcher reads as "matches everything"
    _find_double_ids(rules, findings)
    _find_shadowed(sound, findings)
    return tuple(rules)


def _read_rule(node: Node, fallback_id: str, origin: str, findings: Findings) -> Rule:
    read, nodes = read_fields(node, "a rule", _RULE, findings, fixes=_RULE_FIXES)
    naming = [key for key in _NAMING if key in nodes]
    if _has_only_known_keys(node, nodes):
        if "do" not in nodes:
            found = "this rule says nothing to do"
            findings.add(node.location, found, expected=listing(DO_WORDS), fix='add "do: save"')
        if not naming and "module" not in nodes:
            fix = 'add ops, such as "ops: matmul"; "*" means every op that can be saved'
            expected = f"one of {listing(_NAMING)}, or module, or both"
            findings.add(node.location, "this rule has neither ops nor module", expected=expected, fix=fix)
        for key in nodes.keys() & {"call", "shape", "dtype"} if not naming else ():
            found = f"{key} applies to the output of an op, but this rule has no ops"
            findings.add(nodes[key].location, found, fix=f'remove {key}, or add ops, such as "ops: matmul"')
    for key in naming[1:]:
        found = f"this rule has both {naming[0]} and {key}"
        findings.add(nodes[key].location, found, expected=f"one of {listing(_NAMING)}", fix="write two rules")
    return Rule(
        **{"id": fallback_id, "do": Decision.RECOMPUTE.value} | {FIELDS.get(key, key): read[key] for key in read},
        location=node.location,
        key_locations={key: value.location for key, value in nodes.items()},
        op_locations=tuple(item.location for item in _items(nodes["ops"])) if "ops" in nodes else (),
        origin=origin,
    )


def _find_double_ids(rules: Sequence[Rule], findings: Findings) -> None:
    first: dict[str, Rule] = {}
    for rule in rules:
        same = first.setdefault(rule.id, rule)
        if same is not rule:
            found = f'the id "{rule.id}" is given twice; the first is at {same.where("id")}'
            findings.add(rule.key_locations.get("id", rule.location), found, fix="give each rule its own id")


def _find_shadowed(rules: Sequence[Rule], findings: Findings) -> None:
    """Find rules that can never fire because an earlier rule matches all that they match, judging by their texts."""
    for index, later in enumerate(rules):
        earlier = next((rule for rule in rules[:index] if takes_all_of(rule, later)), None)
        if earlier is not None:
            found = f'the rule "{later.id}" can never fire: "{earlier.id}" at {earlier.where()} matches all it matches'
            findings.add(later.location, found, fix=f'put "{later.id}" before "{earlier.id}", or remove it')


def takes_all_of(earlier: Rule, later: Rule) -> bool:
    """Return whether ``earlier`` matches all that ``later`` matches, judging by their texts."""
    named = ((earlier.ops, later.ops), (earlier.functions, later.functions), (earlier.units, later.units))
    return (
        all(
            bool(wider) == bool(narrower)
            and all(any(_names_at_least(wide, narrow) for wide in wider) for narrow in narrower)
            for wider, narrower in named
        )
        and (_has_all_of(earlier.blocks, later.blocks) or any(pattern.text == "**" for pattern in earlier.blocks))
        and (earlier.module in (None, later.module) or earlier.module.text == "**")
        and (earlier.layers in (None, later.layers) or earlier.layers.is_all)
        and earlier.call in (None, later.call)
        and earlier.shape in (None, later.shape)
        and _has_all_of(earlier.dtype, later.dtype)
    )


def _has_all_of(earlier: Sequence[Any], later: Sequence[Any]) -> bool:
    return not earlier or (bool(later) and set(later) <= set(earlier))


def _names_at_least(wide: str, narrow: str) -> bool:
    """Return whether ``wide`` covers every op of ``narrow``: the same name, ``*``, a glob over it, or its packet."""
    wide, narrow = wide.replace("::", "."), narrow.replace("::", ".")
    if wide in ("*", narrow):
        return True
    if "." not in narrow:
        return False  # a save-set: its name does not show its ops
    return narrow.startswith(f"{wide}.") if not set("*?[") & set(wide) else fnmatchcase(narrow, wide)


# -- Policy files, schema ``sac/v1``

_SET_NAME = re.compile(r"\w[\w-]*")
Parents: TypeAlias = tuple[tuple[str, SourceLocation], ...]


def read_policy(
    node: Node, fallback_name: str, source: str, findings: Findings, *, needs_schema: bool
) -> tuple[Policy, Parents]:
    """Return the policy in ``node``, and the names of its parents; every problem in it goes into ``findings``.

    ``fallback_name`` is the policy's name if it has no ``name``. An entry in ``Policy.key_locations`` means that the
    file itself sets the key; ``blocks`` and ``layers`` have their own entries in addition to ``regions``.
    """
    read, nodes = read_fields(node, "a policy", _POLICY, findings, fixes=_FIXES)
    if _has_only_known_keys(node, nodes):
        if needs_schema and "schema" not in nodes:
            found, fix = "the policy does not name its schema", f'add "schema: {SCHEMA}"'
            findings.add(node.location, found, expected=SCHEMA, fix=fix)
        if not nodes.keys() & {"rules", "extends", "default"}:
            found, expected = "the policy has neither rules nor extends", "rules, extends, default"
            fix = 'add rules; "rules: []" means the default for every op'
            findings.add(node.location, found, expected=expected, fix=fix)
    name = read.get("name", fallback_name)
    regions, region_nodes = read.get("regions", ({}, {}))
    parents = zip(read.get("extends", ()), _items(nodes["extends"]), strict=False) if "extends" in nodes else ()
    policy = Policy(
        name=name,
        rules=_read_rules(nodes["rules"], name, findings) if "rules" in nodes else (),
        default=Decision(read.get("default", Decision.RECOMPUTE)),
        models=read.get("models", ()),
        sets=read.get("sets", {}),
        set_locations={key.text: key.location for key, _ in nodes["sets"].entries} if "sets" in nodes else {},
        **regions,
        source=source,
        key_locations={key: value.location for key, value in (nodes | region_nodes).items()},
    )
    return policy, tuple((parent, item.location) for parent, item in parents)


def _read_sets(node: Node, what: str, findings: Findings) -> dict[str, tuple[str, ...]]:
    """Return the ops of each set by its name."""
    sets = {key.text: _read_names for key, _ in node.entries}
    read, _ = read_fields(node, what, sets, findings, prefix=f"{what}.")
    for key, _ in node.entries:
        if not _SET_NAME.fullmatch(key.text):  # it would be confused with an op or a glob
            findings.refuse(key, "the name of a set", "a word of letters, digits, _ and -")
    return read


_POLICY: dict[str, Reader] = {
    "schema": word(SCHEMA),
    "name": read_text,
    "extends": each(read_text),
    "models": each(read_text),
    "sets": _read_sets,
    "regions": lambda node, what, findings: read_fields(node, what, _REGIONS, findings, prefix=f"{what}."),
    "default": word(*DO_WORDS[:-1]),
    "rules": lambda node, what, findings: None,  # read when the policy's name is known, with which their ids begin
}
_REGIONS: dict[str, Reader] = {"blocks": read_patterns, "layers": read_layers}
_FIXES = {  # of keys of earlier versions
    "plan": "remove it: what a plan was made for is in its comments",
    "offload": "remove it; `store: host` in the config value has the regions' inputs wait on the host",
}
POLICY_KEYS = tuple(_POLICY)
