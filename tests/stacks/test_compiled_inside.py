"""Something compiled inside an eager region: exact, compiled in both passes, one piece to rules, and reported.

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
from sac.errors import RegionError, SacWarning
from sac.memory_timeline import mark, measure_memory
from sac.reporting import decisions_of
from tests.support.blocks import FULL, Stack, alternate, llama_stack, policy, save, selective, tokens
from tests.support.pairs import in_pairs
from tests.support.training import assert_same, built, train

ATTENTION_AND_PRODUCTS = selective(policy(save("attention"), alternate("matmul")))
MATMULS = policy({**save("matmul"), "optional": True})
WIDTH, STEPS = 16, 3

# -- Parts of a Llama-like block


def forwards(model: nn.Module, **how: Any) -> None:
    """The wrong order: the region comes to lie around what is compiled."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **how)


def parts(model: nn.Module, **how: Any) -> None:
    for block in model.blocks:
        block.mlp.compile(**how)


def wrapped_parts(model: nn.Module, **how: Any) -> None:
    for block in model.blocks:
        block.mlp = torch.compile(block.mlp, **how)


def functions(model: nn.Module, **how: Any) -> None:
    """What no module tells: a function that the block's own code calls."""
    for block in model.blocks:
        block.mlp.forward = torch.compile(type(block.mlp).forward.__get__(block.mlp), **how)


def training(
    compile_it: Callable[..., None], value: Any, *, warn: str = "error", apply_first: bool = False, **how: Any
) -> tuple[dict[str, Any], nn.Module]:
    """Three steps: the regions' first call, which is recorded, and calls that rest on it."""
    torch._dynamo.reset()
    model = built(llama_stack)
    if apply_first:
        sac.apply(model, value)
    compile_it(model, **how)
    if not apply_first:
        sac.apply(model, value)
    with warnings.catch_warnings():
        if warn:
            warnings.simplefilter(warn, SacWarning)  # type: ignore[arg-type]
        seen = train(model, steps=STEPS)
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in seen.items()}, model


@cache
def without_us(compile_it: Callable[..., None]) -> dict[str, Any]:
    return training(compile_it, "none", backend="aot_eager")[0]


@pytest.mark.parametrize("compile_it", [forwards, parts, wrapped_parts, functions])
def test_full_is_exact_and_the_report_says_what_it_is_blind_to(compile_it: Callable[..., None]) -> None:
    ours, model = training(compile_it, FULL, backend="aot_eager")  # there is no rule that could miss anything
    assert_same(without_us(compile_it), ours)
    (kind,) = sac.report(model).kinds
    assert kind.compiled_graphs == 1
    assert "compiled graphs inside, each one piece that rules do not look into: 1" in str(sac.report(model))
    if compile_it is forwards:  # the region keeps its input and nothing of the compiled graph's
        assert (kind.saved_bytes, kind.input_bytes) == (0, tokens()[0].nbytes)


@pytest.mark.parametrize("compile_it", [parts, wrapped_parts, functions])
def test_rules_that_miss_something_are_told(compile_it: Callable[..., None]) -> None:
    with pytest.warns(SacWarning, match="which sac sees as one piece: rules do not apply to modules and ops inside"):
        ours, _ = training(compile_it, ATTENTION_AND_PRODUCTS, warn="", backend="aot_eager")
    assert_same(without_us(compile_it), ours)


@pytest.mark.parametrize("module", ["**", "self_attn.k_proj"])
def test_a_part_that_is_compiled_after_apply(module: str) -> None:
    value = selective(policy(save("matmul", module=module)))
    ours, _ = training(parts, value, warn="ignore", apply_first=True, backend="aot_eager")
    assert_same(without_us(parts), ours)


def inductor(**options: bool) -> dict[str, Any]:
    return {"backend": "inductor", "options": options}


@pytest.mark.slow
def test_wrong_order_with_rules_that_reach_nothing_is_an_error_with_the_reason() -> None:
    with (
        pytest.warns(SacWarning, match="torch.compile was applied to a part of the region"),
        pytest.raises(RegionError),
    ):
        training(forwards, selective(policy(save("matmul")), strict=True), warn="", **inductor())


@pytest.mark.slow
def test_a_compiled_graph_can_be_saved_as_a_whole() -> None:
    how = inductor(wrap_inductor_compiled_regions=True)
    expected, _ = training(wrapped_parts, "none", **how)
    ours, model = training(wrapped_parts, selective(policy(save("compiled"))), **how)
    assert_same(expected, ours)
    rows = [row for row in decisions_of(model) if row.op == "higher_order.inductor_compiled_code"]
    assert [row.decision for row in rows] == ["save"]
    (kind,) = sac.report(model).kinds
    assert (kind.rules[0].hits, kind.rules[0].saved_bytes > 0) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("value", [FULL, selective(policy(save("matmul", module="self_attn.**")))])
