"""DeepSpeed's ZeRO-3 as far as a region meets it: weights that hold nothing but while a module of theirs runs.

As there: a hook before a module's forward gathers its weights and one after it lets them go, two nodes of the graph do
the same around its backward, gradients are taken away as they arrive, and linear maps save the weight itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F


class Linear(torch.autograd.Function):
    """A linear map that saves its weight, where torch's own saves a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, needed = grads[0].flatten(0, -2), ctx.needs_input_grad
        return (
            grads[0] @ weight if needed[0] else None,
            rows.t() @ x.flatten(0, -2) if needed[1] else None,
            rows.sum(0) if needed[2] else None,
        )


class Sharded:
    """The weights of a model, each held elsewhere; `gathered` are the storages of those that were gathered."""

    def __init__(self, model: nn.Module) -> None:
        self.gathered: list[tuple[StorageWeakRef, int]] = []
        for index, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_tensor = index, parameter.data.clone()
            parameter.ds_status, parameter.ds_grad = "NOT_AVAILABLE", None
            parameter.data = torch.empty(0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_take_gradient)
        for module in model.modules():
            if module._parameters:
                module.register_forward_pre_hook(self._before_forward)
                module.register_forward_hook(self._after_forward)

    def gather(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter.ds_status == "NOT_AVAILABLE":
                parameter.data, parameter.ds_status = parameter.ds_tensor.clone(), "AVAILABLE"
                self.gathered.append((StorageWeakRef(parameter.untyped_storage()), parameter.numel()))

    def release(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            parameter.data, parameter.ds_status = torch.empty(0), "NOT_AVAILABLE"

    @property
    def held(self) -> int:
        """Elements of gathered weights that something still holds."""
        return sum(size for storage, size in self.gathered if not storage.expired())

    def _before_forward(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.gather(module)
        return tuple(_Then.apply(self.release, module, x) if x.requires_grad else x for x in args)

    def _after_forward(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        self.release(module)
        return _Then.apply(self.gather, module, out) if out.requires_grad else out


class _Then(torch.autograd.Function):
    """Does something with a module when backward comes here."""

    @staticmethod
    def forward(ctx: Any, then: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.then, ctx.module = then, module
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.then(ctx.module)
        return None, None, *grads


def _take_gradient(parameter: Any) -> None:
    parameter.ds_grad = parameter.grad if parameter.ds_grad is None else parameter.ds_grad + parameter.grad
    parameter.grad = None


@contextmanager
def its_linear() -> Iterator[None]:
    """Let every linear map be `Linear`, as DeepSpeed does while it trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", Linear.apply)
        yield
