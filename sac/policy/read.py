"""Build a policy from nodes: every key, its legal values, and all errors of a file at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from sac.errors import listing, nearest
from sac.policy.model import (
    ALTERNATE,
    SCHEMA,
    Calls,
    Chunks,
    Decision,
    Dim,
    Layers,
    Policy,
    Rule,
    SourceLocation,
)
from sac.policy.patterns import PathPattern
from sac.policy.syntax import Findings, ListNode, MapNode, Node, Scalar, describe, shown
from sac.tables import in_units

# -- Sizes in bytes as readable text

LEGAL_BYTES = 'a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"'
MAX_WHOLE = 2**63 - 1
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Return ``text`` as bytes: a number, followed by nothing, ``B``, ``kB`` … ``TB`` or ``KiB`` … ``TiB``.

    Units are case-insensitive. Raises ``ValueError`` with the reason if ``text`` is not a whole number of bytes.
    """
    if text.startswith("-"):
        raise ValueError("it is below zero")
    found = _SIZE.fullmatch(text.strip())
    if not found or len(text) > 60:
        raise ValueError("it is not a number with a unit")
    number, unit = found.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(f'the unit "{unit}" is none of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB')
    size = Decimal(number) * _UNITS[unit.lower()]
    if size > MAX_WHOLE:
        raise ValueError("it is more than 2**63 - 1 bytes")
    if size != int(size):
        raise ValueError("it is not a whole number of bytes")
    return int(size)


def bytes_text(count: int) -> str:
    """Return a byte count in binary units: ``1.5 MiB``."""
    return in_units(count, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)


# -- Words, texts and numbers: readers that add problems to the findings and then return None

Reader: TypeAlias = Callable[[Node, str, Findings], Any]  # a value, what it is in messages, and the findings


def read_fields(
    entries: Mapping[str, Node], readers: Mapping[str, Reader], findings: Findings, prefix: str = ""
) -> dict[str, Any]:
    """Return the values of a mapping's entries by key, without those that cannot be read (None).

    ``prefix`` precedes a key in messages.
    """
    read = {key: readers[key](node, f"{prefix}{key}", findings) for key, node in entries.items()}
    return {key: value for key, value in read.items() if value is not None}


def read_entries(
    node: Node, what: str, legal: Sequence[str], findings: Findings, fixes: Mapping[str, str] | None = None
) -> dict[str, Node]:
    """Return the values of a mapping by key; other keys than ``legal`` are findings; ``fixes``: of some of them."""
    if not isinstance(node, MapNode):
        fix = 'write it as "key: value" pairs'
        findings.add(node.location, f"{what} is {describe(node)}", expected=f"a mapping of {listing(legal)}", fix=fix)
        return {}
    known: dict[str, Node] = {}
    for key, value in node.entries:
        if _is_name(key, what, findings):
            if key.text in legal:
                known[key.text] = value
            else:
                found, fix = f'unknown key "{shown(key.text)}" in {what}', (fixes or {}).get(key.text, "")
                near = "" if fix else nearest(key.text, legal)
                fix = fix or (f'write "{near}"' if near else "remove it")
                findings.add(key.location, found, expected=listing(legal), nearest=near, fix=fix)
    return known


def lacks(key: str, node: MapNode, legal: Sequence[str]) -> bool:
    """Return whether ``key`` is missing and not just misspelled (a misspelled key is reported already)."""
    names = [name.text for name, _ in node.entries]
    return (
        key not in names
        and "<<" not in names
        and all(nearest(name, legal) != key for name in names if name not in legal)
    )


def read_named(node: Node, what: str, findings: Findings) -> list[tuple[Scalar, Node]]:
    """Return the entries of a mapping with user-chosen keys."""
    if not isinstance(node, MapNode):
        findings.add(node.location, f"{what} is {describe(node)}", expected="a mapping of names")
        return []
    return [(key, value) for key, value in node.entries if _is_name(key, what, findings)]


