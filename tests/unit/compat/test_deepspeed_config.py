"""`deepspeed.configure`: where its settings come from, which of them win, what each mistake reads; profile, waits."""

from __future__ import annotations

import gc
import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac.compat.deepspeed as checkpointing
from sac.compat.deepspeed import ActivationCheckpointing
from sac.errors import ConfigError
from tests.support.ranks import run_ranks
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


def mpu_of(group: Any, size: int = 2, form: str = "model") -> SimpleNamespace:
    answers = {"rank": lambda: 0, "group": lambda: group, "world_size": lambda: size}
    return SimpleNamespace(**{f"get_{form}_parallel_{what}": answer for what, answer in answers.items()})


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


@pytest.mark.parametrize("kind", [str, Path])
def test_from_a_file(tmp_path, kind):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SECTION), encoding="utf-8")
    checkpointing.configure(None, kind(path))
    assert now() == ActivationCheckpointing(**EVERYTHING)


def test_no_mpu_leaves_the_one_of_before():
    mpu = mpu_of(None, 1)
    checkpointing.configure(mpu)
    checkpointing.configure(None)
    assert checkpointing._process.mpu is mpu


def in_section(**values: Any) -> tuple[None, dict[str, Any]]:
    return None, {"activation_checkpointing": values}


FAILS: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]] = {
    "a misspelt key": (
        in_section(partitioned_activations=True, cpu=False), {},
        (
            "deepspeed_config.activation_checkpointing.partitioned_activations: it is not known",
            "did you mean: partition_activations",
            "activation_checkpointing.cpu: it is not known",
        ),
    ),
    "a key outside": (
        (None, {"cpu_checkpointing": True}), {},
        ("deepspeed_config.cpu_checkpointing: it is outside of", "fix: put it into activation_checkpointing"),
    ),
    "values in the section": (
        in_section(cpu_checkpointing="yes", number_checkpoints=0), {},
        ("cpu_checkpointing: 'yes' is not true or false", "number_checkpoints: 0 is not a number of checkpoints"),
    ),
    "values of arguments": (
        (None,), {"profile": 1, "num_checkpoints": "4"},
        ("configure.num_checkpoints: '4' is not a number of checkpoints", "configure.profile: 1 is not true or false"),
    ),
    "a section that is a flag": (
        (None, {"activation_checkpointing": True}), {},
        ("deepspeed_config.activation_checkpointing: it is a bool\n    legal: a mapping",),
    ),
    "slots without a number": (
        (None,), {"partition_activations": True, "contiguous_checkpointing": True},
        ("deepspeed.configure.contiguous_checkpointing: contiguous buffers need the number of layers",),
    ),
    "slots without partitions": (
        (None,), {"contiguous_checkpointing": True, "num_checkpoints": 2},
        ("contiguous_checkpointing: contiguous buffers hold partitioned", "fix: set partition_activations too"),
    ),
    "slots with neither": (
        in_section(contiguous_memory_optimization=True), {}, ("but partitioning is off", "the number of layers"),
    ),
    "an mpu that cannot be asked": (
        (SimpleNamespace(get_model_parallel_rank=lambda: 0),), {},
        ("configure.mpu_: a SimpleNamespace has no get_model_parallel_group and no get_model_parallel_world_size",),
    ),
    "an mpu without a group": (
        (mpu_of("tp", form="tensor_model"),), {"partition_activations": True},
        ("deepspeed.configure.mpu_: torch.distributed is not initialised",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_a_mistake_is_an_error_and_changes_nothing(name):
    args, kwargs, texts = FAILS[name]
    checkpointing.configure(None, checkpoint_in_cpu=True)
    before = dict(vars(checkpointing._process))
    with pytest.raises(ConfigError) as error:
        checkpointing.configure(*args, **kwargs)
    assert vars(checkpointing._process) == before
    assert [text for text in texts if text not in str(error.value)] == []


def test_files_that_cannot_be_read(tmp_path):
    for name, content, text in (
        ("missing", None, "it cannot be read: No such file or directory"),
        ("broken", '{"activation_checkpointing": {,}}', "it is not JSON: "),
        ("listed", "[]", "it is a list\n    legal: a mapping"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError) as error:
            checkpointing.configure(None, str(path))
        assert str(error.value).startswith(f"{path}: {text}")


def test_a_group_is_not_asked_for_unless_something_is_partitioned():
    checkpointing.configure(mpu_of("tp"))
    assert checkpointing.is_configured()


def test_flags_that_are_set_one_by_one():
    checkpointing.partition_activations_in_checkpoint(True)
    assert now().partition_activations
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.set_num_layers(7)
    assert now() == ActivationCheckpointing(number_checkpoints=7)
    assert not checkpointing.is_configured()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: checkpointing.partition_activations_in_checkpoint(True), "_in_checkpoint.mpu_: torch.distributed is"),
        (lambda: checkpointing.partition_activations_in_checkpoint("on"), "'on' is not true or false"),
        (lambda: checkpointing.set_num_layers(0), "deepspeed.set_num_layers: 0 is not a number of checkpoints"),
    ],
)
def test_what_is_set_one_by_one_is_checked_too(call, text):
    checkpointing.configure(mpu_of("tp"))
    with pytest.raises(ConfigError) as error:
        call()
    assert text in str(error.value)
    assert now() == ActivationCheckpointing()


def configured_with_another_group() -> str:
    left_out = [dist.new_group([rank]) for rank in range(2)][1 - dist.get_rank()]
    try:
        checkpointing.configure(mpu_of(left_out), partition_activations=True)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_group_without_this_rank():
    for rank, text in enumerate(run_ranks(2, configured_with_another_group)):
        assert text.startswith(f"deepspeed.configure.mpu_: rank {rank} is not in the group")


# `synchronize` and `profile`

WAITS = Noted()  # what the region can reach is put back before it runs again


def region(x: Tensor) -> Tensor:
    """Tells when it runs, and when its backward does."""
    WAITS.append("run")
    out = x.sin().exp()
    if out.requires_grad:
        out.register_hook(lambda grad: WAITS.append("backward"))
    return out.cos()


def test_the_device_is_waited_for_at_each_boundary(call, monkeypatch):
    WAITS.clear()
    monkeypatch.setattr(checkpointing, "synchronize_device", partial(WAITS.append, "wait"))
    checkpointing.configure(None, synchronize=True)
    x = torch.randn(4, requires_grad=True)
    h = x * 1
    h.register_hook(lambda grad: WAITS.append("before"))
    out = call(region, h) * 2
    assert WAITS == ["wait", "run", "wait"]
    out.register_hook(lambda grad: WAITS.append("after"))
    WAITS.clear()
    out.sum().backward()
    assert WAITS[:2] == ["after", "wait"]
    assert WAITS.count("wait") == 2
    assert WAITS[-2:] in (["wait", "before"], ["before", "wait"])  # both happen when the gradient has arrived at h
    assert WAITS.index("run") > 1


def test_times_are_logged(monkeypatch, caplog):
    ticks = iter(range(1000))
    monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: next(ticks) / 1000)
    checkpointing.configure(None, profile=True)
    x = torch.randn(4, WIDTH, requires_grad=True)
    linear, norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    with caplog.at_level(logging.INFO, logger="sac.deepspeed"):
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
    gc.collect()
    gc.disable()
    try:
        for step in range(4):
            out = call(torch.sin, x)
            if step % 2:
                out.sum().backward()
            del out
            assert not x._backward_hooks
    finally:
        gc.enable()
