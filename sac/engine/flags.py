"""Flags of the process that select kernels: a recomputation finds those of the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from sac.region.undo import UndoStack
from sac.torch_private import (
    HAS_PRECISIONS,
    get_precision,
    process_flags,
    set_cudnn_tf32,
    set_matmul_precision,
    set_precision,
)

# Restored are those that a program may set around the forward only: the settings of `sdpa_kernel`, the callable at
# `torch.nn.functional.scaled_dot_product_attention` (context-parallel code replaces it), the default dtype, the settings
# of `torch.backends.cudnn.flags` and `torch.backends.mkldnn.flags`, deterministic algorithms, and the precision of
# float32 products. All threads share these flags.

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]

# Precisions also have an older interface, `set_float32_matmul_precision` and `allow_tf32`, which sets the newer one
# too. torch raises if the older one is read while the two differ (2.13). So the newer one is read, and the older one is
# updated if it can express both the current value and the wanted value.
_Precisions = tuple[str, str]
_UNSET = ("none", "ieee")
_MATMUL_WORDS: dict[_Precisions, Any] = {
    **{(cuda, cpu): "highest" for cuda in _UNSET for cpu in _UNSET},
    ("tf32", "tf32"): "high",
    ("tf32", "bf16"): "medium",
}
_CUDNN_WORDS: dict[_Precisions, Any] = {
    **{(convolution, rnn): False for convolution in _UNSET for rnn in _UNSET},
    ("tf32", "tf32"): True,
}


def _precision(first: tuple[str, str], second: tuple[str, str], words: dict[_Precisions, Any], put_older: Any) -> Flag:
    def read() -> _Precisions:
        return get_precision(*first), get_precision(*second)

    def put(wanted: _Precisions) -> None:
        if wanted in words and read() in words:
            put_older(words[wanted])
        set_precision(*first, wanted[0])
        set_precision(*second, wanted[1])

    return read, put


def _attention() -> Any:
    return functional.scaled_dot_product_attention


def _put_attention(function: Any) -> None:
    functional.scaled_dot_product_attention = function


def _flags() -> Iterator[Flag]:
    yield from process_flags()
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attention, _put_attention
    if HAS_PRECISIONS:
        yield _precision(("cuda", "matmul"), ("mkldnn", "matmul"), _MATMUL_WORDS, set_matmul_precision)
        yield _precision(("cuda", "conv"), ("cuda", "rnn"), _CUDNN_WORDS, set_cudnn_tf32)


_FLAGS = [*_flags()]


class BackendFlags:
    """The flags as they are now."""

    def __init__(self) -> None:
        self._then = [read() for read, _ in _FLAGS]

    def enter_on(self, stack: UndoStack) -> None:
        """Set the flags to these values, until ``stack`` is left."""
        for (read, put), then in zip(_FLAGS, self._then, strict=True):
            now = read()
            if now != then:
                stack.callback(put, now)
                put(then)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body with the flags at these values."""
        with UndoStack() as stack:
            self.enter_on(stack)
            yield
