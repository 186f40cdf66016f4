"""A number that stands for the bits of a tensor, to tell whether a replayed value is that of the forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sac.selective.tensors import tensor_parts

_LARGEST_PIECE, _SMALLEST_PIECE = 1 << 20, 1 << 12  # in elements; each takes about 32 bytes meanwhile
_PIECES = 64
_MODULUS = 65_521
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Unseen = getattr(torch._C, "_DisableTorchDispatch", None)
Sums = tuple["Tensor | int", ...]


def checksum(tensor: Tensor) -> Sums:
    """Return sums of the bits of ``tensor``, plain and weighted by place; nothing waits for a device.

    Those of a tensor on the CPU are numbers, which no allocator has to hold until backward. Places are numbered modulo
    a prime. What is used meanwhile is small against the tensor, whatever its strides. Tensors without a plain strided
    layout, and those without data (fake, meta), have the empty sum.
    """
    return tuple(total for part in tensor_parts(tensor) for total in _of_plain(part))


def _of_plain(tensor: Tensor) -> Sums:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or type(tensor).__name__ == "FakeTensor":
        return ()
    guard = _Unseen() if _Unseen is not None else None
    try:
        with torch.no_grad():
            return _sums(tensor.detach().resolve_conj().resolve_neg())
    finally:
        del guard


def _sums(tensor: Tensor) -> Sums:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = _INTEGERS.get(tensor.element_size())
    if kind is None or tensor.is_quantized:
        return ()
    plain = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weighted = torch.zeros((), dtype=torch.int64, device=tensor.device)
    pieces = _pieces(tensor)
    weights = torch.arange(pieces[0].numel(), device=tensor.device) % _MODULUS + 1
    for number, piece in enumerate(pieces):
        flat = piece.reshape(-1)
        bits = (flat if tensor.dtype is torch.bool else flat.view(kind)).to(torch.int64)
        plain += bits.sum()
        weighted += (bits * weights[: len(bits)]).sum() * (number % _MODULUS + 1)
    return (int(plain), int(weighted)) if tensor.is_cpu else (plain, weighted)


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Return the parts of ``tensor`` along its longest dimension that are taken one at a time."""
    if tensor.numel() <= _SMALLEST_PIECE:
        return (tensor,)
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    size = max(_SMALLEST_PIECE, min(_LARGEST_PIECE, tensor.numel() // _PIECES))
    pieces: Sequence[Tensor] = tensor.split(max(1, size * tensor.shape[longest] // tensor.numel()), longest)
    return pieces


def same(left: Sums, right: Sums) -> bool:
    """Return whether two checksums are equal."""
    return len(left) == len(right) and all(bool(a == b) for a, b in zip(left, right, strict=True))
