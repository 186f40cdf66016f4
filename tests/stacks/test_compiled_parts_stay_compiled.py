"""A compiled function inside an eager region stays compiled in both passes of every mode, and holds no more memory.

A dispatch mode that Dynamo does not know to leave alone turns compiled functions around it into eager ones, without a
word: attention by `flex_attention` then makes its whole matrix of scores.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

import sac
from sac.errors import SacWarning
from sac.memory_timeline import mark, measure_memory
from tests.support.blocks import FULL, policy, save, selective
from tests.support.machine import vectorised_inductor
from tests.support.pairs import in_pairs
from tests.support.training import assert_same, train

LAYERS, STEPS, WIDTH = 2, 3, 16
MATMULS = policy({**save("matmul"), "optional": True})
EXTERN = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Unseen(torch.fx.Interpreter):
    """Runs a graph as inductor's code does: matrix products through torch, into its own memory, all else unseen."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        guard = torch._C._DisableTorchDispatch()
        try:
            if target not in EXTERN:
                return super().call_function(target, args, kwargs)
            out = torch.empty(args[-2].shape[0], args[-1].shape[1])
        finally:
            del guard
        product = torch.mm if target is EXTERN[0] else torch.addmm
        return product(*args, out=out)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            self.env, self.args_iter = {}, iter(())


class Counted:
    """A backend that counts its graphs, and how often they run."""

    def __init__(self, *, unseen: bool = False) -> None:
        self.unseen = unseen
        self.graphs = self.runs = 0
        compiled = partial(self._compiled, counts=True)
        self.backend = aot_autograd(
            fw_compiler=compiled, inference_compiler=compiled, bw_compiler=partial(self._compiled, counts=False)
        )

    def _compiled(self, graph: torch.fx.GraphModule, examples: Any, *, counts: bool) -> Any:
        self.graphs += counts
        call: Callable[..., Any] = Unseen(graph).run if self.unseen else graph.forward

        def run(*args: Any) -> Any:
            self.runs += counts
            return call(*args)

        return make_boxed_func(run)


