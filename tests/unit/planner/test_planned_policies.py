"""A policy that carries what it was planned for: regions that run other ops are told of in their first forward."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.find import find_blocks
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from sac.engine.op_trace import signature
from sac.errors import RegionError
from sac.planner.fakes import call, fake_copy, fake_inputs, fake_mode
from sac.planner.tracing import profile_regions
from sac.policy.load import dump_policy, load_policy
from sac.reporting import regions_by_group
from tests.support.blocks import ENGINES, llama_stack, policy, save, selective, tokens
from tests.support.compiling import Compiled
from tests.support.model_zoo import tiny
from tests.support.recording import without_collector
from tests.support.training import assert_same, assert_same_training, built, train

OTHER = "0123456789abcdef"
FIX = "    fix: plan again for this model, torch version and device: `sac plan …`"


def signatures(model: nn.Module) -> dict[str, str]:
    """The signature of each region's kind, by the region's path."""
    return {region.path: signature(kind.op_trace) for kind, regions in regions_by_group(model) for region in regions}


def entry(blocks: str | list[str], of: str, **more: Any) -> dict[str, Any]:
    return {"blocks": blocks, **more, "signature": of}


def planned(*entries: dict[str, Any], rules: tuple[dict[str, Any], ...] = (save("attention"),)) -> dict[str, Any]:
    return policy(*rules, plan={"made_for": "a test", "regions": list(entries)})


def own_signature() -> str:
    """That of the blocks of `llama_stack`."""
    model = sac.apply(built(llama_stack), selective(policy(save("attention"))))
    model(*tokens())
    [one] = set(signatures(model).values())
    return one


def ops(model: nn.Module) -> int:
    """How many ops with a result of their own the first region runs."""
    kind, _ = regions_by_group(model)[0]
    return sum(row.bytes > 0 for row in kind.op_trace)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_both_engines_and_every_policy_see_the_same_ops(family: str) -> None:
    found = []
    for written in (policy(save("attention")), policy(save("*")), policy(default="recompute")):
        for engine in ENGINES:
            model, inputs = tiny(family)
            sac.apply(model, {"mode": "selective", "policy": written, "engine": engine})
            model(**inputs)
            found.append(signatures(model))
    assert len(found[0]) > 1
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "swin"])  # every second block of a Swin shifts its windows
def test_what_a_planner_sees_on_tensors_without_data_is_what_runs(family: str, engine: str) -> None:
    model, inputs = tiny(family)
    turn_off_cache(model)
    mode = fake_mode()
    copied, given = fake_copy(model, mode), fake_inputs(inputs, mode)
    profiles = profile_regions(find_blocks(copied), lambda: call(copied, given))
    entries = [entry(list(profile.paths), profile.signature) for profile in profiles]
    value = {"mode": "selective", "policy": planned(*entries, rules=(save("matmul"),)), "engine": engine}
    sac.apply(model, value)(**inputs).loss.backward()
    assert {path for profile in profiles for path in profile.paths} == {one.region.path for one in regions_of(model)}
    assert all(one.region.group.planned is not None for one in regions_of(model))
    assert len({profile.signature for profile in profiles}) > (family in ("t5", "swin"))


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_planned_for_is_trained_as_ever(engine: str) -> None:
    assert_same_training(llama_stack, selective(planned(entry("blocks.*", own_signature())), engine=engine), steps=3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", [save("attention"), save("*")], ids=["attention", "everything"])
def test_other_ops_are_told_with_the_place_of_the_entry(engine: str, rule: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "planned.yaml"
    path.write_text(dump_policy(load_policy(planned(entry("nowhere", OTHER), entry("blocks.*", OTHER), rules=(rule,)))))
    [line] = [n for n, text in enumerate(path.read_text().splitlines(), 1) if "blocks.*" in text]
    usual = sac.apply(built(llama_stack), selective(policy(rule), engine=engine))
    usual(*tokens())
    model = sac.apply(built(llama_stack), {"mode": "selective", "policy": path, "blocks": "blocks.*", "engine": engine})
    for _ in range(2):  # in every call: whoever ignores the first does not train with what was not planned
        with pytest.raises(RegionError) as caught:
            model(*tokens())
        assert str(caught.value) == (
            f"{path}:{line}:5: blocks.0 runs {ops(usual)} ops that differ from those that the plan was made for "
            f"(signature {signatures(usual)['blocks.0']}, planned {OTHER})\n{FIX}"
        )
    assert_same(train(sac.remove(model)), train(built(llama_stack)))


def test_nothing_is_held_after_the_error() -> None:
    model = sac.apply(built(llama_stack), selective(planned(entry("blocks.*", OTHER))))
    (x,) = tokens()
    x = x.clone().requires_grad_()
    with without_collector():
        with contextlib.suppress(RegionError):
            model(x)
            raise AssertionError("no error")
        alive = weakref.ref(x)
        del x
        assert alive() is None


def test_a_model_that_is_one_region_has_a_name_too() -> None:
    value = {"mode": "selective", "policy": planned(entry("", OTHER)), "blocks": [""]}
    model = sac.apply(built(llama_stack).blocks[0], value)
    with pytest.raises(RegionError, match=r"regions\[0\]: the model runs \d+ ops that differ from those"):
        model(*tokens())


def test_sizes_do_not_matter() -> None:
    own = own_signature()
    model = sac.apply(built(llama_stack), selective(planned(entry("blocks.*", own))))
    (x,) = tokens()
    model(x[:1, :5]).sum().backward()
    assert set(signatures(model).values()) == {own}


def test_the_first_entry_that_holds_a_region_is_the_one_that_is_compared() -> None:
    own = own_signature()
    for entries, refused in (
        ([entry("blocks.*", own), entry("blocks.*", OTHER)], ""),
        ([entry("blocks.*", own, layers={"first": 1}), entry("blocks.*", OTHER)], "blocks.1"),
        ([entry("blocks.0", OTHER, layers=["1"]), entry("**", own)], ""),
        ([entry("blocks.0", own)], ""),
        ([entry("elsewhere.*", OTHER)], ""),
        ([entry("blocks.1", OTHER)], "blocks.1"),
        ([], ""),
    ):
        model = sac.apply(built(llama_stack), selective(planned(*entries)))
        if not refused:
            model(*tokens())
            continue
        with pytest.raises(RegionError, match=rf"regions\[\d\]: {refused} runs"):
            model(*tokens())


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        ([{"blocks": "blocks.*", "layers": {"first": 1}}], "blocks.1 is"),
        ([{"blocks": "elsewhere.*"}], "blocks.0 and 1 more blocks are"),
        ([{"blocks": "blocks.*"}], ""),
    ],
)
def test_blocks_that_were_not_planned_for_are_told_of(entries: list[dict[str, Any]], left: str) -> None:
    own = own_signature()
    value = selective(planned(*({**one, "signature": own} for one in entries)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sac.apply(built(llama_stack), value)
    found = f"{left} not in the plan of this policy: ops there that no rule matches are recomputed"
    said = [str(one.message) for one in caught]
    name = value["policy"]["name"]
    assert said == ([f"{name}: {found}\n    fix: plan again for this model: `sac plan …`"] if left else [])
    assert sac.report(model).notes == tuple(said)


def test_regions_of_one_kind_are_compared_once() -> None:
    model = sac.apply(built(llama_stack), selective(planned(entry("blocks.*", own_signature()))))
    assert len({id(one.region.group) for one in regions_of(model)}) == 1
    model(*tokens())
    [kind] = {one.region.group for one in regions_of(model)}
    kind.planned = load_policy(planned(entry("blocks.*", OTHER))).plan.regions[0]  # type: ignore[union-attr]
    model(*tokens())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deep", "pickle"]
)
def test_a_copy_compares_too(copied: Any) -> None:
    value = selective(planned(entry("blocks.0", own_signature()), entry("blocks.1", OTHER)))
    model = sac.apply(llama_stack(), value)
    for _ in range(2):  # before a call and after one
        with pytest.raises(RegionError, match=rf"regions\[1\]: blocks\.1 runs .*, planned {OTHER}\)"):
            copied(model)(*tokens())
        with pytest.raises(RegionError):
            model(*tokens())


@pytest.mark.parametrize("module", ["", "self_attn"])
def test_a_region_in_which_a_module_is_saved_as_a_whole_is_not_compared(module: str) -> None:
    whole = {"id": "plain", "module": module, "layers": ["1"], "do": "save"}
    rules = (whole, save("attention"))
    assert_same_training(llama_stack, selective(planned(entry("blocks.1", OTHER), rules=rules)), steps=2)


def test_what_is_compiled_is_not_compared() -> None:
    model = sac.apply(built(llama_stack), selective(planned(entry("blocks.*", OTHER))))
    torch.compile(model, backend=Compiled().backend)(*tokens()).sum().backward()
    assert signatures(model) == {"blocks.0": signature(()), "blocks.1": signature(())}


def test_a_plan_does_not_keep_a_full_config_from_running() -> None:
    value = selective(planned(entry("blocks.*", OTHER)))
    model = sac.apply(built(llama_stack), value)
    with pytest.raises(RegionError, match=f"planned {OTHER}"):
        model(*tokens())
    sac.apply(sac.remove(model), {"mode": "full", "blocks": "blocks.*"})
    assert_same(train(built(llama_stack)), train(model))
