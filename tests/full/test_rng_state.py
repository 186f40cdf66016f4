"""What a region does to random states: as in forward for its recomputation, and then as they were found."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from sac.errors import ConfigError, RegionError
from sac.full import FullConfig, RngTracker
from sac.region import rng
from tests.full.trackers import MAKERS, TiedGenerator, TiedTracker, bytes_of, filled
from tests.semantics.blocks import FunctionBlock, Stack, policy, save, selective
from tests.semantics.recording import Recorder

SEVERAL = ("ours", "Megatron", "TransformerEngine, graph-safe")
ON_SEVERAL_TRACKERS = pytest.mark.parametrize("maker", [MAKERS[name] for name in SEVERAL], ids=SEVERAL)


@pytest.fixture(autouse=True)
def process_state_is_left_alone() -> Iterator[None]:
    before = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before)


def leaf(seed: int = 1) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def body(tracker: Any, x: Tensor) -> Tensor:
    h = F.dropout(x.sin(), 0.3)
    with tracker.fork():
        h = F.dropout(h.sin(), 0.5).cos()
    return F.dropout(h, 0.3).sin()


def states(tracker: Any) -> dict[str, list[int]]:
    return {name: state.tolist() for name, state in {**bytes_of(tracker), "": torch.get_rng_state()}.items()}


# What is no tracker


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "it returned None, which has no get_states() and set_states(states)"),
        ({"a": 1}, "it returned {'a': 1}, which has no get_states() and set_states(states)"),
    ],
)
def test_a_getter_that_returns_no_tracker_is_an_error_at_the_call(returned, found):
    x, ran = leaf(), []
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(ran.append, x, get_rng_state_tracker=lambda: returned)
    assert str(error.value) == (
        f"get_rng_state_tracker: {found}\n"
        "    legal: a function that returns a tracker of named random states, such as sac.full.RngTracker"
    )
    assert not ran


def test_the_class_of_a_tracker_is_no_getter():
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(torch.sin, leaf(), get_rng_state_tracker=RngTracker)
    assert str(error.value) == (
        "get_rng_state_tracker: it is the class RngTracker, which makes a new tracker at each call\n"
        "    legal: a function that returns the tracker whose streams the region forks: lambda: tracker"
    )


class Strange:
    """A tracker with states of any sort."""

    def __init__(self, states: Any) -> None:
        self.states = states

    def get_states(self) -> Any:
        return self.states

    def set_states(self, states: Any) -> None:
        self.states = states


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (None, "get_states() of its tracker returned None\n    legal: a mapping of name to state"),
        ({"a": 7}, "the state of 'a' in its tracker is 7\n    legal: a tensor, or a torch.Generator"),
    ],
)
def test_a_tracker_without_states_is_an_error_at_the_call(states, text):
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(torch.sin, leaf(), get_rng_state_tracker=lambda: Strange(states))
    assert str(error.value) == f"get_rng_state_tracker: {text}"


class InPlace(RngTracker):
    """A tracker that hands out the very tensors that it then writes to, and keeps those that it is given."""

    def get_states(self) -> dict[str, Tensor]:
        return self._states

    def set_states(self, states: Any) -> None:
        self._states = states

    def _leave(self, name: str, *state: Any) -> None:
        held = self._states[name]
        super()._leave(name, *state)
        self._states[name] = held.copy_(self._states[name])


def test_states_that_a_tracker_writes_to_are_copied():
    both(lambda tracker, call: _grads_twice(call), lambda: InPlace("cpu"))


def _grads_twice(call: Callable[..., Tensor]) -> list[Tensor]:
    x = leaf()
    out = call(call(x)).sum()
    return [torch.autograd.grad(out, x, retain_graph=True)[0], torch.autograd.grad(out, x)[0]]


def test_a_tracker_without_any_stream_is_fine():
    x = leaf()
    sac.checkpoint(torch.sin, x, get_rng_state_tracker=lambda: RngTracker("cpu")).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_the_getter_is_asked_anew_for_the_recomputation():
    """Backward may run on another thread, and a getter may know one tracker per thread."""
    used = filled(MAKERS["ours"])
    x, y = leaf(), leaf()
    out = sac.checkpoint(lambda x: body(used, x), x, get_rng_state_tracker=lambda: used)
    used = filled(MAKERS["ours"])
    with used.fork():
        torch.rand(5)
    before = states(used)
    out.sum().backward()
    assert states(used) == before
    torch.manual_seed(0)
    body(filled(MAKERS["ours"]), y).sum().backward()
    assert torch.equal(x.grad, y.grad)


# Errors


class Failure(Exception):
    """Of the user's own."""


