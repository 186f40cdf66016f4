"""With and without the library: the same numbers, kept bytes, report, ops in backward and FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from tests.support.blocks import FunctionBlock, Stack, llama_stack, square, tokens, with_dropout
from tests.support.native_engine import assert_same_with_library, needs_library, observe, recorded, with_library
from tests.support.replay_programs import ON_EACH, POLICIES, applied, block_of, replay
from tests.support.training import assert_same, gradient_penalty, inputs_then_weights
from tests.unit.recompute.test_replay_costs import BODIES as COSTS
from tests.unit.recompute.test_replay_costs import WIDTH
from tests.unit.recompute.test_replay_kinds_of_ops import BODIES as KINDS
from tests.unit.recompute.test_replay_random_numbers import BODIES as RANDOM
from tests.unit.recompute.test_replay_random_numbers import holding_a_generator

pytestmark = needs_library
NATIVE: dict[str, Callable[[FunctionBlock, Tensor], Tensor]] = {}


def body(function: Callable[[FunctionBlock, Tensor], Tensor]) -> Callable[[FunctionBlock, Tensor], Tensor]:
    """Note a region's body, all or most of whose ops the library records."""
    NATIVE[function.__name__] = function
    return function


@body
def views(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).view(4, 2, 8).permute(1, 0, 2)[:, 1:3].unsqueeze(0).expand(2, 2, 2, 8)
    parts = h.reshape(8, 8).t().chunk(2, 1)
    return (parts[0].sin() @ parts[1].t().narrow(0, 0, 4).cos()) @ block.b[:8].diagonal().expand(8, 8)


@body
def in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin_().add_(1)
    h[2:4].mul_(2)
    h.view(-1)[5:20].tanh_()
    y = h.clone()
    y[:, 1] = x[:, 2]
    y.index_add_(0, torch.tensor([0, 3]), x[:2])
    return (h.cos() * y.sigmoid()) @ block.b


