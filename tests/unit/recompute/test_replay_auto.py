"""`engine: auto`: replay where it is as good as rerun in every respect, and rerun without a word where it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import sac
from sac.errors import SacWarning
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.recording import Recorder, kept_bytes, without_collector
from tests.support.replay_kernels import FromOutside, tanh_into, twice_in_place
from tests.support.replay_programs import POLICIES, applied, block_of, gradients, python_runs
from tests.support.training import assert_same, built, train

MATMULS = POLICIES["matmuls"]
Body = Callable[[FunctionBlock, Tensor], Tensor]


def two_products(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


def trained(value: Any, body: Body, **training: Any) -> tuple[dict[str, Tensor], Stack]:
    """Three steps in which a warning is an error."""
    model = applied(block_of(body), value)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        return train(model, steps=3, **{"make_input": square, **training}), model


def engines(model: nn.Module) -> tuple[str, str]:
    """What the report says: the last call's engine, and why the kind is not replayed."""
    (kind,) = sac.report(model).kinds
    return kind.engine, kind.no_replay


def test_auto_replays() -> None:
    for engine in ({}, {"engine": "auto"}):
        seen, model = trained(selective(MATMULS, **engine), two_products)
        assert_same(train(built(block_of(two_products)), steps=3, make_input=square), seen)
        assert (engines(model), python_runs(model)) == (("replay", ""), 3)


NOT_REPLAYED: dict[str, tuple[Any, str]] = {
    "full": (FULL, ""),
    "no rules": (selective(policy()), ""),
    "all is saved": (selective(policy(default="save")), "rerun"),
    "all is saved, and a rule says so too": (selective(policy(save("matmul"), default="save")), "rerun"),
    "a saved module": (selective(policy({"id": "m", "module": "part", "do": "save", "optional": True})), ""),
    "rerun": (selective(MATMULS, engine="rerun"), "rerun"),
}


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_auto_does_not_replay(name: str) -> None:
    value, engine = NOT_REPLAYED[name]
    model = applied(block_of(two_products), value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # the rule on a module that is not there
        for _ in range(3):
            model(*square()).sum().backward()
    assert engines(model) == (engine, "")


# Where replay gives way

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)


def fills_memory(block: FunctionBlock, x: Tensor) -> Tensor:
    return tanh_into(x @ block.a, torch.empty_like).sin() @ block.b


def fills_memory_of_a_saved_product(block: FunctionBlock, x: Tensor) -> Tensor:
    return twice_in_place(x @ block.a).sin() @ block.b


def comes_from_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return FromOutside.apply(x @ block.a).sin() @ block.b


def exp_unseen(x: Tensor) -> Tensor:
    """As in a compiled function: autograd saves what no mode has seen."""
    guard = torch._C._DisableTorchDispatch()
    out = x.exp()
    del guard
    return out


def is_made_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    return exp_unseen((x @ block.a) * 0.1) @ block.b


def is_made_unseen_last(block: FunctionBlock, x: Tensor) -> Tensor:
    return exp_unseen(((x @ block.a).sin() @ block.b) * 0.1)


def was_made_in_inference_mode(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + OFFSET).sin() @ block.b


def goes_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.detach().numpy()[:] *= 2
    return (h.cos() @ block.b).sin() * x


GIVES_WAY: dict[Body, str] = {
    fills_memory: "replay would hold what the policy does not save (float32[8, 8])",
    fills_memory_of_a_saved_product: "replay would hold what the policy does not save (float32[8, 8])",
    comes_from_outside: "replay would hold what the policy does not save (float32[8, 8])",
    is_made_unseen: "autograd saves a tensor that no op made",
    is_made_unseen_last: "autograd saves a tensor that no op made",
    was_made_in_inference_mode: "aten.add.Tensor reads an inference tensor",
    goes_unseen: "saved tensor 2 (float32[8, 8]) is replayed with other values than forward had",
}


