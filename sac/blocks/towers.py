"""Towers: which part of a multimodal model a module belongs to, and the scope that picks some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from sac.blocks.paths import walk
from sac.errors import ConfigError, Problem, listing, nearest

TOWERS = ("language", "vision", "audio", "multimodal")
SCOPES = ("all", *TOWERS)

# Words of one path segment or model_type, between underscores and with trailing digits dropped.
MULTIMODAL_WORDS = frozenset(
    {
        "projector",
        "resampler",
        "connector",
        "perceiver",
        "merger",
        "aligner",
        "qformer",
        "abstractor",
        "multimodal",
        "mm",
        "multi",
        "modality",
    }
)
VISION_WORDS = frozenset({"vision", "visual", "image", "img", "video", "vit", "pixel"})
AUDIO_WORDS = frozenset({"audio", "speech", "acoustic", "sound", "mel"})
LANGUAGE_WORDS = frozenset({"language", "text", "llm", "lm", "thinker"})
# These tell of a bridge when they stand beside a modality's word: ``embed_vision``, ``visual_projection``.
BRIDGE_WORDS = frozenset({"proj", "projection", "embed", "embedder", "embedding", "mlp", "adapter"})
MAIN_INPUTS = {"pixel_values": "vision", "input_features": "audio", "input_values": "audio", "input_ids": "language"}


class Towers:
    """Tells the tower of each path of one model.

    The path's own words come first (``vision_tower``, ``multi_modal_projector``); then, from the inside out, the
    Hugging Face models around it (their ``model_type`` and main input), or a patch embedding; else it is language.
    """

    def __init__(self, model: nn.Module) -> None:
        self._told: dict[str, str] = {}
        for node in walk(model):
            if node.path not in self._told and (tower := _told_by_module(node.module)):
                self._told[node.path] = tower

    def of(self, path: str) -> str:
        """Return the tower of the module at a clean path."""
        if by_name := _told_by_path(path):
            return by_name
        while path:
            if path in self._told:
                return self._told[path]
            path = path.rpartition(".")[0]
        return self._told.get("", "language")


def tower_of(path: str, model: nn.Module) -> str:
    """Return the tower of the module at the clean ``path``: ``language``, ``vision``, ``audio`` or ``multimodal``."""
    return Towers(model).of(path)


def parse_scope(scope: str | Sequence[str]) -> frozenset[str]:
    """Return the towers that a scope means; case, hyphens and underscores do not matter in it.

    Raises ``ConfigError`` when a word is none of ``SCOPES``, or there is none.
    """
    words = (scope,) if isinstance(scope, str) else scope
    if not isinstance(words, Iterable):
        raise ConfigError(_illegal(scope))
    chosen: set[str] = set()
    problems = []
    written = list(words)
    for word in written:
        name = word.strip().lower() if isinstance(word, str) else ""
        if name not in SCOPES:
            problems.append(_illegal(word))
        chosen.update(TOWERS if name == "all" else (name,))
    if not written:
        problems.append(_illegal(scope))
    if problems:
        raise ConfigError(problems)
    return frozenset(chosen)


def _illegal(word: object) -> Problem:
    return Problem(
        "scope",
        f"{word!r} is no part of a model",
        expected=f"{listing(SCOPES)}, or a list of them",
        nearest=nearest(word, SCOPES) if isinstance(word, str) else "",
    )


def _told_by_path(path: str) -> str:
    told = ""
    for segment in path.lower().split("."):
        tower = _told_by_words(_words(segment), bridges=True)
        if tower == "multimodal":
            return tower
        told = tower or told
    return told


def _told_by_module(module: nn.Module) -> str:
    main_input = getattr(module, "main_input_name", None)
    if isinstance(main_input, str):
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        words = _words(model_type.lower()) if isinstance(model_type, str) else frozenset()
        named = _told_by_words(words, bridges=False)
        return named or MAIN_INPUTS.get(main_input, "language")
    return "vision" if "patch_embed" in module._modules else ""


def _told_by_words(words: frozenset[str], *, bridges: bool) -> str:
    vision, audio = not words.isdisjoint(VISION_WORDS), not words.isdisjoint(AUDIO_WORDS)
    bridge = bridges and not words.isdisjoint(BRIDGE_WORDS)
    if not words.isdisjoint(MULTIMODAL_WORDS) or ((vision or audio) and bridge):
        return "multimodal"
    if vision or audio:
        return "vision" if vision else "audio"
    return "language" if not words.isdisjoint(LANGUAGE_WORDS) else ""


def _words(segment: str) -> frozenset[str]:
    return frozenset(re.sub(r"\d+$", "", word) for word in segment.split("_"))
