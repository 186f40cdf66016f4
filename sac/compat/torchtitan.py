"""torchtitan: a policy for its ``activation_checkpoint`` field that calls ``sac.apply``.

In a job's config registry: ``Trainer.Config(activation_checkpoint=SacAC.Config(value="selective"), ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing  # type: ignore[import-untyped]

from sac.checkpointing import apply

__all__ = ["SacAC"]


class SacAC(ActivationCheckpointing):  # type: ignore[misc]
    """Applies a config value of ``sac.apply`` to each part of the model in a process.

    torchtitan's own keys ``preserve_rng_state``, ``determinism_check`` and ``debug`` are not read; ``value`` may be a
    mapping with sac's keys of these names. A pipeline part without layers is left as it is, with a warning.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """``value``: a mode, the name of a shipped policy, the path of a policy file, or a mapping."""

        value: str = "selective"

    def apply(self, model: nn.Module) -> None:
        """Apply the value to the blocks of ``model``, in place. Raises what ``sac.apply`` raises."""
        apply(model, self.config.value)
