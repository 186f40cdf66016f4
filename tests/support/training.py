"""The oracle of every semantics test: the same model, trained without us from the same seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.support.blocks import Stack, install, tokens

Backward = Callable[[Tensor, list[Tensor], list[nn.Parameter]], Sequence[Tensor | None]]


def plain_backward(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """One call of backward; the gradients are read from `.grad` afterwards."""
    del inputs, parameters
    loss.backward()
    return []


def summed(outputs: list[Tensor]) -> Tensor:
    """A loss that reads every differentiable output, each with weights of its own."""
    parts = []
    for index, output in enumerate(outputs):
        if output.requires_grad:
            ramp = torch.linspace(-1.0, 1.5 + index, output.numel(), device=output.device, dtype=torch.float64)
            parts.append((output.double() * ramp.view(output.shape)).sum() + 0.1 * output.double().square().mean())
    return torch.stack(parts).sum()


def train(
    model: nn.Module,
    *,
    steps: int = 1,
    make_input: Callable[[str], tuple[Tensor, ...]] = tokens,
    backward: Backward = plain_backward,
    seed: int = 0,
    device: str = "cpu",
    rate: float = 0.05,
    input_needs_grad: Sequence[bool] | None = None,
    around_forward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Tensor]:
    """Train for some steps; return all that must not depend on checkpointing, by name."""
    torch.manual_seed(seed)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        inputs = list(make_input(device))
        for x, needs in zip(inputs, input_needs_grad or [True] * len(inputs), strict=True):
            x.requires_grad_(needs)
        with around_forward():
            outputs = outputs_of(model, inputs)
        seen |= backward_shows(step, model, inputs, outputs, backward, device)
        descend(model, rate)
    return seen


def outputs_of(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """The tensors that a forward returns."""
    return [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


def backward_shows(
    step: int, model: nn.Module, inputs: list[Tensor], outputs: list[Tensor], backward: Backward, device: str
) -> dict[str, Tensor]:
    """Run a step's backward; return all that it and the forward have shown, by name."""
    loss = summed(outputs)
    extra = backward(loss, inputs, list(model.parameters()))
    seen = {f"step {step} output {i}": x.detach().clone() for i, x in enumerate(outputs)}
    seen |= {f"step {step} gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    seen |= {f"step {step} gradient {i} of backward": g.detach() for i, g in enumerate(extra) if g is not None}
    return seen | state_after(step, model, loss.detach(), device)


def state_after(step: int, model: nn.Module, loss: Tensor, device: str) -> dict[str, Tensor]:
    """Everything of the model and of the process that a step may have changed."""
    seen = {f"step {step} loss": loss, f"step {step} random numbers": torch.get_rng_state()}
    if device != "cpu":
        seen[f"step {step} random numbers of the device"] = torch.cuda.get_rng_state()
    for name, parameter in model.named_parameters():
        seen[f"step {step} parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            seen[f"step {step} gradient of {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        seen[f"step {step} buffer {name}"] = buffer.clone()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Generator):
                seen[f"step {step} generator {name}.{key}"] = value.get_state()
    return seen


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that there are, by parameter."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def descend(model: nn.Module, rate: float) -> None:
    """Step by a bounded length, so that no model of these tests blows up."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad / (1 + parameter.grad.norm())
                parameter.grad = None


def assert_same(reference: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """Hold that two trainings saw the same numbers, bit for bit, and name the first that differs most usefully."""
    assert reference.keys() == ours.keys(), sorted(reference.keys() ^ ours.keys())
    wrong = [name for name in reference if not same_bits(reference[name], ours[name])]
    assert not wrong, (
        "; ".join(f"{name}: {_difference(reference[name], ours[name])}" for name in wrong[:6])
        + f" ({len(wrong)} in all)"
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    """`torch.equal`, but a NaN equals a NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left, right) or bool(torch.isclose(left, right, rtol=0, atol=0, equal_nan=True).all())


def _difference(left: Tensor, right: Tensor) -> str:
    if left.shape != right.shape or left.dtype != right.dtype:
        return f"{left.dtype}{list(left.shape)} became {right.dtype}{list(right.shape)}"
    left, right = left.detach().double(), right.detach().double()
    return f"largest difference {(left - right).abs().max():.3g} of {left.abs().max():.3g}"


def built(build: Callable[[], nn.Module], device: str = "cpu", seed: int = 1) -> nn.Module:
    """Build the model from a fixed seed, so that two of them are equal."""
    torch.manual_seed(seed)
    return build().to(device)


def assert_same_training(
    build: Callable[[], Stack],
    value: Any,
    *,
    entry: str = "apply",
    device: str = "cpu",
    put: Callable[[Stack, Any, str], Stack] = install,
    **training: Any,
) -> None:
    """Train the model without and with us from the same seeds; all that both show must be equal bit for bit."""
    reference = train(built(build, device), device=device, **training)
    assert all(torch.isfinite(x).all() for name, x in reference.items() if "loss" in name), "the test's model blew up"
    ours = train(put(built(build, device), value, entry), device=device, **training)
    assert_same(reference, ours)


@contextlib.contextmanager
def new_tensors_in(dtype: torch.dtype) -> Iterator[None]:
    """Make this the default dtype.

    In float64 two legitimate orders of a sum differ by 1e-13 or so, and a mistake by much more: a comparison up to
    rounding belongs there. In float32 how far they are apart is up to the processor.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def nearly_same(left: Tensor, right: Tensor) -> bool:
    """Equal up to the order of sums in float64, or bit for bit if these are no float64 numbers."""
    if left.dtype != torch.float64:
        return same_bits(left, right)
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-9, atol=1e-10)


@contextlib.contextmanager
def deterministic(device: str) -> Iterator[None]:
    """On CUDA, ask for kernels that repeat their bits; on CPU all of ours do."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(device != "cpu" or before, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def inputs_then_weights(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    """The split of zero-bubble pipelines."""
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    return [*first, *torch.autograd.grad(loss, parameters)]


def gradient_penalty(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + grad.square().sum()).backward()
    return [grad]
