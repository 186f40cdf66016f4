"""Flags of the process that select kernels: a recomputation finds those of the forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch.nn import functional

from sac.torch_private import (
    get_precision,
    process_flags,
    set_cudnn_tf32,
    set_matmul_precision,
    set_precision,
)

# Restored are those that a program may set around the forward only: the settings of `sdpa_kernel`, the callable at
# `torch.nn.functional.scaled_dot_product_attention` (context-parallel code replaces it), the default dtype, the
# settings of `torch.backends.cudnn.flags` and `torch.backends.mkldnn.flags`, deterministic algorithms, the precision of
# float32 products, and the attention backend that TransformerEngine chose last. All threads share these flags.

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


# Private to TransformerEngine (1.x to 2.x): a dict of the module, with the parameters of the last choice of an
# attention backend and that backend. A call with the same parameters does not choose again.
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class AttentionChoice:
    """The contents of TransformerEngine's dict; equal if they are the same objects (which may hold tensors)."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionChoice) or self.values.keys() != other.values.keys():
            return False
        return all(map(is_, self.values.values(), (other.values[key] for key in self.values)))

    __hash__ = None  # type: ignore[assignment]


def attention_choice() -> AttentionChoice | None:
    """Return TransformerEngine's last choice; None if it is not loaded."""
    choices = _choices()
    return AttentionChoice(dict(choices)) if isinstance(choices, dict) else None


def _choices() -> Any:
    module = sys.modules.get(_TRANSFORMER_ENGINE)
    return None if module is None else getattr(module, "_attention_backends", None)


def _put_attention_choice(wanted: AttentionChoice | None) -> None:
    choices = _choices()
    if isinstance(choices, dict) and wanted is not None:
        choices.clear()
        choices.update(wanted.values)


def _flags() -> Iterator[Flag]:
    yield from process_flags()
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attention, _put_attention
    yield attention_choice, _put_attention_choice
    yield _precision(("cuda", "matmul"), ("mkldnn", "matmul"), _MATMUL_WORDS, set_matmul_precision)
    yield _precision(("cuda", "conv"), ("cuda", "rnn"), _CUDNN_WORDS, set_cudnn_tf32)


_FLAGS = [*_flags()]


class BackendFlags:
    """The flags as they are now."""

    def __init__(self) -> None:
        self._then = [read() for read, _ in _FLAGS]

    def enter_on(self, stack: ExitStack) -> None:
        """Set the flags to these values, until ``stack`` is left."""
        for (read, put), then in zip(_FLAGS, self._then, strict=True):
            now = read()
            if now != then:
                stack.callback(put, now)
                put(then)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body with the flags at these values."""
        with ExitStack() as stack:
            self.enter_on(stack)
            yield
