"""The ways to run a changing program, and what becomes of it under each."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import ModuleType
from typing import Any

import pytest
from torch.utils.checkpoint import CheckpointError, checkpoint

import sac
from sac.errors import SacError
from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.fuzz.changing.comparing import differences, seeded, state_of
from tests.fuzz.changing.programs import Program, draw_program, smaller, write_program
from tests.support.simulated_streams import simulated_streams

EQUAL, LIMIT, REFUSED, WRONG, UNSEEN, ERROR = "equal", "limit", "refused", "wrong", "unseen", "error"
OUTCOMES = (EQUAL, LIMIT, REFUSED, WRONG, UNSEEN, ERROR)
ENGINES = ("auto", "replay", "offload")  # which have to be right on every program; the last on a simulated device
# which may refuse, and where state cannot be seen be wrong
MODES = ("modules", "offload modules", "rerun", "full", "budget", "checkpoint", "context_fn")
WAYS = (*ENGINES, *MODES, "torch")  # the last is torch's own checkpoint, for comparison

LIMITS = (  # of errors that the documentation announces, or that torch's own checkpoint and hooks raise too
    "don't yet support saved tensor hooks",
    "has been modified by an inplace operation",
)
OUTSIDE = frozenset(  # features with state that a rerun finds as it is now, as under torch's own checkpoint
    {"if iterator", "normalized weight by data", "state outside of the contract"}
)
RULES: tuple[tuple[dict[str, Any], ...], ...] = (
    (),
    ({"ops": "matmul", "do": "save"},),
    ({"ops": "matmul", "do": "save"},),
    ({"ops": "*", "do": "save"},),
    ({"ops": "*", "do": "alternate"},),
    ({"ops": "random", "do": "save"},),
    ({"ops": ["aten.sin", "aten.tanh", "aten.add"], "do": "save"},),
    ({"ops": "nondeterministic", "do": "save"}, {"ops": "matmul", "do": "alternate"}),
    ({"ops": "matmul", "call": {"index": 0}, "do": "save"},),
    ({"ops": "*", "shape": ["...", ">=4"], "do": "save"},),
    ({"ops": "aten.sort", "do": "save"},),
)
WHOLE_MODULES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"module": "fc_*", "do": "save"},),
    ({"module": "inside_*", "do": "save"},),
    ({"module": "{fc,drop,norm,emb}_*", "do": "save"}, {"ops": "matmul", "do": "save"}),
    ({"module": "**.{fc,layers}_*", "do": "save"},),
)
PLAIN_ENGINES = ("auto", "replay")
OFFLOADING = ("offload", "offload modules")
TRANSFER_LIMITS = tuple(
    TransferLimits(smallest, in_flight, ahead)
    for smallest, in_flight, ahead in ((1, 0, 1 << 20), (1, 0, 0), (1, 1024, 1024), (64, 512, 0))
)


@dataclass(frozen=True)
class Outcome:
    """What became of a program under one way."""

    kind: str  # one of the words above
    step: int = -1
    detail: str = ""


@dataclass(frozen=True)
class Prepared:
    """A program that runs without us, and what it shows then."""

    program: Program
    source: str
    features: frozenset[str]
    expected: list[dict[str, Any]] = field(repr=False)


class Invalid(Exception):
    """The program does not run without us either."""


def loaded(source: str) -> ModuleType:
    """The program as a module."""
    module = sys.modules["changing_program"] = ModuleType("changing_program")  # where `dataclass` looks for it
    exec(_compiled(source), vars(module))
    return module


@functools.lru_cache(maxsize=4)
def _compiled(source: str) -> Any:
    return compile(source, "changing_program.py", "exec")


def prepare(program: Program) -> Prepared:
    """Run the program without us; raises `Invalid`."""
    source, features = write_program(program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = list(_shown(source, lambda module, model: None))
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error
    return Prepared(program, source, features, expected)


def program_of(seed: int) -> Prepared:
    """The first program of the seed that runs without us."""
    for attempt in range(100):
        try:
            return prepare(draw_program(seed, attempt))
        except Invalid:
            continue
    raise AssertionError(f"no program of seed {seed} runs")


def _shown(source: str, put: Callable[[ModuleType, Any], Any]) -> Iterator[dict[str, Any]]:
    module = loaded(source)
    seeded()
    model = module.Model()
    put(module, model)
    seeded()
    for yielded in module.train(model):
        yield state_of(model, yielded)


def value_of(way: str, seed: int) -> dict[str, Any]:
    """The config value under which the program of a seed runs in a way: the same each time."""
    pick = Random(f"{seed} {way}")
    if way == "full":
        value = {"mode": "full", "blocks": ["blocks.*"], "early_stop": pick.random() < 0.8}
        return value | ({"store": "host", "keep": "all"} if pick.random() < 0.1 else {})
    if way == "budget":
        budget = pick.choice(["10%", "30%", "50%", "70%", "90%", "1GiB"])
        return {"mode": "selective", "blocks": ["blocks.*"], "budget": budget}
    rules = [
        {"id": f"rule-{at}", **rule, "optional": pick.random() < 0.9 or "module" in rule}
        for at, rule in enumerate(pick.choice(WHOLE_MODULES if "modules" in way else RULES))
    ]
    keeping = "offload" if way in OFFLOADING else "save"
    rules = [{**rule, "do": "offload"} if way in OFFLOADING else rule for rule in rules]
    default = keeping if pick.random() < 0.1 else "recompute"
    if default == keeping and "modules" not in way:
        rules = [{**rule, "do": "recompute"} if pick.random() < 0.5 else rule for rule in rules]
    policy = {"schema": "sac/v1", "name": "drawn", "default": default, **({"rules": rules} if rules else {})}
    value = {"mode": "selective", "blocks": ["blocks.*"], "policy": policy}
    if way in OFFLOADING:
        value |= {"store": "host"} if pick.random() < 0.3 else {}
        value["host_memory"] = pick.choice(["64MiB", "64MiB", "2KiB"])
    engines = (*PLAIN_ENGINES, "rerun")
    value["engine"] = way if way in engines else pick.choice(engines if way == "offload modules" else PLAIN_ENGINES)
    value["verify"] = pick.choice(["first", "first", "first", "always", "never"])
    value["early_stop"] = pick.random() < 0.8
    return value


@contextlib.contextmanager
def on_its_device(way: str, seed: int) -> Iterator[None]:
    """A simulated device, if the way offloads; an error at the end if an access was unordered."""
    if way not in OFFLOADING:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "LIMITS", Random(seed).choice(TRANSFER_LIMITS))
        with simulated_streams(patch) as device:
            yield
        assert device.races == [], device.races[:3]


def put(way: str, value: dict[str, Any], module: ModuleType, model: Any) -> None:
    """Put a way to checkpoint on the program's model."""
    if way == "torch":
        module.call = functools.partial(checkpoint, use_reentrant=False)
    elif way == "checkpoint":
        module.call = sac.checkpoint
    elif way == "context_fn":
        made: dict[Any, Any] = {}

        def call(block: Any, *args: Any, **kwargs: Any) -> Any:
            if block not in made:
                made[block] = sac.context_fn(value["policy"], module=block)
            return checkpoint(block, *args, use_reentrant=False, context_fn=made[block], **kwargs)

        module.call = call
    else:
        sac.apply(model, value)


