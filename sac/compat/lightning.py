"""Lightning: ``Trainer(callbacks=[SacCallback("selective")])``, for a module that cannot call ``sac.apply`` itself.

If you own the module, ``sac.apply(self, value)`` at the end of its ``configure_model`` is enough.
"""

from __future__ import annotations

import logging
from typing import Any

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError:  # the old name of the package
    from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]
    from pytorch_lightning.utilities.model_helpers import is_overridden

from sac.blocks.install import has_regions
from sac.checkpointing import apply
from sac.config import parse_config
from sac.config_keys import CONFIG_KEYS, read_keys
from sac.reporting import report

__all__ = ["SacCallback"]


class SacCallback(Callback):
    """Applies ``sac.apply(module, value)`` to the module that a Trainer fits, and logs ``sac.report`` after one batch.

    This happens before the strategy wraps the module and before optimizers are made. If the module has a
    ``configure_model``, which builds or shards it later, it happens right after the strategy has set it up. The regions
    stay after ``fit``, and a second ``fit`` finds them. The report goes to the logger of this module, at level INFO, on
    the first process only. With ``log_every=n``, the figures of the report (bytes) also go to the Trainer's loggers
    after every n-th batch, as ``sac/kept_bytes``, ``sac/input_bytes`` and ``sac/saved_bytes/RULE``.

    Raises ``ConfigError`` for the value and ``log_every`` on construction, and in ``fit`` what ``sac.apply`` raises.
    """

    def __init__(self, value: Any, *, log_every: int | None = None) -> None:
        parse_config(value)
        read_keys({"log_every": log_every}, "SacCallback", {"log_every": CONFIG_KEYS["num_checkpoints"]})
        self.value, self.log_every = value, log_every
        self._is_put_on = self._told = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Apply the value to a module that is complete."""
        if stage == "fit" and not is_overridden("configure_model", pl_module):
            self.on_fit_start(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply the value to a module that ``configure_model`` has completed."""
        if not self._is_put_on or not has_regions(pl_module):
            apply(pl_module, self.value)
        self._is_put_on, self._told = True, False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the report, once per fit, and its figures if they are due."""
        is_due = self.log_every is not None and (batch_idx + 1) % self.log_every == 0
        if trainer.is_global_zero and (is_due or not self._told) and has_regions(pl_module):
            found = report(pl_module)
            if not self._told:
                logging.getLogger(__name__).info("%s", found)
            for logger in trainer.loggers if is_due else ():
                logger.log_metrics(found.scalars(), step=trainer.global_step)
        self._told = True
