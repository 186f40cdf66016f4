"""`host_memory` in a plan: saved values wait on the host as far as the forward of a block hides their copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.errors import PlanError, SacWarning
from sac.memory_timeline import Meter
from sac.planner import controller
from sac.planner.cost import DEVICES
from sac.planner.planning import make_plan
from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.support.model_zoo import tiny
from tests.support.simulated_streams import simulated_streams
from tests.support.training import assert_same
from tests.unit.planner.small_training import Trained, controller_of, share, trained, within


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = tiny("llama", num_hidden_layers=8)
    model.config.use_cache = False
    return model.train(), batch


def gradients(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    model(**inputs).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks send up to 8 KiB; the CPU has a link."""
    monkeypatch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=8 << 10, ahead=8 << 10))
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], host_bytes_per_s=1e9))


def test_plan_is_faster_fits_and_sends_what_it_says(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = llama()
    alone = make_plan(model, inputs, "20%", device="cpu")
    made = make_plan(model, inputs, "20%", device="cpu", host_memory="64KiB")
    assert made.rows[0].seconds < alone.rows[0].seconds
    assert made.peak <= made.budget
    assert 0 < made.host <= 64 << 10
    assert "wait on the host" in made.notes[-1]
    assert made.to_dict()["rows"][0]["checked"] is False
    assert {rule.do for rule in made.policy.rules} == {"save", "offload"}
    plain = gradients(model, inputs)
    ours = sac.apply(llama()[0], made.policy)
    with simulated_streams(monkeypatch) as simulation:
        assert_same(plain, gradients(ours, inputs))
        uses = [use for one in regions_of(ours) for use in one.region.stats.offloads.values()]
    assert simulation.races == []
    assert sum(use.host_bytes for use in uses) == made.host
    assert not any(use.held_bytes for use in uses)


def test_a_large_llama_at_the_least_peak() -> None:
    """At the memory of full recomputation and one per cent, on an H100: a twelfth faster, as predicted."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "vocab_size": 32000}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 8192, dtype=torch.long)
    inputs = {"input_ids": tokens, "labels": tokens}
    least = make_plan(model, inputs, "1%", device="h100").least
    made = make_plan(model, inputs, least + (300 << 20), device="h100", host_memory="64GiB")
    full = made.rows[2].seconds
    assert made.step_s / (made.step_s - made.rows[0].seconds + full) <= 0.94


@pytest.mark.parametrize(
    ("device", "host", "text"),
    [("cpu", "1GiB", "nothing is copied to the host from a processor"), ("h100", "much", "it is not a number with a")],
)
def test_errors(device: str, host: str, text: str) -> None:
    model, inputs = llama()
    with pytest.raises(PlanError, match=rf"^host_memory: .*{text}"):
        sac.plan(model, inputs, "1GiB", device=device, host_memory=host)


def on_a_device(value: Any, patch: pytest.MonkeyPatch, surcharge: int = 0) -> tuple[Trained, int]:
    """Train on a simulated device; return its peak, too. It seems to need a ``surcharge`` once values were sent."""
    patch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=64 << 10, ahead=64 << 10))
    patch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], host_bytes_per_s=1e11))
    peaks = []
    with simulated_streams(patch) as device:

        def read() -> tuple[int, int]:
            device.free_dead()
            peaks.append(device.peak_bytes)
            device.peak_bytes = device.device_bytes
            return peaks[-1] + surcharge * bool(device.pinned_bytes), device.device_bytes

        patch.setattr(controller, "meter_of", lambda place: Meter(place, read))
        found = trained(value, steps=5, unmeasured=5, passes=2)
        read()
    assert device.races == []
    return found, max(peaks)


@pytest.mark.parametrize(("retains", "surcharge"), [(False, 0), (True, 0), (False, 1 << 20)])
def test_a_budget_sends_in_the_end(
    retains: bool, surcharge: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Not if a graph is retained, which would hold what comes back; no more, once a step has exceeded the budget."""
    backward = Tensor.backward
    if retains:
        monkeypatch.setattr(Tensor, "backward", lambda loss: (backward(loss, retain_graph=True), backward(loss)))
    found, peak = on_a_device(within("20%", host_memory="1MiB"), monkeypatch, surcharge)
    assert found.is_equal(on_a_device(None, monkeypatch)[0])
    fitted = controller_of(found.model).fitted
    assert ("offload" in {rule.do for rule in fitted.policy.rules}) == (not retains and not surcharge)
    assert any(one.region.stats.offloads for one in regions_of(found.model)) == bool(fitted.host)
    assert any("more than the budget of 20%" in str(one.message) for one in recwarn) == bool(surcharge)
    assert peak <= fitted.budget
    if fitted.host:
        alone, _ = on_a_device(within("20%"), monkeypatch)
        assert fitted.rows[0].seconds < controller_of(alone.model).fitted.rows[0].seconds
        assert f"{fitted.host >> 10}.0 KiB wait on the host" in str(sac.report(found.model))
    assert not sac.remove(found.model)._forward_pre_hooks


def test_a_budget_on_a_device_without_a_link() -> None:
    with pytest.warns(SacWarning, match="host_memory: nothing is copied to the host from a processor") as told:
        found = trained(within(budget := share(0.5), host_memory="1GiB"))
    assert len(told) == 1
    assert max(found.peaks) <= budget
    assert found.is_equal(trained(None))
