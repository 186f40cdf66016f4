"""Models and inputs without data, so that a step of any size can run anywhere."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import PlanError, Problem, SacError
from sac.tensors import tensor_parts
from sac.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    tree_map_only,
)

# Note [Fake tensors]
#
# Parameters, buffers and floating-point inputs of the copy are fake: they have a shape, a dtype and a device, and ops
# on them return more fake tensors. Integer and boolean inputs stay real. Values that a model computes from these alone
# (positions, whether a mask masks anything) are computed, and the model may read them, so it runs the same ops as in
# training. For this reason no fake mode is active. Only an op with a fake argument is fake; the mode comes with the
# argument. (Under an active mode, Hugging Face models detect tracing and build masks that they do not build otherwise.)
#
# No device that trains runs the ops of the meta device: attention decomposes into products, and the replacements for a
# GPU's ops (gpu_ops.py) are not called. So tensors on it are replaced by fake tensors of the CPU.

Inputs = tuple[Any, ...] | dict[str, Any]
Build = Callable[[Callable[[], nn.Module], torch.dtype], nn.Module]
_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def arguments_of(inputs: Any, error: type[SacError]) -> Inputs:
    """Return the arguments of a model; raises ``error`` if ``inputs`` are neither a tuple nor a dict."""
    if not isinstance(inputs, (tuple, list, Mapping)):
        found = f"a {type(inputs).__name__} is not what a model is called with"
        raise error(Problem("inputs", found, "a tuple or a dict of arguments", fix="write (x,) for one argument"))
    return dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)  # pytrees look into dicts only


def fake_mode() -> FakeTensorMode:
    """Return the fake mode that the fake tensors of one step share."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_build(mode: FakeTensorMode) -> Build:
    """Return a function that builds a model of a given dtype without data: it calls the model's class under ``mode``.

    A class that reads data is called without the mode, and its model is then copied without the data.
    """

    def build(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
        try:
            with mode:
                model = make()
                known = _changed(model, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
                return copy.deepcopy(model, known)
        except _NEEDS_DATA:  # for initialising weights (ViT), or for its own sizes (stochastic depth)
            return fake_copy(make().to(dtype), mode)

    return build


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of ``model`` whose parameters and buffers are fake; the model is not changed.

    Gradients are not copied. Raises ``PlanError`` if the model cannot be copied.
    """
    try:
        known = _changed(model, lambda tensor: _of_cpu(tensor, mode))
        with FakeCopyMode(mode):  # for tensors that are plain attributes
            return copy.deepcopy(model, known)
    except Exception as error:
        found = f"the model cannot be copied: {type(error).__name__}: {error}"
        raise PlanError(Problem(type(model).__name__, found, fix="plan the model before it is sharded")) from error


def _changed(model: nn.Module, change: Callable[[Tensor], Tensor]) -> dict[int, Any]:
    """Return other parameters and buffers for a deep copy of ``model``, by the id of each."""
    known: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        new = change(tensor.detach())
        known[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return known


def _of_cpu(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor.clone()
    if not tensor.is_meta:
        return mode.from_tensor(tensor)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def fake_inputs(inputs: Inputs | Mapping[str, Any], mode: FakeTensorMode) -> Inputs:
    """Return ``inputs`` with fake tensors in place of floating-point ones and of those on the meta device."""

    def faked(tensor: Tensor) -> Tensor:
        is_number = not (tensor.is_floating_point() or tensor.is_complex())
        if isinstance(tensor, FakeTensor) or (is_number and not tensor.is_meta):
            return tensor
        return _of_cpu(tensor.detach(), mode).requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, faked, inputs)  # type: ignore[no-any-return]


@contextmanager
def without_data(model: nn.Module) -> Iterator[None]:
    """Run a part of a step; raises ``PlanError`` that names the op if one needs data that fake tensors do not have."""
    try:
        yield
    except _NEEDS_DATA as error:
        op = getattr(error, "func", None) or (error.args[0] if error.args else "an op")
        found = f"{op} needs the data of a tensor, but a plan is made on tensors without data"
        fix = "give sac.apply a `budget`: then the first step of the training is observed"
        raise PlanError(Problem(type(model).__name__, found, fix=fix)) from error


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model; raises ``PlanError`` if it does not run."""
    try:
        with without_data(model):
            return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    except SacError:
        raise
    except Exception as error:
        frames = [one for one in traceback.extract_tb(error.__traceback__)[1:] if "/torch/" not in one.filename]
        where = "".join(f", in {one.name} at {one.filename}:{one.lineno}" for one in frames[-1:])
        found = f"its forward does not run on tensors without data{where}: {type(error).__name__}: {error}"
        fix = "see that it runs with these inputs without sac; if so, its kernels need data: give sac.apply a `budget`"
        raise PlanError(Problem(type(model).__name__, found, fix=fix)) from error


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """Return the fake mode of the parameters of ``model``, or None if they have data."""
    fakes = (part for parameter in model.parameters() for part in tensor_parts(parameter))
    return next((part.fake_mode for part in fakes if isinstance(part, FakeTensor)), None)
