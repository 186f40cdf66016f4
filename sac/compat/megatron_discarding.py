"""Megatron-Core's ``CheckpointWithoutOutput``: regions whose outputs are let go of until backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sac.compat.fp8 import fp8_problem
from sac.compat.megatron_job import get_cuda_rng_tracker
from sac.errors import ConfigError, Problem, RegionError
from sac.full.discarding import Discardable, discard, run_discardable
from sac.full.full_config import DEFAULT_CONFIG, CallOptions, settings_of
from sac.selective.compiled import run_in_eager

_DISCARDING = "megatron.CheckpointWithoutOutput"


class CheckpointWithoutOutput:
    """One region whose output is let go of once its consumers have run, and computed again in backward.

    ``ckpt_manager``: discards the outputs of several, all at once. ``retain_input_tensors`` is always as if true:
    an output that lies in the memory of an input is never let go of.

    What is different from Megatron, on purpose: no storage is resized. The output's memory goes when the caller's own
    references go; consumers that do not lead to the hook tensor keep what they saved; a wrong hook tensor warns, and
    gradients are right.

    Raises ``ConfigError`` for ``fp8`` other than False and None.
    """

    def __init__(
        self,
        fp8: Any = False,
        ckpt_manager: CheckpointWithoutOutputManager | None = None,
        retain_input_tensors: bool = False,
    ) -> None:
        del retain_input_tensors
        if fp8 is not None and fp8 is not False:
            found = f"{fp8!r} is not supported: FP8 state is not put back for recomputation"
            raise ConfigError(
                Problem(f"{_DISCARDING}.fp8", found, "false", fix="leave this region out of output discarding")
            )
        self._manager = ckpt_manager
        self._discardable: Discardable | None = None
        self.has_run = False

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Run ``run_function(*args)`` as a region; return its result. In a compiled function it runs in eager."""
        if torch.compiler.is_compiling():  # the graph that discarding walks is not a compiled one
            return run_in_eager(self.checkpoint, run_function, *args)
        problems = fp8_problem(_DISCARDING) if torch.is_grad_enabled() else []
        if problems:
            raise ConfigError(problems)
        settings = settings_of(DEFAULT_CONFIG, CallOptions(get_rng_state_tracker=get_cuda_rng_tracker), _DISCARDING)
        output, self._discardable = run_discardable(settings, run_function, args)
        self.has_run = True
        if self._manager is not None:
            self._manager.add_checkpoint(self)
        return output

    def discard_output_and_register_recompute(self, hook_tensor: Any) -> None:
        """Let go of the output in what was saved between the region and ``hook_tensor``, a tensor computed from it.

        With a manager this does nothing. Warns if ``hook_tensor`` does not depend on the output, or if the output was
        changed in place: it is kept then. Raises ``RegionError`` if nothing was checkpointed.
        """
        if torch.compiler.is_compiling():
            run_in_eager(self.discard_output_and_register_recompute, hook_tensor)
            return
        if not self.has_run:
            fix = "call checkpoint(run_function, *args) first"
            where = f"{_DISCARDING}.discard_output_and_register_recompute"
            raise RegionError(Problem(where, "there is no output to discard", fix=fix))
        if self._manager is None:
            _discard_outputs([self], hook_tensor)

    def take_discardable(self) -> Discardable | None:
        """Return the way to discard the output, once; None if there is nothing to discard."""
        taken, self._discardable = self._discardable, None
        return taken


class CheckpointWithoutOutputManager:
    """Discards the outputs of several regions at once, also where each is the input of the next."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []

    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Take a region in that has run; raises ``ConfigError`` for anything else."""
        where = "megatron.CheckpointWithoutOutputManager.add_checkpoint"
        if not isinstance(ckpt, CheckpointWithoutOutput):
            found = f"a {type(ckpt).__name__} is no CheckpointWithoutOutput"
            raise ConfigError(Problem(where, found, expected="a CheckpointWithoutOutput that has run"))
        if not ckpt.has_run:
            raise ConfigError(Problem(where, "it has not run", fix="call its checkpoint(run_function, *args) first"))
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Any) -> None:
        """Let go of all outputs in what was saved between the regions and ``hook_tensor``; warns as for one region."""
        _discard_outputs(self.checkpoints, hook_tensor)


MHCBlockRecomputeManager = BlockLevelCheckpointManager = CheckpointWithoutOutputManager


def _discard_outputs(checkpoints: Sequence[CheckpointWithoutOutput], hook_tensor: Any) -> None:
    found = [discardable for ckpt in checkpoints if (discardable := ckpt.take_discardable()) is not None]
    discard(found, *(leaf for leaf in tree_leaves(hook_tensor) if isinstance(leaf, torch.Tensor)))
