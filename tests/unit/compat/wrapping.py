"""A small model, and the ways in which torch's own functions wrap its layers for checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from sac.blocks.install import regions_of
from tests.support.layers import PreNormLayer

Put = Callable[[Any, nn.Module], Any]  # a face (torch's or ours) and the model


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(PreNormLayer() for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = self.dropout(layer(h))
        return self.head(h)


def model(layers: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(layers)


def train(network: nn.Module, steps: int = 3) -> list[Tensor]:
    """Losses, gradients, weights and the random state after some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        ids = torch.randint(16, (2, 8))
        loss = network(ids).square().mean()
        loss.backward()
        seen += [loss.detach(), *(local(one.grad).clone() for one in network.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(local(one.detach()) for one in network.parameters()), torch.get_rng_state()]


def local(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, PreNormLayer)


def on_layers(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, check_fn=is_layer)


def by_partial(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, checkpoint_impl=face.CheckpointImpl.NO_REENTRANT)
    face.apply_activation_checkpointing(network, checkpoint_wrapper_fn=wrap, check_fn=is_layer)


def reentrant(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, checkpoint_impl=face.CheckpointImpl.REENTRANT)
    face.apply_activation_checkpointing(network, wrap, is_layer)


def by_partial_of_partial(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, preserve_rng_state=False)
    wrap = functools.partial(wrap, preserve_rng_state=True, early_stop=False, determinism_check="none")
    face.apply_activation_checkpointing(network, wrap, is_layer)


def by_function(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, lambda one: face.checkpoint_wrapper(one), is_layer)


def by_policy_object(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, auto_wrap_policy=ModuleWrapPolicy({PreNormLayer}))


def by_policy_with_arguments(face: Any, network: nn.Module) -> None:
    policy = CustomPolicy(lambda one: {"preserve_rng_state": True} if is_layer(one) else isinstance(one, nn.Linear))
    face.apply_activation_checkpointing(network, auto_wrap_policy=policy)


def by_policy_function(face: Any, network: nn.Module) -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5000)
    face.apply_activation_checkpointing(network, auto_wrap_policy=policy)


def one_by_one(face: Any, network: nn.Module) -> None:
    for place, layer in enumerate(network.layers):
        network.layers[place] = face.checkpoint_wrapper(layer, preserve_rng_state=True)


def inside_one_another(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, check_fn=lambda one: isinstance(one, (PreNormLayer, nn.Linear)))


def inner_first(face: Any, network: nn.Module) -> None:
    for place, layer in enumerate(network.layers):
        layer.up = face.checkpoint_wrapper(layer.up)
        network.layers[place] = face.checkpoint_wrapper(layer)


def outer_first(face: Any, network: nn.Module) -> None:
    for layer in network.layers:
        wrapped = face.checkpoint_wrapper(layer)
        inner = getattr(wrapped, "_checkpoint_wrapped_module", wrapped)
        inner.up = face.checkpoint_wrapper(inner.up)


PUTS: list[Put] = [
    on_layers, by_partial, reentrant, by_partial_of_partial, by_function, by_policy_object, by_policy_with_arguments,
    by_policy_function, one_by_one, inside_one_another, inner_first, outer_first,
]  # fmt: skip


def region_paths(network: nn.Module) -> list[str]:
    return [installed.region.path for installed in regions_of(network)]
