"""Changes of buffers that no recorder sees, buffers of every kind, and what bookkeeping of them may not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sac.region.module_state import ModuleState, owners_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from sac.errors import SacWarning
from sac.full import FullConfig
from tests.support.blocks import Stack
from tests.support.stateful import ON_EACH_WAY, WAYS, Scaled, Way, as_it_is, by_function, stack, stepped
from tests.support.training import assert_same

LOOSE = FullConfig(freeze_buffers=False)


class Assigning(nn.Module):
    """A buffer whose data is exchanged: no op writes to anything, and no name means another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("transposed", torch.ones(8, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data = self.calls.data + 1
        self.transposed.data = self.transposed.data * 2
        return (self.linear(x) * self.calls).sin() * self.transposed.sum()


class Unseen(nn.Module):
    """A counter that a kernel changes which no mode sees, as those of a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        guard = torch._C._DisableTorchDispatch()
        with torch.no_grad():
            self.calls += 1
        del guard
        return (self.linear(x) + self.calls).sin() * x


class Compiled(nn.Module):
    """Statistics that a compiled function updates."""

    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), Scaled()
        self.norm = nn.BatchNorm1d(8)
        self.compiled = torch.compile(lambda x: self.norm(self.inner(x)), backend=self.backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(self.linear(x)).sin() * x


class CompiledToKernels(Compiled):
    """The same, to kernels that no mode sees."""

    backend = "inductor"


@ON_EACH_WAY
@pytest.mark.parametrize(
    "block", [Assigning, Unseen, Compiled, pytest.param(CompiledToKernels, marks=pytest.mark.slow)]
)
def test_changes_that_no_recorder_sees(block: type[nn.Module], way: Way) -> None:
    try:
        assert_same(stepped(stack(block, block), as_it_is), stepped(stack(block, block), way))
    finally:
        torch._dynamo.reset()


class LateStarter(nn.Module):
    """Begins to write to a buffer in some later call, for a reason that is in no argument and no plain attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.flags = nn.Linear(8, 8), [False]
        self.register_buffer("seen", torch.zeros(size))

    @property
    def active(self) -> bool:
        return self.flags[0]

    @active.setter
    def active(self, value: bool) -> None:
        self.flags[0] = value

    def forward(self, x: Tensor) -> Tensor:
        if self.active:
            self.seen.add_(1)
        return (self.linear(x) * (1 + self.seen[0])).sin() * x


LATE = """\
blocks.0: this call changed buffer 'seen' (float32[20000]) in place, which no earlier call did
    fix: none is needed: the activations of this call are kept until its backward instead of being recomputed, and \
later calls of the region keep a copy of what they write to"""


def started_late(way: Callable[[nn.Module], nn.Module], size: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = way(Stack(LateStarter(size)))
    block, x = model.blocks[0], torch.randn(8, 8, requires_grad=True)
    for active in (False, False, True, False, True, True):
        block.active = active
        model(x).sum().backward()
    return {"input": x.grad, "weight": block.linear.weight.grad, "buffer": block.seen}


def test_a_write_to_a_small_buffer_may_begin_late() -> None:
    assert_same(started_late(lambda model: model), started_late(WAYS["full"]))


def test_a_write_to_a_large_buffer_that_begins_late_warns_once() -> None:
    with pytest.warns(SacWarning) as said:
        ours = started_late(WAYS["full"], 20000)
    assert [str(one.message) for one in said] == [LATE]
    assert_same(started_late(lambda model: model, 20000), ours)


def test_a_write_that_begins_late_is_no_error_where_buffers_are_not_frozen() -> None:
    block, x = LateStarter(4), torch.randn(8, 8, requires_grad=True)
    sac.checkpoint(block, x, config=LOOSE).sum().backward()
    block.active = True
    sac.checkpoint(block, x, config=LOOSE).sum().backward()
    assert float(block.seen[0]) == 2


@contextmanager
def seen_ops() -> Iterator[list[str]]:
    ops: list[str] = []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listing():
        yield ops


def test_bookkeeping_of_buffers_is_seen_by_no_mode() -> None:
    module = Scaled()
    with seen_ops() as ops:
        bindings = ModuleState(owners_of(module))
        with torch.no_grad():
            ops.clear()
            module.counted += 1
        assert ops == ["aten.add_.Tensor"]
        bindings.close()
    assert bindings.were_written
    assert bindings.unseen_write("") is None
    assert ops == ["aten.add_.Tensor"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(0),
        lambda: torch.zeros(3, dtype=torch.bool),
        lambda: torch.zeros(2, dtype=torch.complex64),
        lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
        lambda: torch.zeros(1).expand(5),
        lambda: torch.zeros(4, 4)[1:, ::2],
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["empty", "bool", "complex", "float8", "expanded", "strided", "meta", "sparse", "nested"],
)
def test_buffers_of_any_kind_may_be_there(make: Callable[[], Tensor]) -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("other", make())
    module.register_buffer("none", None)
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        sac.checkpoint(module, x).sin().sum().backward()
    assert module.other is not None


def test_buffers_that_share_memory_are_put_back_together() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.zeros(6)
            self.register_buffer("base", base)
            self.register_buffer("part", base[2:4])

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.part += 1
                self.base += 1
            return (x * self.base.sum()).sin() * self.part.sum()

    assert_same(stepped(stack(Sharing), as_it_is), stepped(stack(Sharing), by_function))


def test_a_buffer_made_under_inference_mode_may_be_there() -> None:
    module = nn.Linear(4, 4)
    with torch.inference_mode():
        module.register_buffer("table", torch.ones(4))
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        sac.checkpoint(lambda x: module(x).sin() * x, x).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad((module(x).sin() * x).sum(), x)[0])


def test_scripted_modules_may_be_there() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        sac.checkpoint(lambda x: scripted(x).sin() * x, x).sum().backward()
    assert int(scripted.state_dict()["1.num_batches_tracked"]) == 2
