"""`engine: auto`: replay where it is as good as rerun in every respect, and rerun without a word where it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from sac.errors import RegionError, SacWarning
from tests.support.blocks import FULL, FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.recording import Recorder
from tests.support.replay_kernels import FromOutside, tanh_into, twice_in_place
from tests.support.training import assert_same, built, train
from tests.support.ways import POLICIES

pytestmark = pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")

Body = Callable[[FunctionBlock, Tensor], Tensor]
Run = Callable[[Stack, Tensor], Tensor]
MATMULS = selective(POLICIES["matmuls"])


def two_products(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


def stack(body: Body = two_products, value: Any = "none", count: int = 1) -> Stack:
    return sac.apply(built(lambda: Stack(*(FunctionBlock(body) for _ in range(count)))), value)


def engines(model: nn.Module) -> tuple[str, str]:
    """What the report says: the last call's engine, and why the kind is not replayed."""
    (kind,) = sac.report(model).kinds
    return kind.engine, kind.no_replay


def assert_same_in_three_steps(body: Body, model: Stack) -> None:
    """Hold that training is as without us, and that nothing warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        assert_same(train(stack(body), steps=3, make_input=square), train(model, steps=3, make_input=square))


CHOICES: dict[str, tuple[Any, str, int]] = {
    # name: (value, the engine in the report, how often Python runs in three steps)
    "matmuls": (MATMULS, "replay", 3),
    "matmuls, rerun": ({**MATMULS, "engine": "rerun"}, "rerun", 6),
    "full": (FULL, "", 6),
    "no rules": (selective(policy()), "", 6),
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_auto_replays(name: str) -> None:
    value, engine, runs = CHOICES[name]
    model = stack(value=value)
    assert_same_in_three_steps(two_products, model)
    assert (engines(model), model.blocks[0].runs) == ((engine, ""), runs)


# -- Where replay gives way

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)  # it has no version counter, so a tape that reads it is not replayed


def is_made_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    """As in a compiled function: autograd saves what no mode has seen."""
    h = ((x @ block.a).sin() @ block.b) * 0.1
    guard = torch._C._DisableTorchDispatch()
    out = h.exp()
    del guard
    return out


def was_made_in_inference_mode(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a + OFFSET).sin() @ block.b


def goes_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    """NumPy writes to a product, which no dispatcher hears of and no version counter tells."""
    h = x @ block.a
    h.detach().numpy()[:] *= 2
    return (h.cos() @ block.b).sin() * x


def results_written_to_arguments(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        values, places = torch.empty(8, 1), torch.empty(8, 1, dtype=torch.long)
        torch.max(x, 1, keepdim=True, out=(values, places))
    return (x @ block.a).sin() * values * places


def lies_elsewhere(block: FunctionBlock, x: Tensor) -> Tensor:
    other = x.detach() * 3
    moved = torch.empty(0).set_(other)
    other.add_(1)
    return (x @ block.a).sin() * moved


def takes_a_storage(block: FunctionBlock, x: Tensor) -> Tensor:
    doubled = x.detach() * 2
    return (x @ block.a).sin() * torch.empty(0).set_(doubled.untyped_storage(), 0, doubled.shape, doubled.stride())


NO_OP_MADE_IT = "reads a tensor that no op made and that is no input, parameter or module attribute"
GIVES_WAY: dict[Body, str] = {
    is_made_unseen: f"autograd {NO_OP_MADE_IT}",
    was_made_in_inference_mode: f"aten.add.Tensor {NO_OP_MADE_IT}",
    goes_unseen: "saved tensor 2 (float32[8, 8]) is replayed with other values than forward had",
    results_written_to_arguments: "aten.max.dim_max reads memory that no op has written to",
    lies_elsewhere: "aten.set_.source_Tensor gives a tensor other memory",
    takes_a_storage: "aten.set_.source_Storage_storage_offset takes a storage",
}


@pytest.mark.parametrize("body", GIVES_WAY, ids=lambda body: body.__name__)
def test_giving_way_is_reported_and_nothing_else_says_it(body: Body) -> None:
    """Unless replay was asked for: then a warning says it, once."""
    model, why = stack(body, selective(POLICIES["nothing"])), GIVES_WAY[body]
    assert_same_in_three_steps(body, model)
    assert engines(model) == ("rerun", why)
    assert model.blocks[0].runs > 3
    assert f"run again as Python, not replayed: {why}" in str(sac.report(model))
    asked = stack(body, selective(POLICIES["nothing"], engine="replay", verify="always"))
    with pytest.warns(SacWarning) as said:
        ours = train(asked, steps=3, make_input=square)
    assert_same(train(stack(body), steps=3, make_input=square), ours)
    assert [str(one.message).startswith(f"blocks.0: replay cannot be used here: {why}") for one in said] == [True]


def test_a_tensor_from_outside_that_is_written_to_before_backward_is_an_error() -> None:
    model = stack(lambda block, x: (x @ block.a + block.outside).sin() @ block.b, MATMULS)
    model.blocks[0].register_buffer("outside", torch.ones(8, 8))
    out = model(torch.randn(8, 8))
    model.blocks[0].outside.fill_(1)
    told = r"outside the region \(float32\[8, 8\]\) was changed in place after the forward"
    with pytest.raises(RegionError, match=told):
        out.square().sum().backward()


def test_below_hooks_and_in_a_region_auto_is_rerun() -> None:
    model = stack(value=MATMULS)
    for _ in range(2):
        with save_on_cpu():
            out = model(*square())
        out.sum().backward()
        assert engines(model) == ("rerun", "")
        sac.checkpoint(model, *square()).sum().backward()
        assert engines(model) == ("rerun", "")
    model(*square()).sum().backward()
    assert engines(model) == ("replay", "")


# -- Where replay gives way, all is exact, what the policy saved is held, and its ops do not run again


def directly(model: Stack, x: Tensor) -> Tensor:
    return model(x)


def trained(model: Stack, run: Run = directly, *, forwards: int = 1, twice: bool = False) -> tuple[list[Any], Any]:
    """Of three steps: gradients and the generator's state, and the ops of the backwards.

    Each step runs `forwards` before the first backward.
    """
    numbers, ops = [], []
    for step in range(3):
        torch.manual_seed(step)
        inputs = [square()[0].requires_grad_() for _ in range(forwards)]
        losses = [run(model, x).square().sum() for x in inputs]
        with Recorder() as seen:
            for loss in losses:
                if twice:
                    loss.backward(retain_graph=True)
                loss.backward()
        found = [x.grad for x in inputs] + [one.grad for one in model.parameters()]
        numbers += [*(one.clone() for one in found if one is not None), torch.get_rng_state()]
        ops.append(seen.ops)
    return numbers, ops


def assert_exact(body: Body, value: Any, run: Run = directly, **more: Any) -> None:
    expected, _ = trained(stack(body, count=2), run, **more)
    assert all(map(torch.equal, expected, trained(stack(body, value, 2), run, **more)[0]))


# -- In the same backward, in those still to come, and below a checkpoint


def offset(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a + OFFSET).sin() @ block.a).cos() * x


ON_EACH_RULE = pytest.mark.parametrize("rule", [save("matmul"), save("aten.sin"), alternate("*")])


@ON_EACH_RULE
@pytest.mark.parametrize(
    ("outer", "body"),
    [
        (sac.checkpoint, offset),
        (sac.checkpoint, goes_unseen),
        (lambda model, x: torch_checkpoint(model, x, use_reentrant=False), offset),
    ],
)
def test_below_a_checkpoint_each_call_hands_it_the_same_in_both_passes(outer: Run, body: Any, rule: Any) -> None:
    """Regions that begin under replay and are found out in the first forward, or in the first backward.

    torch's checkpoint hands each value out once, so that what is found out in backward is an error of its own.
    """
    assert_exact(body, selective(policy(rule), engine="replay"), outer)


@ON_EACH_RULE
def test_a_value_that_differs_in_one_backward_is_trusted_in_none_after_it(rule: dict[str, Any]) -> None:
    """Two forwards come first, and only the first of them is compared."""
    assert_exact(goes_unseen, selective(policy(rule), engine="replay"), forwards=2)


# -- What was saved does not run again, in the first backward either


def attends(block: FunctionBlock, x: Tensor) -> Tensor:
    """Products, attention and draws, in part before the tape is found out and in part after it."""
    h = F.dropout(x @ block.a, 0.5) + OFFSET
    heads = h.view(1, 2, 4, 8)
    h = F.scaled_dot_product_attention(heads, heads.sin(), heads).reshape(8, 8)
    values, index = (h @ block.b).sin().topk(4)
    return F.dropout(torch.bernoulli(values.sigmoid()) * values, 0.3) @ block.b[:4] + h.gather(1, index).sum()


def fills_memory(block: FunctionBlock, x: Tensor) -> Tensor:
    return (tanh_into((x @ block.a).cos(), torch.empty_like).sin() @ block.b).exp() * 2


def comes_from_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return FromOutside.apply((x @ block.a).cos()).sin() @ block.b


def overwrites(block: FunctionBlock, x: Tensor) -> Tensor:
    """A kernel that tells autograd overwrites the first product; an op, the second."""
    h = x @ block.a
    out = (h * 1.5).sin() * twice_in_place(h).cos()
    return (out @ block.b).mul_(2).sin()


MIXED = policy(save(["matmul", "attention", "aten.native_dropout", "aten.bernoulli", "aten.topk"]))
SAVED = ("aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.bernoulli.default", "aten.bernoulli.p")
SERVED: dict[Body, int] = {  # products that run in the first backward beyond those of a model without us
    attends: 0,
    fills_memory: 0,
    comes_from_outside: 0,
    goes_unseen: 0,
    overwrites: 1,
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("engine", ["auto", "replay"])
@pytest.mark.parametrize("body", SERVED, ids=lambda body: body.__name__)
def test_saved_ops_do_not_run_in_the_first_backward_either(body: Body, engine: str, twice: bool) -> None:
    expected, plain = trained(stack(body), twice=twice)
    numbers, ops = trained(stack(body, selective(MIXED, engine=engine)), twice=twice)
    assert all(map(torch.equal, expected, numbers))
    assert ops[0]["aten.mm.default"] - plain[0]["aten.mm.default"] == SERVED[body] * (1 + twice)
    assert not any(ops[0][name] for name in SAVED)
