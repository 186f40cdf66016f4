"""The tape that the library writes is that of Python: the same entries, writes, kept values and places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac.recompute.native_recorder import NativeReplayRecorder
from sac.recompute.recorder import ReplayRecorder
from sac.recompute.tape import Tape
from tests.support.blocks import FunctionBlock, square
from tests.support.native_engine import assert_same_with_library, needs_library, recorded, with_library
from tests.support.replay_programs import ON_EACH, POLICIES, applied, block_of, replay
from tests.unit.native.test_engine_programs import CHANGING, NATIVE, inside
from tests.unit.recompute.test_replay_kinds_of_ops import BODIES as KINDS
from tests.unit.recompute.test_replay_random_numbers import BODIES as RANDOM
from tests.unit.recompute.test_replay_random_numbers import holding_a_generator

pytestmark = needs_library
Body = Callable[[FunctionBlock, Tensor], Tensor]
BODIES: dict[str, Body] = {}
ONLY_NATIVE: dict[str, Body] = {}  # of which no op comes to Python, from the second call on
BASE = torch.linspace(-1, 1, 64).view(8, 8)


def body(function: Body) -> Body:
    """Note a region's body."""
    BODIES[function.__name__] = function
    return function


def native(function: Body) -> Body:
    """Note a region's body of which the library records every op."""
    ONLY_NATIVE[function.__name__] = function
    return body(function)


@native
def adds_rows(block: FunctionBlock, x: Tensor) -> Tensor:
    h, out = (x @ block.a).sin(), torch.zeros_like(x)
    rows = (h > 0.3).sum(1).argsort()
    for part in range(2):
        out.index_add_(0, rows[part::2], h[part::2] * 0.5)
    return out.view(8, 8) @ block.b


