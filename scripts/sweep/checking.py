"""One family: is every gradient with checkpointing the one without, and is memory saved?"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import sac
from sac.blocks.find import find_blocks
from sac.measuring.memory_timeline import mark, measure_memory
from sac.measuring.step_flops import count_flops

from .building import Built, CannotBuild, NotTrainable, build, loss_of, one_line, reset_seeds

PASSES, NOT_TRAINABLE, CANNOT_BUILD, FAILS = "passes", "not trainable", "cannot be built", "FAILS"
MODES = ("full", "selective")
FORWARD_DONE = "forward done"


@dataclass
class Row:
    """What came out for one family. Bytes are those alive at the end of forward, FLOPs those of a whole step."""

    family: str
    status: str
    reason: str = ""
    model: str = ""
    size: str = ""
    inputs: list[str] = field(default_factory=list)
    parameters: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    kept_bytes: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Run:
    """Steps of one copy of the model: losses, gradients, buffers afterwards, and what was measured."""

    values: dict[str, Tensor]
    kept_bytes: int = 0
    flops: int = 0


def check_family(family: str, limit_s: float) -> Row:
    """Return the row of ``family``; exceptions are rows too."""
    start = time.monotonic()
    row = Row(family, CANNOT_BUILD)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        built = build(family, time.process_time() + 0.4 * limit_s)
        row.model, row.size, row.inputs = type(built.model).__name__, built.size, list(built.inputs)
        row.parameters = sum(p.numel() for p in built.model.parameters())
        _check(built, row)
    except CannotBuild as error:
        row.reason = str(error)
    except NotTrainable as error:
        row.status, row.reason = NOT_TRAINABLE, str(error)
    except Exception as error:
        row.status, row.reason = FAILS, one_line(error)
    row.seconds = round(time.monotonic() - start, 1)
    return row


def _check(built: Built, row: Row) -> None:
    plain = run(built, "none")
    if differ := differences(run(built, "none", measured=False), plain):
        raise NotTrainable(f"two runs without sac differ: {_few(differ)}")
    problems = []
    row.kept_bytes["none"], row.flops["none"] = plain.kept_bytes, plain.flops
    try:
        for block in find_blocks(built.model):
            label = f"{block.stack or 'the model'} ({type(block.module).__name__})"
            row.blocks[label] = row.blocks.get(label, 0) + 1
    except sac.SacError as error:
        row.status, row.reason = FAILS, one_line(error)
        return
    for mode in MODES:
        try:
            ours = run(built, mode)
        except Exception as error:
            problems.append(f"{mode}: {one_line(error)}")
            continue
        row.kept_bytes[mode], row.flops[mode] = ours.kept_bytes, ours.flops
        if differ := differences(ours, plain):
            problems.append(f"{mode}: {len(differ)} of {len(plain.values)} differ: {_few(differ)}")
        if ours.kept_bytes >= plain.kept_bytes:
            problems.append(f"{mode}: {ours.kept_bytes} bytes kept, {plain.kept_bytes} without")
    if "full" in row.flops and row.flops["full"] < plain.flops:
        problems.append(f"full: {row.flops['full']} FLOPs, {plain.flops} without")
    row.status, row.reason = (FAILS, "; ".join(problems)) if problems else (PASSES, "")


def run(built: Built, mode: str, *, measured: bool = True) -> Run:
    """Train a copy of the model for some steps under ``mode``: two with dropout, one without."""
    model = copy.deepcopy(built.model)
    if mode != "none":
        sac.apply(model, mode)
    found = Run({})
    for name, training in (("step 0", True), ("step 1", True), ("in eval mode", False)):
        model.train(training)
        model.zero_grad()
        reset_seeds()
        try:
            loss = loss_of(model(**copy.deepcopy(built.inputs)))
        except Exception:
            if training or mode != "none":
                raise
            continue
        if loss is None or not loss.requires_grad:
            continue
        loss.backward()
        found.values[f"{name}: loss"] = loss.detach()
        found.values |= {f"{name}: {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    found.values |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    model.train()
    if measured:
        step = _step(model, built.inputs)
        found.kept_bytes = _measured(model, step)
        reset_seeds()
        model.zero_grad()
        found.flops = count_flops(step)
    return found


def _measured(model: nn.Module, step: Callable[[], None]) -> int:
    model.zero_grad()
    reset_seeds()
    return measure_memory(step).at(FORWARD_DONE)


def _step(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        loss = loss_of(model(**inputs))
        mark(FORWARD_DONE)
        if loss is not None:
            loss.backward()

    return step


def differences(ours: Run, plain: Run) -> list[str]:
    """Return the names of what differs in any bit, or is in one of the two only."""
    both = set(ours.values) & set(plain.values)
    names = list(plain.values) + [n for n in ours.values if n not in plain.values]
    return [n for n in names if n not in both or not _same(ours.values[n], plain.values[n])]


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_sparse:
        return torch.equal(left.to_dense(), right.to_dense())
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
