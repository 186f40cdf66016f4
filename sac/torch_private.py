"""Every private or version-dependent name of torch that sac uses, each with its reason.

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
from torch._higher_order_ops.effects import has_effects
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor as _fake_tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

# Note [Private names of torch]
#
# A private name is read only in this file: `torch._C`, what begins with an underscore, and what only some of the
# supported versions (2.11 to 2.13) have. If all of them have it, it is read without a guard; a guard checks for the
# name, never for a version. The comment says why sac needs the name, in which versions it was seen, and what happens
# without it. Not here are names of ops, which are data to sac, and private attributes, which code reads where it has
# the object: PRIVATE_ATTRIBUTES lists them. To support another torch, run the test: it names what is missing.
#
# The modules imported above are those that torch's own documentation recommends to authors of extensions.

_C: Any = torch._C
_autograd: Any = _C._autograd
_engine: Any = torch.autograd.Variable._execution_engine
_eval_frame: Any = _C._dynamo.eval_frame

# -- Attributes of objects

# The owner of each attribute, and why sac reads it. All were seen in 2.11 to 2.13.
PRIVATE_ATTRIBUTES = {
    "_base": "Tensor: what a view was made of, to tell that releasing it frees no memory",
    "_buffers": "Module: the buffers it registered, without its children's",
    "_cdata": "UntypedStorage, Generator: address of the C++ object, which identifies it",
    "_is_view": "Tensor: whether autograd treats it as a view",
    "_is_zerotensor": "Tensor: whether it is a zero without memory, which forward-mode AD makes",
    "_local_tensor": "DTensor: this rank's share, without a collective",
    "_modules": "Module: the children it registered, also one that is registered twice",
    "_name": "HigherOrderOperator: its name",
    "_op": "OpOverload: the callable that it wraps",
    "_parameters": "Module: the parameters it registered, without its children's",
    "_schema": "OpOverload: its arguments and results",
    "_sequence_nr": "Node: its place in the order in which a thread makes nodes",
    "_version": "Tensor: counts in-place writes to its memory",
}

# Attributes under which torch's own wrappers hold the wrapped module.
WRAPPED_MODULE = "_checkpoint_wrapped_module"  # of torch's checkpoint_wrapper, 1.11 to 2.13
WRAPPED_NAMES = (WRAPPED_MODULE, "_fsdp_wrapped_module", "_fpw_module", "_orig_mod")  # FSDP1, and OptimizedModule
FSDP_MANAGED = "_is_fsdp_managed_module"  # an attribute of each module in a unit of FSDP1, 2.0 to 2.13
COMPOSABLE_PREFIX = "__composable_api_state_key"  # of torch's composable `checkpoint`, 2.1 to 2.13

# Whether a profiler records on this thread: then a budget on a CPU observes nothing, since there can be one at most.
# 1.8 to 2.13.
profiler_is_on: Callable[[], bool] = _autograd._profiler_enabled

# -- The running backward

NO_TASK = -1

# The number of the backward (graph task) that this thread runs, NO_TASK outside of one. It distinguishes a second
# backward from a second read in the same one. 1.13 to 2.13.
current_graph_task_id: Callable[[], int] = _C._current_graph_task_id


def graph_is_retained() -> bool:
    """Return whether the running backward keeps its graph for another one; True outside of one. 2.0 to 2.13."""
    return current_graph_task_id() == NO_TASK or bool(_autograd._get_current_graph_task_keep_graph())


# The number of the next node that this thread makes. 2.1 to 2.13.
next_node_number: Callable[[], int] = _autograd._get_sequence_nr

# Whether the running backward will execute a node. Needed to bring values in host memory back ahead of time. 2.0
# to 2.13.
will_execute_node: Callable[[Any], bool] = _C._will_engine_execute_node

# Calls a function when the running backward ends; FSDP and DDP use it too. sac uses it for copies from host memory and
# DeepSpeed's timers, which work only in a backward. 1.0 to 2.13.
when_backward_ends: Callable[[Callable[[], Any]], None] = _engine.queue_callback

# Whether the running backward and those around it accumulate into all leaves: torch guards its own reentrant checkpoint
# with it. 1.0 to 2.13.
is_for_every_leaf: Callable[[], bool] = _engine.is_checkpoint_valid

# Whether a node's saved tensors show that hooks hold them (`unpack_hook`). Without it sac does not examine the tensors
# that the graph after a region has saved. Seen in 2.13, not in 2.11.
SHOWS_SAVED_TENSORS = hasattr(getattr(_autograd, "SavedTensor", None), "unpack_hook")
SAVED_TENSOR_PREFIX = "_raw_saved_"  # of the attributes of a node that show what it saved, still packed. 1.9 to 2.13

# -- Per-thread stacks: saved-tensor hooks, dispatch modes, torch-function modes

# Saved-tensor hooks around a region hold what it keeps. 2.4 to 2.13.
top_hooks: Any = _autograd._top_saved_tensors_default_hooks
pop_hooks: Any = _autograd._pop_saved_tensors_default_hooks
push_hooks: Any = _autograd._push_saved_tensors_default_hooks

# Torch-function modes (`with torch.device(...)` is one), which recomputation restores; and whether subclasses and these
# modes are on at all. 2.11 to 2.13.
count_function_modes: Any = _C._len_torch_function_stack
function_mode_at: Any = _C._get_function_stack_at
push_function_mode: Any = _C._push_on_torch_function_stack
pop_function_mode: Any = _C._pop_torch_function_stack
get_function_state: Any = _C._get_torch_function_state
set_function_state: Any = _C._set_torch_function_state
FUNCTIONS_ON: Any = _C._TorchFunctionState.ENABLED

# -- Calling ops

# Overloads that the function or method of this name in torch's bindings calls for whatever arguments they were called
# with. It parses these in a third less time than the overload does. 2.11 to 2.13.
_NAMES = """
    _softmax.default add.Tensor addmm.default bmm.default clone.default cos.default detach.default div.Tensor
    embedding.default exp.default expand.default gelu.default mean.dim mm.default mul.Tensor
    native_layer_norm.default neg.default permute.default pow.Tensor_Scalar relu.default rsqrt.default
    select.int sigmoid.default silu.default sin.default sub.Tensor sum.dim_IntList t.default tanh.default
    transpose.int unsqueeze.default view.default