def _is_name(key: Scalar, what: str, findings: Findings) -> bool:
    if key.text == "<<":
        fix = "write the keys out, or put the shared rules into a policy of their own and use `extends`"
        findings.add(key.location, 'merge keys ("<<") are not supported', fix=fix)
        return False
    if key.scalar_type == "text" and key.text.isprintable() and key.text.strip():
        return True
    findings.add(key.location, f"a key of {what} is {describe(key)}", expected="text", fix="quote it if text is meant")
    return False


def read_text(node: Node, what: str, findings: Findings, *, empty_is_legal: bool = False) -> str | None:
    """Return a text exactly as written (``1.10`` stays ``1.10``)."""
    if not isinstance(node, Scalar) or node.scalar_type in ("null", "other"):
        findings.add(node.location, f"{what} is {describe(node)}", expected="text")
    elif node.scalar_type == "bool":
        findings.add(node.location, f"{what} is the boolean {node.text}", expected="text", fix=f'write "{node.text}"')
    elif node.scalar_type == "float" and not node.location.line:
        # A Python float does not record how it was written: 1.10 becomes 1.1.
        findings.add(
            node.location, f"{what} is the number {node.text}", expected="text", fix="quote it where it is written"
        )
    elif not node.text and not empty_is_legal:
        findings.add(node.location, f"{what} is an empty text", expected="text")
    elif not node.text.isprintable() or node.text.strip() != node.text:
        fix = "remove what cannot be seen"
        findings.add(node.location, f"{what} has a line break, an outer space or a control character in it", fix=fix)
    else:
        return node.text
    return None


def read_texts(
    node: Node, what: str, findings: Findings, *, empty_is_legal: bool = False
) -> tuple[tuple[str, SourceLocation], ...]:
    """Return one text or a list of texts, each with its source location."""
    if isinstance(node, MapNode):
        findings.add(node.location, f"{what} is {describe(node)}", expected="text, or a list of at least one")
        return ()
    nodes = node.items if isinstance(node, ListNode) else (node,)
    if not nodes:
        findings.add(
            node.location,
            f"{what} is an empty list",
            expected="text, or a list of at least one",
            fix="remove it, or name one",
        )
    texts = ((read_text(item, what, findings, empty_is_legal=empty_is_legal), item.location) for item in nodes)
    return tuple((text, location) for text, location in texts if text is not None)


def read_names(node: Node, what: str, findings: Findings) -> tuple[tuple[str, SourceLocation], ...]:
    """Return one name or a list of names; a name contains no spaces or commas."""
    names = read_texts(node, what, findings)
    for name, location in names:
        if "," in name or any(character.isspace() for character in name):
            found = f'{what} has the name "{shown(name)}" with a space or comma in it'
            findings.add(location, found, fix="write several names as a list: [first, second]")
    return names


def read_word(node: Node, what: str, legal: Sequence[str], findings: Findings) -> str | None:
    """Return one of the ``legal`` words; case does not matter."""
    if not isinstance(node, Scalar) or node.scalar_type in ("null", "other"):
        findings.add(node.location, f"{what} is {describe(node)}", expected=listing(legal))
        return None
    word = next((word for word in legal if word.lower() == node.text.strip().lower()), None)
    if word is None:
        near = nearest(node.text, legal)
        fix = f'write "{near}"' if near else ""
        if node.scalar_type == "bool" and not node.location.line:
            fix = "quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
        findings.add(node.location, f"{what} is {describe(node)}", expected=listing(legal), nearest=near, fix=fix)
    return word


def _word(legal: Sequence[str]) -> Reader:
    return lambda node, what, findings: read_word(node, what, legal, findings)


def read_bool(node: Node, what: str, findings: Findings) -> bool | None:
    """Return ``true`` or ``false``; ``yes``, ``on``, 1 and quoted words are findings."""
    if isinstance(node, Scalar) and node.scalar_type == "bool":
        return node.text.lower() == "true"
    findings.add(node.location, f"{what} is {describe(node)}", expected="true, false", fix="write it without quotes")
    return None


