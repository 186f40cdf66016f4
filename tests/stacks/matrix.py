"""Stack by mode: whether gradients are those without sac, and what else a step runs, keeps and sends."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from tests.stacks.composition import Outcome, differences
from tests.stacks.registry import NONE, Stack, trained
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

    @property
    def idle(self) -> bool:
        """Whether nothing was recomputed and nothing released: the mode was applied and had no effect."""
        return self.flops is not None and self.kept is not None and self.flops <= 1 <= self.kept


@dataclass(frozen=True, slots=True)
class Line:
    """One stack in every mode that applies to it."""

    stack: str
    world: int
    cells: tuple[Cell, ...] = field(default_factory=tuple)

    @property
    def failed(self) -> bool:
        """Whether a gradient differs, something was raised, or a mode did nothing."""
        return any(cell.gradients == DIFFER or cell.error or cell.idle for cell in self.cells)


def line_of(stack: Stack, advance: Callable[[str], None] = lambda label: None) -> Line:
    """Run a stack in every mode; what one raises is in its cell. `advance` is called once per mode, none included."""
    advance(f"{stack.name}: none")
    references: dict[str, list[Outcome]] = {}
    cells = []
    for mode in stack.modes:
        advance(f"{stack.name}: {mode}")
        options = stack.mode_options.get(mode, {})
        key = repr(sorted(options.items()))
        try:
            if key not in references:
                references[key] = trained(stack, NONE, options)
            cells.append(compared(mode, trained(stack, mode, options), references[key], rounded=stack.rounded))
        except (Exception, pytest.skip.Exception) as error:
            missing = missing_in(error)
            cells.append(Cell(mode, missing=missing) if missing else Cell(mode, error=_last_line(error)))
    return Line(stack.name, stack.world, tuple(cells))


def compared(mode: str, ours: list[Outcome], plain: list[Outcome], *, rounded: bool) -> Cell:
    """Hold the outcomes of a mode against those without us, rank by rank."""
    names = [name for mine, other in zip(ours, plain, strict=True) for name in differences(mine, other)]
    different = tuple(dict.fromkeys(names))
    gradients = EQUAL
    if different:
        near = rounded and all(are_close(mine, other) for mine, other in zip(ours, plain, strict=True))
        gradients = CLOSE if near else DIFFER
    return Cell(
        mode,
        gradients,
        different if gradients == DIFFER else (),
        flops=_ratio(sum(one.flops for one in ours), sum(one.flops for one in plain)),
        kept=_ratio(sum(one.kept_bytes for one in ours), sum(one.kept_bytes for one in plain)),
        sent=_ratio(_sent(ours), _sent(plain)),
    )


def are_close(ours: Outcome, plain: Outcome) -> bool:
    """Whether two outcomes have the same gradients up to rounding; losses too."""
    if ours.gradients.keys() != plain.gradients.keys() or len(ours.losses) != len(plain.losses):
        return False
    pairs = [(ours.gradients[name], gradient) for name, gradient in plain.gradients.items()]
    pairs += [(torch.tensor(mine), torch.tensor(other)) for mine, other in zip(ours.losses, plain.losses, strict=True)]
    return all(
        torch.allclose(mine, other, rtol=0, atol=ABSOLUTE + RELATIVE * float(other.abs().max()))
        for mine, other in pairs
        if other.numel()
    )


def missing_in(error: BaseException) -> str:
    """What this machine lacks, if that is why something could not run: a package, or what a skip says; else empty."""
    if isinstance(error, pytest.skip.Exception):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed"
    if isinstance(error, RankError):
        told = re.search(r"^(?:Skipped|_pytest\.outcomes\.Skipped): (.+)$", str(error), re.MULTILINE)
        absent = re.search(r"^ModuleNotFoundError: No module named '([^']+)'$", str(error), re.MULTILINE)
        return told[1] if told else f"the package {absent[1]} is not installed" if absent else ""
    return ""


def _last_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, RankError) else "".join(traceback.format_exception_only(error))
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)


def _sent(outcomes: list[Outcome]) -> int:
    return sum(sum(one.collectives.values()) for one in outcomes)


def _ratio(ours: int, plain: int) -> float | None:
    return ours / plain if plain else None
