"""A cache of op results on fake tensors, by op and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.tensors import last_offset, layout_key
from sac.torch_private import CAN_MAKE_FAKES, FAKE_DATA, FakeTensor, FakeTensorMode, in_kernel, refuse_data

# Note [Quick fakes]
#
# A step of a large model consists of thousands of calls of few ops on few sizes, and torch's processing of a fake call
# takes longer than everything else here. So the result of a call is created from that of an earlier one: a new tensor
# of the same geometry or, if the op returned a view, a tensor of that geometry in the storage of its first argument.
# The attributes of a fake tensor are copied from one that torch made. Ops that write, that read no fake tensor, or
# whose results have another memory layout than their geometry says, always run in torch. A tensor with data next to
# fake ones (FSDP2 gathers parameters into such tensors) is keyed by its geometry, since torch converts it to a fake
# tensor before it looks at the op; this does not hold for a single number, which may come from Python. A view that is
# not a view by its schema, is of a conjugate, or is of a storage that is now too small (FSDP2 empties storages), is
# made by the kernel for tensors without data. Ops of FSDP2 that only copy between given tensors have nothing to do. The
# wrapper of a collective's result (`AsyncCollectiveTensor`) is in the memory of that result; torch's own kernel for
# tensors without data makes a new one (torch 2.13).

_SCALARS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_KINDS = frozenset(_SCALARS)


class _Unfit(Exception):  # noqa: N818 (not an error)
    """The call has no key."""


@dataclass(frozen=True, slots=True)
class _New:
    """A result in its own memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _View:
    """A result in the storage of the first argument, which needs at least ``end`` bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    end: int
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _ByKernel:
    """A view that is made by its kernel."""

    device: torch.device
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Several:
    """Several results, each new or a scalar."""

    results: tuple[Any, ...]
    container: type


class FakeOpCache:
    """Runs ops on fake tensors; see Note [Quick fakes]."""

    def __init__(self) -> None:
        # Keyed by the id of the op, since its hash is a Python function: the op, and its cached results by call key, or
        # None if its calls have to run in torch.
        self._ops: dict[int, tuple[Any, dict[Any, Any] | None]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the op."""
        found = self._ops.get(id(func))
        if found is None:
            is_quick = CAN_MAKE_FAKES and func.namespace == "aten" and not func._schema.is_mutable
            found = self._ops[id(func)] = func, {} if is_quick else None
        calls = found[1]
        if calls is None:
            if func.namespace == "fsdp" and not func._schema.returns and _has_only_fakes(args, kwargs):
                return None
            if func.name() == _WRAPS and _has_only_fakes(args, kwargs):
                return torch.ops.aten.alias.default(args[0])
            return func(*args, **kwargs)
        try:
            key: Any = tuple(map(_key, args))
            if kwargs:
                key = (*key, *((name, _key(value)) for name, value in kwargs.items()))
        except _Unfit:
            key = _key_with_data(args, kwargs)
            if key is None:
                return func(*args, **kwargs)
        known = calls.get(key, _Unfit)
        cls = type(known)
        if cls is _New:
            return _new(known)
        if cls is _View and (storage := args[0].untyped_storage()).nbytes() >= known.end:
            elem = torch.empty_strided((0,), (1,), dtype=known.dtype, device="meta")
            elem.set_(storage, known.offset, known.shape, known.stride)
            return _fake(elem, known.device, known.state)
        if cls is _View or cls is _ByKernel:
            return _by_kernel(func, args, kwargs, known)
        if cls is _Several:
            return known.container([_new(one) if type(one) is _New else one for one in known.results])
        out = func(*args, **kwargs)
        if known is _Unfit:
            calls[key] = _learn(func, out, args, kwargs)
        return out


_WRAPS = "_c10d_functional::_wrap_tensor_autograd"
DEVICE = torch.ops.prim.device.default


