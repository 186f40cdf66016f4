"""The oracle of the stacks: what a training gives (losses, gradients, parameters, buffers, random state), and what it
costs: FLOPs, kept bytes and collectives, measured.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from sac import memory_timeline
from sac.memory_timeline import mark, measure_memory
from sac.ops.flops import ADDED_FORMULAS
from tests.support.training import same_bits

FORMULAS = {**flop_registry, **{op: shape_wrapper(formula) for op, formula in ADDED_FORMULAS.items()}}
FORWARD_DONE = "forward done"
RELEASE_SECONDS = 0.005
SENT = "gloo:"  # the backend's own events: a collective whose result is taken from what was kept has none
WRAPPED_NAMES = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.", "module.")


@dataclass(frozen=True)
class Outcome:
    """Some steps of training, the last of them measured."""

    losses: list[float]
    gradients: dict[str, Tensor]
    flops: int
    kept_bytes: int
    collectives: dict[str, int]
    state: dict[str, Tensor] = field(default_factory=dict)  # after the steps: parameters, buffers, the random state


def train(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], **options: Any) -> Outcome:
    """Steps of a model whose loss is `loss_of(model)`."""

    def step() -> Tensor:
        loss = loss_of(model)
        forward_done()
        loss.backward()
        return loss

    return outcome(step, model, **options)


def outcome(
    step: Callable[[], Any], model: nn.Module, *, steps: int = 2, seed: int = 0, compiled: bool = False
) -> Outcome:
    """Run `step` some times and read the gradients after each; memory, FLOPs and collectives are those of the last.

    `step` is one forward and backward, without the optimizer; it calls `forward_done()` in between if there is one
    place where all of forward is over, and may return the loss. The parameters never change, so losses of steps differ
    only by random numbers.
    """
    torch.manual_seed(seed)
    losses, gradients = [], {}
    profilers: list[Any] = []

    def one_step() -> None:
        loss = step()
        losses.extend([float(loss.detach())] if loss is not None else [])

    def profiler(**options: Any) -> Any:
        """For shapes it holds weak references: then `.to` cannot exchange the parameters of a sharded module."""
        profilers.append(profile(record_shapes=compiled, **options))
        return profilers[-1]

    # A dispatch mode would change what runs of a compiled model; what eager's modes answer themselves has no event.
    products = contextlib.nullcontext() if compiled else _Products()
    for index in range(steps):
        model.zero_grad()
        if index < steps - 1:
            one_step()
        else:
            with _buffers_freed_here(), products, pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory_timeline, "profile", profiler)
                memory = measure_memory(one_step)
        gradients |= {f"step {index} {name}": value for name, value in gradients_of(model).items()}
    state = _state_of(model)
    events = profilers[0].profiler.kineto_results.events()
    flops = sum(_product_flops(one.name(), one.shapes()) for one in events) if compiled else products.flops
    sent = Counter(event.name() for event in events if event.name().startswith(SENT))
    kept = memory.at(FORWARD_DONE) if FORWARD_DONE in memory.marks else memory.peak_bytes
    return Outcome(losses, gradients, flops, kept, dict(sent), state)


class _Products(TorchDispatchMode):
    """Counts what torch's counter of FLOPs does, in a tenth of its time."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := FORMULAS.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def forward_done() -> None:
    """Say that forward is over and backward has not begun: here `kept_bytes` is read."""
    mark(FORWARD_DONE)


@contextlib.contextmanager
def _buffers_freed_here() -> Iterator[None]:
    """Let this thread be the last to hold the buffers of a collective: what gloo's frees the profiler does not see."""
    if not dist.is_initialized():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "_broadcast_coalesced", _broadcast_one_by_one)  # DDP's buffers: waits in C++
        patch.setattr(dist.Work, "wait", _longer(dist.Work.wait))
        patch.setattr(funcol, "wait_tensor", _longer(funcol.wait_tensor))
        yield


def _broadcast_one_by_one(group: Any, tensors: list[Tensor], buffer_size: int, source: int) -> None:
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=source)


def _longer(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a pause after it, in which gloo's threads release what they hold."""

    @functools.wraps(function)
    def longer(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        time.sleep(RELEASE_SECONDS)
        return found

    return longer


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the model by parameter, whole ones where they are sharded, under names without wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        found[unwrapped(name)] = gradient.detach().clone()
    return found


def unwrapped(name: str) -> str:
    for wrapped in WRAPPED_NAMES:
        name = name.replace(wrapped, "")
    return name


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """What this rank holds of parameters and buffers, and the random state."""
    found = {unwrapped(name): value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    found = {key: part.clone() for name, value in found.items() for key, part in _parts(name, value)}
    return {**found, "random state": torch.get_rng_state()}


def _parts(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The plain tensors in a DTensor or in quantised weights, under names of their own."""
    value = getattr(value, "_local_tensor", value)
    if not hasattr(value, "__tensor_flatten__"):
        return [(name, value)]
    return [
        pair for inner in value.__tensor_flatten__()[0] for pair in _parts(f"{name}.{inner}", getattr(value, inner))
    ]


def differences(ours: Outcome, reference: Outcome) -> list[str]:
    """Names of the tensors that differ in any bit, or that only one of the two has; `losses` where those differ."""
    assert reference.gradients, "the reference has no gradient: nothing was compared"
    return (["losses"] if ours.losses != reference.losses else []) + [
        name
        for mine, other in ((ours.gradients, reference.gradients), (ours.state, reference.state))
        for name in sorted(mine.keys() | other.keys())
        if name not in mine or name not in other or not same_bits(mine[name], other[name])
    ]


def least_kept(ours: list[Outcome], reference: list[Outcome]) -> float:
    """The least ratio of kept bytes in a process: in another, what gloo's threads free may be unseen."""
    return min(mine.kept_bytes / other.kept_bytes for mine, other in zip(ours, reference, strict=True))


def assert_recomputed(train: Callable[[Any], Outcome], *modes: Any) -> list[Outcome]:
    """Each mode gives what "none" gives, runs more FLOPs and keeps fewer bytes; return their outcomes, "none" first."""
    plain = train("none")
    found = [train(mode) for mode in modes]
    for mode, ours in zip(modes, found, strict=True):
        assert differences(ours, plain) == [], mode
        assert ours.flops > plain.flops, mode
        assert ours.kept_bytes < plain.kept_bytes, mode
    return [plain, *found]


def _product_flops(name: str, shapes: list[list[int]]) -> int:
    """FLOPs of a matrix product or a fused attention, one multiply-add as two."""
    match name:
        case "aten::mm":
            left, right = shapes[:2]
        case "aten::addmm":
            left, right = shapes[1:3]
        case "aten::bmm":
            left, right = shapes[:2]
        case "aten::baddbmm":
            left, right = shapes[1:3]
        case "aten::_scaled_dot_product_flash_attention_for_cpu":
            query, key = shapes[:2]
            return 4 * math.prod(query) * key[-2]
        case "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
            query, key = shapes[1:3]
            return 10 * math.prod(query) * key[-2]
        case _:
            return 0
    return 2 * math.prod(left) * right[-1]
