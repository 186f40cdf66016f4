"""Every private or version-dependent name of torch that sac uses, each with a feature test and a reason.

See Note [Private names of torch]. tests/repository/test_torch_private.py checks that no other file reads a private name
of torch, and that the installed torch has all names listed here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Note [Private names of torch]
#
# Rules:
#  1. A private name is read only in this file. Private names are: `torch._C`, modules, functions and classes with an
#     underscore, and names that only some of the supported versions (2.11 to 2.13) have.
#  2. Its guard checks for the name itself, never for a version. A missing name is None.
#  3. Its comment says why sac needs it, what happens without it, and in which versions it was seen.
#  4. Two kinds of names are not in this file. Names of ops, such as `torch.ops.aten._grouped_mm`: ops are data to sac,
#     and code that needs one looks it up. Private attributes of objects: code reads them where it has the object;
#     PRIVATE_ATTRIBUTES lists them.
#
# Implication. To support another version of torch, run the test and read this file: the test names what is missing, and
# the comment gives the cost.
#
# Example. `storage_use_count` returns how many hold a storage, and thus whether anything else does. If it is None,
# stores/store.py releases nothing: more memory is used, and the results are the same.
#
# The module paths of the imports above contain an underscore, but torch's own documentation recommends them to authors
# of extensions (2.0 to 2.13). sac does not work without them.

_autograd: Any = getattr(torch._C, "_autograd", None)
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

# -- Attributes of objects

# The owner of each attribute, and why sac reads it. All were seen in 2.11 to 2.13.
PRIVATE_ATTRIBUTES = {
    "_base": "Tensor: what a view was made of, to tell that releasing it frees no memory",
    "_buffers": "Module: the buffers it registered, without its children's",
    "_cdata": "UntypedStorage, Generator: address of the C++ object, which identifies it",
    "_forward_hooks": "Module: part of what identifies a function made of modules",
    "_forward_pre_hooks": "Module: as _forward_hooks",
    "_free_weak_ref": "UntypedStorage: ends a weak reference",
    "_is_view": "Tensor: whether autograd treats it as a view",
    "_is_zerotensor": "Tensor: whether it is a zero without memory, which forward-mode AD makes",
    "_local_tensor": "DTensor: this rank's share, without a collective",
    "_make_subclass": "Tensor: makes a tensor of a subclass around another",
    "_modules": "Module: the children it registered, also one that is registered twice",
    "_name": "HigherOrderOperator: its name",
    "_new_with_weak_ptr": "UntypedStorage: the storage behind a weak reference, None if it is gone",
    "_op": "OpOverload: the callable that it wraps",
    "_parameters": "Module: the parameters it registered, without its children's",
    "_schema": "OpOverload: its arguments and results",
    "_sequence_nr": "Node: its place in the order in which a thread makes nodes",
    "_version": "Tensor: counts in-place writes to its memory",
    "_weak_ref": "UntypedStorage: makes a weak reference, which keeps its address from being used again",
}

# Attributes under which torch's own wrappers hold the wrapped module.
WRAPPED_MODULE = "_checkpoint_wrapped_module"  # of torch's checkpoint_wrapper, 1.11 to 2.13
WRAPPED_NAMES = (WRAPPED_MODULE, "_fsdp_wrapped_module", "_fpw_module", "_orig_mod")  # FSDP1, and OptimizedModule
FSDP_MANAGED = "_is_fsdp_managed_module"  # an attribute of each module in a unit of FSDP1, 2.0 to 2.13
COMPOSABLE_PREFIX = "__composable_api_state_key"  # of torch's composable `checkpoint`, 2.1 to 2.13

# Whether a profiler records on this thread: then a budget on a CPU observes nothing, since there can be one at most.
# Without the name, it fails with torch's own error. 1.8 to 2.13.
profiler_is_on: Callable[[], bool] = getattr(_autograd, "_profiler_enabled", lambda: False)

# -- The running backward

NO_TASK = -1

# The number of the backward (graph task) that this thread runs, NO_TASK outside of one. It distinguishes a second
# backward from a second read in the same one. 1.13 to 2.13.
current_graph_task_id: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_TASK)

_keeps_graph: Any = getattr(_autograd, "_get_current_graph_task_keep_graph", None)


def graph_is_retained() -> bool:
    """Return whether the running backward keeps its graph for another one.

    2.0 to 2.13. Without the name, sac assumes that every backward retains its graph: memory is then freed with the
    graph.
    """
    return bool(_keeps_graph()) if _keeps_graph is not None and current_graph_task_id() != NO_TASK else True


# The number of the next node that this thread makes. 2.1 to 2.13.
next_node_number: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)

# Whether the running backward will execute a node. Needed to bring values in host memory back ahead of time. 2.0
# to 2.13.
will_execute_node: Any = getattr(torch._C, "_will_engine_execute_node", None)

# Calls a function when the running backward ends; FSDP and DDP use it too. sac uses it for copies from host memory and
# DeepSpeed's timers, which work only in a backward. 1.0 to 2.13.
when_backward_ends: Any = getattr(_engine, "queue_callback", None)

# As `current_graph_task_id`, but NO_TASK where torch does not say when a backward ends. 1.13 to 2.13.
ending_task: Callable[[], int] = current_graph_task_id if when_backward_ends is not None else lambda: NO_TASK

_accumulates_everywhere: Any = getattr(_engine, "is_checkpoint_valid", None)


def is_for_every_leaf() -> bool:
    """Return whether the running backward and those around it accumulate into all leaves.

    torch guards its own reentrant checkpoint with it, 1.0 to 2.13. Without the name the answer is yes: the results of
    ``torch.autograd.grad`` are then right, but parameters get gradients too.
    """
    return bool(_accumulates_everywhere()) if _accumulates_everywhere is not None else True


# Whether a node's saved tensors show that hooks hold them (`unpack_hook`). Without it sac does not examine the tensors
# that the graph after a region has saved. Seen in 2.13, not in 2.11.
SHOWS_SAVED_TENSORS = hasattr(getattr(_autograd, "SavedTensor", None), "unpack_hook")
SAVED_TENSOR_PREFIX = (
    "_raw_saved_"  # of the attributes of a node that show what it saved, without unpacking. 1.9 to 2.13
)

# -- Per-thread stacks: saved-tensor hooks, dispatch modes, torch-function modes

# Without them a region does not see the hooks around it, and no tensor that it keeps goes through them. 2.4 to 2.13.
top_hooks: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
pop_hooks: Any = getattr(_autograd, "_pop_saved_tensors_default_hooks", None)
push_hooks: Any = getattr(_autograd, "_push_saved_tensors_default_hooks", None)

# Without them torch-function modes of the forward (`with torch.device(...)` is one) are not restored: recomputation
# runs under those of backward. 2.11 to 2.13.
count_function_modes: Any = getattr(torch._C, "_len_torch_function_stack", None)
function_mode_at: Any = getattr(torch._C, "_get_function_stack_at", None)
push_function_mode: Any = getattr(torch._C, "_push_on_torch_function_stack", None)
pop_function_mode: Any = getattr(torch._C, "_pop_torch_function_stack", None)
HAS_FUNCTION_MODES = None not in (count_function_modes, function_mode_at, push_function_mode, pop_function_mode)

# Whether subclasses and torch-function modes are on at all. Without it that is not restored. 2.11 to 2.13.
functions_are_on: Any = getattr(torch._C, "_is_torch_function_enabled", None)
get_function_state: Any = getattr(torch._C, "_get_torch_function_state", None)
set_function_state: Any = getattr(torch._C, "_set_torch_function_state", None)
FUNCTIONS_ON: Any = getattr(getattr(torch._C, "_TorchFunctionState", None), "ENABLED", None)
HAS_FUNCTION_STATE = None not in (functions_are_on, get_function_state, set_function_state, FUNCTIONS_ON)

# -- Ops that modes and autograd do not see

# A guard object: while it is alive, neither modes nor subclasses see an op. Without it detaching and cloning for
# bookkeeping pass through every mode. 2.11 to 2.13.
UnseenByModes: Any = getattr(torch._C, "_DisableTorchDispatch", None)

# In forward, the ops of a tape ran inside a dispatch mode, so below autograd and autocast; replay runs them there too.
# Without these guards replay is not used. 2.11 to 2.13.
BelowAutograd: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
WithoutAutocast: Any = getattr(torch._C, "_DisableAutocast", None)

_caller_state: Any = getattr(torch._C, "_RestorePythonTLSSnapshot", None)
_has_kernel: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
_is_excluded: Any = getattr(torch._C, "_dispatch_tls_is_dispatch_key_excluded", None)
_Exclusion: Any = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)
_HAS_EXCLUSION = None not in (_caller_state, _has_kernel, _is_excluded, _Exclusion)


def autocast_of_caller(op: Any, device_type: str) -> tuple[Any, bool] | None:
    """Return the autocast key of a device type, and whether the caller of ``op``, which a mode handles, excludes it.

    None if ``op`` has its own autocast kernel, or without the names (2.11 to 2.13); in the latter case the body of a
    custom op runs without autocast under a mode.
    """
    name = f"Autocast{device_type.upper()}"
    key = getattr(torch._C.DispatchKey, name, None)
    if key is None or not _HAS_EXCLUSION or _has_kernel(op.name(), name):
        return None
    with _caller_state():
        return key, _is_excluded(key)


def excluding(key: Any, excluded: bool) -> AbstractContextManager[Any]:
    """Return a context in which a dispatch key is or is not excluded on this thread; 2.11 to 2.13."""
    guard: AbstractContextManager[Any] = _Exclusion(key, excluded)
    return guard


# -- Versions, storages and layouts of tensors

# Sets version counters; FSDP2 uses it too. Without it a recomputation that writes to a parameter moves its version, and
# ops that saved the parameter raise in backward. 2.1 to 2.13.
set_version_counters: Any = getattr(_autograd, "_unsafe_set_version_counter", None)

# The reference count of a storage. Without it nothing is offloaded. 2.11 to 2.13.
storage_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)

# A view that negates lazily, as `Tensor.conj` conjugates; there is no public name. 1.10 to 2.13.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view

# -- Flags of the process that decide which kernels run


def _is_there(*names: str) -> bool:
    return all(hasattr(torch._C, name) for name in names)


def process_flags() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yield a reader and a setter for each private flag of this torch, 2.11 to 2.13.

    See `sac/engine/flags.py`. torch's public names for them check the build each time, load the compiler's
    configuration, or do not exist. A flag that a build lacks is not restored.
    """
    names = [
        (f"_get_{backend}_sdp_enabled", f"_set_sdp_use_{backend}")
        for backend in ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    ]
    names += [
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("_get_cudnn_enabled", "_set_cudnn_enabled"),
        ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    ]
    for pair in names:
        if _is_there(*pair):
            yield getattr(torch._C, pair[0]), getattr(torch._C, pair[1])
    if _is_there("_set_deterministic_algorithms"):
        yield torch._C._get_deterministic_algorithms, _set_deterministic
        yield torch._C._get_deterministic_algorithms_warn_only, _set_warn_only