def device_of(tensor: Any) -> torch.device | None:
    """Return torch's answer to ``prim.device`` of a fake tensor, or None; autograd asks more often than ops run."""
    is_plain = type(tensor) is FakeTensor and not tensor.fake_mode.in_kernel_invocation
    return tensor.fake_device if is_plain else None


def _key(value: Any) -> Any:
    cls = type(value)
    if cls is FakeTensor:
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.is_conj(), value.is_neg()
    if cls in _KINDS:
        return cls, value
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, _SCALARS):
        return cls, value
    raise _Unfit


def _key_with_data(args: Any, kwargs: Any) -> Any:
    """Return the key of a call that reads tensors with data in addition to fake ones, or None if it has no key."""
    if not any(type(one) is FakeTensor for one in _flat((*args, *kwargs.values()))):
        return None
    try:
        return (*map(_any_key, args), *((name, _any_key(value)) for name, value in kwargs.items()))
    except _Unfit:
        return None


def _any_key(value: Any) -> Any:
    if type(value) in (Tensor, Parameter) and value.dim() and value.layout is torch.strided:
        return "data", layout_key(value), value.device
    return tuple(map(_any_key, value)) if isinstance(value, (list, tuple)) else _key(value)


def _learn(func: Any, out: Any, args: Any, kwargs: Any) -> Any:
    """Return the cache entry of a call, or None if its result cannot be cached."""
    given = [one for one in _flat((*args, *kwargs.values())) if isinstance(one, Tensor)]
    parts: Sequence[Any] = [out] if isinstance(out, Tensor) else out if isinstance(out, (list, tuple)) else ()
    fakes: list[Any] = [one for one in parts if isinstance(one, Tensor)]
    if not given or not fakes or not all(type(one) is FakeTensor and one.layout is torch.strided for one in fakes):
        return None
    state = dict(vars(fakes[0]))
    if any(value is not None for name, value in state.items() if name in FAKE_DATA):
        return None
    storages = {one.untyped_storage()._cdata for one in given}
    if isinstance(out, Tensor) and fakes[0].untyped_storage()._cdata in storages:
        return _learn_view(func, fakes[0], args, state) if all(type(one) is FakeTensor for one in given) else None
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
    return results[0] if isinstance(out, Tensor) else _Several(tuple(results), type(out))


def _learn_view(func: Any, out: Any, args: Any, state: dict[str, Any]) -> _View | _ByKernel:
    base = args[0] if func.is_view and args else None
    if type(base) is not FakeTensor or any(one.is_conj() or one.is_neg() for one in (base, out)):
        return _ByKernel(out.fake_device, state)
    if base.untyped_storage()._cdata != out.untyped_storage()._cdata:
        return _ByKernel(out.fake_device, state)
    shape, stride, offset = tuple(out.shape), tuple(out.stride()), out.storage_offset()
    end = (offset + last_offset(shape, stride) + 1) * out.element_size() if out.numel() else 0
    return _View(shape, stride, offset, end, out.dtype, out.fake_device, state)


def _has_only_fakes(args: Any, kwargs: Any) -> bool:
    tensors = [one for one in _flat((*args, *kwargs.values())) if isinstance(one, Tensor)]
    return all(type(one) is FakeTensor for one in tensors)


def _flat(value: Any) -> list[Any]:
    return [one for part in value for one in (_flat(part) if isinstance(part, (list, tuple)) else [part])]


def _new(spec: _New) -> Tensor:
    elem = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
    return _fake(elem, spec.device, spec.state)


def _by_kernel(func: Any, args: Any, kwargs: Any, known: _View | _ByKernel) -> Tensor:
    mode: FakeTensorMode = known.state["fake_mode"]
    with in_kernel(mode):
        out = func(*args, **kwargs)
    return _fake(out, known.device, known.state)


def _fake(elem: Tensor, device: torch.device, state: dict[str, Any]) -> Tensor:
    made: Tensor = Tensor._make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device)
    refuse_data(made)
    vars(made).update(state)
    return made