def read_whole(node: Node, what: str, findings: Findings, *, least: int) -> int | None:
    """Return a whole number not below ``least``; ``1e3`` is one, ``"10"`` is not."""
    expected, fix = f"a whole number, {least} or more", ""
    if isinstance(node, Scalar):
        if node.scalar_type in ("int", "float"):
            value = _whole(node.text)
            if value is not None and least <= value <= MAX_WHOLE:
                return value
        if node.scalar_type == "text" and _whole(node.text) is not None:
            fix = "remove the quotes"
    findings.add(node.location, f"{what} is {describe(node)}", expected=expected, fix=fix)
    return None


def _whole_from(least: int) -> Reader:
    return lambda node, what, findings: read_whole(node, what, findings, least=least)


def read_fraction(node: Node, what: str, findings: Findings) -> float | None:
    """Return a number above 0 and at most 1, written as a number: ``0.5``, ``1``, ``5e-1``."""
    if isinstance(node, Scalar) and node.scalar_type in ("int", "float") and is_fraction(node.text):
        return float(node.text)
    fix = (
        "remove the quotes"
        if isinstance(node, Scalar) and node.scalar_type == "text" and is_fraction(node.text)
        else ""
    )
    findings.add(node.location, f"{what} is {describe(node)}", expected="a number above 0, at most 1", fix=fix)
    return None


def is_fraction(text: str) -> bool:
    """Return whether ``text`` writes a number above 0 and at most 1."""
    if len(text) > 40 or not text.isascii() or text.strip("+-0123456789.eE"):
        return False
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _whole(text: str) -> int | None:
    if len(text) > 40 or not text.isascii() or text.strip("+-0123456789.eE"):
        return None
    try:
        value = Decimal(text)
    except ArithmeticError:
        return None
    return int(value) if abs(value) <= MAX_WHOLE and value == value.to_integral_value() else None


def read_bytes(node: Node, what: str, findings: Findings) -> int | None:
    """Return a number of bytes, written as a number or as text with a unit."""
    if not isinstance(node, Scalar) or node.scalar_type not in ("int", "float", "text"):
        findings.add(node.location, f"{what} is {describe(node)}", expected=LEGAL_BYTES)
        return None
    try:
        return parse_bytes(node.text)
    except ValueError as error:
        findings.add(node.location, f"{what} is {describe(node)}: {error}", expected=LEGAL_BYTES)
    return None


# -- Matchers of a rule: layers, calls, shapes, dtypes and module patterns

LAYER_FORMS = ("first", "block", "last", "every", "offset", "fraction")
_LEGAL_FORMS = "all, {first: n}, {block: n}, {last: n}, {every: k, offset: j}, {fraction: f}"
LEGAL_LAYERS = f'{_LEGAL_FORMS}, or a list such as ["0-7", "12"]'
LEGAL_PLANS = f'{_LEGAL_FORMS}, a list such as ["0-7", "12"], or chunks of layers: sqrt, {{uniform: n}}'
LEGAL_CALL = "{index: n}, {index: [n, m]} or {every: k, offset: j}, counted from 0"
LEGAL_SHAPE = 'a list such as [_, 128, ">=4096"], with _ for any size and "..." in front for any leading dimensions'
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "qint8", "quint8", "qint32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_DTYPE_ALIASES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32", "long": "int64"}
_DTYPE_ALIASES |= {"short": "int16", "cfloat": "complex64", "cdouble": "complex128", "chalf": "complex32"}
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_RANGE_LOOKALIKE = re.compile(r"([0-9]{1,18})\s*(?::|-|\.\.+|,|to|–|—)\s*([0-9]{1,18})")
_DIM = re.compile(r"(==|!=|>=|<=|>|<|)\s*([0-9]{1,18})")


