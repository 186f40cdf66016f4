"""Regions whose frame is `torch.utils.checkpoint`: in eager mode, and in graphs of `torch.compile`."""

from __future__ import annotations

import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac.errors import Problem, RegionError, SacWarning
from sac.native.load import library
from sac.outer_hooks import PackHooks, active_hooks
from sac.policy.model import ALTERNATE, Decision
from sac.recompute.evidence import MODULE_EVIDENCE
from sac.recompute.native_rerun import NativeValueIds, native_forward_mode, native_recompute_mode
from sac.recompute.op_trace import TracedCalls, compiled_calls
from sac.recompute.rerun import ForwardMode, RecomputeMode, RerunState
from sac.recompute.table import DecisionTable, ResolvedRule, decide, paths_up
from sac.recompute.value_ids import ValueIds
from sac.recompute.whole_modules import SavedModules
from sac.region.ambient import AmbientState
from sac.region.compiled_graphs import kept_out_of_graphs
from sac.region.fingerprint import PLAIN
from sac.region.frame import ALL, Handle, Handles, NoEarlyStop
from sac.region.module_state import ModuleState, has_uninitialized, owners_of
from sac.region.native_frame import native_types
from sac.region.settings import Settings
from sac.region.undo import UndoStack
from sac.stores.saved_tensor import SavedTensor
from sac.tensors import detached, shares_storage, unchanged
from sac.torch_private import (
    CHECKPOINT_FUNCTION,
    SHOWS_RESULTS_TO_POLICIES,
    chosen_early_stop,
    is_traced,
    partitioner_budget,
    pop_hooks,
    push_hooks,
)

# -- The two rerun modes for ``torch.utils.checkpoint``, in eager mode and under ``torch.compile``

# Note [Inside torch.utils.checkpoint]
#
# torch's own frame counts what autograd saves and stops the recomputation; our frame is not used. To keep the same
# promises, our modes push their own saved-tensor hooks inside torch's. In forward, a kept value gets one of our
# handles, which torch never sees; every other tensor is passed on to torch's pack hook. In recomputation, tensors of
# kept handles are skipped, and the others are passed on one op late. If an op fills a tensor that autograd saved right
# before it, that op has then run by the time torch takes the tensor and stops.
#
# Example. A rule saves `aten.mm` in `h = x @ w1; g = gelu(h); y = g @ w2`. Autograd saves w1, x, h, w2 and g, numbers 0
# to 4. Our handles keep 0, 2 and 3 (parameters and a saved output). torch's hook gets 1 and 4, so it counts two
# tensors. In recomputation, x waits until the first matmul is about to run, then goes to torch; h is served, the gelu
# runs, and g waits. The second matmul does not write to g. So g goes to torch right before it, torch has its two
# tensors and stops, and the matmul does not run.
#
# With the C++ library, the modes are those of the rerun engine there too (Note [Native value ids]): ordinary ops run in
# C++, which makes the handles in forward, and passes on what waits before and after each op of a recomputation. Torch's
# hooks are called all the same. When torch has all it needs, its exception leaves the library as an op's error does.
#
# A call can have several recomputations, one per backward, on several threads. Each has a mode of its own.


class CheckpointForwardMode(ForwardMode):
    """``ForwardMode`` for a region whose frame is torch's; see Note [Inside torch.utils.checkpoint]."""

    def __init__(self, state: RerunState, ambient: _Ambient, native: Any) -> None:
        super().__init__(state, None)
        self._ambient = ambient
        self._native = native
        self.packer = state

    def __enter__(self) -> CheckpointForwardMode:
        self._ambient.note()
        self.state.snapshots.at_start = self._ambient.at_start
        if self.state.modules is not None and (module_state := self._ambient.module_state) is not None:
            self.state.modules.set_start(module_state)
        theirs = active_hooks()
        self._watch = _Watch(self.state, theirs, self._native) if theirs is not None else None
        self._hooks = None
        if self._watch is not None:
            self._hooks = saved_tensors_hooks(*self._watch.hooks())
            self._hooks.__enter__()
        self.hooks = 0 if self._watch is None else 2  # ours, and torch's below them
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Clear both: hooks and their owners would keep each other alive, and torch's frame with them.
        watch, self._watch = self._watch, None
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(*error)
        if error[0] is None:
            kept = [] if watch is None else watch.kept()
            last = ALL if watch is None else watch.last_missing()
            self.state.close(kept, ALL if last >= 0 and chosen_early_stop() is False else last)
            self.state.decided = []
            if self.state.modules is not None:
                MODULE_EVIDENCE[self.state.table] = self.state.modules.evidence
            self._ambient.forward_is_over()
            outer = hooks_below_top() if watch is not None else None
            if outer is not None:
                for handle in kept:
                    handle.pack_with_outer_hooks(outer)
                self.state.pack_with_outer_hooks(outer)


