"""Programs that change between steps: drawn from a seed as plain data, written as Python source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from textwrap import indent

from tests.fuzz.changing.instructions import CHANGES, CHANGING, CONDITIONS, INSTRUCTIONS, PLAIN
from tests.fuzz.changing.writer import Whole, Writer

STEPS = 6
LEAVE = "leave early"
INSIDE = "module inside"
STATES = {  # what the argument `state` is: how it is made, and how a field of it is written
    "namespace": ("SimpleNamespace({0})", "state.{0}"),
    "dataclass": ("Record({0})", "state.{0}"),
    "dict": ("dict({0})", 'state["{0}"]'),
}


@dataclass(frozen=True)
class Item:
    """An instruction or a branch: `name`, a number that decides its details, and what is inside a branch."""

    name: str
    knob: int
    body: tuple[Item, ...] = ()
    other: tuple[Item, ...] = ()


@dataclass(frozen=True)
class Program:
    """Blocks of items, the order in which the model calls them, and what the training loop changes."""

    seed: int
    blocks: tuple[tuple[Item, ...], ...]  # of each class
    classes: tuple[int, ...]  # of which class each block of the model is
    order: tuple[int, ...]  # in which the model calls its blocks
    changes: tuple[Item, ...]  # of the training loop
    kinds: tuple[str, ...]  # one of KINDS for each step
    state: str = "namespace"
    keeps_state: bool = False  # the argument `state` lives as long as the model
    autocast: tuple[bool, ...] = (False,) * STEPS


# how a step goes forward and backward
KINDS = {
    "plain": "loss = forward(model, state, x, step)\nbetween(model, step)\nbackward(loss)",
    "two batches": (
        "first, second = forward(model, state, x, step), forward(model, state, x + 1, step)\n"
        "between(model, step)\nbackward(first)\nbackward(second)"
    ),
    "two batches, last first": (
        "first, second = forward(model, state, x, step), forward(model, state, x + 1, step)\n"
        "between(model, step)\nbackward(second)\nbackward(first)"
    ),
    "backward twice": (
        "loss = forward(model, state, x, step)\nbackward(loss, retain_graph=True)\nbetween(model, step)\nbackward(loss)"
    ),
    "input's gradient first": (
        "x = x.detach().requires_grad_()\nloss = forward(model, state, x, step)\n"
        "seen += torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)\n"
        "between(model, step)\nbackward(loss)"
    ),
    "double backward": (
        "x = x.detach().requires_grad_()\nloss = forward(model, state, x, step)\nbetween(model, step)\n"
        "(slope,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)\n"
        "backward(loss if slope is None else loss + slope.square().sum())"
    ),
    "dropped": "loss = forward(model, state, x, step)\nbetween(model, step)",
    "evaluation between passes": (
        "loss = forward(model, state, x, step)\n"
        "with torch.no_grad():\n    seen.append(forward(model, state, x + 1, step))\n"
        "between(model, step)\nbackward(loss)"
    ),
    "backward that raises": (
        "loss = forward(model, state, x, step)\nbetween(model, step)\n"
        "hooks = [p.register_hook(stop) for p in list(model.parameters())[:1] if p.requires_grad]\n"
        "try:\n    backward(loss)\nexcept Stop:\n    model.zero_grad()\nfor hook in hooks:\n    hook.remove()"
    ),
    "backward for some": (
        "loss = forward(model, state, x, step)\nbetween(model, step)\n"
        "wanted = [p for p in model.parameters() if p.requires_grad][::2]\n"
        "backward(loss, inputs=wanted, retain_graph=True)\nbackward(loss)"
    ),
}

# -- drawing


def draw_program(seed: int, attempt: int = 0) -> Program:
    """The program of a seed; another attempt is another program."""
    pick = Random(f"{seed} {attempt}")
    # in programs of which little changes no refusal for one reason hides what another one would do
    share = pick.choice([0.1, 0.2, 0.3, 0.5])
    blocks = tuple(_items(pick, pick.randint(2, 6), 0, share) for _ in range(pick.choice([1, 1, 2, 2, 2, 3, 4])))
    classes = list(range(len(blocks)))
    if pick.random() < 0.4:
        classes += [pick.randrange(len(blocks)) for _ in range(pick.choice([1, 1, 2]))]
    order = list(range(len(classes)))
    if pick.random() < 0.2:
        order.append(pick.randrange(len(classes)))  # one block is called twice
    changes = tuple(
        Item(name, pick.randrange(10**6))
        for name in sorted(pick.sample(sorted(CHANGES), pick.choice([0, 0, 1, 1, 2, 3])))
    )
    kinds = ("plain",) * STEPS
    if pick.random() < 0.5:
        one = pick.choice(sorted(KINDS))
        kinds = (one,) * STEPS if pick.random() < 0.4 else tuple(pick.choice(["plain", one]) for _ in range(STEPS))
    autocast = (False,) * STEPS
    if pick.random() < 0.15:
        autocast = tuple(pick.random() < 0.5 for _ in range(STEPS))
    state = pick.choice(sorted(STATES))
    keeps_state = pick.random() < 0.3
    return Program(seed, blocks, tuple(classes), tuple(order), changes, kinds, state, keeps_state, autocast)


def _items(pick: Random, count: int, depth: int, share: float) -> tuple[Item, ...]:
    return tuple(_item(pick, depth, share) for _ in range(count))


def _item(pick: Random, depth: int, share: float) -> Item:
    """A branch, a module inside or an instruction; `share` of them change between steps."""
    knob = pick.randrange(10**6)
    if depth < 2 and pick.random() < share / 2:
        body = _items(pick, pick.choice([0, 1, 1, 2]), depth + 1, share)
        if pick.random() < 0.5 or not body:
            body += (Item(LEAVE, pick.randrange(10**6)),)
        other = _items(pick, pick.choice([0, 0, 1]), depth + 1, share)
        return Item(pick.choice(sorted(CONDITIONS)), knob, body, other)
    if depth < 1 and pick.random() < 0.1:
        return Item(INSIDE, knob, _items(pick, pick.choice([1, 2, 3]), depth + 1, share))
    return Item(pick.choice(sorted(CHANGING if pick.random() < share else PLAIN)), knob)


# -- writing


def write_program(program: Program) -> tuple[str, frozenset[str]]:
    """The source of a program, and the names of its features."""
    whole = Whole(item_of=STATES[program.state][1])
    writers = []
    for at, items in enumerate(program.blocks):
        writer = Writer(whole, *(f"model.blocks[{place}]" for place, one in enumerate(program.classes) if one == at))
        _write_items(writer, items)
        writers.append(writer)
    signature = ", ".join(["h"] + [f"{name}=None" for name in whole.arguments.split(", ")[1:]])
    classes = [writer.module(f"Block{at}", signature) for at, writer in enumerate(writers)]
    # A block that runs twice would find its weights cast as they were in the first run, whatever it has written to them
    # since, and where recomputation casts them anew it would not.
    cache = "" if len(set(program.order)) == len(program.order) else ", cache_enabled=False"
    around = [f'torch.autocast("cpu", torch.bfloat16, enabled=AUTOCAST[step]{cache})']
    loop = Writer(Whole(blocks=len(program.classes)), "model")
    for change in reversed(program.changes):
        whole.features.add(change.name)
        loop.write(CHANGES[change.name], Random(change.knob))
    for part, lines in loop.whole.loop.items():
        whole.loop[part] = lines + whole.loop[part]
    whole.features |= {kind for kind in program.kinds if kind != "plain"}
    around += whole.loop.pop("around")
    parts = {part: indent("\n".join(lines) or "pass", "    ") for part, lines in whole.loop.items()}
    given = STATES[program.state][0].format("h=torch.zeros(4), load=torch.zeros(4), seen=[], count=0")
    kinds = "\n".join(
        f"            {'elif' if at else 'if'} KINDS[step] == {kind!r}:\n{indent(KINDS[kind], ' ' * 16)}"
        for at, kind in enumerate(sorted(set(program.kinds)))
    )
    source = TEMPLATE.format(
        seed=program.seed,
        features=", ".join(sorted(whole.features)),
        top="\n\n".join(text.rstrip() for text in whole.top),
        classes="\n\n".join(text.rstrip() for text in classes),
        blocks=", ".join(f"Block{at}()" for at in program.classes),
        order=list(program.order),
        arguments=whole.arguments,
        state=given if whole.uses_state else "None",
        fresh_state="" if program.keeps_state or not whole.uses_state else f"state = {given}",
        kinds=program.kinds,
        around=", ".join(around),
        autocast=program.autocast,
        ways=kinds,
        steps=len(program.kinds),
        **{part: indent(text, "    " * (part not in ("extra", "between"))) for part, text in parts.items()},
    )
    return source, frozenset(whole.features)


def _write_items(w: Writer, items: tuple[Item, ...]) -> None:
    for item in items:
        pick = Random(item.knob)
        w.whole.features.add(item.name)
        if item.name == LEAVE:
            w.line(pick.choice(["return h", "return h", "return h * 1.5", "return h.clone()", "return torch.sin(h)"]))
            return
        if item.name in CONDITIONS:
            w.line(f"if {w.write(CONDITIONS[item.name], pick)}:")
            for at, items in enumerate((item.body, item.other)[: 1 + bool(item.other)]):
                if at:
                    w.line("else:")
                w.depth += 1
                _write_items(w, items)
                w.line("pass")
                w.depth -= 1
        elif item.name == INSIDE:
            name = w.name("inside")
            inner = Writer(w.whole, *(f"{path}.{name}" for path in w.paths))
            used = w.whole.uses_state, w.whole.uses_option
            w.whole.uses_state = w.whole.uses_option = False
            _write_items(inner, item.body)
            w.whole.top.append(inner.module(name.title(), w.whole.arguments))
            w.inits.append(f"self.{name} = {name.title()}()")
            w.line(f"h = self.{name}({w.whole.arguments})")
            w.whole.uses_state |= used[0]
            w.whole.uses_option |= used[1]
        else:
            w.write(INSTRUCTIONS[item.name], pick)


# -- making smaller


def smaller(program: Program) -> Iterator[Program]:
    """Programs that lack one thing of this one, large things first."""
    steps = len(program.kinds)
    for at in range(len(program.order) if len(program.order) > 1 else 0):
        yield replace(program, order=program.order[:at] + program.order[at + 1 :])
    for at in range(len(program.changes)):
        yield replace(program, changes=program.changes[:at] + program.changes[at + 1 :])
    for count in (2, 3, steps - 1):
        if 0 < count < steps:
            yield replace(program, kinds=program.kinds[:count])
    simplest = {"kinds": ("plain",) * steps, "autocast": (False,) * STEPS, "state": "namespace", "keeps_state": False}
    for name, value in simplest.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})
    for at, items in enumerate(program.blocks):
        for fewer in ((), *_fewer(items)) if items else ():
            yield replace(program, blocks=(*program.blocks[:at], fewer, *program.blocks[at + 1 :]))
    for at, kind in enumerate(program.kinds):
        if kind != "plain":
            yield replace(program, kinds=(*program.kinds[:at], "plain", *program.kinds[at + 1 :]))


def _fewer(items: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    for at, item in enumerate(items):
        before, after = items[:at], items[at + 1 :]
        yield before + after
        if item.body and not any(inner.name == LEAVE for inner in (*item.body, *item.other)):
            yield before + item.body + after
        for body in _fewer(item.body):
            yield (*before, replace(item, body=body), *after)
        for other in _fewer(item.other):
            yield (*before, replace(item, other=other), *after)


TEMPLATE = '''"""Changing program {seed}: {features}."""

import collections
import contextlib
import copy
import itertools
import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


class Stop(Exception):
    pass


@dataclass
class Record:
    h: torch.Tensor
    load: torch.Tensor
    seen: list
    count: int


def call(block, *args, **kwargs):  # a way to checkpoint inside the model puts its own function here
    return block(*args, **kwargs)


{top}


{classes}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([{blocks}])
        self.order = list(ORDER)

    def forward(self, h, state, option):
        for at in self.order:
            h = call(self.blocks[at], {arguments})
        return h


CALLS = []
STEPS = {steps}
ORDER = {order}
KINDS = {kinds}
AUTOCAST = {autocast}


def forward(model, state, x, step):
    {fresh_state}
    with {around}:
        out = model(x, state, step)
    out = out.double()
    loss = (out * torch.linspace(-1, 1.5, 4).double()).sum() + 0.1 * out.square().mean()
{extra}
    return loss


def between(model, step):
{between}


def backward(loss, **options):
    if loss.requires_grad:
        loss.backward(**options)


def stop(gradient):
    raise Stop


def wants_gradient(p):
    return p.requires_grad


def descend(p):
    with torch.no_grad():
        p -= 0.05 * p.grad / (1 + p.grad.norm())
    p.grad = None


def train(model):
    """Yield after each step what it has shown."""
    state = {state}
    for step in range(STEPS):
        seen = []
        keep_gradients = False
        x = torch.randn(3, 4)
        loss = None
{before}
        if not keep_gradients:
            model.zero_grad()
        try:
{ways}
        except Stop:
            seen.append("stopped")
{last}
        yield loss, seen, x.grad, state
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad / (1 + p.grad.norm())
{after}
'''
