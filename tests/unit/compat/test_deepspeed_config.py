"""`deepspeed.configure`: where its settings come from, which of them win, what each mistake reads; profile, waits."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac.compat.deepspeed as checkpointing
from sac.compat.deepspeed import ActivationCheckpointing
from sac.errors import ConfigError
from tests.support.recording import without_collector
from tests.support.runs import Noted
from tests.unit.compat.programs import WIDTH

pytestmark = pytest.mark.usefixtures("nothing_is_configured")

EVERYTHING = {
    "partition_activations": True,
    "number_checkpoints": 4,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}
SECTION = {"train_batch_size": 8, "activation_checkpointing": EVERYTHING}


def now() -> ActivationCheckpointing:
    return checkpointing._process.section


def mpu_of(group: Any) -> SimpleNamespace:
    answers = {"rank": lambda: 0, "group": lambda: group, "world_size": lambda: 2}
    return SimpleNamespace(**{f"get_tensor_model_parallel_{what}": answer for what, answer in answers.items()})


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, {}),
        ((None, True, True, 4, True, True, True), {}, EVERYTHING),
        ((SECTION,), {}, EVERYTHING),
        (({"train_batch_size": 8},), {}, {}),
        (
            (SECTION,),
            {"profile": False, "num_checkpoints": 2},
            EVERYTHING | {"profile": False, "number_checkpoints": 2},
        ),
    ],
)
def test_what_is_configured(args, kwargs, expected):
    assert not checkpointing.is_configured()
    checkpointing.configure(None, *args, **kwargs)
    assert checkpointing.is_configured()
    assert now() == ActivationCheckpointing(**expected)


def test_from_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SECTION), encoding="utf-8")
    for given in (path, str(path)):
        checkpointing.configure(None, given)
        assert now() == ActivationCheckpointing(**EVERYTHING)
    for content, text in (('{"activation_checkpointing": {,}}', "it is not JSON: "), ("[]", "it is a list")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {text}"):
            checkpointing.configure(None, path)
    with pytest.raises(ConfigError, match="missing: it cannot be read: No such file or directory"):
        checkpointing.configure(None, tmp_path / "missing")


def in_section(**values: Any) -> tuple[None, dict[str, Any]]:
    return None, {"activation_checkpointing": values}


FAILS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    # what is told: positional arguments and keywords of configure
    "partitioned_activations: it is not known\n.*did you mean: partition": (
        in_section(partitioned_activations=1),
        {},
    ),
    "cpu_checkpointing: .*\n.*fix: put it into activation_checkpointing": ((None, {"cpu_checkpointing": True}), {}),
    "activation_checkpointing: it is a bool\n    legal: a mapping": ((None, {"activation_checkpointing": True}), {}),
    'cpu_checkpointing is "yes"': (in_section(cpu_checkpointing="yes"), {}),
    "number_checkpoints is 0": (in_section(number_checkpoints=0), {}),
    'configure.num_checkpoints: num_checkpoints is "4"': ((None,), {"num_checkpoints": "4"}),
    "configure.profile: profile is 1": ((None,), {"profile": 1}),
    "contiguous_checkpointing: contiguous buffers need the number of layers": (
        (None,),
        {"partition_activations": True, "contiguous_checkpointing": True},
    ),
    "contiguous buffers hold partitioned .*\n.*fix: set partition_activations too": (
        (None,),
        {"contiguous_checkpointing": True, "num_checkpoints": 2},
    ),
    "mpu_: a SimpleNamespace has no get_model_parallel_rank": ((SimpleNamespace(),), {}),
    "mpu_: torch.distributed is not initialised": ((mpu_of("tp"),), {"partition_activations": True}),
}


@pytest.mark.parametrize("text", FAILS)
def test_a_mistake_is_an_error_and_changes_nothing(text):
    args, kwargs = FAILS[text]
    checkpointing.configure(None, checkpoint_in_cpu=True)
    before = now()
    with pytest.raises(ConfigError, match=text):
        checkpointing.configure(*args, **kwargs)
    assert now() == before


def test_flags_that_are_set_one_by_one():
    checkpointing.partition_activations_in_checkpoint(True)
    assert now().partition_activations
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.set_num_layers(7)
    assert now() == ActivationCheckpointing(number_checkpoints=7)
    for call, value, text in (
        (checkpointing.partition_activations_in_checkpoint, "on", 'partition_activations_in_checkpoint is "on"'),
        (checkpointing.set_num_layers, 0, "set_num_layers: set_num_layers is 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            call(value)


WAITS = Noted()  # what the region can reach is put back before it runs again


def region(x: Tensor) -> Tensor:
    WAITS.append("run")
    return x.sin().exp().cos()


def test_the_device_is_waited_for_at_each_boundary(call, monkeypatch):
    WAITS.clear()
    monkeypatch.setattr(checkpointing, "synchronize_device", partial(WAITS.append, "wait"))
    checkpointing.configure(None, synchronize=True)
    out = call(region, torch.randn(4, requires_grad=True) * 1) * 2
    assert WAITS == ["wait", "run", "wait"]
    out.register_hook(lambda grad: WAITS.append("after"))
    WAITS.clear()
    out.sum().backward()
    assert WAITS == ["after", "wait", "run", "wait"]


def test_times_are_logged(monkeypatch, caplog):
    ticks = iter(range(1000))
    monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: next(ticks) / 1000)
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    linear, norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    with caplog.at_level("INFO", logger="sac.deepspeed"):
        checkpointing.checkpoint(linear, checkpointing.non_reentrant_checkpoint(norm, x))
        checkpointing.checkpoint(linear, x).sum().backward()
        told = [record.getMessage() for record in caplog.records]
        assert told == [
            *(f"{name}: forward 1.000 ms" for name in ("LayerNorm", "Linear", "Linear")),
            "Linear: backward 1.000 ms",
        ]
        checkpointing.configure(None)
        checkpointing.checkpoint(linear, x)
    assert len(caplog.records) == len(told)


def test_hooks_do_not_pile_up_on_a_leaf(call):
    """A leaf outlives the graphs of all steps: what measures a region goes with the region's graph."""
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, requires_grad=True)
    with without_collector():
        for step in range(4):
            out = call(torch.sin, x)
            if step % 2:
                out.sum().backward()
            del out
            assert not x._backward_hooks
