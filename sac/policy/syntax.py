"""Parse YAML text into nodes with source locations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import yaml
from yaml.error import Mark as YamlMark

from sac.errors import PolicyError, Problem
from sac.policy.model import SourceLocation
from sac.policy.scalars import ScalarType, plain_type

if TYPE_CHECKING:
    from yaml._yaml import Mark as CMark  # only its type: a PyYAML built without libyaml has no such module


# -- Nodes: scalars, lists and mappings, each with its source location

MAX_NODES = 10_000  # with every alias expanded; the longest shipped policy has a few hundred
MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Scalar:
    """One word, number or text; ``text`` is exactly as in the file."""

    text: str
    scalar_type: ScalarType
    location: SourceLocation


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    items: tuple[Node, ...]
    location: SourceLocation


@dataclass(frozen=True, slots=True)
class MapNode:
    """A mapping, in the order written; keys are unique."""

    entries: tuple[tuple[Scalar, Node], ...]
    location: SourceLocation


Node: TypeAlias = Scalar | ListNode | MapNode


class Findings:
    """Collects the problems of one file, so that all of them are reported at once."""

    def __init__(self) -> None:
        self._found: list[tuple[SourceLocation, Problem]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self, location: SourceLocation, found: str, *, expected: str = "", nearest: str = "", fix: str = ""
    ) -> None:
        """Record one problem at ``location``."""
        self._found.append((location, Problem(str(location), found, expected, nearest, fix)))

    def stop(self, location: SourceLocation, found: str, *, expected: str = "", fix: str = "") -> NoReturn:
        """Record a problem after which nothing can be read, and raise all problems found."""
        self.add(location, found, expected=expected, fix=fix)
        raise PolicyError(self.problems())

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems found, in order of location (in order of discovery if there are no lines)."""
        return tuple(problem for _, problem in sorted(self._found, key=lambda found: (found[0].line, found[0].column)))


def describe(node: Node) -> str:
    """Return a description of ``node`` for a message."""
    if isinstance(node, ListNode):
        return "a list" if node.items else "an empty list"
    if isinstance(node, MapNode):
        return "a mapping" if node.entries else "an empty mapping"
    if node.scalar_type == "null":
        return "empty"
    if node.scalar_type == "other":
        return f"a {node.text}"
    return f'"{shown(node.text)}"' if node.scalar_type == "text" else shown(node.text)


def shown(text: str) -> str:
    """Return ``text`` for a message: truncated, with unprintable characters escaped."""
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def node_from_value(value: object, path: str, findings: Findings) -> Node:
    """Return the node of a Python value (a policy given as a mapping); locations are paths: ``policy.rules[0]``."""
    return _Values(findings).convert(value, path, MAX_DEPTH)


class _Values:
    """Converts one Python value, with the same bounds on size and depth as for a file."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.nodes_left = MAX_NODES

    def convert(self, value: object, path: str, depth_left: int) -> Node:
        location = SourceLocation(path)
        self.nodes_left -= 1
        if self.nodes_left < 0:
            self.findings.stop(location, f"the mapping holds more than {MAX_NODES} values", fix="split the policy")
        if depth_left < 0:
            self.findings.stop(location, f"the mapping nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")
        if isinstance(value, Mapping):
            return MapNode(self._entries(value, path, depth_left - 1), location)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            items = enumerate(value)
            return ListNode(tuple(self.convert(v, f"{path}[{i}]", depth_left - 1) for i, v in items), location)
        return _scalar_from_value(value, location)

    def _entries(self, value: Mapping[object, object], path: str, depth_left: int) -> tuple[tuple[Scalar, Node], ...]:
        entries = []
        for key, item in value.items():
            below = f"{path}.{shown(str(key))}"
            entries.append((_scalar_from_value(key, SourceLocation(below)), self.convert(item, below, depth_left)))
        return tuple(entries)


def _scalar_from_value(value: object, location: SourceLocation) -> Scalar:
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return Scalar("null", "null", location)
    if isinstance(value, bool):
        return Scalar(str(value).lower(), "bool", location)
    if isinstance(value, str):
        return Scalar(str(value), "text", location)
    if isinstance(value, int) and value.bit_length() <= 128:  # much longer ones cannot even be printed
        return Scalar(str(int(value)), "int", location)
    if isinstance(value, float):
        return Scalar(repr(float(value)), "float", location)
    return Scalar(f"value of type {type(value).__name__}", "other", location)


# -- YAML text to nodes: only plain data, bounded in size and depth, duplicate keys reported

# We compose the parser's events ourselves. PyYAML's composer recurses (a deep file ends in ``RecursionError``), and its
# constructor silently lets a second key win and resolves unquoted words by YAML 1.1.

_NodeEvent: TypeAlias = yaml.AliasEvent | yaml.ScalarEvent | yaml.CollectionStartEvent
_NODE_EVENTS = (yaml.AliasEvent, yaml.ScalarEvent, yaml.CollectionStartEvent)
_QUOTE_STAR = 'an unquoted * at the start of a word refers to an anchor; quote patterns, as in "*_proj"'


def compose_yaml(text: str, file: str, findings: Findings) -> Node | None:
    """Return the root node of ``text``, or None if it is empty; raises ``PolicyError`` if reading cannot continue.

    Duplicate keys are reported in ``findings``, and the first one is kept.
    """
    return _Composer(text, file, findings).compose()


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been read yet."""

    is_mapping: bool
    location: SourceLocation
    anchor: str | None
    first_node: int  # number of nodes counted before this one
    children: list[Node] = field(default_factory=list)


