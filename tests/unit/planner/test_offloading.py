"""Plans that offload: bytes as on a device with streams, times by a clock, gradients as without sac."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.blocks.applying import apply
from sac.errors import PlanError
from sac.planner.away import TransfersWithoutData
from sac.planner.fake_op_cache import FakeOpCache
from sac.planner.fakes import fake_copy, fake_inputs, fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.offloading import EVERYTHING, FULL_ON_HOST, OffloadPlanner
from sac.planner.peak import FETCHED_ACTIVATIONS
from sac.planner.plan_file import Plan, explained, make_plan, notes_on
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.simplify import simplified
from sac.planner.step import run_step
from sac.planner.transfer_clock import Link
from sac.planner.write_policy import write_policy
from sac.policy.load import load_policy
from sac.policy.model import Decision, OffloadSection
from sac.stores.transfers import HostPool
from tests.support.blocks import ENGINES, Stack, llama_stack, policy, selective
from tests.support.simulated_streams import simulated_streams
from tests.support.training import assert_same_training, built

LINK = Link(2e9, 2e9, None, smallest=1)
ON_HOST = policy({"ops": "matmul", "do": "offload"})
SECTIONS: dict[str, dict[str, Any]] = {
    "all at once": {"in_flight": 0, "ahead": 0},
    "windows": {"in_flight": 100_000, "ahead": 100_000},
    "inputs": {"in_flight": 50_000, "ahead": 300_000, "inputs": True},
}


def model() -> Stack:
    return llama_stack(4)


def inputs(device: str = "cpu") -> tuple[Tensor, ...]:
    return (torch.randn(4, 48, 32),)


def loss_of(out: Tensor) -> Tensor:
    return out.square().mean()


def peak_on_a_device(value: Any, patch: pytest.MonkeyPatch) -> int:
    """The most bytes that the second step of a real model adds on a simulated device; gradients are there before."""
    trained, (x,) = built(model), inputs()
    with simulated_streams(patch) as device:
        sac.apply(trained, value)
        loss_of(trained(x)).backward()
        device.free_dead()
        before = device.peak_bytes = device.device_bytes
        loss = loss_of(trained(x))
        loss.backward()
    return device.peak_bytes - before


def peak_of_a_planned_step(value: Any, section: OffloadSection) -> int:
    mode = fake_mode()
    planned = fake_copy(built(model), mode)
    apply(planned, value, transfers=TransfersWithoutData(section, None))
    ledger = Ledger(1, None, FakeOpCache(), on_host=False)
    record = run_step(planned, fake_inputs(inputs(), mode), [], ledger, loss_of, accumulates=True)
    return record.peak - record.static


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_step_without_data_has_the_peak_of_a_device(monkeypatch, engine, name):
    section = {"min_bytes": 1, **SECTIONS[name]}
    value = selective({**ON_HOST, "offload": section}, engine=engine, verify="never")
    assert peak_of_a_planned_step(value, OffloadSection(**section)) == peak_on_a_device(value, monkeypatch)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return prepare(built(model), inputs(), loss_fn=loss_of, accumulates=True)


@pytest.fixture(scope="module")
def planned(planner: Planner) -> Plan:
    return make_plan(planner, "10%", link=LINK)


def test_a_plan_that_offloads_is_faster_within_the_budget(planner, planned):
    without = make_plan(planner, "10%")
    assert without.policy.offload is None
    assert "host" not in str(without.notes)
    assert planned.point.host > 0
    assert planned.point.is_checked
    assert planned.point.peak <= planned.budget
    assert planned.point.seconds + planned.point.stall < without.point.seconds
    assert any(rule.do == Decision.OFFLOAD.value for rule in planned.policy.rules) or planned.policy.offload.inputs


def test_the_planned_peak_is_that_of_a_device(planner, planned, monkeypatch):
    value = selective(policy(), engine="auto", verify="never") | {"policy": planned.policy}
    ledger = replace(planner, ledger=lambda: Ledger(1, None, FakeOpCache(), on_host=False))
    offloading = OffloadPlanner(ledger, LINK)
    record, _ = offloading._knowing.run_offloading(planned.point.choice, planned.policy.offload)
    assert record.peak - record.static == peak_on_a_device(value, monkeypatch)


def test_the_plan_trains_as_the_model_does_without_sac(planned, monkeypatch):
    with simulated_streams(monkeypatch) as device:
        assert_same_training(model, selective(policy()) | {"policy": planned.policy}, make_input=inputs)
    assert device.races == []
    assert any("copies" in line for line in device.log)


def test_the_written_plan_is_the_plan(planned, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(write_policy(planned))
    assert load_policy(path) == planned.policy
    assert f"{planned.policy.offload.in_flight}" in path.read_text()


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_what_fits_the_host_is_offloaded(planner, planned, share):
    """Buffers are larger than what waits in them, so in the smaller room nothing is worth it."""
    room = int(planned.point.host * share)
    found = make_plan(planner, "10%", link=replace(LINK, host=room))
    assert found.point.host <= found.point.pinned <= room
    assert found.point.host > 0 or share < 1
    assert found.point.peak <= found.budget


def test_a_plan_counts_the_pinned_memory_of_a_training():
    """Within the same limit as many values find room, and slabs take as many bytes."""
    for size, limit in ((9 << 20, 90 << 20), (9 << 20, 256 << 20), (36 << 20, None), (72 << 20, 300 << 20), (5, 64)):
        real = HostPool(lambda size: torch.empty(size, dtype=torch.uint8, device="meta"), limit)
        planned = TransfersWithoutData(OffloadSection(), limit).of(torch.device("cuda")).pool
        taken = [[pool.take(size) for _ in range(10)] for pool in (real, planned)]
        fit = [sum(one is not None for one in some) for some in taken]
        assert fit[0] == fit[1]
        assert planned.use.waiting == fit[0] * size
        assert planned.use.pinned == (real.slab_bytes if fit[0] == 10 else limit + (10 - fit[0]) * size)
        for one in filter(None, taken[1]):
            planned.give(one)
        assert planned.is_idle()
        assert planned.take(size) is not None or not fit[0]
        assert planned.use.waiting == fit[0] * size


def test_what_was_above_the_budget_is_not_tried_again(planner, planned, monkeypatch):
    """Steps may need more than the search has estimated; each further search has to return something smaller."""
    tried: list[Any] = []

    def above(self: OffloadPlanner, label: str, choice: tuple[int, ...], *more: Any) -> Any:
        tried.append((choice, more))
        return replace(planned.point, peak=planned.budget + 1)

    monkeypatch.setattr(OffloadPlanner, "_point", above)
    monkeypatch.setattr("sac.planner.link_search.CHANGES", 200)
    assert OffloadPlanner(planner, LINK).plan(planned.budget) is None
    assert len(tried) > 2
    assert all(one not in tried[:at] for at, one in enumerate(tried))


def test_a_budget_that_no_plan_over_the_link_meets(planner):
    with pytest.raises(PlanError) as caught:
        make_plan(planner, 10_000, link=LINK)
    assert (
        "; offloading over the link to the host (2 GB/s down, 2 GB/s up), no plan was found that fits\n    legal: "
        in str(caught.value)
    )


def test_baselines(planner):
    full, everything = OffloadPlanner(planner, LINK).baselines()
    assert (full.label, everything.label) == (FULL_ON_HOST, EVERYTHING)
    assert full.host == 4 * 4 * 48 * 32 * 4  # the inputs of four layers
    assert full.kept < planner.point("full", planner.every_nth(1)).kept
    assert everything.host > full.host
    assert everything.seconds < full.seconds


def test_an_explanation_is_of_the_planned_peak(planner, planned):
    made = explained(planner, planned)
    first, *rest = made.explained
    assert first.peak_bytes == sum(row.bytes for row in first.rows) == made.point.peak
    assert all(least.peak_bytes < made.point.peak for least in rest)
    assert any(row.category == FETCHED_ACTIVATIONS for row in first.curve.rows)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3])
def test_a_simplified_plan_offloads_within_the_time_and_the_budget(planner, planned, monkeypatch, share):
    found = simplified(planner, planned, share)
    assert len(found.policy.rules) < len(planned.policy.rules) or found is planned
    assert found is not planned or not share
    assert found.policy.offload == planned.policy.offload
    assert found.offloaded.step_s <= (1 + share) * planned.offloaded.step_s
    assert found.point.is_checked
    assert found.point.peak <= found.budget
    told = [note for note in found.notes if note.startswith("the step is predicted to take ")]
    assert told == [notes_on(found.offloaded)[0]]
    ledger = replace(planner.knowing(found.choices), ledger=lambda: Ledger(1, None, FakeOpCache(), on_host=False))
    record, host = ledger.run_offloading(found.point.choice, found.policy.offload)
    value = selective(policy(), engine="auto", verify="never") | {"policy": found.policy}
    assert (host.waiting, host.pinned) == (found.point.host, found.point.pinned)
    assert record.peak - record.static == peak_on_a_device(value, monkeypatch)


def test_a_simplified_plan_stays_within_the_host(planner, planned):
    more = simplified(planner, planned, 0.02).point.host
    assert more > planned.point.host
    tight = make_plan(planner, "10%", link=replace(LINK, host=planned.point.host))
    assert simplified(planner, tight, 0.02).point.host <= planned.point.host


def test_what_cannot_offload_is_refused(planner):
    with pytest.raises(PlanError) as caught:
        make_plan(planner, "10%", link=LINK, same_layers=True)
    assert str(caught.value) == (
        "link: plans do not offload where all layers of a group are to have the same rules\n"
        "    fix: plan without a link to the host"
    )
