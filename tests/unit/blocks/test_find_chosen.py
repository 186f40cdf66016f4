"""Blocks by patterns, and every way of finding none."""

from __future__ import annotations

import pytest
from torch import nn

from sac.blocks.find import Block, find_blocks
from sac.errors import ConfigError, ModelError
from sac.policy.patterns import PathPattern
from tests.support.plain_zoo import Block as PlainBlock
from tests.support.plain_zoo import plain


def paths(blocks: tuple[Block, ...]) -> list[str]:
    return [block.path for block in blocks]


def patterns(*texts: str) -> list[PathPattern]:
    return [PathPattern.parse(text) for text in texts]


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
    assert find_blocks(model, patterns=patterns("")) == (Block("", model, 0, "", 1),)


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
        '    fix: name them, for example blocks: ["taps.*"], in the config, or under regions: in the policy'
    )


def test_no_lists_at_all() -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(nn.Linear(2, 2))
    assert str(caught.value) == (
        "Linear: no transformer blocks were found in this model; it has no list of modules\n"
        "    legal: a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; "
        "Hugging Face layers; a model that is one block\n"
        '    fix: name them, for example blocks: ["path.to.layers.*"], in the config, or under regions: in the policy'
    )


def test_not_a_module() -> None:
    with pytest.raises(ConfigError) as caught:
        find_blocks([PlainBlock()])  # type: ignore[arg-type]
    assert str(caught.value) == "model: list is not a torch.nn.Module"
