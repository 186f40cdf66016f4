"""The forms that a rule's matchers are written in: layers, calls, shapes, dtypes and module patterns."""

from __future__ import annotations

import re

from sac.errors import listing, nearest
from sac.policy.model import Calls, Chunks, Dim, Layers
from sac.policy.nodes import Findings, ListNode, MapNode, Node, Scalar, describe, shown
from sac.policy.patterns import PathPattern
from sac.policy.scalars import is_fraction, read_entries, read_fraction, read_texts, read_whole
from sac.policy.sizes import MAX_WHOLE

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
    """Return one pattern over module paths; a list of patterns is folded into one with alternatives."""
    patterns = read_patterns(node, what, findings)
    if not patterns:
        return None
    try:
        return PathPattern.any_of(pattern.text for pattern in patterns)
    except ValueError as error:
        findings.add(node.mark, f"{what} is not a pattern: {error}", fix="write fewer patterns")
        return None


def read_patterns(node: Node, what: str, findings: Findings) -> tuple[PathPattern, ...]:
    """Return the patterns of one text or a list of texts."""
    if isinstance(node, MapNode):
        fix = 'quote it: unquoted braces are a mapping; patterns are written as in "{q_proj,k_proj}"'
        findings.add(node.mark, f"{what} is {describe(node)}", expected="a pattern, or a list of them", fix=fix)
        return ()
    patterns = []
    for text, mark in read_texts(node, what, findings, empty_is_legal=True):
        try:
            patterns.append(PathPattern.parse(text))
        except ValueError as error:
            expected = 'a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"'
            findings.add(mark, f'{what} is "{shown(text)}": {error}', expected=expected)
    return tuple(patterns)


def read_layers(node: Node, what: str, findings: Findings) -> Layers | None:
    """Return the layers chosen by ``all``, one of the forms of ``LAYER_FORMS`` or a list of ranges.

    Chunks, which a config value can ask for, are a finding: a policy speaks of one layer at a time.
    """
    plan = _read_plan(node, what, LEGAL_LAYERS, findings)
    if isinstance(plan, Chunks):
        fix = "write it in the config value, under `layers`, with `mode: full`"
        found = f"{what} asks for chunks of layers, which no policy can"
        findings.add(node.mark, found, expected=LEGAL_LAYERS, fix=fix)
        return None
    return plan


def read_layer_plan(node: Node, what: str, findings: Findings) -> Layers | Chunks | None:
    """Return what ``read_layers`` does, or chunks: ``sqrt``, ``{uniform: n}``. Chunks of one layer are all layers."""
    plan = _read_plan(node, what, LEGAL_PLANS, findings)
    return Layers() if plan == Chunks(1) else plan


def _read_plan(node: Node, what: str, legal: str, findings: Findings) -> Layers | Chunks | None:
    if isinstance(node, ListNode):
        return _read_ranges(node, what, legal, findings)
    if isinstance(node, MapNode):
        return _read_counted_layers(node, what, legal, findings)
    word = node.text.strip().lower() if node.kind == "text" else ""
    if word == "all":
        return Layers()
    if word == "sqrt":
        return Chunks()
    near = nearest(word, ["all", "sqrt"]) if word and legal == LEGAL_PLANS else nearest(word, ["all"])
    findings.add(node.mark, f"{what} is {describe(node)}", expected=legal, nearest=near, fix=_layers_fix(node))
    return None


def _layers_fix(node: Scalar) -> str:
    between = _RANGE_LOOKALIKE.fullmatch(node.text)
    if between:
        return f'ranges are written as "{between[1]}-{between[2]}", in a list: ["{between[1]}-{between[2]}"]'
    word = node.text.strip().lower()
    if node.kind == "text" and word in (*LAYER_FORMS, "uniform") and word != "offset":
        return f"say how many, as in {{{word}: {'0.5' if word == 'fraction' else '2'}}}"
    if node.kind == "float" and is_fraction(node.text):
        return f"write {{fraction: {node.text}}}"
    if node.kind != "int" or not node.text.isdecimal():
        return ""
    fix = f"write [{node.text}] for that layer alone, {{first: {node.text}}} for the first ones"
    high, low = divmod(int(node.text[:18]), 60)
    if high and not node.mark.line:  # PyYAML made this number before we saw it
        fix += (
            f'; if {high}:{low} was written, YAML 1.1 reads it as {node.text}: ranges are written as ["{high}-{low}"]'
        )
    return fix


def _read_counted_layers(node: MapNode, what: str, legal: str, findings: Findings) -> Layers | Chunks | None:
    names = [key.text for key, _ in node.entries]
    if "sqrt" in names and legal == LEGAL_PLANS:
        findings.add(node.mark, f'{what} has the key "sqrt"', expected=legal, fix="write the word alone: layers: sqrt")
        return None
    forms = (*LAYER_FORMS, "uniform") if legal == LEGAL_PLANS or "uniform" in names else LAYER_FORMS
    entries = read_entries(node, what, forms, findings)
    if not _is_one_form(node, entries, what, legal, findings):
        return None
    if "fraction" in entries:
        return Layers(fraction=read_fraction(entries["fraction"], f"{what}.fraction", findings))
    numbers = {
        key: read_whole(value, f"{what}.{key}", findings, least=0 if key == "offset" else 1)
        for key, value in entries.items()
    }
    if "uniform" in numbers:
        return Chunks(numbers["uniform"])
    first = numbers.get("first", numbers.get("block"))
    return Layers(first=first, last=numbers.get("last"), every=numbers.get("every"), offset=numbers.get("offset") or 0)


