"""The catalogue: programs of three to eight lines, each the body of a region with something that can go wrong.

A program is a function of the block that it runs in and of the block's input. `Program.model` builds a `Stack` of such
blocks; `tests/support/ways.py` puts a way of checkpointing on it, and `tests/support/oracle.py` compares trainings.
Tags name what a program does, so that a test can choose: `programs("write")`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import MAX_TOKENS, LlamaLikeBlock, Stack, rotate
from tests.support.custom_ops import SquareByAccumulation, TanhByOutVariant, noisy_attention, noisy_scale, scale_by
from tests.support.replay_kernels import FromOutside, TanhInPlace, tanh_into, twice_in_place
from tests.support.runs import note_run, runs_of

WIDTH = 8
Body = Callable[..., Any]


class Block(nn.Module):
    """Runs a program's body. `up` and `down` are its products; other children come from the program."""

    def __init__(self, body: Body, children: Mapping[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.body = body
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(11)
        self.calls = 0  # a plain attribute: recomputation finds it as the forward found it
        for name, build in children.items():
            self.add_module(name, build())

    @property
    def runs(self) -> int:
        """How often Python ran the body, recomputation included."""
        return runs_of(self)

    def forward(self, *values: Any) -> Any:
        note_run(self)
        self.calls += 1
        return self.body(self, *values)


def square_input(step: int) -> tuple[Tensor, ...]:
    """Return one matrix [WIDTH, WIDTH]; the step does not matter."""
    return (torch.randn(WIDTH, WIDTH),)


@dataclass(frozen=True)
class Program:
    """One entry of the catalogue.

    ``body``: called as ``body(block, *inputs)``. ``children``: what builds further submodules of the block, by name.
    ``inputs``: the model's inputs in a step. ``between``: what the training does after the forward, before backward.
    ``around``: the context of each forward. ``not_under``: names of ways that this program cannot be used with.
    """

    name: str
    body: Body
    tags: frozenset[str] = frozenset()
    children: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    inputs: Callable[[int], tuple[Tensor, ...]] = square_input
    between: Callable[[nn.Module, int], None] | None = None
    around: Callable[[], Any] | None = None
    block: Callable[[], nn.Module] | None = None  # a module of its own instead of a Block
    not_under: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    def model(self, blocks: int = 2) -> Stack:
        """Build the model from the random state as it is: the same seed gives equal models."""
        return Stack(*(self.block() if self.block else Block(self.body, self.children) for _ in range(blocks)))


CATALOGUE: dict[str, Program] = {}


def program(*tags: str, not_under: tuple[str, ...] = (), **options: Any) -> Callable[[Body], Body]:
    """Put the decorated body into the catalogue, under its own name."""

    def register(body: Body) -> Body:
        name = body.__name__
        assert name not in CATALOGUE, name
        CATALOGUE[name] = Program(name, body, frozenset(tags), not_under=frozenset(not_under), **options)
        return body

    return register


def programs(*tags: str) -> list[Program]:
    """Return the programs with one of these tags, or all of them if there are none."""
    return [each for each in CATALOGUE.values() if not tags or each.tags & set(tags)]


# -- Plain computation


@program("plain")
def two_products(block: Block, x: Tensor) -> Tensor:
    return block.down(torch.tanh(block.up(x)).sin())


@program("plain", inputs=lambda step: (torch.randn(2, 6, 32),), block=LlamaLikeBlock)
def llama_block(block: Block, x: Tensor) -> Tensor:
    raise AssertionError("the block has a forward of its own")


@program("plain")
def attention_with_rotation(block: Block, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(MAX_TOKENS)[: len(x)], torch.tensor([1.0, 0.1])).repeat(1, 2)
    q, k, v = (part.view(1, len(x), 2, 4).transpose(1, 2) for part in (block.up(x), block.down(x), x))
    q, k = (rotate(part, angles.cos(), angles.sin()) for part in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)


@program("plain", inputs=lambda step: (torch.randn(2 + 3 * step, WIDTH),))
def rows_that_grow(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x).relu())


@program("plain", children={"norm": lambda: nn.RMSNorm(WIDTH)})
def fused_norm(block: Block, x: Tensor) -> Tensor:
    return block.down(F.dropout(block.norm(block.up(x)), 0.3, True))


@program("plain", not_under=("reentrant",))  # torch refuses `grad` and gradients of gradients there
def smooth(block: Block, x: Tensor) -> Tensor:
    """Operators that save their own results, whose graphs lead to the saved tensors themselves."""
    h = F.dropout(block.up(x).tanh(), 0.3).exp()
    return F.layer_norm(block.down(h), (WIDTH,)).sigmoid() * x.sin()


@program("plain", children={"conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)})
def convolution(block: Block, x: Tensor) -> Tensor:
    return block.conv(block.up(x).t()[None]).squeeze(0).t() * x.sigmoid()


@program("plain", children={"cell": lambda: nn.GRUCell(WIDTH, WIDTH)})
def gated_recurrence(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    for _ in range(2):
        h = block.cell(x, h)
    return h


@program("plain")
def complex_numbers(block: Block, x: Tensor) -> Tensor:
    h = torch.view_as_complex(block.up(x).view(-1, 4, 2)).conj()
    return torch.view_as_real((h * h.angle()).sin()).reshape(x.shape)


@program("plain", "view")
def a_part_and_its_conjugate(block: Block, x: Tensor) -> Tensor:
    """Both share a storage, and each is held without the rest of it."""
    part = torch.view_as_complex(block.up(x.repeat(8, 1)).view(-1, 4, 2))[:8]
    return block.down(torch.view_as_real(part * part.conj().sin()).reshape(x.shape)) + part.conj().imag.sum()


# -- Writes


@program("write")
def activation_in_place(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x).relu_())


@program("write")
def added_in_place(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    h += x
    return block.down(h).sin()


@program("write")
def write_through_a_view(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    h.view(-1)[::3].mul_(0.5)
    return block.down(h).sin()


@program("write")
def result_of_an_out_variant(block: Block, x: Tensor) -> Tensor:
    return block.down(TanhByOutVariant.apply(F.dropout(block.up(x), 0.3, True))) * x  # type: ignore[no-untyped-call]


@program("write")
def write_at_an_index(block: Block, x: Tensor) -> Tensor:
    h = block.up(x).sin()
    h[torch.tensor([0, 3])] = x[:2]
    return block.down(h)


@program("write")
def writes_with_a_read_between(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    before = h * 1.0
    h.mul_(0.5)
    between = h * 1.5
    h.add_(before)
    return block.down(between + h)


@program("write", "results")
def write_to_a_part_of_several_results(block: Block, x: Tensor) -> Tensor:
    first, second = block.up(x).chunk(2, -1)
    values, _ = second.sin().sort(-1)
    return block.down(torch.cat([first.sigmoid(), values], -1).add_(x))


@program("write", "random")
def random_slopes(block: Block, x: Tensor) -> Tensor:
    """The op writes its noise into a tensor that autograd saved one op ago."""
    return F.rrelu(block.down(block.up(x)).sin(), training=True)


@program("write", "outside")
def workspace_overwritten_first(block: Block, x: Tensor) -> Tensor:
    """A tensor that outlives the region and is overwritten entirely before it is read."""
    if not hasattr(block, "workspace"):
        block.workspace = torch.empty(WIDTH, WIDTH)
    block.workspace.copy_(x.detach().sin())
    return block.down(block.up(x) * block.workspace.clone())


@program("write")
def shapes_changed_in_place(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)[:, :4] * 1.0
    h.t_()
    h.unsqueeze_(0)
    h.squeeze_(0)
    return block.down((h.sin() @ x).tanh().repeat(2, 1))


@program("write")
def lists_of_tensors(block: Block, x: Tensor) -> Tensor:
    doubled, halved = torch._foreach_mul([block.up(x), x], [2.0, 0.5])
    with torch.no_grad():
        written = [x.detach().clone(), x.detach() * 2]
        torch._foreach_add_(written, [x.detach(), x.detach()])
    return block.down((doubled * written[0]).sin() + (halved * written[1]).cos())


@program("write", not_under=("reentrant",))
def written_behind_autograd(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    alias = h.data
    y = h * 2.0
    alias.mul_(3)
    return block.down(y.sin()) * alias


@program("write", children={"scale": lambda: nn.LayerNorm(WIDTH)}, not_under=("reentrant",))
def writes_to_a_parameter(block: Block, x: Tensor) -> Tensor:
    """Autograd has saved the parameter after the write, and refuses it if its version has moved since."""
    with torch.no_grad():
        block.scale.weight.mul_(0.9).clamp_(0.5, 2.0)
    return block.down(block.up(x).sin() * block.scale.weight) * block.scale.weight


@program("write", children={"norm": lambda: nn.BatchNorm1d(WIDTH)}, not_under=("reentrant",))
def writes_to_a_buffer(block: Block, x: Tensor) -> Tensor:
    h = block.up(x).sin()
    with torch.no_grad():
        block.norm.running_mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return block.down(h - block.norm.running_mean) * block.norm.running_mean.clone()


# -- Views


@program("plain")
def sparse_products(block: Block, x: Tensor) -> Tensor:
    h = torch.sparse.mm((x * (x > 0)).to_sparse(), block.up(x)).sin()
    rows = (x.detach() * (x.detach() > 0)).to_sparse_csr()
    return block.down(h) + (rows @ h).cos()


@program("view")
def small_view_of_a_large_product(block: Block, x: Tensor) -> Tensor:
    row = block.up(x.repeat(4, 1))[1]
    return block.down(x) * row.sin()


@program("view")
def split_and_joined(block: Block, x: Tensor) -> Tensor:
    q, k, v = torch.cat([block.up(x), block.down(x), x], -1).split(WIDTH, -1)
    return (q * k.sigmoid()) @ v


@program("view", "write")
def view_then_write_to_the_base(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    top = h[:4].sigmoid()
    h.add_(top.repeat(2, 1))
    return block.down(h)


# -- Random numbers


@program("random", children={"drop": lambda: nn.Dropout(0.4)})
def dropout_module(block: Block, x: Tensor) -> Tensor:
    return block.down(block.drop(block.up(x)))


@program("random")
def two_dropouts(block: Block, x: Tensor) -> Tensor:
    """If the first is saved, a recomputation that does not advance the generator gives the second another mask."""
    first, _ = torch.native_dropout(block.up(x), 0.5, True)
    second = F.dropout(first.sin(), 0.5, True)
    return second * second


@program("random")
def noise_like_the_input(block: Block, x: Tensor) -> Tensor:
    h = F.dropout(block.up(x) * torch.rand_like(x), 0.3, True)
    return h * h


@program("random")
def sampled_indices(block: Block, x: Tensor) -> Tensor:
    index = torch.multinomial(block.up(x).softmax(-1), 4)
    h = F.dropout(block.down(x).gather(1, index).repeat(1, 2), 0.3, True)
    return h * h * x


@program("random", "generator", not_under=("reentrant",))
def generator_of_a_module(block: Block, x: Tensor) -> Tensor:
    h = block.up(x) * torch.rand(x.shape, generator=block.generator).to(x.device)
    kept = torch.empty(x.shape).bernoulli_(0.7, generator=block.generator).to(x.device)
    return F.dropout(block.down(h).sin() * kept, 0.3, True) * h


@program("random")
def custom_ops_that_draw(block: Block, x: Tensor) -> Tensor:
    scaled, _ = noisy_scale(block.up(x), 0.3)
    mixed, _ = noisy_attention(scaled, block.down(x), x, 0.4)
    return scale_by(mixed, 0.5) + F.dropout(x, 0.3, True)


@program("random", "host random")
def python_and_numpy_draws(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x * random.random()).sin() * float(numpy.random.rand()))


@program("random")
def forked_inside(block: Block, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(block.calls)
        h = F.dropout(block.up(x), 0.3)
    return F.dropout(h.sin(), 0.3) * h


@program("random")
def seeded_inside(block: Block, x: Tensor) -> Tensor:
    h = F.dropout(block.up(x), 0.3)
    torch.manual_seed(7)
    return F.dropout(h.sin(), 0.3) * h


@program("random")
def draws_that_nothing_reads(block: Block, x: Tensor) -> Tensor:
    torch.rand(3)
    h = F.dropout(block.up(x), 0.3)
    F.dropout(h.detach(), 0.3)
    return F.dropout(h.sin() * torch.randn_like(h), 0.5) * h


@program("random")
def generator_of_a_call(block: Block, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(block.calls)
    first = torch.rand(x.shape, generator=generator)
    generator.manual_seed(5)
    return (block.up(x) * first).sin() * torch.rand(x.shape, generator=generator)


@program("random", "generator", not_under=("reentrant",))
def another_handle_of_a_generator(block: Block, x: Tensor) -> Tensor:
    """`clone_state` and `graphsafe_get_state` make other Python objects; two handles may share a state."""
    first = torch.rand(x.shape, generator=block.generator)
    return (block.up(x) * first).sin() * torch.rand(x.shape, generator=block.generator.clone_state())


@program("random")
def stochastic_depth(block: Block, x: Tensor) -> Tensor:
    """Whether a part runs depends on a draw."""
    h = block.up(x)
    return block.down(h.sin()) if torch.rand(()).item() < 0.5 else h.cos()


# -- Choices, buffers, attributes


@program("routing")
def mixture_of_experts(block: Block, x: Tensor) -> Tensor:
    weights, chosen = block.up(x).softmax(-1)[:, :2].topk(1)
    out = torch.zeros_like(x)
    for expert, layer in enumerate((block.up, block.down)):
        rows = (chosen[:, 0] == expert).nonzero()[:, 0]
        out = out.index_add(0, rows, layer(x[rows]) * weights[rows])
    return out


@program("routing")
def sorted_rows(block: Block, x: Tensor) -> Tensor:
    order = block.up(x).sum(-1).argsort()
    return block.down(x[order]).sin() * x


@program("routing")
def branch_on_a_value(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h.sin() if h.sum() > 0 else h.cos())


@program("buffer", children={"norm": lambda: nn.BatchNorm1d(WIDTH)})
def batch_norm(block: Block, x: Tensor) -> Tensor:
    return block.down(block.norm(block.up(x)).relu())


@program("buffer", children={"counted": lambda: nn.BatchNorm1d(WIDTH, momentum=None)})
def batch_norm_that_counts(block: Block, x: Tensor) -> Tensor:
    return block.down(block.counted(x).sin())


@program("attribute")
def plain_attributes(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x) * (0.5 + 0.1 * block.calls)).sin()


@program("attribute", "changes")
def another_way_every_other_call(block: Block, x: Tensor) -> Tensor:
    h = block.up(x)
    return block.down(h.sin()) if block.calls % 2 else (h * 2).tanh()


def _toggle_training(model: nn.Module, step: int) -> None:
    model.train(step % 2 == 1)


@program("attribute", children={"drop": lambda: nn.Dropout(0.4)}, between=_toggle_training)
def eval_between_forward_and_backward(block: Block, x: Tensor) -> Tensor:
    return block.down(block.drop(block.up(x)))


def _toggle_frozen(model: nn.Module, step: int) -> None:
    """As GANs freeze a part between forward and backward, and thaw it in the next step."""
    for part in (model.get_submodule("blocks.0"), model.get_submodule("blocks.1.up")):
        assert {one.requires_grad for one in part.parameters()} == {step % 2 == 0}
        part.requires_grad_(step % 2 == 1)


@program("attribute", children={"norm": lambda: nn.LayerNorm(WIDTH)}, between=_toggle_frozen)
def frozen_between_forward_and_backward(block: Block, x: Tensor) -> Tensor:
    return x + block.down(block.norm(block.up(x)).sin()).cos()


def _draw(model: nn.Module, step: int) -> None:
    torch.rand(3), random.random(), numpy.random.rand()


@program("random", between=_draw)
def draws_between_forward_and_backward(block: Block, x: Tensor) -> Tensor:
    return F.dropout(block.down(F.dropout(block.up(x), 0.3)), 0.5)


# -- Surroundings


@program("autocast", around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
def autocast_around(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x).sin()).float()


@program("autocast")
def autocast_inside(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = block.up(x)
    return block.down(h.float()).sin()


@program("autocast", around=lambda: torch.autocast("cpu", dtype=torch.bfloat16), not_under=("reentrant",))
def custom_op_under_autocast(block: Block, x: Tensor) -> Tensor:
    mixed, _ = noisy_attention(block.up(x).float(), block.down(x).float(), x, 0.2)
    return mixed.float() * x


class HalvedProducts(torch.overrides.TorchFunctionMode):
    """Halves the results of linear layers and of one function that no program calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func in (F.linear, torch.sin) else out


@program("mode", around=HalvedProducts)
def torch_function_mode_around(block: Block, x: Tensor) -> Tensor:
    return block.down(block.up(x).sin())


@program("transform")
def tangent_inside(block: Block, x: Tensor) -> Tensor:
    """Tangents of constants are zero tensors, which have no memory."""
    value, tangent = torch.func.jvp(lambda z: (z * 2).sin(), (x,), (torch.ones_like(x),))
    return block.down(block.up(value) + tangent)


@program("gradient inside", not_under=("reentrant", "context_fn"))
def gradient_inside(block: Block, x: Tensor) -> Tensor:
    h = block.up(x).tanh()
    (slope,) = torch.autograd.grad(h.square().sum(), h, retain_graph=True)
    return block.down(h * slope.detach())


# -- Kernels that the dispatcher does not see


@program("kernel")
def kernel_fills_empty(block: Block, x: Tensor) -> Tensor:
    return block.down(tanh_into(block.up(x), torch.empty_like).sin())


@program("kernel")
def kernel_fills_zeros(block: Block, x: Tensor) -> Tensor:
    return block.down(tanh_into(block.up(x), torch.zeros_like, lambda out: out.add_(1)).sin())


@program("kernel")
def kernel_in_place(block: Block, x: Tensor) -> Tensor:
    return block.down(twice_in_place(block.up(x).sin()).cos())


@program("kernel")
def kernel_in_place_whose_result_is_saved(block: Block, x: Tensor) -> Tensor:
    return block.down(TanhInPlace.apply(block.up(x)).sin())  # type: ignore[no-untyped-call]


@program("kernel")
def result_that_no_op_made(block: Block, x: Tensor) -> Tensor:
    return block.down(FromOutside.apply(block.up(x)).sin())  # type: ignore[no-untyped-call]


@program("kernel")
def zeros_that_stay_and_zeros_that_are_filled(block: Block, x: Tensor) -> Tensor:
    stay = torch.zeros(WIDTH, WIDTH)
    h = block.up(x) + stay
    return (tanh_into(h, lambda x: torch.zeros(WIDTH, WIDTH)) * h).sin() + stay


@program("kernel")
def filled_from_the_second_call_on(block: Block, x: Tensor) -> Tensor:
    """A comparison in the first call does not show it."""
    h = block.up(x)
    flags = torch.zeros(WIDTH, WIDTH) if block.calls == 1 else tanh_into(h, torch.zeros_like)
    return block.down((h * flags).sin() + h.cos())


@program("kernel")
def added_to_by_a_kernel(block: Block, x: Tensor) -> Tensor:
    """On memory that was kept, the kernel would add a second time."""
    return block.down(SquareByAccumulation.apply(block.up(x)).sin())  # type: ignore[no-untyped-call]


@program("kernel")
def rows_of_a_view(block: Block, x: Tensor) -> Tensor:
    h = block.up(x) * 1.5
    rows = h[2:4]
    twice_in_place(rows)
    return block.down(h.sin()) * rows.sum()


# What is saved of a module as a whole is overwritten with it.
@program("kernel", not_under=("whole modules",))
def autograd_is_not_told(block: Block, x: Tensor) -> Tensor:
    return block.down(twice_in_place(block.up(x), says_so=False).sin())


@program("kernel")
def result_read_before_and_after(block: Block, x: Tensor) -> Tensor:
    """A product is read, doubled by a kernel, and read again: a policy that saves it holds the doubled one."""
    h = block.up(x)
    before = h * 1.5
    return before.sin() * twice_in_place(h).cos()


@program("kernel")
def result_written_by_ops_and_kernels(block: Block, x: Tensor) -> Tensor:
    return block.down(twice_in_place(twice_in_place(block.up(x).add_(1)).mul_(0.5)).add_(1).sin())
