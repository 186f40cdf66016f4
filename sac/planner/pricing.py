"""The price of a save option: the ops that run again, and the time of the host that checkpointing itself takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sac.engine.settings import REPLAY, RERUN
from sac.planner.choices import Choice
from sac.planner.cost import FREE, OVERHEAD, Overhead, op_class
from sac.planner.devices import Device
from sac.planner.pareto import priced
from sac.planner.profile import Engine, RegionProfile

# Note [The overhead of checkpointing]
#
# Next to the ops that run again, checkpointing takes time of the host: each call of a region, each op that is recorded,
# and each op that Python runs again (beyond its launch, which is in the price of the op). On layers of tiny ops this is
# most of the time. Without it a plan could be slower than saving nothing, for which no op is recorded.
#
# A processor runs an op when it is launched, so there the overhead is added. A GPU runs behind the host: there only the
# overhead counts that is longer than the kernels of the same forward and recomputation.


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices save options as ``engine``, that of the config, carries them out on ``device``."""

    engine: str
    device: Device
    overhead: Overhead = OVERHEAD

    @property
    def run_by(self) -> Engine:
        """The engine whose recomputation is priced: ``auto`` runs replay."""
        return "rerun" if self.engine == RERUN else "replay"

    def choice(self, profile: RegionProfile, times: Sequence[float], saved: Collection[int], label: str) -> Choice:
        """Return the choice of saving the entries ``saved`` in the regions of a group. ``times``: seconds per entry."""
        keep = priced(profile, times, saved, self.run_by)
        flops = sum(profile.entries[number].flops for number in profile.recomputed(saved, self.run_by).entries)
        return Choice(label, keep, keep.bytes, keep.seconds + self.overhead_of(profile, times, saved), flops)

    def overhead_of(self, profile: RegionProfile, times: Sequence[float], saved: Collection[int]) -> float:
        """Return the seconds that one call of a region takes in addition to the ops that run again."""
        chooses = bool(saved) or self.engine == REPLAY  # with auto, Python runs again where nothing is saved
        replays = chooses and self.engine != RERUN
        again = profile.recomputed(saved, "replay" if replays else "rerun").entries
        costs = self.overhead
        host = costs.replayed_call_s if replays else costs.rerun_call_s + costs.rerun_s * len(again)
        if chooses or any(entry.must_save for entry in profile.entries):
            host += costs.record_s * len(profile.entries)
        if self.device.name == "cpu":
            return host
        kernels = [number for number in (*range(len(times)), *again) if op_class(profile.entries[number]) != FREE]
        return max(0.0, host - math.fsum(max(0.0, times[number] - self.device.launch_s) for number in kernels))
