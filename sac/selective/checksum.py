"""A number that stands for the bits of a tensor, to tell whether a replayed value is that of the forward."""

from __future__ import annotations

import torch
from torch import Tensor

from sac.selective.tensors import tensor_parts

_CHUNK = 1 << 20
_MODULUS = 65_521
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Unseen = getattr(torch._C, "_DisableTorchDispatch", None)


def checksum(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return sums of the bits of ``tensor``, plain and weighted by place; nothing waits for a device.

    Places are numbered modulo a prime. A few megabytes are used at a time, whatever the size. Tensors without a plain
    strided layout, and those without data (fake, meta), have the empty sum.
    """
    return tuple(total for part in tensor_parts(tensor) for total in _of_plain(part))


def _of_plain(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return ()
    guard = _Unseen() if _Unseen is not None else None
    try:
        with torch.no_grad():
            return _sums(tensor.detach().resolve_conj().resolve_neg())
    finally:
        del guard


def _sums(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = _INTEGERS.get(tensor.element_size())
    if kind is None or tensor.is_quantized:
        return ()
    flat = tensor.reshape(-1).view(kind) if tensor.dtype is not torch.bool else tensor.reshape(-1).to(torch.uint8)
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(min(_CHUNK, flat.numel()), device=tensor.device) % _MODULUS + 1
    for number, chunk in enumerate(flat.split(_CHUNK)):
        bits = chunk.to(torch.int64)
        plain += bits.sum()
        weighted += (bits * weights[: len(bits)]).sum() * (number % _MODULUS + 1)
    return plain, weighted


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Return whether two checksums are equal."""
    return len(left) == len(right) and all(bool(a == b) for a, b in zip(left, right, strict=True))