_FIRST = "run the model once under torch.no_grad() before training"
_STEP_LATER = "step the optimizer when every backward of these weights is done"
_SETTINGS = Settings()


class _Ambient:
    """Ambient state of the forward that torch's checkpoint does not restore; ``module`` owns the buffers."""

    def __init__(self, module: nn.Module | None, *, in_graph: bool) -> None:
        self._module = module
        self._in_graph = in_graph
        self._surroundings: AmbientState | None = None

    def note(self) -> None:
        """The forward begins; raises ``RegionError`` if modules would create their parameters in it."""
        if has_uninitialized(owners_of(self._module)):
            found = "a lazy module would create its parameters in this call, which recomputation cannot repeat"
            raise RegionError(Problem("sac.context_fn", found, fix=_FIRST))
        # In a graph torch leaves random states to the compiler. A backend that runs the graph as it is does not handle
        # them.
        self._surroundings = AmbientState(
            (), owners_of(self._module), _SETTINGS, _objects_torch_was_given(), under_torch=not self._in_graph
        )

    @property
    def module_state(self) -> ModuleState | None:
        """The state of the modules at the start of the forward."""
        return self._surroundings.module_state if self._surroundings is not None else None

    def at_start(self, address: int) -> torch.UntypedStorage | None:
        """Return the copy of the storage at ``address`` from the start of the forward, if there is one."""
        return self.module_state.at_start(address) if self.module_state is not None else None

    def forward_is_over(self) -> None:
        """Release buffers that have not changed."""
        if self._surroundings is not None:
            self._surroundings.close("")

    def enter_on(self, stack: UndoStack) -> None:
        """Restore the state of the forward; restore the current state when ``stack`` is left.

        Raises ``RegionError`` if a parameter was changed since.
        """
        if self._surroundings is not None:
            module_state = self._surroundings.module_state
            if not self._in_graph and (problem := module_state.changed_parameter("")) is not None:
                raise RegionError(replace(problem, fix=_STEP_LATER))
            stack.callback(module_state.note_parameters)
            self._surroundings.enter_on(stack)


def hooks_below_top() -> PackHooks | None:
    """Return the saved-tensor hooks below the innermost ones, which here are those of torch's checkpoint."""
    top = active_hooks()
    if top is None:
        return None
    pop_hooks()
    try:
        return active_hooks()
    finally:
        push_hooks(*top)


_ENTERING = (__name__, native_forward_mode.__module__)


def _objects_torch_was_given() -> list[Any]:
    """Return the arguments of the checkpointed call that may hold state, which torch passes to the recomputation too.

    They are read from torch's Python frame, which enters our mode. If that frame has another name, none are found.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _ENTERING:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_name.startswith(CHECKPOINT_FUNCTION):
        return []
    given = (*frame.f_locals.get("args", ()), *frame.f_locals.get("kwargs", {}).values())
    return [value for value in given if type(value) not in PLAIN and not isinstance(value, (torch.Tensor, nn.Module))]


class _Watch:
    """Observes what torch's checkpoint packs, and keeps the tensors that need no recomputation."""

    def __init__(self, state: RerunState, theirs: PackHooks, native: Any) -> None:
        self.state = state
        self.theirs = theirs
        self.handles: Any = Handles() if native is None else native.Handles()
        self.places: set[int] = set()
        state.kept_places = self.places
        self._native = native

    def hooks(self) -> PackHooks:
        """Return the saved-tensor hooks of the region; they refer to this."""
        if self._native is None:
            return self._pack, self._unpack
        self.handles.may_be_read = True
        handle = native_types(self._native).handle
        hooks = self._native.FrameHooks(self.handles, handle, self, self.state, *self.theirs, self.places)
        return hooks.pack, hooks.unpack

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return a handle that keeps ``tensor``, or what torch's hook returns for it."""
        handle = Handle(len(self.handles), tensor)
        self.handles.add(handle)
        self.state.pack(tensor, handle)
        if not handle.is_kept:
            return self.theirs[0](tensor)
        self.places.add(handle.index)
        return handle

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedTensor):
            return packed.kept_value("")  # type: ignore[attr-defined, no-any-return]
        return self.theirs[1](packed)

    def kept(self) -> list[Handle]:
        """Return the live handles that hold their value."""
        return [handle for handle in self.handles.alive() if handle.is_kept]

    def last_missing(self) -> int:
        """Return the index of the last tensor that was passed to torch, -1 if there is none."""
        return next((index for index in reversed(range(len(self.handles))) if index not in self.places), -1)


