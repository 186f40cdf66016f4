"""The inputs of each training step for a Hugging Face model: bytes of a text, or numbers from a seed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import ConfigError, Problem, listing
from sac.measuring.built_model import DTYPES, Scale

OWN_MODEL = "write a function that returns (model, inputs) and name it as package.module:function"


def batches_of(
    model: nn.Module, scale: Scale, *, text_path: str | None, seed: int
) -> Callable[[int], Mapping[str, Tensor]]:
    """Return a function from step to the keyword inputs of ``model``, labels among them where it takes any."""
    name = _main_input(type(model))
    if name == "input_ids":
        tokens_of_step = _text_tokens(text_path, scale) if text_path else _random_tokens(model, scale, seed)
        return lambda step: {
            **_with_labels(model, "input_ids", tokens_of_step(step), seed + step),
            **_pictures_too(model, scale, seed + step),
        }
    make = _VALUES[name]
    return lambda step: _with_labels(model, name, make(model.config, scale, seed + step), seed + step)


def check_batches(model_class: Any, config: Any, scale: Scale, *, text_path: str | None) -> None:
    """Raise ``ConfigError`` if no batches can be made up for models of this class and config."""
    name = _main_input(model_class)
    if name != "input_ids" and name not in _VALUES:
        raise ConfigError(
            Problem(
                "--model",
                f"no batch can be made up for {model_class.__name__}, which reads '{name}'",
                f"models that read {listing(['input_ids', *_VALUES])}",
                fix=OWN_MODEL,
            )
        )
    if name == "input_ids" and not isinstance(_vocab(config), int):
        found = f"no batch can be made up for {model_class.__name__}: its config does not say how many tokens there are"
        raise ConfigError(Problem("--model", found, "a config with vocab_size", fix=OWN_MODEL))
    if text_path is None:
        return
    if name != "input_ids":
        raise ConfigError(Problem("--text", f"{model_class.__name__} reads '{name}', not tokens", fix="leave it out"))
    if _vocab(config) < 256:
        raise ConfigError(Problem("--vocab", f"{_vocab(config)} tokens cannot hold the bytes of a text", "256 or more"))
    read_text(text_path, scale)


def _main_input(model_class: Any) -> str:
    """Return the name of what a model mostly reads; of two towers side by side, that of the text tower."""
    accepted = inspect.signature(model_class.forward).parameters
    name = str(getattr(model_class, "main_input_name", "input_ids"))
    return "input_ids" if "input_ids" in accepted and "return_loss" in accepted else name


def _random_tokens(model: nn.Module, scale: Scale, seed: int) -> Callable[[int], Tensor]:
    vocab = _vocab(model.config)
    return lambda step: torch.randint(0, vocab, (scale.batch, scale.seq), generator=_generator(seed + step))


def read_text(path: str, scale: Scale) -> bytes:
    """Return the bytes of a text; raises ``ConfigError`` if it cannot be read or is shorter than one row."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(Problem("--text", f"cannot read {path}: {error.strerror}", "a text file")) from error
    if len(text) < scale.seq:
        found = f"{path} has {len(text)} bytes, fewer than one row of {scale.seq} tokens"
        raise ConfigError(Problem("--text", found, fix="a longer text or a smaller --seq"))
    return text


def _text_tokens(path: str, scale: Scale) -> Callable[[int], Tensor]:
    tokens = torch.tensor(list(read_text(path, scale)), dtype=torch.long)
    rows = tokens[: len(tokens) // scale.seq * scale.seq].view(-1, scale.seq)
    return lambda step: rows[torch.arange(step * scale.batch, (step + 1) * scale.batch) % len(rows)]


_SIDE = 224  # pixels, for models that take pictures of any size


def _pixels(config: Any, scale: Scale, seed: int) -> Tensor:
    backbone = getattr(config, "backbone_config", None)
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or getattr(backbone, "image_size", None) or _SIDE
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    frames = (config.num_frames,) if isinstance(getattr(config, "num_frames", None), int) else ()  # of a film
    return _random((scale.batch, *frames, channels, height, width), scale, seed)


def _samples(config: Any, scale: Scale, seed: int) -> Tensor:
    """Return a wave from which ``seq`` frames are made, whatever they are strided by."""
    stride = 1
    for one in getattr(config, "conv_stride", ()):
        stride *= one
    return _random((scale.batch, scale.seq * stride + 400), scale, seed)


def _mel(config: Any, scale: Scale, seed: int) -> Tensor:
    """Return a spectrogram: of the length that the model asks for, if it asks for one."""
    frames = 2 * config.max_source_positions if hasattr(config, "max_source_positions") else scale.seq
    bins: Any = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    return _random((scale.batch, bins, frames), scale, seed)


def _random(shape: tuple[int, ...], scale: Scale, seed: int) -> Tensor:
    return torch.randn(shape, generator=_generator(seed)).to(DTYPES[scale.dtype])


_VALUES: dict[str, Callable[[Any, Scale, int], Tensor]] = {
    "pixel_values": _pixels,
    "input_values": _samples,
    "input_features": _mel,
}


def _pictures_too(model: nn.Module, scale: Scale, seed: int) -> Mapping[str, Any]:
    """Return the pictures of a model that compares texts with them, and that its loss is wanted."""
    accepted = inspect.signature(model.forward).parameters
    if "return_loss" not in accepted or "pixel_values" not in accepted:
        return {}
    return {"pixel_values": _pixels(model.config, scale, seed), "return_loss": True}


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
    if name == "input_features" and "decoder_input_ids" in inspect.signature(model.forward).parameters:
        rows, length = len(main), min(main.shape[-1], getattr(model.config, "max_target_positions", main.shape[-1]))
        return {
            name: main,
            "labels": torch.randint(0, _vocab(model.config), (rows, length), generator=_generator(seed)),
        }
    return {name: main}


def _vocab(config: Any) -> Any:
    return getattr(config.get_text_config(), "vocab_size", None)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
