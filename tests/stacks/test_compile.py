"""Regions inside compiled graphs: the gradients of the compiled model without sac, and the policy in the partition.

What the partitioner was told is counted in the backward graph: each of the two blocks has seven matrix products, of
which `full` runs six again (nothing in backward reads the last one's result).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sac
from sac.engine.compiled import checkpoint_contexts
from sac.errors import SacWarning
from sac.reporting import decisions_of
from tests.stacks.compiled import per_block, plain
from tests.stacks.compiled import whole as whole_llama
from tests.stacks.composition import differences, forward_done, outcome
from tests.support.blocks import (
    FULL,
    LlamaLikeBlock,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    with_dropout,
)
from tests.support.compiling import Compiled, count, nothing, skip_if_results_are_not_told, train_compiled
from tests.support.model_zoo import tiny
from tests.support.pairs import in_pairs
from tests.support.training import assert_nearly_same, assert_same, built, new_tensors_in

PER_BLOCK = 14  # matrix products in the backward of one block: two per product of the forward
IN_TURN = selective(policy(save("attention"), alternate("matmul")))
PRODUCTS = selective(policy(save("matmul")))
GATE = selective(policy(save("matmul", module="mlp.gate_proj")))
TOPK = torch.ops.aten.topk.default
Way = Callable[[nn.Module, Any], Any]


def whole(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> None:
    model.compile(backend=backend, fullgraph=True)


def each_in_place(model: nn.Module, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def each_replaced(model: nn.Module, backend: Any) -> None:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend=backend, fullgraph=True)


def each_forward(model: nn.Module, backend: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def in_a_function(model: nn.Module, backend: Any) -> Any:
    return torch.compile(lambda x: 1.0 * model(x), backend=backend, fullgraph=True)


AT_ONCE = (whole, in_place, in_a_function)


def clean(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in seen.items()}


@functools.cache
def without_us(way: Way, build: Callable[[], nn.Module] = llama_stack) -> tuple[dict[str, Tensor], Compiled]:
    return train_compiled(build, nothing, compile_it=way)


def compiled(value: Any, way: Way, *, apply_first: int = True, **options: Any) -> tuple[Any, Compiled, nn.Module]:
    """What training gives, its graphs, and the model; sac must not warn of anything."""
    models: list[nn.Module] = []

    def put(model: nn.Module) -> None:
        models.append(sac.apply(model, value) if apply_first else model)

    def compile_it(model: nn.Module, backend: Any) -> Any:
        result = way(model, backend)
        if not apply_first:
            sac.apply(model if result is None else result, value)
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        seen, log = train_compiled(options.pop("build", llama_stack), put, compile_it=compile_it, **options)
    return seen, log, models[0]


def eager_hits(value: Any) -> dict[str, list[int]]:
    model = sac.apply(built(llama_stack), value)
    model(*tokens())
    hits = {kind.regions: [use.hits for use in kind.rules if use.rule != "default"] for kind in sac.report(model).kinds}
    return {regions: [number for number in counts if number] for regions, counts in hits.items()}


# By name: a value, and how many products are run again in both blocks.
VALUES: dict[str, tuple[Any, int]] = {
    "full": (FULL, 12),
    "in turn": (IN_TURN, 6),
    "every product": (PRODUCTS, 0),
    "one linear": (GATE, 10),
    "one linear of three alike": (selective(policy(save("matmul", module="self_attn.k_proj"))), 10),
    "the products of one child": (selective(policy(save("matmul", module="self_attn.**"))), 4),
    "in the first block": (selective(policy(save("attention"), save("matmul", layers={"first": 1}))), 6),
    "by shape": (selective(policy(save("matmul", shape=["_", 64]))), 8),
    "every second by shape": (selective(policy(alternate("matmul", shape=["_", 64]))), 10),
    "the first call": (selective(policy(save("aten.mm", call={"index": 0}, module="self_attn.*"))), 4),
    "by default": (selective(policy(default="save")), 0),
}
CASES = [
    *((name, whole, True) for name in VALUES),
    *(
        (name, way, first)
        for name in ("full", "in turn")
        for way in (in_place, each_replaced)
        for first in (True, False)
    ),
    *((name, each_in_place, first) for name in ("full", "one linear", "in turn") for first in (True, False)),
    ("every product", each_in_place, True),
    ("in the first block", each_in_place, True),
    ("full", each_forward, True),
    ("one linear", each_forward, True),
    ("one linear", in_a_function, True),
    ("in turn", whole, False),
]


@pytest.mark.parametrize(("name", "way", "apply_first"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_gradients_graphs_and_the_report(name: str, way: Way, apply_first: int) -> None:
    value, again = VALUES[name]
    skip_if_results_are_not_told(value)
    reference, without = without_us(way)
    ours, log, model = compiled(value, way, apply_first=apply_first)
    assert_same(clean(reference), clean(ours))
    if way in AT_ONCE:
        assert (without.products(), log.products()) == ([2 * PER_BLOCK], [2 * PER_BLOCK + again])
    else:
        assert set(without.products()) == {PER_BLOCK}
        each = {PER_BLOCK, PER_BLOCK + 6} if name == "in the first block" else {PER_BLOCK + again // 2}
        assert set(log.products()) == each
    report = sac.report(model)
    told = {kind.regions: list(kind.traced.rules.values()) for kind in report.kinds if kind.traced is not None}
    if (
        apply_first and name != "by default" and way is not each_forward
    ):  # what is compiled there is the region, out of the report's sight
        assert told == eager_hits(value)
    assert all(kind.calls == 0 and kind.kept_bytes == 0 for kind in report.kinds)


def test_eager_and_compiled_decide_alike() -> None:
    model = sac.apply(built(llama_stack), value := selective(policy(alternate("matmul"))))
    model(*tokens()).sum().backward()
    rows = [row for row in decisions_of(model) if row.op == "aten.mm.default"]
    saved = {row.module for row in rows if row.decision == "save"}
    assert saved == {"self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"}
    named = selective(policy(save("matmul", module="{" + ",".join(sorted(saved)) + "}")))
    logs = [compiled(one, whole)[1] for one in (value, named)]
    by_turn, by_name = ([node.args for node in log.forward[0].graph.nodes if node.op == "output"] for log in logs)
    assert str(by_turn) == str(by_name)


def test_alike_blocks_are_compiled_once() -> None:
    """As without us; past `recompile_limit` (8) Dynamo gives up on the ninth block."""
    _, plain = train_compiled(lambda: llama_stack(10), nothing, compile_it=each_in_place)
    _, log, _ = compiled(GATE, each_in_place, build=lambda: llama_stack(10))
    assert len(plain.forward) == len(log.forward) == 1


# -- Models


class Inside(nn.Module):
    """A model that holds the stack, so that the blocks lie deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama_stack()
        self.head = nn.Linear(32, 32)
        self.aliases = [block.mlp for block in self.inner.blocks]  # a second way to the same modules

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class ChecksItself(LlamaLikeBlock):
    """Calls torch's checkpoint on a part of itself, with what `sac.context_fn` gave."""

    contexts: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.contexts is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=self.contexts)

    def inner(self, x: Tensor) -> Tensor:
        return LlamaLikeBlock.forward(self, x)


