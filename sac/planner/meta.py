"""Models on the meta device, which are to be planned as if they were on the CPU, without data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from sac.errors import PlanError, Problem
from sac.planner.fakes import Inputs, fake_inputs, fake_mode

# Note [The meta device]
#
# A model that is too large for this machine is built under `torch.device("meta")`. Its ops are those of no device that
# trains: attention falls apart into products, and what stands in for a GPU's ops (lowering.py) is not called. So its
# tensors are exchanged for fake ones of the CPU, of which a plan for any device can be made.


def is_on_meta(model: nn.Module) -> bool:
    """Whether a parameter of the model is on the meta device."""
    return any(_is_on_meta(parameter) for parameter in model.parameters())


def off_meta(model: nn.Module, inputs: Inputs, device: Any, *, real: bool) -> tuple[nn.Module, Inputs]:
    """Return a copy of a model on the meta device, and its inputs, with fake tensors of the CPU instead.

    See Note [The meta device]. Raises ``PlanError`` where no ``device`` is named, where the plan is to be made with
    data (``real``), or where the model cannot be copied.
    """
    name = type(model).__name__
    if real:
        found = "it is on the meta device, and a plan on real tensors needs data"
        raise PlanError(Problem(name, found, fix="plan without real=True, or give it data: model.to_empty(device=…)"))
    if device is None:
        found = "the model is on the meta device, which does not tell where it will be trained"
        raise PlanError(Problem("device", found, fix='name the device: device="h100"'))
    mode = fake_mode()
    exchanged: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if _is_on_meta(tensor):
            new = _of_cpu(tensor, mode)
            exchanged[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    try:
        copied = copy.deepcopy(model, exchanged)
    except Exception as error:
        raise PlanError(Problem(name, f"the model cannot be copied: {type(error).__name__}: {error}")) from error
    given = tree_map_only(
        Tensor, lambda x: _of_cpu(x, mode).requires_grad_(x.requires_grad) if _is_on_meta(x) else x, inputs
    )
    return copied, fake_inputs(given, mode)


def _is_on_meta(tensor: Tensor) -> bool:
    return tensor.is_meta and not isinstance(tensor, FakeTensor)


def _of_cpu(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
