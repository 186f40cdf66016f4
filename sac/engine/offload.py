"""What rules offload: kept values of a call and of its handles wait on the host until backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from sac.engine.handles import KEPT, Handle
from sac.engine.settings import Settings
from sac.engine.table import NO_RULE
from sac.engine.tape import Tape
from sac.stores.backward_order import CallNode
from sac.stores.offload import OffloadUse, offload_values
from sac.tensors import version_of
from sac.torch_private import forward_ad_level


def offload(
    tape: Tape, handles: list[Handle], settings: Settings, call: CallNode, *, is_packed: bool
) -> Mapping[int, OffloadUse]:
    """Send what rules offload to the host; return what became of it, by rule. ``is_packed``: by hooks around."""
    rules = {tape.roots[value]: rule for value, rule in tape.rule_of.items()}
    values: list[tuple[Tensor, Callable[[Any], None], int]] = []
    for handle in handles:
        held = handle.value
        # Backward has to see that one was written to since.
        if handle.state == KEPT and isinstance(held, Tensor) and version_of(held) == handle.version:
            rule = rules.get(tape.roots[handle.position[0]], NO_RULE)
            values.append((held, partial(setattr, handle, "value"), rule))
    for value, tensor in tape.kept.items():
        if isinstance(tensor, Tensor):
            rule = tape.rule_of.get(value, NO_RULE)
            values.append((tensor, partial(tape.kept.__setitem__, value), rule))
    reason = "hooks around the region decide" if is_packed else ""
    if forward_ad_level() >= 0:
        reason = "forward-mode differentiation is on"
    return offload_values(settings.transfers, tape.table.offloads, values, call, held=reason)