def _set_deterministic(on: bool) -> None:
    torch._C._set_deterministic_algorithms(on, warn_only=torch._C._get_deterministic_algorithms_warn_only())


def _set_warn_only(on: bool) -> None:
    torch._C._set_deterministic_algorithms(torch._C._get_deterministic_algorithms(), warn_only=on)


# The precision of float32 products, per backend and op. Without them it is not restored. 2.9 to 2.13.
get_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
set_precision: Any = getattr(torch._C, "_set_fp32_precision_setter", None)
HAS_PRECISIONS = None not in (get_precision, set_precision)


def mps_generator() -> torch.Generator | None:
    """Return the one generator of MPS, which has no tuple of generators as other devices have; 2.11 to 2.13.

    Without the name its state is not restored.
    """
    only: Any = getattr(torch.mps, "_get_default_mps_generator", None)
    return only() if only is not None and torch.backends.mps.is_available() else None


# -- Dynamo and AOTAutograd

_mark: Any = getattr(_eval_frame, "set_code_exec_strategy", None)
_Strategy: Any = getattr(_eval_frame, "_FrameExecStrategy", None)
_Action: Any = getattr(_eval_frame, "_FrameAction", None)

# Whether code can be marked to run uncompiled. Without it torch's own wrapper around `__torch_dispatch__` stays, which
# costs about a fifth of an empty mode's time on every op, and Dynamo may compile parts of a recomputation. 2.7 to 2.13.
CAN_SKIP_DYNAMO = _mark is not None and _Strategy is not None and hasattr(_Action, "SKIP")


