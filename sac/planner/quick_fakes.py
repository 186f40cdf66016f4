"""Results of ops on fake tensors, made again from what the same op on the same sizes gave before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Note [Quick fakes]
#
# A step of a large model is thousands of calls of few ops on few sizes, and what torch does for a fake one takes
# longer than all else here. So the result of a call is made from that of an earlier one: a new tensor of the same
# geometry, or, where the op gave a view, the view itself, by the kernel for tensors without data. The attributes of a
# fake tensor are copied from one that torch has made. Ops that write, that read tensors with data, or whose results lie
# in memory otherwise than their geometry says, always go torch's way.

_in_kernel: Any = getattr(fake_tensor, "in_kernel_invocation_manager", None)
_refuse_data: Any = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
IS_QUICK = _in_kernel is not None and _refuse_data is not None and hasattr(Tensor, "_make_subclass")
_SCALARS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_OF_DATA = ("constant", "real_tensor", "pytype", "dispatch_keys", "_nonzero_memo", "_item_memo", "_unique_memo")


class _Unfit(Exception):  # noqa: N818 (it is no error)
    """The call has no key."""


@dataclass(frozen=True, slots=True)
class _New:
    """A result in memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a call. ``results``: None if the op gave a view, which is made by its kernel."""

    results: tuple[Any, ...] | None
    container: type | None
    device: torch.device
    state: dict[str, Any]


class QuickFakes:
    """Runs ops on fake tensors; see Note [Quick fakes]."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known | None] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what the op gives."""
        if not IS_QUICK or func.namespace != "aten" or func._schema.is_mutable:
            return func(*args, **kwargs)
        try:
            key = (func, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items()))
        except _Unfit:
            return func(*args, **kwargs)
        if key not in self._known:
            out = func(*args, **kwargs)
            self._known[key] = _learn(out, args, kwargs)
            return out
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        if known.results is None:
            return _view(func, args, kwargs, known)
        made = [_new(one) if type(one) is _New else one for one in known.results]
        return made[0] if known.container is None else known.container(made)


def _key(value: Any) -> Any:
    if type(value) is FakeTensor:
        return value.shape, value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, _SCALARS):
        return type(value), value
    raise _Unfit


def _learn(out: Any, args: Any, kwargs: Any) -> _Known | None:
    given = [one for one in _flat((*args, *kwargs.values())) if isinstance(one, Tensor)]
    parts: Sequence[Any] = [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ()
    fakes: list[Any] = [one for one in parts if isinstance(one, Tensor)]
    if not given or not fakes or not all(type(one) is FakeTensor and one.layout is torch.strided for one in fakes):
        return None
    state = dict(vars(fakes[0]))
    if any(value is not None for name, value in state.items() if name in _OF_DATA):
        return None
    storages = {one.untyped_storage()._cdata for one in given}
    if isinstance(out, Tensor) and fakes[0].untyped_storage()._cdata in storages:
        return _Known(None, None, fakes[0].fake_device, state)
    results: list[Any] = []
    own: set[int] = set()
    for one in parts:
        if not isinstance(one, Tensor):
            if not isinstance(one, _SCALARS):
                return None
            results.append(one)
            continue
        fake: Any = one
        storage = fake.untyped_storage()
        if storage._cdata in storages | own or one.storage_offset() or one.is_conj() or one.is_neg():
            return None
        own.add(storage._cdata)
        new = _New(tuple(one.shape), tuple(one.stride()), one.dtype, fake.fake_device, dict(vars(fake)))
        if _new(new).untyped_storage().nbytes() != storage.nbytes():
            return None
        results.append(new)
    return _Known(tuple(results), None if isinstance(out, Tensor) else type(out), fakes[0].fake_device, state)


def _flat(value: Any) -> list[Any]:
    return [one for part in value for one in (_flat(part) if isinstance(part, (list, tuple)) else [part])]


def _new(spec: _New) -> Tensor:
    elem = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return _fake(elem, spec.device, spec.state)


def _view(func: Any, args: Any, kwargs: Any, known: _Known) -> Tensor:
    mode: FakeTensorMode = known.state["fake_mode"]
    with _in_kernel(mode):
        out = func(*args, **kwargs)
    return _fake(out, known.device, known.state)


def _fake(elem: Tensor, device: torch.device, state: dict[str, Any]) -> Tensor:
    made: Tensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
    _refuse_data(made)
    vars(made).update(state)
    return made
