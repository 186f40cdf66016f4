"""Random programs under random policies: outputs, gradients, buffers and generators are those without us, bit for bit,
and no memory is left after backward.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sac.engine.region import RegionGroup
from sac.engine.tape import CannotReplayError, Tape
from sac.engine.taped import TapedFrame
from sac.errors import SacWarning
from tests.fuzz.functions import FUNCTIONS
from tests.fuzz.instructions import INSTRUCTIONS, READ_TWICE, operands_of
from tests.fuzz.programs import Line, Program, programs, values
from tests.support.blocks import APPLY, FULL, install, policy, selective
from tests.support.pairs import in_pairs
from tests.support.recording import Recorder, without_collector
from tests.support.training import Backward, assert_same, built, deterministic, plain_backward, summed, train

Entries = tuple[str, ...]  # under each of which one program is run, and compared with one run without us
BOTH_ENGINES: list[Entries] = [APPLY]
REFUSED = "apply, replay refused"  # in every backward of a call that is recorded for it: the region's Python runs then
FAILED = "apply, replay failed"  # from the first op of each such call on, and nothing is compared
UNDER_TORCH: list[Entries] = [("context_fn",), ("context_fn with module",)]

CALM = settings(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def backward_twice(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def inputs_then_weights(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
    wanted = [x for x in inputs if x.requires_grad]
    first = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True) if wanted else ()
    return [*first, *torch.autograd.grad(loss, parameters, allow_unused=True)]


def with_penalty(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Any]:
    first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    slopes = [one for one in first if one is not None and one.requires_grad]
    loss.backward(retain_graph=True)
    return [*first, *(torch.autograd.grad(summed(slopes), parameters, allow_unused=True) if slopes else ())]


BACKWARDS = (plain_backward, plain_backward, backward_twice, inputs_then_weights)


def casting(program: Program, device: str) -> Callable[[], AbstractContextManager[Any]]:
    """What is around the program's forward."""
    if program.autocast:
        return functools.partial(torch.autocast, device, torch.bfloat16)
    return contextlib.nullcontext


def trained(program: Program, model: Any, backward: Backward, device: str) -> dict[str, Tensor]:
    """Two steps of the program."""
    return train(
        model,
        steps=2,
        make_input=program.make_input,
        backward=backward,
        device=device,
        input_needs_grad=program.input_needs_grad,
        around_forward=casting(program, device),
    )


def needs_grad(program: Program) -> bool:
    """Whether any output depends on a weight, or on an input that needs a gradient."""
    inputs = program.make_input("cpu")
    for x, needs in zip(inputs, program.input_needs_grad, strict=True):
        x.requires_grad_(needs)
    return any(x.requires_grad for x in tree_leaves(built(program.build)(*inputs)))


def live_after(model: Any, program: Program, device: str) -> int:
    """Bytes that live after one more step, when its outputs and gradients are dropped."""
    with without_collector():
        recorder = Recorder()
        inputs = program.make_input(device)
        for x, needs in zip(inputs, program.input_needs_grad, strict=True):
            x.requires_grad_(needs)
        with recorder, casting(program, device)():
            outputs = tree_leaves(model(*inputs))
        with recorder:
            summed(outputs).backward()
        del outputs, inputs, x
        model.zero_grad()
        return recorder.live_bytes(besides=list(model.buffers()))


