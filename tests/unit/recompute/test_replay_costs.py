"""Replay runs no more ops in backward than rerun, keeps no more bytes, and lets values go as early."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sac.recompute.replay import ReplayFrame
from torch import Tensor
from torch.nn import functional as F

from sac.memory_timeline import mark, measure_memory
from tests.support.blocks import FunctionBlock, Stack, llama_stack, policy, save, with_dropout
from tests.support.recording import Recorder, backward_ops, kept_bytes, without_collector
from tests.support.replay_programs import ON_EACH, POLICIES, applied, block_of, replay

WIDTH = 128  # a random state of a few kilobytes is negligible against such tensors


def chain(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    for _ in range(6):
        h = (h.sin() * h.cos()).tanh()
    return h @ block.b


def random_in_between(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    for _ in range(4):
        h = F.dropout(h.sin(), 0.3) @ block.b
    return h


def in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).add_(1).relu_()
    y = h * 2
    y.mul_(x.detach())
    return (y.sin() @ block.b) * y.view(-1)[:64].sum()


def in_place_on_a_view(block: FunctionBlock, x: Tensor) -> Tensor:
    # Of three dimensions `linear` gives an unsafe view: nothing holds the product itself when it is written to.
    h = F.linear(x[None], block.a).add_(1).relu_()
    return F.linear(h, block.b).mul_(2).tanh()[0]


def several_results(block: FunctionBlock, x: Tensor) -> Tensor:
    q, k, v = (x @ torch.cat([block.a, block.b, block.a], 1)).split(WIDTH, 1)
    scores = (q @ k.t()).softmax(-1)
    mean, variance = torch.var_mean(scores, 1, keepdim=True)
    return F.layer_norm(((scores - mean) * variance) @ v, (WIDTH,)).sin()


def dead_ops(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    (h.sin() + 1).cos().exp()
    (h.detach() @ block.b).sum()
    return h.sin() @ block.b + h.cos()


def wide(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.gelu(torch.cat([x @ block.a for _ in range(4)], 1))
    return h[:, :WIDTH] @ block.b + h[:, WIDTH : 2 * WIDTH] * h[:, 2 * WIDTH : 3 * WIDTH]


Build = Callable[[], Stack]
BODIES = (chain, random_in_between, in_place, in_place_on_a_view, several_results, dead_ops, wide)
BUILDS: dict[str, tuple[Build, tuple[int, ...]]] = {
    body.__name__: (lambda body=body: Stack(*(FunctionBlock(body, WIDTH) for _ in range(2))), (WIDTH, WIDTH))
    for body in BODIES
}
BUILDS["llama"] = lambda: with_dropout(llama_stack(2, d=64), attention=0.1), (4, 32, 64)


@dataclass(frozen=True)
class Costs:
    """Of one step that is not the first."""

    peak_bytes_in_backward: int
    kept_bytes: int
    ops_in_backward: int
    product_flops: int


def costs(build: Build, shape: tuple[int, ...], value: dict[str, Any]) -> Costs:
    model, x = applied(build, value), torch.randn(shape)

    def step() -> None:
        out = model(x)
        mark("backward")
        out.square().mean().backward()
        model.zero_grad()

    step()
    timeline = measure_memory(step)
    begins = timeline.marks["backward"][-1][0]
    after = [live for time, live in zip(timeline.times_ms, timeline.live_bytes, strict=True) if time >= begins]
    ops = backward_ops(model, (x,))
    return Costs(max(after), kept_bytes(model, (x,)), sum(ops.ops.values()), ops.product_flops)


@ON_EACH
@pytest.mark.parametrize("name", BUILDS)
def test_no_more_than_rerun(name: str, chosen: dict[str, Any]) -> None:
    build, shape = BUILDS[name]
    ours = costs(build, shape, replay(chosen, "first"))
    rerun = costs(build, shape, {**replay(chosen), "engine": "rerun"})
    assert ours.peak_bytes_in_backward <= rerun.peak_bytes_in_backward
    assert ours.kept_bytes <= rerun.kept_bytes
    assert ours.ops_in_backward <= rerun.ops_in_backward
    assert ours.product_flops <= rerun.product_flops


def names_in_backward(body: Callable[[FunctionBlock, Tensor], Tensor], chosen: dict[str, Any]) -> Recorder:
    return backward_ops(applied(block_of(body), replay(chosen)), (torch.randn(8, 8),))


def test_dead_ops_are_not_replayed() -> None:
    seen = names_in_backward(dead_ops, POLICIES["nothing"])
    assert seen.count("aten.exp") == 0
    assert seen.count("aten.add.Tensor") == 1  # of two gradients
    assert seen.count("aten.sin.", "aten.cos.") == 2 + 1  # what autograd's formulas run, and the one sine that is read
    assert seen.count("aten.mm.") == 1 + 3  # the first product again, and three gradients


def test_what_only_leads_to_saved_values_is_not_replayed() -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x.exp().detach().log() @ block.a
        return h.tanh() @ block.b

    seen = names_in_backward(body, policy(save("matmul")))
    assert seen.count("aten.mm.") == 3  # gradients
    assert seen.count("aten.tanh.") == 1
    assert seen.count("aten.exp", "aten.log") == 2  # the gradient of `a` reads them
    frozen = applied(block_of(body), replay(policy(save("matmul"))))
    frozen.blocks[0].a.requires_grad_(False)
    seen = backward_ops(frozen, (torch.randn(8, 8),))
    assert seen.count("aten.exp", "aten.log", "aten.mm.") == 1


def test_values_are_let_go_while_the_replay_runs() -> None:
    """A chain of which backward reads the last value alone takes three tensors at a time, not one per link."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = x @ block.a
            for _ in range(30):
                h = h.sin() + 1
        return h * block.b

    model, x = applied(lambda: Stack(FunctionBlock(body, 256)), replay(POLICIES["nothing"])), torch.randn(256, 256)

    def step() -> None:
        out = model(x)
        mark("backward")
        torch.autograd.grad(out, model.blocks[0].b, torch.ones_like(out))

    step()
    timeline = measure_memory(step)
    begins = timeline.marks["backward"][-1][0]
    after = [live for time, live in zip(timeline.times_ms, timeline.live_bytes, strict=True) if time >= begins]
    assert max(after) <= 6 * 256 * 256 * 4


