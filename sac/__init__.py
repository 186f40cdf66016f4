"""Activation checkpointing for PyTorch training: per op, from a policy, with bit-identical gradients."""

from sac.blocks.attach import apply
from sac.blocks.context import context_fn
from sac.blocks.wrap import remove
from sac.errors import SacError
from sac.full.checkpoint import checkpoint
from sac.planner.planning import plan
from sac.policy.files import load_policy
from sac.reporting import report

__all__ = ["SacError", "apply", "checkpoint", "context_fn", "load_policy", "plan", "remove", "report"]