"""
_HOMES = (_C._VariableFunctions, _C._nn, torch.Tensor)
BOUND = {
    f"aten.{name}": next(getattr(home, packet) for home in _HOMES if hasattr(home, packet))
    for name in _NAMES.split()
    if any(hasattr(home, packet := name.split(".")[0]) for home in _HOMES)
}

# -- Ops that modes and autograd do not see

# A context in which neither modes nor subclasses see an op; the object itself guards too, while it is alive. 2.11 to
# 2.13.
UnseenByModes: Any = _C._DisableTorchDispatch

# In forward, the ops of a tape ran inside a dispatch mode, so below autograd and autocast; replay runs them there too.
# 2.11 to 2.13.
BelowAutograd: Any = _C._AutoDispatchBelowADInplaceOrView
WithoutAutocast: Any = _C._DisableAutocast


def autocast_of_caller(op: Any, device_type: str) -> tuple[Any, bool] | None:
    """Return the autocast key of a device type, and whether the caller of ``op``, which a mode handles, excludes it.

    None if ``op`` has its own autocast kernel. Under a mode a custom op's body runs without autocast. 2.11 to 2.13.
    """
    name = f"Autocast{device_type.upper()}"
    key = getattr(_C.DispatchKey, name, None)
    if key is None or _C._dispatch_has_kernel_for_dispatch_key(op.name(), name):
        return None
    with _C._RestorePythonTLSSnapshot():
        return key, _C._dispatch_tls_is_dispatch_key_excluded(key)


# A context in which a dispatch key is or is not excluded on this thread; 2.11 to 2.13.
excluding: Callable[[Any, bool], AbstractContextManager[Any]] = _C._SetExcludeDispatchKeyGuard

# -- Versions, storages and layouts of tensors

# Sets version counters, which a recomputation that writes to a parameter must not move; FSDP2 uses it too. 2.1 to 2.13.
set_version_counters: Any = _autograd._unsafe_set_version_counter

# The reference count of a storage. 2.11 to 2.13.
storage_use_count: Callable[[int], int] = _C._storage_Use_Count

# A view that negates lazily, as `Tensor.conj` conjugates; there is no public name. 1.10 to 2.13.
neg_view: Callable[[Tensor], Tensor] = torch._neg_view

# -- Flags of the process that decide which kernels run


def process_flags() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yield a reader and a setter for each private flag of this torch, 2.11 to 2.13.

    See `sac/engine/flags.py`. torch's public names for them check the build each time, load the compiler's
    configuration, or do not exist. A flag that a build lacks is not restored.
    """
    backends = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    names = [(f"_get_{backend}_sdp_enabled", f"_set_sdp_use_{backend}") for backend in backends]
    names.append(("_get_sdp_priority_order", "_set_sdp_priority_order"))
    names += [
        (f"_get_{flag}", f"_set_{flag}")
        for flag in ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "mkldnn_enabled")
    ]
    for getter, setter in names:
        if hasattr(_C, getter) and hasattr(_C, setter):
            yield getattr(_C, getter), getattr(_C, setter)
    yield _deterministic, lambda flags: _C._set_deterministic_algorithms(flags[0], warn_only=flags[1])


