"""`sac.report` counts the inputs that autograd holds of regions which are never recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import sac
from tests.support.blocks import FunctionBlock, Stack, llama_stack, policy, save, selective, square, tokens
from tests.support.training import built
from tests.support.whole_module_blocks import whole

VALUES: dict[str, Any] = {
    "default": selective(policy(default="save")),
    "the block itself": selective(policy(whole(""), default="save")),
    "the block itself, else recomputed": selective(policy(whole(""))),
    "everything by glob": selective(policy(save("*"))),
    **{f"default, {engine}": selective(policy(default="save"), engine=engine) for engine in ("replay", "rerun")},
}


def held_by_autograd(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of the storages that a plain forward's graph holds, parameters and buffers left out."""
    sizes: dict[int, int] = {}
    alive: list[Any] = []

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    with saved_tensors_hooks(lambda tensor: (alive.append(Held(tensor)), alive[-1])[1], lambda held: held.tensor):
        model(*inputs)
    for held in alive:
        storage = held.tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    for tensor in (*model.parameters(), *model.buffers()):
        sizes.pop(tensor.untyped_storage()._cdata, None)
    return sum(sizes.values())


def products(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.relu(x @ block.a) @ block.b


def reads_no_input(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.relu(x + 1) @ block.b


def reads_a_view(block: FunctionBlock, x: Tensor) -> Tensor:
    return torch.cat((x[:2] @ block.a, x[2:] @ block.b)).sin()


BODIES = (products, reads_no_input, reads_a_view)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("body", BODIES)
def test_kept_bytes_are_those_that_a_plain_graph_holds(body: Callable[..., Any], name: str) -> None:
    def build() -> Stack:
        return Stack(*(FunctionBlock(body) for _ in range(3)))

    plain, model = built(build), sac.apply(built(build), VALUES[name])
    for _ in range(2):
        x = square()[0].requires_grad_()
        model(x).sum().backward()
        report = sac.report(model)
        assert report.kept_bytes == held_by_autograd(plain, (x,))
    reads_input = body is not reads_no_input
    assert [kind.input_bytes for kind in report.kinds] == [reads_input * x.nbytes]


@pytest.mark.parametrize("name", VALUES)
def test_a_llama_block(name: str) -> None:
    plain, model = built(llama_stack), sac.apply(built(llama_stack), VALUES[name])
    (x,) = tokens()
    model(x.requires_grad_()).sum().backward()
    assert sac.report(model).kept_bytes == held_by_autograd(plain, (x,))


def test_what_is_recomputed_counts_its_inputs_once() -> None:
    model = sac.apply(built(lambda: Stack(FunctionBlock(products))), selective(policy(save("matmul"))))
    x = square()[0].requires_grad_()
    model(x).sum().backward()
    assert sac.report(model).kinds[0].input_bytes == x.nbytes


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(x)).relu()


@pytest.mark.parametrize("value", ["full", selective(policy(save("matmul")))], ids=["full", "selective"])
def test_copies_of_buffers_from_before_the_forward_are_counted(value: Any) -> None:
    model = sac.apply(Stack(Normed()), value)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    (kind,) = sac.report(model).kinds
    assert kind.input_bytes == x.nbytes + sum(buffer.nbytes for buffer in model.buffers())
