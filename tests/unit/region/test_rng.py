"""What a region does to random states and their trackers: as in forward for recomputation, then as they were found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from sac.errors import ConfigError
from tests.support.blocks import FULL, selective
from tests.support.programs import WIDTH, Block, Program
from tests.support.runs import Noted
from tests.support.trackers import MAKERS, bytes_of, draws, filled, leaf, states_of
from tests.support.training import assert_same
from tests.support.ways import POLICIES

# -- Trackers


def forks_in_forks(tracker: Any, block: Block, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.2)
    with tracker.fork():
        h = F.dropout(block.up(x), 0.4).sin()
        with tracker.fork("expert-parallel-rng"):
            h = h * torch.rand_like(h)
            with tracker.fork():
                h = F.dropout(block.down(h), 0.4).sin()
        with tracker.fork():
            h = F.dropout(h, 0.4).sin()
        return F.dropout(block.down(h), 0.4).sin()


CALLS = {"sac.checkpoint": sac.checkpoint, "reentrant": partial(sac.checkpoint, use_reentrant=True)}
VALUES = {"full": FULL, **{name: selective(POLICIES[name]) for name in ("matmuls", "every second op", "everything")}}
VALUES["rerun"] = {**VALUES["matmuls"], "engine": "rerun"}


@pytest.mark.parametrize("way", [*CALLS, *VALUES])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_region_entered_inside_a_fork(maker: Any, way: str) -> None:
    """Megatron's snapshot omits which stream is in use: a nested fork of that one draws other numbers there."""

    def trained(way: str) -> dict[str, Tensor]:
        tracker = filled(maker)
        torch.manual_seed(1)
        model = Program("forks", partial(forks_in_forks, tracker)).model()
        if way in VALUES:
            sac.apply(model, VALUES[way], get_rng_state_tracker=lambda: tracker)
        seen = {}
        for step in range(3):
            h = x = torch.randn(WIDTH, WIDTH, requires_grad=True)
            for block in model.blocks:
                with tracker.fork("model-parallel-rng"):
                    h = CALLS[way](block, h, get_rng_state_tracker=lambda: tracker) if way in CALLS else block(h)
            h.square().sum().backward()
            seen |= {f"{step} input": x.grad, f"{step} random state": torch.get_rng_state()}
        return seen | bytes_of(tracker)

    assert_same(trained("none"), trained(way))


def test_the_getter_is_asked_anew_for_the_recomputation() -> None:
    """Backward may run on another thread, and a getter may know one tracker per thread."""
    used = Noted(filled(MAKERS["ours"]))
    x, y = leaf(), leaf()
    out = sac.checkpoint(lambda x: draws(used[0], x), x, get_rng_state_tracker=lambda: used[0])
    used[0] = filled(MAKERS["ours"])
    with used[0].fork():
        torch.rand(5)
    before = states_of(used[0])
    out.sum().backward()
    assert states_of(used[0]) == before
    torch.manual_seed(0)
    draws(filled(MAKERS["ours"]), y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_without_preserving_nothing_is_put_back_and_no_tracker_is_asked() -> None:
    tracker, drawn = filled(MAKERS["ours"]), Noted()

    def drawing(x: Tensor) -> Tensor:
        with tracker.fork():
            drawn.append(torch.rand(3).tolist())
        drawn.append(torch.rand(3).tolist())
        return F.dropout(x.sin(), 0.5)

    def unasked() -> Any:
        raise AssertionError

    sac.checkpoint(drawing, leaf(), get_rng_state_tracker=unasked, preserve_rng_state=False).sum().backward()
    torch.manual_seed(0)
    tracker, expected, drawn = filled(MAKERS["ours"]), [*drawn], Noted()
    drawing(leaf())
    drawing(leaf())
    assert expected == drawn


# -- Errors


class Strange:
    """A tracker with states of any sort."""

    def __init__(self, states: Any) -> None:
        self.states = states

    def get_states(self) -> Any:
        return self.states

    def set_states(self, states: Any) -> None:
        self.states = states


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, r"it returned None, which has no get_states\(\)"),
        ({"a": 1}, r"it returned {'a': 1}, which has no get_states\(\)"),
        (Strange(None), r"get_states\(\) of its tracker returned None\n    legal: a mapping of name to state"),
        (Strange({"a": 7}), r"the state of 'a' in its tracker is 7\n    legal: a tensor, or a torch.Generator"),
    ],
)
def test_what_is_no_tracker_is_an_error_at_the_call(returned: Any, told: str) -> None:
    ran: list[Tensor] = []
    with pytest.raises(ConfigError, match=f"get_rng_state_tracker: {told}"):
        sac.checkpoint(ran.append, leaf(), get_rng_state_tracker=lambda: returned)
    assert not ran


@pytest.mark.parametrize("name", ["ours", "Megatron", "TransformerEngine, graph-safe"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_exception_in_recomputation_leaves_no_state_rewound(name: str, use_reentrant: bool) -> None:
    """TransformerEngine and DeepSpeed leave every state as it was in forward. Backward can be tried again."""
    tracker, fails = filled(MAKERS[name]), Noted()

    def failing(x: Tensor) -> Tensor:
        h = draws(tracker, x)
        with tracker.fork("expert-parallel-rng"):
            if fails:
                raise KeyError(fails.pop())
            return draws(tracker, h)

    x, y = leaf(), leaf()
    out = sac.checkpoint(failing, x, get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant)
    torch.rand(7)
    before = states_of(tracker)
    fails.append("once")
    with pytest.raises(KeyError, match="once"):
        out.sum().backward()
    assert states_of(tracker) == before
    out.sum().backward()
    assert states_of(tracker) == before
    torch.manual_seed(0)
    tracker = filled(MAKERS[name])
    failing(y).sum().backward()
    assert torch.equal(x.grad, y.grad)
