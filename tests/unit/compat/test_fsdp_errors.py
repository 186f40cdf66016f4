"""What the functions of sac.compat.fsdp refuse, which leaves nothing behind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch

import sac
from sac.compat import fsdp as ours
from sac.config import FullConfig
from sac.errors import ConfigError, ModelError


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)))


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def ours_in(network: nn.Module) -> list[str]:
    return [name for name, one in network.named_modules() if "forward" in one.__dict__]


CONTEXTS = {"context_fn": sac.context_fn("general"), "checkpoint_impl": ours.CheckpointImpl.REENTRANT}
KEPT_TWICE = {"config": FullConfig(store="host"), "offload_to_cpu": True}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [  # what is given to checkpoint_wrapper, and what the error says of it
    ({"checkpoint_impl": "reentrant"}, "checkpoint_impl: 'reentrant' is not .*\n.*legal: CheckpointImpl"),
    ({"checkpoint_fn": len}, "checkpoint_fn: <built-in function len> cannot be made a region"),
    ({"context_fn": int}, "context_fn: the caller's contexts .* are not entered\n.*fix: "),
    (CONTEXTS, "context_fn: per-op decisions need the non-reentrant mode"),
    ({"debug": True}, "debug: True is not supported"),
    ({"offload_to_cpu": 1}, "offload_to_cpu: offload_to_cpu is 1"),
    ({"config": {"store": "host"}}, "config: {'store': 'host'} is not a FullConfig"),
    (KEPT_TWICE, "offload_to_cpu: config keeps inputs elsewhere .*\n.*fix: leave one of the two out"),
    ({"preserve_rng": True}, "preserve_rng: it is not known\n.*did you mean: preserve_rng_state"),
    ({"determinism_check": "all"}, 'determinism_check: determinism_check is "all"'),
]


@pytest.mark.parametrize(("given", "text"), UNSUPPORTED)
def test_what_cannot_be_done_is_an_error_and_changes_nothing(given: dict[str, Any], text: str) -> None:
    mine = model()
    wrap = functools.partial(ours.checkpoint_wrapper, **given)
    for put in (wrap, lambda one: ours.apply_activation_checkpointing(one, wrap, is_linear)):
        with pytest.raises(ConfigError, match=rf"^checkpoint_wrapper\.{text}"):
            put(mine)
        assert ours_in(mine) == []


def test_a_function_that_fails_half_way_leaves_nothing() -> None:
    mine, left = model(), [nn.Linear]

    def wrap(module: nn.Module) -> nn.Module:
        left.pop()  # an IndexError the second time
        return ours.checkpoint_wrapper(module)

    with pytest.raises(IndexError):
        ours.apply_activation_checkpointing(mine, wrap, is_linear)
    assert ours_in(mine) == []


def a_second_region() -> None:
    mine = model()
    ours.apply_activation_checkpointing(mine, check_fn=is_linear)
    ours.apply_activation_checkpointing(mine, check_fn=is_linear)


def beside_torchs_wrapper() -> None:
    mine = model()
    of_torch.apply_activation_checkpointing(mine, check_fn=is_linear)
    ours.checkpoint_wrapper(mine)


def offloaded() -> nn.Module:
    return ours.offload_wrapper(nn.Linear(2, 2))


def apply_on_offloaded() -> None:
    mine = model()
    ours.offload_wrapper(mine[1])
    sac.apply(mine, "full")


REFUSED: dict[str, Callable[[], Any]] = {
    r"0\.0: this module is a region of sac already\n    fix: call sac.remove": a_second_region,
    "Sequential: the model's own checkpointing is on: checkpoint_wrapper is around ": beside_torchs_wrapper,
    "checkpoint_wrapper_fn: it returned CheckpointWrapper around": lambda: ours.apply_activation_checkpointing(
        model(), of_torch.checkpoint_wrapper, is_linear
    ),
    "Linear: it is inside a region, which does not keep what its modules save\n    fix": lambda: ours.offload_wrapper(
        sac.apply(model(), "full")[0][0]
    ),
    "Linear: what it saves is kept elsewhere already\n    fix": lambda: ours.offload_wrapper(offloaded()),
    "Linear: its inputs are kept elsewhere already": lambda: ours.offload_wrapper(
        ours.offload_wrapper(ours.checkpoint_wrapper(nn.Linear(2, 2)))
    ),
    "ModuleList: it is not called itself, .*\n    fix: call offload_wrapper on each of": lambda: ours.offload_wrapper(
        nn.ModuleList([nn.Linear(2, 2)])
    ),
    "Linear: offload_wrapper is on this module: make it": lambda: ours.checkpoint_wrapper(offloaded()),
    "1: sac.compat.fsdp.offload_wrapper is on this module\n    fix: call": apply_on_offloaded,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=text):
        REFUSED[text]()
