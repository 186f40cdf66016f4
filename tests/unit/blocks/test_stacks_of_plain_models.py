"""Blocks of plain torch models: what is one, what is none, how layers are counted, and blocks by patterns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import sac
from sac.blocks.find import Block, find_blocks, submodules
from sac.policy.patterns import PathPattern
from tests.support.plain_zoo import DIM, Attention, Experts, Llama3Model, SwiGLU, plain
from tests.support.plain_zoo import Block as PlainBlock

EXPECTED = {
    "titan": ["layers.0", "layers.1", "layers.2"],
    "VisionTransformer": ["blocks.0", "blocks.1"],
    "DiT": ["blocks.0", "blocks.1"],
    "staged": ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"],
    "sequential": ["0", "1", "2"],
    "experts": ["0", "1"],
    "block": [""],
    "transformer_encoder": ["layers.0", "layers.1"],
    "transformer_decoder": ["layers.0", "layers.1"],
}


def paths(blocks: tuple[Block, ...]) -> list[str]:
    return [block.path for block in blocks]


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks_of_plain_models_are_called_one_after_the_other(name: str) -> None:
    model, inputs = plain(name)
    blocks = find_blocks(model)
    assert paths(blocks) == EXPECTED[name]
    called: list[nn.Module] = []
    for block in blocks:
        block.module.register_forward_hook(lambda module, *_: called.append(module))
    model(**inputs)
    assert called == [model.get_submodule(path) for path in EXPECTED[name]]


class Holding(nn.Module):
    """Calls its children, which have names of its own, one after the other."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class Unit(Holding):
    """One convolution, its norm and its activation."""

    def __init__(self) -> None:
        super().__init__(convolution=nn.Conv2d(4, 4, 3), normalization=nn.BatchNorm2d(4), activation=nn.ReLU())


class Bottleneck(Holding):
    def __init__(self) -> None:
        super().__init__(layer=nn.Sequential(Unit(), Unit(), Unit()))


class NormedResidual(Holding):
    """As in EnCodec: two convolutions in a list, each with its weight in two factors."""

    def __init__(self) -> None:
        steps = [(nn.ELU(), nn.Sequential(weight_norm(nn.Conv1d(4, 4, 1)), nn.Identity())) for _ in range(2)]
        super().__init__(block=nn.ModuleList(part for step in steps for part in step))


def stages(part: type[nn.Module], depth: int, **attributes: object) -> nn.Module:
    """Two stages of as many parts each."""
    model = Holding(stages=nn.ModuleList(Holding(layers=nn.Sequential(*(part() for _ in range(depth)))) for _ in "12"))
    vars(model).update(attributes)
    return model


def in_stages(depth: int) -> list[tuple[str, int, int]]:
    return [(f"stages.{stage}.layers.{layer}", layer, depth) for stage in range(2) for layer in range(depth)]


def mlps(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(count)]


class Cell(Holding):
    def __init__(self) -> None:
        super().__init__(map=nn.Linear(4, 4))


def declared() -> nn.Module:
    """A model that names the class of its layers, as remote code for Hugging Face does."""
    model = Holding(cells=nn.ModuleList([Cell(), Cell()]), layers=nn.ModuleList(mlps(2)))
    vars(model).update(_no_split_modules=("Cell",))
    return model


def with_heads() -> nn.Module:
    model = Llama3Model()
    model.heads = nn.ModuleList(mlps(3))
    return model


FOUND: dict[str, tuple[Callable[[], nn.Module], list[tuple[str, int, int]]]] = {
    # name: (the model, the path, the number of the layer and the size of its stack for each block)
    "a pipeline stage": (lambda: Llama3Model(range(2, 4), n_layers=6), [("layers.2", 2, 6), ("layers.3", 3, 6)]),
    "placeholders": (
        lambda: Holding(layers=nn.ModuleList([nn.Identity(), nn.Identity(), PlainBlock(), PlainBlock()])),
        [("layers.2", 2, 4), ("layers.3", 3, 4)],
    ),
    "a stem and a head around": (
        lambda: nn.Sequential(nn.Embedding(8, DIM), nn.LayerNorm(DIM), PlainBlock(), PlainBlock(), nn.Linear(DIM, 4)),
        [("2", 0, 2), ("3", 1, 2)],
    ),
    "residual blocks without attention": (
        lambda: nn.Sequential(*(Holding(norm=nn.LayerNorm(DIM), mlp=SwiGLU()) for _ in range(2))),
        [("0", 0, 2), ("1", 1, 2)],
    ),
    "nothing but mlps": (lambda: nn.Sequential(*mlps(2)), [("0", 0, 2), ("1", 1, 2)]),
    "declared names and others": (
        declared,
        [(f"{stack}.{i}", i, 2) for stack in ("cells", "layers") for i in range(2)],
    ),
    "heads beside a stack": (with_heads, [(f"layers.{i}", i, 3) for i in range(3)]),
    "one block in a list": (lambda: nn.ModuleList([PlainBlock()]), [("0", 0, 1)]),
    "residual convolutions": (lambda: stages(Bottleneck, 2), in_stages(2)),
    "residual convolutions in a list": (lambda: stages(NormedResidual, 2), in_stages(2)),
    "long lists of single convolutions": (lambda: stages(Unit, 8), in_stages(8)),
    "convolutions that devices do not split": (  # as ResNet of Hugging Face has it
        lambda: stages(Bottleneck, 2, _no_split_modules=["Unit"]),
        in_stages(2),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_a_block_and_which_layer_it_is(name: str) -> None:
    build, expected = FOUND[name]
    assert [(block.path, block.layer, block.stack_size) for block in find_blocks(build())] == expected


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


def test_shared_block_is_listed_once() -> None:
    shared = PlainBlock()
    model = nn.Sequential(shared, PlainBlock(), shared)
    assert paths(find_blocks(model)) == ["0", "1"]
    for pattern, found in (("*", ["0", "1"]), ("2", ["2"])):
        assert paths(find_blocks(model, patterns=patterns(pattern))) == found


def test_submodules_are_what_holds_more_than_a_norm_or_one_map() -> None:
    model, _ = plain("titan")
    found = [(b.path, b.layer, b.stack) for b in submodules(find_blocks(model))]
    assert found == [(f"layers.{i}.{part}", i, "layers") for i in range(3) for part in ("attention", "feed_forward")]
    listed = nn.Sequential(*(Holding(layer=nn.ModuleList([Attention(), SwiGLU()])) for _ in range(2)))
    assert paths(submodules(find_blocks(listed))) == ["0.layer.0", "0.layer.1", "1.layer.0", "1.layer.1"]
    assert paths(submodules(find_blocks(nn.Sequential(*mlps(2))))) == ["0", "1"]


# -- Blocks by patterns, and every way of finding none


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
    "no blocks": (without_blocks, [], r'no transformer blocks were found(.*\n)*.*blocks: \["taps\.\*"\]'),
    "no lists": (lambda: nn.Linear(2, 2), [], "Linear: no transformer blocks were found"),
    "no module": (lambda: [PlainBlock()], [], "model: list is not a torch.nn.Module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_way_of_finding_none_is_told(name: str) -> None:
    build, chosen, text = REFUSED[name]
    with pytest.raises(sac.SacError, match=text):
        find_blocks(build(), patterns=patterns(*chosen) or None)
