"""Rules on whole modules next to rules on ops, under replay: saved modules do not run again, gradients are the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sac.recompute.replay import CannotReplay, ReplayFrame
from torch import Tensor

import sac
from sac.tools.comparison import count_flops
from tests.support.blocks import policy, save, selective, square
from tests.support.training import assert_same_training, built, train
from tests.support.whole_module_blocks import BODIES, EVERY, WIDTH, Apply, stack_of, whole


def mixed(engine: str = "replay", do: str = "save", **more: Any) -> dict[str, Any]:
    return selective(policy(whole(EVERY, do), save("matmul", optional=True)), engine=engine, **more)


def overlapping(part: Apply, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ part.weight
    return h[:5], h[3:]


def chunks(part: Apply, x: Tensor) -> tuple[Tensor, ...]:
    return (x @ torch.cat((part.weight, part.weight), 1)).chunk(2, -1)


def largest_dropped(part: Apply, x: Tensor) -> Tensor:
    values, indices = torch.dropout(x @ part.weight, 0.5, True).topk(4, -1)
    return x.scatter(1, indices, values)


def overlap_read(block: Any, x: Tensor) -> Tensor:
    left, right = block.overlapping((x @ block.a).sin())
    return torch.cat((left.sin(), right.cos()))[:8] * (x @ block.b)


def overlap_written(block: Any, x: Tensor) -> Tensor:
    left, right = block.overlapping((x @ block.a).sin())
    before = left.clone().sin()
    left.mul_(2)
    return torch.cat((before * left.sin(), right.cos()))[:8] * (x @ block.b)


def chunks_read(block: Any, x: Tensor) -> Tensor:
    left, right = block.chunks((x @ block.a).sin())
    return (left.sin() * right.sin()).cos() @ block.b


def chosen_and_drawn(block: Any, x: Tensor) -> Tensor:
    h = torch.dropout(x @ block.a, 0.5, True).sin()
    return (torch.dropout(block.largest(h), 0.5, True).sin() @ block.b).cos()


MORE = (overlap_read, overlap_written, chunks_read, chosen_and_drawn)
EACH = pytest.mark.parametrize("body", [*BODIES, *MORE], ids=lambda body: body.__name__)
# Bodies that are not replayed: they write to a part of what a module has returned.
RERUN = {"overlap_written"}


def stack(body: Callable[..., Any]) -> Any:
    model = stack_of(body)
    if body in MORE:
        for block in model.blocks:
            for name, child in (("overlapping", overlapping), ("chunks", chunks), ("largest", largest_dropped)):
                block.add_module(name, Apply(child))
    return model


RULES = {"each": mixed(), "every other": mixed(do="alternate"), "to the end": mixed(early_stop=False)}
PLUS = f"{EVERY[:-1]},overlapping,chunks,largest}}"
for value in RULES.values():
    value["policy"]["rules"][0]["module"] = PLUS


@pytest.mark.parametrize("name", RULES)
@EACH
def test_gradients_are_the_same(body: Callable[..., Any], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_training(lambda: stack(body), RULES[name], steps=3, make_input=square)


@EACH
def test_gradients_are_the_same_if_python_runs_again_after_all(
    body: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each backward, in which saved modules run again, unseen by the region's hooks."""

    def fail(frame: ReplayFrame, waiting: Any) -> None:
        raise CannotReplay("of this test")

    monkeypatch.setattr(ReplayFrame, "_replay", fail)
    monkeypatch.setattr("sac.recompute.regions.Region._give_up", lambda *_: None)
    assert_same_training(lambda: stack(body), RULES["each"], steps=3, make_input=square)


@EACH
def test_it_is_replay(body: Callable[..., Any]) -> None:
    model = sac.apply(built(lambda: stack(body)), RULES["each"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, steps=2, make_input=square)
    assert {one.engine for one in sac.report(model).kinds} == {"rerun" if body.__name__ in RERUN else "replay"}


@EACH
def test_no_more_is_run_again_and_kept_than_under_rerun(body: Callable[..., Any]) -> None:
    found = []
    for engine in ("rerun", "replay"):
        model = sac.apply(built(lambda: stack(body)), {**RULES["each"], "engine": engine})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, steps=2, make_input=square)
        flops = count_flops(lambda model=model: model(square()[0].requires_grad_()).square().sum().backward())
        found.append((flops, sum(one.saved_bytes for one in sac.report(model).kinds)))
    (flops, saved), (replayed_flops, replay_saved) = found
    # The module's topk, should Python run again after all: 4 of 8 values in each row, without the indices.
    chosen = WIDTH * 4 * 4 if body is chosen_and_drawn else 0
    assert replayed_flops <= flops
    assert replay_saved <= saved + chosen
