"""``SAC_REPORT_EVERY``: what the regions of a model keep, as one line in the log every so many steps."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from sac.errors import ConfigError, Problem
from sac.policy.read import bytes_text
from sac.recompute.op_trace import NO_RULE, audible_log
from sac.recompute.regions import Region
from sac.tables import count_text

VARIABLE = "SAC_REPORT_EVERY"


@dataclass(slots=True)
class ReportLog:
    """Logs a line after every ``every``-th forward with grad of the last of ``regions``, on the first rank."""

    every: int
    regions: list[Region] = field(default_factory=list)

    def saw(self, region: Region) -> None:
        """Log a line if one is due; ``region`` has run."""
        if region is self.regions[-1] and region.stats.calls % self.every == 0 and _is_first_rank():
            audible_log().info("forward %d: %s", region.stats.calls, kept_text(self.regions))


def report_log() -> ReportLog | None:
    """Return the log that ``SAC_REPORT_EVERY`` asks for, or None; raises ``ConfigError`` if it is not a number."""
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0"):
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(Problem(VARIABLE, f'"{text}" is not a number of forwards', "1, 2, 3, …; 0 turns it off"))
    return ReportLog(int(text))


def kept_text(regions: Iterable[Region]) -> str:
    """Return what the last call of each region keeps on devices, in one line, with the rules that keep most first."""
    rules: dict[str, int] = {}
    count = inputs = saved = 0
    for region in regions:
        stats = region.stats
        count, inputs, saved = count + 1, inputs + stats.input_bytes, saved + stats.saved_bytes
        ids = {one.index: one.rule.id for one in region.group.table.rules} | {NO_RULE: "by default"}
        for index, size in stats.by_rule.items():
            rules[ids[index]] = rules.get(ids[index], 0) + size
    parts = [f"{name} {bytes_text(size)}" for name, size in sorted(rules.items(), key=lambda one: -one[1]) if size]
    parts.append(f"inputs {bytes_text(inputs)}")
    return f"{bytes_text(saved + inputs)} kept in {count_text(count, 'region')} ({', '.join(parts)})"


def _is_first_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
