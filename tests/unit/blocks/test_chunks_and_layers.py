"""Layer plans: which layers are regions of their own or go into a chunk, and what is told of other values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.config import parse_config
from sac.errors import ConfigError, ModelError, PolicyError
from sac.policy.model import Chunks, Layers, dump_policy
from tests.promises.test_11_invisible import flat
from tests.support.blocks import LlamaLikeBlock, policy, save, tokens
from tests.support.chains import Between, chain, full, paths
from tests.support.model_zoo import tiny
from tests.support.recording import step

# Which layers


@given(st.integers(0, 300), st.floats(0, 1, exclude_min=True))
def test_a_fraction_is_that_many_layers_spread_evenly(count: int, fraction: float) -> None:
    chosen = sorted(Layers(fraction=fraction).select(count))
    assert len(chosen) == round(fraction * count)
    assert all(0 <= layer < count for layer in chosen)
    gaps = [later - earlier for earlier, later in itertools.pairwise([*chosen, count])]
    assert not chosen or (chosen[0] == 0 and max(gaps) - min(gaps) <= 1)


def test_half_of_the_layers_is_every_second() -> None:
    for count in (8, 24, 80):
        assert Layers(fraction=0.5).select(count) == Layers(every=2).select(count)
        assert Layers(fraction=1.0).select(count) == Layers().select(count)


@given(st.integers(0, 400), st.none() | st.integers(1, 500))
def test_chunks_hold_every_layer_once(count: int, size: int | None) -> None:
    spans = Chunks(size).spans(count)
    assert [layer for span in spans for layer in span] == list(range(count))
    sizes = [len(span) for span in spans]
    whole = size or math.ceil(math.sqrt(count))
    assert all(one == min(whole, count) for one in sizes[:-1])
    assert not sizes or 1 <= sizes[-1] <= whole


FORMS: dict[str, tuple[Any, list[str]]] = {
    "block": ({"block": 2}, ["0", "1"]),
    "fraction": ({"fraction": 0.5}, ["0", "2"]),
    "all of it": ({"fraction": 1}, ["0", "1", "2", "3", "4"]),
    "sqrt": ("sqrt", ["0-2", "3-4"]),
    "sqrt in capitals": (" SQRT ", ["0-2", "3-4"]),
    "uniform": ({"uniform": 2}, ["0-1", "2-3", "4"]),
    "chunks of one layer": ({"uniform": 1}, ["0", "1", "2", "3", "4"]),
    "one chunk": ({"uniform": 9}, ["0-4"]),
}


@pytest.mark.parametrize(("layers", "expected"), FORMS.values(), ids=FORMS.keys())
def test_forms(layers: Any, expected: list[str]) -> None:
    assert paths(sac.apply(chain(), full(layers))) == expected
    assert paths(sac.apply(Between(), full(layers))) == [f"layers.{name}" for name in expected]


def test_chunks_of_one_layer_are_all_layers() -> None:
    """In a ModuleList, too."""
    assert parse_config(full({"uniform": 1})) == parse_config("full")
    assert paths(sac.apply(tiny("llama")[0], full({"uniform": 1}))) == ["model.layers.0", "model.layers.1"]


def test_policies_take_fractions_and_blocks() -> None:
    written = policy(save("matmul", layers={"fraction": 0.5}), regions={"layers": {"block": 3}})
    loaded = sac.load_policy(written)
    assert loaded.layers == Layers(first=3)
    assert loaded.rules[0].layers == Layers(fraction=0.5)
    assert "layers: {fraction: 0.5}" in dump_policy(loaded)
    model = sac.apply(chain(4), {"mode": "selective", "policy": written})
    step(model, tokens())
    saving = [one.region.path for one in regions_of(model) if one.region.group.table.rules]
    assert (paths(model), saving) == (["0", "1", "2"], ["0", "2"])


@pytest.mark.parametrize("layers", [{"last": 1}, {"fraction": 0.5}])
def test_one_block_does_not_tell_how_many_there_are(layers: Any) -> None:
    reason = "counts from the last layer" if "last" in layers else "selects a fraction of the layers"
    with pytest.raises(ModelError) as caught:
        sac.context_fn(policy(save("matmul", layers=layers)), module=tiny("llama")[0].model.layers[0])
    assert str(caught.value) == (
        f'policy.rules[0].layers: rule "rule-0" {reason}, but LlamaDecoderLayer does not say how many layers there '
        "are\n    fix: use sac.apply on the whole model"
    )


# What is told of others

FORMS_LEGAL = "all, {first: n}, {block: n}, {last: n}, {every: k, offset: j}, {fraction: f}"
PLANS = f'    legal: {FORMS_LEGAL}, a list such as ["0-7", "12"], or chunks of layers: sqrt, {{uniform: n}}'
SHARE = "    legal: a number above 0, at most 1"
WHOLE = "    legal: a whole number, 1 or more"
ILLEGAL: dict[str, tuple[Any, str]] = {
    "sqrt misspelled": ("sqr", f': layers is "sqr"\n    did you mean: sqrt\n{PLANS}'),
    "a form without a number": (
        "uniform",
        f': layers is "uniform"\n{PLANS}',
    ),
    "fraction without a number": (
        "Fraction",
        f': layers is "Fraction"\n{PLANS}',
    ),
    "a bare fraction": (0.25, f": layers is 0.25\n{PLANS}"),
    "sqrt as a key": (
        {"sqrt": True},
        '.sqrt: unknown key "sqrt" in layers\n    legal: first, block, last, every, offset, fraction, uniform\n'
        "    fix: remove it",
    ),
    "uniform misspelled": (
        {"unifrom": 2},
        '.unifrom: unknown key "unifrom" in layers\n    did you mean: uniform\n'
        '    legal: first, block, last, every, offset, fraction, uniform\n    fix: write "uniform"',
    ),
    "two forms": (
        {"uniform": 2, "block": 3},
        f": layers has uniform and block\n{PLANS}\n    fix: choose one of the forms",
    ),
    "an offset of chunks": (
        {"uniform": 2, "offset": 1},
        f": layers has uniform and offset\n{PLANS}\n    fix: choose one of the forms",
    ),
    "no layers in a chunk": ({"uniform": 0}, f".uniform: layers.uniform is 0\n{WHOLE}"),
    "half a layer in a chunk": ({"uniform": 2.5}, f".uniform: layers.uniform is 2.5\n{WHOLE}"),
    "nothing": ({"fraction": 0}, f".fraction: layers.fraction is 0\n{SHARE}"),
    "more than all": ({"fraction": 1.5}, f".fraction: layers.fraction is 1.5\n{SHARE}"),
    "less than nothing": ({"fraction": -0.5}, f".fraction: layers.fraction is -0.5\n{SHARE}"),
    "no number": ({"fraction": float("nan")}, f".fraction: layers.fraction is nan\n{SHARE}"),
    "a boolean": ({"fraction": True}, f".fraction: layers.fraction is true\n{SHARE}"),
    "in quotes": ({"fraction": "5e-1"}, f'.fraction: layers.fraction is "5e-1"\n{SHARE}\n    fix: remove the quotes'),
    "a list of fractions": ({"fraction": [0.5]}, f".fraction: layers.fraction is a list\n{SHARE}"),
}


@pytest.mark.parametrize(("layers", "text"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_layers(layers: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(full(layers))
    assert str(caught.value) == f"activation_checkpointing.layers{text}"


@pytest.mark.parametrize("layers", ["sqrt", {"uniform": 1}, {"uniform": 2}])
def test_chunks_are_not_for_policies(layers: Any) -> None:
    fix = "write chunks of layers in the config value, under `layers`, with `mode: full`"
    for written in (policy(regions={"layers": layers}), policy(save("matmul", layers=layers))):
        with pytest.raises(PolicyError) as caught:
            sac.load_policy(written)
        assert caught.value.problems[0].fix == fix


def test_policy_does_not_offer_chunks() -> None:
    with pytest.raises(PolicyError) as caught:
        sac.load_policy(policy(save("matmul", layers="sqr")))
    assert str(caught.value) == (
        f'policy.rules[0].layers: layers is "sqr"\n    legal: {FORMS_LEGAL}, or a list such as ["0-7", "12"]'
    )


MISPLACED: dict[str, tuple[dict[str, Any], str]] = {
    "selective": (
        {"mode": "selective", "layers": "sqrt"},
        "mode selective decides op by op within one layer, and a chunk of layers is one region\n"
        "    fix: write `mode: full`, or choose layers: {every: k}, {fraction: f}, …",
    ),
    "submodules": (
        {"mode": "full", "layers": {"uniform": 2}, "granularity": "SubModule"},
        "a chunk of layers is one region, but granularity submodule makes several regions of each layer\n"
        "    fix: leave one of the two out",
    ),
}


@pytest.mark.parametrize(("value", "text"), MISPLACED.values(), ids=MISPLACED.keys())
def test_chunks_in_the_wrong_company(value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(value)
    assert str(caught.value) == f"activation_checkpointing.layers: {text}"


class OwnLoop(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


class OwnOrder(nn.Sequential):
    def __iter__(self) -> Any:
        return reversed(list(self._modules.values()))


class Holder(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def patched() -> nn.Module:
    model = chain(3)
    model.forward = model.forward
    return model


FIX = (
    "    legal: an nn.Sequential, or a subclass that leaves forward alone\n"
    "    fix: choose single layers ({every: k}, {fraction: f}, {first: n}), build them as an nn.Sequential, or call "
    "sac.checkpoint around each chunk in the model's own loop"
)
NO_CHAINS: dict[str, tuple[Any, str]] = {
    "ModuleList": (
        lambda: Holder(nn.ModuleList(LlamaLikeBlock() for _ in range(3))),
        "layers (ModuleList): its layers cannot be put together in chunks: Holder calls them one by one",
    ),
    "ModuleDict": (
        lambda: Holder(nn.ModuleDict({str(i): LlamaLikeBlock() for i in range(3)})),
        "layers (ModuleDict): its layers cannot be put together in chunks: Holder calls them one by one",
    ),
    "bare ModuleList": (
        lambda: nn.ModuleList(LlamaLikeBlock() for _ in range(3)),
        "the model (ModuleList): its layers cannot be put together in chunks: they are called one by one",
    ),
    "own forward": (
        lambda: OwnLoop(*(LlamaLikeBlock() for _ in range(3))),
        "the model (OwnLoop): its layers cannot be put together in chunks: OwnLoop has a forward of its own, not that "
        "of nn.Sequential",
    ),
    "one block": (
        lambda: LlamaLikeBlock(),
        "the model (LlamaLikeBlock): its layers cannot be put together in chunks: LlamaLikeBlock has a forward of its "
        "own, not that of nn.Sequential",
    ),
    "Hugging Face": (
        lambda: tiny("llama")[0],
        "model.layers (ModuleList): its layers cannot be put together in chunks: LlamaModel calls them one by one",
    ),
}


@pytest.mark.parametrize(("build", "text"), NO_CHAINS.values(), ids=NO_CHAINS.keys())
def test_layers_that_are_called_one_by_one(build: Any, text: str) -> None:
    model = build()
    before = flat(model)
    with pytest.raises(ModelError) as caught:
        sac.apply(model, full({"uniform": 2}))
    assert str(caught.value) == f"{text}\n{FIX}"
    assert flat(model) == before


@pytest.mark.parametrize("build", [patched, lambda: OwnOrder(*(LlamaLikeBlock() for _ in range(3)))])
def test_chains_with_another_loop_are_told_apart(build: Any) -> None:
    model = build()
    with pytest.raises(ModelError, match="its layers cannot be put together in chunks"):
        sac.apply(model, full("sqrt"))
