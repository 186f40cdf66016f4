"""The engines with the C++ library and without it: what must not differ, and what the library has recorded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import sac
from sac.errors import RegionError, SacWarning
from sac.memory_timeline import mark, measure_memory
from sac.native.load import library, status
from sac.recompute import regions, torch_checkpoint
from sac.recompute.native_recorder import NativeReplayRecorder, _mode_type
from sac.recompute.native_rerun import NativeValueIds
from sac.recompute.rerun import RecomputeMode, RerunState
from tests.support.blocks import Stack, install, square
from tests.support.recording import PRODUCTS
from tests.support.training import Backward, assert_same, built, plain_backward, summed, train

LIBRARY = library()  # before a test can change where libraries are looked for
needs_library = pytest.mark.skipif(LIBRARY is None, reason=status())


@contextlib.contextmanager
def with_library(used: bool = True) -> Iterator[None]:
    """Let regions use the library, or not."""
    found = LIBRARY if used else None

    def decided() -> Any:  # not a mock, which would keep each call
        return found

    with mock.patch.object(regions, "library", decided), mock.patch.object(torch_checkpoint, "library", decided):
        yield


@dataclass
class Recorded:
    """What the library did: for each region call that it took part in, the ops that it recorded and those of the tape.

    ``trips``: the ops that came to the mode's `__torch_dispatch__`. Under rerun there is no tape, and ``rerun`` has the
    ops that the library ran in recomputations.
    """

    ops: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    trips: list[str] = field(default_factory=list)
    rerun: list[int] = field(default_factory=list)


@contextlib.contextmanager
def recorded() -> Iterator[Recorded]:
    """Note what the library does."""
    seen = Recorded()
    end, mode = NativeReplayRecorder.end, _mode_type(LIBRARY)
    dispatch = mode.__torch_dispatch__
    close, check = RerunState.close, RecomputeMode.check

    def noting_end(self: Any, *args: Any) -> None:
        seen.ops.append(self.tape.native.recorded)
        seen.entries.append(self.tape.entry_count())
        end(self, *args)

    def noting_dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.trips.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    def noting_close(self: Any, *args: Any) -> bool:
        if isinstance(self.value_ids, NativeValueIds):
            seen.ops.append(self.value_ids.native.recorded)
        return close(self, *args)

    def noting_check(self: Any, reached: int) -> None:
        if isinstance(self.value_ids, NativeValueIds):
            seen.rerun.append(self.value_ids.native.recorded)
        check(self, reached)

    with (
        mock.patch.object(RerunState, "close", noting_close),
        mock.patch.object(RecomputeMode, "check", noting_check),
        mock.patch.object(NativeReplayRecorder, "end", noting_end),
        mock.patch.object(mode, "__torch_dispatch__", noting_dispatch),
    ):
        yield seen


class Sequence(TorchDispatchMode):
    """Notes the ops that run, in order, the shapes that they read, and the FLOPs of products."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func} {[list(x.shape) for x in args if isinstance(x, Tensor)]}")
        result = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in PRODUCTS:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


@dataclass
class Observed:
    """A training under one engine."""

    numbers: dict[str, Tensor]
    ops_in_backward: list[list[str]]
    flops: list[int]
    kept_bytes: int
    report: dict[str, Any]
    warnings: list[str]
    native: Recorded


def observe(
    build: Callable[[], Stack],
    value: Any,
    *,
    native: bool,
    entry: str = "apply",
    steps: int = 3,
    make_input: Callable[[str], tuple[Tensor, ...]] = square,
    backward: Backward = plain_backward,
    **training: Any,
) -> Observed:
    """Train for some steps, some more with a mode around backward, and once more to see what is kept.

    ``entry``: how the config value is put on the model, see ``install``.
    """
    sequences: list[list[str]] = []
    flops: list[int] = []

    def seen_backward(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
        with Sequence() as ops:
            result = backward(loss, inputs, parameters)
        sequences.append(ops.seen)
        flops.append(ops.flops)
        return result

    with with_library(native), recorded() as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = install(built(build), value, entry)
        training = {"make_input": make_input, **training}
        numbers = train(model, steps=steps, backward=backward, **training)
        report = sac.report(model).to_dict()
        numbers |= {
            f"seen {name}": one for name, one in train(model, steps=2, backward=seen_backward, **training).items()
        }
        kept = _kept_bytes(model, make_input)
    report.pop("native")
    report.pop("native_ops")
    said = [str(one.message) for one in caught if issubclass(one.category, SacWarning)]
    return Observed(numbers, sequences, flops, kept, report, said, log)


def _kept_bytes(model: nn.Module, make_input: Callable[[str], tuple[Tensor, ...]]) -> int:
    """Bytes that live between forward and backward: no mode looks on, under which Python would record."""

    def step() -> None:
        torch.manual_seed(0)
        outputs = model(*(x.requires_grad_() if x.is_floating_point() else x for x in make_input("cpu")))
        loss = summed(list(outputs) if isinstance(outputs, tuple) else [outputs])
        mark("forward done")
        loss.backward()
        model.zero_grad()

    return measure_memory(step).at("forward done")


def assert_same_with_library(
    build: Callable[[], Stack], value: Any, *, ops: int | None = 1, **training: Any
) -> Recorded:
    """Nothing but time differs, and the numbers are those of the model without us.

    ``ops``: how many ops the library has recorded at least in the last region call; None if that is not asked.
    """
    ours, python = (observe(build, value, native=native, **training) for native in (True, False))
    assert_same(python.numbers, ours.numbers)
    steps, _ = training.pop("steps", 3), training.pop("entry", "")
    plain = train(built(build), steps=steps, **{"make_input": square, **training})
    assert_same(plain, {name: one for name, one in ours.numbers.items() if not name.startswith("seen")})
    assert ours.ops_in_backward == python.ops_in_backward
    assert ours.flops == python.flops
    assert ours.kept_bytes == python.kept_bytes
    assert ours.report == python.report
    assert ours.warnings == python.warnings
    assert python.native.ops == []
    if ops is not None:
        assert ours.native.ops[-1] >= ops, ours.native
    return ours.native


def error_of(make: Callable[[], nn.Module]) -> str:
    """Return the error in backward of a model on 8 x 8 numbers, which is the same with the library and without it."""
    said = []
    for native in (True, False):
        with with_library(native), recorded() as seen:
            model = make()
            for _ in range(2):  # the library takes part from the second call on
                with pytest.raises(RegionError) as error:
                    model(torch.randn(8, 8)).sum().backward()
            said.append(str(error.value))
        assert (sum(seen.ops) > 0) == native
    assert said[0] == said[1]
    return said[0]