def test_inductor_inside_is_exact(value: Any) -> None:
    """The same graphs run in recomputation, so that even inductor's own bits repeat."""
    expected, _ = training(wrapped_parts, "none", **inductor())
    assert_same(expected, training(wrapped_parts, value, warn="ignore", **inductor())[0])


# -- Micro-batches of several lengths. The second length makes Dynamo compile a dynamic graph, which fits the first
# length too; recomputation of the first has to get the static graph of its forward. See Note [Graphs that both fit].


class Averaging(nn.Module):
    """A block of which a static graph saves other tensors for its backward than a dynamic one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.a(x).softmax(-1).mean(0, keepdim=True)
        return self.b(mean * self.a(x).tanh() / x.shape[0]) + x


class InParts(Averaging):
    """The same, as a part of its own inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Averaging()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).sin() + super().forward(x)


def micro_batches(kind: type[nn.Module], value: Any, order: tuple[int, ...]) -> dict[str, Tensor]:
    """All forwards, then the backwards in `order`; in the second round the graphs are all there."""
    torch._dynamo.reset()
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # as a process begins
    model = built(lambda: Stack(kind(), kind()))
    for block in model.blocks:
        if kind is InParts:
            block.part.compile(backend="aot_eager")
        else:
            block.forward = torch.compile(block.forward, backend="aot_eager")
    sac.apply(model, value)
    seen = {}
    for turn in range(2):
        generator = torch.Generator().manual_seed(0)
        shapes = ((4, 6), (5, 7), (4, 6))
        inputs = [torch.randn(*shape, 8, generator=generator).requires_grad_() for shape in shapes]
        outputs = [model(x) for x in inputs]
        for place in order:
            outputs[place].square().sum().backward()
        seen |= {f"{turn} {name}": p.grad.clone() for name, p in model.named_parameters()}
        seen |= {f"{turn} input {place}": x.grad for place, x in enumerate(inputs)}
        model.zero_grad()
    return seen


@in_pairs(
    value={"full": FULL, "products": selective(policy(save("matmul")))},
    kind={"block": Averaging, "part": InParts},
    order={"first in first out": (0, 1, 2), "last in first out": (2, 1, 0)},
)
def test_recomputation_gets_the_graph_of_its_forward(value: Any, kind: type[nn.Module], order: Any) -> None:
    assert_same(micro_batches(kind, "none", order), micro_batches(kind, value, order))


# -- Compiled functions stay compiled