def read_pattern(node: Node, what: str, findings: Findings) -> PathPattern | None:
    """Return one pattern over module paths; a list of patterns becomes one pattern with alternatives."""
    patterns = read_patterns(node, what, findings)
    if not patterns:
        return None
    try:
        return PathPattern.any_of(pattern.text for pattern in patterns)
    except ValueError as error:
        findings.add(node.location, f"{what} is not a pattern: {error}", fix="write fewer patterns")
        return None


def read_patterns(node: Node, what: str, findings: Findings) -> tuple[PathPattern, ...]:
    """Return the patterns of one text or a list of texts."""
    if isinstance(node, MapNode):
        fix = 'quote it: unquoted braces are a mapping; patterns are written as in "{q_proj,k_proj}"'
        findings.add(node.location, f"{what} is {describe(node)}", expected="a pattern, or a list of them", fix=fix)
        return ()
    patterns = []
    for text, location in read_texts(node, what, findings, empty_is_legal=True):
        try:
            patterns.append(PathPattern.parse(text))
        except ValueError as error:
            expected = 'a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"'
            findings.add(location, f'{what} is "{shown(text)}": {error}', expected=expected)
    return tuple(patterns)


def read_layers(node: Node, what: str, findings: Findings) -> Layers | None:
    """Return the layers chosen by ``all``, one of the forms of ``LAYER_FORMS`` or a list of ranges.

    Chunks, which a config value can ask for, are a finding: a policy applies to single layers.
    """
    plan = _read_layer_spec(node, what, LEGAL_LAYERS, findings)
    if isinstance(plan, Chunks):
        fix = "write it in the config value, under `layers`, with `mode: full`"
        found = f"{what} asks for chunks of layers, which no policy can"
        findings.add(node.location, found, expected=LEGAL_LAYERS, fix=fix)
        return None
    return plan


def read_layer_spec(node: Node, what: str, findings: Findings) -> Layers | Chunks | None:
    """Like ``read_layers``, but also accepts chunks: ``sqrt``, ``{uniform: n}``. Chunks of one layer are all layers."""
    plan = _read_layer_spec(node, what, LEGAL_PLANS, findings)
    return Layers() if plan == Chunks(1) else plan


def _read_layer_spec(node: Node, what: str, legal: str, findings: Findings) -> Layers | Chunks | None:
    if isinstance(node, ListNode):
        return _read_ranges(node, what, legal, findings)
    if isinstance(node, MapNode):
        return _read_counted_layers(node, what, legal, findings)
    word = node.text.strip().lower() if node.scalar_type == "text" else ""
    if word == "all":
        return Layers()
    if word == "sqrt":
        return Chunks()
    near = nearest(word, ["all", "sqrt"]) if word and legal == LEGAL_PLANS else nearest(word, ["all"])
    findings.add(node.location, f"{what} is {describe(node)}", expected=legal, nearest=near, fix=_layers_fix(node))
    return None


def _layers_fix(node: Scalar) -> str:
    between = _RANGE_LOOKALIKE.fullmatch(node.text)
    if between:
        return f'ranges are written as "{between[1]}-{between[2]}", in a list: ["{between[1]}-{between[2]}"]'
    word = node.text.strip().lower()
    if node.scalar_type == "text" and word in (*LAYER_FORMS, "uniform") and word != "offset":
        return f"say how many, as in {{{word}: {'0.5' if word == 'fraction' else '2'}}}"
    if node.scalar_type == "float" and is_fraction(node.text):
        return f"write {{fraction: {node.text}}}"
    if node.scalar_type != "int" or not node.text.isdecimal():
        return ""
    return f"write [{node.text}] for that layer alone, {{first: {node.text}}} for the first ones"