class TwoWeights(nn.Module):
    """A block of two square weights; Dynamo allows no counter in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8) / 8**0.5) for _ in range(2))


class Routed(TwoWeights):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.a).softmax(-1).topk(2)
        return (x @ self.b).gather(1, chosen) * weights


class Written(TwoWeights):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a
        y.relu_()
        z = y @ self.b
        z.add_(1.0)
        return z.sigmoid() * y


class FourProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x @ self.weight).sin()
        return x


class Breaking(LlamaLikeBlock):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def contexts_inside(model: nn.Module) -> None:
    for block in model.blocks:
        block.contexts = sac.context_fn(GATE["policy"], module=block)


def checks_itself() -> nn.Module:
    return Stack(ChecksItself(), ChecksItself())


# By name: the model, what puts sac on it, how it is compiled, and the products in each backward graph.
MODELS: dict[str, tuple[Any, Any, Way, int]] = {
    "below the model": (Inside, lambda m: sac.apply(m.inner, GATE), whole, 41),  # the head reads the last product
    "context_fn": (Inside, lambda m: install(m.inner, GATE, "context_fn with module"), whole, 41),
    "context_fn without module": (llama_stack, lambda m: install(m, PRODUCTS, "context_fn"), whole, 28),
    "context_fn inside, whole": (checks_itself, contexts_inside, whole, 38),
    "context_fn inside, blocks": (checks_itself, contexts_inside, each_in_place, 19),
    "one block": (LlamaLikeBlock, lambda m: sac.apply(m, {"mode": "selective", "policy": GATE["policy"]}), whole, 19),
    "dropout, full": (lambda: with_dropout(llama_stack(), 0.3), lambda m: sac.apply(m, FULL), whole, 42),
    "dropout, products": (lambda: with_dropout(llama_stack(), 0.3), lambda m: sac.apply(m, PRODUCTS), whole, 28),
    "routing": (lambda: Stack(Routed()), lambda m: sac.apply(m, FULL), whole, 6),
    "writes, full": (lambda: Stack(Written(), Written()), lambda m: sac.apply(m, FULL), whole, 12),
    "writes, products": (lambda: Stack(Written(), Written()), lambda m: sac.apply(m, PRODUCTS), whole, 8),
}


@pytest.mark.parametrize(("build", "put", "way", "products"), MODELS.values(), ids=MODELS.keys())
def test_models(build: Any, put: Any, way: Way, products: int) -> None:
    inputs = tokens if build in (Inside, LlamaLikeBlock, llama_stack, checks_itself) or products > 12 else square
    reference, _ = train_compiled(build, nothing, make_input=inputs, compile_it=way, steps=2)
    ours, log = train_compiled(build, put, make_input=inputs, compile_it=way, steps=2)
    assert set(log.products()) == {products}
    assert sum(count(graph, TOPK) for graph in log.backward) == 0  # routing is never run again
    assert_same(reference, ours)


@pytest.mark.parametrize("family", ["bert", "gpt2", "qwen3_moe", "t5"])
def test_a_hugging_face_model_is_one_graph(family: str) -> None:
    runs = []
    for value in ("none", "full", "selective"):
        torch._dynamo.reset()
        log = Compiled()
        layers = {"num_layers": 1, "num_decoder_layers": 1} if family == "t5" else {"num_hidden_layers": 1}
        model, inputs = tiny(family, use_cache=False, **layers)
        if family == "gpt2":  # it has no loss type and logs that, which may break the graph
            model.loss_type = "ForCausalLM"
        sac.apply(model, value)
        loss = torch.compile(model, backend=log.backend, fullgraph=True)(**inputs).loss
        loss.backward()
        seen = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        runs.append((seen | {"loss": loss.detach()}, log, model))
    (expected, plain, _), (full, again, _), (chosen, some, model) = runs
    assert_same(expected, full)
    assert_same(expected, chosen)
    assert plain.products() <= some.products() < again.products()  # lists of one number
    traced = [kind.traced for kind in sac.report(model).kinds]
    assert sum(one.saved for one in traced) > 0 < sum(one.recomputed for one in traced)
    assert [count(log.backward[0], TOPK) for log in (again, some)] == [0, 0]


class Flexible(nn.Module):
    """A block with flex attention, and a product before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs())
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.gpu  # torch 2.13 has no backward of flex attention on the CPU
@pytest.mark.parametrize(
    ("value", "attentions"),
    [(FULL, 2), (selective(policy(save("attention"))), 0), (PRODUCTS, 2)],
    ids=["full", "attention", "products"],
)
def test_flex_attention(value: Any, attentions: int) -> None:
    """The save-set `attention` means the higher-order op: it is not in the backward graph then."""
    runs = []
    for config in ("none", value):
        torch._dynamo.reset()
        log = Compiled()
        model = sac.apply(built(lambda: Stack(Flexible(), Flexible()), "cuda"), config)
        runs.append(lengths(model, torch.compile(model, backend=log.backend, fullgraph=True), (8,), "cuda"))
    assert count(log.backward[0], torch.ops.higher_order.flex_attention) == attentions
    assert_same(*runs)