class Unseen(torch.fx.Interpreter):
    """Runs a graph as inductor's code does: matrix products through torch, into its own memory, all else unseen."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        products = {torch.ops.aten.mm.default: torch.mm, torch.ops.aten.addmm.default: torch.addmm}
        guard = torch._C._DisableTorchDispatch()
        try:
            if target not in products:
                return super().call_function(target, args, kwargs)
            out = torch.empty(args[-2].shape[0], args[-1].shape[1])
        finally:
            del guard
        return products[target](*args, out=out)

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
        backward = partial(self._compiled, counts=False)
        self.backend = aot_autograd(fw_compiler=compiled, inference_compiler=compiled, bw_compiler=backward)

    def _compiled(self, graph: torch.fx.GraphModule, examples: Any, *, counts: bool) -> Any:
        self.graphs += counts
        call: Callable[..., Any] = Unseen(graph).run if self.unseen else graph.forward

        def run(*args: Any) -> Any:
            self.runs += counts
            return call(*args)

        return make_boxed_func(run)


def relative(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + (query - key)


def products(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).sin() @ weight).cos() * x


class Block(nn.Module):
    """Something compiled between two layers, or nearly nothing but that."""

    def __init__(self, compiled: Callable[..., Tensor], kind: str, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.randn(width, width) / 4)
        self.compiled, self.kind = compiled, kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "alone":
            return self.compiled(x.sin(), self.weight).cos() + x
        h = self.first(x)
        if self.kind == "flex_attention":
            heads = h.view(2, 8, 2, 8).transpose(1, 2)
            h = self.compiled(heads, heads.sin(), heads.cos(), score_mod=relative).transpose(1, 2).reshape(x.shape)
        else:
            h = self.compiled(h, self.weight)
        return self.last(h.relu()) + x


FUNCTIONS: dict[str, Callable[..., Any]] = {"function": products, "flex_attention": flex.flex_attention}


def by_function(model: Stack) -> None:
    for block in model.blocks:
        block.forward = partial(sac.checkpoint, block.forward)


def by_torch(model: Stack, **options: Any) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def by_context_fn(model: Stack) -> None:
    by_torch(model, context_fn=sac.context_fn(sac.load_policy(MATMULS)))


# How a model is put under a mode.
MODES: dict[str, Callable[[Stack], Any]] = {
    "full": partial(sac.apply, value=FULL),
    "full, reentrant": partial(sac.apply, value={**FULL, "use_reentrant": True}),
    "auto": partial(sac.apply, value=selective(MATMULS)),
    "replay": partial(sac.apply, value=selective(MATMULS, engine="replay")),
    "rerun": partial(sac.apply, value=selective(MATMULS, engine="rerun")),
    "a whole module": partial(sac.apply, value=selective(policy({"module": "first", "do": "save"}))),
    "sac.checkpoint": by_function,
    "sac.context_fn": by_context_fn,
}


@pytest.fixture
def _flex_attention_has_a_backward_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one (the graph's ops), but for a check that inductor's CPU kernels need."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@cache
def trained(kind: str, mode: str, *, unseen: bool) -> tuple[dict[str, Any], list[tuple[int, int]], int]:
    """What training gives, how often compiled graphs ran in the forward and the backward of each step, graphs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    counted = Counted(unseen=unseen)
    compiled = torch.compile(FUNCTIONS[kind], backend=counted.backend)
    model = Stack(Block(compiled, kind), Block(compiled, kind))
    MODES.get(mode, lambda model: None)(model)
    runs = []

    def backward(loss: Tensor, *_: Any) -> list[Tensor | None]:
        before, counted.runs = counted.runs, 0
        loss.backward()
        runs.append((before, counted.runs))
        counted.runs = 0
        return []

    seen = train(model, steps=STEPS, make_input=lambda device: (torch.randn(2, 8, WIDTH),), backward=backward)
    return seen, runs, counted.graphs


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # rules do not look into what is compiled
@pytest.mark.usefixtures("_flex_attention_has_a_backward_on_the_cpu")
@in_pairs(mode=MODES.keys(), kind=FUNCTIONS.keys(), unseen={"ops seen": False, "kernels unseen": True})
def test_what_is_compiled_runs_compiled_in_both_passes(mode: str, kind: str, unseen: bool) -> None:
    """Ops that the dispatcher sees explain a compiled function: they are replayed, and the graph does not run again."""
    expected, without, _ = trained(kind, "none", unseen=unseen)
    ours, runs, graphs = trained(kind, mode, unseen=unseen)
    assert_same(expected, ours)
    assert without == [(2, 0)] * STEPS
    assert [forward for forward, _ in runs] == [2] * STEPS
    explained = kind == "function" and not unseen and mode in ("auto", "replay", "a whole module", "sac.context_fn")
    assert runs[1:] == [(2, 0 if explained else 2)] * (STEPS - 1)
    assert graphs == (2 if "reentrant" in mode else 1)  # that forward runs without gradients


def bytes_of_steps(put: Callable[[Stack], Any]) -> list[tuple[int, int]]:
    """Bytes after the forward, and at the peak, of the first steps, where kernels are not seen."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(products, backend=Counted(unseen=True).backend)
    model = Stack(*(Block(compiled, "alone", 64) for _ in range(4)))
    x = torch.randn(256, 64, requires_grad=True)

    def step() -> None:
        loss = model(x).square().mean()
        mark("forward is over")
        loss.backward()
        model.zero_grad()
        x.grad = None

    step()  # compiles
    put(model)
    seen = [measure_memory(step) for _ in range(2)]
    return [(one.at("forward is over"), one.peak_bytes) for one in seen]


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("mode", ["full", "auto", "rerun"])
def test_memory_of_a_compiled_function_is_not_held_for_backward(mode: str) -> None:
    """Its products go into memory that no op of torch has made: that is not a tensor from outside to be put back."""
    torchs, without, ours = bytes_of_steps(by_torch), bytes_of_steps(lambda model: None), bytes_of_steps(MODES[mode])
    slack = 16 * 1024  # bookkeeping: random states
    for (after, peak), (torchs_after, torchs_peak), (plain_after, _) in zip(ours, torchs, without, strict=True):
        assert after <= torchs_after + slack
        assert peak <= torchs_peak + slack
        assert torchs_after < plain_after / 3  # so that this test can fail
