"""Regions of `sac.apply` learn from earlier calls; a module that is changed between two steps is not what was learnt.

A block without noise needs no dispatch mode, with noise from a generator it does: as in region/test_fingerprint.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sac.recompute import regions
from sac.recompute import rerun as modes
from sac.region.writes import writes_unseen
from torch import Tensor, nn

import sac
from tests.support.blocks import FULL, Stack, policy, selective
from tests.support.stores import MODES
from tests.support.training import same_bits

NOISE = torch.Generator()


class Configuration:
    def __init__(self) -> None:
        self.loud = False


class Block(nn.Module):
    """Draws from a generator, or writes to a tensor that sac does not know, if told so by an attribute."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(6, 6), nn.Identity()
        self.register_buffer("count", torch.zeros(6))
        self.loud = self.part.loud = self.writes = self.counts = False
        self.configuration = Configuration()
        self.generator = generator
        self.total = torch.zeros(6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.linear(x).sin()
        if self.writes:
            y = y + self.total
            self.total.add_(1)
        if self.counts:
            with torch.no_grad():
                self.count.add_(1)
        if self.loud or self.part.loud or self.configuration.loud:
            y = y * noise_like(y, self.generator)
        return self.linear(y + self.count).sin()


def noise_like(y: Tensor, generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(y.shape, generator=generator or NOISE)


def loud(block: Any) -> None:
    block.loud = True


def loud_part(block: Any) -> None:
    block.part.loud = True


def writing(block: Any) -> None:
    block.writes = True


def counting(block: Any) -> None:
    block.counts = True


def hooked(block: Any) -> None:
    block.linear.register_forward_hook(lambda module, args, out: out * noise_like(out))


def other_part(block: Any) -> None:
    block.part = nn.Identity()
    block.part.loud = True


def thawed(block: Any) -> None:
    block.linear.weight.requires_grad_(True)


VALUES: dict[str, dict[str, Any]] = {
    "full": FULL,
    "full, reentrant": {**FULL, "use_reentrant": True},
    "full, host": MODES["full"](store="host"),
    "nothing saved": selective(policy()),
    "everything saved": selective(policy(default="save")),
}
CHANGES = (loud, loud_part, writing, counting, hooked, other_part, thawed)


def trained(model: nn.Module, blocks: list[Any], change: Any) -> list[Tensor]:
    """What four steps show, the modules being changed after two."""
    NOISE.manual_seed(3)
    seen: list[Tensor] = []
    for block in blocks:
        block.linear.weight.requires_grad_(change is not thawed)
    for step in range(4):
        if step == 2:
            for block in blocks:
                change(block)
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        out = model(x)
        out.square().sum().backward()
        seen += [out.detach(), x.grad, NOISE.get_state()]
        for block in blocks:
            seen += [block.total.clone(), block.count.clone()]
            seen += [one.grad for one in block.parameters() if one.grad is not None]
        model.zero_grad()
    return seen


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(Block(), Block())


def assert_same_steps(plain: list[Tensor], ours: list[Tensor]) -> None:
    assert len(plain) == len(ours)
    assert all(map(same_bits, plain, ours))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_block_is_changed_between_two_steps(value: dict[str, Any], change: Any) -> None:
    plain, ours = stack(), sac.apply(stack(), value)
    assert_same_steps(trained(plain, [*plain.blocks], change), trained(ours, [*ours.blocks], change))


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_of_a_chunk_is_changed_between_two_steps(change: Any) -> None:
    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Block() for _ in range(4)))

    plain, ours = chain(), sac.apply(chain(), {"mode": "full", "layers": {"uniform": 2}, "blocks": ["*"]})
    assert_same_steps(trained(plain, [*plain], change), trained(ours, [*ours], change))


def test_a_block_that_holds_a_generator_may_draw_at_any_time() -> None:
    def change(block: Any) -> None:
        block.configuration.loud = True  # an object in a module is not looked at

    def drawing() -> Stack:
        torch.manual_seed(0)
        return Stack(Block(torch.Generator().manual_seed(1)), Block(torch.Generator().manual_seed(2)))

    plain, ours = drawing(), sac.apply(drawing(), FULL)
    assert_same_steps(trained(plain, [*plain.blocks], change), trained(ours, [*ours.blocks], change))


def test_a_hook_is_removed_before_backward_next_to_a_module_without_a_table_of_hooks() -> None:
    # A module that an older torch has pickled, and that nothing calls, may lack one.
    def trained_once(model: Any) -> list[Tensor]:
        block = model.blocks[0]
        del vars(block.part)["_backward_pre_hooks"]
        block.linear = block._modules.pop("linear")  # now it comes after that module
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        hook = block.linear.register_forward_hook(lambda module, args, out: out * 2)
        out = model(x)
        hook.remove()
        out.square().sum().backward()
        return [out.detach(), x.grad, *(one.grad for one in model.parameters())]

    assert_same_steps(trained_once(stack()), trained_once(sac.apply(stack(), FULL)))


def test_an_unchanged_block_is_learnt_although_it_counts_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    enter = modes.ForwardMode.__enter__
    monkeypatch.setattr(modes.ForwardMode, "__enter__", lambda self: entered.append(self) or enter(self))
    model = sac.apply(Stack(Block()), FULL)
    for _ in range(6):
        model(torch.ones(2, 6)).sum().backward()
    assert 1 <= len(entered) <= 2


def test_modules_are_asked_what_they_do_once_per_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def counting(modules: Any) -> bool:
        asked.append(writes_unseen(modules))
        return asked[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(regions, "writes_unseen", counting)
    block = Block()
    block.linear.max_norm = None
    model = sac.apply(Stack(block), {**FULL, "engine": "replay"})

    def step(rows: int) -> None:
        model(torch.ones(rows, 6)).sum().backward()

    for rows in (2, 2, 2, 3, 3, 2):
        step(rows)
    assert asked == [False, False]
    block.linear.max_norm = 1.0
    for _ in range(3):
        step(2)
    assert asked == [False, False, True]