def _read_counted_layers(node: MapNode, what: str, legal: str, findings: Findings) -> Layers | Chunks | None:
    names = [key.text for key, _ in node.entries]
    if "sqrt" in names and legal == LEGAL_PLANS:
        findings.add(
            node.location, f'{what} has the key "sqrt"', expected=legal, fix="write the word alone: layers: sqrt"
        )
        return None
    forms = (*LAYER_FORMS, "uniform") if legal == LEGAL_PLANS or "uniform" in names else LAYER_FORMS
    entries = read_entries(node, what, forms, findings)
    if not _is_one_form(node, entries, what, legal, findings):
        return None
    read = read_fields(entries, _LAYERS, findings, f"{what}.")
    if "uniform" in entries:
        return Chunks(read.get("uniform"))
    if "block" in read:  # Megatron's word
        read["first"] = read.pop("block")
    return Layers(**read)


_POSITIVE, _OFFSET = _whole_from(1), _whole_from(0)
_LAYERS: dict[str, Reader] = {
    "first": _POSITIVE,
    "block": _POSITIVE,
    "last": _POSITIVE,
    "every": _POSITIVE,
    "offset": _OFFSET,
    "fraction": read_fraction,
    "uniform": _POSITIVE,
}


def _is_one_form(node: MapNode, entries: dict[str, Node], what: str, legal: str, findings: Findings) -> bool:
    """Return whether exactly one form is used; ``offset`` belongs to ``every`` and does not count as a form."""
    forms = [key for key in entries if key != "offset"]
    if len(forms) == 1 and ("offset" not in entries or "every" in entries):
        return True
    if len(entries) == len(node.entries):  # otherwise an unknown key is reported already, and is likely the form
        found = " and ".join(entries) or "nothing in it"
        findings.add(node.location, f"{what} has {found}", expected=legal, fix="choose one of the forms")
    return False


def _read_ranges(node: ListNode, what: str, legal: str, findings: Findings) -> Layers | None:
    if not node.items:
        findings.add(node.location, f"{what} is an empty list", expected=legal, fix="remove it, or name a layer")
        return None
    ranges = []
    for item in node.items:
        text = item.text if isinstance(item, Scalar) and item.scalar_type in ("int", "text") else ""
        found, fix = _RANGE.fullmatch(text), ""
        if found and int(found[1]) <= int(found[2] or found[1]) <= MAX_WHOLE:
            ranges.append((int(found[1]), int(found[2] or found[1])))
            continue
        if found:
            fix = f'write "{found[2]}-{found[1]}"'
        elif between := _RANGE_LOOKALIKE.fullmatch(text):
            fix = f'ranges are written as "{between[1]}-{between[2]}"'
        expected = 'a layer such as 12, or a range such as "0-7" (both ends are meant)'
        findings.add(item.location, f"an entry of {what} is {describe(item)}", expected=expected, fix=fix)
    return Layers(ranges=tuple(ranges))


def read_call(node: Node, what: str, findings: Findings) -> Calls | None:
    """Return the chosen calls of an op: ``index``, or ``every`` with an ``offset``."""
    if not isinstance(node, MapNode):
        text = node.text if isinstance(node, Scalar) and node.scalar_type == "int" else ""
        fix = f"write {{index: {text}}}" if text else ""
        findings.add(node.location, f"{what} is {describe(node)}", expected=LEGAL_CALL, fix=fix)
        return None
    entries = read_entries(node, what, (*_CALL,), findings)
    if not _is_one_form(node, entries, what, LEGAL_CALL, findings):
        return None
    return Calls(**read_fields(entries, _CALL, findings, f"{what}."))


def _read_indices(node: Node, what: str, findings: Findings) -> frozenset[int]:
    nodes = node.items if isinstance(node, ListNode) else (node,)
    if not nodes:
        findings.add(node.location, f"{what} is an empty list", expected=LEGAL_CALL, fix="remove it, or name a call")
    indices = (read_whole(item, what, findings, least=0) for item in nodes)
    return frozenset(index for index in indices if index is not None)


_CALL: dict[str, Reader] = {"index": _read_indices, "every": _POSITIVE, "offset": _OFFSET}