def lengths(model: nn.Module, run: Any, sizes: tuple[int, ...], device: str = "cpu") -> dict[str, Tensor]:
    """One step for each length."""
    seen: dict[str, Tensor] = {}
    for step, size in enumerate(sizes):
        model.zero_grad()
        torch.manual_seed(step)
        (x,) = tokens(device, length=size)
        out = run(x.requires_grad_())
        out.square().sum().backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        seen |= {f"{step} output": out.detach().clone(), f"{step} input": x.grad}
    return seen


@pytest.mark.parametrize(("dynamic", "value", "again"), [(None, IN_TURN, 3), (True, FULL, 7)], ids=["automatic", "all"])
def test_as_many_graphs_as_without_us_for_several_lengths(dynamic: bool | None, value: Any, again: int) -> None:
    """With dropout `full` runs the last product again too: its result is an argument of the draw."""
    runs = []
    for config in ("none", value):
        torch._dynamo.reset()
        log = Compiled()
        model = sac.apply(built(lambda: with_dropout(llama_stack(1), 0.2)), config)
        run = torch.compile(model, backend=log.backend, fullgraph=True, dynamic=dynamic)
        runs.append((lengths(model, run, (8, 12, 6)), log))
    (expected, plain), (ours, log) = runs
    assert len(log.forward) == len(plain.forward) == (1 if dynamic else 2)
    assert log.products() == [PER_BLOCK + again] * len(log.forward)
    assert_same(expected, ours)


