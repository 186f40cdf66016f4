"""Parts of a model that a pipeline stage holds: some of the layers under their own numbers, or none at all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

import sac
from sac.errors import ModelError, PolicyError, SacWarning
from tests.stacks.parallel_llama import Llama, Sizes, batch

SIZES = Sizes(n_layers=8)


def part(*layers: int, first: bool = False, last: bool = False) -> Llama:
    return Llama(SIZES, layers, first=first, last=last)


def regions(model: nn.Module) -> list[str]:
    return [kind["regions"] for kind in sac.report(model).to_dict()["kinds"]]


def rule(layers: Any, **more: Any) -> dict[str, Any]:
    return {"id": "products", "ops": "matmul", "layers": layers, "do": "save", **more}


def selective(*rules: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"mode": "selective", "policy": {"schema": "sac/v1", "name": "own", "rules": list(rules)}, **more}


@pytest.mark.parametrize("value", ["full", "selective", {"mode": "full", "blocks": ["layers.*"]}], ids=str)
@pytest.mark.parametrize("ends", [{"first": True}, {"last": True}])
def test_one_loop_over_the_parts_serves_a_rank_whose_part_holds_no_block(value: Any, ends: dict[str, bool]) -> None:
    parts = [part(**ends), part(3, 4)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [sac.apply(model, value) for model in parts] == parts
    assert ["its stack is empty. sac.apply had nothing to do" in str(one.message) for one in told] == [True]
    assert "forward" not in vars(parts[0])
    assert regions(parts[1]) == ["layers.3-4 (x2)"]


class Head(nn.Module):
    """A last stage whose head would be taken for a stack, if it were a whole model."""

    def __init__(self, *stand_ins: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stand_ins)
        self.head = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)))


@pytest.mark.parametrize("stand_ins", [(), (nn.Identity(), nn.Identity())], ids=["empty", "placeholders"])
def test_what_a_stage_without_layers_has_besides_is_no_block(stand_ins: tuple[nn.Module, ...]) -> None:
    with pytest.warns(SacWarning, match="its stack is empty"):
        sac.apply(Head(*stand_ins), "full")


def test_layers_are_counted_over_the_whole_model() -> None:
    assert regions(sac.apply(part(3, 4), {"mode": "full", "layers": {"last": 4}})) == ["layers.4"]
    assert regions(sac.apply(part(0, 1), {"mode": "full", "layers": {"first": 1}})) == ["layers.0"]


def test_layers_that_are_all_on_other_stages_leave_this_one_as_it_is() -> None:
    with pytest.warns(SacWarning, match=r"chooses none of those it has, 3 of 8, 4 of 8"):
        model = sac.apply(part(3, 4), {"mode": "full", "layers": {"first": 2}})
    assert "forward" not in vars(model.layers["3"])


ELSEWHERE = {
    "layers": [rule({"first": 2}), rule(["3-5"], id="here")],
    "blocks": [rule("all", blocks="layers.{0,1}"), rule("all", blocks="layers.{3,4}", id="here")],
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_rule_for_layers_of_another_stage_is_no_mistake(name: str, strict: bool) -> None:
    model = part(3, 4, first=True, last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sac.apply(model, selective(*ELSEWHERE[name], strict=strict))
        model(batch(SIZES)[0]).sum().backward()
    (kind,) = sac.report(model).kinds
    assert [use.rule for use in kind.rules if use.hits] == ["here"]


def test_a_module_that_only_other_stages_have_is_told_and_no_error() -> None:
    model = part(3, 4, first=True, last=True)
    with pytest.warns(SacWarning, match="no region has the module"):
        sac.apply(model, selective(rule("all", module="mlp.router")))
    with pytest.warns(SacWarning, match="matched no op"):
        model(batch(SIZES)[0]).sum().backward()


def test_on_a_whole_model_these_are_mistakes() -> None:
    whole = Llama(SIZES)
    with pytest.raises(PolicyError, match=r"no region has the layers .* \(the model has stacks of 8\)"):
        sac.apply(whole, selective(rule(["8-9"])))
    with pytest.raises(PolicyError, match="no region has the module"):
        sac.apply(whole, selective(rule("all", module="mlp.router")))
    with pytest.raises(ModelError, match="`layers` leaves no block"):
        sac.apply(whole, {"mode": "full", "layers": ["8-9"]})
    with pytest.raises(ModelError, match=r'"layer\.\*" matches no module'):
        sac.apply(part(first=True), {"mode": "full", "blocks": ["layer.*"]})


def test_an_empty_list_beside_the_blocks_makes_no_stage() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3))
    model.adapter_layers = nn.ModuleList()
    assert regions(sac.apply(model, "full")) == ["parts.0-2 (x3)"]
    sac.remove(model)
    with pytest.raises(ModelError, match="`layers` leaves no block"):
        sac.apply(model, {"mode": "full", "layers": ["7"]})
