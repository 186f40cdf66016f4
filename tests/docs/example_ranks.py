"""Examples of several processes, on a pool of ranks: `run_ranks(2, hf_trainer_fsdp2, arguments)`."""

from __future__ import annotations

import os
import runpy
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.docs.pages import ROOT


def in_two_parts(name: str, first: list[str], second: list[str]) -> list[float]:
    """Return this rank's losses of both runs."""
    return [*losses_of(name, first), *losses_of(name, second)]


def losses_of(name: str, arguments: list[str]) -> list[float]:
    """Return what the `main` of an example returns."""
    found: list[float] = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](arguments)
    return found


def hf_trainer_fsdp2(first: list[str], second: list[str]) -> list[float]:
    """Return the losses that the Trainer has logged at the end of the second run.

    On a CPU accelerate takes DDP, whatever it is asked for; here its plugin for FSDP2 is put into force.
    """
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    rank = str(dist.get_rank())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size())}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}
    in_force = mock.patch.object(AcceleratorState, "__init__", with_plugin)
    losses: list[float] = []
    for arguments in (first, second):
        with mock.patch.dict(os.environ, environment), in_force:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            try:
                losses = losses_of("hf_trainer", ["--fsdp", *arguments])
            finally:
                AcceleratorState._reset_state(reset_partial_state=True)
                GradientState._reset_state()
    return losses
