"""What rules offload: kept values of a call and of its handles wait on the host until backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from sac.engine.handles import KEPT, Handle
from sac.engine.settings import Settings
from sac.engine.table import NO_RULE
from sac.engine.tape import Tape
from sac.stores.backward_order import CallNode
from sac.stores.offload import HOOKS, TANGENTS, Offloading, OffloadUse
from sac.stores.saved_tensor import SavedTensor
from sac.tensors import version_of
from sac.torch_private import forward_ad_level


class _Held(SavedTensor):
    """What a handle or the tape holds, as the transfers know it. ``put``: has the owner hold something else."""

    __slots__ = ("put", "value", "watched")

    def __init__(self, tensor: Tensor, put: Callable[[Any], None]) -> None:
        self.value: Any = tensor
        self.watched, self.put = None, put

    def exchange(self, held: Any) -> None:
        """Have the owner hold ``held``."""
        self.value = held
        self.put(held)


def offload(
    tape: Tape, handles: list[Handle], settings: Settings, call: CallNode, *, is_packed: bool
) -> Mapping[int, OffloadUse]:
    """Send what rules offload to the host; return what became of it, by rule. ``is_packed``: by hooks around."""
    work = Offloading(settings.transfers, tape.table.offloads)
    rules = {tape.roots[value]: rule for value, rule in tape.rule_of.items()}
    for handle in handles:
        held = handle.value
        # Backward has to see that one was written to since.
        if handle.state == KEPT and isinstance(held, Tensor) and version_of(held) == handle.version:
            rule = rules.get(tape.roots[handle.position[0]], NO_RULE)
            work.look_at(_Held(held, _putter(handle)), rule)
    for value, tensor in tape.kept.items():
        if isinstance(tensor, Tensor):
            work.look_at(_Held(tensor, _keeper(tape, value)), tape.rule_of.get(value, NO_RULE))
    work.start(call, held=HOOKS if is_packed else TANGENTS if forward_ad_level() >= 0 else "")
    return work.figures


def _putter(handle: Handle) -> Callable[[Any], None]:
    def put(held: Any) -> None:
        handle.value = held

    return put


def _keeper(tape: Tape, value: int) -> Callable[[Any], None]:
    def put(held: Any) -> None:
        tape.kept[value] = held

    return put