class _Composer:
    """Composes one text; see ``compose_yaml``."""

    def __init__(self, text: str, file: str, findings: Findings) -> None:
        self.text, self.file, self.findings = text, file, findings
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Node, int]] = {}  # node and its number of nodes, with every alias expanded
        self.nodes = 0
        self.documents = 0
        self.root: Node | None = None

    def compose(self) -> Node | None:
        for event in self._events():
            if isinstance(event, yaml.DocumentStartEvent):
                self._start_document(event)
            elif isinstance(event, _NODE_EVENTS):
                self._start_node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._end_collection()
        return None if isinstance(self.root, Scalar) and self.root.scalar_type == "null" else self.root

    def _events(self) -> Iterator[yaml.Event]:
        loader: yaml.SafeLoader | None = None
        try:
            loader = yaml.SafeLoader(self.text)
            while loader.check_event():
                yield loader.get_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs leave it untyped
        except yaml.MarkedYAMLError as error:
            location = error.problem_mark or error.context_mark
            found = ": ".join(part for part in (error.context, error.problem) if part)
            fix = _syntax_fix(error, self.text[location.index : location.index + 1] if location else "")
            self.findings.stop(self._location(location), f"this is not YAML: {found}", fix=fix)
        except yaml.reader.ReaderError as error:
            where = location_in(self.text, error.position, self.file)
            self.findings.stop(where, f"the character {error.character:#06x} is not allowed in YAML", fix="remove it")
        except (ValueError, OverflowError):  # PyYAML raises these for an escape such as "\Uffffffff"
            where = self._location(loader.get_mark() if loader else None)
            found = "this is not YAML: an escape in quoted text does not encode a character"
            self.findings.stop(where, found, fix="look for a wrong \\")

    def _start_document(self, event: yaml.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            self.findings.stop(
                self._location(event.start_mark), "a second document starts here", fix="one policy per file"
            )

    def _start_node(self, event: _NodeEvent) -> None:
        location = self._location(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            node, size = self._aliased(event.anchor or "", location)
            self._count(size, location)
            self._attach(node)
            return
        self._count(1, location)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            fix = "remove it; a policy is plain words, numbers, lists and mappings"
            self.findings.stop(location, f"the tag {shown(tag)} is not allowed", fix=fix)
        if isinstance(event, yaml.ScalarEvent):
            node = Scalar(event.value, plain_type(event.value) if event.implicit[0] else "text", location)
            self._close(node, event.anchor, self.nodes - 1)
            return
        if len(self.open) == MAX_DEPTH:
            self.findings.stop(location, f"this nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")
        self.open.append(_Open(isinstance(event, yaml.MappingStartEvent), location, event.anchor, self.nodes - 1))

    def _aliased(self, anchor: str, location: SourceLocation) -> tuple[Node, int]:
        if anchor in self.anchors:
            return self.anchors[anchor]
        if any(opened.anchor == anchor for opened in self.open):
            self.findings.stop(location, f"*{anchor} is inside of what it refers to", fix="write it out")
        self.findings.stop(location, f"*{anchor} refers to no anchor", fix=_QUOTE_STAR)

    def _count(self, size: int, location: SourceLocation) -> None:
        self.nodes += size
        if self.nodes > MAX_NODES:
            found = f"up to here the file holds more than {MAX_NODES} values, with every alias written out"
            self.findings.stop(location, found, fix="use fewer aliases, or split the policy with `extends`")

    def _end_collection(self) -> None:
        done = self.open.pop()
        if not done.is_mapping:
            self._close(ListNode(tuple(done.children), done.location), done.anchor, done.first_node)
            return
        entries: dict[str, tuple[Scalar, Node]] = {}
        for key, value in zip(done.children[::2], done.children[1::2], strict=True):
            self._add_entry(entries, key, value)
        self._close(MapNode(tuple(entries.values()), done.location), done.anchor, done.first_node)

    def _add_entry(self, entries: dict[str, tuple[Scalar, Node]], key: Node, value: Node) -> None:
        if not isinstance(key, Scalar):
            self.findings.add(key.location, "a list or mapping is used as a key", fix="quote it if text is meant")
        elif key.text in entries:
            first = entries[key.text][0].location
            found = f'the key "{shown(key.text)}" is given twice; the first is at {first}'
            self.findings.add(key.location, found, fix="keep one of them")
        else:
            entries[key.text] = (key, value)

    def _close(self, node: Node, anchor: str | None, first_node: int) -> None:
        if anchor is not None:
            self.anchors[anchor] = (node, self.nodes - first_node)
        self._attach(node)

    def _attach(self, node: Node) -> None:
        if self.open:
            self.open[-1].children.append(node)
        else:
            self.root = node

    def _location(self, where: YamlMark | CMark | None) -> SourceLocation:
        return SourceLocation(self.file, where.line + 1, where.column + 1) if where else SourceLocation(self.file)


def _syntax_fix(error: yaml.MarkedYAMLError, character: str) -> str:
    context, problem = error.context or "", error.problem or ""
    if "alias" in context:
        return _QUOTE_STAR
    if character == "\t":
        return "indent with spaces, not with tabs"
    if "block scalar" in context or "cannot start any token" in problem:
        return 'quote text that starts with a sign, as in ">=4096"'
    if "quoted scalar" in context:
        return "close the quote"
    return "check the indentation, the brackets, and that text with a sign in it is quoted"


def location_in(text: str, offset: int, file: str) -> SourceLocation:
    """Return the source location of the character at ``offset`` of ``text``."""
    before = text[:offset]
    return SourceLocation(file, before.count("\n") + 1, offset - before.rfind("\n"))
