"""Blocks of plain torch models: what is one, what is none, and how layers are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac.blocks.find import Block, divided, find_blocks, submodules
from sac.policy.patterns import PathPattern
from tests.support.plain_zoo import DIM, PLAIN, Attention, Experts, Staged, SwiGLU, TitanStyle, plain
from tests.support.plain_zoo import Block as PlainBlock

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
    assert find_blocks(block) == (Block("", block, 0, "", 1),)


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
    parts = paths(divided(find_blocks(model), submodules))
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
    found = [(b.path, b.layer, b.stack) for b in divided(find_blocks(model), submodules)]
    assert found == [(f"layers.{i}.{part}", i, "layers") for i in range(3) for part in ("attention", "feed_forward")]


def test_block_without_such_parts_stays_whole() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(2)))
    assert paths(divided(find_blocks(model), submodules)) == ["0", "1"]


def test_shared_submodule_is_listed_once() -> None:
    model, _ = plain("sequential")
    model[2].attention = model[0].attention
    assert paths(divided(find_blocks(model), submodules)) == [
        "0.attention",
        "0.feed_forward",
        "1.attention",
        "1.feed_forward",
        "2.feed_forward",
    ]
