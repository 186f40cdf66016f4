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

import sac
from sac.engine.compiled import checkpoint_contexts
from sac.errors import SacWarning
from tests.stacks.composition import differences
from tests.stacks.composition import train as measured
from tests.support.blocks import FULL, Stack, alternate, install, policy, save, selective, square, tokens, with_dropout
from tests.support.compiling import (
    Compiled,
    LeanBlock,
    count,
    lean_stack,
    nothing,
    skip_if_results_are_not_told,
    train_compiled,
)
from tests.support.model_zoo import tiny
from tests.support.training import Backward, assert_same, built, plain_backward, train

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


def clean(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in seen.items()}


@functools.cache
def without_us(way: Way) -> tuple[dict[str, Tensor], Compiled]:
    return train_compiled(lean_stack, nothing, compile_it=way)


def compiled(value: Any, way: Way) -> tuple[Any, Compiled, nn.Module]:
    """What training gives, its graphs, and the model; sac must not warn of anything."""
    models: list[nn.Module] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        seen, log = train_compiled(lean_stack, lambda m: models.append(sac.apply(m, value)), compile_it=way)
    return seen, log, models[0]


def eager_hits(value: Any) -> dict[str, list[int]]:
    model = sac.apply(built(lean_stack), value)
    model(*tokens())
    hits = {kind.regions: [use.hits for use in kind.rules if use.rule != "default"] for kind in sac.report(model).kinds}
    return {regions: [number for number in counts if number] for regions, counts in hits.items()}


# By name: a value, and how many products are run again in both blocks.
VALUES: dict[str, tuple[Any, int]] = {
    "full": (FULL, 12),
    "in turn": (IN_TURN, 6),
    "one linear": (GATE, 10),
    "in the first block": (selective(policy(save("attention"), save("matmul", layers={"first": 1}))), 6),
    "every second by shape": (selective(policy(alternate("matmul", shape=["_", 64]))), 10),
    "the first call": (selective(policy(save("aten.mm", call={"index": 0}, module="self_attn.*"))), 4),
    "whole modules": (selective(policy({"module": "{self_attn,mlp}", "do": "save"})), 0),
    "by default": (selective(policy(default="save")), 0),
}
CASES = [*((name, whole) for name in VALUES), ("in turn", in_place), ("in the first block", each_in_place)]


