"""A tiny model of a family, with inputs for which its forward has a gradient."""

from __future__ import annotations

import copy
import inspect
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.kv_cache import turn_off_cache

from .classes import model_classes
from .hint import Hint
from .hints import HINTS
from .inputs import CannotMakeInputs, Wanted, learn, make_inputs
from .shrinking import SIZES, Size, small_config

MOST_PARAMETERS = 130_000_000
MOST_CLASSES = 3
REPAIRS = 8
VARIANTS = (Wanted(), Wanted(labels=False), Wanted(modalities=False), Wanted(modalities=False, labels=False))


class CannotBuild(Exception):
    """No size of no class of the family could be built and run."""


class NotTrainable(Exception):
    """The model runs, and has no gradient, or not the same in every run."""


@dataclass(frozen=True)
class Built:
    """A model in training mode and its inputs."""

    model: nn.Module
    inputs: dict[str, Any]
    size: str


def build(family: str, deadline: float) -> Built:
    """Return the first model of ``family`` that builds, runs and has gradients.

    Raises ``CannotBuild`` or ``NotTrainable``, each with the reason.
    """
    import transformers

    hint = HINTS.get(family, Hint())
    kind = transformers.CONFIG_MAPPING[family]
    try:
        classes = model_classes(kind)
    except ImportError as error:
        raise CannotBuild(one_line(error)) from error
    if not classes:
        raise NotTrainable("no model class of its own: a part of a larger model's configuration")
    classes = [c for c in classes if c.__name__ == hint.model] if hint.model else classes[:MOST_CLASSES]
    attempts: list[str] = []
    without_gradient = ""
    hopeless: set[Any] = set()  # classes for which another size would not help
    for size in [size for size in SIZES if not hint.size or size.name == hint.size]:
        try:
            config = hint.config(size) if hint.config else small_config(kind, size, hint.changes)
        except Exception as error:
            attempts.append(f"{size.name}: {one_line(error)}")
            continue
        for model_class in [c for c in classes if c not in hopeless]:
            try:
                return _first_that_runs(model_class, config, size, hint, deadline)
            except (CannotMakeInputs, ImportError) as error:
                attempts.append(f"{size.name}, {model_class.__name__}: {one_line(error)}")
                hopeless.add(model_class)
            except NotTrainable as error:
                without_gradient = without_gradient or str(error)
            except Exception as error:
                attempts.append(f"{size.name}, {model_class.__name__}: {one_line(error)}")
            if time.process_time() > deadline:
                break
    if without_gradient:
        raise NotTrainable(without_gradient)
    raise CannotBuild("\n".join(attempts))


def _first_that_runs(model_class: Any, config: Any, size: Size, hint: Hint, deadline: float) -> Built:
    if "@torch.inference_mode" in inspect.getsource(model_class.forward):
        raise NotTrainable(f"the forward of {model_class.__name__} runs in inference mode")
    count = _count_parameters(model_class, config)
    if count > MOST_PARAMETERS:
        raise CannotBuild(f"{count / 1e6:.0f} M parameters")
    model = _fresh(model_class, config)
    first: Exception | None = None
    for inputs in _attempts(model, hint):
        if isinstance(inputs, Exception):
            first = first or inputs
            continue
        if time.process_time() > deadline:
            break
        reset_seeds()
        loss = loss_of(model(**inputs))
        if loss is None or not loss.requires_grad:
            raise NotTrainable(f"the output of {model_class.__name__} has no gradient")
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not any(bool((g != 0).any()) for g in grads):
            raise NotTrainable(f"every gradient of {model_class.__name__} is zero")
        return Built(_fresh(model_class, config), inputs, size.name)
    raise first or CannotBuild("out of time")


def _fresh(model_class: Any, config: Any) -> nn.Module:
    """A model that has not run yet: some keep state from one forward for the next."""
    reset_seeds()
    model: nn.Module = model_class(copy.deepcopy(config)).train().float()
    turn_off_cache(model)
    return model


def _attempts(model: nn.Module, hint: Hint) -> Iterator[dict[str, Any] | Exception]:
    """Yield inputs that a forward takes, or why one does not."""
    tried: set[str] = set()
    for variant in VARIANTS:
        wanted = replace(variant, tokens=dict(hint.tokens), added=hint.added, image=hint.image)
        told: Exception | None = None
        for _ in range(REPAIRS):
            try:
                inputs = hint.inputs(model) if hint.inputs else make_inputs(model, wanted)
                if (shapes := described(inputs)) in tried:
                    wanted.layout += 1
                    continue
                tried.add(shapes)
                reset_seeds()
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:
                told = error if told is None or wanted.layout == 0 else told
                if isinstance(error, CannotMakeInputs) or hint.inputs or not learn(str(error), wanted):
                    break
                continue
            yield inputs
            return
        if told is not None:
            yield told


def described(inputs: dict[str, Any]) -> str:
    """Return the names and shapes of inputs, to know whether the like was tried before."""
    return ", ".join(f"{name} {list(getattr(value, 'shape', ()))}" for name, value in inputs.items())


def _count_parameters(model_class: Any, config: Any) -> int:
    """0 where a model cannot be laid out without memory; then its real size decides."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    except Exception:
        return 0


def loss_of(output: Any) -> Tensor | None:
    """Return a sum over every floating-point number in ``output``, each with a weight of its own."""
    total: Tensor | None = None
    for tensor in _tensors(output):
        if not tensor.is_floating_point() or not tensor.requires_grad:
            continue
        finite = torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor)).float()
        weights = torch.cos(torch.arange(finite.numel(), dtype=torch.float32)).view(finite.shape)
        term = (finite * weights).sum() / max(finite.numel(), 1) ** 0.5
        total = term if total is None else total + term
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        yield from _tensors(vars(value))


def reset_seeds() -> None:
    """Every generator that a forward may draw from starts again."""
    random.seed(0)
    torch.manual_seed(0)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(0)


def one_line(error: BaseException) -> str:
    """Return the kind of an exception and the end of its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = lines[-1 if "Validation" in type(error).__name__ else 0] if lines else ""
    return f"{type(error).__name__}: {told}"


__all__ = ["Built", "CannotBuild", "CannotMakeInputs", "NotTrainable", "build", "loss_of", "one_line", "reset_seeds"]
