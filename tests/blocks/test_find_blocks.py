"""Blocks of plain torch models, of wrapped models, by patterns; and every way of finding none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sac.blocks.find import Block, clean_path, find_blocks
from sac.blocks.towers import parse_scope, tower_of
from sac.errors import ConfigError, ModelError
from sac.policy.patterns import PathPattern
from tests.plain_zoo import DIM, PLAIN, Attention, Experts, Staged, SwiGLU, TitanStyle, plain
from tests.plain_zoo import Block as PlainBlock

EXPECTED = {
    "titan": ["layers.0", "layers.1", "layers.2"],
    "timm": ["blocks.0", "blocks.1"],
    "staged": ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"],
    "sequential": ["0", "1", "2"],
    "experts": ["0", "1"],
    "block": [""],
    "transformer_encoder": ["layers.0", "layers.1"],
    "transformer_decoder": ["layers.0", "layers.1"],
}


def paths(blocks: tuple[Block, ...]) -> list[str]:
    return [block.path for block in blocks]


def patterns(*texts: str) -> list[PathPattern]:
    return [PathPattern.parse(text) for text in texts]


def test_every_plain_model_is_expected() -> None:
    assert set(EXPECTED) == set(PLAIN)


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_of_plain_models(name: str) -> None:
    model, _ = plain(name)
    blocks = find_blocks(model)
    assert paths(blocks) == EXPECTED[name]
    for block in blocks:
        assert block.module is model.get_submodule(block.path)


@pytest.mark.parametrize("name", PLAIN)
def test_every_block_is_called_in_forward(name: str) -> None:
    model, inputs = plain(name)
    called: list[nn.Module] = []
    blocks = find_blocks(model)
    for block in blocks:
        block.module.register_forward_hook(lambda module, *_: called.append(module))
    model(**inputs)
    assert called == [block.module for block in blocks]


# --- layer numbers


def test_layers_count_within_their_stack() -> None:
    found = [(b.stack, b.layer, b.stack_size) for b in find_blocks(Staged((2, 1)))]
    assert found == [("stages.0.blocks", 0, 2), ("stages.0.blocks", 1, 2), ("stages.1.blocks", 0, 1)]


def test_pipeline_stage_keeps_the_numbers_of_its_keys_and_the_size_of_the_whole() -> None:
    for keys in (range(2), range(2, 4), range(4, 6)):
        blocks = find_blocks(TitanStyle(keys, n_layers=6))
        assert [(b.path, b.layer, b.stack_size) for b in blocks] == [(f"layers.{k}", k, 6) for k in keys]


def test_pipeline_stage_without_a_config_counts_to_its_last_key() -> None:
    model = TitanStyle(range(2, 4))
    del model.model_args
    assert [(b.layer, b.stack_size) for b in find_blocks(model)] == [(2, 4), (3, 4)]


def test_placeholders_in_a_module_list_keep_positions() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Identity(), nn.Identity(), PlainBlock(), PlainBlock()])
    assert [(b.path, b.layer, b.stack_size) for b in find_blocks(model)] == [("layers.2", 2, 4), ("layers.3", 3, 4)]


def test_sequential_counts_only_its_blocks() -> None:
    stem = nn.Sequential(nn.Embedding(8, DIM), nn.LayerNorm(DIM), nn.Dropout(0.1))
    head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4))
    model = nn.Sequential(stem, PlainBlock(), PlainBlock(), head)
    assert [(b.path, b.layer, b.stack_size) for b in find_blocks(model)] == [("1", 0, 2), ("2", 1, 2)]


def test_alternating_blocks_of_a_sequential_are_all_blocks() -> None:
    class Mlp(SwiGLU):
        pass

    model = nn.Sequential(PlainBlock(), Mlp(), PlainBlock(), Mlp())
    assert paths(find_blocks(model)) == ["0", "1", "2", "3"]


def test_named_children_of_a_sequential_are_blocks() -> None:
    model = nn.Sequential()
    for index in range(2):
        model.add_module(f"encoder_layer_{index}", PlainBlock())
    assert [(b.path, b.layer) for b in find_blocks(model)] == [("encoder_layer_0", 0), ("encoder_layer_1", 1)]


# --- what is a block


@pytest.mark.parametrize("container", [nn.Sequential, lambda block: nn.ModuleList([block])])
def test_container_of_one_block_is_a_model_with_one_block(container) -> None:
    assert paths(find_blocks(container(PlainBlock()))) == ["0"]


@pytest.mark.parametrize(
    "block",
    [
        PlainBlock(),
        PlainBlock(mlp=Experts),
        PlainBlock(mlp=lambda: nn.Sequential(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()), nn.Linear(DIM, DIM))),
        nn.TransformerEncoderLayer(DIM, 2, DIM),
        nn.TransformerDecoderLayer(DIM, 2, DIM),
    ],
    ids=["plain", "experts", "nested-mlp", "encoder-layer", "decoder-layer"],
)
def test_model_that_is_one_block(block: nn.Module) -> None:
    assert find_blocks(block) == (Block("", block, 0, "", 1, "language"),)


def test_mixed_classes_are_one_stack() -> None:
    class Other(PlainBlock):
        pass

    assert paths(find_blocks(nn.Sequential(PlainBlock(), Other(), PlainBlock()))) == ["0", "1", "2"]


def test_blocks_without_attention_are_found_by_their_repetition() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(DIM), SwiGLU()

        def forward(self, x):
            return x + self.mlp(self.norm(x))

    assert paths(find_blocks(nn.Sequential(Residual(), Residual()))) == ["0", "1"]
    mlps = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(2)))
    assert paths(find_blocks(mlps)) == ["0", "1"]


def test_blocks_without_parts_are_found_by_their_repetition() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(DIM, DIM))

        def forward(self, x):
            return x @ self.w

    assert paths(find_blocks(nn.Sequential(Raw(), Raw()))) == ["0", "1"]


def test_heads_beside_a_stack_are_no_blocks() -> None:
    model = TitanStyle()
    model.heads = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, 4)) for _ in range(3))
    assert paths(find_blocks(model)) == EXPECTED["titan"]


def test_parts_of_a_layer_in_a_list_of_lists_are_regions_of_that_layer() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([Attention(), SwiGLU()]) for _ in range(2))
    found = [(b.path, b.layer, b.stack) for b in find_blocks(model)]
    assert found == [(f"layers.{i}.{j}", i, "layers") for i in range(2) for j in range(2)]


def test_parts_of_a_block_in_a_list_are_no_blocks() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList([Attention(), SwiGLU()])

        def forward(self, x):
            return self.layer[1](self.layer[0](x))

    model = nn.Module()
    model.block = nn.ModuleList(Listed() for _ in range(2))
    assert paths(find_blocks(model)) == ["block.0", "block.1"]
    parts = paths(find_blocks(model, granularity="submodule"))
    assert parts == ["block.0.layer.0", "block.0.layer.1", "block.1.layer.0", "block.1.layer.1"]


def test_shared_block_is_listed_once() -> None:
    shared = PlainBlock()
    model = nn.Sequential(shared, PlainBlock(), shared)
    assert paths(find_blocks(model)) == ["0", "1"]
    assert paths(find_blocks(model, patterns=patterns("*"))) == ["0", "1"]
    assert paths(find_blocks(model, patterns=patterns("2"))) == ["2"]


def test_encoder_and_decoder_are_two_stacks() -> None:
    model = nn.Transformer(DIM, 2, 1, 2, DIM, batch_first=True)
    found = [(b.path, b.stack_size) for b in find_blocks(model)]
    assert found == [("encoder.layers.0", 1), ("decoder.layers.0", 2), ("decoder.layers.1", 2)]


# --- sub-modules


def test_submodules_are_what_holds_more_than_a_norm_or_one_map() -> None:
    model, _ = plain("titan")
    found = [(b.path, b.layer, b.stack) for b in find_blocks(model, granularity="submodule")]
    assert found == [(f"layers.{i}.{part}", i, "layers") for i in range(3) for part in ("attention", "feed_forward")]


def test_block_without_such_parts_stays_whole() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(2)))
    assert paths(find_blocks(model, granularity="Submodule ")) == ["0", "1"]


def test_shared_submodule_is_listed_once() -> None:
    model, _ = plain("sequential")
    model[2].attention = model[0].attention
    assert paths(find_blocks(model, granularity="submodule")) == [
        "0.attention",
        "0.feed_forward",
        "1.attention",
        "1.feed_forward",
        "2.feed_forward",
    ]


# --- wrappers


class PeftModel(nn.Module):
    """Laid out as PEFT lays out an adapted model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)


