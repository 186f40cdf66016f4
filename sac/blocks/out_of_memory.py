"""Out of memory, explained: where, what the regions keep, what other modes would free, and how to plan."""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sac.blocks.chunks import ChunkedForward
from sac.blocks.install import Applied, InstalledForward, RegionForward, alike
from sac.blocks.paths import group_label
from sac.config import policy_of_family, usable_policy
from sac.errors import SacWarning
from sac.ops.registry import find_op
from sac.policy.model import Decision, Policy, Rule
from sac.policy.read import bytes_text
from sac.recompute.op_trace import OpTraceRow
from sac.recompute.regions import FULL, Region
from sac.recompute.table import CallSite, DecisionTable, decide
from sac.region.frame import Frame
from sac.region.reentrant import ReentrantFrame
from sac.torch_private import (
    MODULE_CALL,
    NO_TASK,
    current_graph_task_id,
    current_node,
    observe_out_of_memory,
)

# Note [Out of memory]
#
# 1. An out-of-memory error that passes through a region, in forward or in its recomputation in backward, gets an
#    explanation at the end of its text. It stays the same exception. `RegionForward` and the frames catch it; they
#    reach this file by `Settings.watch`, which `sac.apply` and `sac.watch` set.
# 2. An error elsewhere (in the head, in an op of backward) passes through no code of sac. On a GPU, the allocator
#    calls an observer before it raises; it warns with the same explanation unless the error will pass through a region.
#    There is one observer in a process, attached when a region first runs with CUDA initialized; torch cannot detach
#    it. It holds no model: it looks for installed forwards among the objects of the garbage collector.
# 3. Everything that is said is known already: the figures of the report and the op trace of each group. No op runs on
#    the device; results of ops are described to rules by tensors without data.
# 4. If explaining fails, the error stays as it is.
#
# What another mode would keep is computed from the op trace: the results that its rules save, also where backward would
# never read them, so the true bytes may be lower. Its cost is the FLOPs of the ops that it does not save.

_log = logging.getLogger(__name__)
_MARK = "sac: out of memory"
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # its error is a RuntimeError
_MODULES_SHOWN = 3
_PASSES = 3  # a step in forwards: the forward, and a backward with twice its FLOPs
_USABLE = 0.9  # of a device's memory: the same margin as `sac plan` leaves


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory cannot be allocated on a device, or on the host by torch."""
    return isinstance(error, torch.OutOfMemoryError) or (type(error) is RuntimeError and _CPU_ALLOCATOR in str(error))


class OutOfMemoryWatch:
    """Explains out-of-memory errors of regions; see Note [Out of memory]. It has no state: all models share one."""

    def __reduce__(self) -> str:
        return "WATCH"

    def __deepcopy__(self, memo: dict[int, Any]) -> OutOfMemoryWatch:
        return self

    def begin(self) -> None:
        """A region runs for the first time: attach the observer of the allocator if there is one."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            _attach()

    def explain(self, error: BaseException, path: str, owners: Sequence[nn.Module], *, in_backward: bool) -> None:
        """Add an explanation to the text of ``error``, which passes through the region at ``path`` of these modules.

        Does nothing for other errors, and for one that has its explanation.
        """
        try:
            if not is_out_of_memory(error) or any(_MARK in str(part) for part in error.args):
                return
            forwards = [one for one in _forwards() if _has_region(one, path, owners)]
            part = "the recomputation of" if in_backward else "the forward of"
            applied = forwards[0].applied if forwards else None
            text = "\n".join(_lines(f"in {part} {path or 'the region'}", applied, None if in_backward else path))
            said = str(error.args[0]) if error.args else str(error)
            error.args = (f"{said}\n\n{text}", *error.args[1:])
        except Exception:
            _log.debug("an out-of-memory error could not be explained", exc_info=True)


WATCH = OutOfMemoryWatch()

# -- The observer of the allocator

_observers: list[Any] = []  # the one of this process: torch keeps it, too


def _attach() -> None:
    if not _observers:
        _observers.append(observer)
        observe_out_of_memory(observer)


def observer(device: int, wanted_bytes: int, total_bytes: int, free_bytes: int) -> None:
    """Warn with an explanation, unless the error that torch is about to raise will pass through a region."""
    try:
        if _passes_through_region():
            return
        running = (one for one in _forwards() if any(region.stats.calls for region in one.regions))
        applied = {id(one.applied): one.applied for one in running if _is_on(one.module, device)}
        where = f"{_outside()}, outside of the regions: {bytes_text(wanted_bytes)} were asked for"
        for one in applied.values():
            warnings.warn("\n".join(_lines(where, one, device=device)), SacWarning, stacklevel=2)
    except Exception:  # also a filter that turns the warning into an error: torch raises its own error next
        _log.debug("an out-of-memory error could not be explained", exc_info=True)