def read_shape(node: Node, what: str, findings: Findings) -> tuple[Dim, ...] | None:
    """Return the dimensions of a shape pattern."""
    if not isinstance(node, ListNode) or not node.items:
        findings.add(node.location, f"{what} is {describe(node)}", expected=LEGAL_SHAPE)
        return None
    dims = (_read_dim(item, what, findings, is_first=not index) for index, item in enumerate(node.items))
    return tuple(dim for dim in dims if dim is not None)


def _read_dim(node: Node, what: str, findings: Findings, *, is_first: bool) -> Dim | None:
    text = node.text.strip() if isinstance(node, Scalar) and node.scalar_type in ("int", "text") else ""
    if text == "_":
        return Dim()
    if text == "..." and is_first:
        return Dim("...")
    found = _DIM.fullmatch(text)
    if found:
        return Dim(found[1] or "==", int(found[2]))
    expected = '_ for any size, a size such as 128, or "!=", ">=", "<=", ">", "<" and a size'
    fix = '"..." may stand in front only' if text == "..." else 'write _ for "any"' if text in ("*", "-1") else ""
    findings.add(node.location, f"an entry of {what} is {describe(node)}", expected=expected, fix=fix)
    return None


def read_dtypes(node: Node, what: str, findings: Findings) -> tuple[str, ...]:
    """Return dtype names as torch prints them, without ``torch.``; torch's short names (``half``) are accepted too."""
    names = []
    for text, location in read_texts(node, what, findings):
        word = text.lower().removeprefix("torch.")
        name = _DTYPE_ALIASES.get(word, word)
        if name in DTYPES:
            names.append(name)
        else:
            findings.add(
                location, f'{what} is "{shown(text)}"', expected=listing(DTYPES), nearest=nearest(word, DTYPES)
            )
    return tuple(dict.fromkeys(names))


# -- Rules, and rules that can never fire

DO_WORDS = (*(decision.value for decision in Decision), ALTERNATE)
_RULE_FIXES = {
    "min_bytes": "remove it, or choose by `shape`",  # a key of earlier versions
    **{word: f'write "do: {word}"' for word in DO_WORDS},
}

_RULE: dict[str, Reader] = {
    "id": read_text,
    "ops": read_names,
    "function": read_names,
    "unit": read_names,
    "blocks": read_patterns,
    "module": read_pattern,
    "layers": read_layers,
    "call": read_call,
    "shape": read_shape,
    "dtype": read_dtypes,
    "optional": read_bool,
    "do": _word(DO_WORDS),
}
RULE_KEYS = tuple(_RULE)
_NAMING = ("ops", "function", "unit")  # at most one of them in a rule
_ABOUT_ONE_OP = ("call", "shape", "dtype")


def read_rules(node: Node | None, policy_name: str, findings: Findings) -> tuple[Rule, ...]:
    """Return the rules of one file; a rule without an id gets the id ``<policy's name>.<n>``, counted from 1."""
    if node is None:
        return ()
    if not isinstance(node, ListNode):
        fix = 'start each rule with "- "' if isinstance(node, MapNode) else "write [] for no rules"
        findings.add(node.location, f"rules is {describe(node)}", expected="a list of rules", fix=fix)
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


_FIELDS = {"function": "functions", "unit": "units"}


def _read_rule(node: Node, fallback_id: str, origin: str, findings: Findings) -> Rule | None:
    """Return the rule, or None if it is not a mapping."""
    entries = read_entries(node, "a rule", RULE_KEYS, findings, _RULE_FIXES)
    if not isinstance(node, MapNode):
        return None
    if lacks("do", node, RULE_KEYS):
        findings.add(node.location, "this rule says nothing to do", expected=", ".join(DO_WORDS), fix='add "do: save"')
    naming = [key for key in _NAMING if key in entries]
    for key in naming[1:]:
        found = f"this rule has both {naming[0]} and {key}"
        findings.add(entries[key].location, found, expected=f"one of {listing(_NAMING)}", fix="write two rules")
    if all(lacks(key, node, RULE_KEYS) for key in _NAMING):
        _check_speaks_of_module(node, entries, findings)
    in_order = {key: entries[key] for key in ("do", "ops", *RULE_KEYS) if key in entries}  # of problems without lines
    read = read_fields(in_order, _RULE, findings)
    names = read.pop("ops", ())
    read |= {field: tuple(name for name, _ in read.pop(key, ())) for key, field in _FIELDS.items()}
    return Rule(
        **{"id": fallback_id, "do": Decision.RECOMPUTE.value, **read},
        ops=tuple(name for name, _ in names),
        location=node.location,
        key_locations={key: value.location for key, value in entries.items()},
        op_locations=tuple(location for _, location in names),
        origin=origin,
    )


