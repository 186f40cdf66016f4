"""The language of instructions: a program's source is drawn from templates, and put in its place."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from textwrap import indent

PARTS = ("before", "extra", "between", "last", "after", "around")  # of a training step


@dataclass
class Whole:
    """What all writers of one program share."""

    top: list[str] = field(default_factory=list)  # classes, functions and globals of the program
    loop: dict[str, list[str]] = field(default_factory=lambda: {part: [] for part in PARTS})
    features: set[str] = field(default_factory=set)
    names: int = 0
    item_of: str = "state.{0}"  # how a field of the argument `state` is written
    uses_state: bool = False
    uses_option: bool = False  # an argument that is a number
    blocks: int = 1

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

    def line(self, text: str) -> None:
        """Lines of `forward`."""
        self.lines.append(indent(text, "    " * self.depth))

    def write(self, instruction: list[str], pick: Random) -> str:
        """Write an instruction; return what it asks if it is a condition."""
        names: dict[str, str] = {}
        asked = ""
        for template in instruction:
            line = self._drawn(template, pick, names)
            word, _, rest = line.partition(" ")
            key, _, value = rest.partition(" = ")
            if word == "let":
                names[key] = value
            elif word in ("attr", "buffer"):
                name = names[key] = self.name(key.rstrip("0123456789"))
                made = f"self.{name} = {value}" if word == "attr" else f'self.register_buffer("{name}", {value})'
                self.inits.append(made)
            elif word in PARTS:
                self.whole.loop[word] += [re.sub(r"\bme\.", f"{path}.", rest) for path in self.paths]
            elif word == "if":
                asked = rest
            else:
                self.whole.uses_option |= bool(re.search(r"\boption\b", line))
                text = line.removeprefix("    ")
                self.line(indent(text.lstrip(), text[: len(text) - len(text.lstrip())]))
        return asked

    def _drawn(self, template: str, pick: Random, names: dict[str, str]) -> str:
        """The template with its alternatives drawn, from left to right, and its names put in."""
        begin, found, rest = template.partition("<<")
        if found:
            depth, end = 1, 0
            while depth:
                end = min(at for at in (rest.find("<<", end), rest.find(">>", end)) if at >= 0)
                depth += 1 if rest[end] == "<" else -1
                end += 2
            chosen = self._chosen(rest[: end - 2], pick)
            return (
                self._drawn(begin, pick, names)
                + self._drawn(chosen, pick, names)
                + self._drawn(rest[end:], pick, names)
            )
        self.whole.uses_state |= "$state." in template
        text = re.sub(r"\$state\.(\w+)", lambda match: self.whole.item_of.format(match[1]), template)
        return re.sub(r"\$(\w+)", lambda match: names[match[1]], text).replace(r"\n", "\n")

    def _chosen(self, text: str, pick: Random) -> str:
        """One of the alternatives."""
        word, _, count = text.partition(" ")
        if word == "steps":
            return str(tuple(sorted(pick.sample(range(6), int(count or 3)))))
        if word == "block":
            return str(pick.randrange(self.whole.blocks))
        if word == "rows":
            return str(tuple(pick.choice([2, 3, 3, 5, 8]) for _ in range(6)))
        chance = re.match(r"([\d.]+) \? ", text)
        text = text[chance.end() :] if chance else text
        alternatives = [one.strip() for one in re.split(r"\|\|(?![^<]*>>)", text)]
        if chance:
            return alternatives[pick.random() >= float(chance[1])]
        return pick.choice(alternatives)

    def module(self, name: str, signature: str) -> str:
        """The source of the class."""
        return "\n".join(
            [
                f"class {name}(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(indent(text, "        ") for text in self.inits),
                "",
                f"    def forward(self, {signature}):",
                *(indent(text, "        ") for text in self.lines),
                "        return h",
            ]
        )
