"""Whether a model's own checkpointing is on: two at once would recompute everything twice."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from sac.blocks.paths import class_names, clean_path, walk

FLAGS = ("gradient_checkpointing", "grad_checkpointing")
COMPOSABLE_PREFIX = "__composable_api_state_key"  # private to torch 2.13; see test_composable_checkpoint_is_told


def own_checkpointing(model: nn.Module) -> str:
    """Return what of the model's own checkpointing is on and how it is turned off, or ``""`` when none is.

    Knows Hugging Face's and timm's flags, torch's ``checkpoint_wrapper`` and composable ``checkpoint``, and Megatron's
    ``recompute_granularity``. A call of ``torch.utils.checkpoint`` written into a forward cannot be seen from outside.
    """
    for search in (_flagged, _wrapped, _composed, _configured):
        found = list(search(model))
        if found:
            first, off = found[0]
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"{first}{more} ({off})"
    return ""


def flags_of(module: nn.Module) -> tuple[str, ...]:
    """Return the flags that are on in ``module`` itself."""
    return tuple(flag for flag in FLAGS if getattr(module, flag, False) is True)


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is torch's wrapper that checkpoints the module in it."""
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
            inner = getattr(module, "_checkpoint_wrapped_module", module)
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
    kind = type(module).__name__
    return f"{path} ({kind})" if path else f"the model ({kind})"
