"""Checksums of the tensors that autograd saved, for comparison with replayed ones."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.tensors import tensor_parts, tensors_of
from sac.torch_private import UnseenByModes

# Note [Checksums]
#
# Every replayed call of a region compares its replayed tensors with those that autograd saved, so a checksum has to be
# fast: on the CPU it takes about 2 µs for a small tensor, and for a large tensor a third of the time of a pointwise op
# on it.
#
# The checksum of a small tensor on the CPU is the CRC of its bytes. For a large tensor, or on another device, 64-bit
# words are added up in `_COLUMNS` sums; the i-th word goes to sum number i modulo `_COLUMNS`. That number is a prime,
# so that it does not coincide with the rows and columns of a matrix: swapped words nearly always change sums, as
# changed words do. The number of words in each sum is odd: if the sign of every value flips, so does the highest bit of
# each sum. Remaining words are taken unchanged. A tensor without gaps is read in memory order, and only the sums are
# allocated. A tensor with gaps or with unaligned words is copied piece by piece. Hooks on saved tensors may return a
# tensor with other strides: if there are such hooks, values are read in index order (`in_order`).
#
# On a device, nothing waits for the forward's checksums. `find_different` compares all checksums of one recomputation
# at once, and waits once. While a CUDA graph is captured, waiting is not possible, so nothing is compared: the calls
# before the capture have shown what the captured kernels do, and no Python runs when they are launched again.

_COLUMNS = 1021
_SMALL_BYTES = 1 << 16  # up to this size a CRC is faster than sums
_PIECE_BYTES = 1 << 22  # size of the copied pieces of a tensor with gaps
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = tuple["Tensor | int", ...]
_Bytes = ctypes.c_char * _SMALL_BYTES


def checksum(tensor: Tensor, *, in_order: bool = False) -> Sums:
    """Return a checksum of the bits of ``tensor``, without waiting for a device.

    ``in_order``: the checksum does not depend on strides. On the CPU a checksum consists of numbers, which take no
    tensor memory until backward; on another device of tensors, of at most 24 KB each. Tensors without a plain strided
    layout, and those without data (fake, meta, a zero tangent), have the empty checksum.
    """
    if type(tensor) is Tensor:
        return _of_plain(tensor, in_order)
    return tuple(total for part in tensor_parts(tensor) for total in _of_plain(part, in_order))


def sums_of(out: Any) -> Sums:
    """Return the checksums of all tensors in the result of an op, concatenated."""
    return tuple(total for tensor in tensors_of(out) for total in checksum(tensor))


def find_different(pairs: Sequence[tuple[Sums, Sums]]) -> list[int]:
    """Return the indices of the pairs whose checksums differ; waits at most once for each device."""
    different: set[int] = set()
    compared: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with UnseenByModes(), torch.no_grad():
        for index, (left, right) in enumerate(pairs):
            if len(left) != len(right):
                different.add(index)
            for one, other in zip(left, right, strict=False):
                if not isinstance(one, Tensor) or not isinstance(other, Tensor):  # numbers, of tensors on the CPU
                    if isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
                        different.add(index)
                elif one.shape != other.shape or one.device != other.device:
                    different.add(index)
                elif not (one.is_cuda and torch.cuda.is_current_stream_capturing()):
                    compared.setdefault(one.device, []).append((index, (one == other).all()))
        for found in compared.values():
            answers = torch.stack([answer for _, answer in found]).tolist()
            different |= {index for (index, _), is_equal in zip(found, answers, strict=True) if not is_equal}
    return sorted(different)


def _of_plain(tensor: Tensor, in_order: bool) -> Sums:
    cls = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor._is_zerotensor():
        return ()
    if tensor.is_cpu and (cls is Tensor or cls is Parameter):
        size = tensor.nbytes
        is_small = size <= _SMALL_BYTES and not (tensor.is_conj() or tensor.is_neg())
        if is_small and (tensor.is_contiguous() or (not in_order and _has_no_gaps(tensor))):
            return (_crc(tensor, size),)
    elif tensor.device.type == "meta" or cls.__name__ == "FakeTensor":
        return ()
    with UnseenByModes(), torch.no_grad():
        return _sums(tensor, in_order)


def _crc(tensor: Tensor, size: int) -> int:
    return zlib.crc32(memoryview(_Bytes.from_address(tensor.data_ptr()))[:size]) if size else 0


def _sums(tensor: Tensor, in_order: bool) -> Sums:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.element_size() not in _INTEGERS:
        return ()
    return tuple(total for flat in _flat(tensor, in_order) for total in _of_flat(flat))


def _flat(tensor: Tensor, in_order: bool) -> Iterable[Tensor]:
    """Yield the values of ``tensor`` as contiguous, aligned, one-dimensional tensors: a view, or copies of pieces."""
    is_aligned = tensor.storage_offset() * tensor.element_size() % 8 == 0
    if is_aligned and tensor.is_contiguous():
        yield tensor.view(-1)
    elif is_aligned and not in_order and _has_no_gaps(tensor):
        yield tensor.as_strided((tensor.numel(),), (1,))
    else:
        longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        rows = max(1, _PIECE_BYTES * tensor.shape[longest] // max(1, tensor.numel() * tensor.element_size()))
        for piece in tensor.split(rows, longest):
            yield piece.clone(memory_format=torch.contiguous_format).view(-1)


def _has_no_gaps(tensor: Tensor) -> bool:
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape)):  # noqa: B905 (it takes longer)
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def _of_flat(flat: Tensor) -> list[Tensor | int]:
    size = flat.numel() * flat.element_size()
    if flat.is_cpu and size <= _SMALL_BYTES:
        return [_crc(flat, size)]
    bits = flat.view(torch.uint8) if flat.dtype is torch.bool else flat.view(_INTEGERS[flat.element_size()])
    per_word = 8 // bits.element_size()
    rows = bits.numel() // (per_word * _COLUMNS)
    rows -= 1 - rows % 2
    if rows <= 0:
        parts = [bits.clone()]
    else:
        end = rows * _COLUMNS * per_word
        parts = [bits[:end].view(torch.int64).view(rows, _COLUMNS).sum(0), bits[end:].clone()]
    if flat.is_cpu:
        return [_crc(part, part.numel() * part.element_size()) for part in parts]
    return [*parts]
