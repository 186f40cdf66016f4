"""The inputs of each training step for a Hugging Face model: bytes of a text, or numbers from a seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import ConfigError, Problem
from sac.measuring.built_model import DTYPES, Scale


def batches_of(
    model: nn.Module, scale: Scale, *, text_path: str | None, seed: int
) -> Callable[[int], Mapping[str, Tensor]]:
    """Return a function from step to the keyword inputs of ``model``, labels among them where it takes any."""
    main_input: str = getattr(model, "main_input_name", "input_ids")
    if main_input == "input_ids":
        tokens_of_step = _text_tokens(model, scale, text_path) if text_path else _random_tokens(model, scale, seed)
        return lambda step: _with_labels(model, "input_ids", tokens_of_step(step), seed + step)
    if main_input == "pixel_values":
        return lambda step: _with_labels(model, "pixel_values", _pixels(model, scale, seed + step), seed + step)
    raise ConfigError(
        Problem(
            "--model",
            f"no batch can be made up for {type(model).__name__}, which reads '{main_input}'",
            "models that read input_ids or pixel_values",
            fix="write a function that returns (model, inputs) and name it as package.module:function",
        )
    )


def _random_tokens(model: nn.Module, scale: Scale, seed: int) -> Callable[[int], Tensor]:
    vocab = _vocab(model)
    return lambda step: torch.randint(0, vocab, (scale.batch, scale.seq), generator=_generator(seed + step))


def _text_tokens(model: nn.Module, scale: Scale, text_path: str) -> Callable[[int], Tensor]:
    if _vocab(model) < 256:
        raise ConfigError(Problem("--vocab", f"{_vocab(model)} tokens cannot hold the bytes of a text", "256 or more"))
    try:
        text = Path(text_path).read_bytes()
    except OSError as error:
        raise ConfigError(Problem("--text", f"cannot read {text_path}: {error.strerror}", "a text file")) from error
    if len(text) < scale.seq:
        found = f"{text_path} has {len(text)} bytes, fewer than one row of {scale.seq} tokens"
        raise ConfigError(Problem("--text", found, fix="a longer text or a smaller --seq"))
    tokens = torch.tensor(list(text), dtype=torch.long)
    rows = tokens[: len(tokens) // scale.seq * scale.seq].view(-1, scale.seq)
    return lambda step: rows[torch.arange(step * scale.batch, (step + 1) * scale.batch) % len(rows)]


def _pixels(model: nn.Module, scale: Scale, seed: int) -> Tensor:
    config: Any = model.config
    config = getattr(config, "vision_config", config)
    size = config.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    pixels = torch.randn(scale.batch, config.num_channels, height, width, generator=_generator(seed))
    return pixels.to(DTYPES[scale.dtype])


def _with_labels(model: nn.Module, name: str, main: Tensor, seed: int) -> Mapping[str, Tensor]:
    if "labels" not in inspect.signature(model.forward).parameters:
        return {name: main}
    kind = type(model).__name__
    if "Classification" in kind:
        classes: int = model.config.num_labels  # type: ignore[union-attr, assignment]
        shape = tuple(main.shape[:2]) if "Token" in kind else (len(main),)
        return {name: main, "labels": torch.randint(0, classes, shape, generator=_generator(seed))}
    if name == "input_ids":
        return {name: main, "labels": main}
    return {name: main}


def _vocab(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.get_text_config().vocab_size)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
