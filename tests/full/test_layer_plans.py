"""Layer plans: which layers are regions of their own, and chunks of layers as one region.

Chunks are put on chains: containers whose forward is that of `nn.Sequential`. The oracle is the same chain without us.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sac
from sac.blocks.wrap import regions_of
from sac.config import parse_config
from sac.errors import ConfigError, ModelError, PolicyError, RegionError
from sac.memory_timeline import mark, measure_memory
from sac.policy.dump import dump_policy
from sac.policy.model import Chunks, Layers
from tests.full.ranks import run_ranks
from tests.model_zoo import tiny
from tests.semantics.blocks import FULL, LlamaLikeBlock, llama_stack, policy, save, tokens, with_dropout
from tests.semantics.recording import backward_ops, step, without_collector
from tests.semantics.test_invisible import flat
from tests.semantics.training import assert_same, built, train


class Chain(nn.Sequential):
    """A subclass that leaves forward alone."""


def chain(layers: int = 5, d: int = 32) -> nn.Sequential:
    return Chain(*(LlamaLikeBlock(d) for _ in range(layers)))


def dropping_chain(layers: int = 5) -> nn.Module:
    return with_dropout(chain(layers), 0.2)


class Between(nn.Module):
    """A model whose layers stand in a Sequential, with an embedding and a head beside it."""

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
    saving = [one.region.path for one in regions_of(model) if one.region.kind.table.rules]
    assert (paths(model), saving) == (["0", "1", "2"], ["0", "2"])


@pytest.mark.parametrize("layers", [{"last": 1}, {"fraction": 0.5}])
def test_one_block_does_not_tell_how_many_there_are(layers: Any) -> None:
    reason = "counts from the last layer" if "last" in layers else "speaks of a fraction of the layers"
    with pytest.raises(ModelError) as caught:
        sac.context_fn(policy(save("matmul", layers=layers)), module=tiny("llama")[0].model.layers[0])
    assert str(caught.value) == (
        f'policy.rules[0].layers: rule "rule-0" {reason}, and LlamaDecoderLayer does not tell how many there are '
        "(layer_idx, layer_id, layer_number, layer_index)\n    fix: use sac.apply on the whole model"
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
        f': layers is "uniform"\n{PLANS}\n    fix: say how many, as in {{uniform: 2}}',
    ),
    "fraction without a number": (
        "Fraction",
        f': layers is "Fraction"\n{PLANS}\n    fix: say how many, as in {{fraction: 0.5}}',
    ),
    "a bare fraction": (0.25, f": layers is 0.25\n{PLANS}\n    fix: write {{fraction: 0.25}}"),
    "sqrt as a key": (
        {"sqrt": True},
        f': layers has the key "sqrt"\n{PLANS}\n    fix: write the word alone: layers: sqrt',
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
    text = (
        ": {} asks for chunks of layers, which no policy can\n"
        f'    legal: {FORMS_LEGAL.replace("{", "{{").replace("}", "}}")}, or a list such as ["0-7", "12"]\n'
        "    fix: write it in the config value, under `layers`, with `mode: full`"
    )
    for written, where, what in (
        (policy(regions={"layers": layers}), "policy.regions.layers", "regions.layers"),
        (policy(save("matmul", layers=layers)), "policy.rules[0].layers", "layers"),
    ):
        with pytest.raises(PolicyError) as caught:
            sac.load_policy(written)
        assert str(caught.value) == where + text.format(what)


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
        "a chunk of layers is one region, and granularity submodule makes several of each layer\n"
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


# What chunks do

PLANS_RUN = ["sqrt", {"uniform": 2}, {"uniform": 9}]


@pytest.mark.parametrize("layers", PLANS_RUN, ids=str)
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


class Pair(nn.Module):
    """Takes and gives a pair, one of which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LlamaLikeBlock()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return self.inner(x * mask), mask


