"""The library holds nothing longer than Python would: steps leave no memory, and dropped graphs free their tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from sac.memory_timeline import measure_memory
from tests.support.blocks import FunctionBlock, Stack, llama_stack, tokens, with_dropout
from tests.support.native_engine import LIBRARY, needs_library, recorded, with_library
from tests.support.recording import without_collector
from tests.support.replay_programs import ON_EACH, applied, block_of, gradients, replay
from tests.support.training import assert_same, built

pytestmark = needs_library


def body(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3).sin()
    first, second = h.chunk(2)
    return torch.cat([second.cos(), first * 2]).add_(1) @ block.b


def step(model: Stack, x: Tensor) -> None:
    model(x).square().sum().backward()
    model.zero_grad()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@ON_EACH
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_many_steps_leave_nothing(chosen: dict[str, Any]) -> None:
    with with_library():
        model, x = applied(block_of(body), replay(chosen)), torch.randn(8, 8)
        for _ in range(100):
            step(model, x)
        gc.collect()
        objects, bytes_before = len(gc.get_objects()), resident()
        for _ in range(300):
            step(model, x)
        gc.collect()
        assert len(gc.get_objects()) - objects < 50
        assert resident() - bytes_before < 1 << 20


@ON_EACH
def test_many_failing_steps_leave_nothing(chosen: dict[str, Any]) -> None:
    def fails(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        return h @ block.b if block.calls < 4 else h @ torch.ones(3, 3)

    with with_library():
        model, x = applied(block_of(fails), replay(chosen)), torch.randn(8, 8)
        for _ in range(3):
            step(model, x)
        found = []
        for count in (20, 200):
            for _ in range(count):
                with pytest.raises(RuntimeError):
                    model(x)
            gc.collect()
            found.append(len(gc.get_objects()))
        assert found[1] - found[0] < 50


@ON_EACH
@pytest.mark.parametrize("native", [True, False])
def test_a_failing_step_frees_what_autograd_saved_last(chosen: dict[str, Any], native: bool) -> None:
    seen: list[Any] = []

    def fails(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).tanh()
        seen.append(weakref.ref(h.untyped_storage()))
        if block.calls >= 4:
            raise ValueError
        return h @ block.b

    with with_library(native):
        model, x = applied(block_of(fails), replay(chosen)), torch.randn(8, 8)
        for _ in range(3):
            step(model, x)
        with pytest.raises(ValueError):
            model(x)
    gc.collect()
    assert [one() for one in seen] == [None] * 4


@ON_EACH
def test_tensors_are_freed_when_the_graph_is_dropped(chosen: dict[str, Any]) -> None:
    """Without a backward, and without the cycle collector."""
    seen: list[Any] = []

    def noting(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        y = h.sin()
        z = y.exp() * y
        seen.extend(weakref.ref(one.untyped_storage()) for one in (h, y, z))
        return z @ block.b

    with with_library(), recorded() as log:
        model = applied(block_of(noting), replay(chosen))
        for _ in range(3):
            step(model, torch.randn(8, 8))
        with without_collector():
            seen.clear()
            out = model(torch.randn(8, 8))
            del out
            assert [one() for one in seen] == [None, None, None]
    assert log.ops[-1] == log.entries[-1]


@ON_EACH
def test_no_bytes_are_live_after_steps(chosen: dict[str, Any]) -> None:
    with with_library():
        model = applied(lambda: with_dropout(llama_stack(2), attention=0.1), replay(chosen))
        x = tokens()[0]
        for _ in range(3):
            step(model, x)
        with without_collector():
            timeline = measure_memory(lambda: step(model, x))
            assert timeline.live_bytes[-1] == 0
            timeline = measure_memory(lambda: del_output(model, x))
            assert timeline.live_bytes[-1] == 0


def del_output(model: Stack, x: Tensor) -> None:
    model(x)


@ON_EACH
def test_no_cycle_of_a_region_call(chosen: dict[str, Any]) -> None:
    """Everything of a call is freed by counting references."""
    with with_library():
        model, x = applied(block_of(body), replay(chosen)), torch.randn(8, 8)
        for _ in range(3):
            step(model, x)
        with without_collector():
            gc.collect()
            step(model, x)
            assert gc.collect() == 0
            model(x)
            assert gc.collect() == 0


@ON_EACH
def test_copies_and_pickles_of_a_model(chosen: dict[str, Any]) -> None:
    """After steps in the library, a model can be copied, saved and loaded; the copies train alike."""

    def steps(model: Stack) -> dict[str, Tensor]:
        torch.manual_seed(1)
        seen = {}
        for index in range(3):
            model.zero_grad()
            model(torch.randn(8, 8)).square().sum().backward()
            seen |= {f"{index} {name}": one for name, one in gradients(model).items()}
        return seen

    expected = steps(built(small))
    with with_library(), recorded() as seen:
        model = sac.apply(built(small), replay(chosen))
        assert_same(expected, steps(model))
        model.zero_grad()
        assert_same(expected, steps(copy.deepcopy(model)))
        assert_same(expected, steps(pickle.loads(pickle.dumps(model))))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert_same(expected, steps(torch.load(file, weights_only=False)))
    assert seen.ops[2] > 3  # of the model; its copies begin anew


def smooth(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.dropout((x @ block.a).sin(), 0.3).cos() @ block.b


def small() -> Stack:
    return Stack(FunctionBlock(smooth))


def test_a_tape_holds_the_call_sites_of_its_entries() -> None:
    """Also one that only keeps the layout of another tape."""

    class Site:
        pass

    class Mode(LIBRARY.Mode, TorchDispatchMode):  # type: ignore[name-defined, misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    library: Any = LIBRARY
    path: dict[int, Any] = {}
    site, sites, tape, mode = Site(), library.Sites(), library.Tape(), Mode()  # type: ignore[no-untyped-call]
    reference = weakref.ref(site)
    sites.add(path, site, "aten::sin", "", 0, 0, -1, False, False, False, 0, -1)
    tables: Any = ({}, {}, set(), {}, {}, {}, {}, {}, set(), {}, set(), [], None)
    mode.sites = path
    x = torch.ones(2)
    tape.number(x, -1, 0, 1)
    with mode:
        library.start(tape, mode, None, None, sites, tables)
        x.sin()
        library.stop(tape)
    del site, sites
    assert tape.sites([]) == [reference()]
    layout = tape.layout()
    del tape
    assert layout.sites([]) == [reference()]
    del layout
    assert reference() is None


def sums(block: FunctionBlock, x: Tensor) -> Tensor:
    """Each sum is dead once the next has been computed: autograd saves none of them."""
    h = x @ block.a
    for _ in range(12):
        h = h + 1.5
    return h.sin() @ block.b


@ON_EACH
def test_a_replay_lets_go_of_what_no_later_step_reads(chosen: dict[str, Any]) -> None:
    x, peaks = torch.randn(64, 64), []
    for native in (True, False):
        with with_library(native):
            model = applied(lambda: Stack(FunctionBlock(sums, 64)), replay(chosen))
            for _ in range(2):
                step(model, x)
            loss = model(x).square().sum()
            peaks.append(measure_memory(loss.backward).peak_bytes)
    assert peaks[0] <= peaks[1]