def outcome(prepared: Prepared, way: str) -> Outcome:
    """Run a program in one way and compare each step."""
    value = value_of(way, prepared.program.seed)
    step = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with on_its_device(way, prepared.program.seed), contextlib.redirect_stderr(io.StringIO()):
                for found in _shown(prepared.source, functools.partial(put, way, value)):
                    differing = differences(prepared.expected[step], found)
                    if differing:
                        is_unseen = OUTSIDE & prepared.features and runs_python_twice(prepared, way)
                        kind = UNSEEN if is_unseen else WRONG
                        return Outcome(kind, step, ", ".join(differing))
                    step += 1
        except Exception as error:
            return Outcome(_kind_of(error, prepared, way), step, f"{type(error).__name__}: {error}")
    if step < len(prepared.expected):
        return Outcome(ERROR, step, "fewer steps than without us")
    return Outcome(EQUAL)


def runs_python_twice(prepared: Prepared, way: str) -> bool:
    """Whether backward may run the program's Python again: without rules there is nothing that a replay would save."""
    if way not in ENGINES:
        return True
    value = value_of(way, prepared.program.seed)
    decides = "rules" in value["policy"] or value["policy"]["default"] != "recompute"
    return value["engine"] == "auto" and (not decides or "saved on CPU" in prepared.features)


def _kind_of(error: Exception, prepared: Prepared, way: str) -> str:
    writes = {"weights written between passes", "optimizer in backward"}  # a tied weight has two regions' backwards
    written = not writes.isdisjoint(prepared.features) and "was changed in place" in str(error)
    if written or (way != "torch" and any(words in str(error) for words in LIMITS)):
        return LIMIT
    return REFUSED if way == "torch" or isinstance(error, (SacError, CheckpointError)) else ERROR


def ways_of(seed: int, ways: tuple[str, ...], count: int) -> list[str]:
    """`count` of the ways for this program, each as often as any other over many seeds; all if `count` is 0."""
    if not 0 < count < len(ways):
        return list(ways)
    return Random(f"{seed} ways").sample(ways, count)


def shrunk(prepared: Prepared, way: str) -> Prepared:
    """The program with everything left out that it does not need to fail in this way; itself if it does not fail."""
    kind = signature(outcome(prepared, way))
    smallest: Prepared | None = prepared
    while smallest is not None:
        prepared = smallest
        tried = (_failing(candidate, way, kind) for candidate in smaller(prepared.program))
        smallest = next((one for one in tried if one is not None), None)
    return prepared


def signature(result: Outcome) -> tuple[str, str]:
    """What a smaller program has to fail by: the kind of failure, and what an error begins with."""
    return result.kind, "" if result.kind in ("wrong", "unseen") else result.detail.partition(":")[0]


def _failing(candidate: Program, way: str, kind: tuple[str, str]) -> Prepared | None:
    try:
        prepared = prepare(candidate)
    except Invalid:
        return None
    return prepared if signature(outcome(prepared, way)) == kind else None
