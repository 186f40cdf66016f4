"""What was decided for each op that one call of a region ran, a row per op, for trace and report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from sac.ops.flops import flops_of
from sac.ops.names import op_name
from sac.selective.table import BoundRule, Plan, first_tensor
from sac.selective.tensors import storage_bytes, tensors_of


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of a region's forward, or one module that is saved as a whole: then ``op`` is ``module`` and its class.

    ``bytes`` are those of an op's results, and of all that is kept of a module. ``flops`` by torch's formulas (0: none
    known).

    ``decision`` is ``save`` or ``recompute``; ``reason`` says who decided: a rule's id, ``must-save``, ``default``, or
    why the op cannot be saved.
    """

    module: str
    op: str
    call: int
    decision: str
    rule: str
    reason: str
    bytes: int
    flops: int
    shape: tuple[int, ...]
    dtype: str


class Rows:
    """Collects one row per op that the dispatcher shows."""

    def __init__(self) -> None:
        self.rows: list[OpRow] = []
        self._calls: dict[tuple[str, str], int] = {}

    def add(
        self,
        plan: Plan,
        rule: BoundRule | None,
        saves: bool,
        args: Any,
        kwargs: Any,
        out: Any,
        *,
        call: int | None = None,
    ) -> None:
        """Append the op just run."""
        name = op_name(plan.op)
        count = self._calls.get((plan.path, name), 0)
        self._calls[plan.path, name] = count + 1
        tensor = first_tensor(out)
        self.rows.append(
            OpRow(
                module=plan.path,
                op=name,
                call=count if call is None else call,
                decision="save" if saves else "recompute",
                rule=rule.rule.id if rule is not None else "",
                reason=_reason(plan, rule, saves),
                bytes=0 if plan.is_view else sum(map(storage_bytes, tensors_of(out))),
                flops=flops_of(plan.op, args, kwargs, out),
                shape=tuple(tensor.shape) if tensor is not None else (),
                dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
            )
        )

    def add_module(
        self, place: tuple[str, int], rule: BoundRule, module: nn.Module, out: Any, *, kept_bytes: int, flops: int
    ) -> None:
        """Append a call of a module that is saved as a whole; ``out`` is what it returned."""
        tensor = first_tensor(out if isinstance(out, torch.Tensor) else tree_leaves(out))
        path, number = place
        self.rows.append(
            OpRow(
                module=path,
                op=f"module {type(module).__name__}",
                call=number,
                decision="save",
                rule=rule.rule.id,
                reason=f"rule {rule.rule.id}",
                bytes=kept_bytes,
                flops=flops,
                shape=tuple(tensor.shape) if tensor is not None else (),
                dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
            )
        )


def signature(rows: Iterable[OpRow]) -> str:
    """Return what a sequence of ops is known by, whatever their sizes: sixteen hex digits. Views are left out."""
    text = "\n".join(f"{row.module} {row.op}" for row in rows if row.bytes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reason(plan: Plan, rule: BoundRule | None, saves: bool) -> str:
    if plan.traits.unsavable_reason:
        return plan.traits.unsavable_reason
    if rule is not None and (saves == rule.saves or not saves):
        return f"rule {rule.rule.id}"
    return "must-save" if saves and plan.must_save else "default"
