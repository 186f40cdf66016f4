"""Which layers are regions of their own or go into a chunk of layers, and what chunks do and hold.

Chunks are put on chains: containers whose forward is that of `nn.Sequential`. The oracle is the same chain without us.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.config import parse_config
from sac.errors import ConfigError, ModelError, PolicyError
from sac.memory_timeline import mark, measure_memory
from sac.policy.model import Layers
from tests.promises.test_11_invisible import flat
from tests.support.blocks import LlamaLikeBlock, policy, save, tokens, with_dropout
from tests.support.model_zoo import tiny
from tests.support.recording import backward_ops, step, without_collector
from tests.support.training import assert_same, built, train


class Chain(nn.Sequential):
    """A subclass that leaves forward alone."""


def chain(layers: int = 5, d: int = 32) -> nn.Sequential:
    return Chain(*(LlamaLikeBlock(d) for _ in range(layers)))


def dropping_chain(layers: int = 5) -> nn.Module:
    return with_dropout(chain(layers), 0.2)


class Between(nn.Module):
    """A model whose layers stand in a Sequential, with an embedding and a head around it."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.layers = nn.Sequential(*(LlamaLikeBlock() for _ in range(layers)))
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def full(layers: Any, **more: Any) -> dict[str, Any]:
    return {"mode": "full", "layers": layers, **more}


def paths(model: nn.Module) -> list[str]:
    return [one.region.path for one in regions_of(model)]


@pytest.mark.parametrize("layers", ["sqrt", {"uniform": 2}, {"uniform": 9}], ids=str)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["frame", "reentrant"])
def test_gradients_are_the_same(layers: Any, use_reentrant: bool) -> None:
    reference = train(built(dropping_chain), steps=2)
    model = sac.apply(built(dropping_chain), full(layers, use_reentrant=use_reentrant))
    assert_same(reference, train(model, steps=2))


def mixed() -> nn.Sequential:
    """Things before, between and after the layers; one of these comes twice, one block is a Sequential itself."""
    torch.manual_seed(0)
    twice, inner = LlamaLikeBlock(), nn.Sequential(LlamaLikeBlock(), nn.Dropout(0.1))
    parts = [nn.Linear(32, 32), twice, nn.Tanh(), LlamaLikeBlock(), twice, LlamaLikeBlock(), inner, nn.Linear(32, 3)]
    names = ["stem", "a", "act", "b", "again", "c", "d", "head"]
    return nn.Sequential(OrderedDict(zip(names, parts, strict=True)))


def test_what_stands_between_the_layers() -> None:
    reference = train(built(mixed))
    model = sac.apply(built(mixed), full({"uniform": 2}, blocks=["{a,b,c,d,again}"]))
    assert paths(model) == ["a-b", "again-c", "d"]
    assert_same(reference, train(model))


def test_copies_and_names() -> None:
    reference, plain = train(built(dropping_chain)), built(dropping_chain)
    model = sac.apply(built(dropping_chain), full("sqrt"))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert type(model) is Chain
    assert isinstance(model[1:3], Chain)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for parameter in twin.parameters():
            assert all(parameter is not own for own in model.parameters())
        assert_same(reference, train(twin))
    assert_same(reference, train(model))


def bytes_of(layers: int, value: Any) -> tuple[int, int]:
    """The bytes alive after a forward of equal layers, and at the peak of a step, without weights and gradients."""
    torch.manual_seed(0)
    model = sac.apply(nn.Sequential(*(LlamaLikeBlock() for _ in range(layers))), value)
    (x,) = tokens(batch=4, length=32)
    x.requires_grad_()
    for _ in range(2):
        step(model, (x,))
    for parameter in [*model.parameters(), x]:
        parameter.grad = torch.zeros_like(parameter)

    def one_step() -> None:
        out = model(x)
        mark("forward is over")
        out.sum().backward()

    with without_collector():
        timeline = measure_memory(one_step)
    return timeline.at("forward is over"), timeline.peak_bytes


def test_sqrt_holds_the_root_of_what_all_layers_hold() -> None:
    """From 16 to 64 layers everything that grows with their number is 4 times as much; with `sqrt`, twice."""
    one = 4 * 32 * 32 * 4 + torch.get_rng_state().nbytes  # what lies between two layers, and the random state there
    (held, peak), (held_4, peak_4) = bytes_of(16, full("sqrt")), bytes_of(64, full("sqrt"))
    assert (held, held_4) == (4 * one, 8 * one)  # the end of each chunk; the first input is the caller's
    assert 1.8 < peak_4 / peak < 2.2
    assert bytes_of(64, "full")[0] == 64 * one
    assert peak_4 < bytes_of(64, "none")[1] / 5


def test_a_chunk_is_recomputed_once() -> None:
    """And as far as backward needs it: the last product of a chunk is not run again."""
    plain = backward_ops(chain(4), tokens()).ops["aten.mm.default"]
    ours = backward_ops(sac.apply(chain(4), full({"uniform": 2})), tokens()).ops["aten.mm.default"]
    singly = backward_ops(sac.apply(chain(4), "full"), tokens()).ops["aten.mm.default"]
    assert ours - plain == 4 * 7 - 2
    assert singly - plain == 4 * 7 - 4


