"""A profile names what a policy can name, and sees writes, draws, shared modules and stacks as the engine does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sac
from sac.blocks.find import find_blocks
from sac.blocks.install import ours_on
from sac.engine.op_trace import OpTraceRow
from sac.planner.fakes import call, fake_copy, fake_inputs, fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.profile import RegionProfile
from sac.planner.tracing import CannotProfile, profile_regions
from sac.reporting import regions_by_group
from tests.support.model_zoo import tiny
from tests.unit.planner.truth import MODELS, model_named, put_on

DIM = 8


class Block(nn.Module):
    """A block with a function of its own between its two layers."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), between

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def profiles_of(model: nn.Module, inputs: Any = None, order: list[str] | None = None) -> tuple[RegionProfile, ...]:
    mode = fake_mode()
    copied = fake_copy(model, mode)
    given = fake_inputs(inputs or (torch.zeros(4, DIM, requires_grad=True),), mode)
    with Ledger():  # it runs what torch's fake tensors do not
        return profile_regions(find_blocks(copied), lambda: call(copied, given), order)


def alike(between: Callable[[Tensor], Tensor]) -> RegionProfile:
    [profile] = profiles_of(Model(Block(between), Block(between)))
    return profile


def rows_of(model: nn.Module, inputs: Any) -> dict[str, dict[tuple[str, str, int], OpTraceRow]]:
    """Return the rows of a trace by the path of a region, and by what they are called."""
    sac.apply(model, put_on({"schema": "sac/v1", "name": "x", "rules": []}, "replay"))
    call(model, inputs)
    found = {
        region.path: {(row.module, row.op, row.call): row for row in kind.op_trace}
        for kind, regions in regions_by_group(model)
        for region in regions
    }
    sac.remove(model)
    return found


def ops_of(profile: RegionProfile) -> list[str]:
    return [entry.op for entry in profile.entries]


@pytest.mark.parametrize("name", MODELS)
def test_ops_are_named_as_a_trace_names_them(name: str) -> None:
    """What a policy says of a module, an op and a call is thereby said of the same one."""
    model, inputs = model_named(name)
    profiles, rows = profiles_of(model, inputs), rows_of(model, inputs)
    for profile in profiles:
        named = [(entry.module, entry.op, entry.call) for entry in profile.entries if entry.savable or entry.must_save]
        for path in profile.paths:
            assert set(named) <= rows[path].keys()
        assert len(set(named)) == len(named)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_flops_are_those_of_a_trace(name: str) -> None:
    model, inputs = model_named(name)
    profiles, rows = profiles_of(model, inputs), rows_of(model, inputs)
    for profile in profiles:
        for entry in profile.entries:
            for path in profile.paths:
                row = rows[path].get((entry.module, entry.op, entry.call))
                if entry.savable and row is not None:
                    assert (entry.flops, entry.shape, entry.dtype) == (row.flops, row.shape, row.dtype)


def test_regions_that_run_the_same_are_one_kind() -> None:
    [profile] = profiles_of(Model(Block(), Block(), Block()))
    assert profile.paths == ("blocks.0", "blocks.1", "blocks.2")
    assert profile.layers == (0, 1, 2)
    assert (profile.stack, profile.stack_size) == ("blocks", 3)


def test_regions_that_differ_are_kinds_of_their_own() -> None:
    relu, gelu = profiles_of(Model(Block(), Block(F.gelu), Block()))
    assert (relu.paths, relu.layers) == (("blocks.0", "blocks.2"), (0, 2))
    assert (gelu.paths, gelu.layers) == (("blocks.1",), (1,))
    assert relu.signature != gelu.signature


