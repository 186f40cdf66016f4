"""Saved values that rules offload: which of a region's storages wait on the host, and which stay, and why."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sac.outer_hooks import OuterPacked
from sac.stores.layout import distributed_again, distribution_of, local_of
from sac.stores.prefetch import CallNode
from sac.stores.transfers import HostCopy, TransfersByDevice
from sac.torch_private import FakeTensor, UnseenByModes, neg_view, storage_use_count

# Note [Offloaded values]
#
# An offloaded value is a saved value that waits on the host: what holds for `save` holds for it. When a region's
# forward ends, its recorder and its handles hold the values that backward will read, and nothing else; dead ones are
# freed. Of these the frame offloads whole storages, each once, with all tensors in it:
#
#   look_at   is called with each held tensor and the rule that saved it
#   start     decides on each storage, and starts the copies (Note [Transfers])
#   packed    is called with each held tensor again; it returns what is to be held instead: an `OuterPacked`, as if
#             saved-tensor hooks around the region had packed the tensor, or the tensor itself
#
# A storage is sent only if nobody else holds it: then no one can write to it later, and its memory becomes free. So
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
    """The held tensors of one storage: one of them, how many, and the rules that saved them."""

    __slots__ = ("excluded", "one", "references", "rules")

    def __init__(self, one: torch.Tensor) -> None:
        self.one = one
        self.references: set[int] = set()
        self.rules: set[int] = set()
        self.excluded = False


class Offloading:
    """Offloads values of one region call; see Note [Offloaded values].

    ``rules``: the rules that offload, by index. ``figures``: by rule, filled by ``start``.
    """

    def __init__(self, transfers: TransfersByDevice, rules: Collection[int]) -> None:
        self._transfers = transfers
        self._rules = rules
        self._groups: dict[int, _Group] = {}
        self._copies: dict[int, HostCopy] = {}
        self.figures: dict[int, OffloadUse] = {}

    def look_at(self, tensor: torch.Tensor, rule: int | None) -> None:
        """Count a held tensor. ``rule``: the index of the rule that saved it."""
        part = local_of(tensor)
        if not _is_plain(part):
            if rule in self._rules and rule is not None:
                self._figures(rule).hold(OTHER_KIND, tensor.numel() * tensor.element_size())
            return
        address = part.untyped_storage()._cdata
        group = self._groups.get(address)
        if group is None:
            group = self._groups[address] = _Group(part)
        group.references.add(id(part))
        if rule is not None:
            group.rules.add(rule)

    def exclude(self, tensor: torch.Tensor) -> None:
        """Let the storage of ``tensor`` stay: backward has to see that it was written to."""
        self.look_at(tensor, None)
        group = self._groups.get(local_of(tensor).untyped_storage()._cdata) if _is_plain(local_of(tensor)) else None
        if group is not None:
            group.excluded = True

    def start(self, call: CallNode, *, held: str) -> None:
        """Decide on each storage, and start the copies; ``call`` is the region call.

        ``held``: why all of them stay, empty if there is no such reason.
        """
        sent: dict[torch.device, list[tuple[int, torch.Tensor, int]]] = {}
        for address, group in self._groups.items():
            rules = group.rules & {*self._rules}
            if not rules:
                continue
            rule, size = min(rules), group.one.untyped_storage().nbytes()
            reason = held or self._why_held(group, size)
            if reason:
                self._figures(rule).hold(reason, size)
            elif size:
                device = group.one.device
                sent.setdefault(device, []).append((address, bytes_of(group.one), rule))
        self._groups = {}
        for device, storages in sent.items():
            transfers = self._transfers.of(device)
            assert transfers is not None
            copies = transfers.put([source for _, source, _ in storages], call)
            for (address, source, rule), copy in zip(storages, copies, strict=True):
                figures = self._figures(rule)
                if copy is None:
                    figures.hold(FULL, source.numel())
                    continue
                figures.host_bytes += source.numel()
                copy.figures = figures
                self._copies[address] = copy

    def packed(self, tensor: torch.Tensor) -> torch.Tensor | OuterPacked:
        """Return what is to be held instead of ``tensor``: itself if it stays on the device."""
        part = local_of(tensor)
        copy = self._copies.get(part.untyped_storage()._cdata) if self._copies and _is_plain(part) else None
        return tensor if copy is None else OuterPacked(Geometry.of(tensor), partial(_read, copy))

    def _why_held(self, group: _Group, size: int) -> str:
        transfers = self._transfers.of(group.one.device)
        if transfers is None or not transfers.is_async:
            return NO_GAIN
        if size < transfers.limits.smallest:
            return SMALL
        if group.excluded or not group.rules <= {*self._rules} or not _is_alone(group):
            return SHARED
        return ""

    def _figures(self, rule: int) -> OffloadUse:
        return self.figures.setdefault(rule, OffloadUse())


def _read(copy: HostCopy, geometry: Geometry) -> torch.Tensor:
    return geometry.placed_on(copy.look())


def _is_plain(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    if (kind is not torch.Tensor and kind is not FakeTensor) or tensor.layout is not torch.strided:
        return False
    if kind is FakeTensor:  # in a plan's steps
        return True
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # the zero tensors of forward mode have no memory
        return False
    return not (tensor.is_inference() or tensor.is_quantized)


def _is_alone(group: _Group) -> bool:
    """Return whether nobody but the region holds the storage."""
    if storage_use_count is None:
        return False
    storage, fresh = group.one.untyped_storage(), torch.UntypedStorage(0)
    other = torch.empty(0).set_(fresh)
    alone = storage_use_count(storage._cdata) - len(group.references) == storage_use_count(fresh._cdata) - 1
    del other
    return bool(alone)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a tensor lies in its storage, and how it is to be read."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool
    distribution: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Return that of ``tensor``: a plain one, or a DTensor whose local tensor is one."""
        part = local_of(tensor)
        place = part.shape, part.stride(), int(part.storage_offset())
        return cls(part.dtype, *place, part.is_conj(), part.is_neg(), distribution_of(tensor))

    def placed_on(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the storage of ``flat``; no mode sees how it is made."""
        found = in_storage_of(flat, self.dtype, self.offset, self.shape, self.stride)
        guard = UnseenByModes() if UnseenByModes is not None else None
        try:
            found = found.conj() if self.conjugate else found
            found = neg_view(found) if self.negative else found
        finally:
            del guard
        return found if self.distribution is None else distributed_again(found, self.distribution)


def in_storage_of(tensor: torch.Tensor, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    """Return a new tensor in the storage of ``tensor``, made unseen by any mode.

    ``place``: offset, shape and strides; without them, all of the storage. A tensor without data gives another one.
    """
    is_fake = isinstance(tensor, FakeTensor)
    guard = UnseenByModes() if UnseenByModes is not None else None
    try:
        made = torch.empty(0, dtype=dtype, device="meta" if is_fake else tensor.device)
        made = made.set_(tensor.untyped_storage(), *place)
        return FakeTensor(tensor.fake_mode, made, tensor.device) if isinstance(tensor, FakeTensor) else made
    finally:
        del guard


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor of the bytes of the storage of ``tensor``."""
    return in_storage_of(tensor, torch.uint8)
