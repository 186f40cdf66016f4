"""A small configuration of any family: the default one with fewer layers, narrower, with fewer tokens.

Note [How a configuration is made small]
Nothing is known about a family but the names and values of its fields. All widths of one configuration and its
sub-configurations are divided by one number, all counts of heads by another, so that what was equal or a multiple
stays so. Only fields whose default is a value are passed on: what the class works out by itself, it works out again.
Some families have a relation that this breaks (sections of a rotary embedding, a table of token ids), so there are
several sizes, and the first that builds and runs is taken.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Size:
    """By how much a configuration is made smaller."""

    name: str
    width: int = 1
    heads: int = 1
    head_dim: int = 1
    vocab: int | None = None
    patches: int | None = None
    layers: int = 2


SIZES = (
    Size("small", width=16, heads=4, head_dim=4, vocab=256, patches=4),
    Size("whole heads", width=4, heads=4, vocab=256, patches=4),
    Size("whole vocabulary", width=16, heads=4, head_dim=4, patches=4),
    Size("whole width", vocab=256, patches=4),
    Size("few layers"),
)

CONVOLUTIONAL = ("stage_out_channels", "width_coefficient", "depth_multiplier", "block_configs")
SMALLEST_WIDTH = 8  # below, what a region must keep besides tensors (a random state is 5 KB) is more than they are
MOST_LAYERS = 8
MOST_STAGES = 6  # a list that is no longer is one of stages, not of layers
# Fields of many families that no rule below is about.
SMALLEST = {
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "max_source_positions": 32,
    "num_queries": 16,
    "num_self_attends_per_block": 2,
    "encoder_hash_byte_group_vocab": 64,
}
IDS = 200  # where the ids of special tokens begin that did not fit into a small vocabulary

LAYERS = re.compile(r"(^|_)(n_|num_)?layers?$|^depth$|^n_layer$|^num_blocks$|^num_hidden_blocks$")
NO_LAYERS = re.compile(
    r"kv_shared|feature|conv|flow|residual|feat_extract|nextn|adapter|global|upsampl|multi_modal|project|unet|rope"
)
STAGES = re.compile(
    r"^depths$|^num_blocks$|_depths$|^layer_depths$|^stage_num_blocks$|^blocks_per_stage$|^num_layers$|_repeats$"
)
INDICES = re.compile(r"index|indices|feature_layer|attn_layer|_layers$|_layer_ids?$|deepstack")
WIDTH = re.compile(
    r"hidden|embd|embed|emb_dim|dim|d_model|d_ff|d_inner|d_latents|channels?|intermediate|ffn|width|projection_size|units|_rank$"
    r"|upsample_groups|inner|planes|filters|attention_size|text_d_|vision_d_|expert_size|rnn_size|classifier_proj_size"
    r"|gating_size|^ssm_state|mlp_size"
)
NO_WIDTH = re.compile(
    r"layers|heads|act|dropout|prob|std|scale|ratio|token|position|image|patch(?!_embeds_hidden)|kernel|window|stride"
    r"|(?<!upsample_)groups|factor|eps|^num_(?!channels$|filters$)|^n_(?!embd$|inner$)|multiplier|embeddings$"
    r"|num_channels|audio_channels|(?<!decoder_)in_channels$|out_channels$|per_channel"
    r"|downsample_rate|type|init|use_|_range|expansion|max_|mult$|index|levels|loss|epsilon|quantiz|per_layer_input"
    r"|_norm|input_dim$|frame|mask_length|rope_dim|sections?|lags|chunk"
)
HEADS = re.compile(r"heads$|^n_head$|^num_heads|heads_per_stage$|key_value_heads")
HEAD_DIM = re.compile(
    r"head_dim$|^d_kv$|^d_head$|^dim_head$|head_size$|^kv_channels$|rotary_dim$|qk_.*dim$|v_head_dim$"
)
EXPERTS = re.compile(r"(num|n)_.*experts$|^num_experts$|^moe_num_experts$|^num_local_experts$")
PER_TOKEN = re.compile(r"experts_per_tok|^moe_(topk|k)$|^top_k$|num_experts_per|^moe_top_k$|_topk_experts")
VOCAB = re.compile(r"(^|_)vocab_size")
TOKEN = re.compile(r"token_(id|index)s?$|_token$|token_id_list$")
IMAGE = re.compile(r"^(image|img|input)_size$|^resolution$")
DROPOUT = re.compile(r"dropout|drop_rate|_pdrop$|drop_path")
NO_DROPOUT = re.compile(r"att|layerdrop|classifier|final|summary|quantiz|feat|prob_|_layer$")


@dataclass
class _Names:
    """Special tokens, renumbered in the same way throughout a configuration."""

    small: int | None
    ids: dict[int, int] = field(default_factory=dict)

    def token(self, value: Any) -> Any:
        if self.small is None or not isinstance(value, int) or value < IDS:
            return value
        return self.ids.setdefault(value, min(IDS + len(self.ids), self.small - 1))


def small_config(config_class: type, size: Size, changes: Mapping[str, Any]) -> Any:
    """Return an instance of ``config_class`` made smaller; ``changes`` are by path: ``text_config.pad_token_id``.

    Raises whatever the class raises for what it is given.
    """
    return _small(config_class, config_class(), size, _Names(size.vocab), changes)


def _small(kind: type, config: Any, size: Size, names: _Names, changes: Mapping[str, Any]) -> Any:
    own = {key: value for key, value in changes.items() if "." not in key}
    given = {key: value for key, value in _fields(kind, config, size, names) if key not in own}
    for key, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict") and key not in own:
            below = {k.partition(".")[2]: v for k, v in changes.items() if k.startswith(f"{key}.")}
            given[key.lstrip("_") if not key.startswith("_") else key] = _small(type(value), value, size, names, below)
    _fit_together(given, own)
    made = kind(**{**given, **own})
    for key, value in vars(config).items():
        if key not in vars(made):  # what a default configuration is given beyond its fields
            setattr(made, key, value)
    return made


def _get(config: Any, name: str) -> Any:
    """Return a field, or None: some configurations refuse to tell a field that differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def _fit_together(given: dict[str, Any], own: dict[str, Any]) -> None:
    """An encoder whose output goes into a language model as it is says so by the width of its output.

    The defaults of the two parts are at times those of two releases.
    """
    text = given.get("text_config", own.get("text_config"))
    width = getattr(text, "hidden_size", None)
    for part in given.values():
        for name in ("out_hidden_size", "text_hidden_size", "llm_hidden_size"):
            if width and part is not text and isinstance(getattr(part, name, None), int):
                setattr(part, name, width)