@pytest.mark.parametrize(("name", "way"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_gradients_graphs_and_the_report(name: str, way: Way) -> None:
    """`sac.apply` comes first; after compiling: test_wrong_order."""
    value, again = VALUES[name]
    skip_if_results_are_not_told(value)
    reference, without = without_us(way)
    ours, log, model = compiled(value, way)
    assert_same(clean(reference), clean(ours))
    if way in (whole, in_place):
        assert (without.products(), log.products()) == ([2 * PER_BLOCK], [2 * PER_BLOCK + again])
    else:
        assert set(without.products()) == {PER_BLOCK}
        each = {PER_BLOCK, PER_BLOCK + 6} if name == "in the first block" else {PER_BLOCK + again // 2}
        assert set(log.products()) == each
    report = sac.report(model)
    told = {kind.regions: list(kind.traced.rules.values()) for kind in report.kinds if kind.traced is not None}
    if name not in ("by default", "whole modules"):  # they count other things in eager
        assert told == eager_hits(value)
    assert all(kind.calls == 0 and kind.kept_bytes == 0 for kind in report.kinds)


class Inside(nn.Module):
    """A model that holds the stack, so that the blocks lie deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lean_stack()
        self.head = nn.Linear(32, 32)
        self.aliases = [block.mlp for block in self.inner.blocks]  # a second way to the same modules

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


class Written(nn.Module):
    """A block that writes to what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8) / 8**0.5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a
        y.relu_()
        z = y @ self.b
        z.add_(1.0)
        return z.sigmoid() * y


class Breaking(LeanBlock):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


# By name: the model, what puts sac on it, and the products in its backward graph.
MODELS: dict[str, tuple[Any, Any, int]] = {
    # the head reads the last product
    "below the model": (Inside, lambda m: install(m.inner, GATE, "context_fn with module"), 41),
    "writes, full": (lambda: Stack(Written(), Written()), lambda m: sac.apply(m, FULL), 12),
    "writes, products": (lambda: Stack(Written(), Written()), lambda m: sac.apply(m, PRODUCTS), 8),
}


@pytest.mark.parametrize(("build", "put", "products"), MODELS.values(), ids=MODELS.keys())
def test_models(build: Any, put: Any, products: int) -> None:
    inputs = tokens if products > 12 else square
    reference, _ = train_compiled(build, nothing, make_input=inputs, steps=2)
    ours, log = train_compiled(build, put, make_input=inputs, steps=2)
    assert log.products() == [products]
    assert_same(reference, ours)


def test_a_hugging_face_model_is_one_graph() -> None:
    runs = []
    for value in ("none", "selective"):
        torch._dynamo.reset()
        log = Compiled()
        model, inputs = tiny("qwen3_moe", use_cache=False, num_hidden_layers=1, num_experts=2)
        sac.apply(model, value)
        loss = torch.compile(model, backend=log.backend, fullgraph=True)(**inputs).loss
        loss.backward()
        seen = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        runs.append((seen | {"loss": loss.detach()}, log, model))
    (expected, plain, _), (chosen, ours, model) = runs
    assert_same(expected, chosen)
    assert plain.products() <= ours.products()  # lists of one number
    traced = [kind.traced for kind in sac.report(model).kinds]
    assert sum(one.saved for one in traced) > 0 < sum(one.recomputed for one in traced)
    assert count(ours.backward[0], TOPK) == 0


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
def test_flex_attention() -> None:
    """The save-set `attention` means the higher-order op: it is not in the backward graph then."""
    runs = []
    for config in ("none", selective(policy(save("attention")))):
        torch._dynamo.reset()
        log = Compiled()
        model = sac.apply(built(lambda: Stack(Flexible(), Flexible()), "cuda"), config)
        runs.append(lengths(whole(model, log.backend), 8, device="cuda"))
    assert count(log.backward[0], torch.ops.higher_order.flex_attention) == 0
    assert_same(*runs)


def lengths(run: nn.Module, *sizes: int, device: str = "cpu") -> dict[str, Tensor]:
    """One step for each length."""
    left = iter(sizes)
    make_input = lambda device: tokens(device, length=next(left))  # noqa: E731
    return clean(train(run, steps=len(sizes), make_input=make_input, device=device))


def test_as_many_graphs_as_without_us_for_several_lengths() -> None:
    runs = []
    for config in ("none", IN_TURN):
        torch._dynamo.reset()
        log = Compiled()
        model = sac.apply(built(lambda: with_dropout(lean_stack(1), 0.2)), config)
        runs.append((lengths(whole(model, log.backend), 8, 12, 6), log))
    (expected, plain), (ours, log) = runs
    assert len(log.forward) == len(plain.forward) == 2
    assert log.products() == [PER_BLOCK + 3] * 2
    assert_same(expected, ours)


@pytest.mark.parametrize("value", [FULL, IN_TURN], ids=["full", "in turn"])
def test_a_backend_that_runs_the_graph_as_it_is(value: Any) -> None:
    """A region is torch's checkpoint under our eager modes then, and torch puts no random state back."""
    runs = []
    for config, backend in (("none", None), (value, "eager")):
        torch._dynamo.reset()
        model = sac.apply(built(lambda: with_dropout(lean_stack(1), 0.2)), config)
        runs.append(lengths(whole(model, backend) if backend else model, 8, 12))
    assert_same(*runs)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x).sin()).tanh()


def steps_of(run: nn.Module, backward: Backward = plain_backward) -> dict[str, Tensor]:
    return train(run, steps=2, make_input=lambda device: (torch.randn(4, 8),), backward=backward)


def eager_under_compiled_autograd(model: nn.Module) -> dict[str, Tensor]:
    """Recomputation runs in eager, as forward did, though all around it is traced."""
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        return steps_of(model)


def compiled_autograd(model: nn.Module) -> dict[str, Tensor]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        return steps_of(torch.compile(model, backend="aot_eager"))


def donated_buffers(model: nn.Module) -> dict[str, Tensor]:
    """A compiled backward below an eager region that may overwrite what was saved for it."""
    with functorch_config.patch(donated_buffer=True):
        for block in model.blocks:
            block.a.compile(backend="aot_eager")
        return steps_of(model)


def backward_twice(model: nn.Module) -> dict[str, Tensor]:
    def twice(loss: Tensor, *_: Any) -> list[Tensor | None]:
        loss.backward(retain_graph=True)
        loss.backward()
        return []

    return steps_of(whole(model, "aot_eager"), twice)