# Which layers


@given(st.integers(0, 300), st.floats(0, 1, exclude_min=True))
def test_a_fraction_is_that_many_layers_spread_evenly(count: int, fraction: float) -> None:
    chosen = [layer for layer in range(count) if Layers("fraction", fraction).matches(layer, count)]
    assert len(chosen) == round(fraction * count)
    assert all(0 <= layer < count for layer in chosen)
    gaps = [later - earlier for earlier, later in itertools.pairwise([*chosen, count])]
    assert not chosen or (chosen[0] == 0 and max(gaps) - min(gaps) <= 1)


FORMS: dict[str, tuple[Any, list[str]]] = {
    "fraction": ({"fraction": 0.5}, ["0", "2"]),
    "all of it": ({"fraction": 1}, ["0", "1", "2", "3", "4"]),
    "sqrt": ("sqrt", ["0-2", "3-4"]),
    "sqrt in capitals": (" SQRT ", ["0-2", "3-4"]),
    "uniform": ({"uniform": 2}, ["0-1", "2-3", "4"]),
    "one chunk": ({"uniform": 9}, ["0-4"]),
}


@pytest.mark.parametrize(("layers", "expected"), FORMS.values(), ids=FORMS.keys())
def test_forms(layers: Any, expected: list[str]) -> None:
    assert paths(sac.apply(chain(), full(layers))) == expected
    assert paths(sac.apply(Between(), full(layers))) == [f"layers.{name}" for name in expected]


def test_policies_take_fractions_and_blocks() -> None:
    written = policy(save("matmul", layers={"fraction": 0.5}), regions={"layers": {"first": 3}})
    loaded = sac.load_policy(written)
    assert loaded.layers == Layers("first", 3)
    assert loaded.rules[0].layers == Layers("fraction", 0.5)
    model = sac.apply(chain(4), {"mode": "selective", "policy": written})
    step(model, tokens())
    saving = [one.region.path for one in regions_of(model) if one.region.group.table.rules]
    assert (paths(model), saving) == (["0", "1", "2"], ["0", "2"])


# What is told of others

ILLEGAL: dict[str, tuple[Any, str]] = {
    # name: (the layers, what is told of them and the fix)
    "sqrt misspelled": ("sqr", 'layers is "sqr"\n.*did you mean: sqrt'),
    "a bare fraction": (0.25, r"layers is 0\.25"),
    "sqrt as a key": ({"sqrt": True}, 'unknown key "sqrt" in layers'),
    "uniform misspelled": ({"unifrom": 2}, 'unknown key "unifrom" in layers\n.*did you mean: uniform'),
    "two forms": ({"uniform": 2, "first": 3}, "layers has uniform and first"),
    "an offset of chunks": ({"uniform": 2, "offset": 1}, "layers has uniform and offset"),
    "half a layer in a chunk": ({"uniform": 2.5}, r"layers\.uniform is 2\.5\n.*a whole number, 1 or more"),
    "nothing": ({"fraction": 0}, r"layers\.fraction is 0\n.*above 0, at most 1"),
}


@pytest.mark.parametrize(("layers", "text"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_layers(layers: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config(full(layers))


@pytest.mark.parametrize("layers", ["sqrt", {"uniform": 1}])
def test_chunks_are_not_for_policies(layers: Any) -> None:
    for written in (policy(regions={"layers": layers}), policy(save("matmul", layers=layers))):
        with pytest.raises(PolicyError, match="write chunks of layers in the config value"):
            sac.load_policy(written)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"mode": "selective", "layers": "sqrt"}, "mode selective decides op by op within one layer"),
        (full({"uniform": 2}, granularity="SubModule"), "granularity submodule makes several regions of each layer"),
    ],
)
def test_chunks_in_the_wrong_company(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config(value)


class OwnLoop(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x)
        return x


def patched() -> nn.Module:
    model = chain(3)
    model.forward = model.forward
    return model


NO_CHAINS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a list": (lambda: nn.ModuleList(LlamaLikeBlock() for _ in range(3)), r"the model \(ModuleList\)"),
    "own forward": (lambda: OwnLoop(*(LlamaLikeBlock() for _ in range(3))), r"the model \(OwnLoop\)"),
    "exchanged forward": (patched, r"the model \(Chain\)"),
    "Hugging Face": (lambda: tiny("llama")[0], r"model\.layers \(ModuleList\)"),
}


@pytest.mark.parametrize(("build", "text"), NO_CHAINS.values(), ids=NO_CHAINS.keys())
def test_layers_that_are_called_one_by_one(build: Callable[[], nn.Module], text: str) -> None:
    model = build()
    before = flat(model)
    with pytest.raises(ModelError, match=text + ": its layers cannot(.*\n)*.*fix: choose single layers"):
        sac.apply(model, full({"uniform": 2}))
    assert flat(model) == before
