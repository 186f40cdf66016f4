"""YAML text to nodes with marks: only plain data, bounded in size and depth, no key lost.

The parser's events are composed here, not by PyYAML: its composer recurses (a deep file ends in ``RecursionError``),
and its constructor lets a second key win in silence and resolves unquoted words by YAML 1.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import yaml
from yaml.error import Mark as YamlMark

from sac.policy.model import Mark
from sac.policy.nodes import MAX_DEPTH, MAX_NODES, Findings, ListNode, MapNode, Node, Scalar, plain_kind, shown

if TYPE_CHECKING:
    from yaml._yaml import Mark as CMark  # only its type: a PyYAML built without libyaml has no such module

_NodeEvent: TypeAlias = yaml.AliasEvent | yaml.ScalarEvent | yaml.CollectionStartEvent
_NODE_EVENTS = (yaml.AliasEvent, yaml.ScalarEvent, yaml.CollectionStartEvent)
_QUOTE_STAR = 'an unquoted * at the start of a word refers to an anchor; quote patterns, as in "*_proj"'


def compose_yaml(text: str, file: str, findings: Findings) -> Node | None:
    """Return what ``text`` writes, None when it is empty; raises ``PolicyError`` where reading cannot go on.

    Duplicate keys are noted in ``findings`` and the first one is kept.
    """
    return _Composer(text, file, findings).compose()


@dataclass(slots=True)
class _Open:
    """A list or mapping whose end has not been read yet."""

    is_mapping: bool
    mark: Mark
    anchor: str | None
    first_node: int  # how many nodes had been counted before this one
    children: list[Node] = field(default_factory=list)


class _Composer:
    """Composes one text; see ``compose_yaml``."""

    def __init__(self, text: str, file: str, findings: Findings) -> None:
        self.text, self.file, self.findings = text, file, findings
        self.open: list[_Open] = []
        self.anchors: dict[str, tuple[Node, int]] = {}  # and its nodes, every alias in it written out
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
        return None if isinstance(self.root, Scalar) and self.root.kind == "null" else self.root

    def _events(self) -> Iterator[yaml.Event]:
        loader: yaml.SafeLoader | None = None
        try:
            loader = yaml.SafeLoader(self.text)
            while loader.check_event():
                yield loader.get_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs leave it untyped
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            found = ": ".join(part for part in (error.context, error.problem) if part)
            fix = _syntax_fix(error, self.text[mark.index : mark.index + 1] if mark else "")
            self.findings.stop(self._mark(mark), f"this is not YAML: {found}", fix=fix)
        except yaml.reader.ReaderError as error:
            place = place_in(self.text, error.position, self.file)
            self.findings.stop(place, f"the character {error.character:#06x} is not allowed in YAML", fix="remove it")
        except (ValueError, OverflowError):  # PyYAML lets these out for an escape such as "\Uffffffff"
            place = self._mark(loader.get_mark() if loader else None)
            found = "this is not YAML: an escape in quoted text stands for no character"
            self.findings.stop(place, found, fix="look for a wrong \\")

    def _start_document(self, event: yaml.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            self.findings.stop(self._mark(event.start_mark), "a second document starts here", fix="one policy per file")

    def _start_node(self, event: _NodeEvent) -> None:
        mark = self._mark(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            node, size = self._aliased(event.anchor or "", mark)
            self._count(size, mark)
            self._attach(node)
            return
        self._count(1, mark)
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!", 1)
            fix = "remove it; a policy is plain words, numbers, lists and mappings"
            self.findings.stop(mark, f"the tag {shown(tag)} is not allowed", fix=fix)
        if isinstance(event, yaml.ScalarEvent):
            node = Scalar(event.value, plain_kind(event.value) if event.implicit[0] else "text", mark)
            self._close(node, event.anchor, self.nodes - 1)
            return
        if len(self.open) == MAX_DEPTH:
            self.findings.stop(mark, f"this nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")
        self.open.append(_Open(isinstance(event, yaml.MappingStartEvent), mark, event.anchor, self.nodes - 1))

    def _aliased(self, anchor: str, mark: Mark) -> tuple[Node, int]:
        if anchor in self.anchors:
            return self.anchors[anchor]
        if any(opened.anchor == anchor for opened in self.open):
            self.findings.stop(mark, f"*{anchor} stands inside of what it refers to", fix="write it out")
        self.findings.stop(mark, f"*{anchor} refers to no anchor", fix=_QUOTE_STAR)

    def _count(self, size: int, mark: Mark) -> None:
        self.nodes += size
        if self.nodes > MAX_NODES:
            found = f"up to here the file holds more than {MAX_NODES} values, with every alias written out"
            self.findings.stop(mark, found, fix="use fewer aliases, or split the policy with `extends`")

    def _end_collection(self) -> None:
        done = self.open.pop()
        if not done.is_mapping:
            self._close(ListNode(tuple(done.children), done.mark), done.anchor, done.first_node)
            return
        entries: dict[str, tuple[Scalar, Node]] = {}
        for key, value in zip(done.children[::2], done.children[1::2], strict=True):
            self._add_entry(entries, key, value)
        self._close(MapNode(tuple(entries.values()), done.mark), done.anchor, done.first_node)

    def _add_entry(self, entries: dict[str, tuple[Scalar, Node]], key: Node, value: Node) -> None:
        if not isinstance(key, Scalar):
            self.findings.add(
                key.mark, "a list or mapping stands where a key is meant", fix="quote it if text is meant"
            )
        elif key.text in entries:
            first = entries[key.text][0].mark
            found = f'the key "{shown(key.text)}" is given twice; the first is at {first}'
            self.findings.add(key.mark, found, fix="keep one of them")
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

    def _mark(self, place: YamlMark | CMark | None) -> Mark:
        return Mark(self.file, place.line + 1, place.column + 1) if place else Mark(self.file)


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


def place_in(text: str, offset: int, file: str) -> Mark:
    """Return the mark of the character at ``offset`` of ``text``."""
    before = text[:offset]
    return Mark(file, before.count("\n") + 1, offset - before.rfind("\n"))
