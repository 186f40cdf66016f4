"""Reading words, texts and numbers out of nodes; what is wrong goes into the findings, and None comes back."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from sac.errors import listing, nearest
from sac.policy.model import Mark
from sac.policy.nodes import Findings, ListNode, MapNode, Node, Scalar, describe, shown
from sac.policy.sizes import LEGAL_BYTES, MAX_WHOLE, parse_bytes


def read_entries(node: Node, what: str, legal: Sequence[str], findings: Findings) -> dict[str, Node]:
    """Return the values of a mapping by key; keys that are not in ``legal`` are findings."""
    if not isinstance(node, MapNode):
        fix = 'write it as "key: value" pairs'
        findings.add(node.mark, f"{what} is {describe(node)}", expected=f"a mapping of {listing(legal)}", fix=fix)
        return {}
    known: dict[str, Node] = {}
    for key, value in node.entries:
        if _is_name(key, what, findings):
            if key.text in legal:
                known[key.text] = value
            else:
                found, near = f'unknown key "{shown(key.text)}" in {what}', nearest(key.text, legal)
                fix = f'write "{near}"' if near else "remove it"
                findings.add(key.mark, found, expected=listing(legal), nearest=near, fix=fix)
    return known


def lacks(key: str, node: MapNode, legal: Sequence[str]) -> bool:
    """Return whether ``key`` is missing, and not just misspelled (which has been told)."""
    names = [name.text for name, _ in node.entries]
    return (
        key not in names
        and "<<" not in names
        and all(nearest(name, legal) != key for name in names if name not in legal)
    )


def read_named(node: Node, what: str, findings: Findings) -> list[tuple[Scalar, Node]]:
    """Return the entries of a mapping whose keys the user chooses."""
    if not isinstance(node, MapNode):
        findings.add(node.mark, f"{what} is {describe(node)}", expected="a mapping of names")
        return []
    return [(key, value) for key, value in node.entries if _is_name(key, what, findings)]


def _is_name(key: Scalar, what: str, findings: Findings) -> bool:
    if key.text == "<<":
        fix = "write the keys out, or put the shared rules into a policy of their own and use `extends`"
        findings.add(key.mark, 'merge keys ("<<") are not supported', fix=fix)
        return False
    if key.kind == "text" and key.text.isprintable() and key.text.strip():
        return True
    findings.add(key.mark, f"a key of {what} is {describe(key)}", expected="text", fix="quote it if text is meant")
    return False


def read_text(node: Node, what: str, findings: Findings, *, empty_is_legal: bool = False) -> str | None:
    """Return a text, letter by letter as written (``1.10`` stays ``1.10``)."""
    if not isinstance(node, Scalar) or node.kind in ("null", "other"):
        findings.add(node.mark, f"{what} is {describe(node)}", expected="text")
    elif node.kind == "bool":
        findings.add(node.mark, f"{what} is the boolean {node.text}", expected="text", fix=f'write "{node.text}"')
    elif node.kind == "float" and not node.mark.line:
        # A float of Python no longer says how it was written: 1.10 came as 1.1.
        findings.add(
            node.mark, f"{what} is the number {node.text}", expected="text", fix="quote it where it is written"
        )
    elif not node.text and not empty_is_legal:
        findings.add(node.mark, f"{what} is an empty text", expected="text")
    elif not node.text.isprintable() or node.text.strip() != node.text:
        fix = "remove what cannot be seen"
        findings.add(node.mark, f"{what} has a line break, an outer space or a control character in it", fix=fix)
    else:
        return node.text
    return None


def read_texts(
    node: Node, what: str, findings: Findings, *, empty_is_legal: bool = False
) -> tuple[tuple[str, Mark], ...]:
    """Return one text or a list of them, each with its mark."""
    if isinstance(node, MapNode):
        findings.add(node.mark, f"{what} is {describe(node)}", expected="text, or a list of at least one")
        return ()
    nodes = node.items if isinstance(node, ListNode) else (node,)
    if not nodes:
        findings.add(
            node.mark,
            f"{what} is an empty list",
            expected="text, or a list of at least one",
            fix="remove it, or name one",
        )
    texts = ((read_text(item, what, findings, empty_is_legal=empty_is_legal), item.mark) for item in nodes)
    return tuple((text, mark) for text, mark in texts if text is not None)


def read_names(node: Node, what: str, findings: Findings) -> tuple[tuple[str, Mark], ...]:
    """Return one name or a list of them; a name has no spaces or commas in it."""
    names = read_texts(node, what, findings)
    for name, mark in names:
        if "," in name or any(character.isspace() for character in name):
            found = f'{what} has the name "{shown(name)}" with a space or comma in it'
            findings.add(mark, found, fix="write several names as a list: [first, second]")
    return names


def read_word(node: Node, what: str, legal: Sequence[str], findings: Findings) -> str | None:
    """Return one of the ``legal`` words; case does not matter."""
    if not isinstance(node, Scalar) or node.kind in ("null", "other"):
        findings.add(node.mark, f"{what} is {describe(node)}", expected=listing(legal))
        return None
    word = next((word for word in legal if word.lower() == node.text.strip().lower()), None)
    if word is None:
        near = nearest(node.text, legal)
        fix = f'write "{near}"' if near else ""
        if node.kind == "bool" and not node.mark.line:
            fix = "quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
        findings.add(node.mark, f"{what} is {describe(node)}", expected=listing(legal), nearest=near, fix=fix)
    return word


def read_bool(node: Node, what: str, findings: Findings) -> bool | None:
    """Return ``true`` or ``false``; ``yes``, ``on``, 1 and quoted words are findings."""
    if isinstance(node, Scalar) and node.kind == "bool":
        return node.text.lower() == "true"
    meant = {"yes": "true", "on": "true", "true": "true", "1": "true"}
    meant |= {"no": "false", "off": "false", "false": "false", "0": "false"}
    word = meant.get(node.text.lower(), "") if isinstance(node, Scalar) else ""
    fix = f"write {word}, without quotes" if word else ""
    findings.add(node.mark, f"{what} is {describe(node)}", expected="true, false", fix=fix)
    return None


def read_whole(node: Node, what: str, findings: Findings, *, least: int) -> int | None:
    """Return a whole number not below ``least``; ``1e3`` is one, ``010`` (8 in YAML 1.1) and ``"10"`` are not."""
    expected, fix = f"a whole number, {least} or more", ""
    if isinstance(node, Scalar):
        digits = node.text.lstrip("+-")
        octal = len(digits) > 1 and digits.startswith("0") and node.kind == "int"
        if node.kind in ("int", "float") and not octal:
            value = _whole(node.text)
            if value is not None and least <= value <= MAX_WHOLE:
                return value
        if octal:
            fix = f"write {digits.lstrip('0') or '0'}; a leading zero means base 8 to some readers"
        elif node.kind == "text" and _whole(node.text) is not None:
            fix = "remove the quotes"
    findings.add(node.mark, f"{what} is {describe(node)}", expected=expected, fix=fix)
    return None


def read_fraction(node: Node, what: str, findings: Findings) -> float | None:
    """Return a number above 0 and at most 1, written as a number: ``0.5``, ``1``, ``5e-1``."""
    if isinstance(node, Scalar) and node.kind in ("int", "float") and is_fraction(node.text):
        return float(node.text)
    fix = "remove the quotes" if isinstance(node, Scalar) and node.kind == "text" and is_fraction(node.text) else ""
    findings.add(node.mark, f"{what} is {describe(node)}", expected="a number above 0, at most 1", fix=fix)
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
    if not isinstance(node, Scalar) or node.kind not in ("int", "float", "text"):
        findings.add(node.mark, f"{what} is {describe(node)}", expected=LEGAL_BYTES)
        return None
    try:
        return parse_bytes(node.text)
    except ValueError as error:
        findings.add(node.mark, f"{what} is {describe(node)}: {error}", expected=LEGAL_BYTES)
    return None
