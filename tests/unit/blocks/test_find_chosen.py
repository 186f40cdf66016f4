"""Blocks by patterns, and every way of finding none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import sac
from sac.blocks.find import Block, find_blocks
from sac.policy.patterns import PathPattern
from tests.support.plain_zoo import Block as PlainBlock
from tests.support.plain_zoo import plain


def paths(blocks: tuple[Block, ...]) -> list[str]:
    return [block.path for block in blocks]


def patterns(*texts: str) -> list[PathPattern]:
    return [PathPattern.parse(text) for text in texts]


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


def without_blocks() -> nn.Module:
    model = nn.Module()
    model.taps = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh()])
    return model


def titan() -> nn.Module:
    return plain("titan")[0]


REFUSED: dict[str, tuple[Callable[[], Any], list[str], str]] = {
    # name: (the model, the patterns, what is told)
    "nearly": (titan, ["layers.*", "layer.*"], r'"layer\.\*" matches no module of Llama3Model\n.*mean: "layers\.\*"'),
    "nothing alike": (titan, ["decoder.blocks.*"], r"legal: tok_embeddings, layers, layers\.\*, .* … \(9 more\)"),
    "no prefix": (lambda: nn.ModuleDict({"model": titan()}), ["layers.*"], r'did you mean: "model\.layers\.\*"'),
    "a list": (titan, ["layers"], r'ModuleDict, which is not called itself\n.*write "layers\.\*" for its children'),
    "no blocks": (without_blocks, [], r'taps \(ModuleList of 2 Linear, 1 Tanh\)(.*\n)*.*blocks: \["taps\.\*"\]'),
    "no lists": (lambda: nn.Linear(2, 2), [], r"Linear: no transformer blocks were found .* has no list of modules\n"),
    "no module": (lambda: [PlainBlock()], [], "model: list is not a torch.nn.Module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_way_of_finding_none_is_told(name: str) -> None:
    build, chosen, text = REFUSED[name]
    with pytest.raises(sac.SacError, match=text):
        find_blocks(build(), patterns=patterns(*chosen) or None)