def _fields(kind: type, config: Any, size: Size, names: _Names) -> Iterator[tuple[str, Any]]:
    """Yield the fields that change, with their new values."""
    old, new, shared = _layers(config, size)
    heads, usual = 0, kind()
    # The widths of a convolutional network are tables that refer to one another; it is small as it is.
    convolutional = any(_get(config, name) is not None for name in CONVOLUTIONAL)
    narrowed = replace(size, width=1) if convolutional else size
    for each in dataclasses.fields(kind):
        value = _get(config, each.name)
        if each.name == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            sections = [s // size.head_dim if s % size.head_dim == 0 else s for s in value["mrope_section"]]
            yield each.name, {**value, "mrope_section": sections}
        if each.name.startswith("_") or hasattr(value, "to_dict"):
            continue
        is_usual = _get(usual, each.name) == value
        if not is_usual and isinstance(value, (bool, str, dict, type(None))):
            yield each.name, value
            continue
        worked_out = is_usual and each.default is None and not IMAGE.search(each.name)
        if worked_out or value is None or isinstance(value, (bool, str, dict)):
            continue
        changed = _changed(each.name, value, narrowed, names, old, new)
        if IMAGE.search(each.name) and size.patches:
            changed = _image_like(value, _get(config, "patch_size"), size.patches)
        if each.name == "num_kv_shared_layers" and value:
            changed = shared
        if HEADS.search(each.name) and isinstance(changed, int):
            if "key_value" in each.name or "kv" in each.name:
                changed = changed if heads and heads % changed == 0 else (1 if heads else changed)
            else:
                heads = changed
        if changed != value or not is_usual:
            yield each.name, changed
    yield from _outputs(config, usual, old, new)


def _outputs(config: Any, usual: Any, old: int, new: int) -> Iterator[tuple[str, Any]]:
    """Yield which stages a backbone gives back: the same number of them, the last ones where there are fewer layers."""
    chosen = _get(config, "out_indices")
    if not chosen or chosen == _get(usual, "out_indices"):
        return
    yield "out_indices", list(range(new - len(chosen) + 1, new + 1)) if old != new else list(chosen)


def _layers(config: Any, size: Size) -> tuple[int, int, int]:
    """Return how many layers there were, how many there are to be, and how many of those share keys and values."""
    old = next(
        (v for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
         if isinstance(v := _get(config, n), int)),
        0,
    )  # fmt: skip
    if old <= size.layers:
        return old, old, 0
    new = size.layers
    for value in vars(config).values():
        if isinstance(value, (list, tuple)) and len(value) == old and all(isinstance(v, str) for v in value):
            new = max(new, 1 + max(list(value).index(sort) for sort in set(value)))
    new = min(max(new, len(_get(config, "out_indices") or ())), MOST_LAYERS, old)
    if _get(config, "num_kv_shared_layers"):
        return old, min(2 * new, 2 * MOST_LAYERS), min(new, MOST_LAYERS)
    return old, new, 0


def _changed(name: str, value: Any, size: Size, names: _Names, old: int, new: int) -> Any:
    if TOKEN.search(name):
        return [names.token(v) for v in value] if isinstance(value, list) else names.token(value)
    if isinstance(value, (list, tuple)):
        return _changed_list(name, value, size, old, new)
    if name == "depth_coefficient":  # EfficientNet multiplies its depths by it
        return min(value, 1.0)
    if isinstance(value, float):
        is_dropout = DROPOUT.search(name) and not NO_DROPOUT.search(name)
        return 0.1 if is_dropout and value == 0 else value
    if not isinstance(value, int):
        return value
    return _changed_int(name, value, size, old, new)


def _changed_int(name: str, value: int, size: Size, old: int, new: int) -> int:
    if name in SMALLEST:
        return min(value, SMALLEST[name])
    if LAYERS.search(name) and not NO_LAYERS.search(name):
        return new if value == old else min(value, size.layers)
    if EXPERTS.search(name) and "shared" not in name and "per_tok" not in name:
        return min(value, 8)
    if PER_TOKEN.search(name):
        return min(value, 2)
    if VOCAB.search(name):
        return min(value, size.vocab or value)
    if HEADS.search(name):
        return value // size.heads if value % size.heads == 0 else value
    if HEAD_DIM.search(name):
        return _divided(value, size.head_dim)
    if WIDTH.search(name) and not NO_WIDTH.search(name):
        return _divided(value, size.width)
    return value


def _changed_list(name: str, value: Any, size: Size, old: int, new: int) -> Any:
    if not value:
        return value
    if not all(isinstance(v, (int, str, float)) for v in value):
        return value
    if len(value) == old and old != new and (old > MOST_STAGES or isinstance(value[0], str)):
        return type(value)(value[:new])
    if not all(type(v) is int for v in value):
        return value
    if STAGES.search(name):
        return type(value)(min(v, size.layers) for v in value)
    if INDICES.search(name) and old and max(value) < old + 1 and min(value) >= 0:
        return type(value)(sorted({v * new // max(old, 1) for v in value}))
    if HEADS.search(name):
        return type(value)(v // size.heads for v in value) if all(v % size.heads == 0 for v in value) else value
    if WIDTH.search(name) and not NO_WIDTH.search(name) and min(value) >= 16:
        return type(value)(_divided(v, size.width if len(set(value)) == 1 else min(size.width, 4)) for v in value)
    return value


def _divided(value: int, divisor: int) -> int:
    """A width that is small already, or not a multiple, stays."""
    return value // divisor if value >= SMALLEST_WIDTH * divisor and value % divisor == 0 else value


def _image_like(value: Any, patch: Any, patches: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_image_like(v, patch, patches) for v in value)
    side = patch[-1] if isinstance(patch, (list, tuple)) and patch else patch
    if not isinstance(value, int):
        return value
    return _image(value, side if isinstance(side, int) else 0, patches)


def _image(value: int, patch: int, patches: int) -> int:
    """An image of some patches, large enough to be halved a few times."""
    if patch and value % patch == 0:
        return min(value, max(patch * patches, 64))
    return value if patch else min(value, 64)
