"""Settings of the whole process that decide which kernel a region's ops get, put back around its recomputation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import functional

# Note [Flags of the process]
#
# Recomputation has to run the kernels of the forward. Which ones they are hangs on the tensors, and on flags of the
# process that somebody may have set around the forward only. These are put back: what `sdpa_kernel` sets (backends and
# their order), the callable at `torch.nn.functional.scaled_dot_product_attention` (context-parallel code replaces it
# during the forward), the attention backend that TransformerEngine has chosen last, the default dtype, what
# `torch.backends.cudnn.flags` and `torch.backends.mkldnn.flags` set, deterministic algorithms, and the precision of
# float32 products.
#
# These are not, since a program sets them once, if at all: reductions in half precision, preferred BLAS and linear
# algebra libraries, the number of threads, flushing of denormals (which cannot be read), filling of uninitialised
# memory, and precisions set for a whole backend by `torch.backends.fp32_precision`.
#
# All threads share these flags. A thread that runs other ops while a recomputation has them changed sees the change,
# as it would see the user's own. What we can promise is that recomputations on several threads do not mix them up:
# each remembers what it found, and hands that on to the one that came after it if it leaves first. So those of one
# forward's settings do not disturb each other, and when the last one is over the flags are what they were.

Flag = tuple[Callable[[], Any], Callable[[Any], Any]]


def _flags() -> Iterator[Flag]:
    """Yield a way to read and a way to set each flag that this torch has."""
    core = torch._C
    sdp = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    private = [(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in sdp]
    private += [
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("_get_cudnn_enabled", "_set_cudnn_enabled"),
        ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ]
    for reader, setter in private:  # torch's public names for them check the build each time, or do not exist
        if hasattr(core, reader) and hasattr(core, setter):
            yield getattr(core, reader), getattr(core, setter)
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _attention, _put_attention
    yield attention_choice, _put_attention_choice
    if hasattr(core, "_set_deterministic_algorithms"):  # the public function loads the compiler's configuration
        yield core._get_deterministic_algorithms, _put_deterministic
        yield core._get_deterministic_algorithms_warn_only, _put_warn_only
    if hasattr(core, "_get_fp32_precision_getter") and hasattr(core, "_set_fp32_precision_setter"):
        yield _matmul_precision, _put_matmul_precision
        yield _cudnn_precision, _put_cudnn_precision


def _attention() -> Any:
    return functional.scaled_dot_product_attention


def _put_attention(function: Any) -> None:
    functional.scaled_dot_product_attention = function


# Private to TransformerEngine (1.x to 2.x), a dict of the module: the parameters of the last choice, and what was
# chosen. A call with the same parameters does not choose again, so that a recomputation would run other code than its
# forward did. Without the name nothing is put back.
_TRANSFORMER_ENGINE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


class AttentionChoice:
    """What TransformerEngine's dict held; equal if the same objects are in it (they may hold tensors)."""

    __slots__ = ("values",)

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionChoice) or self.values.keys() != other.values.keys():
            return False
        return all(value is other.values[key] for key, value in self.values.items())

    __hash__ = None  # type: ignore[assignment]


def _attention_choices() -> dict[Any, Any] | None:
    module = sys.modules.get(_TRANSFORMER_ENGINE)
    choices = getattr(module, "_attention_backends", None) if module is not None else None
    return choices if isinstance(choices, dict) else None


def attention_choice() -> AttentionChoice | None:
    """Return what TransformerEngine has chosen last, None where it is not loaded."""
    choices = _attention_choices()
    return None if choices is None else AttentionChoice(dict(choices))


def _put_attention_choice(wanted: AttentionChoice | None) -> None:
    choices = _attention_choices()
    if choices is not None and wanted is not None:
        choices.clear()
        choices.update(wanted.values)


def _put_deterministic(on: bool) -> None:
    torch._C._set_deterministic_algorithms(on, warn_only=torch._C._get_deterministic_algorithms_warn_only())


def _put_warn_only(on: bool) -> None:
    torch._C._set_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=on)


# Precisions have an older way to be set, `set_float32_matmul_precision` and `allow_tf32`, which sets the newer one too;
# torch raises where it is asked for the older one and the two differ (2.13). We read the newer, and move the older
# along where both of what is and what will be have a word in it.
_Precisions = tuple[str, str]
_UNSET = ("none", "ieee")
_MATMUL_WORDS: dict[_Precisions, str] = {
    **{(cuda, cpu): "highest" for cuda in _UNSET for cpu in _UNSET},
    ("tf32", "tf32"): "high",
    ("tf32", "bf16"): "medium",
}
_CUDNN_WORDS: dict[_Precisions, bool] = {
    **{(convolution, rnn): False for convolution in _UNSET for rnn in _UNSET},
    ("tf32", "tf32"): True,
}


def _matmul_precision() -> _Precisions:
    read = torch._C._get_fp32_precision_getter
    return read("cuda", "matmul"), read("mkldnn", "matmul")


def _put_matmul_precision(wanted: _Precisions) -> None:
    if wanted in _MATMUL_WORDS and _matmul_precision() in _MATMUL_WORDS:
        torch._C._set_float32_matmul_precision(_MATMUL_WORDS[wanted])
    torch._C._set_fp32_precision_setter("cuda", "matmul", wanted[0])
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", wanted[1])


def _cudnn_precision() -> _Precisions:
    read = torch._C._get_fp32_precision_getter
    return read("cuda", "conv"), read("cuda", "rnn")


def _put_cudnn_precision(wanted: _Precisions) -> None:
    if wanted in _CUDNN_WORDS and _cudnn_precision() in _CUDNN_WORDS:
        torch._C._set_cudnn_allow_tf32(_CUDNN_WORDS[wanted])
    torch._C._set_fp32_precision_setter("cuda", "conv", wanted[0])
    torch._C._set_fp32_precision_setter("cuda", "rnn", wanted[1])


_READERS, _SETTERS = zip(*_flags(), strict=True)


def _read() -> list[Any]:
    return [read() for read in _READERS]


def _put(wanted: list[Any]) -> None:
    for put, value, present in zip(_SETTERS, wanted, _read(), strict=True):
        if value is not present and value != present:
            put(value)


class _Change:
    """What one recomputation found when it changed the flags."""

    __slots__ = ("found",)

    def __init__(self, found: list[Any]) -> None:
        self.found = found


# The flags are the process's, and so is the list of who has changed them, in order. The lock is held for no longer than
# it takes to set them.
_changes: list[_Change] = []
_lock = threading.Lock()


class ProcessFlags:
    """The flags as they were in the forward; see Note [Flags of the process]."""

    __slots__ = ("_forward",)

    def __init__(self) -> None:
        self._forward = _read()

    def enter_on(self, stack: ExitStack) -> None:
        """Set the flags as recorded, and as they are now when ``stack`` is left."""
        with _lock:
            found = _read()
            if found == self._forward and not _changes:
                return
            change = _Change(found)
            _changes.append(change)
            stack.callback(_take_back, change)
            _put(self._forward)


def _take_back(change: _Change) -> None:
    with _lock:
        place = _changes.index(change)
        if place == len(_changes) - 1:
            _put(change.found)
        else:
            _changes[place + 1].found = change.found
        del _changes[place]
