"""`sac.watch`: explain out-of-memory errors of a model without checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sac.blocks.applying import NONE, groups_of, refuse_second
from sac.blocks.find import drop_frozen, find_blocks
from sac.blocks.install import Applied, RegionForward, UnmatchedRules, install
from sac.blocks.out_of_memory import EVERYTHING, WATCH
from sac.config import family_names, usable_policy
from sac.errors import ConfigError, Problem
from sac.region.settings import Settings


class WatchedForward(RegionForward):
    """Runs its module as without sac, except that its first call is recorded, and explains out-of-memory errors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        return self._explained(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.region.stats.calls else super()._call(*args, **kwargs)


def watch(model: nn.Module) -> nn.Module:
    """Watch the steps of ``model``, which stays without checkpointing, and return the model.

    When a step runs out of memory, the error says where, what each block keeps, what other modes would free at what
    predicted cost, and how to plan. `sac.apply` does the same for the modes that it applies. The first call of each
    block is recorded: until it ends, the block holds all its results. Later calls run as without sac.
    ``sac.remove(model)`` ends it; afterwards `sac.apply` can be called.

    Raises ``ConfigError`` if ``model`` is not a module, and ``ModelError`` if sac is on it already, or if no blocks are
    found.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("sac.watch", f"model is a {type(model).__name__}", expected="a torch.nn.Module"))
    refuse_second(model)
    blocks, _ = drop_frozen(find_blocks(model), model)
    applied = Applied(
        NONE, (), UnmatchedRules((), (), strict=False), settings=Settings(watch=WATCH), family=family_names(model)
    )
    install(groups_of(usable_policy(EVERYTHING), blocks, NONE), applied, WatchedForward)
    return model