def _is_one_form(node: MapNode, entries: dict[str, Node], what: str, legal: str, findings: Findings) -> bool:
    """Return whether one form is chosen; ``offset`` belongs to ``every`` and is no form of its own."""
    forms = [key for key in entries if key != "offset"]
    if len(forms) == 1 and ("offset" not in entries or "every" in entries):
        return True
    if len(entries) == len(node.entries):  # otherwise an unknown key has been told, and is likely the form
        found = " and ".join(entries) or "nothing in it"
        findings.add(node.mark, f"{what} has {found}", expected=legal, fix="choose one of the forms")
    return False


def _read_ranges(node: ListNode, what: str, legal: str, findings: Findings) -> Layers | None:
    if not node.items:
        findings.add(node.mark, f"{what} is an empty list", expected=legal, fix="remove it, or name a layer")
        return None
    ranges = []
    for item in node.items:
        text = item.text if isinstance(item, Scalar) and item.kind in ("int", "text") else ""
        found, fix = _RANGE.fullmatch(text), ""
        if found and int(found[1]) <= int(found[2] or found[1]) <= MAX_WHOLE:
            ranges.append((int(found[1]), int(found[2] or found[1])))
            continue
        if found:
            fix = f'write "{found[2]}-{found[1]}"'
        elif between := _RANGE_LOOKALIKE.fullmatch(text):
            fix = f'ranges are written as "{between[1]}-{between[2]}"'
        expected = 'a layer such as 12, or a range such as "0-7" (both ends are meant)'
        findings.add(item.mark, f"an entry of {what} is {describe(item)}", expected=expected, fix=fix)
    return Layers(ranges=tuple(ranges))


def read_call(node: Node, what: str, findings: Findings) -> Calls | None:
    """Return which uses of an op are meant: ``index``, or ``every`` with an ``offset``."""
    if not isinstance(node, MapNode):
        text = node.text if isinstance(node, Scalar) and node.kind == "int" else ""
        fix = f"write {{index: {text}}}" if text else ""
        findings.add(node.mark, f"{what} is {describe(node)}", expected=LEGAL_CALL, fix=fix)
        return None
    entries = read_entries(node, what, ("index", "every", "offset"), findings)
    if not _is_one_form(node, entries, what, LEGAL_CALL, findings):
        return None
    if "index" in entries:
        return _read_indices(entries["index"], f"{what}.index", findings)
    every = read_whole(entries["every"], f"{what}.every", findings, least=1)
    offset = read_whole(entries["offset"], f"{what}.offset", findings, least=0) if "offset" in entries else 0
    return Calls(every=every, offset=offset or 0)


def _read_indices(node: Node, what: str, findings: Findings) -> Calls | None:
    nodes = node.items if isinstance(node, ListNode) else (node,)
    if not nodes:
        findings.add(node.mark, f"{what} is an empty list", expected=LEGAL_CALL, fix="remove it, or name a call")
    indices = (read_whole(item, what, findings, least=0) for item in nodes)
    return Calls(index=frozenset(index for index in indices if index is not None))


def read_shape(node: Node, what: str, findings: Findings) -> tuple[Dim, ...] | None:
    """Return the dimensions of a shape pattern."""
    if not isinstance(node, ListNode) or not node.items:
        findings.add(node.mark, f"{what} is {describe(node)}", expected=LEGAL_SHAPE)
        return None
    dims = (_read_dim(item, what, findings, is_first=not place) for place, item in enumerate(node.items))
    return tuple(dim for dim in dims if dim is not None)


def _read_dim(node: Node, what: str, findings: Findings, *, is_first: bool) -> Dim | None:
    text = node.text.strip() if isinstance(node, Scalar) and node.kind in ("int", "text") else ""
    if text == "_":
        return Dim()
    if text == "..." and is_first:
        return Dim("...")
    found = _DIM.fullmatch(text)
    if found:
        return Dim(found[1] or "==", int(found[2]))
    expected = '_ for any size, a size such as 128, or "!=", ">=", "<=", ">", "<" and a size'
    fix = '"..." may stand in front only' if text == "..." else 'write _ for "any"' if text in ("*", "-1") else ""
    findings.add(node.mark, f"an entry of {what} is {describe(node)}", expected=expected, fix=fix)
    return None


def read_dtypes(node: Node, what: str, findings: Findings) -> tuple[str, ...]:
    """Return dtype names as torch prints them, without ``torch.``; its short names (``half``) are legal too."""
    names = []
    for text, mark in read_texts(node, what, findings):
        word = text.lower().removeprefix("torch.")
        name = _DTYPE_ALIASES.get(word, word)
        if name in DTYPES:
            names.append(name)
        else:
            findings.add(mark, f'{what} is "{shown(text)}"', expected=listing(DTYPES), nearest=nearest(word, DTYPES))
    return tuple(dict.fromkeys(names))
