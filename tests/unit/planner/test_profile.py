"""What a profile says is kept is what the real engine keeps, for any save option, written as a policy."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from torch import nn

import sac
from sac.blocks.find import find_blocks
from sac.planner.choices import Choice, policy_for
from sac.planner.fakes import call, fake_copy, fake_inputs, fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.pareto import SaveOption, pareto
from sac.planner.profile import RegionProfile
from sac.planner.tracing import profile_regions
from sac.reporting import regions_by_group
from tests.support.recording import Recorder
from tests.unit.planner.truth import MODELS, model_named, put_on

Profiles = tuple[RegionProfile, ...]


def profiles_of(model: nn.Module, inputs: Any) -> tuple[Profiles, list[str]]:
    mode = fake_mode()
    copied, given = fake_copy(model, mode), fake_inputs(inputs, mode)
    order: list[str] = []
    with Ledger():  # it runs what torch's fake tensors do not
        return profile_regions(find_blocks(copied), lambda: call(copied, given), order), order


def random_keep(profile: RegionProfile, random: Random) -> SaveOption:
    share = random.random()
    saved = frozenset(entry.number for entry in profile.candidates if random.random() < share)
    return SaveOption(saved, profile.recomputed(saved).bytes, 0.0)


def policy_of(profiles: Profiles, order: list[str], keeps: list[SaveOption]) -> Any:
    kinds = [next(kind for kind, profile in enumerate(profiles) if path in profile.paths) for path in order]
    choices = [(Choice("tried", keep, keep.bytes),) for keep in keeps]
    return policy_for(profiles, choices, kinds, order, [0] * len(order), "tried", made_for="a test")


def saved_bytes(model: nn.Module) -> dict[str, int]:
    """What each region's last call kept of what its ops made, as sac.report counts it."""
    return {region.path: region.stats.saved_bytes for _, regions in regions_by_group(model) for region in regions}


def assert_kept_as_said(
    model: nn.Module, inputs: Any, engine: Any, tried: Callable[[RegionProfile], SaveOption]
) -> None:
    profiles, order = profiles_of(model, inputs)
    keeps = [tried(profile) for profile in profiles]
    sac.apply(model, put_on(policy_of(profiles, order, keeps), engine))
    call(model, inputs)  # the graph is dropped at once: what was kept has been counted
    found = saved_bytes(model)
    assert {region.stats.engine for _, regions in regions_by_group(model) for region in regions} <= {engine, ""}
    sac.remove(model)
    said = {
        path: profile.recomputed(keep.saved, engine).bytes
        for profile, keep in zip(profiles, keeps, strict=True)
        for path in profile.paths
    }
    if engine == "replay":
        assert found == said
    else:  # the region's end runs no more if all that backward needs of it is saved; that is not foreseen
        assert found.keys() == said.keys()
        assert all(found[path] <= said[path] for path in said)


@pytest.mark.parametrize("name", MODELS)
def test_random_keep_sets_keep_the_bytes_that_the_profile_says(name: str) -> None:
    random = Random(2)
    for _ in range(6):
        assert_kept_as_said(*model_named(name), "replay", lambda profile: random_keep(profile, random))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Qwen3-MoE"])
def test_the_best_keep_sets_keep_no_more_under_rerun_than_the_profile_says(name: str) -> None:
    """In the other one rerun also holds what only the op reads at which it ends. Steps, not profiles, decide a plan."""
    random, known = Random(5), {}

    def one_of_the_best(profile: RegionProfile) -> SaveOption:
        if profile.name not in known:
            known[profile.name] = pareto(profile, [1.0] * len(profile.entries), "rerun")
        return random.choice(known[profile.name])

    for _ in range(10):
        assert_kept_as_said(*model_named(name), "rerun", one_of_the_best)


@pytest.mark.parametrize("name", ["Llama", "GPT-2, dropout"])
def test_as_many_products_run_again_as_the_profile_says(name: str) -> None:
    model, inputs = model_named(name)
    profiles, order = profiles_of(model, inputs)

    def products_of_a_step() -> int:
        with Recorder() as recorder:
            call(model, inputs).loss.backward()
        return recorder.product_flops

    plain = products_of_a_step()
    for seed in range(2):
        keeps = [random_keep(profile, Random(seed)) for profile in profiles]
        sac.apply(model, put_on(policy_of(profiles, order, keeps), "replay"))
        again = products_of_a_step() - plain
        sac.remove(model)
        names = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
        assert again == sum(
            profile.entries[number].flops * len(profile.paths)
            for profile, keep in zip(profiles, keeps, strict=True)
            for number in profile.recomputed(keep.saved).entries
            if profile.entries[number].op in names
        )