def read_again(model: Stack) -> None:
    loss = model(torch.randn(8, 8)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def error_in_replay(model: Stack) -> None:
    block = model.blocks[0]
    loss = model(torch.randn(8, 8)).sum()
    block.outside.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place"):
        loss.backward()


def given_up(model: Stack) -> None:
    model(torch.randn(8, 8))


def half_of_it(model: Stack) -> None:
    model(torch.randn(8, 8)).sum().backward(inputs=[model.blocks[0].b])


@ON_EACH
@pytest.mark.parametrize("use", [read_again, error_in_replay, given_up, half_of_it])
def test_nothing_lives_when_the_graph_is_dropped(use: Callable[[Stack], None], chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout((x @ block.a).add_(1), 0.3)
        torch.rand_like(h)
        return (h * block.outside).sin() @ block.b

    model = applied(block_of(body), replay(chosen, "always"))
    for _ in range(3):
        model.blocks[0].outside = torch.ones(8, 8)
        with without_collector():
            recorder = Recorder()
            with recorder:
                use(model)
            model.zero_grad()
            assert recorder.live_bytes() == 0


def frames() -> list[ReplayFrame]:
    return [one for one in gc.get_objects() if type(one) is ReplayFrame and not one._dropped]


def test_tape_is_small_and_its_lists_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans, the numbers and the places of two calls are the same objects, as are those of equal blocks."""
    monkeypatch.setattr("sac.recompute.regions.library", lambda: None)  # its tape has no lists in Python
    model = applied(lambda: Stack(*(FunctionBlock(chain) for _ in range(3))), replay(POLICIES["nothing"]))
    for _ in range(2):
        model(torch.randn(8, 8, requires_grad=True)).sum().backward()
    before = frames()  # of other tests, whose errors may be held still
    out = model(torch.randn(8, 8, requires_grad=True))
    tapes = [one.recorder.tape for one in frames() if one not in before]
    assert len(tapes) == 3
    first, *others = tapes
    for tape in others:
        assert tape.sites is first.sites
        assert tape.reads is first.reads
        assert tape.first_outputs is first.first_outputs
        assert tape.roots is first.roots
    del out