@pytest.mark.parametrize("value", [FULL, IN_TURN], ids=["full", "in turn"])
def test_a_backend_that_runs_the_graph_as_it_is(value: Any) -> None:
    """A region is torch's checkpoint under our eager modes then, and torch puts no random state back."""
    runs = []
    for config, backend in (("none", None), (value, "eager")):
        torch._dynamo.reset()
        model = sac.apply(built(lambda: with_dropout(llama_stack(1), 0.2)), config)
        run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        runs.append(lengths(model, run, (8, 12)))
    assert_same(*runs)


@pytest.mark.parametrize(
    ("way", "value"),
    [(lambda model, _: torch.compile(model, mode="reduce-overhead", fullgraph=True), IN_TURN), (each_in_place, FULL)],
    ids=["whole", "blocks"],
)
def test_inductor(way: Way, value: Any) -> None:
    """In float64: inductor fuses other ops where other values are at hand, so that sums have another order."""
    with new_tensors_in(torch.float64):
        runs = [
            train_compiled(lambda: llama_stack(1), put, compile_it=lambda model, _: way(model, "inductor"))[0]
            for put in (nothing, lambda model: sac.apply(model, value))
        ]
    assert_nearly_same(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("run", [plain, whole_llama, per_block], ids=["eager", "whole", "per block"])
def test_modules_that_are_saved_as_a_whole(run: Callable[..., Any]) -> None:
    options = {} if run is plain else {"backend": "aot_eager"}
    parts = {"mode": "selective", "policy": policy({"module": "{self_attn,mlp}", "do": "save"})}
    reference, full, ours = (run(value, **options) for value in ("none", "full", parts))
    assert differences(ours, reference) == []
    assert reference.flops == ours.flops < full.flops


# -- Before and after


def test_remove_after_compile_is_seen() -> None:
    torch._dynamo.reset()
    log = Compiled()
    model = sac.apply(built(llama_stack), FULL)
    run = whole(model, log.backend)
    run(*tokens()).sum().backward()
    sac.remove(model)
    run(*tokens()).sum().backward()
    assert log.products() == [2 * PER_BLOCK + 12, 2 * PER_BLOCK]


def test_forward_without_grad_compiles_to_the_plain_one() -> None:
    torch._dynamo.reset()
    model, plain, x = sac.apply(built(llama_stack), FULL), built(llama_stack), tokens()
    with torch.no_grad():
        assert torch.equal(whole(model, "aot_eager")(*x), plain(*x))


def test_a_rule_on_a_module_cannot_see_into_a_forward_that_was_compiled_before() -> None:
    torch._dynamo.reset()
    model = built(llama_stack)
    each_forward(model, "aot_eager")
    sac.apply(model, {**GATE, "strict": True})
    with pytest.raises(sac.SacError, match='rule "rule-0" matched no op in any region of the model'):
        model(*tokens())


# -- Backward


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).sin()
        return x + self.b(hidden * hidden.pow(2).mean(-1, keepdim=True)).tanh()


def small_stack() -> nn.Module:
    return Stack(Small(), Small())


