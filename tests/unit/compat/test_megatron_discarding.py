"""Megatron-Core's `CheckpointWithoutOutput`: outputs are freed until backward, and all gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sac
from sac.compat import megatron
from sac.errors import SacWarning
from tests.support.recording import without_collector
from tests.support.runs import Noted
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, gradients_of


class Runner:
    """Runs functions as regions without output, or plainly."""

    def __init__(self, *, discards: bool = True) -> None:
        self.discards = discards
        self.regions: list[megatron.CheckpointWithoutOutput] = []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.discards:
            return function(*args)
        self.regions.append(megatron.CheckpointWithoutOutput())
        return self.regions[-1].checkpoint(function, *args)

    def discard(self, *hook_tensors: Tensor) -> None:
        """Discard the output of the last region."""
        if self.discards:
            self.regions.pop().discard_output_and_register_recompute(hook_tensors)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def assert_discarding_changes_nothing(program: Callable[[Runner], dict[str, Tensor]]) -> None:
    """Run the program plainly, with regions, and with regions again, from the same seed."""
    results = []
    for discards in (False, True, True):
        torch.manual_seed(0)
        results.append(program(Runner(discards=discards)))
    for other in results[1:]:
        assert_same(results[0], other)


def forked_dropout(h: Tensor) -> Tensor:
    with megatron.get_cuda_rng_tracker().fork():
        return F.dropout(h, 0.4)


# By name: the region, and what reads its output; both get a module of two linear layers and a square matrix.
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Any], Tensor]]] = {
    "dropout in a fork of the tracker": (
        lambda m, h: forked_dropout(F.gelu(m.first(h)) * h),
        lambda m, y: forked_dropout(m.second(y)),
    ),
    "mixed precision": (
        torch.autocast("cpu", torch.bfloat16)(lambda m, h: F.silu(m.first(h))),
        torch.autocast("cpu", torch.bfloat16)(lambda m, y: m.second(y)),
    ),
    "as another dtype": (lambda m, h: h.sin(), lambda m, y: torch.view_as_complex(y.view(8, -1, 2)).square().abs()),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_program_and_the_memory_is_free(name: str) -> None:
    region, reads = CASES[name]

    def program(runner: Runner) -> dict[str, Tensor]:
        megatron.model_parallel_cuda_manual_seed(3, tp_rank=0)
        model, x = nn.Module(), leaf(WIDTH, WIDTH)
        model.first, model.second = linear(), linear()
        y = runner.run(partial(region, model), x)
        out = reads(model, y)
        memories = [StorageWeakRef(one.untyped_storage()) for one in tree_leaves(y) if isinstance(one, Tensor)]
        del y
        runner.discard(out)
        assert not runner.discards or all(one.expired() for one in memories)
        return gradients_of(out.float().square().sum(), x, model)

    assert_discarding_changes_nothing(program)


def test_gradients_of_gradients() -> None:
    def program(runner: Runner) -> dict[str, Tensor]:
        x = leaf(5)
        out = (runner.run(lambda h: h.sin().exp(), x) ** 3).sum()
        runner.discard(out)
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        return gradients_of(first.square().sum(), x)

    assert_discarding_changes_nothing(program)


def test_an_output_that_was_changed_in_place_is_kept_after_a_warning() -> None:
    def program(runner: Runner) -> dict[str, Tensor]:
        last, x = linear(), leaf(4, WIDTH)
        out = last(runner.run(lambda h: h + 1, x).mul_(2))
        if runner.discards:
            with pytest.warns(SacWarning, match="changed in place after the region: it is kept until backward"):
                runner.discard(out)
        return gradients_of(out.square().sum(), x, last)

    assert_discarding_changes_nothing(program)


@pytest.mark.parametrize(
    "around",
    [
        sac.checkpoint,
        partial(sac.checkpoint, use_reentrant=True),
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
        pytest.param(lambda function, x: torch.compile(function, backend="aot_eager")(x), marks=pytest.mark.slow),
    ],
    ids=["sac", "sac reentrant", "torch", "torch reentrant", "compiled"],
)
def test_inside_regions_of_all_sorts(around: Any) -> None:
    def program(runner: Runner) -> dict[str, Tensor]:
        up, down, x = linear(), linear(), leaf(4, WIDTH)

        def layer(h: Tensor) -> Tensor:
            y = runner.run(lambda t: F.layer_norm(t, (WIDTH,)), h)
            out = down(runner.run(lambda t: F.dropout(F.gelu(t) * t, 0.2), up(y)))
            runner.discard(out)
            runner.discard(out)
            return h + out

        h = around(layer, around(layer, x)) if runner.discards else layer(layer(x))
        return gradients_of(h.square().sum(), x, up, down)

    assert_discarding_changes_nothing(program)


@pytest.mark.parametrize("runs_backward", [True, False])
def test_everything_is_free_without_the_cycle_collector(runs_backward: bool) -> None:
    runner, last, x = Runner(), linear(), leaf(4, WIDTH)
    with without_collector():
        h = x * 2
        out, memory = last(runner.run(torch.sin, h)), StorageWeakRef(h.untyped_storage())
        runner.discard(out)
        del h
        if runs_backward:
            out.sum().backward()
        del out
        assert memory.expired()


def test_what_others_still_hold_stays_as_it_is() -> None:
    """Megatron resizes the storage: the caller's own tensor is empty until backward."""
    runner, x = Runner(), leaf(4)
    y = runner.run(torch.sin, x)
    runner.discard((y**2).sum())
    assert torch.equal(y, x.sin())


