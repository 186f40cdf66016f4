"""Saved values that rules offload: which of a region's storages wait on the host, and which stay, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sac.outer_hooks import OuterPacked
from sac.stores.backward_order import CallNode
from sac.stores.layout import distributed_again, distribution_of, local_of
from sac.stores.transfers import HostCopy, Transfers, TransfersByDevice
from sac.tensors import Place, lazy_bits, place_of, with_lazy_bits
from sac.torch_private import FakeTensor, UnseenByModes, storage_use_count

# Note [Offloaded values]
#
# An offloaded value is a saved value that waits on the host: what holds for `save` holds for it. When a region's
# forward ends, its recorder and its handles hold the values that backward will read, and nothing else; dead ones are
# freed. Of these the frame offloads whole storages, each once, with all tensors in it:
#
#   look_at   is called with each held tensor and the rule that saved it
#   start     decides on each storage, and starts the copies (Note [Transfers]); the tensors in it are exchanged for an
#             `OuterPacked`, as if saved-tensor hooks around the region had packed them
#
# A storage is sent only if nothing else holds it: then nothing can write to it later, and its memory becomes free. So
# outputs, inputs, parameters and what a module keeps in an attribute stay. Small storages stay as well. Under
# saved-tensor hooks around the region, those decide where values wait.
#
# Bits. What comes back has the same offset in a new storage, and device allocators align storages in the same way. So
# kernels that choose by strides or alignment choose as before.

SMALL = "small"
SHARED = "held elsewhere too"
FULL = "no room on the host"
NO_GAIN = "device memory is host memory"
HOOKS = "hooks around the region decide"
TANGENTS = "forward-mode differentiation is on"
OTHER_KIND = "not plain tensors"


@dataclass(slots=True)
class OffloadUse:
    """What became of what one rule offloads, in bytes of whole storages, in the last call of one region.

    ``host_bytes``: copied to host memory; ``spared_bytes``: of these, what backward found on the device, not freed yet,
    as in the last regions. ``held_bytes``: what stayed on the device, by reason. ``rule``: its id, in a report.
    """

    rule: str = ""
    host_bytes: int = 0
    spared_bytes: int = 0
    held_bytes: dict[str, int] = field(default_factory=dict)

    def hold(self, reason: str, size: int) -> None:
        """Count a storage that stays on the device."""
        self.held_bytes[reason] = self.held_bytes.get(reason, 0) + size


class _Group:
    """The held tensors of one storage with their ``put``, and the tensors that hold it for them, by id.

    ``rule``: the first of the rules that offload it; ``stays``: whether it may not leave, as for another rule.
    """

    __slots__ = ("held", "one", "references", "rule", "stays", "storage")

    def __init__(self, one: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.one = one
        self.storage = storage
        self.held: list[tuple[torch.Tensor, Callable[[Any], None]]] = []
        self.references: set[int] = set()
        self.rule: int | None = None
        self.stays = False


class Offloading:
    """Offloads values of one region call; see Note [Offloaded values].

    ``rules``: the rules that offload, by index. ``figures``: by rule, filled by ``start``.
    """

    def __init__(self, transfers: TransfersByDevice, rules: Collection[int]) -> None:
        self._transfers = transfers
        self._rules = rules
        self._groups: dict[int, _Group] = {}
        self.figures: defaultdict[int, OffloadUse] = defaultdict(OffloadUse)

    def look_at(self, tensor: torch.Tensor, put: Callable[[Any], None], rule: int) -> None:
        """Count a held tensor. ``put``: has its owner hold something else. ``rule``: the rule that saved it."""
        part = tensor if type(tensor) is torch.Tensor else local_of(tensor)
        group = self._group_of(part)
        if group is None:
            if rule in self._rules:
                self.figures[rule].hold(OTHER_KIND, tensor.numel() * tensor.element_size())
            return
        group.references.add(id(part))
        group.held.append((tensor, put))
        if rule != group.rule:
            if rule not in self._rules:
                group.stays = True
            elif group.rule is None or rule < group.rule:
                group.rule = rule

    def _group_of(self, part: torch.Tensor) -> _Group | None:
        """Return the group of the storage of ``part``; None if it is of a kind that cannot leave the device."""
        is_fake = type(part) is FakeTensor  # in a plan's steps
        if part.layout is not torch.strided or not (is_fake or type(part) is torch.Tensor):
            return None
        if not is_fake and (part.is_quantized or part.is_inference()):
            return None
        storage = part.untyped_storage()
        group = self._groups.get(storage._cdata)
        if group is None:
            try:
                if not is_fake:
                    storage.data_ptr()
            except RuntimeError:  # the zero tensors of forward mode have no memory
                return None
            group = self._groups[storage._cdata] = _Group(part, storage)
        return group

    def start(self, call: CallNode, *, held: str) -> None:
        """Decide on each storage, and start the copies; ``call`` is the region call.

        ``held``: why all of them stay, empty if there is no such reason.
        """
        sent: dict[Transfers, list[tuple[_Group, OffloadUse]]] = {}
        alone = _uses_if_alone()
        for group in self._groups.values():
            if group.rule is None:
                continue
            figures, size = self.figures[group.rule], group.storage.nbytes()
            transfers = self._transfers.of(group.one.device)
            if held:
                figures.hold(held, size)
            elif transfers is None or not transfers.is_async:
                figures.hold(NO_GAIN, size)
            elif size < transfers.limits.smallest:
                figures.hold(SMALL, size)
            elif group.stays or alone is None or _uses(group.storage) - len(group.references) != alone:
                figures.hold(SHARED, size)
            elif size:
                sent.setdefault(transfers, []).append((group, figures))
        self._groups = {}
        for transfers, groups in sent.items():
            copies = transfers.put([_in_storage(group.storage, group.one, torch.uint8) for group, _ in groups], call)
            for (group, figures), copy in zip(groups, copies, strict=True):
                if copy is None:
                    figures.hold(FULL, group.storage.nbytes())
                    continue
                figures.host_bytes += copy.size
                copy.figures = figures
                read = partial(_read, copy)
                for tensor, put in group.held:
                    put(OuterPacked(_place_of(tensor), read))


def _uses(storage: torch.UntypedStorage) -> int:
    """Return how many hold ``storage``."""
    assert storage_use_count is not None
    return int(storage_use_count(storage._cdata))


def _uses_if_alone() -> int | None:
    """Return how many hold a storage that a variable holds, besides its tensors; None if torch does not say it."""
    if storage_use_count is None:
        return None
    fresh = torch.UntypedStorage(0)
    other = torch.empty(0).set_(fresh)  # it is counted otherwise while no tensor holds it
    uses = _uses(fresh) - 1
    del other
    return uses


# What a held tensor is exchanged for: dtype, offset, shape, strides, lazy bits, and how it is distributed.
_Place = tuple[torch.dtype, int, torch.Size, tuple[int, ...], int, Any]


def _place_of(tensor: torch.Tensor) -> _Place:
    """Return where ``tensor`` lies in its storage: a plain one, or a DTensor whose local tensor is one."""
    part, distribution = tensor, None
    if type(tensor) is not torch.Tensor:
        part, distribution = local_of(tensor), distribution_of(tensor)
    return part.dtype, *place_of(part), lazy_bits(part), distribution


def _read(copy: HostCopy, place: _Place) -> torch.Tensor:
    """Return the tensor in the bytes of ``copy`` on the device; no mode sees how it is made."""
    dtype, offset, shape, stride, bits, distribution = place
    flat = copy.transfers.look(copy)
    found = _in_storage(flat.untyped_storage(), flat, dtype, (offset, shape, stride), bits)
    return found if distribution is None else distributed_again(found, distribution)


def _in_storage(
    storage: torch.UntypedStorage, like: torch.Tensor, dtype: torch.dtype, place: Place | tuple[()] = (), bits: int = 0
) -> torch.Tensor:
    """Return a new tensor in ``storage``, which is that of ``like``, made unseen by any mode.

    Without a ``place`` it is all of the storage. ``bits``: its lazy bits. Without data if ``like`` has none.
    """
    guard = UnseenByModes() if UnseenByModes is not None else None
    try:
        if type(like) is torch.Tensor:
            return with_lazy_bits(torch.empty(0, dtype=dtype, device=like.device).set_(storage, *place), bits)
        assert isinstance(like, FakeTensor)
        made = torch.empty(0, dtype=dtype, device="meta").set_(storage, *place)
        return with_lazy_bits(FakeTensor(like.fake_mode, made, like.device), bits)
    finally:
        del guard
