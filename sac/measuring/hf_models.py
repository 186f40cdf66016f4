"""Models from a Hugging Face config file, scaled to what is at hand, with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sac.blocks.cache import turn_off_cache
from sac.errors import ConfigError, Problem, SacError, listing, nearest
from sac.extras import import_extra
from sac.measuring.batches import OWN_MODEL, batches_of, check_batches
from sac.measuring.built_model import DTYPES, BuiltModel, Scale
from sac.planner.fakes import Build

# Every name under which a config of transformers counts the layers of a stack.
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "encoder_layers",
               "decoder_layers")  # fmt: skip
_SUB_CONFIGS = ("text_config", "vision_config", "audio_config", "encoder", "decoder")
_TOP = "--model"


def build_with_data(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return the model that ``make`` gives, in ``dtype``."""
    return make().to(dtype)


def build_from_config(
    path: str, scale: Scale, *, text_path: str | None = None, seed: int = 0, build: Build = build_with_data
) -> BuiltModel:
    """Build the model that a config.json describes: its ``architectures`` entry, or a causal language model."""
    made_by, config = class_and_config(path, scale)
    check_batches(made_by, config, scale, text_path=text_path)
    try:
        model = build(partial(made_by, config), DTYPES[scale.dtype]).train()
    except SacError:
        raise
    except Exception as error:
        found = f"{path}: {made_by.__name__} cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(Problem(_TOP, found, fix=OWN_MODEL)) from error
    turn_off_cache(model)  # training does not read it: no mode is to pay for it
    inputs_of_step = batches_of(model, scale, text_path=text_path, seed=seed)
    return BuiltModel(model, inputs_of_step, f"{type(model).__name__} ({Path(path).name})")


def class_and_config(path: str, scale: Scale) -> tuple[Any, Any]:
    """Return the model's class and its config, at this scale; raises ``ConfigError`` where the file makes none."""
    raw = scale_config(_read_config(path), scale)
    transformers = import_extra("transformers", "hf")
    model_type = raw.pop("model_type", None)
    known = transformers.CONFIG_MAPPING
    if model_type not in known:
        found = f"{path}: model_type {model_type!r} is unknown to transformers {transformers.__version__}"
        raise ConfigError(Problem(_TOP, found, "a model_type of transformers", nearest(str(model_type), known.keys())))
    architectures = raw.get("architectures") or []
    try:
        config = transformers.AutoConfig.for_model(model_type, **raw)
    except Exception as error:  # of checks that each config makes in its own way
        found = f"{path}: transformers makes no config of it: {type(error).__name__}: {error}"
        fix = "leave --layers out, or write the sizes into the file" if scale.layers is not None else ""
        raise ConfigError(Problem(_TOP, found, fix=fix)) from error
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # what labels are shifted by
    return _model_class(transformers, architectures, config, path), config


def scale_config(raw: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    """Return ``raw`` with fewer layers and tokens, in every sub-config too; lists with one entry per layer are cut."""
    scaled = {key: value for key, value in raw.items() if key not in ("torch_dtype", "dtype")}
    if scale.layers is not None and isinstance(raw.get("depths"), list):  # one stack per stage
        scaled["depths"] = [scale.layers] * len(raw["depths"])
    elif scale.layers is not None:
        counts = {key: scaled[key] for key in _LAYER_KEYS if isinstance(scaled.get(key), int)}
        for key, value in scaled.items():
            if key in counts:
                scaled[key] = scale.layers
            elif isinstance(value, list) and len(value) in counts.values():
                scaled[key] = value[: scale.layers]
    if scale.vocab is not None and "vocab_size" in scaled:
        scaled["vocab_size"] = scale.vocab
        for key, value in scaled.items():
            if key.endswith("_token_id"):
                scaled[key] = _token_below(value, scale.vocab)
    for key in _SUB_CONFIGS:
        if isinstance(scaled.get(key), Mapping):
            scaled[key] = scale_config(scaled[key], scale)
    return scaled


def _token_below(token: Any, vocab: int) -> Any:
    if isinstance(token, list):
        return [_token_below(each, vocab) for each in token]
    return token if token is None or token < vocab else vocab - 1


def _read_config(path: str) -> dict[str, Any]:
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(Problem(_TOP, f"cannot read {path}: {error.strerror}", "a config.json file")) from error
    except ValueError as error:
        raise ConfigError(Problem(_TOP, f"{path} is not JSON: {error}", "a config.json file")) from error
    if not isinstance(raw, dict):
        raise ConfigError(Problem(_TOP, f"{path} holds a {type(raw).__name__}", "a JSON object with a model_type"))
    return raw


def _model_class(transformers: Any, architectures: list[str], config: Any, path: str) -> Any:
    if not architectures:
        for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
            if type(config) in mapping:
                found = mapping[type(config)]
                return found[0] if isinstance(found, tuple) else found
        problem = f"{path} names no architecture, and transformers has no usual one for {type(config).__name__}"
        raise ConfigError(Problem(_TOP, problem, fix='add "architectures": ["…"] to the file'))
    found = getattr(transformers, architectures[0], None)
    if found is None:
        problem = f"{path}: transformers {transformers.__version__} has no class {architectures[0]!r}"
        legal = [name for name in dir(transformers) if name.startswith(type(config).__name__.removesuffix("Config"))]
        raise ConfigError(Problem(_TOP, problem, listing(legal), nearest(architectures[0], legal)))
    return found
