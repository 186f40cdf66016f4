"""YAML text and Python values as nodes with source locations, their problems all at once, and values as YAML text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from sac.errors import PolicyError, Problem, SacError

# -- Nodes: texts, lists and mappings, each with its source location


@dataclass(frozen=True, slots=True)
class Node:
    """A value; prints as its description in a message.

    ``kind``: ``text`` (words and numbers as they were written, so that ``1.10`` and ``on`` stay what they are),
    ``scalar`` (a Python float or bool, whose spelling is lost), ``empty`` (null), ``list``, ``map``, or ``object``
    (anything else, with a description as ``text``). ``location``: ``file:line:column``, or the path to a Python value.
    ``name``: the path of its keys, ``rules[0].layers``. ``parts`` makes the nodes of a list, or the pairs of a mapping,
    when they are read: aliases of aliases cost nothing. ``value``: the value itself; in a file, pyyaml's.
    """

    kind: str
    location: str
    name: str
    text: str = ""
    parts: Callable[[], tuple[Any, ...]] = tuple
    value: Any = None

    @property
    def items(self) -> tuple[Node, ...]:
        """The nodes of a list; of another node, itself."""
        return self.parts() if self.kind == "list" else (self,)

    @property
    def entries(self) -> tuple[tuple[Node, Node], ...]:
        """The keys and values of a mapping, in the order written."""
        return self.parts() if self.kind == "map" else ()

    def locations(self) -> dict[str, str]:
        """Return the locations of what is in a mapping, by their paths from it: ``ops``, ``ops[0]``, ``sets.mine``."""
        values = [value for _, value in self.entries]
        below = [part for value in values for part in (value, *value.items, *(item for _, item in value.entries))]
        return {node.name[len(self.name) :].lstrip("."): node.location for node in below}

    def error(self, expected: str = "", *, found: str = "", nearest: str = "", fix: str = "") -> PolicyError:
        """Return the error that this node is not what is ``expected``, or that something else is wrong with it."""
        fix = fix or (f'write "{nearest}"' if nearest else "")
        found = found or f"{self.name or 'this'} is {self}"
        return PolicyError(Problem(self.location, found, expected, nearest, fix))

    def __str__(self) -> str:
        names = {"list": "a list", "map": "a mapping", "empty": "empty", "object": self.text}
        text = shown(self.text)
        return names.get(self.kind, f'"{text}"' if isinstance(self.value, str) else text)


def shown(text: str) -> str:
    """Return ``text`` for a message: truncated, with unprintable characters escaped."""
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


_TAGS = {*yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}  # << and =


def node_of(value: Any, file: str, name: str = "") -> Node:
    """Return the node of a node of pyyaml, or of a Python value, whose location is a path: ``policy.rules[0]``."""
    kind, text = _kind_and_text(value)
    location = ".".join(filter(None, (file, name)))
    if isinstance(value, yaml.Node):
        mark, value = value.start_mark, value.value
        location = f"{file}:{mark.line + 1}:{mark.column + 1}"

    def parts() -> tuple[Any, ...]:
        if kind == "list":
            return tuple(node_of(item, file, f"{name}[{index}]") for index, item in enumerate(value))
        pairs = value.items() if isinstance(value, Mapping) else value
        keys = [(node_of(key, file, name), item) for key, item in pairs]
        return tuple((key, node_of(item, file, f"{name}.{shown(key.text)}".lstrip("."))) for key, item in keys)

    return Node(kind, location, name, text, parts, value)


def _kind_and_text(value: Any) -> tuple[str, str]:
    if isinstance(value, yaml.Node) and value.tag not in _TAGS:
        return "object", f"a value with the tag {shown(value.tag)}"
    if value is None or (isinstance(value, yaml.ScalarNode) and value.tag.endswith(":null")):
        return "empty", ""
    if isinstance(value, str | yaml.ScalarNode):
        return "text", str.__str__(value) if isinstance(value, str) else value.value  # of an enum its value
    if isinstance(value, int | float) and abs(value) < 2**63:  # a much longer int cannot even be printed
        return "text" if type(value) is int else "scalar", str(value).lower()
    if isinstance(value, Mapping | yaml.MappingNode):
        return "map", ""
    if isinstance(value, Sequence | yaml.SequenceNode) and not isinstance(value, bytes | bytearray):
        return "list", ""
    return "object", f"a value of type {type(value).__name__}"


def compose_yaml(data: bytes, file: str) -> Node:
    """Return the root node of a file's content; raises ``PolicyError`` if it is not YAML."""
    try:
        composed = yaml.compose(data, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, column = (mark.line, mark.column) if mark else (data[: getattr(error, "position", 0)].count(b"\n"), 0)
        parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        found = ": ".join(part for part in parts if part) or str(error)
        fix = 'quote text with a sign such as * { > : in it, as in "*_proj"; check brackets, indentation, UTF-8'
        raise PolicyError(Problem(f"{file}:{line + 1}:{column + 1}", f"this is not YAML: {found}", fix=fix)) from None
    return Node("empty", file, "") if composed is None else node_of(composed, file)


def yaml_text(value: object, *, flow: bool | None = None, width: float = 100) -> str:
    """Return plain values as YAML text, as pyyaml's ``dump`` does."""
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=width)


@contextmanager
def all_problems(error: type[SacError] = PolicyError) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls another one; at the end, raise the problems of all calls together."""
    problems: list[Problem] = []

    def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except SacError as raised:
            problems.extend(raised.problems)

    yield attempt
    if problems:
        raise error(dict.fromkeys(problems))  # a parent of two parents is read twice
