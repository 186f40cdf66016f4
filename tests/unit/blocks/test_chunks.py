"""Chunks of layers as one region: what they do and what they hold.

Chunks are put on chains: containers whose forward is that of `nn.Sequential`. The oracle is the same chain without us.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sac
from sac.blocks.install import regions_of
from sac.errors import ModelError, RegionError
from sac.memory_timeline import mark, measure_memory
from tests.promises.test_11_invisible import flat
from tests.support.blocks import FULL, LlamaLikeBlock, llama_stack, tokens
from tests.support.chains import Between, Chain, chain, dropping_chain, full, paths
from tests.support.ranks import run_ranks
from tests.support.recording import backward_ops, step, without_collector
from tests.support.training import assert_same, built, train

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


def sharded_chain(order: str, layers: Any) -> list[dict[str, Tensor]]:
    """The gradients without us and with us."""
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
    return seen


@pytest.mark.parametrize("layers", ["sqrt", {"uniform": 2}], ids=str)
@pytest.mark.parametrize("order", ["apply, shard", "shard, apply"])
def test_layers_sharded_by_fsdp(order: str, layers: Any) -> None:
    for plain, ours in run_ranks(2, sharded_chain, order, layers):
        assert_same(plain, ours)


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
