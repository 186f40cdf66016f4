"""Activation checkpointing for PyTorch training: per op, from a policy, with bit-identical gradients."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sac import compat as compat
    from sac import full as full
    from sac.blocks.checkpoint_context import context_fn
    from sac.blocks.install import remove
    from sac.checkpointing import apply, checkpoint
    from sac.engine.flags import is_recomputing
    from sac.engine.functions import unit
    from sac.errors import SacError
    from sac.planner.planning import plan
    from sac.policy.load import load_policy
    from sac.reporting import report
    from sac.tools.measuring import compare, trace

# Each name is imported when it is first used, so that `sac --help` does not import torch, and training not the tools.
_HOMES = {
    "SacError": "sac.errors",
    "apply": "sac.checkpointing",
    "checkpoint": "sac.checkpointing",
    "compare": "sac.tools.measuring",
    "context_fn": "sac.blocks.checkpoint_context",
    "is_recomputing": "sac.engine.flags",
    "load_policy": "sac.policy.load",
    "plan": "sac.planner.planning",
    "remove": "sac.blocks.install",
    "report": "sac.reporting",
    "trace": "sac.tools.measuring",
    "unit": "sac.engine.functions",
}

__all__ = [
    "SacError", "apply", "checkpoint", "compare", "context_fn", "is_recomputing", "load_policy", "plan", "remove",
    "report", "trace", "unit",
]  # fmt: skip


if not TYPE_CHECKING:  # else every name, however misspelled, would be one of sac

    def __getattr__(name: str) -> Any:
        """Return a public function, or a module of sac, that has not been used before."""
        if name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
            globals()[name] = found  # later uses do not come here
            return found
        if not name.startswith("_") and find_spec(f"sac.{name}") is not None:
            return import_module(f"sac.{name}")
        raise AttributeError(f"module 'sac' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__")} | {*__all__})
