"""Towers: the parts of a multimodal model, and the scope that selects some of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from torch import nn

from sac.blocks.paths import walk
from sac.config_keys import CONFIG_KEYS, read_scope

ALL, *TOWERS = CONFIG_KEYS["scope"].words

# Words of one path segment or model_type: split at underscores, trailing digits removed.
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
# These indicate a projector if they occur next to the word of a modality: ``embed_vision``, ``visual_projection``.
BRIDGE_WORDS = frozenset({"proj", "projection", "embed", "embedder", "embedding", "mlp", "adapter"})
MAIN_INPUTS = {"pixel_values": "vision", "input_features": "audio", "input_values": "audio", "input_ids": "language"}


class Towers:
    """Determines the tower of each path of one model.

    The name of a projector anywhere in the path (``multi_modal_projector``) decides first. Then, from the inside out,
    each segment's words (``vision_tower``), and the config of the Hugging Face model there or a patch embedding.
    A module without any such sign belongs to language, and so do the remaining modules of a model that contains parts
    of several towers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._told: dict[str, str] = {}
        for node in walk(model):
            if tower := _told_by_module(node.module):
                self._told.setdefault(node.path, tower)
        speaking = [path for path, tower in self._told.items() if tower == "language"]
        for path in self._told:  # Whisper takes audio, but its head is not a part of the audio tower
            if any(not path or other.startswith(f"{path}.") for other in speaking):
                self._told[path] = "language"

    def of(self, path: str) -> str:
        """Return the tower of the module at a clean path: ``language``, ``vision``, ``audio`` or ``multimodal``."""
        if any(not _words(segment).isdisjoint(MULTIMODAL_WORDS) for segment in path.lower().split(".")):
            return "multimodal"
        while path:
            outer, _, segment = path.rpartition(".")
            if tower := _told_by_segment(segment.lower()) or self._told.get(path, ""):
                return tower
            path = outer
        return self._told.get("", "language")


def parse_scope(scope: str | Sequence[str]) -> frozenset[str]:
    """Return the towers that a scope selects; case, hyphens and underscores do not matter.

    Raises ``ConfigError`` if a word is not one of them or the scope is empty.
    """
    read = read_scope(scope, "scope")
    words = {read} if isinstance(read, str) else {*read}
    return frozenset(TOWERS if ALL in words else words)


def _told_by_segment(segment: str) -> str:
    words = _words(segment)
    tower = _told_by_words(words)
    bridge = tower in ("vision", "audio") and not words.isdisjoint(BRIDGE_WORDS)
    return "multimodal" if bridge else tower


def _told_by_module(module: nn.Module) -> str:
    main_input = getattr(module, "main_input_name", None)
    if isinstance(main_input, str):  # a Hugging Face model; "input_ids" is also the default value
        arguments = inspect.signature(type(module).forward).parameters
        taken = next((MAIN_INPUTS[name] for name in arguments if name in MAIN_INPUTS), "")
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        named = _told_by_words(_words(model_type.lower())) if isinstance(model_type, str) else ""
        return taken or named or ("" if main_input == "input_ids" else MAIN_INPUTS.get(main_input, ""))
    return "vision" if "patch_embed" in module._modules else ""


def _told_by_words(words: frozenset[str]) -> str:
    told = {"vision": VISION_WORDS, "audio": AUDIO_WORDS, "language": LANGUAGE_WORDS}
    return next((tower for tower, known in told.items() if not words.isdisjoint(known)), "")


def _words(segment: str) -> frozenset[str]:
    return frozenset(re.sub(r"\d+$", "", word) for word in segment.split("_"))
