"""One function per stack: a tiny model of it, trained in a mode (a config value of `sac.apply`), and what came of it.

Each imports its third-party packages when it is called, and skips the calling test where they are not installed.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from tests.stacks.composition import Outcome, train
from tests.stacks.stand_ins import import_timm, import_titan

SEED = 0


def measured(model: nn.Module, mode: Any, loss: Callable[[nn.Module], Tensor], **options: Any) -> Outcome:
    """Put `mode` on the model, and train on `loss(model)`."""
    return train(sac.apply(model, mode), loss, **options)


def diffusion(mode: Any, *, model: str = "flux") -> Outcome:
    """A model of diffusers, by the name of its function in `diffusion_models`."""
    pytest.importorskip("diffusers", reason="diffusers is in the extra `stacks`")
    from tests.stacks import diffusion_models

    torch.manual_seed(SEED)
    built, inputs = getattr(diffusion_models, model)()
    return measured(built.train(), mode, lambda trained: diffusion_models.denoising_loss(trained, inputs))


TIMM = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 3, "embed_dim": 64, "num_heads": 2},
    "swin_tiny_patch4_window7_224": {
        "img_size": 28,
        "window_size": 7,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 2),
    },
    "convnext_atto": {"depths": (2, 2, 2, 2), "dims": (8, 16, 16, 32)},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 3, "embed_dim": 48, "num_heads": 2},
    "MlpMixer": {"img_size": 32, "patch_size": 8, "num_blocks": 3, "embed_dim": 32},
}
"""Models of timm, and what makes them tiny; the last is a class, whose own models have a fixed size."""


def timm_model(name: str) -> tuple[nn.Module, Tensor]:
    """A model of timm and a batch of images."""
    timm = import_timm()
    torch.manual_seed(SEED)
    options = {"num_classes": 10, **TIMM[name]}
    build = getattr(timm.models, name) if name == "MlpMixer" else functools.partial(timm.create_model, name)
    model = build(**options)
    size = TIMM[name].get("img_size", 32)
    return model.train(), torch.randn(2, 3, size, size)


def vision(mode: Any, *, model: str = "vit_tiny_patch16_224") -> Outcome:
    """A model of timm."""
    built, images = timm_model(model)
    return measured(built, mode, lambda trained: trained(images).square().mean())


def lightning(mode: Any, *, way: str = "configure_model", **options: Any) -> Outcome:
    """A step of a Lightning Trainer; `way` is a key of `lightning_module.MODULES`, `options` those of the Trainer."""
    pytest.importorskip("lightning", reason="lightning is in the extra `stacks`")
    from tests.stacks import lightning_module as module

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return module.MODULES[way](mode)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few workers, no validation loop
        return module.measured_fit(build, callbacks=module.callbacks(way, mode), **options)


def lightning_ddp(mode: Any, **options: Any) -> Outcome:
    """The same in one of several processes that have a process group, under the strategy `ddp`."""
    return _lightning_on_ranks(mode, "ddp", **options)


def lightning_fsdp2(mode: Any) -> Outcome:
    """The same under `ModelParallelStrategy`: `configure_model` shards each block, and the callback comes after."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    def strategy() -> Any:
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)

    return _lightning_on_ranks(mode, strategy, way="callback and fully_shard", anew=True)


def _lightning_on_ranks(mode: Any, strategy: Any, **options: Any) -> Outcome:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, told):
        return lightning(mode, strategy=strategy, devices=int(world), plugins=[TorchElasticEnvironment()], **options)


def torchtitan(mode: Any) -> Outcome:
    """A Llama 3 of torchtitan under its `ActivationCheckpointing`, ours or its own; see `titan_models`."""
    import_titan("torchtitan.distributed.activation_checkpoint")
    from tests.stacks import titan_models

    return titan_models.trained(mode)


def low_precision(mode: Any, *, conversion: str = "float8 tensorwise", backend: str = "", length: int = 32) -> Outcome:
    """A stack in low precision by torchao, a key of `low_precision.CONVERSIONS`; compiled as a whole by `backend`."""
    from tests.stacks import low_precision as models

    model = models.build(conversion, small=bool(backend))
    given = models.inputs(length)
    sac.apply(model, mode)
    called = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    return train(model, lambda _: models.loss(given, called), compiled=bool(backend))


def qlora(mode: Any, *, length: int = 16, **adapter: Any) -> Outcome:
    """A Llama in 4 bits by bitsandbytes with adapters of PEFT; `adapter` are keys of `LoraConfig`."""
    from tests.stacks import qlora_models

    model = qlora_models.build(**adapter)
    return measured(model, mode, functools.partial(qlora_models.loss, length=length))
