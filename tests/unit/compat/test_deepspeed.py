"""DeepSpeed's activation checkpointing: what its own tests hold, in both of its modes."""

from __future__ import annotations

import copy
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sac.compat.deepspeed as checkpointing
from sac.errors import ConfigError, RegionError
from sac.full import RngTracker
from tests.support.rank_programs import ModelParallelUnit
from tests.support.ranks import run_ranks
from tests.support.recording import without_collector
from tests.support.runs import Noted
from tests.support.stored_regions import plainly
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, Call, forking, gradients_of, trained, unequal_in_a_residual

UNCONFIGURED = copy.copy(checkpointing._process)
DEEPSPEED = {"reentrant": checkpointing.checkpoint, "non-reentrant": checkpointing.non_reentrant_checkpoint}


@pytest.fixture(autouse=True)
def nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `configure` was called with is that of the process, in which other tests ran."""
    monkeypatch.setattr(checkpointing, "_process", copy.copy(UNCONFIGURED))


@pytest.fixture(params=DEEPSPEED, name="call")
def _call(request: pytest.FixtureRequest) -> Call:
    return DEEPSPEED[request.param]


@pytest.mark.parametrize("needs_grad", [True, False])
def test_arguments_and_results_of_every_sort(call, needs_grad):
    def region(x: Tensor, mask: Tensor, bools: Tensor, *others: Any) -> tuple[Any, ...]:
        out = linear(x).masked_fill(bools, 0)
        return mask, out * mask, (out * 2).detach(), *others

    torch.manual_seed(0)
    linear, x, mask = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=needs_grad), torch.rand(WIDTH)
    seen = []
    for run in (plainly, call):
        linear.zero_grad()
        x.grad = None
        first, out, detached, *others = run(region, x, mask, mask > 0.5, None, 2, True)
        assert others == [None, 2, True]
        seen.append(gradients_of(out.square().sum(), linear, x) | {"first": first, "detached": detached.detach()})
    assert_same(*seen)


def test_checkpoint_is_reentrant_and_the_other_is_not():
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(checkpointing.non_reentrant_checkpoint(torch.exp, x).sum(), x)
    assert torch.equal(grad, x.exp())
    with pytest.raises(RegionError, match="use_reentrant=False"):
        torch.autograd.grad(checkpointing.checkpoint(torch.exp, x).sum(), x)


def test_the_checkpoint_function():
    x = torch.randn(3, requires_grad=True)
    outputs: list[Any] = []
    returned = checkpointing.CheckpointFunction.apply(lambda h: (h.sin(), 3, h.cos()), outputs, x)
    assert [type(one) for one in outputs] == [Tensor, int, Tensor]
    (returned[0] + returned[1]).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() + x.cos()).sum(), x)[0])


def test_the_tracker_is_put_back_without_being_named(call, monkeypatch):
    assert_same(forking(plainly, RngTracker()), forking(call, checkpointing.get_cuda_rng_tracker()))
    theirs = RngTracker()
    fake = SimpleNamespace(get_cuda_rng_tracker=lambda: theirs)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.activation_checkpointing.checkpointing", fake)
    assert_same(forking(plainly, RngTracker()), forking(call, theirs))


SLOTS = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"checkpoint_in_cpu": True}, {"partition_activations": True}, SLOTS, SLOTS | {"checkpoint_in_cpu": True}],
    ids="+".join,
)
def test_stacked_layers_in_every_configuration(call, arguments, needs_grad):
    """Without a model-parallel group: partitions are whole, buffers and copies are what they are."""
    checkpointing.configure(None, **arguments)
    plain = trained(plainly, needs_grad=needs_grad, layers=4)
    for _ in range(2):  # slots are free again after a backward
        assert_same(plain, trained(call, needs_grad=needs_grad, layers=4))


def test_one_layer_too_many_is_an_error_at_the_call_and_reset_frees_the_slots(call):
    checkpointing.configure(None, **SLOTS)
    x = torch.randn(4, requires_grad=True)
    kept = [call(lambda h: h.sin().exp(), x) for _ in range(4)]
    with pytest.raises(RegionError, match=r"each of its 4 \(num_checkpoints\)"):
        call(lambda h: h.sin().exp(), x)
    checkpointing.reset()
    call(lambda h: h.sin().exp(), x).sum().backward()
    assert len(kept) == 4


def test_another_configuration_before_backward_does_not_matter_to_regions_that_have_run(call):
    """DeepSpeed reads its flags in backward again, and fails there."""
    checkpointing.configure(None, **SLOTS)
    x = torch.randn(4, requires_grad=True)
    out = call(lambda h: h.sin().exp(), x)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def partitioned(name: str, arguments: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """What differs in a residual, and whether an argument itself is let go: one of many, and one that is marked."""
    checkpointing.configure(ModelParallelUnit(), partition_activations=True, **arguments)
    call = DEEPSPEED[name]
    is_free = {}
    for is_marked in (True, False):  # the first call of a function may hold on to more
        h = torch.randn(7, requires_grad=True) * 2
        h.no_checkpointing = is_marked
        memory, out = StorageWeakRef(h.untyped_storage()), call(lambda t: t.exp().exp(), h)
        del h
        is_free[is_marked] = memory.expired()
        out.sum().backward()
    return unequal_in_a_residual(call), is_free[False], is_free[True]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True, "num_checkpoints": 1}],
    ids=lambda arguments: "+".join(arguments) or "partition",
)
@pytest.mark.parametrize("name", DEEPSPEED)
def test_partitioning_over_two_ranks(name, arguments):
    assert run_ranks(2, partitioned, name, arguments) == [([], True, False)] * 2


def test_seeds_are_those_of_deepspeeds_formula():
    answers = {"rank": lambda: 3, "group": lambda: None, "world_size": lambda: 1}
    checkpointing.configure(SimpleNamespace(**{f"get_model_parallel_{name}": one for name, one in answers.items()}))
    checkpointing.model_parallel_cuda_manual_seed(5)
    state = checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    assert torch.equal(state, torch.Generator().manual_seed(5 + 2718 + 3).get_state())
    assert torch.initial_seed() == 5
    with pytest.raises(ConfigError, match=r"^RngTracker\.add: .* is not a seed"):
        checkpointing.model_parallel_cuda_manual_seed(2**64 - 1)


# -- `configure`: where its settings come from, which of them win, what each mistake reads; profile, waits

EVERYTHING = {
    "partition_activations": True,
    "number_checkpoints": 4,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}
SECTION = {"train_batch_size": 8, "activation_checkpointing": EVERYTHING}


def now() -> tuple[dict[str, bool], str, int | None]:
    process = checkpointing._process
    return process.flags, process.config.store, process.config.num_checkpoints


def mpu_of(group: Any) -> SimpleNamespace:
    answers = {"rank": lambda: 0, "group": lambda: group, "world_size": lambda: 2}
    return SimpleNamespace(**{f"get_tensor_model_parallel_{what}": answer for what, answer in answers.items()})


FLAGS = dict.fromkeys({*checkpointing._KEYS.values()} - {"num_checkpoints"}, True)
ON = (FLAGS, "host+contiguous", 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, ({}, "whole", None)),
        ((None, True, True, 4, True, True, True), {}, ON),
        ((SECTION,), {}, ON),
        (({"train_batch_size": 8},), {}, ({}, "whole", None)),
        ((SECTION,), {"profile": False, "num_checkpoints": 2}, (FLAGS | {"profile": False}, ON[1], 2)),
    ],
)
def test_what_is_configured(args, kwargs, expected):
    assert not checkpointing.is_configured()
    checkpointing.configure(None, *args, **kwargs)
    assert checkpointing.is_configured()
    assert now() == expected


def test_from_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SECTION), encoding="utf-8")
    for given in (path, str(path)):
        checkpointing.configure(None, given)
        assert now() == ON
    for content, text in (
        ('{"activation_checkpointing": {,}}', "it cannot be read as JSON: "),
        ("[]", "activation_checkpointing: this is a list"),
    ):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {text}"):
            checkpointing.configure(None, path)
    with pytest.raises(ConfigError, match=r"missing: it cannot be read as JSON: .*No such file or directory"):
        checkpointing.configure(None, tmp_path / "missing")


def in_section(**values: Any) -> tuple[None, dict[str, Any]]:
    return None, {"activation_checkpointing": values}


FAILS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    # what is told: positional arguments and keywords of configure
    'unknown key "partitioned_activations"\n    did you mean: partition_': (in_section(partitioned_activations=1), {}),
    "activation_checkpointing: this is true\n    legal: a mapping": ((None, {"activation_checkpointing": True}), {}),
    'cpu_checkpointing is "yes"': (in_section(cpu_checkpointing="yes"), {}),
    "number_checkpoints is 0": (in_section(contiguous_memory_optimization=True, number_checkpoints=0), {}),
    "configure.profile: profile is 1": ((None,), {"profile": 1}),
    "num_checkpoints: a contiguous store needs to know how many": ((None,), {"contiguous_checkpointing": True}),
    "mpu_: a SimpleNamespace has no get_model_parallel_world_size": ((SimpleNamespace(),), {}),
    "tp_group: torch.distributed is not initialised": ((mpu_of("tp"),), {"partition_activations": True}),
}


@pytest.mark.parametrize("text", FAILS)
def test_a_mistake_is_an_error_and_changes_nothing(text):
    args, kwargs = FAILS[text]
    checkpointing.configure(None, checkpoint_in_cpu=True)
    before = now()
    with pytest.raises(ConfigError, match=text):
        checkpointing.configure(*args, **kwargs)
    assert now() == before


WAITS = Noted()  # what the region can reach is put back before it runs again


def region(x: Tensor) -> Tensor:
    WAITS.append("run")
    return x.sin().exp().cos()


def test_the_device_is_waited_for_at_each_boundary(call, monkeypatch):
    WAITS.clear()
    monkeypatch.setattr(checkpointing, "_now", lambda: WAITS.append("wait") or 0.0)
    checkpointing.configure(None, synchronize=True)
    out = call(region, torch.randn(4, requires_grad=True) * 1) * 2
    assert WAITS == ["wait", "run", "wait"]
    out.register_hook(lambda grad: WAITS.append("after"))
    WAITS.clear()
    out.sum().backward()
    assert WAITS == ["after", "wait", "run", "wait"]


def test_times_are_logged(monkeypatch, caplog):
    ticks = iter(range(1000))
    monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: next(ticks) / 1000)
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    linear, norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    with caplog.at_level("INFO", logger="sac.deepspeed"):
        checkpointing.checkpoint(linear, checkpointing.non_reentrant_checkpoint(norm, x))
        checkpointing.checkpoint(linear, x).sum().backward()
        told = [record.getMessage() for record in caplog.records]
        assert told == [
            *(f"{name}: forward 1.000 ms" for name in ("LayerNorm", "Linear", "Linear")),
            "Linear: backward 1.000 ms",
        ]
        checkpointing.configure(None)
        checkpointing.checkpoint(linear, x)
    assert len(caplog.records) == len(told)


def test_hooks_do_not_pile_up_on_a_leaf(call):
    """A leaf outlives the graphs of all steps: what measures a region goes with the region's graph."""
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, requires_grad=True)
    with without_collector():
        for step in range(4):
            out = call(torch.sin, x)
            if step % 2:
                out.sum().backward()
            del out
            assert not x._backward_hooks