@native
def routes(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    values, chosen = h.softmax(-1).topk(2, dim=-1)
    out = torch.zeros_like(h)
    for index in range(8):
        row, slot = (chosen == index).nonzero(as_tuple=True)
        out.index_add_(0, row, h[row].cos() * values[row, slot].unsqueeze(-1))
    return out @ block.b


@native
def writes_to_views(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin() * 2
    h[2:4].mul_(2)
    h.view(-1)[5:20].add_(1).mul_(0.5)
    h.t()[1] += 1
    return h.cos() @ block.b


@native
def fills_fresh_memory(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    out = torch.empty(2, 8, 8)
    out[0] = h
    out[1].copy_(h.sin())
    mask = torch.empty_like(h, dtype=torch.bool).fill_(True)
    part = torch.empty(8, 8)
    part.index_copy_(0, torch.arange(8), h.cos())
    return (out[0] * out[1]).exp() * mask + part.sin() @ block.b


@native
def constants(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a) * torch.arange(8) + torch.eye(8).t() * torch.full((8, 1), 0.5)
    causal = torch.ones(8, 8, dtype=torch.bool).triu(1)
    h = h.masked_fill(causal, -1) + torch.zeros(8).unsqueeze(0) + h.new_zeros(8) + torch.linspace(0, 1, 8)
    return h.sin() @ block.b


@native
def writes_after_a_save(block: FunctionBlock, x: Tensor) -> Tensor:
    """The gradient of `exp` needs its result, and the clone is written to instead."""
    h = (x @ block.a).exp()
    y = h.clone()
    y.add_(1)
    y.mul_(x)
    return (h * y) @ block.b


@native
def written_and_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a) + 1
    h += x
    return h.sin() * (h @ block.b)


@body
def writes_to_what_is_kept(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).relu_()
    y = (h @ block.b).mul_(2)
    return h * y


@body
def writes_to_what_was_just_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    """Autograd saves the result of `sigmoid`, and `relu_`, which changes nothing here, moves its version."""
    h = (x @ block.a).clone()
    y = h.sin()
    y.clamp_(-0.5, 0.5)
    with torch.no_grad():
        z = h.sigmoid()
        z.relu_()
    return (y * z + h.exp().detach().add_(1)) @ block.b


@body
def writes_to_what_is_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.count += 1
        block.count.view(-1)[:1].mul_(2)
    return (x @ block.a).sin() * block.count.sum() @ block.b


@body
def writes_to_an_input(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x * 1
    h.add_(x)
    if not x.is_leaf:
        x.mul_(1.5)
    return (h @ block.a).sin() @ block.b + x


@body
def fails_to_write(block: FunctionBlock, x: Tensor) -> Tensor:
    """The op raises after it has been announced, and the program goes on."""
    h = (x @ block.a).cos()
    y = h * 2
    with pytest.raises((RuntimeError, IndexError)):
        y.index_add_(0, torch.tensor([99]), h[:1])
    y.add_(1)
    return y.sin() @ block.b


@body
def written_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    made = torch.zeros(8, 8)
    made.numpy()[:] = BASE.numpy()
    fresh = torch.empty(8, 8)
    fresh.numpy()[:] = 2 * BASE.numpy()
    fresh.add_(1)
    h = (x @ block.a + made) * fresh
    h.mul_(2)
    h.detach().numpy()[1] = 0.5
    torch.autograd.graph.increment_version(h)
    h.add_(1)
    return h.cos() @ block.b


@body
def another_storage(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).detach() * 2
    h.data = torch.full((8, 8), 0.25)
    h.add_(1)
    y = torch.zeros(8, 8)
    y.set_(h)
    y.mul_(2)
    z = torch.zeros(4)
    z.resize_(8)
    z.fill_(3)
    return (x @ block.a).sin() * h * y * z @ block.b


@body
def reads_fresh_memory(block: FunctionBlock, x: Tensor) -> Tensor:
    """A constant that autograd saves before an op reads it."""
    h = x @ block.a
    scale = torch.full((8, 8), 2.0)
    shape = torch.empty(8, 8)
    return (h * scale).sin() + h * torch.ones_like(shape) * torch.zeros(8).exp() @ block.b


@body
def turned_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).detach() * 2
    h.t_()
    h.add_(1)
    h.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    return (x @ block.a).sin() * h


@body
def several_results_that_must_be_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    values, places = h.sort(1)
    best, index = h.detach().topk(3, 1)
    best.mul_(2)
    index.add_(0)
    unique, inverse, counts = torch.unique(places, return_inverse=True, return_counts=True)
    return values.gather(1, places) * best.sum() + h.gather(1, index).sum() + inverse * counts.sum() * unique.sum()


@body
def lazy_bits(block: FunctionBlock, x: Tensor) -> Tensor:
    c = torch.complex(x @ block.a, x @ block.b)
    d = c.clone().conj()
    d.mul_(2)
    d.imag.add_(1)
    return (d.real * d.imag).sin()


@body
def a_subclass(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).as_subclass(Marked)
    h = h * 2
    h.add_(1)
    return torch.zeros_like(h).add_(h).as_subclass(Tensor).sin() @ block.b


class Marked(Tensor):
    """A subclass without code of its own."""


class WithCount(FunctionBlock):
    """A block with a buffer."""

    def __init__(self, function: Body) -> None:
        super().__init__(function)
        self.register_buffer("count", torch.ones(2))


class Noted:
    """What the tapes of a training were, call by call."""

    def __init__(self) -> None:
        self.tapes: list[dict[str, Any]] = []

    def note(self, recorder: ReplayRecorder, kept: list[Any], missing: list[int]) -> None:
        tape: Any = recorder.tape
        self.tapes.append(
            {
                "entries": [_entry(tape, number) for number in range(tape.entry_count())],
                "roots": [*tape.roots],
                "writes": dict(tape.writes),
                "writers": dict(tape.writers),
                "kept": [*tape.kept],
                "kept in": {root: sorted(values) for root, values in tape.kept_in.items()},
                "leaves": sorted(
                    (value, leaf.position, leaf.version, leaf.is_persistent) for value, leaf in tape.leaves.items()
                ),
                "persistent": {*tape.persistent_roots},
                "factories": [root for root in range(tape.value_count()) if root in tape.factories],
                "overwritten": {*tape.overwritten},
                "not replayable": tape.not_replayable,
                "places": dict(recorder._places),
                "checksums": dict(recorder.checksums) if recorder.checksums is not None else None,
                "rules": dict(recorder._rules),
                "routing": [(str(site.op), values) for site, values in recorder._routing],
                "routing sums": dict(recorder._routing_sums),
                "calls": [recorder.calls[site] for site in dict.fromkeys(tape.sites) if hasattr(site, "op")],
                "handles": ([(one.index, one.is_external, one.version) for one in kept], [*missing]),
            }
        )


def _entry(tape: Tape, number: int) -> Any:
    site = tape.sites[number]
    return str(getattr(site, "op", site)), [*tape.reads[number]], [*tape.results(number)]


def tapes_of(model: nn.Module) -> list[dict[str, Any]]:
    """The tapes of four steps; the first one is always Python's, which lists the ops for the report."""
    noted, end, native_end = Noted(), ReplayRecorder.end, NativeReplayRecorder.end

    def noting(self: ReplayRecorder, kept: list[Any], missing: list[int]) -> None:
        if not isinstance(self, NativeReplayRecorder):  # such a one has been noted before
            noted.note(self, kept, missing)
        end(self, kept, missing)

    def noting_natively(self: NativeReplayRecorder, kept: list[Any], missing: list[int]) -> None:
        noted.note(self, kept, missing)
        native_end(self, kept, missing)

    with (
        mock.patch.object(ReplayRecorder, "end", noting),
        mock.patch.object(NativeReplayRecorder, "end", noting_natively),
    ):
        for step in range(4):
            torch.manual_seed(step)
            inputs = square("cpu")
            model(*(x.requires_grad_() if x.is_floating_point() else x for x in inputs)).sum().backward()
    return noted.tapes


def assert_same_tapes(build: Callable[[], nn.Module], value: Any) -> None:
    """With and without the library the tapes are the same."""
    found = []
    for is_native in (True, False):
        with with_library(is_native):
            torch.manual_seed(0)
            found.append(tapes_of(applied(build, value)))
    ours, python = found
    assert len(ours) == len(python) > 0
    for one, other in zip(ours, python, strict=True):
        for name, expected in other.items():
            assert one[name] == expected, name


def built_with_a_buffer(function: Body) -> Callable[[], Any]:
    build = block_of(function)

    def made() -> Any:
        model = build()
        model.blocks[0] = WithCount(function)
        return model

    return made


ALL = {**BODIES, **NATIVE, **{one.__name__: one for one in (*CHANGING, inside)}}
for forgotten in ("views", "dropout"):  # Python forgets the storage of a result of which only views are left
    del ALL[forgotten]


@ON_EACH
@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("name", ALL)
def test_tapes(name: str, chosen: dict[str, Any], verify: str) -> None:
    assert_same_tapes(built_with_a_buffer(ALL[name]), replay(chosen, verify))


@pytest.mark.slow
@ON_EACH
@pytest.mark.parametrize("name", KINDS)
def test_tapes_of_programs_of_replay(name: str, chosen: dict[str, Any]) -> None:
    assert_same_tapes(block_of(KINDS[name]), replay(chosen, "always"))


@pytest.mark.slow
@ON_EACH
@pytest.mark.parametrize("name", RANDOM)
def test_tapes_of_programs_that_draw(name: str, chosen: dict[str, Any]) -> None:
    assert_same_tapes(holding_a_generator(RANDOM[name]), replay(chosen, "always"))


@ON_EACH
@pytest.mark.parametrize("name", BODIES)
def test_programs(name: str, chosen: dict[str, Any]) -> None:
    assert_same_with_library(built_with_a_buffer(BODIES[name]), replay(chosen), ops=1)


@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("name", ONLY_NATIVE)
def test_no_op_comes_to_python(name: str, verify: str) -> None:
    with with_library():
        model = applied(block_of(ONLY_NATIVE[name]), replay(POLICIES["nothing"], verify))
        for _ in range(2):
            model(*square()).sum().backward()
        with recorded() as seen:
            model(*square()).sum().backward()
    assert seen.trips == []


def test_no_routing_op_asks_python() -> None:
    with with_library():
        model = applied(block_of(routes), replay(POLICIES["matmuls"], "always"))
        for _ in range(4):
            model(*square()).sum().backward()
        with mock.patch.object(
            NativeReplayRecorder, "finish_native", side_effect=AssertionError("Python is asked")
        ) as asked:
            model(*square()).sum().backward()
    assert asked.call_count == 0


def _dropout_mask(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.dropout((x @ block.a).sin(), 0.3) @ block.b


@ON_EACH
def test_tapes_with_dropout(chosen: dict[str, Any]) -> None:
    assert_same_tapes(block_of(_dropout_mask), replay(chosen, "always"))


def test_a_write_to_what_is_kept_does_not_come_to_python() -> None:
    with with_library():
        model = applied(block_of(writes_to_what_is_kept), replay(POLICIES["matmuls"]))
        for _ in range(2):
            model(*square()).sum().backward()
        with recorded() as seen:
            model(*square()).sum().backward()
    assert seen.trips == []