_CATCH = frozenset(
    one.__code__
    for one in (RegionForward._explained, ChunkedForward._run_region, Frame._unpack, ReentrantFrame._again_and_backward)
)


def _passes_through_region() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CATCH:
            return True
        frame = frame.f_back
    return False


def _outside() -> str:
    """Return where the running op is, by the class of its module or the name of its autograd node."""
    if current_graph_task_id() != NO_TASK:
        node = current_node()
        return f"in backward ({node.name()})" if node is not None else "in backward"
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not MODULE_CALL:
        frame = frame.f_back
    return (
        f"in the forward of a {type(frame.f_locals['self']).__name__}" if frame is not None else "outside of the model"
    )


def _is_on(module: nn.Module, device: int) -> bool:
    """Return whether a module may run on a GPU: its parameters are there, or wait on the host."""
    places = {(one.device.type, one.device.index) for one in module.parameters()}
    return ("cuda", device) in places or all(kind == "cpu" for kind, _ in places)


def _forwards() -> list[InstalledForward]:
    return [one for one in gc.get_objects() if issubclass(type(one), InstalledForward)]


def _has_region(forward: InstalledForward, path: str, owners: Sequence[nn.Module]) -> bool:
    inside = {id(module) for module in forward.module.modules()}
    return any(region.path == path for region in forward.regions) and any(id(owner) in inside for owner in owners)


# -- The explanation


def _lines(where: str, applied: Applied | None, path: str | None = None, device: int | None = None) -> Iterator[str]:
    """Yield the lines of the explanation; ``path`` is that of the region whose forward failed, if one did."""
    regions = [region for one in _forwards() if one.applied is applied for region in one.regions] if applied else []
    ran = sorted((one for one in regions if one.stats.calls), key=lambda one: _natural(one.path))
    policy = regions[-1].group.table.policy.name if regions else ""
    mode = (
        ""
        if applied is None
        else f" (mode {applied.mode}{f', policy {policy}' if applied.mode == 'selective' else ''})"
    )
    yield f"{_MARK} {where}{mode}"
    if applied is None or not ran:
        yield "  no region has finished a forward yet: what they keep is not known"
    else:
        of = f" of {len(regions)}" if len(ran) < len(regions) else ""
        over = _over(regions, path)
        so_far = f" ({bytes_text(_kept(over))} so far: the forward of {len(over)} is over)" if over else ""
        yield f"  kept from forward to backward by {len(ran)}{of} regions: {bytes_text(_kept(ran))}{so_far}"
        for of_group in alike(ran):
            yield from _group_lines(of_group)
        yield from _mode_lines(ran, applied)
    yield from _plan_lines(ran, device)


def _kept(regions: Sequence[Region]) -> int:
    return sum(one.stats.saved_bytes + one.stats.input_bytes for one in regions)


def _over(regions: Sequence[Region], path: str | None) -> list[Region]:
    """Return the regions whose forward is over when that of ``path`` fails, if the numbers of calls show it."""
    failed = next((one.stats.calls for one in regions if one.path == path), None)
    if failed is None or {one.stats.calls for one in regions} != {failed, failed + 1}:
        return []
    return [one for one in regions if one.stats.calls > failed]


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def _group_lines(regions: Sequence[Region]) -> Iterator[str]:
    """Yield what each of these regions keeps: by rule, and the modules in which the rule saves most."""
    stats, table = regions[-1].stats, regions[-1].group.table
    each = " each" if len(regions) > 1 else ""
    label = group_label(region.path for region in regions)
    kept = stats.saved_bytes + stats.input_bytes
    yield f"    {label}: {bytes_text(kept)}{each}, {bytes_text(stats.input_bytes)} of it inputs"
    modules: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for row in regions[-1].group.op_trace:
        if Decision(row.decision).keeps:
            modules[row.rule][row.module or "(region)"] += row.bytes
    rules = {one.index: one.rule.id for one in table.rules}
    by_rule: Counter[str] = Counter()
    for index, count in stats.by_rule.items():
        by_rule["none" if table.saves_everything else rules.get(index, "")] += count
    for rule, count in by_rule.most_common():
        if count:
            unnamed = "default" if table.default.keeps else "must-save"
            name = "autograd" if table.saves_everything else f"rule {rule}" if rule else unnamed
            inside = [module for module, _ in modules[rule].most_common()]
            more = ", …" if len(inside) > _MODULES_SHOWN else ""
            most = f", most in {', '.join(inside[:_MODULES_SHOWN])}{more}" if inside else ""
            yield f"      {name}: {bytes_text(count)}{each}{most}"