class Block(nn.Module):
    """Something compiled between two layers."""

    def __init__(self, compiled: Callable[..., Tensor], kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.compiled, self.kind = compiled, kind

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "flex_attention":
            heads = h.view(2, 8, 2, 8).transpose(1, 2)
            h = self.compiled(heads, heads.sin(), heads.cos(), score_mod=relative).transpose(1, 2).reshape(x.shape)
        else:
            h = self.compiled(h, self.weight)
        return self.last(h.relu()) + x


class Model(nn.Module):
    def __init__(self, build: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(build() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def relative(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + (query - key)


def products(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).sin() @ weight).cos() * x


FUNCTIONS: dict[str, Callable[..., Any]] = {"function": products, "flex_attention": flex.flex_attention}


def by_apply(model: nn.Module, value: Any) -> None:
    sac.apply(model, value)


def by_function(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = partial(sac.checkpoint, block.forward)


def by_context_fn(model: nn.Module) -> None:
    contexts = sac.context_fn(sac.load_policy(MATMULS))
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


# How a model is put under a mode.
MODES: dict[str, Callable[[nn.Module], Any]] = {
    "full": partial(by_apply, value=FULL),
    "full, reentrant": partial(by_apply, value={**FULL, "use_reentrant": True}),
    "auto": partial(by_apply, value=selective(MATMULS)),
    "replay": partial(by_apply, value=selective(MATMULS, engine="replay")),
    "rerun": partial(by_apply, value=selective(MATMULS, engine="rerun")),
    "a whole module": partial(by_apply, value=selective(policy({"module": "first", "do": "save"}))),
    "sac.checkpoint": by_function,
    "sac.context_fn": by_context_fn,
}


@pytest.fixture(autouse=True)
def _flex_attention_has_a_backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one (the graph's ops), but for a check that inductor's CPU kernels need."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def inputs(device: str) -> tuple[Tensor]:
    return (torch.randn(2, 8, WIDTH, device=device),)


def trained(kind: str, put: Callable[[nn.Module], Any] | None, *, unseen: bool) -> tuple[dict[str, Any], Any, int]:
    """What training gives, how often compiled graphs ran in the forwards and in the backwards of each step, graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counted = Counted(unseen=unseen)
    compiled = torch.compile(FUNCTIONS[kind], backend=counted.backend)
    model = Model(lambda: Block(compiled, kind))
    if put is not None:
        put(model)
    runs = []

    def backward(loss: Tensor, *_: Any) -> list[Tensor | None]:
        before, counted.runs = counted.runs, 0
        loss.backward()
        runs.append((before, counted.runs))
        counted.runs = 0
        return []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # rules do not look into what is compiled
        seen = train(model, steps=STEPS, make_input=inputs, backward=backward)
    return seen, runs, counted.graphs


@cache
def trained_without_us(kind: str, unseen: bool) -> tuple[dict[str, Any], Any, int]:
    return trained(kind, None, unseen=unseen)


@in_pairs(mode=MODES.keys(), kind=FUNCTIONS.keys(), unseen={"ops seen": False, "kernels unseen": True})
def test_what_is_compiled_runs_compiled_in_both_passes(mode: str, kind: str, unseen: bool) -> None:
    expected, without, _ = trained_without_us(kind, unseen)
    ours, runs, graphs = trained(kind, MODES[mode], unseen=unseen)
    assert_same(expected, ours)
    assert without == [(LAYERS, 0)] * STEPS
    assert [forward for forward, _ in runs] == [LAYERS] * STEPS
    assert runs[1:] == [(LAYERS, LAYERS)] * (STEPS - 1)
    assert graphs == (2 if "reentrant" in mode else 1)  # that forward runs without gradients


class OneFunction(nn.Module):
    """A block whose memory is nearly all that of a compiled function."""

    def __init__(self, compiled: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.compiled = compiled

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(x.sin(), self.weight).cos() + x


def bytes_of_steps(put: Callable[[nn.Module], Any] | None) -> list[tuple[int, int]]:
    """Bytes after the forward, and at the peak, of the first steps, where kernels are not seen."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(products, backend=Counted(unseen=True).backend)
    model = Model(lambda: OneFunction(compiled), layers=4)
    x = torch.randn(256, 64, requires_grad=True)
    model(x).sum().backward()  # compiles
    model.zero_grad()
    x.grad = None
    if put is not None:
        put(model)

    def step() -> None:
        loss = model(x).square().mean()
        mark("forward is over")
        loss.backward()
        model.zero_grad()
        x.grad = None

    seen = [measure_memory(step) for _ in range(2)]
    return [(one.at("forward is over"), one.peak_bytes) for one in seen]


def by_torch(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@pytest.mark.parametrize("mode", ["full", "auto", "rerun"])
def test_memory_of_a_compiled_function_is_not_held_for_backward(mode: str) -> None:
    """Its products go into memory that no op of torch has made: that is not a tensor from outside to be put back."""
    torchs, without = bytes_of_steps(by_torch), bytes_of_steps(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        ours = bytes_of_steps(MODES[mode])
    slack = 16 * 1024  # bookkeeping: random states
    for (after, peak), (torchs_after, torchs_peak), (plain_after, _) in zip(ours, torchs, without, strict=True):
        assert after <= torchs_after + slack
        assert peak <= torchs_peak + slack
        assert torchs_after < plain_after / 3  # so that this test can fail


@vectorised_inductor
@pytest.mark.slow
def test_flex_attention_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smoke test: on the CPU it has no backward, so its arguments need no gradients here."""
    monkeypatch.undo()

    def body(x: Tensor, weight: Tensor) -> Tensor:
        heads = x.detach().view(2, 8, 2, 8).transpose(1, 2)
        return attention(heads, heads, heads).transpose(1, 2).reshape(x.shape) * products(x, weight)

    def run(put: Callable[[nn.Module], Any] | None) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Model(lambda: Block(body, "function"))
        if put is not None:
            put(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SacWarning)
            return train(model, steps=STEPS, make_input=inputs)

    torch._dynamo.reset()
    attention = torch.compile(flex.flex_attention)
    expected = run(None)
    for mode in ("full", "auto", "rerun"):
        assert_same(expected, run(MODES[mode]))