def test_what_is_passed_on_has_any_structure() -> None:
    gradients = []
    for value in ("none", full("sqrt", blocks=["*"])):
        model = sac.apply(built(lambda: nn.Sequential(*(Pair() for _ in range(4)))), value)
        (x,), mask = tokens(), torch.ones(2, 8, 1)
        x.requires_grad_()
        out, same = model(input=(x, mask))
        assert same is mask
        out.square().sum().backward()
        gradients.append({"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}})
    assert_same(*gradients)


def test_leading_frozen_layers() -> None:
    def build() -> nn.Module:
        model = chain(5)
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        return model

    reference = train(built(build), input_needs_grad=[False])
    assert_same(reference, train(sac.apply(built(build), full({"uniform": 2})), input_needs_grad=[False]))


def test_hooks_on_the_chain_run_once() -> None:
    calls: Counter[str] = Counter()

    def noting(name: str) -> Any:
        return lambda *_: calls.update([name])

    model = sac.apply(chain(4), full({"uniform": 2}))
    model.register_forward_pre_hook(noting("before the chain"))
    model.register_forward_hook(noting("after the chain"))
    model.register_full_backward_hook(noting("backward of the chain"))
    model[0].register_forward_hook(noting("a layer"))
    (x,) = tokens()
    model(x.requires_grad_()).sum().backward()
    assert calls == {"before the chain": 1, "after the chain": 1, "backward of the chain": 1, "a layer": 2}


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


def test_remove_gives_the_chain_back() -> None:
    model = chain()
    before = flat(model)
    with pytest.raises(ModelError) as caught:
        sac.apply(sac.apply(model, full("sqrt")), "full")
    assert str(caught.value) == (
        "0-2: sac.apply has been called on this model before\n    fix: call sac.remove(model) first"
    )
    assert flat(sac.remove(model)) == before


def test_no_grad_is_the_plain_forward() -> None:
    x = tokens()
    plain = built(chain)
    ours = sac.apply(built(chain), full("sqrt"))
    with torch.no_grad():
        assert torch.equal(ours(*x), plain(*x))
    assert all(one.region.stats.calls == 0 for one in regions_of(ours))


def test_chain_that_changed_its_length() -> None:
    model = sac.apply(Between(4), full({"uniform": 2}))
    model.layers.append(LlamaLikeBlock())
    with pytest.raises(RegionError) as caught:
        model(*tokens())
    assert str(caught.value) == (
        "layers: it had 4 children when sac.apply divided it into chunks, and has 5 now\n"
        "    fix: call sac.remove(model) before a model is changed, and sac.apply after it"
    )


def test_layer_that_was_exchanged_is_used() -> None:
    def build() -> nn.Module:
        model = chain(3)
        model[1] = nn.Identity()
        return model

    reference = train(built(build))
    model = sac.apply(built(lambda: chain(3)), full("sqrt"))
    model[1] = nn.Identity()
    model.load_state_dict(built(build).state_dict())
    assert_same(reference, train(model))


def sharded_chain(order: str, layers: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seen = []
    for value in ("none", full(layers)):
        model = built(chain)
        if order == "apply, shard":
            sac.apply(model, value)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if order == "shard, apply":
            sac.apply(model, value)
        torch.manual_seed(dist.get_rank())
        (x,) = tokens()
        for _ in range(2):
            model(x).square().sum().backward()
        seen.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    assert_same(*seen)


@pytest.mark.parametrize("layers", ["sqrt", {"uniform": 2}], ids=str)
@pytest.mark.parametrize("order", ["apply, shard", "shard, apply"])
def test_layers_sharded_by_fsdp(order: str, layers: Any) -> None:
    run_ranks(2, sharded_chain, order, layers)


class Routing(nn.Module):
    """A layer with an op that must not answer differently the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.mlp = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).topk(2)
        return x + self.mlp(x).scatter_add(-1, chosen, weights)


def test_routing_of_every_layer_in_a_chunk_is_kept() -> None:
    model = sac.apply(nn.Sequential(*(Routing() for _ in range(4))), full({"uniform": 2}, blocks=["*"]))
    again = backward_ops(model, (torch.randn(3, 8, requires_grad=True),))
    assert again.count("topk") == 0
    assert again.count("scatter_add") > 0
    (kind,) = sac.report(model).kinds
    assert (kind.count, kind.regions, [use.hits for use in kind.rules]) == (2, "0-1, … (x2)", [2])


# What chunks hold


def bytes_of(layers: int, value: Any) -> tuple[int, int]:
    """The bytes alive after a forward of equal layers, and at the peak of a step, beside weights and gradients."""
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
    (plain, plain_peak), (plain_4, plain_peak_4) = bytes_of(16, "none"), bytes_of(64, "none")
    assert 3.9 < plain_4 / plain < 4.1
    assert 3.6 < plain_peak_4 / plain_peak < 4.1
    assert (bytes_of(16, "full")[0], bytes_of(64, "full")[0]) == (16 * one, 64 * one)
    assert peak_4 < plain_peak_4 / 5


def test_gradients_of_many_layers() -> None:
    reference = train(built(lambda: dropping_chain(16)))
    assert_same(reference, train(sac.apply(built(lambda: dropping_chain(16)), full("sqrt"))))


def test_a_chunk_is_recomputed_once() -> None:
    """And as far as backward needs it: the last product of a chunk is not run again."""
    plain = backward_ops(chain(4), tokens()).ops["aten.mm.default"]
    ours = backward_ops(sac.apply(chain(4), full({"uniform": 2})), tokens()).ops["aten.mm.default"]
    singly = backward_ops(sac.apply(chain(4), "full"), tokens()).ops["aten.mm.default"]
    assert ours - plain == 4 * 7 - 2
    assert singly - plain == 4 * 7 - 4


def test_full_of_a_stack_is_not_changed_by_chains() -> None:
    model = sac.apply(llama_stack(), FULL)
    assert paths(model) == ["blocks.0", "blocks.1"]
