"""Build the planner of a model: a copy without data, its profiles and their choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.applying import refuse_existing_checkpointing
from sac.blocks.find import find_blocks
from sac.blocks.install import ours_on
from sac.blocks.kv_cache import turn_off_cache
from sac.config import family_policy
from sac.errors import ModelError, PlanError, Problem
from sac.planner.alike import ChainWatch
from sac.planner.budget import optimizer_bytes
from sac.planner.by_hand import SavedByPath, saved_by_hand, with_choices_by_hand
from sac.planner.choices import NONE, Choice
from sac.planner.cost import OVERHEAD, entry_times
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.fakes import Inputs, call, fake_copy, fake_inputs, fake_mode, mode_of, real_copy
from sac.planner.live_bytes import KernelWorkspace, ledgers_of
from sac.planner.memory import StepModel
from sac.planner.pareto import pareto
from sac.planner.planner import Planner, Progress, quiet, saved_by
from sac.planner.pricing import Pricing
from sac.planner.profile import RegionProfile
from sac.planner.sharding import QuickChunks, refuse_senders, shard_again
from sac.planner.tracing import CannotProfile, profile_regions
from sac.torch_private import MODULE_STAND_IN, tree_leaves


def prepare(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    optimizer: Any = None,
    real: bool = False,
    parallelize: Callable[[nn.Module], Any] | None = None,
    progress: Progress | None = None,
) -> Planner:
    """Return the planner of ``model``: profiles, prices, and the measured steps of each choice.

    ``parallelize`` shards the copy in place: ``fully_shard``, ``parallelize_module``. The model is not
    changed. For the other arguments, see ``sac.plan``.
    """
    refuse_unfit(model)
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(Problem("loss_fn", f"a {type(loss_fn).__name__} cannot be called", "a function of the output"))
    if parallelize is not None and not real:
        refuse_senders()
    figures = figures_of(model, device)
    told = progress or (lambda done, total, label: None)
    told(0, 4, "copying the model")
    mode = fake_mode()
    copied = real_copy(model) if real else fake_copy(model, mode)
    workspace = KernelWorkspace() if figures.name == "cpu" else None
    ledger = ledgers_of(workspace, mode_of(copied) if parallelize is not None else None)
    if parallelize is not None:
        with QuickChunks():
            parallelize(copied)
    extra = optimizer_bytes(optimizer, copied.parameters())
    turn_off_cache(copied)
    given = inputs if real else fake_inputs(inputs, mode)
    blocks = find_blocks(copied)
    tensors = [*copied.parameters(), *(one for one in tree_leaves(given) if isinstance(one, Tensor))]
    if not blocks or not any(tensor.requires_grad for tensor in tensors):
        raise ModelError(Problem(type(model).__name__, "every block of this model is frozen: there is nothing to plan"))
    told(1, 4, "profiling the blocks")
    order: list[str] = []
    watch = ChainWatch(copied, blocks)
    with quiet(), ledger(), watch.watching():
        try:
            profiles = profile_regions(blocks, lambda: call(copied, given), order)
        except CannotProfile as error:
            found = f"its blocks cannot be planned op by op: {error}"
            raise PlanError(Problem(type(model).__name__, found, fix="use mode: full, or a policy by hand")) from None
    if not profiles:
        found = "no block of this model is called with gradients: there is nothing to plan"
        raise ModelError(Problem(type(model).__name__, found))
    shard_again(copied)
    told(2, 4, "choosing what to keep")
    of_path = {path: group for group, profile in enumerate(profiles) for path in profile.paths}
    times = tuple(entry_times(profile, figures) for profile in profiles)
    pricing = Pricing(engine, figures, OVERHEAD)
    alike = watch.alike if MODULE_STAND_IN is not None else None
    repeats = len({*order}) < len(order)
    with ledger():  # it runs ops that fake tensors refuse
        family = family_policy(copied)
        shipped = saved_by(family, copied, profiles, lambda: call(copied, given), None if repeats else alike)
    shard_again(copied)
    hand = saved_by_hand(profiles, shipped)
    choices = tuple(_choices(pricing, *of_group, hand) for of_group in zip(profiles, times, strict=True))
    step = StepModel(
        groups=tuple(of_path[path] for path in order),
        bytes=[[choice.bytes for choice in of_group] for of_group in choices],
        paths=tuple(order),
        extra=extra,
        gathers=parallelize is not None,
    )
    planner = Planner(
        copied,
        given,
        tuple(block for block in blocks if block.path in of_path),
        pricing,
        loss_fn,
        profiles,
        times,
        choices,
        step,
        ledger,
        told,
        alike=alike,
        by_hand=hand,
    )
    planner.measure()
    return planner


def _choices(
    pricing: Pricing, profile: RegionProfile, times: Sequence[float], by_hand: Mapping[str, SavedByPath]
) -> tuple[Choice, ...]:
    """Return the choices of a region group: its save options, smallest first, then no checkpointing."""
    found = [
        pricing.choice(profile, times, keep.saved, f"{len(keep.saved)} ops" if keep.saved else "full")
        for keep in pareto(profile, times, pricing.run_by)
    ]
    none = Choice(NONE, None, max((one.bytes for one in found), default=0))
    return with_choices_by_hand((*found, none), profile, by_hand, partial(pricing.choice, profile, times))


def refuse_unfit(model: nn.Module) -> None:
    """Raise ``ModelError`` for a model that sac is already on, or whose own checkpointing is on."""
    if not isinstance(model, nn.Module):
        raise ModelError(Problem("model", f"a {type(model).__name__} is not a torch.nn.Module"))
    if any(ours_on(module) is not None for module in model.modules()):
        raise ModelError(Problem(type(model).__name__, "sac is on this model", fix="call sac.remove(model) first"))
    refuse_existing_checkpointing(model)


def figures_of(model: nn.Module, device: str | torch.device | None) -> Device:
    """Return the figures of the named device, or by default of the device of the parameters."""
    if isinstance(device, str) and device.partition(":")[0] not in ("cpu", "cuda"):
        return device_named(device)
    if not isinstance(device, str | torch.device | None):
        raise PlanError(Problem("device", f"{device!r} names no device", "a name such as h100, or a torch.device"))
    if device is not None:
        return device_at_hand(torch.device(device))
    found = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return device_at_hand(found)