def stepped(model: nn.Module, run: Callable[[Tensor], Tensor], *, twice: bool = False) -> dict[str, Tensor]:
    seen = {}
    for step in range(3):
        model.zero_grad()
        torch.manual_seed(step)
        x = torch.randn(4, 8, requires_grad=True)
        loss = run(x).square().sum()
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()} | {f"{step} x": x.grad}
    return seen


def eager_under_compiled_autograd(model: nn.Module) -> dict[str, Tensor]:
    """Recomputation runs in eager, as forward did, though all around it is traced."""
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        return stepped(model, model)


def compiled_autograd(model: nn.Module) -> dict[str, Tensor]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        return stepped(model, torch.compile(model, backend="aot_eager"))


def donated_buffers(model: nn.Module, *, inside: bool = False) -> dict[str, Tensor]:
    """Compiled backwards that may overwrite what was saved for them, in the graph and below an eager region."""
    with functorch_config.patch(donated_buffer=True):
        for block in model.blocks:
            (block.a if inside else block).compile(backend="aot_eager")
        return stepped(model, model)


def backward_twice(model: nn.Module) -> dict[str, Tensor]:
    return stepped(model, whole(model, "aot_eager"), twice=True)


@in_pairs(
    backward={
        "eager, compiled autograd": eager_under_compiled_autograd,
        "compiled autograd": compiled_autograd,
        "donated buffers": donated_buffers,
        "donated buffers inside": functools.partial(donated_buffers, inside=True),
        "twice": backward_twice,
    },
    value={"full": FULL, "products": PRODUCTS, "reentrant": {**FULL, "use_reentrant": True}},
    unless=lambda backward, value: "use_reentrant" in value and backward is not eager_under_compiled_autograd,
)
@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
def test_backward(backward: Any, value: Any) -> None:
    runs = []
    for config in ("none", value):
        torch._dynamo.reset()
        runs.append(backward(sac.apply(built(small_stack), config)))
    assert_same(*runs)


@pytest.mark.parametrize("value", [FULL, PRODUCTS], ids=["full", "products"])
def test_a_region_with_a_graph_break_runs_in_eager(value: Any) -> None:
    """No graph can hold half a region: it is torch's checkpoint under our modes, on every op as without compile."""
    runs = []
    for config, compiles in (("none", False), (value, False), (value, True)):
        torch._dynamo.reset()
        model = sac.apply(built(lambda: Stack(Breaking(), Breaking())), config)
        run = torch.compile(model, backend="aot_eager") if compiles else model
        (x,) = tokens()

        def step(run: Any = run, x: Tensor = x) -> Tensor:
            loss = run(x).square().sum()
            forward_done()
            loss.backward()
            return loss

        runs.append(outcome(step, model, compiled=True))
    reference, eager, ours = runs
    assert differences(eager, reference) == differences(ours, reference) == []
    assert reference.flops < ours.flops
    assert ours.kept_bytes < reference.kept_bytes
    assert "left in eager, with the same decisions; their bytes are not counted" in str(sac.report(model))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(model, "aot_eager")(*tokens())


@pytest.mark.parametrize("first", ["compile", "apply"])
def test_a_compiled_block_with_a_graph_break_is_told_once(first: str) -> None:
    torch._dynamo.reset()
    model, (x,) = built(lambda: Stack(Breaking(), Breaking())), tokens()
    steps = [lambda: [block.compile(backend="aot_eager") for block in model.blocks], lambda: sac.apply(model, FULL)]
    for one in steps if first == "compile" else reversed(steps):
        one()
    with pytest.warns(SacWarning) as caught:
        model(x).sum().backward()
    (told,) = [str(one.message) for one in caught if issubclass(one.category, SacWarning)]
    assert told.startswith("blocks.0: it was compiled, but runs uncompiled, since there is a graph break in it: ")
    assert "User-inserted graph break" in told


