"""Parse budgets, and compute the bytes of optimizer state."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sac.config_keys import STATES
from sac.errors import PlanError, Problem, listing, nearest
from sac.planner.fakes import fake_mode
from sac.policy.read import LEGAL_BYTES, parse_bytes
from sac.tensors import tensor_parts
from sac.torch_private import DataDependentOutputException

LEGAL_BUDGET = f'{LEGAL_BYTES}, or a share of the range such as "50%"'


@dataclass(frozen=True, slots=True)
class Budget:
    """A peak in bytes, or a share (0 to 1) of the way from the least peak to the peak without checkpointing."""

    bytes: int | None = None
    share: float = 0.0

    def within(self, least: int, most: int) -> int:
        """Return the budget in bytes for a model whose peak ranges from ``least`` to ``most`` bytes."""
        return least + int(self.share * (most - least)) if self.bytes is None else self.bytes


def read_budget(value: Any) -> Budget:
    """Return the parsed budget; raises ``PlanError`` if ``value`` is not a budget."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Budget(value)
    reason = ""
    if isinstance(value, str):
        text = value.strip()
        try:
            if not text.endswith("%"):
                if count := parse_bytes(text):
                    return Budget(count)
            elif 0 <= (share := float(text[:-1]) / 100) <= 1:
                return Budget(share=share)
            else:
                raise ValueError("a share is 0% to 100%")
        except ValueError as error:
            reason = f": {error}"
    written = f'"{value}"' if reason else repr(value)
    raise PlanError(Problem("budget", f"{written} is not a budget{reason}", LEGAL_BUDGET))


def optimizer_bytes(optimizer: Any, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state on this rank for the trained ones of ``parameters``.

    ``optimizer``: None (no state), a name (sgd, momentum, adam, adamw: states with the shape of each parameter), or an
    optimizer, which is run on a parameter without data of each shape; if its groups differ, with the options of the
    group that holds the most. Counters, one number per parameter, are ignored. Raises ``PlanError`` otherwise.
    """
    parts = [part for one in parameters if one.requires_grad for part in tensor_parts(one.detach())]
    if optimizer is None:
        return 0
    if isinstance(optimizer, str):
        word = optimizer.strip().lower()
        if word not in STATES:
            found, fix = f"'{optimizer}' is not known", "pass the optimizer itself"
            raise PlanError(Problem("optimizer", found, listing([*STATES]), nearest(word, STATES), fix=fix))
        return STATES[word] * sum(part.numel() * part.element_size() for part in parts)
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = f"a {type(optimizer).__name__} is not an optimizer"
        raise PlanError(Problem("optimizer", found, f"{listing([*STATES])}, or a torch.optim.Optimizer"))
    alike = Counter((tuple(part.shape), part.dtype) for part in parts)
    return sum(
        count * max(_state_bytes(optimizer, group, *part) for group in optimizer.param_groups)
        for part, count in alike.items()
    )


def _state_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Return the bytes of state that such an optimizer holds for one parameter with the options of ``group``."""
    with fake_mode():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
        parameter.grad = torch.empty_like(parameter)
    same: Any = type(optimizer)
    accepted = inspect.signature(same).parameters  # a group also holds options that the class has added itself
    options = {name: value for name, value in group.items() if name in accepted and name != "params"}
    options |= {name: False for name in ("foreach", "fused") if name in options}  # other kernels, same state
    try:
        tried = same([parameter], **options)
        with contextlib.suppress(DataDependentOutputException):  # for example of a norm; by then the state exists
            tried.step()
    except Exception as error:
        found = f"a step of {same.__name__} cannot be tried without data: {type(error).__name__}: {error}"
        fix = f"name one that has as many states ({listing([*STATES])}), or give none and leave room"
        raise PlanError(Problem("optimizer", found, fix=fix)) from error
    states = (one for one in tried.state[parameter].values() if isinstance(one, torch.Tensor) and one.dim())
    return sum(one.numel() * one.element_size() for one in states)
