"""Stack by mode: whether training is that without sac, and what else a step runs, keeps and sends."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.stacks.composition import Outcome, differences, least_kept
from tests.stacks.registry import NONE, STACKS, Stack, trained
from tests.support.ranks import RankError

EQUAL, CLOSE, DIFFER = "equal", "close", "DIFFER"
RELATIVE, ABSOLUTE = 1e-4, 1e-6  # of the largest number of a gradient, where a stack adds in another order


@dataclass(frozen=True, slots=True)
class Cell:
    """One stack in one mode, over all its processes. Ratios are to the same stack without us; None where that is 0."""

    mode: str
    gradients: str = ""
    different: tuple[str, ...] = ()
    flops: float | None = None
    kept: float | None = None
    sent: float | None = None
    missing: str = ""  # what this machine lacks to run it
    error: str = ""  # what was raised
    least_kept: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing was recomputed and nothing released: the mode was applied and had no effect."""
        return self.flops is not None and self.least_kept is not None and self.flops <= 1 <= self.least_kept


@dataclass(frozen=True, slots=True)
class Line:
    """One stack in every mode that applies to it."""

    stack: str
    world: int
    cells: tuple[Cell, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a gradient differs, something was raised, or a mode did nothing."""
        return any(cell.gradients == DIFFER or cell.error or cell.idle for cell in self.cells)


def assert_as_promised(line: Line, *, sends_again: bool = False) -> None:
    """No gradient differs, and each mode costs and keeps what its name says.

    Selective lies between full and no checkpointing in FLOPs and bytes, and sends nothing again, or what full does.
    Every other mode runs what full runs; scattered keeps less than that.
    """
    assert not line.failed, line
    for cell in line.cells:
        if cell.missing:
            pytest.skip(cell.missing)
    full, selective, *others = line.cells
    assert 1 <= selective.flops < full.flops, line
    assert full.least_kept < selective.least_kept < 1, line
    assert (selective.sent or 0) <= (full.sent if sends_again else 1), line
    for cell in others:
        assert cell.flops == full.flops, line
        assert cell.least_kept < (full.least_kept if cell.mode == "scattered" else 1), line


def line_of(stack: Stack, advance: Callable[[str], None] = lambda label: None) -> Line:
    """Run a stack in every mode; what one raises is in its cell. `advance` is called once per mode, none included."""
    advance(f"{stack.name}: none")
    references: dict[str, list[Outcome]] = {}
    cells = []
    for mode in stack.modes:
        advance(f"{stack.name}: {mode}")
        options = stack.mode_options.get(mode, {})
        try:
            if str(options) not in references:
                references[str(options)] = trained(stack, NONE, options)
            cells.append(compared(mode, trained(stack, mode, options), references[str(options)], rounded=stack.rounded))
        except (Exception, pytest.skip.Exception) as error:
            cells.append(_failed(mode, error))
    return Line(stack.name, stack.world, tuple(cells))


@functools.cache
def line_named(name: str) -> Line:
    """A stack of the page in every mode, run once in this process."""
    return line_of({stack.name: stack for stack in STACKS}[name])


def compared(mode: str, ours: list[Outcome], plain: list[Outcome], *, rounded: bool) -> Cell:
    """Hold the outcomes of a mode against those without us, rank by rank."""
    pairs = list(zip(ours, plain, strict=True))
    different = tuple(dict.fromkeys(name for mine, other in pairs for name in differences(mine, other)))
    near = rounded and all(_are_close(mine, other) for mine, other in pairs)
    ratios = []
    for size in (lambda one: one.flops, lambda one: one.kept_bytes, lambda one: sum(one.collectives.values())):
        mine, other = (sum(map(size, outcomes)) for outcomes in (ours, plain))
        ratios.append(mine / other if other else None)
    verdict = EQUAL if not different else CLOSE if near else DIFFER
    return Cell(mode, verdict, different if verdict == DIFFER else (), *ratios, least_kept=least_kept(ours, plain))


def _are_close(ours: Outcome, plain: Outcome) -> bool:
    """Whether two outcomes have the same gradients up to rounding; losses too."""
    if ours.gradients.keys() != plain.gradients.keys() or len(ours.losses) != len(plain.losses):
        return False
    pairs = [(ours.gradients[name], gradient) for name, gradient in plain.gradients.items()]
    pairs += [(torch.tensor(ours.losses), torch.tensor(plain.losses))] if plain.losses else []
    return all(
        torch.allclose(mine, other, rtol=0, atol=ABSOLUTE + RELATIVE * float(other.abs().max()))
        for mine, other in pairs
        if other.numel()
    )


def _failed(mode: str, error: BaseException) -> Cell:
    """What was raised, or what this machine lacks: a package, or what a skip says."""
    text = str(error) if isinstance(error, RankError) else "".join(traceback.format_exception_only(error))
    told = re.search(r"^(?:_pytest\.outcomes\.)?Skipped: (.+)$", text, re.MULTILINE)
    absent = re.search(r"^ModuleNotFoundError: No module named '([^']+)'$", text, re.MULTILINE)
    if told or absent:
        return Cell(mode, missing=told[1] if told else f"the package {absent[1]} is not installed")
    return Cell(mode, error=next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "?"))