def test_other_sizes_are_another_kind_with_the_same_ops() -> None:
    class Halving(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[: len(x) // 2]

    first, second = profiles_of(Model(Halving(), Halving()))
    assert first.signature == second.signature
    assert first.bytes != second.bytes


def test_several_stacks() -> None:
    model, inputs = model_named("T5")
    stacks = {profile.stack: profile.stack_size for profile in profiles_of(model, inputs)}
    assert stacks == {"encoder.block": 2, "decoder.block": 2}


def test_a_block_that_is_called_twice_has_one_profile_and_two_places() -> None:
    shared = Block()

    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.blocks[0](x))

    order: list[str] = []
    [profile] = profiles_of(Twice(shared, Block()), order=order)
    assert order == ["blocks.0", "blocks.0", "blocks.1"]
    assert profile.paths == ("blocks.0", "blocks.1")


def test_a_model_whose_layers_share_their_parameters() -> None:
    model, inputs = tiny("albert")
    order: list[str] = []
    [profile] = profiles_of(model, inputs, order)
    assert len(profile.paths) == 1
    assert order == [profile.paths[0]] * 2


def test_a_block_that_is_not_called_has_no_profile() -> None:
    class Skipping(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x).sum()

    order: list[str] = []
    [profile] = profiles_of(Skipping(Block(), Block()), order=order)
    assert profile.paths == ("blocks.0",)
    assert order == ["blocks.0"]


def test_a_view_lies_in_the_storage_of_what_it_is_of() -> None:
    profile = alike(lambda x: torch.relu(x.view(2, -1)).view(-1, DIM))
    for entry in profile.entries:
        if entry.is_view:
            [value], [read] = entry.makes, entry.reads
            assert profile.roots[value] == profile.roots[read]
            assert not entry.savable


def test_a_write_in_place_is_one_to_the_storage_and_cannot_be_saved() -> None:
    profile = alike(lambda x: (x * 2).relu_())
    [entry] = [entry for entry in profile.entries if entry.op == "aten.relu_.default"]
    [made] = [entry.makes[0] for entry in profile.entries if entry.op == "aten.mul.Tensor"]
    assert entry.writes == (profile.roots[made],)
    assert not entry.savable


def test_several_results() -> None:
    profile = alike(lambda x: F.layer_norm(x, (DIM,)))
    [entry] = [entry for entry in profile.entries if entry.op == "aten.native_layer_norm.default"]
    assert [profile.bytes[value] for value in entry.makes] == [4 * DIM * 4, 4 * 4, 4 * 4]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_is_causal_is_known(causal: bool) -> None:
    def attends(x: Tensor) -> Tensor:
        heads = x.view(1, 2, x.shape[0] // 2, -1)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=causal).view(x.shape)

    found = [entry.is_causal for entry in alike(attends).entries if "scaled_dot_product" in entry.op]
    assert found == [causal]


def test_a_random_op_can_be_saved_and_run_again() -> None:
    profile = alike(lambda x: torch.native_dropout(x, 0.5, True)[0])
    [entry] = [entry for entry in profile.entries if entry.op == "aten.native_dropout.default"]
    assert entry.savable
    assert not entry.must_save


def test_a_routing_op_must_be_saved() -> None:
    profile = alike(lambda x: x.topk(DIM)[0])
    [entry] = [entry for entry in profile.entries if entry.op == "aten.topk.default"]
    assert entry.must_save


def test_backward_needs_what_autograd_saves() -> None:
    profile = alike(torch.relu)
    makers = {profile.entries[profile.maker[need.value]].op for need in profile.needs if need.value in profile.maker}
    assert makers == {"aten.relu.default"}
    assert ops_of(profile).count("aten.addmm.default") == 2


def test_frozen_weights_are_no_reason_to_keep_an_input() -> None:
    blocks = [Block(torch.sigmoid), Block(torch.sigmoid)]
    for block in blocks:
        block.down.requires_grad_(False)
        block.up.requires_grad_(False)
    [frozen], trained = profiles_of(Model(*blocks)), alike(torch.sigmoid)
    assert len(frozen.needs) < len(trained.needs)


def test_without_gradients_nothing_is_profiled() -> None:
    class Inference(Model):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    assert profiles_of(Inference(Block(), Block())) == ()


def test_what_replay_cannot_do_is_told() -> None:
    def unwritten(x: Tensor) -> Tensor:
        return x + torch.empty_like(x) * 0

    model = Model(Block(unwritten), Block())
    with pytest.raises(CannotProfile, match=r"aten\.mul\.Tensor reads memory that no op has written to"):
        profile_regions(find_blocks(model), lambda: model(torch.ones(4, DIM)))


@pytest.mark.parametrize("fails", [False, True])
def test_the_blocks_are_left_as_they_were(fails: bool) -> None:
    def between(x: Tensor) -> Tensor:
        if fails:
            raise ZeroDivisionError
        return torch.relu(x)

    model = Model(Block(between), Block(between))
    before = [dict(module.__dict__) for module in model.modules()]
    x = torch.zeros(4, DIM, requires_grad=True)
    if fails:
        with pytest.raises(ZeroDivisionError):
            profile_regions(find_blocks(model), lambda: model(x))
    else:
        profile_regions(find_blocks(model), lambda: model(x))
    assert all(ours_on(module) is None for module in model.modules())
    assert [set(module.__dict__) for module in model.modules()] == [set(one) for one in before]
