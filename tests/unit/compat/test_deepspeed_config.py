"""`deepspeed.configure`: where its settings come from, which of them win, and what each mistake is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import sac.compat.deepspeed as checkpointing
from sac.compat.deepspeed import ActivationCheckpointing
from sac.errors import ConfigError
from tests.support.ranks import run_ranks

EVERYTHING = {
    "partition_activations": True,
    "number_checkpoints": 4,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


@pytest.fixture(autouse=True)
def _nothing_is_configured(monkeypatch):
    monkeypatch.setattr(checkpointing, "_process", checkpointing._Process())


def now() -> ActivationCheckpointing:
    return checkpointing._process.section


def test_the_defaults_are_deepspeeds():
    assert not checkpointing.is_configured()
    checkpointing.configure(None)
    assert checkpointing.is_configured()
    assert now() == ActivationCheckpointing(False, None, False, False, False, False)


def test_from_arguments():
    checkpointing.configure(None, None, True, True, 4, True, True, True)
    assert now() == ActivationCheckpointing(**EVERYTHING)


def test_from_a_mapping():
    checkpointing.configure(None, {"train_batch_size": 8, "activation_checkpointing": EVERYTHING})
    assert now() == ActivationCheckpointing(**EVERYTHING)
    checkpointing.configure(None, {"train_batch_size": 8})
    assert now() == ActivationCheckpointing()


@pytest.mark.parametrize("kind", [str, Path])
def test_from_a_file(tmp_path, kind):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"activation_checkpointing": EVERYTHING}), encoding="utf-8")
    checkpointing.configure(None, kind(path))
    assert now() == ActivationCheckpointing(**EVERYTHING)


def test_arguments_win_over_the_config():
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "profile": True, "number_checkpoints": 4}}
    checkpointing.configure(None, config, checkpoint_in_cpu=False, num_checkpoints=2)
    assert now() == ActivationCheckpointing(number_checkpoints=2, profile=True)


def test_no_mpu_leaves_the_one_of_before():
    mpu = SimpleNamespace(**{f"get_model_parallel_{what}": lambda: 1 for what in ("rank", "group", "world_size")})
    checkpointing.configure(mpu)
    checkpointing.configure(None)
    assert checkpointing._process.mpu is mpu


def refused(*args: Any, **kwargs: Any) -> str:
    """Return what `configure` says of its arguments; hold that nothing has changed."""
    checkpointing.configure(None, checkpoint_in_cpu=True)
    process = checkpointing._process
    before = (process.section, process.mpu, process.settings, process.boundaries)
    with pytest.raises(ConfigError) as error:
        checkpointing.configure(*args, **kwargs)
    assert (process.section, process.mpu, process.settings, process.boundaries) == before
    return str(error.value)


def test_an_unknown_key():
    """DeepSpeed passes it over; its own text on the format names this wrong one."""
    assert refused(None, {"activation_checkpointing": {"partitioned_activations": True, "cpu": False}}) == (
        "deepspeed_config.activation_checkpointing.partitioned_activations: it is not known\n"
        "    did you mean: partition_activations\n"
        "    legal: partition_activations, number_checkpoints, contiguous_memory_optimization, cpu_checkpointing, "
        "synchronize_checkpoint_boundary, profile\n"
        "deepspeed_config.activation_checkpointing.cpu: it is not known\n"
        "    legal: partition_activations, number_checkpoints, contiguous_memory_optimization, cpu_checkpointing, "
        "synchronize_checkpoint_boundary, profile"
    )


def test_keys_outside_of_their_section():
    assert refused(None, {"cpu_checkpointing": True}) == (
        "deepspeed_config.cpu_checkpointing: it is outside of activation_checkpointing\n"
        "    fix: put it into activation_checkpointing"
    )


def test_values_of_the_wrong_sort():
    section = {"cpu_checkpointing": "yes", "number_checkpoints": 0}
    assert refused(None, {"activation_checkpointing": section}) == (
        "deepspeed_config.activation_checkpointing.cpu_checkpointing: 'yes' is not true or false\n"
        "    legal: true, false\n"
        "    fix: write true, without quotes\n"
        "deepspeed_config.activation_checkpointing.number_checkpoints: 0 is not a number of checkpoints\n"
        "    legal: a whole number, 1 or more"
    )
    assert refused(None, profile=1, num_checkpoints="4") == (
        "deepspeed.configure.num_checkpoints: '4' is not a number of checkpoints\n"
        "    legal: a whole number, 1 or more\n"
        "    fix: write 4, without quotes\n"
        "deepspeed.configure.profile: 1 is not true or false\n"
        "    legal: true, false\n"
        "    fix: write true, without quotes"
    )


def test_a_section_that_is_no_mapping():
    assert refused(None, {"activation_checkpointing": True}) == (
        "deepspeed_config.activation_checkpointing: it is a bool\n    legal: a mapping"
    )


def test_files_that_cannot_be_read(tmp_path):
    missing, broken, listed = (tmp_path / name for name in ("missing", "broken", "listed"))
    broken.write_text('{\n  "activation_checkpointing": {,}\n}', encoding="utf-8")
    listed.write_text("[]", encoding="utf-8")
    assert refused(None, str(missing)) == f"{missing}: it cannot be read: No such file or directory"
    assert refused(None, str(broken)).startswith(f"{broken}: it is not JSON: ")
    assert refused(None, str(listed)) == f"{listed}: it is a list\n    legal: a mapping"


def test_contiguous_buffers_need_a_number_of_layers_and_partitions():
    layers = (
        "deepspeed.configure.contiguous_checkpointing: contiguous buffers need the number of layers whose checkpoints "
        "they hold\n"
        "    fix: give num_checkpoints (number_checkpoints in a file)"
    )
    partitions = (
        "deepspeed.configure.contiguous_checkpointing: contiguous buffers hold partitioned activations, but "
        "partitioning is off\n"
        "    fix: set partition_activations too"
    )
    assert refused(None, partition_activations=True, contiguous_checkpointing=True) == layers
    assert refused(None, contiguous_checkpointing=True, num_checkpoints=2) == partitions
    both = {"activation_checkpointing": {"contiguous_memory_optimization": True}}
    assert refused(None, both) == f"{partitions}\n{layers}"


def test_an_mpu_that_cannot_be_asked():
    mpu = SimpleNamespace(get_model_parallel_rank=lambda: 0)
    assert refused(mpu) == (
        "deepspeed.configure.mpu_: a SimpleNamespace has no get_model_parallel_group and no "
        "get_model_parallel_world_size\n"
        "    fix: add it; get_tensor_model_parallel_… will do too"
    )


def test_a_group_that_is_none():
    answers = {"rank": lambda: 0, "group": lambda: "tp", "world_size": lambda: 2}
    mpu = SimpleNamespace(**{f"get_tensor_model_parallel_{what}": answer for what, answer in answers.items()})
    assert refused(mpu, partition_activations=True) == (
        "deepspeed.configure.mpu_: torch.distributed is not initialised\n"
        "    fix: call torch.distributed.init_process_group first"
    )
    checkpointing.configure(mpu)  # nothing is partitioned: the group is not asked for


def test_flags_that_are_set_one_by_one():
    checkpointing.partition_activations_in_checkpoint(True)
    assert now().partition_activations
    checkpointing.partition_activations_in_checkpoint(False)
    checkpointing.set_num_layers(7)
    assert now() == ActivationCheckpointing(number_checkpoints=7)
    assert not checkpointing.is_configured()


def test_partitioning_one_by_one_is_checked_too():
    answers = {"rank": lambda: 0, "group": lambda: "tp", "world_size": lambda: 2}
    checkpointing.configure(SimpleNamespace(**{f"get_model_parallel_{key}": one for key, one in answers.items()}))
    with pytest.raises(ConfigError, match=r"^deepspeed\.partition_activations_in_checkpoint\.mpu_: torch\.distributed"):
        checkpointing.partition_activations_in_checkpoint(True)
    with pytest.raises(
        ConfigError, match=r"^deepspeed\.partition_activations_in_checkpoint: 'on' is not true or false"
    ):
        checkpointing.partition_activations_in_checkpoint("on")
    with pytest.raises(ConfigError, match=r"^deepspeed\.set_num_layers: 0 is not a number of checkpoints"):
        checkpointing.set_num_layers(0)
    assert now() == ActivationCheckpointing()


def configured_with_another_group() -> str:
    left_out = [dist.new_group([rank]) for rank in range(2)][1 - dist.get_rank()]
    answers = {"rank": lambda: 0, "group": lambda: left_out, "world_size": lambda: 2}
    mpu = SimpleNamespace(**{f"get_model_parallel_{what}": answer for what, answer in answers.items()})
    try:
        checkpointing.configure(mpu, partition_activations=True)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_group_without_this_rank():
    for rank, text in enumerate(run_ranks(2, configured_with_another_group)):
        assert text.startswith(f"deepspeed.configure.mpu_: rank {rank} is not in the group")
