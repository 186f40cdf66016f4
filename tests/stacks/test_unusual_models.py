"""Modules that are not plain: reparametrised, tied, scripted, with a `__call__` of their own; and odd ways to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize

import sac
from sac.errors import ModelError, RegionError
from sac.tools.comparison import count_flops
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.training import assert_same, built

WIDTH = 16
VALUES: dict[str, Any] = {"full": FULL, "selective": selective(policy(save("matmul", module="down*")))}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
Prepare = Callable[[Stack], object]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(x).tanh()))


class Slotted(Block):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "scale", 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class OwnCall(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) + 1


class Guarded(Block):
    def __setattr__(self, name: str, value: Any) -> None:
        assert name != "forward", "this class has a forward already"
        super().__setattr__(name, value)


class InnerAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.up(x)
        with torch.autocast("cpu", enabled=False):
            return x + self.down(h.float().tanh())


class Scaled(nn.Module):
    """A parametrization that runs a product of its own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ weight.t() @ weight


def linears(model: Stack) -> list[nn.Linear]:
    return [one for block in model.blocks for one in (block.up, block.down)]


def reparametrised(how: Callable[[nn.Linear], object]) -> Prepare:
    return lambda model: [how(one) for one in linears(model)]


def script_parts(model: Stack) -> None:
    for block in model.blocks:
        block.up = torch.jit.script(block.up)


def tie_weights(model: Stack) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def share_part(model: Stack) -> None:
    model.blocks[1].down = model.blocks[0].down


def one_block_twice(model: Stack) -> None:
    model.blocks[1] = model.blocks[0]


PREPARED: dict[str, Prepare] = {
    "parametrize": reparametrised(lambda one: parametrize.register_parametrization(one, "weight", Scaled())),
    "orthogonal": reparametrised(parametrizations.orthogonal),
    "spectral_norm": reparametrised(parametrizations.spectral_norm),
    "weight_norm": reparametrised(parametrizations.weight_norm),
    "spectral_norm by hooks": reparametrised(nn.utils.spectral_norm),
    "weight_norm by hooks": reparametrised(nn.utils.weight_norm),
    "scripted parts": script_parts,
    "tied weights": tie_weights,
    "a shared part": share_part,
    "one block twice": one_block_twice,
}


def trained(model: Stack, steps: int = 3) -> dict[str, Tensor]:
    """Gradients, buffers and losses of some steps of training."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        loss = one_step(model)
        optimizer.step()
        seen |= {f"{step} {name}": one.grad.clone() for name, one in model.named_parameters()}
        seen |= {f"{step} {name}": one.clone() for name, one in model.named_buffers()} | {f"{step} loss": loss}
        optimizer.zero_grad()
    return seen


def one_step(model: Stack) -> Tensor:
    loss = model(torch.randn(2, 4, WIDTH)).square().mean()
    loss.backward()
    return loss.detach()


def assert_equal_and_recomputed(plain: Stack, ours: Stack) -> None:
    assert_same(trained(plain), trained(ours))
    assert count_flops(lambda: one_step(ours)) > count_flops(lambda: one_step(plain))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated", "ignore:`torch.jit.script` is")
@pytest.mark.parametrize(
    ("name", "apply_first"),
    [(name, first) for name in PREPARED for first in (False, True) if (name, first) != ("scripted parts", True)],
)
@ON_EACH_VALUE
def test_prepared(value: Any, name: str, apply_first: bool) -> None:
    def build(on: bool) -> Stack:
        model = built(lambda: Stack(Block(), Block()))
        if on and apply_first:
            sac.apply(model, value)
        torch.manual_seed(5)
        PREPARED[name](model)
        return sac.apply(model, value) if on and not apply_first else model

    assert_equal_and_recomputed(build(False), build(True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@ON_EACH_VALUE
def test_torchscript_cannot_read_a_forward_of_ours(value: Any) -> None:
    model = sac.apply(Stack(Block(), Block()), value)
    with pytest.raises(torch.jit.frontend.NotSupportedError, match="variable number of arguments"):
        script_parts(model)


@pytest.mark.parametrize("kind", [Slotted, OwnCall, Guarded, InnerAutocast])
@ON_EACH_VALUE
def test_classes(value: Any, kind: type[Block]) -> None:
    plain, ours = (built(lambda: Stack(kind(), kind())) for _ in range(2))
    assert_equal_and_recomputed(plain, sac.apply(ours, value))


def cached_step(value: Any) -> list[Tensor]:
    """One step with a cache of parametrizations around forward and backward."""
    model = built(lambda: Stack(Block(), Block()))
    PREPARED["parametrize"](model)
    sac.apply(model, value)
    torch.manual_seed(7)
    with parametrize.cached():
        loss = one_step(model)
    return [loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("value", [FULL, {**VALUES["selective"], "engine": "rerun"}], ids=VALUES.keys())
def test_a_cache_of_parametrizations_around_forward_and_backward_is_an_error(value: Any) -> None:
    """In recomputation the cache holds what the forward had to make. torch's own checkpoint raises too."""
    with pytest.raises(RegionError, match="recomputation"):
        cached_step(value)


