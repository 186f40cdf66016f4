"""Models and inputs without data: fake tensors and the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
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

# -- Copies of a model and its inputs without data, so that a step of any size can run anywhere

# Note [Fake tensors]
#
# Parameters, buffers and floating-point inputs of the copy are fake: they have a shape, a dtype and a device, and ops
# on them return more fake tensors. Integer and boolean inputs stay real. Values that a model computes from these alone
# (positions, whether a mask masks anything) are computed, and the model may read them, so it runs the same ops as in
# training. For this reason no fake mode is active. Only an op with a fake argument is fake; the mode comes with the
# argument. (Under an active mode, Hugging Face models detect tracing and build masks that they do not build otherwise.)

Inputs = tuple[Any, ...] | dict[str, Any]

Build = Callable[[Callable[[], nn.Module], torch.dtype], nn.Module]

_NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


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
                _cast(model, dtype)
        except _NEEDS_DATA:  # for initialising weights (ViT), or for its own sizes (stochastic depth)
            return fake_copy(make().to(dtype), mode)
        return model

    return build


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Do the same as ``model.to(dtype)``, which cannot replace fake parameters (torch 2.11 to 2.13)."""
    done: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with the tensor itself: parameters may be shared
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point() or tensor.dtype is dtype:
                    continue
                if id(tensor) not in done:
                    new: Tensor = tensor.detach().to(dtype)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    done[id(tensor)] = tensor, new
                tensors[name] = done[id(tensor)][1]  # type: ignore[assignment]


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of ``model`` whose parameters and buffers are fake; the model is not changed.

    Gradients are not copied. Raises ``PlanError`` if the model cannot be copied.
    """
    if any(is_fake(parameter) for parameter in model.parameters()):
        return _copy_without_data(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        with FakeCopyMode(mode):
            copied: nn.Module = copy.deepcopy(model)
    except Exception as error:
        raise _no_copy(model, error) from error
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return copied


def _no_copy(model: nn.Module, error: Exception) -> PlanError:
    found = f"the model cannot be copied: {type(error).__name__}: {error}"
    return PlanError(Problem(type(model).__name__, found, fix="plan the model before it is sharded"))


def _copy_without_data(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model whose tensors have no data, with fake tensors of the same mode.

    By default, ``deepcopy`` also copies the mode of each tensor, and with it memory that torch does not expect to be
    copied: the process crashes, often only at its end (torch 2.13).
    """
    copied: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        new = tensor.detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        copied[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return copy.deepcopy(model, copied)


def fake_inputs(inputs: Inputs | Mapping[str, Any], mode: FakeTensorMode) -> Inputs:
    """Return ``inputs`` with fake tensors in place of floating-point ones."""

    def faked(tensor: Tensor) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()) or isinstance(tensor, FakeTensor):
            return tensor
        return mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, faked, inputs)  # type: ignore[no-any-return]


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model; raises ``PlanError`` if it does not run, or needs data that fake tensors do not have."""
    try:
        return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    except _NEEDS_DATA as error:
        raise needs_data(model, error) from error
    except SacError:
        raise
    except Exception as error:
        found = f"its forward does not run with these inputs: {type(error).__name__}: {error}"
        fix = "see that it runs without sac; if it does, but not without data: give sac.apply a `budget`"
        raise PlanError(Problem(type(model).__name__, found, fix=fix)) from error


def run_backward(model: nn.Module, loss: Tensor) -> None:
    """Run the backward of ``model``'s loss; raises ``PlanError`` if it needs data that fake tensors do not have."""
    try:
        loss.backward()
    except _NEEDS_DATA as error:
        raise needs_data(model, error) from error


def needs_data(model: nn.Module, error: Exception) -> PlanError:
    """Return the error that names the op that needs data."""
    op = getattr(error, "func", None) or (error.args[0] if error.args else "an op")
    return PlanError(
        Problem(
            type(model).__name__,
            f"{op} needs the data of a tensor, but a plan is made on tensors without data",
            fix="give sac.apply a `budget`: then the first step of the training is observed",
        )
    )


def is_fake(tensor: Tensor) -> bool:
    """Return whether ``tensor`` has no data."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    """Return the fake mode of the parameters of ``model``, or None if they have data."""
    fakes = (part for parameter in model.parameters() for part in tensor_parts(parameter))
    return next((part.fake_mode for part in fakes if isinstance(part, FakeTensor)), None)


# -- Models on the meta device, planned as if on the CPU, without data

# Note [The meta device]
#
# A model that is too large for this machine is built under `torch.device("meta")`. No device that trains runs the ops
# of the meta device: attention decomposes into products, and the replacements for a GPU's ops (gpu_ops.py) are not
# called. So the model's tensors are replaced by fake tensors of the CPU, from which any device can be planned.


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a parameter of the model is on the meta device."""
    return any(_is_on_meta(parameter) for parameter in model.parameters())


def off_meta(model: nn.Module, inputs: Inputs, device: Any) -> tuple[nn.Module, Inputs]:
    """Return a copy of a model on the meta device, and of its inputs, with fake tensors of the CPU.

    See Note [The meta device]. Raises ``PlanError`` if no ``device`` is named, or if the model cannot be copied.
    """
    name = type(model).__name__
    if device is None:
        found = "the model is on the meta device, so sac does not know where it will be trained"
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
