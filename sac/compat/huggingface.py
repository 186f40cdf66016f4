"""Hugging Face's training tools, for where ``sac.apply(model, value)`` before the Trainer does not do.

- ``Trainer(model, args, callbacks=[SacCallback("selective")])``: for a model that the Trainer (or TRL) builds or wraps.
- ``Trainer(take_over(model), args)``: for a training config that turns activation checkpointing on with its own keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainerCallback

from sac.blocks.applying import refuse_second
from sac.blocks.install import has_regions, remove
from sac.blocks.other_checkpointing import Switch, disable_guards, enable_guards, refuse_existing_checkpointing
from sac.checkpointing import apply
from sac.config import parse_config
from sac.errors import ConfigError, ModelError, Problem
from sac.reporting import report

__all__ = ["SacCallback", "take_over"]

# Each with the name that transformers 5 deprecates.
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_DISABLE = ("activation_checkpointing_disable", "gradient_checkpointing_disable")


class SacCallback(TrainerCallback):
    """Applies ``sac.apply(model, value)`` to the model of a Trainer, and logs ``sac.report`` after the first step.

    This happens before anything wraps the model: when the Trainer has been built, or, if ``model_init`` makes the
    model, when training begins. The report goes to the logger of this module, at level INFO, on the first process only.

    Raises ``ConfigError`` for the value, and if the Trainer is built with ``activation_checkpointing=True``; also what
    ``sac.apply`` raises.
    """

    def __init__(self, value: Any) -> None:
        parse_config(value)
        self.value, self._told = value, False

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Apply the value."""
        if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
            found = "activation_checkpointing is on in the arguments too: every block would run three times"
            fix = "set activation_checkpointing=False (TRL has it on by default), or use take_over(model) instead"
            raise ConfigError(Problem("SacCallback", found, fix=fix))
        apply(model, self.value)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Apply the value to a model that ``model_init`` has made."""
        self._told = False
        if not has_regions(model):
            apply(model, self.value)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Log the report, once per training."""
        if not self._told and has_regions(model) and state.is_world_process_zero:
            logging.getLogger(__name__).info("%s", report(model))
        self._told = True


def take_over(model: nn.Module, value: Any = "selective") -> nn.Module:
    """Redirect the model's own methods that turn activation checkpointing on and off to sac; return the model.

    A call of ``model.activation_checkpointing_enable(kwargs, every_n_layers, offload)``, by any caller, is then
    ``sac.apply(model, ...)``. Its ``kwargs`` are the config value if they have a ``mode``; otherwise they are added to
    ``value``, for example ``{"use_reentrant": False}``. ``every_n_layers=n`` is ``layers: {every: n}``, and
    ``offload=True`` is ``store: host``, unless ``kwargs`` say otherwise. ``sac.remove(model)`` restores the methods.

    Raises ``ConfigError`` or ``PolicyError`` for the value; ``ModelError`` for a model without such methods, or with
    activation checkpointing already on, its own or ours.
    """
    config = parse_config(value)
    if not isinstance(value, Mapping):
        value = {"mode": config.mode} | ({} if config.policy is None else {"policy": config.policy})
    refuse_second(model)
    refuse_existing_checkpointing(model)
    disable_guards(model)
    if not enable_guards(model, partial(_TakenOver, model=model, value=value), _ENABLE + _DISABLE):
        missing = f"this model has no {_ENABLE[0]}(), so there is nothing to take over"
        raise ModelError(Problem(type(model).__name__, missing, fix="call sac.apply(model, value)"))
    return model


class _TakenOver(Switch):
    def __init__(self, module: nn.Module, name: str, model: nn.Module, value: Mapping[str, Any]) -> None:
        super().__init__(module, name)
        self.model, self.value = model, value

    def __call__(  # PEFT looks for the second of the two names in the signature
        self,
        activation_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Turn activation checkpointing on, replacing what is on; or off, after which it can be turned on again."""
        given: dict[str, Any] = {} if every_n_layers == 1 else {"layers": {"every": every_n_layers}}
        given |= {"store": "host"} if offload else {}
        given |= activation_checkpointing_kwargs or gradient_checkpointing_kwargs or {}
        value = given if "mode" in given else {**self.value, **given}
        parse_config(value)
        if has_regions(self.model):
            remove(self.model)
            take_over(self.model, self.value)
        if self.name in _ENABLE:
            apply(self.model, value)