def _check_speaks_of_module(node: MapNode, entries: dict[str, Node], findings: Findings) -> None:
    """Check a rule for whole modules: it needs `module`, and no key about the output of one op."""
    if lacks("module", node, RULE_KEYS):
        fix = 'add ops, such as "ops: matmul"; "*" means every op that can be saved'
        expected = "one of ops, function and unit, or module, or both"
        findings.add(node.location, "this rule has neither ops nor module", expected=expected, fix=fix)
        return
    for key in _ABOUT_ONE_OP:
        if key in entries:
            found = f"{key} applies to the output of an op, but this rule has no ops"
            findings.add(entries[key].location, found, fix=f'remove {key}, or add ops, such as "ops: matmul"')


def _find_double_ids(rules: Sequence[Rule], findings: Findings) -> None:
    first: dict[str, Rule] = {}
    for rule in rules:
        if rule.id in first:
            location = rule.key_locations.get("id", rule.location)
            found = f'the id "{rule.id}" is given twice; the first is at {first[rule.id].where("id")}'
            findings.add(location, found, fix="give each rule its own id")
        first.setdefault(rule.id, rule)


def _find_shadowed(rules: Sequence[Rule], findings: Findings) -> None:
    """Find rules that can never fire because an earlier rule matches all that they match, judging by their texts."""
    for index, later in enumerate(rules):
        for earlier in rules[:index]:
            if takes_all_of(earlier, later):
                found = (
                    f'the rule "{later.id}" can never fire: "{earlier.id}" at {earlier.where()} matches all it matches'
                )
                fix = f'put "{later.id}" before "{earlier.id}", or remove it'
                findings.add(later.location, found, fix=fix)
                break


def takes_all_of(earlier: Rule, later: Rule) -> bool:
    """Return whether ``earlier`` matches all that ``later`` matches, judging by their texts."""
    if any(bool(one) != bool(other) for one, other in zip(_names(earlier), _names(later), strict=True)):
        return False
    return (
        _has_all_blocks_of(earlier, later)
        and (earlier.module in (None, later.module) or earlier.module.text == "**")
        and (earlier.layers in (None, later.layers) or earlier.layers.is_all)
        and earlier.call in (None, later.call)
        and earlier.shape in (None, later.shape)
        and (not earlier.dtype or (bool(later.dtype) and set(later.dtype) <= set(earlier.dtype)))
        and all(
            any(_names_at_least(wide, narrow) for wide in wider)
            for wider, narrower in zip(_names(earlier), _names(later), strict=True)
            for narrow in narrower
        )
    )


def _names(rule: Rule) -> tuple[tuple[str, ...], ...]:
    return rule.ops, rule.functions, rule.units


def _has_all_blocks_of(earlier: Rule, later: Rule) -> bool:
    if not earlier.blocks or any(pattern.text == "**" for pattern in earlier.blocks):
        return True
    return bool(later.blocks) and set(later.blocks) <= set(earlier.blocks)


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


@dataclass(frozen=True, slots=True)
class Written:
    """The content of one file: its own rules and keys, and the names of its parents, not yet looked up."""

    policy: Policy
    parents: tuple[tuple[str, SourceLocation], ...]


