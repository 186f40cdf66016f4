"""Live bytes during a step, op by op, including the workspace of kernels."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sac.engine.tracker import BareMode
from sac.ops.flops import flops_of
from sac.planner.fake_op_cache import DEVICE, FakeOpCache, device_of
from sac.planner.kernel_runs import SizedCall, meta_of, peak_bounds, refuse_packed
from sac.tensors import STORAGE_WATCHERS, storage_address, tensor_parts, tensors_of
from sac.torch_private import (
    ENGINE_RUN,
    SAVED_TENSOR_PREFIX,
    FakeTensor,
    FakeTensorMode,
    current_graph_task_id,
    fake_mode_is_active,
    in_kernel,
    storage_use_count,
    tensor_use_count,
    tree_map_only,
)

# -- Workspace of CPU kernels


class KernelWorkspace:
    """Records the level of live bytes at which ops run, and computes the peak of each phase with their workspace.

    ``like``: a workspace that shares what it knows of ops.
    """

    def __init__(self, *, like: KernelWorkspace | None = None) -> None:
        self._ops: dict[Hashable, SizedCall] = {} if like is None else like._ops
        # Upper bound of the bytes that the op needs while it runs, results included.
        self._sizes: dict[Hashable, int] = {} if like is None else like._sizes
        self._levels: dict[Hashable, int] = {}  # of the current phase of the step

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any, before: int) -> Hashable:
        """Record an op that began with ``before`` live bytes, and return its key; None for a view.

        Raises ``PlanError`` if its buffer sizes are unknown.
        """
        if func.is_view:
            return None
        refuse_packed(func)
        metas = tree_map_only(Tensor, meta_of, (args, kwargs))
        key = func, str(metas)
        if key not in self._ops:
            given = {storage_address(tensor) for tensor in tensors_of([*args, *kwargs.values()])}
            made = tuple(meta_of(tensor) for tensor in tensors_of(out) if storage_address(tensor) not in given)
            self._ops[key] = SizedCall(func, metas[0], metas[1], made, flops_of(func, args, kwargs, out))
        self._levels[key] = max(before, self._levels.get(key, 0))
        return key

    def cut(self) -> dict[Hashable, int]:
        """End a phase of the step and return the levels of its ops."""
        levels, self._levels = self._levels, {}
        return levels

    def peak(self, levels: dict[Hashable, int]) -> int:
        """Return the peak of a phase that ran ops at these levels."""
        self._measure()
        return max((level + self._sizes[key] for key, level in levels.items()), default=0)

    def bytes_of(self, key: Hashable) -> int:
        """Return the most bytes that an op needs while it runs, results included; known after ``peak``."""
        return self._sizes[key]

    def _measure(self) -> None:
        waiting = {key: call for key, call in self._ops.items() if key not in self._sizes}
        self._sizes |= dict(zip(waiting, peak_bounds([*waiting.values()]), strict=True))


# -- Live bytes over one step, from the storages of tensors, without an allocator or data

# Note [What the ledger counts]
#
# A storage counts from the end of the op that made it until it is freed, with its own bytes, rounded up to the
# allocator's block size if there is one. An op on tensors that wrap others, such as DTensors, counts as the ops into
# which it is divided: each works on one rank's share, and there may be collectives and copies between them. Ops by
# which DTensor only finds the layout of a result, in a fake mode of its own, do not count. Written arguments and
# results located in known storages are not new. A resized storage, as in FSDP2, counts with its new size. The memory
# that a kernel allocates and frees while it runs is not a tensor of any op; `KernelWorkspace` knows it (Note [Kernel
# workspace]).
# On the CPU, two more things count whose creation the dispatcher does not see: the states of random generators, and
# numbers. For `x * 0.5`, autograd saves the number as a tensor of eight bytes.
# To put a tensor into a given storage (``set_``) takes no memory, and is not an op of the step: torch's cache of fake
# calls and the workspace, which hold the arguments of a call that are not tensors, would hold the storage for good.


# Note [Gathered parameters]
#
# FSDP2 gathers parameters into uninitialised memory, which it allocates without any tensor that has no data. Such a
# parameter would have data, and so would all results computed from it and real inputs (token numbers): the embedding
# and the products of the first block would run for real. So where a plan shards the model, uninitialised
# floating-point memory is made without data.


class Ledger(BareMode):
    """Counts the bytes of storages while it is active; see Note [What the ledger counts].

    ``block_bytes``: the block size to which the allocator rounds sizes up. ``workspace`` records each op. ``on_host``:
    whether host memory counts, such as the states of generators. ``gathers``: the mode in which uninitialised memory is
    made without data, see Note [Gathered parameters].
    """

    def __init__(
        self,
        block_bytes: int = 1,
        workspace: KernelWorkspace | None = None,
        fakes: FakeOpCache | None = None,
        *,
        on_host: bool = True,
        gathers: FakeTensorMode | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathers = gathers
        self.live = 0
        self.peak = 0  # since the last reset
        self.block_bytes = block_bytes
        self.workspace = workspace
        self.on_host = on_host
        self._numbers = _Numbers(self) if on_host else None
        self.fakes = fakes or FakeOpCache()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        for is_fake in (False, True):
            _counts_of_unshared(is_fake)  # cannot be found out once a backward runs
        self._zeros = 0  # address of the storage that the last op filled with zeros

    def __enter__(self) -> Ledger:
        super().__enter__()  # type: ignore[no-untyped-call]
        STORAGE_WATCHERS.append(self.note_unseen)
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resized  # type: ignore[method-assign,assignment]
        if self._numbers is not None:
            self._numbers.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._numbers is not None:
            self._numbers.__exit__(*error)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        STORAGE_WATCHERS.remove(self.note_unseen)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def reached(self, part: str) -> None:
        """A part of the step begins (forward, backward), or the step has ended; for ledgers that keep a log."""

    def note_unseen(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that was not made by an op."""
        if self._numbers is not None or storage.device.type != "cpu":
            self._note_storage(storage)

    def note(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` if it is not counted yet."""
        for part in tensor_parts(tensor):
            try:
                storage = part.untyped_storage()
            except (RuntimeError, NotImplementedError):  # sparse layouts have no storage
                continue
            self._note_storage(storage)

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = self._size(storage)
        self._storages[key] = weakref.ref(storage, self._freed(key)), size
        self.live += size
        self.peak = max(self.peak, self.live)

    def size_of(self, tensors: Iterable[Tensor | None]) -> int:
        """Return the bytes that count for the storages of ``tensors``."""
        parts = [part for tensor in tensors if tensor is not None for part in tensor_parts(tensor)]
        return sum(self._storages[key][1] for key in {part.untyped_storage()._cdata for part in parts})

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self.block_bytes) * self.block_bytes

    @property
    def _resized(self) -> Callable[[torch.UntypedStorage, int], Any]:
        """Return the replacement of the method by which FSDP2 allocates and frees the memory of whole parameters."""
        ledger, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if storage._cdata in ledger._storages:
                ledger._has_resized(storage._cdata, ledger._size(storage))
            return out

        return resized

    def _has_resized(self, key: int, size: int) -> None:
        """Count a known storage with its new size."""
        found = self._storages[key]
        self._storages[key] = found[0], size
        self.live += size - found[1]
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> Callable[[Any], None]:
        mine = weakref.ref(self)

        def freed(_: Any) -> None:
            ledger = mine()
            if ledger is not None and (found := ledger._storages.pop(key, None)) is not None:
                ledger.live -= found[1]

        return freed

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _GROUPED is not None and func is _GROUPED.default and isinstance(args[0], FakeTensor):
            return _run_grouped(args, kwargs)
        if func is _EMPTY and self.gathers is not None and _is_floating(kwargs):
            with self.gathers:
                return func(*args, **kwargs)
        if func is _ADD_INTO and type(args[0]) is type(args[1]) is FakeTensor:
            return args[0]
        return self.fakes.run(func, args, kwargs)

    def _place(self, func: Any, args: Any) -> Any:
        is_fake = type(args[0]) is FakeTensor and in_kernel is not None
        with in_kernel(args[0].fake_mode) if is_fake else nullcontext():
            out = func(*args)
        self.note(out)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and (device := device_of(args[0])) is not None:
            return device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(one is not FakeTensor and hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # its ops on the tensors inside come here
        if fake_mode_is_active():
            return func(*args, **(kwargs or {}))
        if func is _PLACED or func is _PLACED_AT:
            return self._place(func, args)
        before = self.live
        if func is _INDEX_PUT and _is_gradient_of_index(args, self._zeros):
            func, args = _INDEX_PUT_INTO, (*args, False)
        if func is _ADD and not kwargs and _adds_in_place(args):
            func = _ADD_INTO
        out = self._run(func, args, kwargs or {})
        if self._numbers is not None and func in _BAGS:
            out = _with_ends(out)
        if self._numbers is not None and func in _REDUCED and type(out) is FakeTensor and not out.dim():
            out = _with_terms(args)
        self._zeros = storage_address(out) if func in _ZEROS else 0
        if type(out) is FakeTensor and out.layout is _STRIDED:
            self._note_storage(out.untyped_storage())
        else:
            for tensor in tensors_of(out):
                self.note(tensor)
        if self.workspace is not None:
            self.workspace.saw(func, args, kwargs or {}, out, before)
        if torch.Tag.nondeterministic_seeded in func.tags and _would_draw(func, args, kwargs or {}, out):
            torch.empty(1).uniform_()  # nothing is drawn without data; advance the generator's state visibly
        return out


_CUDA_BLOCK = 512  # bytes; torch's caching allocator rounds sizes up to a multiple of this


def ledgers_of(workspace: KernelWorkspace | None, gathers: FakeTensorMode | None = None) -> Callable[[], Ledger]:
    """Return a function that makes ledgers for steps; they share what they learn about ops.

    ``workspace``: that of the CPU's kernels; None for a GPU. ``gathers``: see ``Ledger``.
    """
    on_cpu = workspace is not None
    block_bytes = 1 if on_cpu else _CUDA_BLOCK
    return partial(Ledger, block_bytes, workspace, FakeOpCache(), on_host=on_cpu, gathers=gathers)


_PLACED, _PLACED_AT = torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset
_EMPTY = torch.ops.aten.empty.memory_format
_STRIDED = torch.strided

# The gradient of an indexed tensor is zeros with the incoming gradient added at some places. While a mode is active,
# autograd copies the zeros for this; without a mode, it writes into them.
_INDEX_PUT, _INDEX_PUT_INTO = torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default
# The kernels of the CPU number the bags in memory with room for one more bag; ops on tensors without data do not.
_BAGS = (torch.ops.aten._embedding_bag.default, torch.ops.aten._embedding_bag_forward_only.default)
# The kernels of the CPU for these losses reduce the terms in the memory of their result, which keeps its size.
_REDUCED = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
)
_ZEROS = (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default)


def _is_gradient_of_index(args: Any, zeros: int) -> bool:
    in_backward = current_graph_task_id() >= 0
    return in_backward and len(args) == 4 and bool(args[3]) and storage_address(args[0]) == zeros


# Note [Sums of gradients]
#
# Where a value has several users, autograd adds their gradients, into the first one if nothing else refers to it. It
# does not while a mode is active, nor for tensors without data. So the ledger finds these sums and makes them in place:
# additions in backward without code in Python around them, of equal layouts, whose first operand is referred to as
# often as one that autograd alone holds. How often that is depends on the version of torch: a small backward shows it.

_ADD, _ADD_INTO = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


def _adds_in_place(args: Any) -> bool:
    """Return whether autograd without a mode would add the second gradient of ``args`` into the first one."""
    counts = _counts_of_sum(args)
    return counts is not None and counts == _counts_of_unshared(type(args[0]) is FakeTensor)


def _counts_of_sum(args: Any) -> tuple[int, int, int] | None:
    """Return how often the first operand and its storage are referred to, None if this is no sum of gradients."""
    if len(args) != 2 or current_graph_task_id() < 0 or ENGINE_RUN is None or tensor_use_count is None:
        return None
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None or frame.f_code is not ENGINE_RUN:
        return None
    old, new = args
    if type(old) not in (Tensor, FakeTensor) or not isinstance(new, Tensor):
        return None
    if (old.shape, old.dtype) != (new.shape, new.dtype) or not _is_dense(old):
        return None
    count = storage_use_count(old.untyped_storage()._cdata) if storage_use_count is not None else 0
    return tensor_use_count(old), sys.getrefcount(old), count


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill a range of memory without gaps."""
    if tensor.layout is not _STRIDED or tensor.is_conj() or tensor.is_neg():
        return False
    expected = 1
    for step, size in sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        if step != expected:
            return False
        expected *= size
    return True


@cache
def _counts_of_unshared(is_fake: bool) -> tuple[int, int, int] | None:
    """Return the counts of a gradient that only autograd holds."""
    mode = _Counting()  # type: ignore[no-untyped-call]
    x = torch.zeros(2)
    if is_fake:
        x = FakeTensorMode().from_tensor(x)
    with torch.enable_grad(), mode:
        x = x.detach().requires_grad_()
        y = x * 1
        torch.autograd.backward((y * 2).sum() + (y * 3).sum())
    return mode.found


class _Counting(BareMode):
    """Counts the references of the first sum of gradients that runs under it."""

    found: tuple[int, int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD and self.found is None and not kwargs:
            self._count(args)
        return func(*args, **(kwargs or {}))

    def _count(self, args: Any) -> None:
        self.found = _counts_of_sum(args)


def _is_floating(kwargs: Any) -> bool:
    dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype.is_floating_point


def _with_ends(out: Any) -> Any:
    bag_of = out[1]
    if not isinstance(bag_of, FakeTensor) or not bag_of.numel():
        return out
    return out[0], bag_of.new_empty(bag_of.numel() + 1)[:-1], *out[2:]


def _with_terms(args: Any) -> Any:
    terms = args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape))
    return terms.view(-1)[:1].view(()) if terms.numel() else terms.new_empty(())


_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)


def _run_grouped(args: Any, kwargs: Any) -> Any:
    """Run a grouped product of fake tensors, including dtypes that only the CPU's kernel accepts."""
    left, right, *rest = args  # torch 2.13 knows the shape for bfloat16 only
    op: Any = _GROUPED
    out = op.default(left.bfloat16(), right.bfloat16(), *rest, **{**kwargs, "out_dtype": None})
    return out.new_empty(out.shape, dtype=kwargs.get("out_dtype") or left.dtype)


def _would_draw(func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Return whether a random op without data would have drawn numbers: false if nothing is to be dropped."""
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors_of(out)):
        return False
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    share = given.get("dropout_p", given.get("p") if "dropout" in func.name() else None)
    return share != 0.0 and given.get("train") is not False


class _Numbers(TorchFunctionMode):
    """Counts the numbers that autograd saves as tensors."""

    def __init__(self, ledger: Ledger) -> None:
        self._note = ledger.note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        node = out.grad_fn if isinstance(out, Tensor) else None
        if node is not None and node.name() in ("MulBackward0", "DivBackward0"):
            number = getattr(node, f"{SAVED_TENSOR_PREFIX}other", None)
            data = getattr(number, "data", None)  # a look that does not unpack
            if isinstance(data, Tensor) and not data.dim() and not isinstance(data, FakeTensor):
                self._note(data)
        return out