@body
def split_chunk_unbind(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    one, two = h.chunk(2, 0)
    a, b, c = h.split([1, 3, 4], 1)
    rows = h.sin().unbind(1)
    first, rest = torch.tensor_split(h, [3], 0)
    return torch.cat([two.cos(), one], 0) * torch.cat([c, a, b], 1) * torch.stack(rows, 1) + torch.vstack([rest, first])


@body
def several_results(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    values, places = h.topk(3, 1)
    largest, _ = h.max(0, keepdim=True)
    ordered, order = h.sort(0)
    _, counts = torch.unique(places, return_counts=True)
    q, r = torch.linalg.qr(h + 3 * torch.eye(8))
    norm = F.layer_norm(h, (8,), block.b[0], block.b[1])
    used = values.sum() + largest.sin() + order.gather(0, order) * 0.1 + counts.sum()
    return used * ordered + norm.tanh() + q @ r.sin()


@body
def lists(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    rows, columns = torch.tensor([3, 1, 2]), torch.tensor([[True] * 4 + [False] * 4]).expand(8, 8)
    picked = h[rows].sum(0) + h[:, rows].sum() + h[None, rows, 1:3].sum() + h[columns].sum()
    crossed = torch.einsum("ij,kj,k->ik", h, block.b, h[0])
    return picked + torch.cat([h.sin(), crossed], 1)[:, 4:12] + torch.stack([h, h.cos(), crossed]).mean(0)


@body
def numbers(block: FunctionBlock, x: Tensor) -> Tensor:
    h = 2 * (x @ block.a) + 1
    h = (h / 3 + True) * 0.5j.imag + torch.tensor(0.25) * h - torch.add(h, 1, alpha=2.5)
    scaled = torch.where(h > 0, h, 0.1) * torch.tensor(2.0, dtype=torch.float64) ** 2
    return (1 - h).pow(2) + scaled * (block.calls + 1) + 1.0 / (h.abs() + 1e-3).clamp(min=0.1, max=2)


@body
def keyword_arguments(block: FunctionBlock, x: Tensor) -> Tensor:
    h = torch.addmm(block.b[0], x, block.a, beta=0.5, alpha=2.0)
    h = torch.sum(h.unsqueeze(0), dim=(0,), keepdim=True, dtype=torch.float64).float()[0]
    y = F.interpolate(h[None, None], scale_factor=2.0, mode="bilinear", align_corners=False)[0, 0, ::2, ::2]
    return F.gelu(h, approximate="tanh") + torch.nan_to_num(y, nan=0.5).argsort(dim=1, descending=True) * y.std(1)


@body
def dtypes(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    half = (h.bfloat16() @ block.b.bfloat16()).softmax(-1)
    c = torch.complex(h, x).exp() * (1 + 2j)
    whole = (h.detach() * 10).long() % 7
    table = block.b.repeat(1, 1)
    return half.float() + torch.fft.ifft(torch.fft.fft(c)).real + F.embedding(whole[:, 0], table) + (whole & 3) * h


@body
def autocast(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = F.linear(x, block.a).sin()
        h = F.linear(h, block.a) + F.linear(h, block.b)
        y = F.softmax(h @ h.t(), -1) @ block.b
    return y.float() * (x @ block.a)


OUTSIDE = torch.linspace(0.5, 2, 64).view(8, 8)


@body
def tensors_from_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    scale = OUTSIDE[1:2]
    return ((x * OUTSIDE) @ block.a * scale).sin() * OUTSIDE.t() @ block.b


@body
def dropout(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    h = F.dropout(h.sin(), 0.0) * torch.rand_like(h)
    h = F.alpha_dropout(h, 0.2) + torch.randn(8, 8) * torch.bernoulli(h.detach().sigmoid())
    return F.scaled_dot_product_attention(h[None], h[None], x[None], dropout_p=0.4)[0] + F.rrelu(h, training=True)


@body
def random_permutations(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a)[torch.randperm(8)]
    chosen = torch.multinomial(h.detach().softmax(-1), 2)
    noise = torch.normal(h.detach(), 1.0) + torch.poisson(h.detach().abs()) + F.gumbel_softmax(h, dim=-1)
    return h.gather(1, chosen).sum(1, keepdim=True).sin() * noise


@body
def a_view_of_a_number(block: FunctionBlock, x: Tensor) -> Tensor:
    """The gradient of a product with a number conjugates the number."""
    with torch.enable_grad():
        h = torch.complex(x.detach() @ block.a, x.detach() @ block.b)
        (slope,) = torch.autograd.grad((h * (1 + 2j)).sin().abs().sum(), h, create_graph=True)
    product = torch.complex(x @ block.a, x @ block.b) * slope
    return (product.real * product.imag).sin()


@body
def only_dead_ops_after_it(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    (h.exp() @ block.b).sum()
    return h


@body
def empty_tensors(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    return torch.cat([h[:0].sin(), h.cos(), h[8:] @ block.b]) @ block.b + h[:, :0].sum()


@body
def one_argument_twice(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    return (h * h + torch.cat([h, h]).chunk(2)[1]) @ h + torch.addcmul(h, h, h)


@body
def written_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    h.detach().numpy()[1] = 0.5
    torch.autograd.graph.increment_version(h)
    return (h + 1).cos() @ block.b


@body
def a_parameter_written_after_use(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x * (block.a.detach() * 2).sin()
    with torch.no_grad():
        block.a.mul_(0.9)
    return (h @ block.a).sin() @ block.b


@body
def parameters_as_results(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ (block.a * block.b).t().contiguous()).sin() @ block.a.detach() + block.b.t()


@ON_EACH
@pytest.mark.parametrize("name", NATIVE)
def test_kinds_of_ops(name: str, chosen: dict[str, Any]) -> None:
    assert_same_with_library(block_of(NATIVE[name]), replay(chosen), ops=3)


@pytest.mark.slow
@ON_EACH
@pytest.mark.parametrize("name", KINDS)
def test_programs_of_replay(name: str, chosen: dict[str, Any]) -> None:
    assert_same_with_library(block_of(KINDS[name]), replay(chosen), ops=None)


@pytest.mark.slow
@ON_EACH
@pytest.mark.parametrize("name", RANDOM)
def test_programs_that_draw(name: str, chosen: dict[str, Any]) -> None:
    assert_same_with_library(holding_a_generator(RANDOM[name]), replay(chosen), ops=None)


@pytest.mark.slow
@ON_EACH
@pytest.mark.parametrize("function", COSTS, ids=lambda one: one.__name__)
def test_wide_programs(function: Callable[..., Tensor], chosen: dict[str, Any]) -> None:
    def build() -> Stack:
        return Stack(*(FunctionBlock(function, WIDTH) for _ in range(2)))

    assert_same_with_library(build, replay(chosen), make_input=lambda device: (torch.randn(WIDTH, WIDTH),))


@ON_EACH
@pytest.mark.parametrize("verify", ["never", "always"])
def test_a_decoder(chosen: dict[str, Any], verify: str) -> None:
    def build() -> Stack:
        return with_dropout(llama_stack(3), attention=0.1)

    seen = assert_same_with_library(build, replay(chosen, verify), make_input=tokens, ops=80)
    assert seen.ops[-1] > 0.8 * seen.entries[-1]


def twice(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    first = torch.autograd.grad(loss, [*inputs, *parameters], retain_graph=True, allow_unused=True)
    loss.backward()
    return list(first)


def draws_between(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    loss.backward(retain_graph=True)
    between = torch.rand(3)
    loss.backward()
    return [between, torch.rand(3)]


@ON_EACH
@pytest.mark.parametrize("backward", [twice, draws_between, inputs_then_weights, gradient_penalty])
def test_backwards(backward: Callable[..., Any], chosen: dict[str, Any]) -> None:
    def smooth(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout(x @ block.a, 0.3).view(4, 16).tanh()
        return h.reshape(8, 8).sin() @ block.b + h.exp().view(8, 8) * 0.1

    assert_same_with_library(
        lambda: Stack(*(FunctionBlock(smooth) for _ in range(2))), replay(chosen), backward=backward
    )


def inside(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = (x.detach() if x.is_leaf else x) @ block.a
        (slope,) = torch.autograd.grad(h.sin().sum(), block.a, create_graph=True)
    return (x @ block.a) * slope.cos() @ block.b


@ON_EACH
def test_a_gradient_taken_inside(chosen: dict[str, Any]) -> None:
    assert_same_with_library(block_of(inside), replay(chosen), ops=None)


@ON_EACH
def test_shared_weights(chosen: dict[str, Any]) -> None:
    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        return (F.linear(F.linear(x, block.a).sin(), block.b) @ block.a).tanh()

    def build() -> Stack:
        model = Stack(*(FunctionBlock(function) for _ in range(3)))
        model.blocks[1].a = model.blocks[0].b
        model.blocks[2].a = model.blocks[0].a
        return model

    assert_same_with_library(build, replay(chosen))
    assert_same_with_library(build, replay(chosen), around_forward=lambda: torch.autocast("cpu", torch.bfloat16), ops=3)


@ON_EACH
def test_parameters_that_share_a_storage(chosen: dict[str, Any]) -> None:
    """Two parameters are views of one: a root, and no number in common."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        return (x @ block.a).sin() @ block.b.t() + block.a * block.b

    def build() -> Stack:
        model = Stack(FunctionBlock(function))
        flat = torch.randn(128)
        model.blocks[0].a = nn.Parameter(flat[:64].view(8, 8))
        model.blocks[0].b = nn.Parameter(flat[64:].view(8, 8))
        return model

    assert_same_with_library(build, replay(chosen))


class Nested(FunctionBlock):
    """A region with a region inside."""

    def __init__(self) -> None:
        super().__init__(lambda block, x: block.inner((x @ block.a).sin()) @ block.b)
        self.inner = FunctionBlock(lambda block, x: F.dropout((x @ block.a).cos(), 0.3) @ block.b)


@ON_EACH
def test_nested_regions(chosen: dict[str, Any]) -> None:
    value = {**replay(chosen), "blocks": ["blocks.*", "blocks.*.inner"]}
    assert_same_with_library(lambda: Stack(Nested(), Nested()), value, ops=None)


def branches(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    if block.calls % 2:
        return h.sin() @ block.b
    return h.cos().view(4, 16).exp().reshape(8, 8) * F.dropout(h, 0.4)


def branches_on_values(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    if (h.sum() > 0).item():
        h = h.sin() * h.mean().item()
    for _ in range(int(h.argmax()) % 3):
        h = h.tanh() @ block.b
    return h * h.cos()


def longer_each_time(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    for _ in range(block.calls):
        h = h.sin() * 1.5
    return h @ block.b


def other_numbers(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a) * (0.5 + block.calls)
    return h.roll(block.calls, 0).sin() * h.sum(block.calls % 2, keepdim=True) @ block.b


def grad_for_some(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    with torch.set_grad_enabled(block.calls % 2 == 0):
        y = (h @ block.b).sin()
    return h.cos() * y


def other_data_once(block: FunctionBlock, x: Tensor) -> Tensor:
    g = (x @ block.a).sin()
    if block.calls == 4:
        g.data = torch.full((8, 8), 0.3)
    return (g + 1).cos() @ block.b  # the sum reads it, and autograd does not save it


def reads_the_other(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    one, two = h.sin(), h.cos()
    return ((two if block.calls % 3 == 2 else one) * 2).exp() @ block.b


CHANGING = [
    *(branches, branches_on_values, longer_each_time, other_numbers, grad_for_some),
    *(other_data_once, reads_the_other),
]


@ON_EACH
@pytest.mark.parametrize("function", CHANGING)
def test_programs_that_differ_from_step_to_step(function: Callable[..., Tensor], chosen: dict[str, Any]) -> None:
    assert_same_with_library(block_of(function), replay(chosen), steps=5)


@ON_EACH
def test_shapes_that_differ_from_step_to_step(chosen: dict[str, Any]) -> None:
    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        return F.dropout((x @ block.a).softmax(0), 0.2).sin() @ block.b

    class Lengths:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, device: str) -> tuple[Tensor, ...]:
            self.calls += 1
            return (torch.randn(3 + self.calls % 3, 8),)

    ours, python = (
        observe(block_of(function), replay(chosen), native=native, steps=6, make_input=Lengths())
        for native in (True, False)
    )
    assert_same(python.numbers, ours.numbers)
    assert ours.ops_in_backward == python.ops_in_backward
    assert ours.report == python.report


def test_no_op_of_an_ordinary_block_comes_to_python() -> None:
    with with_library():
        model = applied(llama_stack, replay(POLICIES["nothing"]))
        for _ in range(2):
            model(*tokens()).sum().backward()
        with recorded() as seen:
            model(*tokens()).sum().backward()
    assert seen.trips == []
    assert len(seen.ops) == 2
    assert seen.ops == seen.entries
    assert min(seen.ops) > 40


def test_the_engine_that_is_chosen_alone_uses_it() -> None:
    """`engine: auto` replays where a policy has rules."""
    with with_library(), recorded() as seen:
        model = sac.apply(llama_stack(), {"mode": "selective", "policy": POLICIES["matmuls"], "blocks": ["blocks.*"]})
        for _ in range(3):
            model(*tokens()).sum().backward()
    assert min(seen.ops[-2:]) > 40


@ON_EACH
def test_the_tape_holds_no_op_of_ours(chosen: dict[str, Any]) -> None:
    """Where the library asks Python, Python copies what it keeps; that is no op of the region."""
    with with_library(), recorded() as seen:
        model = applied(block_of(lambda block, x: F.linear(x, block.a).sin() @ block.b), replay(chosen))
        for _ in range(4):
            model(*square()).sum().backward()
    assert set(seen.entries) == {4}  # t, mm, sin, mm
