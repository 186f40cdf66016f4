"""`sac.apply` with the keys of the full path: they hold in mode full, in mode selective and for chunks of layers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.errors import ConfigError, RegionError
from sac.full import RngTracker
from tests.promises.test_11_invisible import flat
from tests.support.blocks import FULL, Stack, llama_stack, policy, save, selective, tokens, with_dropout
from tests.support.ranks import run_ranks
from tests.support.recording import step
from tests.support.stateful import StateOf
from tests.support.training import assert_same, built, train

PRODUCTS = selective(policy(save("matmul", module="mlp.**")))
CHUNKS = {"mode": "full", "layers": {"uniform": 2}}
STORES: dict[str, dict[str, Any]] = {
    "host": {"store": "host"},
    "all of them": {"store": "host", "keep": "all"},
    "contiguous": {"store": "contiguous", "num_checkpoints": 3},
    "both": {"store": "contiguous+host", "num_checkpoints": 3},
}


def dropping_stack() -> nn.Module:
    return with_dropout(llama_stack(3), 0.2, attention=0.1)


def dropping_chain() -> nn.Module:
    return nn.Sequential(*dropping_stack().blocks)


WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "full": (FULL, dropping_stack),
    "selective": (PRODUCTS, dropping_stack),
    "chunks": (CHUNKS, dropping_chain),
}


def input_bytes(model: nn.Module) -> list[tuple[int, int]]:
    """What each region holds of its inputs: on the device, and on the host for one."""
    return [(one.region.stats.input_bytes, one.region.stats.input_host_bytes) for one in regions_of(model)]


@pytest.mark.parametrize("keys", STORES.values(), ids=STORES.keys())
@pytest.mark.parametrize(("value", "build"), WAYS.values(), ids=WAYS.keys())
def test_stores(value: dict[str, Any], build: Any, keys: dict[str, Any]) -> None:
    reference = train(built(build), steps=3)
    model = sac.apply(built(build), {**value, **keys})
    assert_same(reference, train(model, steps=3))
    assert sum(held for held, _ in input_bytes(model)) > 0


@pytest.mark.parametrize(("value", "build"), WAYS.values(), ids=WAYS.keys())
def test_input_may_be_written_to_after_the_forward(value: dict[str, Any], build: Any) -> None:
    gradients = []
    for keys in (None, {"store": "host"}, {}):
        model = built(build)
        if keys is not None:
            sac.apply(model, {**value, **keys})
        torch.manual_seed(0)
        (x,) = tokens()
        out = model(x).sum()
        if keys is not None:
            x.zero_()
        if keys == {}:
            with pytest.raises(RegionError, match="was changed in place after the forward"):
                out.backward()
            return
        out.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert_same(gradients[0], gradients[-1])


def test_switches() -> None:
    value = {**FULL, "preserve_rng_state": False, "early_stop": False}
    reference = train(built(llama_stack))
    assert_same(reference, train(sac.apply(built(llama_stack), value)))
    dropping = train(sac.apply(built(dropping_stack), value))
    unequal = [name for name, x in train(built(dropping_stack)).items() if not torch.equal(x, dropping[name])]
    assert any("gradient" in name for name in unequal)  # random states were not put back, as asked
    assert not any("output" in name for name in unequal)


@pytest.mark.parametrize(("value", "build"), [WAYS["full"], WAYS["chunks"]], ids=["full", "chunks"])
def test_reentrant(value: dict[str, Any], build: Any) -> None:
    reference = train(built(build), steps=2)
    model = sac.apply(built(build), {**value, "use_reentrant": True})
    assert_same(reference, train(model, steps=2))
    (x,) = tokens()
    with pytest.raises(RuntimeError, match="grad"):
        torch.autograd.grad(model(x.requires_grad_()).sum(), x)  # which that mode cannot do


class Forking(nn.Module):
    """A block whose dropout draws from a named stream."""

    def __init__(self, tracker: RngTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.attention, self.mlp = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with self.tracker.fork("tensor-parallel"):
            x = nn.functional.dropout(self.attention(x), 0.5)
        return self.mlp(torch.tanh(x))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_tracker(mode: str) -> None:
    seen = []
    for with_us in (False, True):
        tracker = RngTracker("cpu")
        tracker.add("tensor-parallel", 7)
        model = built(lambda tracker=tracker: Stack(Forking(tracker), Forking(tracker)))
        if with_us:
            value = FULL if mode == "full" else selective(policy(save("matmul")))
            sac.apply(model, value, get_rng_state_tracker=lambda tracker=tracker: tracker)
        seen.append(train(model, steps=2))
    assert_same(*seen)


@pytest.mark.parametrize("keys", STORES.values(), ids=STORES.keys())
def test_copies_and_pickles(keys: dict[str, Any]) -> None:
    reference = train(built(dropping_stack))
    model = sac.apply(built(dropping_stack), {**FULL, **keys})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(reference, train(twin))
    assert_same(reference, train(model))


class Options:
    """Something passed to a block that has no value to be compared by."""


class WithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = llama_stack(1).blocks[0]

    def forward(self, x: Tensor, options: Options) -> tuple[Tensor, Options]:
        return self.inner(x), options


def test_copies_of_a_model_that_was_trained_with_objects() -> None:
    """What a region remembers of its calls refers to them, and is not copied."""
    model = sac.apply(built(lambda: Stack(WithOptions(), WithOptions())), FULL)
    (x,), options = tokens(), Options()
    model(x, options)[0].sum().backward()
    expected = [p.grad for p in model.parameters()]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.zero_grad()
        twin(x, options)[0].sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(twin.parameters(), expected, strict=True))


class Scale:
    """State that a forward reads, kept outside of the model's buffers."""

    def __init__(self) -> None:
        self.value = 1.0

    def snapshot(self) -> float:
        return self.value

    def restore(self, state: float) -> None:
        self.value = state