@pytest.mark.parametrize(("build", "stance"), [(lambda: Stack(Breaking()), "force_eager"), (llama_stack, "default")])
def test_a_block_that_runs_in_eager_by_request_is_not_told(build: Any, stance: str) -> None:
    torch._dynamo.reset()
    model, (x,) = sac.apply(built(build), FULL), tokens()
    for block in model.blocks:
        block.compile(backend="eager")
    with torch.compiler.set_stance(stance), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).sum().backward()
    assert [str(one.message) for one in caught if issubclass(one.category, SacWarning)] == []
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(("budget", "value", "products"), [(0.05, PRODUCTS, 28), (0.05, FULL, 40), (0.0, PRODUCTS, 41)])
def test_a_memory_budget_is_told_and_has_no_say_unless_it_is_zero(budget: float, value: Any, products: int) -> None:
    with functorch_config.patch(activation_memory_budget=budget), pytest.warns(SacWarning) as caught:
        ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=whole)
    assert log.products() == [products]
    assert_same(without_us(whole)[0], ours)
    wins = "it has no effect in regions" if budget else "at 0 it takes precedence: everything is recomputed"
    told = {str(one.message) for one in caught if issubclass(one.category, SacWarning)}
    assert len(told) == 1
    assert f"it is {budget} where regions of sac are compiled; {wins}" in told.pop()


# -- The report


def test_text_of_a_compiled_model() -> None:
    _, _, model = compiled(IN_TURN, whole)
    report = sac.report(model)
    (kind,) = report.kinds
    assert kind.traced is not None
    assert kind.traced.saved == 5  # attention, and the 1st, 3rd, 5th and 7th of seven products
    assert str(report) == (
        "activation checkpointing: selective, 2 regions\n"
        f"blocks.0-1 (x2): compiled; decisions: save 5 calls, recompute {kind.traced.recomputed}\n"
        "  rule rule-0: 1 call\n"
        "  rule rule-1: 7 calls\n"
        "  the partitioner chooses what it keeps of these; their bytes are not counted here"
    )


def test_kinds_of_one_table_and_rules_without_a_hit() -> None:
    """Blocks that differ in structure, under the same rules; nothing is traced before the first step."""

    def build() -> nn.Module:
        model = llama_stack()
        model.blocks[1].mlp = nn.Linear(32, 32, bias=False)
        return model

    value = selective(policy(save("matmul"), save("convolution")))
    assert [kind.traced for kind in sac.report(sac.apply(built(build), value)).kinds] == [None] * 2
    applied: list[nn.Module] = []
    train_compiled(build, lambda m: applied.append(sac.apply(m, value)), compile_it=whole)
    report = sac.report(applied[0])
    assert [kind.traced.saved for kind in report.kinds if kind.traced] == [7, 5]
    assert report.zero_hit_rules == ("rule-1",)


def test_rules_on_results_that_torch_does_not_show_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 is."""
    monkeypatch.setattr(sys.modules[checkpoint_contexts.__module__], "SHOWS_RESULTS_TO_POLICIES", False)
    value = selective(policy(save("attention"), save("matmul", shape=["_", 64])))
    with pytest.warns(SacWarning, match=r'rule "rule-1" matches on the shape, dtype or size of results'):
        train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=whole)


@pytest.mark.parametrize(
    ("rule", "saved"),
    [
        (save("aten.mm", call={"index": 1}), 1),
        (save("aten.mm", call={"index": [0, 3]}), 2),
        (save("aten.mm", call={"every": 2, "offset": 1}), 2),
        ({"ops": "matmul", "do": "offload"}, 4),
    ],
    ids=str,
)
def test_calls_of_an_op_in_one_module_are_counted_and_offloads_are_saved(rule: Any, saved: int) -> None:
    skip_if_results_are_not_told(rule)
    model = sac.apply(built(lambda: Stack(FourProducts())), selective(policy(rule)))
    plain = built(lambda: Stack(FourProducts()))
    for one in (torch.compile(model, backend="aot_eager"), plain):
        torch.manual_seed(0)
        one(*square()).sum().backward()
    assert torch.equal(model.blocks[0].weight.grad, plain.blocks[0].weight.grad)
    (kind,) = sac.report(model).to_dict()["kinds"]
    offloads = rule["do"] == "offload"
    traced = {"saved": saved, "recomputed": 8 - saved, "rules": {"rule-0": saved}, "offloads": offloads}
    assert (kind["traced"], kind["compiled_graphs"]) == (traced, 0)
    text = "a compiled graph offloads nothing: what rules offload is saved on the device"
    assert (text in str(sac.report(model))) == offloads
