"""Activation checkpointing for PyTorch training: per op, from a policy, with bit-identical gradients."""

from sac.blocks.applying import apply
from sac.blocks.checkpoint_context import context_fn
from sac.blocks.install import remove
from sac.blocks.watching import watch
from sac.checkpointing import checkpoint
from sac.errors import SacError
from sac.planner.planning import plan
from sac.policy.load import load_policy
from sac.reporting import report

__all__ = ["SacError", "apply", "checkpoint", "context_fn", "load_policy", "plan", "remove", "report", "watch"]