def _deterministic() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


# The precision of float32 products, per backend and op. 2.9 to 2.13.
get_precision: Any = _C._get_fp32_precision_getter
set_precision: Any = _C._set_fp32_precision_setter


def mps_generator() -> torch.Generator | None:
    """Return the one generator of MPS, which has no tuple of generators as other devices have; 2.11 to 2.13."""
    return torch.mps._get_default_mps_generator() if torch.backends.mps.is_available() else None


# -- Dynamo and AOTAutograd


def skip_dynamo(code: CodeType) -> None:
    """Stop Dynamo from compiling this code and the code that it calls; 2.7 to 2.13.

    It replaces torch's own wrapper around `__torch_dispatch__`, which costs about a fifth of an empty mode's time on
    every op.
    """
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(code, _eval_frame._FrameExecStrategy(skip, skip))


# Keeps a function out of graphs. `torch.compiler.disable` does the same, but loads all of Dynamo at once. 2.1 to 2.13.
disable_dynamo: Callable[..., Any] = torch._compile._disable_dynamo


def run_in_eager(function: Callable[..., Any], reason: str) -> None:
    """Mark a function that Dynamo must not trace; Dynamo reports ``reason``. Attributes of 2.0 to 2.13."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)


# Note [Graphs that both fit]
#
# If `torch.compile` is used inside a region, Dynamo takes the first graph of a code object whose guards hold, and by
# default the last used one is first. A second micro-batch of another length creates a dynamic graph that fits the first
# micro-batch too, so recomputation of the first would run another graph than its forward, which may save other tensors:
# an error at best, wrong gradients if only their order differs. So from the first region on, graphs are checked in
# creation order, in the whole process: looking one up may check a few more guards. This is not undone at the end,
# because sac cannot read what the user had set.


def keep_graphs_in_order_of_making() -> None:
    """Make Dynamo check the graphs of a function in creation order, in the whole process.

    See Note [Graphs that both fit]. torch's own message on this names the function, 2.10 to 2.13.
    """
    if "torch._dynamo" in sys.modules:
        _eval_frame._set_lru_cache(False)


def last_graph_break() -> str:
    """Return Dynamo's explanation of the last new graph break in this process, ``""`` if there is none; 2.0 to 2.13."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    text = next(reversed(counters.get("graph_break", {})), "")
    lines = [line.strip() for line in text.splitlines()]
    explained = (line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: "))
    return next(explained, lines[0] if lines else "")


_ModeKey: Any = _C._TorchDispatchModeKey


def is_traced() -> bool:
    """Return whether Dynamo or AOTAutograd is tracing ops now instead of running them.

    AOTAutograd runs a region twice. The first run, only under the mode that makes ops functional, finds the tensors
    that they write to. Mode keys of 2.11 to 2.13.
    """
    return torch.compiler.is_compiling() or any(
        _C._get_dispatch_mode(key) is not None for key in (_ModeKey.PROXY, _ModeKey.FUNCTIONAL)
    )


def compiler_is_tracing() -> bool:
    """Return whether Dynamo or AOTAutograd is at work, also where it only runs ops on fake tensors. 2.11 to 2.13."""
    return getattr(torch._guards._TLS, "tracing_context", None) is not None


def fake_mode_is_active() -> bool:
    """Return whether all ops run without data now: DTensor finds the layout of a result in this way. 2.1 to 2.13."""
    return _C._get_dispatch_mode(_ModeKey.FAKE) is not None


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
    """Return the value of torch's ``set_checkpoint_early_stop``, None outside of that context; 2.1 to 2.13."""
    found: bool | None = torch.utils.checkpoint._enable_checkpoint_early_stop
    return found


def ignored_ops() -> set[Any]:
    """Return the ops that torch's own selective checkpointing does not count; the set may be extended. 2.4 to 2.13."""
    found: set[Any] = torch.utils.checkpoint.SAC_IGNORED_OPS
    return found


# -- torch.func and forward-mode AD

# Whether a transform is active on this thread. Asking for the innermost one (`peek_interpreter_stack`) would give the
# thread a stack of transforms, which autograd copies twice for each node of every backward from then on. 2.0 to 2.13.
transform_is_active: Callable[[], bool] = _C._are_functorch_transforms_active


@contextmanager
def without_transforms() -> Iterator[None]:
    """Leave the transforms of ``torch.func`` and of a batched backward, and enter them again at the end; to 2.13."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    # No function reads the nesting depth of the `vmap` of `is_grads_batched`, but entering returns it. 1.8 to 2.13.
    depth = _C._vmapmode_increment_nesting() - 1
    for _ in range(depth + 1):
        _C._vmapmode_decrement_nesting()
    try:
        with temporarily_clear_interpreter_stack() if transform_is_active() else nullcontext():
            yield
    finally:
        for _ in range(depth):
            _C._vmapmode_increment_nesting()


def forward_ad_level() -> int:
    """Return the nesting depth of ``torch.autograd.forward_ad.dual_level``, -1 outside; 1.11 to 2.13."""
    return torch.autograd.forward_ad._current_level


# -- torch.distributed

# The gather of equal shares into one tensor: renamed in 2.13, where the old name warns.
gather_into: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def named_process_group(name: str) -> Any:
    """Return the process group with this name; torch raises if it has none. 2.11 to 2.13."""
    module: Any = dist.distributed_c10d
    return module._resolve_process_group(name)


def checkpoint_wrapper_module() -> Any:
    """Return the module of FSDP1's ``CheckpointWrapper`` and ``apply_activation_checkpointing``; 1.12 to 2.13."""
    import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as module

    return module


def silent_store() -> Any:
    """Return the store of a process group that sends nothing; 2.11 to 2.13."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


# -- The registry of ops

# The names of all registered overloads as the dispatcher writes them (`aten::mm.out`), and higher-order ops by name.
# There are no public lists. 2.11 to 2.13.
registered_ops: Callable[[], list[str]] = _C._dispatch_get_all_op_names
HIGHER_ORDER_OPS: dict[str, Any] = torch._ops._higher_order_ops

# Marks composite ops that return an argument for some values, as dropout does in eval mode. Without it such an op
# counts as one that makes a new tensor; ops/facts.py names those of torch. 2.13.
MAYBE_ALIASING: Any = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)

# A library that removes its kernels when its context ends; 2.11 to 2.13. Planning for a GPU needs it.
scoped_library: Callable[[str, str], AbstractContextManager[torch.library.Library]] = torch.library._scoped_library

# -- Fake tensors, for the planner

# The planner puts a fake tensor into a given storage in it. 2.11 to 2.13.
in_kernel: Any = _fake_tensor.in_kernel_invocation_manager

# -- Calls of autograd functions

apply_function: Any = vars(_C._FunctionBase)["apply"]  # passes the class on: `apply_function(cls, *args)`

# Gives a tensor that requires grad on the same memory, which is no leaf and no view, so that it may be written to; its
# backward raises. The node with which torch keeps `once_differentiable` from a second backward. 1.0 to 2.13.
not_leaf_of: Callable[[Tensor], Tensor] = _C._functions.DelayedError("a unit that runs again has no backward", 1)

# An `apply` on these classes sees every call. In 2.11 to 2.13 `Function.apply` ends in `super().apply(...)`, and Dynamo
# tests what it is; in 2.15 it is the method above itself.
FUNCTION_CLASSES: list[Any] = [torch.autograd.function._SingleLevelFunction]
if vars(torch.autograd.Function)["apply"] is apply_function:
    FUNCTION_CLASSES.append(torch.autograd.Function)