@pytest.mark.parametrize("body", GIVES_WAY, ids=lambda body: body.__name__)
def test_giving_way_is_reported_and_nothing_else_says_it(body: Body) -> None:
    rule = policy(save("matmul", call={"index": 1}))  # the second product, so that the first is recomputed
    chosen = POLICIES["nothing"] if body is goes_unseen else rule
    seen, model = trained(selective(chosen), body)
    assert_same(train(built(block_of(body)), steps=3, make_input=square), seen)
    assert (engines(model), python_runs(model)) == (("rerun", GIVES_WAY[body]), 6)
    assert f"run again as Python, not replayed: {GIVES_WAY[body]}" in str(sac.report(model))


@pytest.mark.parametrize("body", [two_products, *GIVES_WAY], ids=lambda body: body.__name__)
@pytest.mark.parametrize("name", POLICIES)
def test_no_more_is_kept_than_under_rerun(name: str, body: Body) -> None:
    rerun, auto = (
        kept_bytes(applied(block_of(body), selective(POLICIES[name], **more)), square())
        for more in ({"engine": "rerun"}, {})
    )
    assert auto <= rerun


def kept_past_autocast(engine: str) -> int:
    """Bytes that two calls leave for backward when autocast, which casts weights once for both, has been left."""
    model, x = applied(block_of(two_products), selective(MATMULS, engine=engine)), torch.randn(8, 8)
    with without_collector():
        recorder = Recorder()
        with torch.autocast("cpu", torch.bfloat16), recorder:
            outputs = [model(x) for _ in range(2)]
        return recorder.live_bytes(besides=outputs)


def test_a_cast_of_a_weight_is_not_held_when_autocast_is_left() -> None:
    assert kept_past_autocast("auto") <= kept_past_autocast("rerun")


# Errors that rerun does not raise


def written_after_it_was_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    h = block.last = (x @ block.a).exp()
    out = h @ block.b
    h.add_(1)
    return out


def test_a_write_to_what_autograd_saved_is_as_under_rerun() -> None:
    """Without us it is an error; rerun stops before the write, or makes the value again."""
    value = POLICIES["nothing"]
    rerun, _ = trained(selective(value, engine="rerun"), written_after_it_was_saved)
    auto, model = trained(selective(value), written_after_it_was_saved)
    assert_same(rerun, auto)
    assert engines(model) == ("rerun", "aten.add_.Tensor writes to memory in which autograd saved a tensor before")


def reads_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + block.outside).sin() @ block.b


def multiplies_by_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() * block.outside


def with_outside(body: Body, kind: str) -> Callable[[], Stack]:
    def build() -> Stack:
        block = FunctionBlock(body)
        if kind == "buffer":
            block.register_buffer("outside", torch.ones(8, 8))
        else:
            block.outside = torch.ones(8, 8)
        return Stack(block)

    return build


def refilled(model: Stack) -> dict[str, Tensor]:
    """The same values are written to what the region has read, as by a cache of positions."""
    torch.manual_seed(0)
    for _ in range(3):
        out = model(torch.randn(8, 8))
        model.blocks[0].outside.fill_(1)
        out.square().sum().backward()
    return gradients(model)


def with_copies(model: Stack) -> dict[str, Tensor]:
    """What ``refilled`` is to give; autograd itself does not look at values, and raises."""
    torch.manual_seed(0)
    for _ in range(3):
        model(torch.randn(8, 8)).square().sum().backward()
    return gradients(model)


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@pytest.mark.parametrize("body", [reads_outside, multiplies_by_outside])  # autograd saves what it multiplies by
def test_a_small_tensor_from_outside_that_is_written_to_is_put_back(body: Any, kind: str) -> None:
    build = with_outside(body, kind)
    model = applied(build, selective(MATMULS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        seen = refilled(model)
    assert_same(with_copies(built(build)), seen)
    assert engines(model) == ("replay", "")


# Hooks


def test_inside_hooks_auto_is_rerun() -> None:
    model = applied(block_of(two_products), selective(MATMULS))
    for _ in range(2):
        with save_on_cpu():
            out = model(*square())
        out.sum().backward()
        assert engines(model) == ("rerun", "")
    model(*square()).sum().backward()
    assert engines(model) == ("replay", "")


def test_a_region_in_a_region_is_rerun() -> None:
    model = applied(lambda: Stack(FunctionBlock(two_products), FunctionBlock(two_products)), selective(MATMULS))
    for _ in range(2):
        sac.checkpoint(model, *square()).sum().backward()
        assert engines(model) == ("rerun", "")
