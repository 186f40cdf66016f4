"""What a report says would change: held against models in which it is decided otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

import sac
from sac.planner.devices import Device, device_named
from sac.planner.what_if import Alternative, alternatives, figures_at_hand
from sac.reporting import decisions_of, group_label, regions_by_group
from sac.tools.comparison import count_flops
from tests.support.blocks import FunctionBlock, Stack, llama_stack, policy, save, selective, square, tokens
from tests.support.training import built

PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def value_of(saved: set[str], engine: str) -> dict[str, Any]:
    return selective(policy(*(save("matmul", module=f"**.{name}") for name in sorted(saved))), engine=engine)


def measured(value: Any) -> tuple[nn.Module, int]:
    """Return a model after one step, and the FLOPs of the step."""
    model = sac.apply(built(llama_stack), value)
    inputs = tokens()
    model(*inputs).square().mean().backward()  # the first step records
    return model, count_flops(lambda: model(*inputs).square().mean().backward())


def every_alternative(model: nn.Module) -> tuple[Alternative, ...]:
    """Return all alternatives, of which a report has three."""
    groups = [
        (group, group_label([one.path for one in regions]), len(regions)) for group, regions in regions_by_group(model)
    ]
    return alternatives(groups, figures_at_hand(model), limit=1000)


def products(model: nn.Module) -> dict[str, Alternative]:
    """Return the alternatives for matrix products by the name of their module."""
    return {one.module.rpartition(".")[2]: one for one in every_alternative(model) if one.op == "aten.mm.default"}


@pytest.mark.parametrize("engine", ["replay", "rerun"])
def test_a_product_that_would_be_saved_spares_its_flops(engine: str) -> None:
    saved = {"q_proj", "gate_proj"}
    model, flops = measured(value_of(saved, engine))
    others = products(model)
    assert {name for name, one in others.items() if one.decision == "save"} <= {*PRODUCTS} - saved - {"down_proj"}
    for name, one in others.items():
        changed = saved | {name} if one.decision == "save" else saved - {name}
        _, then = measured(value_of(changed, engine))
        assert then - flops == (-one.flops if one.decision == "save" else one.flops), name


def test_what_backward_never_reads_is_not_listed() -> None:
    model, _ = measured(value_of({*PRODUCTS}, "replay"))
    saved = {row.module.rpartition(".")[2] for row in decisions_of(model) if row.decision == "save"}
    assert saved - products(model).keys() == {"down_proj"}


def test_the_three_that_change_most_come_first() -> None:
    model, _ = measured("full")
    found = sac.report(model).alternatives
    assert len(found) == 3
    assert [one.seconds for one in found] == sorted((one.seconds for one in found), reverse=True)


def test_a_gpu_without_figures_has_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(device: object) -> Device:
        return device_named("NVIDIA GeForce RTX 4090")

    model, _ = measured("full")
    known = sac.report(model).alternatives
    monkeypatch.setattr("sac.planner.what_if.device_at_hand", unknown)
    found = sac.report(model)
    assert [one.seconds for one in found.alternatives] == [None] * len(known)
    assert "decided otherwise, per step, most time first on an NVIDIA A100 SXM, 80 GB (of this device" in str(found)


def test_as_a_sentence() -> None:
    one = Alternative("layers.0-31 (x32)", "mlp.up", "aten.mm.default", 1, "save", 0.012, 2 * 10**12, 11 * 2**30)
    assert str(one) == "saving mlp.up aten.mm, call 1 in layers.0-31 (x32) would spare 12 ms (2.0 TFLOP) for 11.0 GiB"
    other = Alternative("(model)", "", "aten.gelu.default", 0, "recompute", 0.012, 0, 2**30)
    assert str(other) == "recomputing aten.gelu in (model) would free 1.0 GiB for 12 ms"
    assert str(replace(one, seconds=None)).endswith("would spare 2.0 TFLOP for 11.0 GiB")
    assert str(replace(other, seconds=None)).endswith("would free 1.0 GiB for its time")


def routed(block: FunctionBlock, x: Tensor) -> Tensor:
    values, indices = (x @ block.a).softmax(-1).topk(2)
    return (x + values.sum(-1, keepdim=True) * (1 + indices.sum())) @ block.b


def test_routing_ops_are_not_the_users_to_decide() -> None:
    model = sac.apply(built(lambda: Stack(FunctionBlock(routed))), {"mode": "full", "blocks": "blocks.*"})
    model(*square()).sum().backward()
    found = every_alternative(model)
    assert found
    assert all("topk" not in one.op for one in found)
