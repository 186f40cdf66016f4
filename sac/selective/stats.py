"""What one region's last call kept, for the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from sac.region.handles import Handle
from sac.region.inputs import storage_sizes
from sac.selective.record import CallRecord
from sac.selective.tensors import tensors_of

NO_RULE = -1  # the key of what the must-save tier or the policy's default saved


@dataclass(slots=True)
class RegionStats:
    """What the last call of one region kept, in bytes of whole storages, each counted once.

    ``saved_bytes``: for backward, the inputs apart; ``dead_bytes``: decided to be saved, and let go since backward can
    never read it; ``by_rule`` and ``hits`` are keyed by the rule's index in the table.
    """

    calls: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    dead_bytes: int = 0
    by_rule: dict[int, int] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)

    def figures(self) -> tuple[object, ...]:
        """Return all but the number of calls, to be compared."""
        kept = (self.saved_bytes, self.input_bytes, self.dead_bytes)
        return (*kept, tuple(sorted(self.by_rule.items())), tuple(sorted(self.hits.items())))

    def take(self, record: CallRecord | None, kept: Iterable[Handle], input_bytes: int) -> None:
        """Overwrite with what the call just run keeps; ``record`` is None where no mode was needed."""
        self.calls += 1
        self.input_bytes = input_bytes
        if record is None:
            self.saved_bytes = self.dead_bytes = 0
            return
        self.dead_bytes = record.dead_bytes
        self.hits = dict(record.hits)
        sizes: dict[int, int] = {}
        for handle in kept:
            if not handle.borrowed and isinstance(handle.value, torch.Tensor):
                sizes.update(storage_sizes(handle.value))
        rules: defaultdict[int, int] = defaultdict(int)
        for value in record.decided:
            rules[value.rule.index if value.rule is not None else NO_RULE] += value.saved_bytes
        for value in record.saved:
            for tensor in tensors_of(value.outputs):
                sizes.update(storage_sizes(tensor))
        self.by_rule = dict(rules)
        self.saved_bytes = sum(sizes.values())
