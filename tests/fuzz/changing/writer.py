"""Where the parts of a changing program put their lines of source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import indent

PARTS = ("before", "extra", "between", "last", "after")  # of a training step, in this order


@dataclass
class Whole:
    """What all writers of one program share."""

    top: list[str] = field(default_factory=list)  # classes, functions and globals of the program
    loop: dict[str, list[str]] = field(default_factory=lambda: {part: [] for part in PARTS})
    features: set[str] = field(default_factory=set)
    hidden: set[str] = field(default_factory=set)  # state that cannot be seen from a region's modules and arguments
    names: int = 0
    item_of: str = "state.{0}"  # how a field of the argument `state` is written
    uses_state: bool = False
    uses_option: bool = False  # an argument that is a number

    @property
    def arguments(self) -> str:
        """Of every `forward`."""
        return ", ".join(["h"] + ["state"] * self.uses_state + ["option"] * self.uses_option)


class Writer:
    """Writes one module: lines of its `__init__` and `forward`, and lines of the training loop that belong to it.

    `paths` is how the training loop reaches the modules of this class: `model.blocks[0]`, `model.blocks[2]`.
    """

    def __init__(self, whole: Whole, *paths: str) -> None:
        self.whole, self.paths = whole, paths
        self.inits: list[str] = []
        self.lines: list[str] = []
        self.depth = 0

    def name(self, word: str) -> str:
        """A name that nothing else in the program has."""
        self.whole.names += 1
        return f"{word}_{self.whole.names}"

    def init(self, text: str) -> None:
        """A line of `__init__`."""
        self.inits.append(text)

    def attribute(self, word: str, value: str) -> str:
        """An attribute of the module; returns its name."""
        name = self.name(word)
        self.init(f"self.{name} = {value}")
        return name

    def buffer(self, word: str, value: str) -> str:
        """A buffer of the module; returns its name."""
        name = self.name(word)
        self.init(f'self.register_buffer("{name}", {value})')
        return name

    def line(self, text: str) -> None:
        """Lines of `forward`, at the depth that `indented` has reached."""
        self.lines.append(indent(text, "    " * self.depth))

    @contextlib.contextmanager
    def indented(self, head: str) -> Iterator[None]:
        """Write `head`, and what follows below it."""
        self.line(head)
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self.depth -= 1

    def without_grad(self) -> contextlib.AbstractContextManager[None]:
        """What follows is written under `torch.no_grad()`."""
        return self.indented("with torch.no_grad():")

    def top(self, text: str) -> None:
        """Text at the level of the program."""
        self.whole.top.append(text)

    def loop(self, part: str, text: str) -> None:
        """Lines of a training step; `me` in them is this module: each one of its class in turn."""
        self.whole.loop[part] += [text.replace("me.", f"{path}.") for path in self.paths]

    def state(self, field_name: str) -> str:
        """A field of the argument `state`, as the program's kind of state is read."""
        self.whole.uses_state = True
        return self.whole.item_of.format(field_name)

    def hides(self, what: str) -> None:
        """Say that the program has state that cannot be seen from a region's modules and arguments."""
        self.whole.hidden.add(what)

    def module(self, name: str, signature: str, method: str = "forward", more: str = "") -> str:
        """The source of the class: the lines are those of `method`, and `more` is another one."""
        return "\n".join(
            [
                f"class {name}(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(indent(text, "        ") for text in self.inits),
                "",
                f"    def {method}(self, {signature}):",
                *(indent(text, "        ") for text in self.lines),
                "        return h",
                "",
                indent(more, "    "),
            ]
        )