@ON_SEVERAL_TRACKERS
def test_an_exception_in_recomputation_leaves_no_state_rewound_and_backward_can_be_tried_again(maker):
    """TransformerEngine and DeepSpeed leave every state as it was in forward."""
    tracker, fails = filled(maker), False

    def failing(x: Tensor) -> Tensor:
        h = body(tracker, x)
        with tracker.fork("expert-parallel-rng"):
            if fails:
                raise Failure
            return body(tracker, h)

    x, y = leaf(), leaf()
    out = sac.checkpoint(failing, x, get_rng_state_tracker=lambda: tracker)
    torch.rand(7)
    before, fails = states(tracker), True
    with pytest.raises(Failure):
        out.sum().backward()
    assert states(tracker) == before
    fails = False
    out.sum().backward()
    assert states(tracker) == before
    torch.manual_seed(0)
    tracker = filled(maker)
    failing(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


class Refusing(RngTracker):
    """A tracker that does not take states at some times."""

    refusals: tuple[int, ...] = ()
    asked = 0

    def set_states(self, states: Any) -> None:
        self.asked += 1
        if self.asked in self.refusals:
            raise Failure
        super().set_states(states)


def test_entering_that_fails_half_way_undoes_what_it_did():
    first, second = filled(lambda: RngTracker("cpu")), filled(lambda: Refusing("cpu"))
    settings = rng.Settings(trackers=(lambda: first, lambda: second), generators=(torch.Generator(),))
    snapshot = rng.RngSnapshot([], settings)
    torch.rand(3)
    settings.generators[0].manual_seed(7)
    for tracker in (first, second):
        with tracker.fork():
            torch.rand(3)
    before = (states(first), states(second), settings.generators[0].get_state().tolist())
    second.refusals = (1,)
    with pytest.raises(Failure):
        snapshot.__enter__()
    assert (states(first), states(second), settings.generators[0].get_state().tolist()) == before
    with snapshot:
        pass
    assert (states(first), states(second), settings.generators[0].get_state().tolist()) == before


def test_a_generator_that_takes_no_state_leaves_the_others_as_they_were():
    class Refusing(TiedGenerator):
        refuses = False

        def set_state(self, state: Tensor) -> TiedGenerator:
            if self.refuses:
                Refusing.refuses = False
                raise Failure
            return super().set_state(state)

    tracker, last = filled(MAKERS["ours"]), Refusing.seeded(1)
    snapshot = rng.RngSnapshot([], rng.Settings(trackers=(lambda: tracker,), generators=(last,)))
    torch.rand(3)
    with tracker.fork():
        torch.rand(3)
    before, Refusing.refuses = states(tracker), True
    with pytest.raises(Failure):
        snapshot.__enter__()
    assert states(tracker) == before


def test_leaving_goes_on_after_an_error_of_one_tracker():
    first, second = filled(lambda: RngTracker("cpu")), filled(lambda: Refusing("cpu"))
    snapshot = rng.RngSnapshot([], rng.Settings(trackers=(lambda: first, lambda: second)))
    torch.rand(3)
    with first.fork():
        torch.rand(3)
    before = states(first)
    second.refusals = (2,)
    snapshot.__enter__()
    assert states(first) != before
    with pytest.raises(Failure):
        snapshot.__exit__(None, None, None)
    assert states(first) == before


# Off


def test_without_preserving_nothing_is_put_back_and_no_tracker_is_asked():
    tracker = filled(MAKERS["ours"])
    x, y = leaf(), leaf()
    drawn = []

    def drawing(x: Tensor) -> Tensor:
        with tracker.fork():
            drawn.append(torch.rand(3).tolist())
        drawn.append(torch.rand(3).tolist())
        return F.dropout(x.sin(), 0.5)

    def unasked() -> Any:
        raise AssertionError

    out = sac.checkpoint(drawing, x, get_rng_state_tracker=unasked, preserve_rng_state=False)
    out.sum().backward()
    torch.manual_seed(0)
    tracker = filled(MAKERS["ours"])
    expected, drawn = drawn, []
    drawing(y)
    drawing(y)
    assert expected == drawn


def test_without_preserving_a_saved_random_op_leaves_no_state_rewound():
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        return (h * torch.bernoulli(torch.full_like(h, 0.5)) @ block.b).sin()

    model = sac.apply(Stack(FunctionBlock(body)), selective(policy(save("random")), preserve_rng_state=False))
    for _ in range(2):
        out = model(leaf())
        torch.rand(3)
        before = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


def test_without_gradients_no_tracker_is_asked():
    with torch.no_grad():
        sac.checkpoint(torch.sin, leaf(), get_rng_state_tracker=lambda: pytest.fail("asked"))


# Generators that the caller names


def unseen_draw(generator: torch.Generator, x: Tensor) -> Tensor:
    """Numbers made of the generator's state, which no op is given."""
    state = generator.get_state()
    numbers = torch.sin(
        torch.arange(x.numel()) * 1.3 + float(state.double().dot(torch.arange(float(state.numel())).double()) % 97)
    )
    generator.manual_seed(int(state.long().sum()) + 1)
    return numbers.view(x.shape)


@pytest.mark.parametrize("named", [True, False])
def test_a_generator_that_no_op_is_given_is_put_back_on_request(named):
    outcomes = []
    for region in (False, True):
        generator = torch.Generator().manual_seed(3)
        config = FullConfig(generators=(generator,)) if named else FullConfig()
        function = functools.partial(lambda g, x: (x * unseen_draw(g, x)).sin(), generator)
        x = leaf()
        for _ in range(3):  # the later calls enter no dispatch mode
            out = sac.checkpoint(function, x, config=config) if region else function(x)
            generator.manual_seed(int(generator.initial_seed()) + 5)
            before = generator.get_state()
            out.sum().backward()
            assert torch.equal(generator.get_state(), before) or not named
        outcomes.append(x.grad)
    assert torch.equal(*outcomes) == named


def test_a_generator_that_an_op_is_given_needs_no_request():
    outcomes = []
    for region in (False, True):
        generator = torch.Generator().manual_seed(3)
        function = functools.partial(lambda g, x: (x * torch.rand(x.shape, generator=g)).sin(), generator)
        x = leaf()
        for _ in range(3):
            (sac.checkpoint(function, x) if region else function(x)).sum().backward()
        outcomes.append((x.grad, generator.get_state()))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


# Order, threads, repetition


def both(work: Callable[[Any, Callable[..., Tensor]], list[Tensor]], maker: Callable[[], Any]) -> None:
    """Hold that ``work(tracker, call)`` returns the same with regions as without, and leaves the same states."""
    outcomes = []
    for region in (False, True):
        torch.manual_seed(0)
        tracker = filled(maker)
        call: Callable[..., Tensor] = functools.partial(body, tracker)
        if region:
            call = functools.partial(sac.checkpoint, call, get_rng_state_tracker=lambda tracker=tracker: tracker)
        outcomes.append([*work(tracker, call), *bytes_of(tracker).values(), torch.get_rng_state()])
    assert len(outcomes[0]) == len(outcomes[1])
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


@ON_SEVERAL_TRACKERS
@pytest.mark.parametrize("order", [(1, 0), (0, 1), (2, 0, 1)])
def test_several_micro_batches_in_flight(maker, order):
    def work(tracker: Any, call: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [leaf(seed) for seed in range(len(order))]
        outputs = [call(call(x)) for x in inputs]
        for place in order:
            outputs[place].sum().backward()
            with tracker.fork():
                torch.rand(2)
        return [x.grad for x in inputs]

    both(work, maker)


@ON_SEVERAL_TRACKERS
def test_backward_again_draws_the_same_again(maker):
    def work(tracker: Any, call: Callable[..., Tensor]) -> list[Tensor]:
        x = leaf()
        out = call(call(x)).sum()
        first = torch.autograd.grad(out, x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
        return [first, second, torch.autograd.grad(out, x)[0]]

    both(work, maker)


@ON_SEVERAL_TRACKERS
def test_a_gradient_taken_inside_a_region_and_inside_a_fork(maker):
    def work(tracker: Any, call: Callable[..., Tensor]) -> list[Tensor]:
        x = leaf()

        def outer(x: Tensor) -> Tensor:
            with tracker.fork():
                h = call(F.dropout(x, 0.2))
                slope = torch.autograd.grad(h.sum(), x, create_graph=True)[0]
                return F.dropout(h * slope.sin(), 0.3)

        if isinstance(call, functools.partial) and call.func is sac.checkpoint:
            out = sac.checkpoint(outer, x, get_rng_state_tracker=lambda: tracker)
        else:
            out = outer(x)
        return [*torch.autograd.grad(out.sum(), x)]

    both(work, maker)


@ON_SEVERAL_TRACKERS
def test_backward_on_another_thread(maker):
    def work(tracker: Any, call: Callable[..., Tensor]) -> list[Tensor]:
        x = leaf()
        out = call(call(x)).sum()
        with tracker.fork():
            thread = threading.Thread(target=out.backward)
            thread.start()
            thread.join()
            after = torch.rand(3)
        return [x.grad, after]

    both(work, maker)


def test_a_mode_around_the_region_sees_no_bookkeeping():
    tracker = filled(MAKERS["DeepSpeed"])
    with Recorder() as seen:
        sac.checkpoint(torch.sin, leaf(), get_rng_state_tracker=lambda: tracker).sum().backward()
    assert seen.count("clone") == 0


# Devices


def test_the_current_device_and_those_of_the_inputs_are_taken(monkeypatch):
    generators = tuple(TiedGenerator.seeded(seed) for seed in range(4))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))

    class Input:
        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

    inputs: Any = [Input("cuda:3"), Input("cpu"), Input("meta"), Input("cuda:1"), Input("cuda:3")]
    assert rng._accelerator_generators(inputs) == [generators[1], generators[3], generators[2]]
    assert rng._accelerator_generators([]) == [generators[2]]
    assert rng.default_generator(torch.device("cuda")) is generators[2]
    assert rng.default_generator(torch.device("cuda:1")) is generators[1]
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    assert rng._accelerator_generators([]) == []


def test_a_captured_graph_is_told_of(monkeypatch):
    """While a CUDA graph is captured, torch refuses to read or to set the state of a generator."""

    class Captured(TiedGenerator):
        captured = True

        def get_state(self) -> Tensor:
            if self.captured:
                raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.")
            return super().get_state()

    default = Captured.seeded(3)
    tracker = filled(lambda: TiedTracker(default))
    tracker.states_["captured"] = Captured.seeded(4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    text = (
        "preserve_rng_state: random states can be neither read nor put back while a CUDA graph is captured\n"
        "    fix: pass preserve_rng_state=False if the region draws no random numbers, or capture it without "
        "checkpointing"
    )
    x = leaf()
    with pytest.raises(RegionError) as error:
        sac.checkpoint(torch.sin, x, get_rng_state_tracker=lambda: tracker)
    assert str(error.value) == text
    Captured.captured = False
    out = sac.checkpoint(torch.sin, x, get_rng_state_tracker=lambda: tracker)
    Captured.captured = True
    with pytest.raises(RegionError) as error:
        out.sum().backward()
    assert str(error.value) == text
    Captured.captured = False
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    Captured.captured = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(RuntimeError, match="current_seed"):
        sac.checkpoint(torch.sin, x, get_rng_state_tracker=lambda: tracker)
    sac.checkpoint(torch.sin, x, get_rng_state_tracker=lambda: tracker, preserve_rng_state=False)
