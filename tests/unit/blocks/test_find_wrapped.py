"""Blocks of wrapped models, and clean paths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sac.blocks.find import Block, clean_path, find_blocks
from sac.policy.patterns import PathPattern
from tests.support.plain_zoo import Block as PlainBlock
from tests.support.plain_zoo import plain

LAYERS = ["layers.0", "layers.1", "layers.2"]


def paths(blocks: tuple[Block, ...]) -> list[str]:
    return [block.path for block in blocks]


def patterns(*texts: str) -> list[PathPattern]:
    return [PathPattern.parse(text) for text in texts]


class PeftModel(nn.Module):
    """Laid out as PEFT lays out an adapted model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = LoraModel(model)


class BaseTuner(nn.Module):
    pass


class LoraModel(BaseTuner):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _each_block(model: nn.Module, wrap) -> nn.Module:
    for key in model.layers:
        model.layers[key] = wrap(model.layers[key])
    return model


WRAPPED = {
    "data-parallel": nn.DataParallel,
    "averaged": torch.optim.swa_utils.AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled-blocks": lambda model: _each_block(model, lambda block: torch.compile(block, backend="eager")),
    "checkpoint-wrapped": lambda model: _each_block(model, checkpoint_wrapper),
    "both": lambda model: _each_block(model, lambda b: torch.compile(checkpoint_wrapper(b), backend="eager")),
    "peft": PeftModel,
    "compiled-peft": lambda model: torch.compile(PeftModel(model), backend="eager"),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_are_looked_through(wrap) -> None:
    plain_model, _ = plain("titan")
    inner = list(plain_model.layers.values())
    model = wrap(plain_model)
    blocks = find_blocks(model)
    assert paths(blocks) == LAYERS
    assert [b.layer for b in blocks] == [0, 1, 2]
    assert all(type(block.module) is PlainBlock for block in blocks)
    if wrap is not torch.optim.swa_utils.AveragedModel:  # which copies the model
        assert [block.module for block in blocks] == inner
    assert find_blocks(model, patterns=patterns("layers.*")) == blocks


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_raw_paths_match_too_and_clean_alike(wrap) -> None:
    model = wrap(plain("titan")[0])
    wanted = type(find_blocks(model)[1].module)
    raw = [n for n, m in model.named_modules() if type(m) is wanted or n.rsplit(".", 1)[-1] == "1"]
    raw = [name for name in raw if clean_path(name, model) == "layers.1"]
    assert raw
    for name in raw:
        if name.endswith("_module") or name.endswith("_orig_mod"):  # inside the outermost wrapper
            continue
        assert paths(find_blocks(model, patterns=patterns(name))) == ["layers.1"]


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_wrappers_are_looked_through() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = plain("titan")
    inner = list(model.layers.values())
    mesh = init_device_mesh("cpu", (1,))
    for block in inner:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert [(b.path, b.module) for b in find_blocks(model)] == list(zip(LAYERS, inner, strict=True))

    replicated = nn.parallel.DistributedDataParallel(plain("titan")[0])
    assert paths(find_blocks(replicated)) == LAYERS
    assert paths(find_blocks(replicated, patterns=patterns("module.layers.1", "layers.2"))) == ["layers.1", "layers.2"]


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_flat_sharding_is_looked_through() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, _ = plain("titan")
    inner = list(model.layers.values())
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({PlainBlock}), device_id=torch.device("cpu"), use_orig_params=True
    )
    assert [(b.path, b.module) for b in find_blocks(sharded)] == list(zip(LAYERS, inner, strict=True))


def test_clean_path_without_a_model_drops_what_only_wrappers_say() -> None:
    assert clean_path("_orig_mod.layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert clean_path("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module") == "layers.0"
    assert clean_path("base_model.model.model.layers.0") == "model.layers.0"
    assert clean_path("module.layers.0") == "module.layers.0"
    assert clean_path("_orig_mod") == clean_path("") == ""


def test_clean_path_with_a_model_knows_wrappers_by_class() -> None:
    model = nn.DataParallel(plain("titan")[0])
    assert clean_path("module.layers.0", model) == "layers.0"
    ordinary = nn.Module()
    ordinary.module = plain("titan")[0]
    assert clean_path("module.layers.0", ordinary) == "module.layers.0"
    assert paths(find_blocks(ordinary)) == ["module.layers.0", "module.layers.1", "module.layers.2"]


NAMES = st.sampled_from(["layers", "0", "_orig_mod", "_checkpoint_wrapped_module", "mlp", "module"])


@given(st.lists(NAMES, max_size=8))
def test_cleaning_twice_is_cleaning_once(segments: list[str]) -> None:
    once = clean_path(".".join(segments))
    assert clean_path(once) == once
