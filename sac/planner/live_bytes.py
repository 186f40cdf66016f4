"""Live bytes during a step, op by op, including the workspace of kernels."""

from __future__ import annotations

import logging
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sac.errors import PlanError, Problem
from sac.memory_timeline import mark, measure_memory
from sac.ops.names import op_name
from sac.planner.fake_op_cache import FakeOpCache
from sac.recompute.module_tracker import BareMode
from sac.tensors import STORAGE_WATCHERS, storage_address, tensor_parts, tensors_of
from sac.torch_private import SAVED_TENSOR_PREFIX, FakeTensor, current_graph_task_id, tree_map_only

# -- Workspace of CPU kernels, measured by running each op once per size

_log = logging.getLogger(__name__)

# Note [Kernel workspace]
#
# Only a kernel itself knows the memory that it allocates and frees while it runs. On the CPU, each op is run once per
# combination of sizes, on zeros, and the profiler measures how far memory rises meanwhile. This happens after the step,
# for the highest level of live bytes in each phase at which the op began.
#
# oneDNN's kernel for LSTMs packs the data for its backward into a buffer whose size only the kernel knows; a tensor
# without data does not have this buffer. The backward, run on such tensors, crashes the process (torch 2.13). So the op
# is refused.

_PACKS_BYTES = "aten::mkldnn_rnn_layer"


class KernelWorkspace:
    """Records the level of live bytes at which ops run, and computes the peak of each phase with their workspace."""

    def __init__(self, like: KernelWorkspace | None = None) -> None:
        # ``like``: a workspace whose measurements are shared.
        self._ops: dict[Hashable, tuple[Any, Any, Any]] = {} if like is None else like._ops
        # Peak bytes of the op while it runs, results included.
        self._sizes: dict[Hashable, int] = {} if like is None else like._sizes
        self._levels: dict[Hashable, int] = {}  # of the current phase of the step

    def saw(self, func: Any, args: Any, kwargs: Any, before: int) -> Hashable:
        """Record an op that began with ``before`` live bytes, and return its key; None for a view.

        Raises ``PlanError`` if its buffer sizes are unknown.
        """
        if func.is_view:
            return None
        if func.name() == _PACKS_BYTES:
            found = "how many bytes its kernel packs for backward is not known, so the peak cannot be computed"
            raise PlanError(Problem(op_name(func), found, fix="use mode: full, or a policy by hand"))
        metas = tree_map_only(Tensor, _meta, (args, kwargs))
        key = func, str(metas)
        if key not in self._ops:
            self._ops[key] = func, *metas
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
        """Return the peak bytes of an op while it runs, results included; known once a peak has been computed."""
        return self._sizes[key]

    def _measure(self) -> None:
        waiting = [key for key in self._ops if key not in self._sizes]
        if not waiting:
            return
        state = torch.get_rng_state()
        try:
            with torch.no_grad():
                timeline = measure_memory(lambda: self._run(waiting))
        finally:
            torch.set_rng_state(state)
        for index, key in enumerate(waiting):
            began, ended = timeline.marks[f"begin {index}"][-1][0], timeline.marks[f"end {index}"][-1][0]
            first, last = bisect_left(timeline.times_ms, began), bisect_left(timeline.times_ms, ended)
            self._sizes[key] = max(timeline.live_bytes[first : last + 1]) - timeline.live_bytes[first]

    def _run(self, keys: list[Hashable]) -> None:
        for index, key in enumerate(keys):
            func, args, kwargs = self._ops[key]
            try:
                args, kwargs = tree_map_only(_Meta, _zeros, (args, kwargs))
                mark(f"begin {index}")
                func(*args, **kwargs)
            except Exception:  # (zeros are not a legal input of some ops)
                _log.debug("%s does not run on zeros: its scratch is not known", func)
                mark(f"begin {index}")
            mark(f"end {index}")


@dataclass(frozen=True, slots=True)
class _Meta:
    """The memory layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _meta(tensor: Tensor) -> _Meta:
    return _Meta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _zeros(meta: _Meta) -> Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype).zero_()


# -- Live bytes over one step, from the storages of tensors, without an allocator or data

# Note [What the ledger counts]
#
# A storage counts from the end of the op that made it until it is freed, with its own bytes, rounded up to the
# allocator's block size if there is one. Written arguments and results located in known storages are not new. A resized
# storage, as in FSDP2, counts with its new size. The memory that a kernel allocates and frees while it runs is not a
# tensor of any op; `KernelWorkspace` measures it.
# On the CPU, two more things count whose creation the dispatcher does not see: the states of random generators, and
# numbers. For `x * 0.5`, autograd saves the number as a tensor of eight bytes.


class Ledger(BareMode):
    """Counts the bytes of storages while it is active; see Note [What the ledger counts].

    ``block_bytes``: the block size to which the allocator rounds sizes up. ``workspace`` records each op. ``on_host``:
    whether host memory counts, such as the states of generators.
    """

    def __init__(
        self,
        block_bytes: int = 1,
        workspace: KernelWorkspace | None = None,
        fakes: FakeOpCache | None = None,
        *,
        on_host: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0  # since the last reset
        self.block_bytes = block_bytes
        self.workspace = workspace
        self.on_host = on_host
        self._numbers = _Numbers(self) if on_host else None
        self.fakes = fakes or FakeOpCache()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
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
        return self.fakes.run(func, args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # as torch answers; autograd asks for more devices than there are ops
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        before = self.live
        if func is _INDEX_PUT and _is_gradient_of_index(args, self._zeros):
            func, args = _INDEX_PUT_INTO, (*args, False)
        out = self._run(func, args, kwargs or {})
        self._zeros = storage_address(out) if func in _ZEROS else 0
        if type(out) is FakeTensor and out.layout is _STRIDED:
            self._note_storage(out.untyped_storage())
        else:
            for tensor in tensors_of(out):
                self.note(tensor)
        if self.workspace is not None:
            self.workspace.saw(func, args, kwargs or {}, before)
        if torch.Tag.nondeterministic_seeded in func.tags and _would_draw(func, args, kwargs or {}, out):
            torch.empty(1).uniform_()  # nothing is drawn without data; advance the generator's state visibly
        return out


_CUDA_BLOCK = 512  # bytes; torch's caching allocator rounds sizes up to a multiple of this


def ledgers_of(*, on_cpu: bool) -> Callable[[], Ledger]:
    """Return a function that makes ledgers for steps on a CPU or a GPU; they share what they learn about ops."""
    return partial(
        Ledger, 1 if on_cpu else _CUDA_BLOCK, KernelWorkspace() if on_cpu else None, FakeOpCache(), on_host=on_cpu
    )


_DEVICE, _STRIDED = torch.ops.prim.device.default, torch.strided

# The gradient of an indexed tensor is zeros with the incoming gradient added at some places. While a mode is active,
# autograd copies the zeros for this; without a mode, it writes into them.
_INDEX_PUT, _INDEX_PUT_INTO = torch.ops.aten.index_put.default, torch.ops.aten._index_put_impl_.default
_ZEROS = (torch.ops.aten.new_zeros.default, torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default)


def _is_gradient_of_index(args: Any, zeros: int) -> bool:
    in_backward = current_graph_task_id() >= 0
    return in_backward and len(args) == 4 and bool(args[3]) and storage_address(args[0]) == zeros


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
