"""What one region's last call kept, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

NO_RULE = -1  # the key of what the must-save tier or the policy's default saved


@dataclass(slots=True)
class RegionStats:
    """What the last call of one region kept, in bytes of whole storages, each counted once.

    ``saved_bytes``: for backward, the inputs apart; ``input_host_bytes``: of inputs kept in host memory for a device;
    ``dead_bytes``: decided to be saved, and let go since backward can
    never read it; ``by_rule`` and ``hits`` are keyed by the rule's index in the table. ``compiled_graphs``: those of
    ``torch.compile`` that the first call ran. ``engine``: that of the last call, empty if it needed none.
    """

    calls: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    input_host_bytes: int = 0
    dead_bytes: int = 0
    by_rule: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)
    compiled_graphs: int = 0
    engine: str = ""

    def figures(self) -> tuple[object, ...]:
        """Return all but the number of calls, to be compared."""
        kept = (self.saved_bytes, self.input_bytes, self.input_host_bytes, self.dead_bytes, self.compiled_graphs)
        return (*kept, tuple(sorted(self.by_rule.items())), tuple(sorted(self.hits.items())))

    def take(self, kept: KeptFigures | None, input_bytes: tuple[int, int]) -> None:
        """Overwrite with what the call just run keeps; ``kept`` is None where no mode was needed."""
        self.calls += 1
        self.input_bytes, self.input_host_bytes = input_bytes
        self.saved_bytes = kept.saved_bytes if kept is not None else 0
        self.dead_bytes = kept.dead_bytes if kept is not None else 0
        if kept is not None:
            self.by_rule, self.hits = kept.by_rule, kept.hits


@dataclass(frozen=True, slots=True)
class KeptFigures:
    """What one call's record and handles keep, counted before anything is handed to surrounding hooks."""

    saved_bytes: int
    dead_bytes: int
    by_rule: dict[int, int]
    hits: dict[int, int]
