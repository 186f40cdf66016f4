"""Random blocks of autograd Functions that do what published kernels do, and a generator of them.

More programs than the suite runs: ``python -m tests.fuzz.functions FIRST COUNT``.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sac

WIDTH = 8


def filled(values: np.ndarray) -> Tensor:
    """Memory that no op is seen to fill."""
    out = torch.empty(values.shape)
    out.numpy()[...] = values
    return out


def of(x: Tensor) -> np.ndarray:
    return x.detach().float().numpy()


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        out = filled(np.tanh(of(x) * factor))
        ctx.save_for_backward(out)
        ctx.factor = factor
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return grad * ctx.factor * (1 - out * out), None


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.5


class DirtyKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.detach().numpy()[...] *= 0.5
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.5 + 0 * ctx.saved_tensors[0]


class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class Rotated(torch.autograd.Function):
    """Writes over what an op has made; autograd is not told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        x.detach().numpy()[...] *= -1
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


class Scratch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scratch: Tensor) -> Tensor:
        scratch.numpy()[...] = np.cos(of(x))
        ctx.save_for_backward(scratch)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Counted(torch.autograd.Function):
    """In two methods, with a number among its results, and one result that is not used."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, int, Tensor]:
        return filled(of(x) ** 2), x.dim(), x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _number: None, other: Tensor | None) -> Any:
        return 2 * grad * ctx.saved_tensors[0] + (0 if other is None else 3 * other)


class Differentiated(torch.autograd.Function):
    """Takes a gradient in its forward, as fused losses do, and calls another Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = Kernel.apply(leaf, 2.0).sin()
            (gradient,) = torch.autograd.grad(out.sum(), leaf)
        ctx.save_for_backward(gradient)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(mask)
        return filled(of(x) * mask.numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Inner(torch.autograd.Function):
    """Projects, scans in a kernel and projects again; backward runs the kernel again and writes over what is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
        hidden = x @ into
        scanned = filled(np.cumsum(hidden.detach().numpy(), 0))
        ctx.save_for_backward(hidden, into, out, x)
        return scanned @ out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, into, out, x = ctx.saved_tensors
        scanned = filled(np.cumsum(hidden.numpy(), 0))
        of_hidden = torch.flip(torch.cumsum(torch.flip(grad @ out.t(), [0]), 0), [0])
        torch.mm(grad, out.t(), out=hidden)
        return of_hidden @ into.t(), x.t() @ of_hidden, scanned.t() @ grad


class Dispatch(torch.autograd.Function):
    """Leaves the order of rows in a dict, for the call that undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: dict[str, Any]) -> Tensor:
        ctx.order = handle["order"] = np.argsort(of(x)[:, 0], kind="stable")
        return filled(of(x)[ctx.order])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return filled(of(grad)[np.argsort(ctx.order)]), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: dict[str, Any]) -> Tensor:
        ctx.order = handle["order"]
        return filled(of(x)[np.argsort(ctx.order)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return filled(of(grad)[ctx.order]), None


def dispatched(block: Any, x: Tensor) -> Tensor:
    handle: dict[str, Any] = {}
    return Combine.apply(block.linear(Dispatch.apply(x, handle)), handle)


def under_autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Kernel.apply(block.linear(x).float(), 0.5)


PARTS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda block, x: Kernel.apply(x, 1.5),
    lambda block, x: Dirty.apply(x * 2),
    lambda block, x: DirtyKernel.apply(x * 2),
    lambda block, x: Alias.apply(x),
    lambda block, x: Alias.apply(x * 2).mul(0.5),
    lambda block, x: Rotated.apply(block.linear(x)),
    lambda block, x: Scratch.apply(x, torch.empty(len(x), WIDTH)),
    lambda block, x: Counted.apply(x.tanh())[0],
    lambda block, x: Differentiated.apply(x),
    lambda block, x: Masked.apply(x),
    lambda block, x: Inner.apply(x, block.linear.weight, block.other.weight),
    dispatched,
    under_autocast,
    lambda block, x: sac.unit("gate", lambda y, scale: block.other(Kernel.apply(y, 0.5)) * scale)(x, scale=x.cos()),
    lambda block, x: sac.unit("written", lambda y: y.mul_(0.5).sin())(x * 2),
    lambda block, x: block.linear(x).sin(),
    lambda block, x: x * block.other(x).tanh(),
]


class Block(nn.Module):
    def __init__(self, parts: list[int]) -> None:
        super().__init__()
        self.linear, self.other, self.parts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), parts

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for part in self.parts:
            h = PARTS[part](self, h)
        return x + h


RULES: dict[str, list[dict[str, Any]]] = {
    "products": [{"ops": "matmul", "do": "save"}],
    "every second op": [{"ops": "*", "do": "alternate"}],
    "functions": [
        {"function": ["Kernel", "Inner", "Rotated", "Dirty*"], "do": "save"},
        {"ops": "aten.sin", "do": "save"},
    ],
    "units": [{"unit": "*", "do": "save"}, {"ops": "aten.tanh", "do": "save"}],
}


def trained(seed: int, rules: str = "") -> tuple[list[Tensor], list[str]]:
    """Return loss and gradients of three steps of program ``seed``, and why regions were not replayed."""
    choose = random.Random(seed)
    programs = [[choose.randrange(len(PARTS)) for _ in range(choose.randint(2, 5))] for _ in range(2)]
    retains = choose.random() < 0.3 and not any(PARTS[part] is PARTS[10] for program in programs for part in program)
    torch.manual_seed(seed)
    model = nn.Sequential(*map(Block, programs))
    if rules:
        named = [{"id": f"rule{number}", "optional": True, **rule} for number, rule in enumerate(RULES[rules])]
        policy = {"schema": "sac/v1", "name": "kernels", "rules": named}
        sac.apply(model, {"mode": "selective", "blocks": ["*"], "policy": policy})
    found = []
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        x = torch.randn(5, WIDTH, requires_grad=True)
        loss = model(x).square().sum()
        if retains:
            loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    kinds = sac.report(model).to_dict()["kinds"] if rules else []
    return found, [kind["no_replay"] for kind in kinds if kind["no_replay"]]


def wrong(seed: int, rules: str) -> str:
    """Return what is wrong with program ``seed`` under ``rules``; nothing if it is exact."""
    expected, _ = trained(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sac.errors.SacWarning)
        try:
            found, reasons = trained(seed, rules)
        except Exception as error:  # an error is a failure, too
            return f"{type(error).__name__}: {error}"
    differences = [index for index, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    return f"results {differences[:3]} differ" if differences else "; ".join(reasons)


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    failures = [
        (seed, name, text) for seed in range(first, first + count) for name in RULES if (text := wrong(seed, name))
    ]
    print(*failures, f"{len(failures)} of {count * len(RULES)} runs failed", sep="\n")