def test_a_cache_of_parametrizations_is_nothing_to_replay() -> None:
    """It makes again what the forward made, whatever Python would find in the cache now."""
    value = {**VALUES["selective"], "engine": "replay"}
    assert all(map(torch.equal, cached_step("none"), cached_step(value)))


def scripted_blocks(model: Stack) -> nn.Module:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    return Stack(*(torch.jit.trace(Plain(), torch.randn(2, WIDTH)) for _ in range(2)))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@ON_EACH_VALUE
def test_scripted_blocks_are_an_error(value: Any) -> None:
    model = scripted_blocks(Stack())
    with pytest.raises(ModelError) as error:
        sac.apply(model, value)
    assert str(error.value) == (
        "blocks.0: this module is compiled by TorchScript, which calls its own code and no forward of ours\n"
        "    fix: put sac on the plain model; torch.compile goes with it, TorchScript does not"
    )
    with pytest.raises(ModelError, match=r"is compiled by TorchScript"):
        sac.apply(nn.Sequential(*model.blocks), "full")


@ON_EACH_VALUE
def test_functional_call(value: Any) -> None:
    def run(model: Stack) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}
        torch.manual_seed(3)
        for step in range(3):
            given = {n: (one.detach() * (1 + step)).requires_grad_() for n, one in model.named_parameters()}
            functional_call(model, given, (torch.randn(2, 4, WIDTH),)).square().sum().backward()
            seen |= {f"{step} {name}": one.grad for name, one in given.items()}
        return seen

    plain, ours = (built(lambda: Stack(Block(), Block())) for _ in range(2))
    assert_same(run(plain), run(sac.apply(ours, value)))


X = torch.ones(3, 2, WIDTH)
TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: grad(lambda x: model(x).sum())(X),
    "vjp": lambda model: vjp(model, X),
    "jvp": lambda model: jvp(model, (X,), (X,)),
    "vmap": lambda model: vmap(model)(X),
    "per sample": lambda model: vmap(
        grad(lambda given, x: functional_call(model, given, (x,)).sum()), in_dims=(None, 0)
    )(dict(model.named_parameters()), X),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@ON_EACH_VALUE
def test_transforms_of_torch_func_are_an_error(value: Any, transform: Callable[[nn.Module], Any]) -> None:
    model = built(lambda: Stack(Block(), Block())).eval()
    sac.apply(model, value)
    with pytest.raises(RegionError) as error:
        transform(model)
    assert str(error.value) == (
        "blocks.0: it is called inside a transform of torch.func (grad, vjp, vmap, jvp, ...), whose tensors "
        "cannot be kept\n"
        "    fix: call sac.remove(model) before the transform, or torch.autograd instead of torch.func; "
        "torch.func.functional_call by itself is fine"
    )
    with torch.no_grad():
        vmap(model)(X)  # no region
    transform(sac.remove(model))


@ON_EACH_VALUE
def test_a_backward_that_is_batched(value: Any) -> None:
    def jacobian(model: nn.Module) -> dict[str, Tensor]:
        x = X.clone().requires_grad_()
        out = model(x).sum((0, 1))
        basis = torch.eye(WIDTH)
        return {"jacobian": torch.autograd.grad(out, x, basis, is_grads_batched=True)[0]}

    plain, ours = (built(lambda: Stack(Block(), Block())).eval() for _ in range(2))
    assert_same(jacobian(plain), jacobian(sac.apply(ours, value)))


@ON_EACH_VALUE
def test_loss_scaling_under_autocast(value: Any) -> None:
    def run(model: Stack) -> dict[str, Tensor]:
        torch.manual_seed(3)
        scaler, optimizer = torch.amp.GradScaler("cpu", 2.0**10), torch.optim.SGD(model.parameters(), 0.02)
        seen: dict[str, Tensor] = {}
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(2, 4, WIDTH)).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            seen |= {f"{step} {name}": one.grad.clone() for name, one in model.named_parameters()}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen[f"{step} scale"] = torch.tensor(scaler.get_scale())
            optimizer.zero_grad()
        return seen

    plain, ours = (built(lambda: Stack(Block(), InnerAutocast())) for _ in range(2))
    assert_same(run(plain), run(sac.apply(ours, value)))