class BaseTuner(nn.Module):
    pass


class LoraModel(BaseTuner):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _each_block(model: nn.Module, wrap) -> nn.Module:
    for key in model.layers:
        model.layers[key] = wrap(model.layers[key])
    return model


WRAPPED = {
    "data-parallel": nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled-blocks": lambda model: _each_block(model, lambda block: torch.compile(block, backend="eager")),
    "checkpoint-wrapped": lambda model: _each_block(model, checkpoint_wrapper),
    "both": lambda model: _each_block(model, lambda b: torch.compile(checkpoint_wrapper(b), backend="eager")),
    "peft": PeftModel,
    "compiled-peft": lambda model: torch.compile(PeftModel(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_are_looked_through(wrap) -> None:
    plain_model, _ = plain("titan")
    inner = list(plain_model.layers.values())
    model = wrap(plain_model)
    blocks = find_blocks(model)
    assert paths(blocks) == EXPECTED["titan"]
    assert [b.layer for b in blocks] == [0, 1, 2]
    assert all(type(block.module) is PlainBlock for block in blocks)
    if wrap is not torch.optim.swa_utils.AveragedModel:  # which copies the model
        assert [block.module for block in blocks] == inner
    assert find_blocks(model, patterns=patterns("layers.*")) == blocks


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_raw_paths_match_too_and_clean_alike(wrap) -> None:
    model = wrap(plain("titan")[0])
    wanted = type(find_blocks(model)[1].module)
    raw = [n for n, m in model.named_modules() if type(m) is wanted or n.rsplit(".", 1)[-1] == "1"]
    raw = [name for name in raw if clean_path(name, model) == "layers.1"]
    assert raw
    for name in raw:
        if name.endswith("_module") or name.endswith("_orig_mod"):  # inside the outermost wrapper
            continue
        assert paths(find_blocks(model, patterns=patterns(name))) == ["layers.1"]


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_wrappers_are_looked_through() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = plain("titan")
    inner = list(model.layers.values())
    mesh = init_device_mesh("cpu", (1,))
    for block in inner:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert [(b.path, b.module) for b in find_blocks(model)] == list(zip(EXPECTED["titan"], inner, strict=True))

    replicated = nn.parallel.DistributedDataParallel(plain("titan")[0])
    assert paths(find_blocks(replicated)) == EXPECTED["titan"]
    assert paths(find_blocks(replicated, patterns=patterns("module.layers.1", "layers.2"))) == ["layers.1", "layers.2"]


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_flat_sharding_is_looked_through() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, _ = plain("titan")
    inner = list(model.layers.values())
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({PlainBlock}), device_id=torch.device("cpu"), use_orig_params=True
    )
    assert [(b.path, b.module) for b in find_blocks(sharded)] == list(zip(EXPECTED["titan"], inner, strict=True))


def test_clean_path_without_a_model_drops_what_only_wrappers_say() -> None:
    assert clean_path("_orig_mod.layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert clean_path("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module") == "layers.0"
    assert clean_path("base_model.model.model.layers.0") == "model.layers.0"
    assert clean_path("module.layers.0") == "module.layers.0"
    assert clean_path("_orig_mod") == clean_path("") == ""


def test_clean_path_with_a_model_knows_wrappers_by_class() -> None:
    model = nn.DataParallel(plain("titan")[0])
    assert clean_path("module.layers.0", model) == "layers.0"
    ordinary = nn.Module()
    ordinary.module = plain("titan")[0]
    assert clean_path("module.layers.0", ordinary) == "module.layers.0"
    assert paths(find_blocks(ordinary)) == ["module.layers.0", "module.layers.1", "module.layers.2"]


NAMES = st.sampled_from(["layers", "0", "_orig_mod", "_checkpoint_wrapped_module", "mlp", "module"])


@given(st.lists(NAMES, max_size=8))
def test_cleaning_twice_is_cleaning_once(segments: list[str]) -> None:
    once = clean_path(".".join(segments))
    assert clean_path(once) == once


# --- patterns


def test_patterns_override_what_would_be_found() -> None:
    model, _ = plain("staged")
    blocks = find_blocks(model, patterns=patterns("stages.*"))
    assert [(b.path, b.layer, b.stack, b.stack_size) for b in blocks] == [
        ("stages.0", 0, "stages", 2),
        ("stages.1", 1, "stages", 2),
    ]


def test_a_match_inside_a_match_is_left_out() -> None:
    model, _ = plain("titan")
    assert paths(find_blocks(model, patterns=patterns("layers.0.**", "layers.*.attention"))) == [
        "layers.0",
        "layers.1.attention",
        "layers.2.attention",
    ]


def test_the_empty_pattern_is_the_model_itself() -> None:
    model, _ = plain("titan")
    assert find_blocks(model, patterns=patterns("")) == (Block("", model, 0, "", 1, "language"),)


def test_pattern_that_matches_nothing() -> None:
    model, _ = plain("titan")
    with pytest.raises(ModelError) as caught:
        find_blocks(model, patterns=patterns("layers.*", "layer.*", "decoder.blocks.*"))
    assert str(caught.value) == (
        'regions.blocks: "layer.*" matches no module of TitanStyle\n'
        '    did you mean: "layers.*"\n'
        "    fix: patterns are matched against whole paths from the model down; * is one segment, ** any number\n"
        'regions.blocks: "decoder.blocks.*" matches no module of TitanStyle\n'
        "    legal: tok_embeddings, layers, layers.*, layers.*.attention_norm, layers.*.attention, "
        "layers.*.attention.qkv, layers.*.attention.proj, layers.*.ffn_norm, … (7 more)\n"
        "    fix: patterns are matched against whole paths from the model down; * is one segment, ** any number"
    )


def test_pattern_without_the_prefix_is_told_the_whole_path() -> None:
    model = nn.ModuleDict({"model": plain("titan")[0]})
    with pytest.raises(ModelError) as caught:
        find_blocks(model, patterns=patterns("layers.*"))
    assert str(caught.value) == (
        'regions.blocks: "layers.*" matches no module of ModuleDict\n'
        '    did you mean: "model.layers.*"\n'
        "    fix: patterns are matched against whole paths from the model down; * is one segment, ** any number"
    )


def test_pattern_that_matches_only_a_list() -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(plain("titan")[0], patterns=patterns("layers"))
    assert str(caught.value) == (
        'regions.blocks: "layers" matches only layers, a ModuleDict, which is not called itself\n'
        '    fix: write "layers.*" for its children'
    )


# --- nothing found, illegal arguments


def test_no_blocks_found() -> None:
    model = nn.Module()
    model.taps = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()])
    model.head = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    with pytest.raises(ModelError) as caught:
        find_blocks(model)
    assert str(caught.value) == (
        "Module: no transformer blocks were found in this model; its largest lists: "
        "taps (ModuleList of 2 Linear, 1 Tanh), head (Sequential of 1 LayerNorm, 1 Linear)\n"
        "    legal: a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; "
        "Hugging Face layers; a model that is one block\n"
        '    fix: name them in the policy or the config, for example regions.blocks: ["taps.*"]'
    )


def test_no_lists_at_all() -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(nn.Linear(2, 2))
    assert str(caught.value) == (
        "Linear: no transformer blocks were found in this model; it has no list of modules\n"
        "    legal: a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; "
        "Hugging Face layers; a model that is one block\n"
        '    fix: name them in the policy or the config, for example regions.blocks: ["path.to.layers.*"]'
    )


def test_illegal_granularity() -> None:
    with pytest.raises(ConfigError) as caught:
        find_blocks(plain("titan")[0], granularity="sub-module")
    assert str(caught.value) == (
        "granularity: 'sub-module' is not known\n    did you mean: submodule\n    legal: block, submodule"
    )


def test_not_a_module() -> None:
    with pytest.raises(ConfigError) as caught:
        find_blocks([PlainBlock()])  # type: ignore[arg-type]
    assert str(caught.value) == "model: list is no torch.nn.Module"


# --- scope


def test_scopes_are_words_or_lists_of_them() -> None:
    assert parse_scope("all") == {"language", "vision", "audio", "multimodal"}
    assert parse_scope("Vision") == {"vision"}
    assert parse_scope(["language", "AUDIO"]) == {"language", "audio"}


def test_illegal_scope() -> None:
    with pytest.raises(ConfigError) as caught:
        find_blocks(plain("titan")[0], scope=["visoin", "text"])
    assert str(caught.value) == (
        "scope: 'visoin' is no part of a model\n"
        "    did you mean: vision\n"
        "    legal: all, language, vision, audio, multimodal, or a list of them\n"
        "scope: 'text' is no part of a model\n"
        "    legal: all, language, vision, audio, multimodal, or a list of them"
    )


@pytest.mark.parametrize("scope", [[], 3, None, [None], ""])
def test_scope_of_a_wrong_kind(scope) -> None:
    with pytest.raises(ConfigError, match="is no part of a model"):
        parse_scope(scope)


def test_scope_that_the_model_has_not() -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(plain("titan")[0], scope="vision")
    assert str(caught.value) == (
        "TitanStyle: no block of this model is in scope vision; it has language (3 blocks)\n"
        "    fix: scope: language, or scope: all"
    )


@pytest.mark.parametrize(
    ("path", "tower"),
    [
        ("model.layers.0", "language"),
        ("vision_tower.encoder.layers.3", "vision"),
        ("model.visual.blocks.1.mlp", "vision"),
        ("model.visual.merger.mlp", "multimodal"),
        ("multi_modal_projector.linear_1", "multimodal"),
        ("model.embed_vision.embedding_projection", "multimodal"),
        ("audio_tower.conformer.2", "audio"),
        ("audio_embed.audio_encoder.layers.0", "audio"),
        ("qformer.encoder.layer.0", "multimodal"),
        ("vision_model.text_decoder.layers.0", "language"),
    ],
)
def test_names_tell_towers(path: str, tower: str) -> None:
    assert tower_of(path, nn.Module()) == tower
