"""What is alive at the peak of a step, by category, block and rule, and what would lower the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sac.blocks.paths import group_label
from sac.ops.registry import op_name
from sac.planner.ledger import Ledger
from sac.planner.observing import FORWARD
from sac.planner.rules import PlannedRegion, policy_of
from sac.tables import bytes_text
from sac.tensors import tensor_parts, tensors_of
from sac.torch_private import NO_TASK, current_graph_task_id, tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
INPUTS, GATHERED, BLOCKS = "buffers and inputs", "gathered parameters", "activations of blocks"
OTHERS, BACKWARD = "activations outside of blocks, logits and loss", "made by backward"
REMEDIES = {
    PARAMETERS: "shard them (`sac plan --fsdp N`), hold them in a narrower dtype, or train adapters on frozen weights",
    GRADIENTS: "shard them (`sac plan --fsdp N`), or let the optimizer step in backward, so that each is freed at once",
    OPTIMIZER: "shard it (`sac plan --fsdp N`), or use an optimizer with less state (8 bits, or factored)",
    INPUTS: "a smaller batch, with more accumulation steps",
    GATHERED: "shard in smaller units: call fully_shard on smaller modules",
    BLOCKS: "a smaller budget, or a smaller batch with more accumulation steps",
    OTHERS: "a chunked or fused loss, which never holds all logits at once; or a smaller batch",
    BACKWARD: "a smaller batch, with more accumulation steps",
}
_WORTH_SAYING = 0.1  # of the peak
_WORTH_A_ROW = 0.01
_SNAPSHOT = "for single tensors: torch.cuda.memory._record_memory_history() and _dump_snapshot() in a real step"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is alive at a peak, largest first: the category, where and why, and bytes."""

    rows: tuple[tuple[str, str, int], ...]

    @property
    def categories(self) -> dict[str, int]:
        """The bytes of each category that has any, largest first."""
        found: Counter[str] = Counter()
        for category, _, size in self.rows:
            found[category] += size
        return {name: size for name, size in found.most_common() if size}

    def lines(self) -> list[str]:
        """Return the explanation as text, which ends with what would lower the peak."""
        peak = max(1, sum(self.categories.values()))
        found = [f"alive at the peak of {bytes_text(peak)}:"]
        for category, size in self.categories.items():
            found.append(f"  {bytes_text(size):>10}  {size / peak:6.1%}  {category}")
            rows = [row for row in self.rows if row[0] == category and row[1]]
            found += [f"  {bytes_text(one):>10}  {one / peak:6.1%}    {where}" for _, where, one in rows]
        large = [name for name, size in self.categories.items() if size >= _WORTH_SAYING * peak]
        found += ["what would lower it:", *(f"  {name}: {REMEDIES[name]}" for name in large), f"  {_SNAPSHOT}"]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values."""
        rows = [{"category": category, "where": where, "bytes": size} for category, where, size in self.rows]
        return {"categories": self.categories, "rows": rows}


class Origins(Ledger):
    """A ledger that knows who made each storage, and notes what is alive when the live bytes reach ``level``.

    ``steps``: the ``Rehearsal`` whose step it counts.
    """

    def __init__(self, steps: Any, level: int) -> None:
        super().__init__(steps.device, steps.gathers)
        self._steps, self._level = steps, level
        self._alive: list[tuple[int, tuple[str, str, str]]] = []  # bytes and origin
        self._origins: dict[int, tuple[str, str, str]] = {}  # category, path of the block, op
        self._note(PARAMETERS, steps.model.parameters())
        self._note(INPUTS, (*steps.model.buffers(), *tree_leaves(steps.inputs)))

    def _note(self, category: str, tensors: Iterable[Any], path: str = "", op: str = "") -> None:
        parts = (part for one in tensors if isinstance(one, Tensor) for part in tensor_parts(one))
        self._origins.update((part.untyped_storage()._cdata, (category, path, op)) for part in parts)

    def _rise(self, size: int) -> None:
        super()._rise(size)
        if self.live >= self._level and not self._alive:
            self._note(GRADIENTS, (parameter.grad for parameter in self._steps.model.parameters()))
            unseen = GATHERED if self.gathers is not None else OTHERS, "", ""
            self._alive = [(size, self._origins.get(key, unseen)) for key, (_, size) in self.storages.items()]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """See ``Ledger.run``."""
        out = super().run(func, args, kwargs)
        part, path = self._steps.observation.place()
        category = BLOCKS if part == FORWARD else OTHERS if current_graph_task_id() == NO_TASK else BACKWARD
        for piece in (piece for tensor in tensors_of(out) for piece in tensor_parts(tensor)):
            key = piece.untyped_storage()._cdata
            if key not in self.storages or key not in self._origins:
                self._origins[key] = category, path, op_name(func)
        return out

    def explanation(self, planned: Sequence[PlannedRegion], optimizer: int) -> Explanation:
        """Return what was alive under a plan, with the bytes of ``optimizer`` state to come."""
        policy, of_path = policy_of(planned), {one.block.path: one for one in planned}
        sizes: Counter[tuple[str, str, str]] = Counter({(OPTIMIZER, "", ""): optimizer})
        paths: dict[tuple[str, str, str], set[str]] = {}
        for size, (category, path, op) in self._alive:
            rule = of_path[path].rule_of(policy, op) if category == BLOCKS else ""
            row = category, op, f" ({rule})" if rule else ""
            sizes[row] += size
            paths.setdefault(row, set()).update({path} - {""})
        rows = []
        for row, size in (+sizes).most_common():  # without rows of no bytes
            where = f"{row[1]} in {group_label(sorted(paths[row]))}" if paths.get(row) else row[1]
            is_shown = size >= _WORTH_A_ROW * self._level
            rows.append((row[0], where + row[2] if is_shown else "", size))
        return Explanation(tuple(rows))