def read_policy(node: Node, fallback_name: str, source: str, findings: Findings, *, needs_schema: bool) -> Written:
    """Return the policy in ``node``; every problem in it goes into ``findings``.

    ``fallback_name`` is the policy's name if it has no ``name``. An entry in ``Policy.key_locations`` means that the
    file itself sets the key; ``blocks`` and ``layers`` have their own entries in addition to ``regions``.
    """
    if not isinstance(node, MapNode):
        fix = f'start with "schema: {SCHEMA}"' if needs_schema else ""
        findings.stop(
            node.location, f"the policy is {describe(node)}", expected=f"a mapping of {', '.join(POLICY_KEYS)}", fix=fix
        )
    entries = read_entries(node, "a policy", POLICY_KEYS, findings, _FIXES)
    _check_top(node, findings, needs_schema=needs_schema)
    read = read_fields({key: value for key, value in entries.items() if key != "rules"}, _POLICY, findings)
    name = read.get("name", fallback_name)
    regions, region_locations = read.get("regions", ({}, {}))
    sets, set_locations = read.get("sets", ({}, {}))
    policy = Policy(
        name=name,
        rules=read_rules(entries.get("rules"), name, findings),
        default=Decision(read.get("default", Decision.RECOMPUTE)),
        models=read.get("models", ()),
        sets=sets,
        set_locations=set_locations,
        **regions,
        source=source,
        key_locations={key: value.location for key, value in entries.items()} | region_locations,
    )
    return Written(policy, read.get("extends", ()))


def _check_top(node: MapNode, findings: Findings, *, needs_schema: bool) -> None:
    if needs_schema and lacks("schema", node, POLICY_KEYS):
        fix = f'add "schema: {SCHEMA}"'
        findings.add(node.location, "the policy does not name its schema", expected=SCHEMA, fix=fix)
    if all(lacks(key, node, POLICY_KEYS) for key in ("rules", "extends", "default")):
        fix = 'add rules; "rules: []" means the default for every op'
        findings.add(
            node.location, "the policy has neither rules nor extends", expected="rules, extends, default", fix=fix
        )


def _read_models(node: Node, what: str, findings: Findings) -> tuple[str, ...]:
    return tuple(text for text, _ in read_texts(node, what, findings))


def _read_regions(node: Node, what: str, findings: Findings) -> tuple[dict[str, Any], dict[str, SourceLocation]]:
    """Return ``blocks`` and ``layers``, as far as they are set, and their locations."""
    entries = read_entries(node, what, (*_REGIONS,), findings)
    read = read_fields(entries, _REGIONS, findings, f"{what}.")
    return read, {key: value.location for key, value in entries.items()}


def _read_sets(
    node: Node, what: str, findings: Findings
) -> tuple[dict[str, tuple[str, ...]], dict[str, SourceLocation]]:
    """Return the ops of each set by its name, and the locations of the names."""
    named = read_named(node, what, findings)
    for key, _ in named:
        if not _SET_NAME.fullmatch(key.text):
            expected = "a word of letters, digits, _ and -"  # other names would be confused with ops or globs
            findings.add(key.location, f"the name of a set is {describe(key)}", expected=expected)
    names = {key.text: read_names(value, f"{what}.{key.text}", findings) for key, value in named}
    sets = {key: tuple(name for name, _ in ops) for key, ops in names.items()}
    return sets, {key.text: key.location for key, _ in named}


_REGIONS: dict[str, Reader] = {"blocks": read_patterns, "layers": read_layers}
_POLICY: dict[str, Reader] = {
    "schema": _word((SCHEMA,)),
    "name": read_text,
    "extends": read_texts,
    "models": _read_models,
    "sets": _read_sets,
    "regions": _read_regions,
    "default": _word([decision.value for decision in Decision]),
}
_FIXES = {  # of keys of earlier versions
    "plan": "remove it: what a plan was made for is in its comments",
    "offload": "remove it; `store: host` in the config value has the regions' inputs wait on the host",
}
POLICY_KEYS = (*_POLICY, "rules")  # the ids of rules begin with the policy's name
