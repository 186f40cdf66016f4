"""Detect and refuse the model's own checkpointing (flags of libraries, wrappers) in addition to sac."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, MethodType
from typing import Any

from torch import nn

from sac.blocks.paths import class_names, clean_path, walk
from sac.errors import ModelError, Problem, RegionError
from sac.torch_private import COMPOSABLE_PREFIX, WRAPPED_MODULE

# -- Detection of a model's own checkpointing: two at once would recompute everything twice

FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def existing_checkpointing(model: nn.Module) -> str:
    """Return which of the model's own checkpointing is on and how to turn it off, or ``""`` if none is on.

    Detects Hugging Face's and timm's flags, torch's ``checkpoint_wrapper`` and composable ``checkpoint``, and
    Megatron's ``recompute_granularity``. A call of ``torch.utils.checkpoint`` inside a forward cannot be detected from
    outside.
    """
    for search in (_flagged, _wrapped, _composed, _configured):
        found = list(search(model))
        if found:
            first, off = found[0]
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{first}{more} ({off})"
    return ""


def flags_of(module: nn.Module) -> tuple[str, ...]:
    """Return the checkpointing flags that are on in ``module`` itself."""
    return tuple(flag for flag in FLAGS if getattr(module, flag, False) is True)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is torch's wrapper that checkpoints the wrapped module."""
    return "CheckpointWrapper" in class_names(module)


def _flagged(model: nn.Module) -> Iterator[tuple[str, str]]:
    for node in walk(model):
        for flag in flags_of(node.module):
            yield f"{flag} is on in {_named(node.path, node.module)}", _flag_off(model, flag)


def _flag_off(model: nn.Module, flag: str) -> str:
    for method in (
        "activation_checkpointing_disable",
        "gradient_checkpointing_disable",
        "disable_gradient_checkpointing",
    ):
        if any(hasattr(node.module, method) for node in walk(model)):
            return f"turn it off with model.{method}()"
    return (
        "turn it off with model.set_grad_checkpointing(False)" if flag == "grad_checkpointing" else f"set {flag}=False"
    )


def _wrapped(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if is_checkpoint_wrapper(module):
            inner = getattr(module, WRAPPED_MODULE, module)
            path = clean_path(name, model)
            yield f"checkpoint_wrapper is around {_named(path, inner)}", "build the model without it"


def _composed(model: nn.Module) -> Iterator[tuple[str, str]]:
    for node in walk(model):
        states = [value for key, value in vars(node.module).items() if key.startswith(COMPOSABLE_PREFIX)]
        if any("checkpoint" in state for state in states):
            yield (
                f"torch's composable checkpoint() is on {_named(node.path, node.module)}",
                "build the model without it",
            )


def _configured(model: nn.Module) -> Iterator[tuple[str, str]]:
    for node in walk(model):
        granularity = getattr(getattr(node.module, "config", None), "recompute_granularity", None)
        if isinstance(granularity, str):
            found = f"recompute_granularity={granularity!r} is in the config of {_named(node.path, node.module)}"
            yield found, "set it to None"
            return


def _named(path: str, module: nn.Module) -> str:
    cls = type(module).__name__
    return f"{path} ({cls})" if path else f"the model ({cls})"


# -- Guards on a model's own switches for activation checkpointing: they raise while sac is on the model

# Note [Both on]
#
# Two kinds of checkpointing at once would run every block three times. `sac.apply` refuses checkpointing that is
# already on. Checkpointing that is turned on later is refused as soon as it is seen:
#  - A method that turns it on (called by a trainer, an adapter library or the user) raises itself: a guard replaces the
#    method on the instance until `sac.remove`.
#  - A flag that is set by hand, on a block or on its caller, and a ``checkpoint_wrapper`` around a block are refused by
#    the region when it runs. The region checks its block's flags in each call, and its callers on the stack in the
#    first call.

ENABLING = (  # Hugging Face's, its deprecated name, diffusers', timm's
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
    "set_grad_checkpointing",
)
TWICE = "two at once would run every block three times"


class Switch:
    """Replaces a method of a module, on the instance, until it is removed.

    It works after pickling and ``deepcopy``: it refers to its module as an attribute, which both of them follow.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.before = module.__dict__.get(name)

    @property
    def original(self) -> Any:
        """The method that the module would have without sac."""
        return self.before if self.before is not None else getattr(type(self.module), self.name).__get__(self.module)

    def put_on(self) -> None:
        """Replace the method on the module."""
        self.module.__dict__[self.name] = MethodType(type(self).__call__, self)

    def take_off(self) -> None:
        """Restore the previous method of the module."""
        if self.before is not None:
            self.module.__dict__[self.name] = self.before
        else:
            del self.module.__dict__[self.name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to turn on the model's own checkpointing; ``set_grad_checkpointing(False)`` is passed through."""
        if args[:1] == (False,) or kwargs.get("enable") is False:
            return self.original(*args, **kwargs)
        raise ModelError(
            Problem(
                type(self.module).__name__,
                f"{self.name} was called, and sac.apply has been called on this model before: {TWICE}",
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


def enable_guards(model: nn.Module) -> None:
    """Guard each switch of the model and of the models in it; existing guards stay."""
    for module in model.modules():
        covered = {switch.name for switch in guarded_switches(module)}
        for name in ENABLING:
            if name not in covered and callable(getattr(type(module), name, None)):
                Switch(module, name).put_on()


def disable_guards(model: nn.Module) -> None:
    """Undo ``enable_guards``."""
    for module in model.modules():
        for switch in list(guarded_switches(module)):
            switch.take_off()


def refuse_flags(module: nn.Module, path: str) -> None:
    """Raise ``RegionError`` if a flag has been set on the block itself."""
    held = module.__dict__  # a flag that is on is here, since it is off on the class; checked in every call
    for flag in FLAGS:
        if held.get(flag) is True:
            raise RegionError(_both(path, f"{flag} is on in this block"))


def refuse_callers(module: nn.Module, path: str) -> None:
    """Raise ``RegionError`` if a caller of the block ``module`` on this thread checkpoints it.

    Checks the callers up to the model that sac was applied to; ``path`` is the path of the block in that model.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = _self_in(frame) if frame.f_code.co_name == "forward" else None
        if isinstance(caller, nn.Module):
            cls = type(caller).__name__
            if is_checkpoint_wrapper(caller):
                raise RegionError(_both(path, f"a checkpoint_wrapper ({cls}) has been put around this block"))
            for flag in flags_of(caller):
                raise RegionError(_both(path, f"{flag} is on in {cls}, which calls this block"))
            if _is_at(caller, path, module):
                return
        frame = frame.f_back


def _self_in(frame: FrameType) -> object:
    held, names = frame.f_locals, frame.f_code.co_varnames
    found = held.get(names[0]) if frame.f_code.co_argcount else None
    if isinstance(held, dict):  # before Python 3.13 this is a copy; the frame would keep it and its contents alive
        held.clear()
    return found


def _is_at(model: nn.Module, path: str, module: nn.Module) -> bool:
    try:
        return model.get_submodule(path) is module
    except AttributeError:
        return False


def _both(path: str, found: str) -> Problem:
    return Problem(
        path or "region",
        f"{found}, and sac.apply has been called on this model: {TWICE}",
        fix="leave the model's own checkpointing off (with Accelerate: activation_checkpointing of the FSDP plugin)",
    )
