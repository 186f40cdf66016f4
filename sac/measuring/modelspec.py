"""A model named on the command line: ``hf:CONFIG.json`` or ``package.module:function``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch
from torch import nn

from sac.errors import ConfigError, Problem, listing, nearest
from sac.measuring.batches import check_batches
from sac.measuring.built_model import BuiltModel, Scale
from sac.measuring.hf_models import build_from_config, build_with_data, class_and_config
from sac.planner.fakes import Build

FORMS = "hf:CONFIG.json (a Hugging Face config file), package.module:function (returns a model and its inputs)"


def load_model(
    spec: str, scale: Scale, *, text_path: str | None = None, seed: int = 0, build: Build | None = None
) -> BuiltModel:
    """Build the model that ``spec`` names, with random weights from ``seed``.

    ``text_path`` is a file whose bytes are the tokens of a language model; without it tokens are random. ``build``
    makes the model of a config file, given what calls its class and a dtype: it may leave out the data. Raises
    ``ConfigError`` when the spec, the file or the function it names cannot be used.
    """
    torch.manual_seed(seed)
    form, _, rest = spec.partition(":")
    if form == "hf" and rest:
        return build_from_config(rest, scale, text_path=text_path, seed=seed, build=build or build_with_data)
    if form and rest and "/" not in spec:
        return _build_by_function(spec, form, rest, scale)
    raise _no_spec(spec)


def check_spec(spec: str, scale: Scale, *, text_path: str | None = None) -> None:
    """Raise ``ConfigError`` if ``spec`` names no model that can be built at this scale; none is built."""
    form, _, rest = spec.partition(":")
    if form == "hf" and rest:
        check_batches(*class_and_config(rest, scale), scale, text_path=text_path)
    elif form and rest and "/" not in spec:
        inspect.signature(_function(spec, form, rest))
    else:
        raise _no_spec(spec)


def _no_spec(spec: str) -> ConfigError:
    hint = f"hf:{spec}" if spec.endswith(".json") else ""
    return ConfigError(Problem("--model", f"'{spec}' is no model spec", FORMS, hint))


def _build_by_function(spec: str, module_name: str, function_name: str, scale: Scale) -> BuiltModel:
    function = _function(spec, module_name, function_name)
    accepted = inspect.signature(function).parameters
    built = function(**{name: value for name, value in asdict(scale).items() if name in accepted and value is not None})
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not isinstance(inputs, (tuple, Mapping)):
        raise ConfigError(
            Problem(
                "--model",
                f"{spec} returned {_shape_of(built)}",
                "(model, inputs), where inputs is a tuple for model(*inputs) or a dict for model(**inputs)",
            )
        )
    return BuiltModel(model.train(), lambda step: inputs, spec)


def _function(spec: str, module_name: str, function_name: str) -> Callable[..., Any]:
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        fix = "run where the module can be imported, or put its folder on PYTHONPATH"
        raise ConfigError(Problem("--model", f"'{spec}': no module named '{error.name}'", fix=fix)) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = f"'{spec}': module '{module_name}' has no function '{function_name}'"
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(Problem("--model", found, listing(functions), nearest(function_name, functions)))
    return function  # type: ignore[no-any-return]


def _shape_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
