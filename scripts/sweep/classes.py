"""Which model classes of the installed transformers belong to a configuration class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

# Whole models with a head come first: what people train. Then the bare model, then whatever else takes this config.
ORDER = (
    "ForConditionalGeneration",
    "ForCausalLM",
    "LMHeadModel",
    "ForPreTraining",
    "ForMaskedLM",
    "ForImageClassification",
    "ForSequenceClassification",
    "ForCTC",
    "ForObjectDetection",
    "ForUniversalSegmentation",
    "ForSemanticSegmentation",
    "ForDepthEstimation",
    "ForPrediction",
    "Model",
)


def model_classes(config_class: type) -> list[Any]:
    """Return the classes that are built from ``config_class``, the most usual first; empty if there is none."""
    import transformers

    found: dict[str, Any] = {}
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("modeling_"):
            continue
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        for name, kind in vars(loaded).items():
            if (
                inspect.isclass(kind)
                and issubclass(kind, transformers.PreTrainedModel)
                and kind.config_class is config_class
                and _has_forward(kind)
            ):
                found[name] = kind
    return sorted(found.values(), key=_place)


def _has_forward(kind: type) -> bool:
    """Whether the class itself can be called; the root class of a family cannot."""
    return any("forward" in vars(base) for base in kind.__mro__ if base.__module__.startswith("transformers.models."))


def _place(kind: type) -> tuple[int, int]:
    for place, ending in enumerate(ORDER):
        if kind.__name__.endswith(ending):
            return place, len(kind.__name__)
    return len(ORDER), len(kind.__name__)
