"""Programs in which a region's output can be released until backward, each with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from sac.compat.output_discarding import Discardable, discard, run_discardable
from sac.engine.settings import PLAIN

WIDTH = 8
Program = Callable[["Runner"], dict[str, Tensor]]


class Runner:
    """Runs functions plainly, or as regions whose outputs are discarded."""

    def __init__(self, *, discards: bool) -> None:
        self.discards = discards
        self.let_go = 0
        self.last: Discardable | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.discards:
            return function(*args)
        output, self.last = run_discardable(PLAIN, function, args)
        return output

    def discard(self, *further_on: Tensor) -> None:
        if self.last is not None:
            self.let_go += discard([self.last], *further_on)
        self.last = None


def linears(count: int = 2, width: int = WIDTH) -> list[nn.Linear]:
    return [nn.Linear(width, width) for _ in range(count)]


def gradients(loss: Tensor, *sources: Tensor | nn.Module) -> dict[str, Tensor]:
    loss.backward()
    found = {"loss": loss.detach()}
    for place, source in enumerate(sources):
        for number, tensor in enumerate(source.parameters() if isinstance(source, nn.Module) else [source]):
            assert tensor.grad is not None
            found[f"{place}.{number}"] = tensor.grad
    return found | {"random state": torch.get_rng_state()}


def gelu_times_input(x: Tensor) -> Tensor:
    return F.gelu(x) * x


def activation_before_a_linear(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    inner = runner.run(gelu_times_input, first(x))
    out = second(inner)
    runner.discard(out)
    return gradients(out.square().sum(), x, first, second)


def dropout_inside(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    inner = runner.run(lambda h: F.dropout(F.gelu(h), 0.4), first(x))
    out = F.dropout(second(inner), 0.2)
    runner.discard(out)
    return gradients(out.square().sum(), x, first, second)


def norm_before_an_attention(runner: Runner) -> dict[str, Tensor]:
    norm, (q, k, v, o) = nn.LayerNorm(WIDTH), linears(4)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    y = runner.run(norm, x)
    attended = F.scaled_dot_product_attention(q(y), k(y), v(y))
    out = o(attended)
    runner.discard(out)
    return gradients((out + x).square().sum(), x, norm, q, k, v, o)


def views_saved_by_the_consumers(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(6, WIDTH, requires_grad=True)
    y = runner.run(lambda h: first(h).exp(), x)
    left, right = y.tensor_split(2, dim=1)
    out = (left * right.flip(0)).sum() + second(y.t().reshape(-1, WIDTH)).sum() + (y[1:4, ::2] ** 2).sum()
    runner.discard(out)
    return gradients(out, x, first, second)


def several_outputs(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)

    def both(h: Tensor) -> tuple[Any, ...]:
        hidden = first(h)
        return hidden.tanh(), {"same": hidden.sigmoid(), "none": None}, 3, hidden.argmax(-1)

    one, rest, number, places = runner.run(both, x)
    out = (one * rest["same"]).sum() * number + F.embedding(places, second.weight).square().sum() + second(one).sum()
    runner.discard(out)
    return gradients(out, x, first, second)


def outputs_in_one_storage(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    left, right = runner.run(lambda h: first(h).exp().chunk(2, dim=-1), x)
    out = (left * right).sum() + second(torch.cat([right, left], -1)).square().sum()
    runner.discard(out)
    return gradients(out, x, first, second)


def nothing_in_the_region_needs_a_gradient(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    first.requires_grad_(False)
    inner = runner.run(lambda h: F.dropout(first(h), 0.5), torch.randn(4, WIDTH))
    out = second(inner)
    runner.discard(out)
    return gradients(out.square().sum(), second)


def autograd_functions_as_consumers(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = runner.run(gelu_times_input, first(x))
    out = Scaled.apply(y, second.weight)
    runner.discard(out)
    return gradients(out.square().sum(), x, first, second.weight)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        return tensor @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensor, weight = ctx.saved_tensors
        return grad @ weight.t(), tensor.t() @ grad


def mixed_precision(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = runner.run(lambda h: F.silu(first(h)), x)
        out = second(y)
        runner.discard(out)
    return gradients(out.float().square().sum(), x, first, second)


def complex_numbers(runner: Runner) -> dict[str, Tensor]:
    x = torch.randn(4, 6, dtype=torch.complex64, requires_grad=True)
    y = runner.run(lambda h: h.sin(), x)
    out = (y * y.conj() * y).abs().sum()
    runner.discard(out)
    return gradients(out, x)


def as_other_dtype(runner: Runner) -> dict[str, Tensor]:
    x = torch.randn(4, 6, requires_grad=True)
    y = runner.run(torch.sin, x)
    out = torch.view_as_complex(y.view(4, 3, 2)).square().abs().sum()
    runner.discard(out)
    return gradients(out, x)


def empty_output(runner: Runner) -> dict[str, Tensor]:
    (first,) = linears(1)
    x = torch.randn(0, WIDTH, requires_grad=True)
    out = first(runner.run(torch.sin, x)).sum()
    runner.discard(out)
    return gradients(out, x, first)


PROGRAMS: tuple[Program, ...] = (
    activation_before_a_linear,
    dropout_inside,
    norm_before_an_attention,
    views_saved_by_the_consumers,
    several_outputs,
    outputs_in_one_storage,
    nothing_in_the_region_needs_a_gradient,
    autograd_functions_as_consumers,
    mixed_precision,
    complex_numbers,
    as_other_dtype,
    empty_output,
)


def normed(x: Tensor, norm: nn.Module, linear: nn.Module) -> tuple[Tensor, Discardable, StorageWeakRef]:
    """A norm as a region and a linear layer after it; the norm's output lives on only where autograd holds it."""
    y, lender = run_discardable(PLAIN, norm, (x,))
    assert lender is not None
    return linear(y), lender, StorageWeakRef(y.untyped_storage())


def norm_and_linear() -> tuple[Tensor, nn.Module, nn.Module]:
    torch.manual_seed(0)
    return torch.randn(4, WIDTH, requires_grad=True), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)


def seeded(program: Program, runner: Runner) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return program(runner)
