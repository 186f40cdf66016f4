"""Detect and refuse the model's own checkpointing (flags of libraries, wrappers) in addition to sac."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from sac.blocks.paths import class_names, parts_of
from sac.errors import ModelError, Problem
from sac.torch_private import COMPOSABLE_PREFIX

# Note [Both on]
#
# Two kinds of checkpointing at once would run every block three times. `sac.apply` refuses checkpointing that is
# already on. A method that turns it on later (called by a trainer, an adapter library or the user) raises: a guard
# replaces the method on the instance until `sac.remove`. A flag that is set by hand, and a ``checkpoint_wrapper``
# around a block, are refused when a region first runs.

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")  # Hugging Face's and diffusers', timm's
_SWITCHES = {  # methods that turn checkpointing on, and how it is turned off
    "activation_checkpointing_enable": "activation_checkpointing_disable()",  # of Hugging Face
    "gradient_checkpointing_enable": "gradient_checkpointing_disable()",  # its older name
    "enable_gradient_checkpointing": "disable_gradient_checkpointing()",  # of diffusers
    "set_grad_checkpointing": "set_grad_checkpointing(False)",  # of timm
}
_TWICE = "two at once would run every block three times"


def refuse_existing_checkpointing(model: nn.Module) -> None:
    """Raise ``ModelError`` if the model's own checkpointing is on.

    Detects Hugging Face's and timm's flags, torch's ``checkpoint_wrapper`` and composable ``checkpoint``, and
    Megatron's ``recompute_granularity``. A call of ``torch.utils.checkpoint`` inside a forward cannot be detected from
    outside.
    """
    for path, module in parts_of(model):
        if what := _checkpointing_of(module):
            found = f"the model's own checkpointing is on: {what} at {path or 'the model'}"
            off = next((f" with model.{off}" for on, off in _SWITCHES.items() if hasattr(model, on)), "")
            fix = f"turn it off{off}, or build the model without it, then call sac.apply; {_TWICE}"
            raise ModelError(Problem(type(model).__name__, found, fix=fix))


def _checkpointing_of(module: nn.Module) -> str:
    for flag in _FLAGS:
        if getattr(module, flag, False) is True:
            return flag
    if "CheckpointWrapper" in class_names(module):
        return "checkpoint_wrapper"
    states = [state for name, state in vars(module).items() if name.startswith(COMPOSABLE_PREFIX)]
    if any("checkpoint" in state for state in states):
        return "torch's composable checkpoint()"
    granularity = getattr(getattr(module, "config", None), "recompute_granularity", None)
    return f"recompute_granularity={granularity!r}" if isinstance(granularity, str) else ""


class Switch:
    """Replaces a method of a module, on the instance, until it is removed.

    It works after pickling and ``deepcopy``: it refers to its module as an attribute, which both of them follow.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name, self.before = module, name, module.__dict__.get(name)
        module.__dict__[name] = MethodType(type(self).__call__, self)

    def take_off(self) -> None:
        """Restore the previous method of the module."""
        if self.before is not None:
            self.module.__dict__[self.name] = self.before
        else:
            del self.module.__dict__[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to turn on the model's own checkpointing; ``set_grad_checkpointing(False)`` has nothing to do."""
        if args[:1] == (False,) or kwargs.get("enable") is False:
            return
        raise ModelError(
            Problem(
                type(self.module).__name__,
                f"{self.name} was called, and sac.apply has been called on this model before: {_TWICE}",
                fix="leave the model's own checkpointing off: activation_checkpointing=False and "
                "gradient_checkpointing=False for a Trainer (TRL has it on by default), "
                "use_gradient_checkpointing=False for PEFT; or call sac.remove(model) first",
            )
        )


def guarded_switches(module: nn.Module) -> Iterator[Switch]:
    """Yield the guards that sac has installed on the switches of ``module`` itself."""
    for value in list(module.__dict__.values()):
        owner = getattr(value, "__self__", None) if isinstance(value, MethodType) else None
        if isinstance(owner, Switch):
            yield owner


def enable_guards(
    model: nn.Module, make: Callable[[nn.Module, str], Switch] = Switch, names: Iterable[str] = tuple(_SWITCHES)
) -> list[Switch]:
    """Guard each switch of the model and of the models in it; existing guards stay. Return the new ones."""
    return [
        make(module, name)
        for module in model.modules()
        for name in {*names} - {switch.name for switch in guarded_switches(module)}
        if callable(getattr(type(module), name, None))
    ]


def disable_guards(model: nn.Module) -> None:
    """Undo ``enable_guards``."""
    for module in model.modules():
        for switch in list(guarded_switches(module)):
            switch.take_off()
