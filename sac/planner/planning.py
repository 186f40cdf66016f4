"""``sac.plan``: from a model, its inputs and a memory budget to a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import PlanError, Problem
from sac.planner.child import planned
from sac.planner.fakes import Inputs
from sac.planner.meta import is_on_meta, off_meta
from sac.planner.planner import Progress
from sac.planner.plans import Plan, make_plan
from sac.planner.prepare import prepare, refuse_unfit
from sac.policy.model import Policy


def plan(
    model: nn.Module,
    inputs: Inputs,
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    optimizer: Any = None,
    real: bool = False,
    parallelize: Callable[[nn.Module], Any] | None = None,
    accumulates: bool = False,
    in_flight: int = 1,
) -> Policy:
    """Return the policy that fits one training step of ``model`` into ``budget`` with the least recomputation.

    ``inputs``: a tuple or dict of what the model is called with. ``budget``: the peak of allocated bytes over forward
    and backward of one step, with parameters and gradients, and the state of ``optimizer`` (a name or an optimizer)
    if one is given; an int, a text such as ``"40GiB"``, or a share of the way from the least peak to that without
    checkpointing, ``"50%"``. The loss is ``loss_fn(output)``, else ``output.loss``, else a scalar output. ``device``
    tells whose figures price the ops (``"h100"``, …; default: where the parameters are); of a model on the CPU, or on
    the meta device, those ops are planned that this device would run, in a process of its own. ``engine``: which one
    will run; with rerun all that is not kept runs again. The model and torch's random state are left as they are; no
    data is looked at unless ``real=True``, which trains a copy of the model for some steps instead, where it is.
    ``parallelize`` is given the copy and shards it in place (``fully_shard``, ``parallelize_module``), over a process
    group that sends nothing: the budget is that of one rank then. ``accumulates``: gradients of earlier micro-batches
    are there from the start. ``in_flight``: micro-batches whose activations a pipeline stage holds at once.

    Raises ``PlanError``: a budget below the least peak, a loss or a device that is not known, inputs that are neither a
    tuple nor a dict, a forward that needs data; ``ModelError`` for a model that sac is on, or that has no blocks.
    """
    refuse_unfit(model)
    if not isinstance(inputs, (tuple, list, Mapping)):
        found = f"a {type(inputs).__name__} is not what a model is called with"
        raise PlanError(Problem("inputs", found, "a tuple or a dict of arguments", fix="write (x,) for one argument"))
    given: Inputs = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)  # of any mapping tensors are seen
    if is_on_meta(model):
        model, given = off_meta(model, given, device, real=real)

    def make(progress: Progress) -> Plan:
        planner = prepare(
            model,
            given,
            loss_fn=loss_fn,
            device=device,
            engine=engine,
            optimizer=optimizer,
            real=real,
            parallelize=parallelize,
            accumulates=accumulates,
            in_flight=in_flight,
            progress=progress,
        )
        return make_plan(planner, budget)

    gpus = {parameter.device for parameter in model.parameters() if real and parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=gpus, device_type="cuda"):  # without data nothing is drawn on a GPU
        return planned(model, device, make, real=real).policy