# -- Other modes


# No checkpointing, as a policy.
EVERYTHING = Policy("none", (Rule("none", Decision.SAVE.value, ("*",)),))


@dataclass(frozen=True, slots=True)
class _Estimate:
    """What a mode would keep (at most), and the share of the regions' forward FLOPs that it would run again."""

    kept_bytes: int
    recomputed: float


def _mode_lines(regions: Sequence[Region], applied: Applied) -> Iterator[str]:
    kept = _kept(regions)
    total = sum(row.flops for region in regions for row in region.group.op_trace)
    now = sum(row.flops for one in regions for row in one.group.op_trace if not Decision(row.decision).keeps)
    share = now / total if total else 0.0
    used = regions[-1].group.table.policy.name
    family = policy_of_family(applied.family)
    others = {"none": EVERYTHING, "full": FULL, f"selective (policy {family.name})": family}
    yield "  other modes, by the ops of the first call (bytes at most; a step counts as three forwards):"
    for name, policy in others.items():
        if policy.name == used:
            continue
        one = _estimate(regions, policy, total)
        more = one.kept_bytes - kept
        change = f"frees {bytes_text(-more)}" if more < 0 else f"needs {bytes_text(more)} more"
        step = (_PASSES + one.recomputed) / (_PASSES + share)
        yield (
            f"    {name}: keeps {bytes_text(one.kept_bytes)}, {change}; recomputes {one.recomputed:.0%} of the "
            f"regions' FLOPs (now {share:.0%}), step ×{step:.2f}"
        )
    if applied.mode == "full":
        yield "    no mode keeps less than full: use a smaller batch, shard the model, or keep inputs elsewhere"


def _estimate(regions: Sequence[Region], policy: Policy, total: int) -> _Estimate:
    resolved = usable_policy(policy)
    rules = [one.index for one in resolved.rules if not one.rule.is_for_some_regions]
    table = resolved.table(rules)
    of_group: dict[int, tuple[int, int]] = {}
    kept = again = 0
    for region in regions:
        group = region.group
        if id(group) not in of_group:
            of_group[id(group)] = _of_rows(table, group.op_trace)
        saved, flops = of_group[id(group)]
        if group.table.saves_everything:
            saved = min(saved, region.stats.saved_bytes)  # autograd keeps no more
        kept += saved + region.stats.input_bytes
        again += flops
    return _Estimate(kept, again / total if total else 0.0)


class _Counter:
    """Counts the calls of one region for the decisions on them."""

    def __init__(self) -> None:
        self.calls: MutableMapping[CallSite, int] = defaultdict(int)
        self.alternations: MutableMapping[int, int] = defaultdict(int)


def _of_rows(table: DecisionTable, rows: Sequence[OpTraceRow]) -> tuple[int, int]:
    """Return the bytes that a table saves of these ops, and the FLOPs of the others."""
    counter = _Counter()
    saved = flops = 0
    for row in rows:
        if _decision(table, counter, row).keeps:
            saved += row.bytes
        else:
            flops += row.flops
    return saved, flops


def _decision(table: DecisionTable, counter: _Counter, row: OpTraceRow) -> Decision:
    op = find_op(row.op)
    if op is None:  # a module that is saved as a whole, or an op that this process has lost
        return Decision(row.decision)
    site = table.sites_of(row.module).get(id(op)) or table.add_site(op, row.module)
    if not site.savable or site.is_bookkeeping:
        return Decision.RECOMPUTE
    dtype = getattr(torch, row.dtype, torch.float32)
    out = torch.empty(row.shape, dtype=dtype, device="meta")
    try:
        return decide(counter, site, (), {}, out)[0]
    except Exception:  # a condition that reads the arguments of the call
        return Decision.RECOMPUTE


# -- The command that plans


def _plan_lines(regions: Sequence[Region], device: int | None) -> Iterator[str]:
    options = ["--model SPEC", "--batch N", "--seq N"]
    sizes: Counter[str] = Counter()
    for row in regions[-1].group.op_trace if regions else ():
        sizes[row.dtype] += row.bytes
    dtype = next((name for name, _ in sizes.most_common(1)), "")
    options += [f"--dtype {dtype}"] if dtype else []
    budget = "SIZE"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = torch.cuda.current_device() if device is None else device
        total = torch.cuda.get_device_properties(index).total_memory
        budget = bytes_text(int(total * _USABLE)).replace(" ", "")
        options.append("--device cuda")
    yield f'  plan for what fits: sac.plan(model, inputs, budget="{budget}"), then sac.apply with its policy'
    yield f"    on the command line: sac plan {' '.join(options)} --budget {budget} --explain"