class CheckpointRecomputeMode(RecomputeMode):
    """``RecomputeMode`` for a region whose frame is torch's; see Note [Inside torch.utils.checkpoint]."""

    def __init__(self, state: RerunState, native: Any) -> None:
        super().__init__(state, [], NoEarlyStop())
        self._native = native

    def __enter__(self) -> CheckpointRecomputeMode:
        theirs = active_hooks()
        self._late = self._hooks = None
        if theirs is not None and self.state.kept_places is not None:
            new_late = _LatePacking if self._native is None else _native_late_packing(self._native)
            self.progress = self._late = new_late(theirs[0], self.state.kept_places)
        super().__enter__()
        if self._late is not None:
            self._hooks = saved_tensors_hooks(self._late.pack, unchanged)
            self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        late, self._late = self._late, None
        hooks, self._hooks = self._hooks, None
        if hooks is not None and late is not None:
            hooks.__exit__(*error)
            if error[0] is None:
                late.flush()
        if error[0] is None or (late is not None and late.stopped):
            self.check(late.count - 1 if late is not None else ALL)


class _LatePacking:
    """Passes what autograd saves in recomputation to torch's pack hook, one op late."""

    def __init__(self, theirs: Callable[[torch.Tensor], Any], kept_places: set[int]) -> None:
        self.theirs = theirs
        self.kept_places = kept_places
        self.count = 0
        self.waiting: list[torch.Tensor] = []
        self.stopped = False
        self.verify: Callable[[int, torch.Tensor], None] | None = None

    @property
    def done(self) -> bool:
        """Whether a tensor is waiting to be passed on."""
        return bool(self.waiting)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue this tensor."""
        tensor = detached(tensor) if tensor.requires_grad else tensor
        index, self.count = self.count, self.count + 1
        if index not in self.kept_places:
            if self.verify is not None:
                self.verify(index, tensor)
            self.waiting.append(tensor)
        return tensor

    def stop_before(self, written: Sequence[torch.Tensor]) -> None:
        """Pass on the waiting tensors, unless the op about to run writes to one of them."""
        if not (written and any(shares_storage(tensor, written) for tensor in self.waiting)):
            self.flush()

    def after_op(self) -> None:
        """An op has run: pass on the tensors that waited for it, and those that it saved itself."""
        if self.waiting:
            self.flush()

    def flush(self) -> None:
        """Pass on the waiting tensors; torch raises from here when it has all it needs."""
        waiting, self.waiting = self.waiting, []
        try:
            for tensor in waiting:
                self.theirs(tensor)
        except BaseException:
            self.stopped = True
            raise


@cache
def _native_late_packing(library: Any) -> Any:
    """Return the class that derives from the library's."""

    class NativeLatePacking(library.LatePacking):  # type: ignore[misc]
        """See ``_LatePacking``."""

        __slots__ = ()
        stop_before = _LatePacking.stop_before
        after_op = _LatePacking.after_op

    return NativeLatePacking