class Scaled(nn.Module):
    """A block that doubles the scale at each call, as a counter of steps would."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.scale = scale
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.value *= 2.0
        return self.down(torch.tanh(self.up(x) * self.scale.value))


def test_state_of_the_users_own() -> None:
    scales = (Scale(), Scale())
    reference = train(built(lambda: Stack(Scaled(scales[0]), Scaled(scales[0]))), steps=2)
    model = built(lambda: Stack(Scaled(scales[1]), Scaled(scales[1])))
    assert_same(reference, train(sac.apply(model, {**FULL, "state": (scales[1],)}), steps=2))
    assert scales[0].value == scales[1].value


EVERYWHERE = Scale()


class ScaledEverywhere(Scaled):
    """The same with a scale that no module holds."""

    def __init__(self) -> None:
        super().__init__(EVERYWHERE)
        del self.scale

    def __getattr__(self, name: str) -> Any:
        return EVERYWHERE if name == "scale" else super().__getattr__(name)


@pytest.mark.parametrize("held", [True, False], ids=["held by modules", "held by no module"])
def test_state_of_a_copy_is_what_the_copy_uses(held: bool) -> None:
    EVERYWHERE.value = 1.0
    plain, ours = Scale(), Scale()
    reference = train(built(lambda: Stack(Scaled(plain), Scaled(plain))), steps=2)
    model = built(lambda: Stack(Scaled(ours), Scaled(ours)) if held else Stack(ScaledEverywhere(), ScaledEverywhere()))
    sac.apply(model, {**FULL, "state": (ours if held else EVERYWHERE,)})
    assert_same(reference, train(copy.deepcopy(model), steps=2))
    assert ours.value == 1.0


GENERATOR = torch.Generator()


@torch.library.custom_op("sac_apply_settings::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws from a generator of its own, which no caller sees."""
    return torch.rand(x.shape, generator=GENERATOR)