REENTRANT = {**FULL, "use_reentrant": True}


@pytest.mark.parametrize(
    ("backward", "value"),
    [
        (eager_under_compiled_autograd, REENTRANT),
        (donated_buffers, PRODUCTS),
        *((one, value) for one in (compiled_autograd, backward_twice) for value in (FULL, PRODUCTS)),
    ],
)
@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
def test_backward(backward: Any, value: Any) -> None:
    runs = []
    for config in ("none", value):
        torch._dynamo.reset()
        runs.append(backward(sac.apply(built(lambda: Stack(Small())), config)))
    assert_same(*runs)


def test_a_region_with_a_graph_break_runs_in_eager() -> None:
    """No graph can hold half a region: it is torch's checkpoint under our modes, on every op as without compile."""
    runs = []
    for config in ("none", PRODUCTS):
        torch._dynamo.reset()
        model = sac.apply(built(lambda: Stack(Breaking(), Breaking())), config)
        run = torch.compile(model, backend="aot_eager")
        (x,) = tokens()
        runs.append(measured(model, lambda _, run=run, x=x: run(x).square().sum(), compiled=True))
    reference, ours = runs
    assert differences(ours, reference) == []
    assert reference.flops < ours.flops
    assert ours.kept_bytes < reference.kept_bytes
    assert "left in eager, with the same decisions; their bytes are not counted" in str(sac.report(model))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(model, "aot_eager")(*tokens())


@pytest.mark.parametrize("apply_first", [False, True])
def test_a_compiled_block_with_a_graph_break_is_told_once(apply_first: bool) -> None:
    torch._dynamo.reset()
    model, (x,) = built(lambda: Stack(Breaking(), Breaking())), tokens()
    if apply_first:
        sac.apply(model, FULL)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    if not apply_first:
        sac.apply(model, FULL)
    with pytest.warns(SacWarning) as caught:
        model(x).sum().backward()
    (told,) = [str(one.message) for one in caught if issubclass(one.category, SacWarning)]
    assert told.startswith("blocks.0: it was compiled, but runs uncompiled, since there is a graph break in it: ")
    assert "User-inserted graph break" in told


def test_the_report_of_blocks_that_differ_and_a_rule_without_a_hit() -> None:
    """Nothing is traced before the first step; the bytes that the partitioner keeps are not counted here."""

    def build() -> nn.Module:
        model = lean_stack()
        model.blocks[1].mlp = nn.Linear(32, 32, bias=False)
        return model

    value = selective(policy(save("matmul"), save("convolution")))
    assert [kind.traced for kind in sac.report(sac.apply(built(build), value)).kinds] == [None] * 2
    applied: list[nn.Module] = []
    train_compiled(build, lambda m: applied.append(sac.apply(m, value)), compile_it=whole)
    report = sac.report(applied[0])
    assert [kind.traced.saved for kind in report.kinds if kind.traced] == [7, 5]
    assert report.zero_hit_rules == ("rule-1",)
    assert "blocks.0: compiled; decisions: save 7 calls, recompute " in str(report)
    assert "the partitioner chooses what it keeps of these; their bytes are not counted here" in str(report)


def test_rules_on_results_that_torch_does_not_show_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 is."""
    monkeypatch.setattr(sys.modules[checkpoint_contexts.__module__], "SHOWS_RESULTS_TO_POLICIES", False)
    value = selective(policy(save("attention"), save("matmul", shape=["_", 64])))
    with pytest.warns(SacWarning, match=r'rule "rule-1" matches on the shape, dtype or size of results'):
        train_compiled(lambda: lean_stack(1), lambda m: sac.apply(m, value), compile_it=whole)


def test_what_rules_offload_is_saved_on_the_device() -> None:
    model = sac.apply(built(lambda: lean_stack(1)), selective(policy({"ops": "matmul", "do": "offload"})))
    torch.compile(model, backend="aot_eager")(*tokens()).sum().backward()
    (kind,) = sac.report(model).to_dict()["kinds"]
    assert (kind["traced"]["rules"], kind["traced"]["offloads"]) == ({"rule-0": 7}, True)
    text = "a compiled graph offloads nothing: what rules offload is saved on the device"
    assert text in str(sac.report(model))