def assert_exact_and_free(
    program: Program, value: Any, entries: Entries, backward: Backward, device: str = "cpu"
) -> None:
    """The property, of each of the entries."""
    with deterministic(device), warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # naming a routing op with recompute warns
        warnings.filterwarnings("error", ".*replay cannot be used", SacWarning)  # not one of them needs rerun instead
        hypothesis.assume(needs_grad(program))
        reference = trained(program, built(program.build, device), backward, device)
        for entry in entries:
            unverified = {**value, "verify": "never"} if entry == FAILED else value
            model = install(built(program.build, device), unverified, " ".join(entry.split()[:2]))
            with told_of(entry), GIVING_WAY.get(entry, contextlib.nullcontext)():
                assert_same(reference, trained(program, model, backward, device))
                assert live_after(model, program, device) == 0


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let no call be replayed, and say so in a warning that is no error."""
    refusal = mock.patch("sac.engine.taped.replay", side_effect=CannotReplayError("of this test"))
    with refusal, warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        yield


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Let no tape be replayable, in any call."""
    made = TapedFrame._new_tape

    def failed(self: TapedFrame) -> Tape:
        tape = made(self)
        tape.fail("of this test")
        return tape

    with (
        mock.patch.object(TapedFrame, "_new_tape", failed),
        mock.patch.object(RegionGroup, "give_up"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", SacWarning)
        yield


GIVING_WAY = {REFUSED: refusing, FAILED: failing}


@contextlib.contextmanager
def told_of(entry: str) -> Iterator[None]:
    """Say under which entry an error came up."""
    try:
        yield
    except Exception as error:
        error.args = (f"under {entry}: {error}",)
        raise


@st.composite
def examples(draw: st.DrawFn, each: Sequence[Entries]) -> tuple[Program, Any, Entries, Backward]:
    """Everything that one example needs; it runs under all entries of one of `each`."""
    entries = draw(st.sampled_from(each))
    return draw(programs(entries[0])), draw(values(entries[0])), entries, draw(st.sampled_from(BACKWARDS))


EACH_VALUE = {
    "everything": selective(policy(default="save")),
    "every 2nd op": selective(policy({"ops": "*", "do": "alternate"})),
    "nothing": selective(policy()),
}
OPS = ("matmul by weight", "sine", "dropout", "add", "add in place", "transposed", "in lower precision")
HAZARDOUS = (*FUNCTIONS, "tanh by raw kernel", "square by accumulation", "tanh by out-variant", *OPS)


@st.composite
def hazardous(draw: st.DrawFn) -> tuple[Program, Any, Entries, Backward]:
    """Programs of autograd Functions and units, under one of four policies; some are differentiated twice."""
    value = draw(st.sampled_from([FULL, *EACH_VALUE.values()]))
    backward = draw(st.sampled_from([plain_backward, backward_twice, with_penalty]))
    return draw(programs(APPLY[0], HAZARDOUS)), value, APPLY, backward


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(CALM, max_examples=80, derandomize=True)
@given(example=examples(BOTH_ENGINES * 4 + UNDER_TORCH))
def test_random_programs(device: str, example: tuple[Program, Any, Entries, Backward]) -> None:
    """The same programs each time; scripts/fuzz draws as many others as it is asked for."""
    assert_exact_and_free(*example, device=device)


@settings(CALM, max_examples=20, derandomize=True)
@given(example=hazardous())
def test_random_programs_of_functions(example: tuple[Program, Any, Entries, Backward]) -> None:
    assert_exact_and_free(*example)


@settings(CALM, max_examples=30, derandomize=True)
@given(example=examples([(REFUSED,), (FAILED,)]))
def test_random_programs_that_cannot_be_replayed(example: tuple[Program, Any, Entries, Backward]) -> None:
    assert_exact_and_free(*example)


@in_pairs(
    name=INSTRUCTIONS.keys(),
    value=EACH_VALUE,
    entries={", then ".join(entries): entries for entries in (APPLY, ("context_fn",))},
    unless=lambda name, value, entries: name in READ_TWICE and entries != APPLY,  # which torch refuses without us too
)
def test_each_instruction_alone_between_dropouts(name: str, value: Any, entries: Entries) -> None:
    """Every instruction, with a random op before and after it, and as the last op of the region."""
    lines = [Line("matmul by weight", 0, (0,)), Line("dropout", 0, (1,)), Line(name, 1, (2, 0)[: operands_of(name)])]
    assert_exact_and_free(Program(tuple(lines), (0, 1), (True,)), value, entries, plain_backward)
    lines += [Line("native dropout", 0, (3,)), Line("bounded product", 0, (4, 1)), Line("matmul by weight", 1, (5,))]
    assert_exact_and_free(Program(tuple(lines), (0, 2), (True,)), value, entries, backward_twice)


ONCE_WRONG = {
    # zeros that an op reads as they are, then zeros that a kernel fills which no dispatcher sees: both of one op
    "constants and no constants": (Line("largest", 0, (0, 0)), Line("square by accumulation", 0, (0,))),
    # the last op writes to what autograd has saved, which no op had written to before: not free of a mode
    "a last op that fills": (Line("randomized relu", 0, (0,)),),
}


@pytest.mark.parametrize("lines", ONCE_WRONG.values(), ids=ONCE_WRONG.keys())
def test_programs_that_once_came_out_wrong_under_replay(lines: tuple[Line, ...]) -> None:
    assert_exact_and_free(Program(lines, (0,), (True,)), EACH_VALUE["nothing"], APPLY, plain_backward)
