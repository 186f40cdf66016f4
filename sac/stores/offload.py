"""Saved values that rules offload: which of a region's storages wait on the host, and which stay, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from sac.outer_hooks import OuterPacked
from sac.stores.backward_order import CallNode
from sac.stores.layout import distribution_of, local_of
from sac.stores.transfers import HostCopy, Transfers, TransfersByDevice
from sac.tensors import Place, lazy_bits, place_of, with_lazy_bits
from sac.torch_private import UnseenByModes, storage_use_count

# Note [Offloaded values]
#
# An offloaded value is a saved value that waits on the host: what holds for `save` holds for it. When a region's
# forward ends, its recorder and its handles hold the values that backward will read, and nothing else; dead ones are
# freed. Of these whole storages are offloaded, each once (Note [Transfers]); the tensors in it are exchanged for an
# `OuterPacked`, as if saved-tensor hooks around the region had packed them.
#
# A storage is sent only if nothing else holds it: then nothing can write to it later, and its memory becomes free. So
# outputs, inputs, parameters and what a module keeps in an attribute stay. Small storages stay as well. Under
# saved-tensor hooks around the region, those decide where values wait.
#
# Bits. What comes back has the same offset in a new storage, and device allocators align storages in the same way. So
# kernels that choose by strides or alignment choose as before.


@dataclass(slots=True)
class OffloadUse:
    """What became of what one rule offloads, in bytes of whole storages, in the last call of one region.

    ``host_bytes``: copied to host memory. ``held_bytes``: what stayed on the device, by reason. ``rule``: its id, in a
    report.
    """

    rule: str = ""
    host_bytes: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)

    def hold(self, reason: str, size: int) -> None:
        """Count a storage that stays on the device."""
        self.held_bytes[reason] = self.held_bytes.get(reason, 0) + size


_Held: TypeAlias = tuple[torch.Tensor, Callable[[Any], None], int]
"""A held tensor, a ``put`` that has its owner hold something else, and the rule that saved it."""


def offload_values(
    transfers_by_device: TransfersByDevice,
    rules: Collection[int],
    values: Iterable[_Held],
    call: CallNode,
    *,
    held: str,
) -> Mapping[int, OffloadUse]:
    """Offload values of one region call; return what became of them, by rule. See Note [Offloaded values].

    ``rules``: the rules that offload, by index. ``held``: why all values stay, empty if there is no such reason.
    """
    figures: defaultdict[int, OffloadUse] = defaultdict(OffloadUse)
    groups: defaultdict[int, list[_Held]] = defaultdict(list)  # by storage
    for tensor, put, rule in values:
        part = local_of(tensor)
        if _can_leave(part):
            groups[part.untyped_storage()._cdata].append((tensor, put, rule))
        elif rule in rules:
            figures[rule].hold("not plain tensors", tensor.numel() * tensor.element_size())
    sent: dict[Transfers, list[tuple[torch.UntypedStorage, list[_Held], OffloadUse]]] = {}
    alone = _uses_if_alone()
    for group in groups.values():
        saved_by = {rule for _, _, rule in group}
        if not (offloading := saved_by.intersection(rules)):
            continue
        storage = local_of(group[0][0]).untyped_storage()
        tensors = {id(local_of(tensor)) for tensor, _, _ in group}
        use, size, transfers = figures[min(offloading)], storage.nbytes(), transfers_by_device.of(storage.device)
        if held:
            use.hold(held, size)
        elif transfers is None:
            use.hold("device memory is host memory", size)
        elif size < transfers.limits.smallest:
            use.hold("small", size)
        elif offloading != saved_by or storage_use_count(storage._cdata) - len(tensors) != alone:
            use.hold("held elsewhere too", size)
        elif size:
            sent.setdefault(transfers, []).append((storage, group, use))
    for transfers, chosen in sent.items():
        copies = transfers.put([_in_storage(storage, torch.uint8) for storage, _, _ in chosen], call)
        for (storage, group, use), copy in zip(chosen, copies, strict=True):
            if copy is None:
                use.hold("no room on the host", storage.nbytes())
                continue
            use.host_bytes += copy.size
            for tensor, put, _ in group:
                put(_away(tensor, copy))
    return figures


def _can_leave(part: torch.Tensor) -> bool:
    """Return whether a tensor is of a kind that can leave the device."""
    if type(part) is not torch.Tensor or part.layout is not torch.strided:
        return False
    return not (part.is_quantized or part.is_inference() or part._is_zerotensor())


def _uses_if_alone() -> int:
    """Return how many hold a storage that a variable holds, besides its tensors."""
    fresh = torch.UntypedStorage(0)
    other = torch.empty(0).set_(fresh)  # it is counted otherwise while no tensor holds it
    uses = storage_use_count(fresh._cdata) - 1
    del other
    return uses


def _away(tensor: torch.Tensor, copy: HostCopy) -> OuterPacked:
    """Return what a held tensor is exchanged for: a plain one, or a DTensor whose local tensor is one."""
    part = local_of(tensor)
    return OuterPacked(copy, partial(_read, part.dtype, place_of(part), lazy_bits(part), distribution_of(tensor)))


def _read(dtype: torch.dtype, place: Place, bits: int, distribution: Any, copy: HostCopy) -> torch.Tensor:
    """Return the tensor in the bytes of ``copy`` on the device; no mode sees how it is made."""
    found = _in_storage(copy.transfers.look(copy).untyped_storage(), dtype, place, bits)
    return found if distribution is None else distribution(found)


def _in_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, place: Place | tuple[()] = (), bits: int = 0
) -> torch.Tensor:
    """Return a new tensor in ``storage``, at a place in it or all of it, with lazy bits; made unseen by any mode."""
    with UnseenByModes():
        return with_lazy_bits(torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place), bits)
