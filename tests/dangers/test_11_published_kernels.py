"""Kernels as they are published, on raw memory: fused norms, rotations in place, losses that write their gradient.

Each is an autograd Function whose kernels read and write memory without ops, as Triton kernels and pybind calls do.
Kernels that do not repeat themselves are in `promises/test_units_that_do_not_repeat.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import Stack, policy, save, selective
from tests.support.fused import RMSNorm, Rotation, SwiGLU, fresh
from tests.support.oracle import assert_exact, assert_replayed_exactly, built_model, on_every_way, train_step
from tests.support.programs import WIDTH, Program
from tests.support.recording import kept_bytes
from tests.support.replay_kernels import at
from tests.support.stock import install_stock
from tests.support.training import assert_same_training
from tests.support.ways import NONE, POLICIES, SELECTIVE, WAYS, Way

TOKENS, HEADS, CLASSES = 6, 2, 5


class Halved(torch.autograd.Function):
    """A kernel in place as Triton's interpreter runs it: then an op copies the storage onto itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        np.copyto(at(x), at(x) / 2)
        seen = (torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for _ in range(2))
        next(seen).copy_(next(seen))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / 2


class CrossEntropy(torch.autograd.Function):
    """Its forward writes the gradient over the logits, and saves it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor) -> Tensor:
        z, rows = at(logits), np.arange(len(logits))
        p = np.exp(z - z.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        loss = torch.empty(len(logits))
        np.copyto(at(loss), -np.log(p[rows, classes.numpy()]))
        p[rows, classes.numpy()] -= 1
        np.copyto(z, p)
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return fresh(gradient, at(gradient) * at(grad.contiguous())[:, None]), None


class LowRank(torch.autograd.Function):
    """A frozen layer and an adapter of rank 2 in one Function: the output is written in place, by ops with `out=`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, down, up)
        out = torch.empty(len(x), len(weight))
        torch.mm(x, weight.t(), out=out)
        return out.addmm_(x @ down.t(), up.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, down, up = ctx.saved_tensors
        inner = grad @ up
        return grad @ weight + inner @ down, None, inner.t() @ x, grad.t() @ (x @ down.t())


class Tiled(torch.autograd.Function):
    """Runs a module on parts of the rows without gradients, and in backward again with them, one part at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return torch.cat([module(part) for part in x.chunk(3)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        of_x = torch.empty_like(x)
        for part, into, given in zip(x.chunk(3), of_x.chunk(3), grad.chunk(3), strict=True):
            leaf = part.detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.module(leaf)
            torch.autograd.backward(out, given)
            into.copy_(leaf.grad)
        return of_x, None


WORKSPACE = torch.empty(2 * TOKENS, WIDTH)


class GatheredProduct(torch.autograd.Function):
    """All layers gather into one workspace that outlives them, by a kernel or by an op; backward gathers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, unseen: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.unseen = unseen
        return GatheredProduct.gathered(x, unseen) @ weight.t()

    @staticmethod
    def gathered(x: Tensor, unseen: bool) -> Tensor:
        if unseen:
            np.copyto(at(WORKSPACE), np.concatenate([at(x.contiguous())] * 2))
            return WORKSPACE
        return WORKSPACE.copy_(torch.cat([x, x]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole = GatheredProduct.gathered(x, ctx.unseen)
        return (grad @ weight).view(2, *x.shape).sum(0), grad.t() @ whole, None


class Scaled(torch.autograd.Function):
    """Its factors are in a dict, where autograd does not look for tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: dict[str, Tensor]) -> Tensor:
        ctx.save_for_backward(factors["scale"])
        return fresh(x, at(x) * at(factors["scale"]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


# -- Blocks that use them


class Layer(nn.Module):
    """A residual block; `up` and `down` are projections, as in the catalogue's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


class RotatedProjections(Layer):
    """The kernel writes over what the projections returned, and not over copies."""

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(float(TOKENS)), torch.ones(WIDTH // 2))
        q, k = Rotation.apply(self.up(x), self.gate(x), angles.cos(), angles.sin())
        return x + self.down(q * k.sigmoid())


class Decoder(Layer):
    """All that one layer has of them."""

    def forward(self, x: Tensor) -> Tensor:
        h = RMSNorm.apply(x, self.norm)
        angles = torch.outer(torch.arange(float(TOKENS)), torch.tensor([1.0, 0.1]))
        q, k = (part(h).view(TOKENS, HEADS, -1).transpose(0, 1) for part in (self.up, self.gate))
        q, k = Rotation.apply(q, k, angles.cos(), angles.sin())
        v = self.down(h).view(TOKENS, HEADS, -1).transpose(0, 1)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(x.shape)
        h = RMSNorm.apply(x, self.norm)
        return x + self.down(SwiGLU.apply(self.gate(h), self.up(h)))


class Interpreted(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(RMSNorm.apply(Halved.apply(self.up(x)).sin(), self.norm))


class WithALoss(Layer):
    def forward(self, x: Tensor) -> Tensor:
        loss = CrossEntropy.apply(self.up(x)[:, :CLASSES].contiguous(), torch.arange(TOKENS) % CLASSES)
        return self.down(x).sin() * loss[:, None]


class Adapted(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gate.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(LowRank.apply(self.up(x), self.gate.weight, self.a, self.b)))


class InTiles(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.SiLU(), nn.Linear(8 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + Tiled.apply(self.up(x), self.mlp)).sin()  # so that a rerun goes on behind the tiles


class Gathered(Layer):
    unseen = False

    def forward(self, x: Tensor) -> Tensor:
        h = GatheredProduct.apply(self.up(x), self.gate.weight, self.unseen).tanh()
        return x + self.down(h[:TOKENS] + h[TOKENS:])


class GatheredUnseen(Gathered):
    unseen = True


class WithADict(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down(Scaled.apply(h, {"scale": h.detach().exp()}).sin())


def rows(step: int) -> tuple[Tensor, ...]:
    return (torch.randn(TOKENS, WIDTH),)


LAYERS = (Decoder, RotatedProjections, Interpreted, WithALoss, Adapted, InTiles, Gathered, GatheredUnseen, WithADict)
# A module's results that are saved as a whole are overwritten by a kernel that tells nobody.
NOT_UNDER = dict.fromkeys((RotatedProjections, Interpreted), frozenset({"whole modules"}))
KERNELS = [
    Program(layer.__name__, lambda block, x: x, inputs=rows, block=layer, not_under=NOT_UNDER.get(layer, frozenset()))
    for layer in LAYERS
]


@on_every_way(KERNELS)
def test_a_published_kernel(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_replays_of_them_are_exact_without_comparing(policy: str) -> None:
    """But for those that tell nobody what they write over: rotation, halving, loss."""
    for program in KERNELS[4:]:
        assert_replayed_exactly(program, policy, steps=2)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", SELECTIVE)
@pytest.mark.parametrize("program", KERNELS, ids=str)
def test_no_policy_keeps_more_than_no_checkpointing(program: Program, way: str, policy: str) -> None:
    def kept(chosen: Way) -> int:
        model = built_model(program, chosen, policy)
        train_step(program, model, 0)
        return kept_bytes(model, rows(1))

    assert kept(WAYS[way]) <= kept(NONE)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does, no other version")
@pytest.mark.parametrize(
    ("layer", "raised", "match"),
    [(RotatedProjections, AssertionError, "gradient"), (Adapted, RuntimeError, "has been mutated")],
)
def test_stock_selective_checkpointing_fails(layer: type[Layer], raised: type[Exception], match: str) -> None:
    """What the README says of a saved product that such a kernel changes in place."""
    value = selective(policy(save("matmul")))
    with pytest.raises(raised, match=match):
        assert_same_training(lambda: Stack(layer(), layer()), value, make_input=lambda _: rows(0), put=install_stock)