class Noisy(nn.Module):
    """A block that draws from a generator that it holds, and from one that cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape, generator=self.generator) > 0.5
        return self.down(torch.tanh(self.up(x) * noise(x.detach())) * kept)


@pytest.mark.parametrize("copied", [False, True])
def test_generators(copied: bool) -> None:
    GENERATOR.manual_seed(3)
    reference = train(built(lambda: Stack(Noisy(), Noisy())))
    model = built(lambda: Stack(Noisy(), Noisy()))
    sac.apply(model, {**FULL, "state": [StateOf(GENERATOR)]})
    GENERATOR.manual_seed(3)
    assert_same(reference, train(copy.deepcopy(model) if copied else model))


# Scattered inputs


@pytest.mark.parametrize(
    "keys", [{"distribute_saved_activations": True}, {"store": "scattered"}], ids=["switch", "store"]
)
@pytest.mark.parametrize(("value", "build"), WAYS.values(), ids=WAYS.keys())
def test_scatter_without_a_group(value: dict[str, Any], build: Any, keys: dict[str, Any]) -> None:
    model = built(build)
    before = flat(model)
    with pytest.raises(ConfigError) as caught:
        sac.apply(model, {**value, **keys})
    assert str(caught.value) == (
        "sac.apply.tp_group: inputs are to be scattered, but there is no group to scatter them over\n"
        "    legal: a process group that holds this rank, or a mesh of one dimension\n"
        "    fix: pass tp_group=, the group whose ranks all have this input"
    )
    assert flat(model) == before


SCATTERS: dict[str, dict[str, Any]] = {
    "scattered": {"distribute_saved_activations": True},
    "host": {"store": "scattered+host"},
    "contiguous": {"distribute_saved_activations": True, "store": "contiguous", "num_checkpoints": 3},
    "all": {"distribute_saved_activations": True, "keep": "all"},
}


def compare_scattered(way: str, keys: dict[str, Any]) -> list[tuple[int, int]]:
    """Train with scattered inputs over all ranks, and with copies of the model; return what regions held of inputs."""
    value, build = WAYS[way]
    reference = train(built(build), steps=2)
    model = sac.apply(built(build), {**value, **keys}, tp_group=dist.group.WORLD)
    assert_same(reference, train(model, steps=2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for mine, theirs in zip(twin.parameters(), built(build).parameters(), strict=True):
                mine.copy_(theirs)
        assert_same(reference, train(twin, steps=2))
    return input_bytes(model)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", SCATTERS.values(), ids=SCATTERS.keys())
@pytest.mark.parametrize("way", WAYS)
def test_scattered_inputs(ranks: int, way: str, keys: dict[str, Any]) -> None:
    share = tokens()[0].nbytes // ranks
    for held in run_ranks(ranks, compare_scattered, way, keys):
        assert held == [(share, 0)] * len(held)
        assert len(held) == (2 if way == "chunks" else 3)


def compiled_and_scattered(way: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[int, int]]]:
    """What training shows without us, the same with us, and what is held of each region's inputs."""
    value, build = WAYS[way]
    reference = train(built(build))
    model = sac.apply(built(build), {**value, "distribute_saved_activations": True}, tp_group=dist.group.WORLD)
    torch._dynamo.reset()
    ours = train(torch.compile(model, backend="aot_eager"))
    return reference, {name.replace("_orig_mod.", ""): x for name, x in ours.items()}, input_bytes(model)


@pytest.mark.parametrize("way", WAYS)
def test_scattered_inputs_in_a_compiled_model(way: str) -> None:
    share = tokens()[0].nbytes // 2
    for reference, ours, held in run_ranks(2, compiled_and_scattered, way):
        assert_same(reference, ours)
        assert held == [(share, 0)] * (2 if way == "chunks" else 3)


def alone_in_a_group() -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    """What training shows without us and with us in a group of this rank alone; what is said of another's group."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own, other = groups[dist.get_rank()], groups[1 - dist.get_rank()]
    value = {**FULL, "store": "scattered+host"}
    model = sac.apply(built(dropping_stack), value, tp_group=own)
    plain = built(dropping_stack)
    before = flat(plain)
    with pytest.raises(ConfigError) as caught:
        sac.apply(plain, value, tp_group=other)
    assert flat(plain) == before
    return train(built(dropping_stack)), train(model), str(caught.value)


def test_groups_of_one_rank_and_of_others() -> None:
    for rank, (reference, ours, told) in enumerate(run_ranks(2, alone_in_a_group)):
        assert_same(reference, ours)
        assert told == (
            f"sac.apply.tp_group: rank {rank} is not in the group\n"
            "    legal: a process group that holds this rank, or a mesh of one dimension\n"
            "    fix: pass each rank the tensor-parallel group that it is in"
        )


def test_report_says_what_is_held() -> None:
    model = sac.apply(built(llama_stack), {**FULL, "store": "contiguous", "num_checkpoints": 2})
    step(model, tokens())
    size = tokens()[0].nbytes
    assert f"keeps {size / 1024:.1f} KiB per region (0 B saved, {size / 1024:.1f} KiB of inputs)" in str(
        sac.report(model)
    )