def skip_dynamo(code: CodeType) -> None:
    """Stop Dynamo from compiling this code and the code that it calls, if ``CAN_SKIP_DYNAMO``; 2.7 to 2.13."""
    if CAN_SKIP_DYNAMO:
        _mark(code, _Strategy(_Action.SKIP, _Action.SKIP))


# Keeps a function out of graphs. The fallback is `torch.compiler.disable`, which does the same but loads all of Dynamo
# at once. 2.1 to 2.13.
disable_dynamo: Callable[..., Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def run_in_eager(function: Callable[..., Any], reason: str) -> None:
    """Mark a function that Dynamo must not trace; Dynamo reports ``reason``. Attributes of 2.0 to 2.13."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)


# Note [Graphs that both fit]
#
# If `torch.compile` is used inside a region, Dynamo holds the graphs of one code object in a list and takes the first
# one whose guards hold. By default, the list is in the order of last use, and a new graph is inserted at the front. A
# second micro-batch of another length creates a dynamic graph, which fits the first micro-batch too. The recomputation
# of the first micro-batch then gets the dynamic graph, although its forward used the static one. The two may save
# different tensors for backward, which is an error at best, and gives wrong gradients if they only save them in another
# order.
#
# So from the first region that runs in a process with Dynamo, the list is in creation order, for the whole process. The
# first graph that fits then stays the same. Only sac's results depend on the order; looking up a graph may check a few
# more guards. The order of last use is not turned on again: sac cannot read whether the user had turned it off, and
# graphs that are also used outside regions would be moved.

_order_by_use: Any = getattr(_eval_frame, "_set_lru_cache", None)


def keep_graphs_in_order_of_making() -> None:
    """Make Dynamo check the graphs of a function in creation order, in the whole process.

    See Note [Graphs that both fit]. torch's own message on this names the function, 2.10 to 2.13. Without it a
    recomputation may get another graph than its forward.
    """
    if _order_by_use is not None and "torch._dynamo" in sys.modules:
        _order_by_use(False)


_mode_keys: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_TRACING = [key for name in ("PROXY", "FUNCTIONAL") if (key := getattr(_mode_keys, name, None)) is not None]


def is_traced() -> bool:
    """Return whether Dynamo or AOTAutograd is tracing ops now instead of running them.

    AOTAutograd runs a region twice. The first run, only under the mode that makes ops functional, finds the tensors
    that they write to. Mode keys of 2.11 to 2.13.
    """
    return torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def compiler_is_tracing() -> bool:
    """Return whether Dynamo or AOTAutograd is at work, also where it only runs ops on fake tensors. 2.11 to 2.13."""
    context = getattr(torch._guards, "TracingContext", None)
    return context is not None and context.try_get() is not None


_FAKE: Any = getattr(_mode_keys, "FAKE", None)


def fake_mode_is_active() -> bool:
    """Return whether all ops run without data now: DTensor finds the layout of a result in this way. 2.1 to 2.13."""
    return _FAKE is not None and torch._C._get_dispatch_mode(_FAKE) is not None


# Whether torch shows an op's result to a policy under `torch.compile`. Without it rules on shape, dtype and size match
# nothing there, and a warning says so. In 2.13, not in 2.11.
SHOWS_RESULTS_TO_POLICIES = (
    "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext).parameters
)

# -- torch.utils.checkpoint

# The function whose frame holds the arguments of a checkpointed call: those that may hold state are restored too. If it
# has another name they are not. 2.1 to 2.13.
CHECKPOINT_FUNCTION = "_checkpoint_without_reentrant"


def chosen_early_stop() -> bool | None:
    """Return the value of ``torch.utils.checkpoint.set_checkpoint_early_stop``, None outside that context manager.

    2.1 to 2.13. Without the name the context manager has no effect on regions.
    """
    found: bool | None = getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None)
    return found


def ignored_ops() -> set[Any] | None:
    """Return the set of ops that torch's own selective checkpointing does not count; it may be extended. 2.4 to 2.13.

    None without the name: torch then counts all ops.
    """
    found: set[Any] | None = getattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", None)
    return found


# -- torch.func and forward-mode AD

# Whether a transform is active on this thread. Asking for the innermost one (`peek_interpreter_stack`) would give the
# thread a stack of transforms, which autograd copies twice for each node of every backward from then on. Without it
# users get torch's own errors about saved-tensor hooks or storages. 2.0 to 2.13.
transform_is_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)

# The nesting depth of the `vmap` of `is_grads_batched`. No function reads it, but entering returns it. Without them a
# recomputation that draws random numbers raises torch's error. 1.8 to 2.13.
_enter_vmap: Any = getattr(torch._C, "_vmapmode_increment_nesting", None)
_leave_vmap: Any = getattr(torch._C, "_vmapmode_decrement_nesting", None)


@contextmanager
def without_transforms() -> Iterator[None]:
    """Leave the transforms of ``torch.func`` and of a batched backward, and enter them again at the end; to 2.13."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    depth = 0
    if _enter_vmap is not None and _leave_vmap is not None:
        depth = _enter_vmap() - 1
        for _ in range(depth + 1):
            _leave_vmap()
    try:
        with temporarily_clear_interpreter_stack() if transform_is_active() else nullcontext():
            yield
    finally:
        for _ in range(depth):
            _enter_vmap()


def forward_ad_level() -> int:
    """Return the nesting depth of ``torch.autograd.forward_ad.dual_level``, -1 outside; 1.11 to 2.13.

    There is no other way to read it. Without the name tangents are not seen; a recomputation that lacks them usually
    raises.
    """
    return int(getattr(torch.autograd.forward_ad, "_current_level", -1))


# -- torch.distributed

# The gather of equal shares into one tensor: renamed in 2.13, where the old name warns.
gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def named_process_group(name: str) -> Any:
    """Return the process group with this name; None without torch's function for that; 2.11 to 2.13."""
    resolve = getattr(dist.distributed_c10d, "_resolve_process_group", None)
    return resolve(name) if resolve is not None else None


def wrap_for_checkpointing() -> Callable[..., None]:
    """Return torch's own ``apply_activation_checkpointing``; 1.12 to 2.13."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    return apply_activation_checkpointing


def silent_store() -> Any:
    """Return the store of a process group that sends nothing; None if this build has none; 2.11 to 2.13."""
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        return None
    return FakeStore()


# -- The registry of ops


def registered_ops() -> list[str]:
    """Return the names of all registered overloads as the dispatcher writes them (``aten::mm.out``); 2.11 to 2.13."""
    return list(torch._C._dispatch_get_all_op_names())


def higher_order_ops() -> list[str]:
    """Return the names of the higher-order ops; there is no public list. Empty without the name; 2.11 to 2.13."""
    return list(getattr(torch._ops, "_higher_order_ops", {}))


# Marks composite ops that return an argument for some values, as dropout does in eval mode. Without it such an op
# counts as one that makes a new tensor; ops/facts.py names those of torch. 2.13.
MAYBE_ALIASING: Any = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)


def scoped_library(namespace: str) -> AbstractContextManager[torch.library.Library]:
    """Return a library that removes its kernels when its context ends; 2.11 to 2.13. Planning for a GPU needs it."""
    library: AbstractContextManager[torch.library.Library] = torch.library._scoped_library(namespace, "IMPL")
    return library


# -- Fake tensors, for the planner

# The planner puts a fake tensor into a given storage in it; without it, torch computes. 2.11 to 2.13.
in_kernel: Any = getattr(_fake_tensor, "in_kernel_invocation_manager", None)

# -- Ops with effects: registered ones, and those that take an object of TorchScript (torch 2.11 to 2.13)

try:
    from torch._higher_order_ops.effects import has_effects as has_effects
except ImportError:

    def has_effects(op: Any) -> bool:
        """Return False: this torch knows no effects of ops."""
        return False


# -- Calls of autograd functions

# `Function.apply` ends in `super().apply(...)`: an `apply` on this base class sees every
# call, with its defaults bound (torch 2.11 to 2.13).
SingleLevelFunction: Any = getattr(torch.autograd.function, "_SingleLevelFunction", None)
apply_function: Any = vars(torch._C._FunctionBase)["apply"]  # passes the class on: `apply_function(cls, *args)`
