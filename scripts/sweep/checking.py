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
from sac.memory_timeline import mark, measure_memory
from sac.tools.comparison import count_flops

from .building import Built, CannotBuild, NotTrainable, build, loss_of, one_line, reset_seeds

PASSES, NOT_TRAINABLE, CANNOT_BUILD, FAILS = "passes", "not trainable", "cannot be built", "FAILS"
MODES = ("full", "selective")
FORWARD_DONE = "forward done"
EVAL = "in eval mode"
STEPS = ("step 0", "step 1", f"step 2 {EVAL}", f"step 3 {EVAL}")


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
    """Steps of one copy of the model: the steps that it took, and what was measured."""

    steps: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)
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
    try:
        plain = run(built, "none")
    except Exception as error:  # it keeps something of the first step, as its forward has run before
        raise NotTrainable(f"a second step without sac: {one_line(error)}") from error
    if differ := run(built, "none", plain, measured=False).differ:
        raise NotTrainable(f"two runs without sac differ: {_few(differ)}")
    problems = []
    if not _has_layers(built.model):
        raise NotTrainable("nothing to recompute: it has embeddings and norms, and no layer")
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
            ours = run(built, mode, plain)
        except Exception as error:
            problems.append(f"{mode}: {one_line(error)}")
            continue
        row.kept_bytes[mode], row.flops[mode] = ours.kept_bytes, ours.flops
        if ours.differ:
            problems.append(f"{mode}: {len(ours.differ)} of {len(plain.values)} differ: {_few(ours.differ)}")
        if ours.kept_bytes >= plain.kept_bytes:
            problems.append(f"{mode}: {ours.kept_bytes} bytes kept, {plain.kept_bytes} without")
    if "full" in row.flops and row.flops["full"] < plain.flops:
        problems.append(f"full: {row.flops['full']} FLOPs, {plain.flops} without")
    row.status, row.reason = (FAILS, "; ".join(problems)) if problems else (PASSES, "")


def _has_layers(model: nn.Module) -> bool:
    return any(
        p is not None and p.ndim >= 2
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for p in module._parameters.values()
    )


def run(built: Built, mode: str, plain: Run | None = None, *, measured: bool = True) -> Run:
    """Train a copy of the model for some steps under ``mode``: two with dropout, two in eval mode.

    Without ``plain`` the values of every step are kept; a model that cannot take two steps in eval mode (a cache that
    keeps a graph) takes none there. With it the steps are those that ``plain`` took, and what differs is noted.
    """
    model = copy.deepcopy(built.model)
    if mode != "none":
        sac.apply(model, mode)
    found = Run()
    for name in STEPS if plain is None else plain.steps:
        try:
            values = _one_step(model, built.inputs, name)
        except Exception:
            if plain is not None or EVAL not in name:
                raise
            found.steps = [step for step in found.steps if EVAL not in step]
            found.values = {key: value for key, value in found.values.items() if EVAL not in key}
            break
        found.steps.append(name)
        _note(found, plain, name, values)
    _note(found, plain, "buffer", {name: buffer.clone() for name, buffer in model.named_buffers()})
    model.train()
    if measured:
        step = _step(model, built.inputs)
        found.kept_bytes = _measured(model, step)
        reset_seeds()
        model.zero_grad()
        found.flops = count_flops(step)
    return found


def _one_step(model: nn.Module, inputs: dict[str, Any], name: str) -> dict[str, Tensor]:
    """Return the loss and the gradients; nothing where there is no loss."""
    model.train(EVAL not in name)
    model.zero_grad()
    reset_seeds()
    loss = loss_of(model(**copy.deepcopy(inputs)))
    if loss is None or not loss.requires_grad:
        return {}
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _note(found: Run, plain: Run | None, step: str, values: dict[str, Tensor]) -> None:
    """Keep the values of a step, or what differs in them from the values of ``plain``."""
    named = {f"{step}: {name}": value for name, value in values.items()}
    if plain is None:
        found.values |= named
        return
    missing = [name for name in plain.values if name.startswith(f"{step}: ") and name not in named]
    found.differ += missing
    found.differ += [n for n in named if n not in plain.values or not _same(named[n], plain.values[n])]


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


def _same(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_sparse:
        return torch.equal(left.to_dense(), right.to_dense())
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