def test_the_region_runs_once_more_for_all_that_read_its_output() -> None:
    runner, runs = Runner(), Noted()

    def region(h: Tensor) -> Tensor:
        runs.append("run")
        return h.sin()

    y = runner.run(region, leaf(4))
    out = (y * y.cos()).sum() + (y**3).sum()
    runner.discard(out)
    out.backward()
    assert len(runs) == 2


@pytest.mark.parametrize("hook", ["none", "elsewhere", "frozen", "before"])
def test_a_wrong_hook_tensor_warns_and_discards_nothing(hook: str) -> None:
    """Megatron's backward computes with freed memory then, or ends the process."""
    runner, h = Runner(), leaf(4) * 1
    out = runner.run(torch.sin, h).exp().exp()
    wrong = {"none": None, "elsewhere": leaf(1) * 1, "frozen": out.detach(), "before": h}[hook]
    with pytest.warns(SacWarning, match="does not depend on the region's output: it is kept"):
        runner.discard(wrong)
    out.sum().backward()


def test_an_output_that_goes_into_a_checkpoint_is_not_held_by_it() -> None:
    """The norm before experts that are recomputed as a whole: the experts' region would hold the norm's output."""
    runner, x, experts = Runner(), leaf(4, WIDTH), nn.Sequential(linear(), nn.GELU(), linear())
    y = runner.run(torch.tanh, x)
    out, memory = megatron.checkpoint(experts, False, y), StorageWeakRef(y.untyped_storage())
    del y
    runner.discard(out)
    assert memory.expired()
    (out**2).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((experts(x.tanh()) ** 2).sum(), x)[0])


def rerun_with_other_strides() -> None:
    runner, transposes, x = Runner(), Noted(False), leaf(2, 3)

    def region(h: Tensor) -> Tensor:
        out = h.sin()
        return out.t().contiguous().t() if transposes[0] else out

    for _ in range(2):  # a first call, under the recorder, would find the other op before us
        out = (runner.run(region, x) ** 2).sum()
        runner.discard(out)
    transposes[0] = True
    out.backward()


def write_to_memory_of_others() -> None:
    runner, cache, x = Runner(), torch.arange(3.0), leaf(3)
    out = (x * runner.run(lambda h: cache, x)).sum()
    runner.discard(out)
    cache.zero_()
    out.backward()


def discard_what_has_not_run() -> None:
    megatron.CheckpointWithoutOutput().discard_output_and_register_recompute(torch.ones(1))


MISTAKES: dict[str, Callable[[], Any]] = {
    r"output was .*\(3, 1\).* and is .*\(1, 2\)": rerun_with_other_strides,
    "output was .* or was written to": write_to_memory_of_others,
    r"there is no output to discard\n    fix: call checkpoint\(": discard_what_has_not_run,
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_is_an_error(text: str) -> None:
    with pytest.raises(sac.SacError, match=text):
        MISTAKES[text]()


def test_chains_of_regions_with_several_results() -> None:
    """Each region reads the results of the one before, which go when they are read."""

    def region(layer: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        h = F.dropout(layer(a).tanh() * b.mean(), 0.3)
        return h.t(), h.chunk(2, -1)[0].repeat(1, 2)

    def program(runner: Runner) -> dict[str, Tensor]:
        layers, x = [linear() for _ in range(4)], leaf(WIDTH, WIDTH)
        pair, read = (x * 1.1, x.sin()), x.sum()
        for layer in layers:
            pair = runner.run(partial(region, layer), *pair)
            read = read + (pair[0] * pair[1]).sin().sum()
            runner.discard(read)
        return gradients_of(read, x, *layers)

    assert_discarding_changes_nothing(program)