class _Recomputations(AbstractContextManager[None]):
    """The context of each recomputation of one call, which enters a new mode.

    They change the state of the process, so they wait for each other: two threads may run a backward of the call.
    """

    def __init__(self, new_mode: Callable[[], CheckpointRecomputeMode], ambient: _Ambient) -> None:
        self._new_mode = new_mode
        self._ambient = ambient
        self._lock = threading.RLock()
        self._entered: list[UndoStack] = []

    def __enter__(self) -> None:
        with UndoStack() as stack:
            self._lock.acquire()
            stack.callback(self._lock.release)
            self._ambient.enter_on(stack)
            stack.enter_context(self._new_mode())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def checkpoint_contexts(
    table: DecisionTable, path: str = "", module: nn.Module | None = None, *, in_graph: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts of one call of ``torch.utils.checkpoint``, which calls this function once per call.

    ``in_graph``: the call is part of a Dynamo graph that is traced, or run as it is (backend "eager").
    """
    if is_traced():
        forward, recompute = create_selective_checkpoint_contexts(TracedPolicy(table, path, module))
        return forward, recompute
    if in_graph:
        compiled_calls(table).left_in_eager += 1
    modules = None
    if table.matches_modules:
        modules = SavedModules(table, path, _SETTINGS, MODULE_EVIDENCE.get(table), is_watched=True)
    forward_mode: Any = CheckpointForwardMode
    recompute_mode: Any = CheckpointRecomputeMode
    new_value_ids: Any = ValueIds
    if (native := library()) is not None:
        forward_mode = native_forward_mode(native, CheckpointForwardMode)
        recompute_mode = native_recompute_mode(native, CheckpointRecomputeMode)
        new_value_ids = partial(NativeValueIds, native)
    state = RerunState(table, path, owners_of(module), modules=modules, new_value_ids=new_value_ids)
    ambient = _Ambient(module, in_graph=in_graph)
    return forward_mode(state, ambient, native), _Recomputations(partial(recompute_mode, state, native), ambient)


# -- Regions in what ``torch.compile`` traces

# Note [Regions under torch.compile]
#
# Our frame cannot be traced. Inside a compiled function a region is a call of `torch.utils.checkpoint`: Dynamo puts it
# into its graph, with our decisions as tags for the partitioner. What only our frame can do (`Settings.needs_frame`) is
# not dropped: such a region runs in eager mode, as a call that Dynamo does not trace. This breaks the graph there;
# under `fullgraph=True` torch raises its own error, which states our reason.

_TAKEN = {"function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"}


def run_traced(
    function: Callable[..., Any], table: DecisionTable, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region of a graph that is being traced."""
    contexts = partial(checkpoint_contexts, table, in_graph=True)  # with a path Dynamo would compile each region
    if not _TAKEN.isdisjoint(kwargs):  # the function's own arguments, which torch would take as its own
        function, kwargs = partial(function, **kwargs), {}
    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


run_in_eager = kept_out_of_graphs(
    "sac runs this region in eager: inputs that are kept elsewhere, trackers, generators, state providers and "
    "use_reentrant cannot be put into a graph",
)


# -- Under ``torch.compile``: decisions as tags for the partitioner

# Note [Modules under torch.compile]
#
# No module code runs when a module's ops are traced. Dynamo has inlined it, and each node of its graph carries the
# stack of modules that the node came from, outermost first: id, access path from Dynamo's root, class (torch 2.13, see
# tests/stacks/test_compile_modules.py). If the region's block is known, the ids tell which module of the region this
# is. Otherwise the access paths do: torch calls the context function before it traces the first op of a region, while
# the current node is the call of the region itself, so the innermost module is the block. There is no current module if
# the block itself is compiled (`block.compile()`); access paths then begin at our own forward (`L['self'].module.mlp`).


def _tell_of_results(table: DecisionTable) -> None:
    """Warn about rules that match on an op's result if torch does not show results to policies."""
    blind = [one.rule for one in table.rules if one.rule.shape is not None or one.rule.dtype or one.rule.min_bytes]
    if blind and not SHOWS_RESULTS_TO_POLICIES:
        problem = Problem(
            blind[0].where(),
            f'rule "{blind[0].id}" matches on the shape, dtype or size of results, which torch {torch.__version__} '
            "does not show to a policy under torch.compile: it matches nothing there",
            fix="use a later torch, or say which op is meant by module or call",
        )
        warnings.warn(str(problem), SacWarning, stacklevel=2)


def _tell_of_budget() -> None:
    """Warn if the partitioner has its own memory budget."""
    budget = partitioner_budget()
    if budget == 1:
        return
    wins = "it has no effect in regions: what sac saves is saved there, and everything else is recomputed"
    if budget == 0:
        wins = "at 0 it takes precedence: everything is recomputed, including what sac saves"
    problem = Problem(
        "torch._functorch.config.activation_memory_budget",
        f"it is {budget} where regions of sac are compiled; {wins}",
        fix="leave it at 1, or leave sac.apply out",
    )
    warnings.warn(str(problem), SacWarning, stacklevel=2)


class TracedPolicy:
    """A decision table as the policy function that torch's modes call under ``torch.compile``: partitioner tags.

    ``module`` is the region's block, if known.
    """

    def __init__(self, table: DecisionTable, path: str, module: nn.Module | None = None) -> None:
        self.record = RerunState(table, path)
        self.calls = compiled_calls(table).traced = TracedCalls(offloads=bool(table.offloads))
        _tell_of_budget()
        _tell_of_results(table)
        self._paths = {} if module is None else {str(id(part)): name for name, part in module.named_modules()}
        stack = _modules_at_work()
        self._base = stack[-1][1] if stack else ""
        self._whole: dict[str, ResolvedRule | None] = {}
        self._turns: dict[int, list[str]] = {}  # rule with `do: alternate` -> modules it has met

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return the decision on this call as torch's ``CheckpointPolicy``."""
        table, record = self.record.table, self.record
        path = self._module()
        site = table.sites_of(path).get(id(op)) or table.add_site(op, path)
        if site.is_bookkeeping:
            return CheckpointPolicy.PREFER_RECOMPUTE
        decision = Decision.SAVE if site.savable else Decision.RECOMPUTE
        rule = self._rule_of_module(path)
        if rule is None:
            decision, rule = Decision.RECOMPUTE, site.final_rule
            if site.may_save or site.conditional_rules:
                decision, rule = decide(record, site, args, kwargs, getattr(context, "op_output", None))
        saves = decision.keeps  # a compiled graph offloads nothing
        self._count(saves, rule)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def _rule_of_module(self, path: str) -> ResolvedRule | None:
        """Return the rule that saves the module at ``path``, or one around it, as a whole; all ops inside are saved.

        A rule with ``do: alternate`` keeps every other module, in the order in which they are traced.
        """
        table = self.record.table
        if not table.matches_modules:
            return None
        if path not in self._whole:
            saving = [(around, bound) for around in reversed(paths_up(path)) if (bound := table.whole_rule(around))]
            chosen = (bound for around, bound in saving if bound.saves and self._has_turn(around, bound))
            self._whole[path] = next(chosen, None)
        return self._whole[path]

    def _has_turn(self, path: str, bound: ResolvedRule) -> bool:
        if bound.rule.do != ALTERNATE:
            return True
        modules = self._turns.setdefault(bound.index, [])
        if path not in modules:
            modules.append(path)
        return bound.rule.keeps_turn(modules.index(path))

    def _count(self, saves: bool, rule: ResolvedRule | None) -> None:
        calls = self.calls
        calls.saved, calls.recomputed = calls.saved + saves, calls.recomputed + (not saves)
        if rule is not None:
            calls.rules[rule.rule.id] = calls.rules.get(rule.rule.id, 0) + 1

    def _module(self) -> str:
        """Return the path, relative to the region, of the module that is being traced."""
        stack = _modules_at_work()
        if self._paths:
            return next((self._paths[key] for key, _ in reversed(stack) if key in self._paths), "")
        if not stack or stack[-1][1] == self._base:
            return ""
        base = self._base or f"{stack[-1][1].partition('.')[0]}.module"
        return stack[-1][1].removeprefix(base).removeprefix(".")


def _modules_at_work() -> list[tuple[str, str]]:
    """Return id and access path of each module that the traced node came from, outermost first."""
    stack = torch.fx.traceback.current_meta.get("nn_module_stack") or {}
    return [(str(key).partition("@")[0], _clean(way)) for key, (way, _) in stack.items()]


def _clean(way: str) -> str:
    """Return ``L['self'].layers[3].mlp`` as ``self.layers.3.mlp``, without what our forwards and wrappers add."""
    text = re.sub(r"^[LG]\['(\w+)'\]", r"\1", way)
    text = re.sub(r"\[\s*['\"]?([\w]+)['\"]?\s*\]", r".\1", text)
    return re.sub(r"\._modules|\._orig_mod|\.forward(\.__self__)?\.module", "", text)
