"""Inputs for a model, made up from the signature of its forward and from its configuration."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQ, TARGET = 2, 32, 16
GRID = 4  # patches along each side of an image that comes as patches


class CannotMakeInputs(Exception):
    """There is no way to make up one of the inputs that a forward needs."""


@dataclass
class Wanted:
    """What is to be made up, and what earlier attempts have taught."""

    modalities: bool = True
    labels: bool = True
    added: tuple[str, ...] = ()
    tokens: dict[str, int] = field(default_factory=dict)  # per modality: placeholders in the text, all rows together
    image: int = 0  # side of images whose size no field tells
    layout: int = 0  # which order of the axes of sound and of video


def make_inputs(model: nn.Module, wanted: Wanted) -> dict[str, Any]:
    """Return keyword inputs for ``model``, the same in every call. Raises ``CannotMakeInputs``."""
    maker = _Maker(model, wanted)
    parameters = inspect.signature(model.forward).parameters
    names = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in (2, 4)]
    main = getattr(model, "main_input_name", "input_ids")
    names += [n for n in ([main] if isinstance(main, str) else main) if n in parameters]
    if wanted.modalities:
        images = "pixel_values" in parameters  # several models take either images or a video, not both
        names += [n for n in MODALITIES if n in parameters and not (images and n == "pixel_values_videos")]
    names += [n for n in wanted.added if n in parameters]
    names += [n for n in USUAL if n in parameters]
    names = list(dict.fromkeys(names))
    if any(n in names for n in ("pixel_values", "pixel_values_videos", "input_features", "input_values")):
        names += [n for given, extra in TOGETHER.items() if given in names for n in extra if n in parameters]
    if wanted.labels and "labels" in parameters and re.search(LABELLED, type(model).__name__):
        names.append("labels")
    return {name: maker.make(name) for name in dict.fromkeys(names)}


LAYOUTS = 5
MODALITIES = ("input_ids", "pixel_values", "input_features", "input_values", "pixel_values_videos", "bbox")
USUAL = ("decoder_input_ids", "actions", "returns_to_go", "timesteps")
TOGETHER = {
    "pixel_values": ("image_grid_thw", "mm_token_type_ids", "image_sizes", "aspect_ratio_ids", "aspect_ratio_mask",
                     "spatial_shapes", "pixel_attention_mask", "image_grid_hw", "pixel_position_ids",
                     "image_position_ids", "qformer_input_ids"),
    "pixel_values_videos": ("video_grid_thw",),
    "input_features": ("feature_attention_mask", "input_features_mask"),
}  # fmt: skip
LABELLED = r"For(CausalLM|MaskedLM|ConditionalGeneration)$|LMHeadModel$"
PLACEHOLDER = {"image": ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id"),
               "video": ("video_token_id", "video_token_index"),
               "audio": ("audio_token_id", "audio_token_index", "audio_ph_token_id")}  # fmt: skip


class _Maker:
    """Makes each input by its name; what several of them share is worked out once."""

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        self.model, self.wanted = model, wanted
        self.config: Any = model.config
        self.generator = torch.Generator().manual_seed(1)
        try:
            self.text: Any = self.config.get_text_config()
        except ValueError:  # there are several
            self.text = self.config.decoder
        self.vision = self._part("vision_config", "image_config", "vision_backbone_config", "backbone_config")
        self.audio = self._part("audio_config", "audio_encoder_config", "encoder_config", "speech_config")

    def make(self, name: str) -> Any:
        """Return the input called ``name``."""
        made = getattr(self, f"_{name}", None)
        if made is None:
            raise CannotMakeInputs(f"no way to make up `{name}` for {type(self.model).__name__}")
        return made()

    # What the configuration says

    def _part(self, *names: str) -> Any:
        holders = [self.config, getattr(self.config, "thinker_config", None)]
        found = (getattr(holder, name, None) for holder in holders for name in names)
        return next((part for part in found if hasattr(part, "to_dict")), self.config)

    def _parts(self) -> list[Any]:
        return [part for part in vars(self.config).values() if hasattr(part, "to_dict")]

    def _value(self, *names: str, of: Any = None, default: Any = None) -> Any:
        everywhere = (self.config, self.text, self.vision, self.audio, *self._parts())
        for holder in (of,) if of is not None else everywhere:
            for name in names:
                value = getattr(holder, name, None)
                if value is not None and not callable(value):
                    return value
        return default

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _ids_below(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(min(low, high - 1), high, shape, generator=self.generator)

    # Text

    def _vocabulary(self) -> int:
        sizes = [self._value("vocab_size", of=self.text), self._value("vocab_size", of=self.config)]
        sizes += [self._value("src_vocab_size", "n_token", "n_tokens", "text_vocab_size", "input_vocab_size")]
        sizes = [s for s in sizes if isinstance(s, int)]
        if not sizes:
            sizes = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return max(min(sizes), 4) if sizes else 32

    def _plain_ids(self, length: int) -> Tensor:
        special = {v for k, v in vars(self.config).items() if isinstance(v, int) and "token" in k}
        special |= {v for k, v in vars(self.text).items() if isinstance(v, int) and "token" in k}
        high = self._vocabulary()
        usable = [i for i in range(min(high, 190)) if i not in special and i > 2] or list(range(high))
        return torch.tensor(usable)[self._ids_below(len(usable), BATCH, length)]

    def _input_ids(self) -> Tensor:
        rows = []
        for kind, count in self.wanted.tokens.items():
            token = self._placeholder(kind)
            if token is None:
                raise CannotMakeInputs(f"no id of a placeholder for {kind} in {type(self.config).__name__}")
            rows.append(torch.full((BATCH, count // BATCH), token))
        positions = self._value("max_position_embeddings", of=self.text)
        ids = self._plain_ids(min(SEQ, positions) if isinstance(positions, int) and positions > 0 else SEQ)
        return torch.cat([ids[:, :3], *rows, ids[:, 3:]], dim=1)

    def _placeholder(self, kind: str) -> int | None:
        """Return the id that stands for one piece of an image or a sound, wherever the configuration has it."""
        found = (self._value(*PLACEHOLDER[kind], of=part) for part in (self.config, *self._parts()))
        return next((token for token in found if isinstance(token, int)), None)

    def _labels(self) -> Tensor:
        if self.config.is_encoder_decoder or self._main() != "input_ids":
            return self._plain_ids(TARGET)
        generator, self.generator = self.generator, torch.Generator().manual_seed(1)
        ids, self.generator = self._input_ids(), generator
        return ids

    def _main(self) -> str:
        return getattr(self.model, "main_input_name", "input_ids")

    def _decoder_input_ids(self) -> Tensor:
        decoder = getattr(self.config, "decoder", None)
        high = getattr(decoder, "vocab_size", None) or self._vocabulary()
        channels = getattr(decoder, "num_codebooks", 0)
        if channels:
            return self._ids_below(high, BATCH * channels, TARGET)
        return self._plain_ids(TARGET)

    def _attention_mask(self) -> Tensor:
        return torch.ones(BATCH, SEQ, dtype=torch.long)

    def _bbox(self) -> Tensor:
        return torch.tensor([1, 2, 5, 9]).expand(BATCH, SEQ, 4).clone()

    def _qformer_input_ids(self) -> Tensor:
        high = getattr(getattr(self.config, "qformer_config", None), "vocab_size", 100)
        return self._ids_below(min(high, 100), BATCH, SEQ, low=4)

    def _mm_token_type_ids(self) -> Tensor:
        ids = self._labels()
        kinds = torch.zeros_like(ids)
        for place, kind in ((1, "image"), (2, "video"), (3, "audio")):
            token = self._placeholder(kind)
            if token is not None:
                kinds[ids == token] = place
        return kinds

    def _inputs_embeds(self) -> Tensor:
        return self._floats(BATCH, SEQ, self._hidden())

    def _hidden(self) -> int:
        return int(self._value("hidden_size", "d_model", "embed_dim", "n_embd", "dim", default=32))

    # Images

    def _channels(self) -> int:
        value = self._value("num_channels", "in_channels", "in_chans", "channels", of=self.vision, default=3)
        return value if isinstance(value, int) else 3

    def _side(self) -> tuple[int, int]:
        value = self.wanted.image or self._value("image_size", "img_size", "input_size", of=self.vision)
        if value is None or self.wanted.image:
            value = self.wanted.image or 64
        if isinstance(value, dict):
            value = (value["height"], value["width"])
        if isinstance(value, (list, tuple)):
            return (int(value[-2]), int(value[-1])) if len(value) > 1 else (int(value[0]), int(value[0]))
        return int(value), int(value)

    def _by_patches(self) -> bool:
        """Whether images come cut into patches, with a grid for each."""
        parameters = inspect.signature(self.model.forward).parameters
        return bool({"image_grid_thw", "grid_thw", "video_grid_thw"} & set(parameters))

    def _patch(self) -> int:
        value = self._value("patch_size", "spatial_patch_size", of=self.vision, default=14)
        return int(value[-1] if isinstance(value, (list, tuple)) else value)

    def _patches(self) -> Tensor:
        times = self._value("temporal_patch_size", "patch_temporal", "temporal_patch", of=self.vision, default=1)
        return self._floats(BATCH * GRID * GRID, self._channels() * times * self._patch() ** 2)

    def _pixel_values(self) -> Tensor:
        if self._by_patches():
            return self._patches()
        height, width = self._side()
        frames = self._value("num_frames", "frames_per_clip", of=self.vision, default=1)
        channels = self._channels()
        layouts = ((channels,), (int(frames), channels), (2, channels), (1, 1, channels), (channels, int(frames)))
        return self._floats(BATCH, *layouts[self.wanted.layout % LAYOUTS], height, width)

    def _image(self) -> Tensor:
        return self._pixel_values()

    def _pixel_values_videos(self) -> Tensor:
        if self._by_patches():
            return self._patches()
        height, width = self._side()
        frames = self._value("num_frames", "frames_per_clip", of=self.vision, default=4)
        return self._floats(BATCH, int(frames), self._channels(), height, width)

    def _grid_thw(self) -> Tensor:
        return torch.tensor([[1, GRID, GRID]] * BATCH)

    _image_grid_thw = _video_grid_thw = _grid_thw

    def _image_grid_hw(self) -> Tensor:
        return torch.tensor([[GRID, GRID]] * BATCH)

    def _hidden_states(self) -> Tensor:
        if self._by_patches():
            return self._patches()
        return self._floats(BATCH, SEQ, self._mels() if self.wanted.layout else self._hidden())

    def _image_sizes(self) -> Tensor:
        return torch.tensor([list(self._side())] * BATCH)

    def _encoder_hidden_states(self) -> Tensor:
        width = self._value("encoder_hidden_size", "cross_attention_hidden_size", default=self._hidden())
        return self._floats(BATCH, SEQ, int(width))

    def _flattened_patches(self) -> Tensor:
        width = self._value("patch_embed_hidden_size", of=self.vision, default=self._channels() * self._patch() ** 2)
        patches = self._floats(BATCH, GRID * GRID, 2 + width)
        patches[..., 0] = torch.arange(GRID * GRID) // GRID + 1  # 0 means padding
        patches[..., 1] = torch.arange(GRID * GRID) % GRID + 1
        return patches

    def _visual_feats(self) -> Tensor:
        return self._floats(BATCH, GRID, self.config.visual_feat_dim)

    def _visual_pos(self) -> Tensor:
        return self._floats(BATCH, GRID, self.config.visual_pos_dim)

    def _mel_spectrogram(self) -> Tensor:
        return self._floats(BATCH, self._mels(), SEQ)

    def _task_inputs(self) -> Tensor:
        return self._floats(BATCH, self.config.task_seq_len)

    def _bool_masked_pos(self) -> Tensor:
        side = self._side()[0] // self._patch()
        count = side * side
        if hasattr(self.config, "tubelet_size"):
            count *= self.config.num_frames // self.config.tubelet_size
        return (torch.arange(count) % 2 == 0).expand(BATCH, count).clone()

    # Sound

    def _mels(self) -> int:
        names = ("num_mel_bins", "feature_size", "input_feat_size", "mel_dim", "n_mels", "feature_projection_input_dim",
                 "input_dim", "num_mel_filters", "input_size")  # fmt: skip
        return int(self._value(*names, of=self.audio, default=self._value(*names, default=128)))

    def _input_features(self) -> Tensor:
        frames = 2 * int(self._value("n_window", "max_source_positions", of=self.audio, default=48))
        mels = self._mels()
        side = self._square()
        layouts = ((mels, frames), (frames, mels), (1, frames, mels), (1, side, mels), (1, side, side))
        return self._floats(BATCH, *layouts[self.wanted.layout % LAYOUTS])

    def _square(self) -> int:
        return int(self._value("spec_size", of=self.audio, default=64))

    def _input_features_mask(self) -> Tensor:
        features = self._input_features()
        return torch.ones(BATCH, features.shape[-1 if self.wanted.layout == 0 else -2], dtype=torch.long)

    _feature_attention_mask = _input_features_mask

    def _input_values(self) -> Tensor:
        if hasattr(self.config, "patch_size") and hasattr(self.config, "num_mel_bins"):
            return self._floats(BATCH, self.config.max_length, self.config.num_mel_bins)
        if re.search(r"Dac|Encodec|Mimi|XCodec|Xcodec|Tokenizer|Codec|Autoencoder", type(self.model).__name__):
            return self._floats(BATCH, int(self._value("audio_channels", default=1)), 4800)
        return self._floats(BATCH, *((4000,), (1, 4800))[self.wanted.layout % 2])

    def _spectrogram(self) -> Tensor:
        return self._floats(BATCH, SEQ, self._mels())

    # Trajectories

    def _states(self) -> Tensor:
        return self._floats(BATCH, TARGET, self.config.state_dim)

    def _actions(self) -> Tensor:
        return self._floats(BATCH, TARGET, self.config.act_dim)

    def _returns_to_go(self) -> Tensor:
        return self._floats(BATCH, TARGET, 1)

    def _timesteps(self) -> Tensor:
        return torch.arange(TARGET).expand(BATCH, TARGET)

    # Time series

    def _past_values(self) -> Tensor:
        config = self.config
        length = self._value("context_length", of=config, default=32)
        if hasattr(config, "lags_sequence"):
            return self._floats(BATCH, length + max(config.lags_sequence))
        channels = self._value("num_input_channels", of=config)
        return self._floats(BATCH, length, channels) if channels else self._floats(BATCH, length)

    def _past_time_features(self) -> Tensor:
        return self._floats(*self._past_values().shape, self.config.num_time_features)

    def _past_observed_mask(self) -> Tensor:
        return torch.ones_like(self._past_values())

    def _future_values(self) -> Tensor:
        return self._floats(BATCH, self.config.prediction_length)

    def _future_time_features(self) -> Tensor:
        return self._floats(BATCH, self.config.prediction_length, self.config.num_time_features)


def learn(message: str, wanted: Wanted) -> bool:
    """Note in ``wanted`` what an exception's message says is missing; return whether it said anything new."""
    before = (dict(wanted.tokens), wanted.added, wanted.layout)
    counts = re.search(r"(Image|Video|Audio)[^:]*(?:: *)?tokens: *(?:tensor\()?(\d+)\)?,? *features:? *(\d+)", message)
    if counts:
        kind, tokens, features = counts[1].lower(), int(counts[2]), int(counts[3])
        wanted.tokens[kind] = BATCH * features if tokens == features else features
    missing = re.search(
        r"(?:missing \d+ required positional arguments?: '(\w+)')|(?:specify (?:either )?`?(\w+))", message
    )
    if missing:
        name = missing[1] or missing[2]
        if name not in wanted.added:
            wanted.added += (name,)
    if (wanted.tokens, wanted.added, wanted.layout) == before and wanted.layout < LAYOUTS - 1:
        wanted.layout += 1
    return (wanted.tokens, wanted.added, wanted.layout) != before
