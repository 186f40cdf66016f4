"""Promise 1 where programs change from step to step: what is told, and what stays as it is.

`tests/fuzz/test_changing_programs_are_exact.py` compares the results of such programs, each change by itself and mixed.
"""

from __future__ import annotations

import collections
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from sac.errors import RegionError, SacWarning
from tests.support import blocks
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.programs import Block

MATMULS = selective(policy(save("matmul", optional=True)))


def model_of(body: Any, value: dict[str, Any] | None = None) -> Stack:
    torch.manual_seed(0)
    model = Stack(Block(body, {}), Block(body, {}))
    return model if value is None else sac.apply(model, value)


def mlp(block: Block, x: Tensor) -> Tensor:
    return block.down(torch.tanh(block.up(x)).sin())


def with_a_new_layer(block: Block, x: Tensor) -> Tensor:
    if not hasattr(block, "later"):
        block.later = nn.Linear(8, 8)
    return x + mlp(block, block.later(x).sin())


@pytest.mark.parametrize("value", [FULL, {**MATMULS, "engine": "rerun"}], ids=["full", "rerun"])
def test_a_layer_that_the_forward_makes_is_refused_by_a_rerun(value: dict[str, Any]) -> None:
    """It would make another one, and that would get the gradients."""
    with pytest.raises(RegionError, match="its forward has added a layer"):
        model_of(with_a_new_layer, value)(torch.ones(3, 8)).sum().backward()


def test_a_layer_that_the_forward_makes_is_replayed() -> None:
    plain, ours = model_of(with_a_new_layer), model_of(with_a_new_layer, {**MATMULS, "engine": "replay"})
    for model in (plain, ours):
        torch.manual_seed(1)
        model(torch.ones(3, 8)).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def writes_late(block: Block, x: Tensor) -> Tensor:
    if block.calls % 3 == 0:
        with torch.no_grad():
            block.up.weight.copy_(F.normalize(block.up.weight) * 1.7)
    return x + mlp(block, x)


def test_unseen_write_to_a_parameter_warns_once_and_names_it() -> None:
    model = model_of(writes_late, FULL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.ones(3, 8)).sum().backward()
    found = [str(one.message) for one in caught if issubclass(one.category, SacWarning)]
    assert len({*found}) == len(found)
    assert {one.filename for one in caught} == {blocks.__file__}  # where the model calls the block
    pattern = (
        r"blocks.0: this call changed parameter '(up\.)?weight' \(float32\[8, 8\]\) in place, which no earlier call did"
    )
    assert re.match(pattern, found[0])


def test_a_written_parameter_keeps_its_version() -> None:
    """Whoever else has saved the parameter must not find that the recomputation has written to it."""

    def normalizes(block: Block, x: Tensor) -> Tensor:
        with torch.no_grad():
            block.up.weight.copy_(F.normalize(block.up.weight) * 1.7)
        return x + mlp(block, x)

    model = model_of(normalizes, FULL)
    loss = (model(torch.randn(3, 8)) @ model.blocks[0].up.weight.t()).sum()  # autograd saves the weight outside, too
    versions = [one._version for one in model.parameters()]
    loss.backward()
    assert [one._version for one in model.parameters()] == versions


def test_a_policy_is_not_lost_by_a_call_that_took_a_short_path() -> None:
    def sometimes(block: Block, x: Tensor) -> Tensor:
        return x + mlp(block, x) if x.sum().item() > 0 else x + block.up.bias.sum()

    model = model_of(sometimes, MATMULS)
    model(-torch.ones(3, 8)).sum().backward()
    model(torch.ones(3, 8)).sum().backward()
    (kind,) = sac.report(model).kinds
    assert [(one.rule, one.hits) for one in kind.rules] == [("rule-0", 2)]  # per region


class Factory(collections.OrderedDict):  # type: ignore[type-arg]
    """Makes a new object whenever it is asked, as the table of activations of transformers does."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)()


FACTORY = Factory(tanh=nn.Tanh)


def test_a_dictionary_with_methods_of_its_own_is_left_as_it_is() -> None:
    layer = nn.Linear(4, 4)
    sac.checkpoint(lambda x: FACTORY["tanh"](layer(x)), torch.ones(3, 4)).sum().backward()
    assert [*dict.values(FACTORY)] == [nn.Tanh]


def test_context_fn_refuses_weights_that_change_between_the_passes() -> None:
    block = Block(mlp, {})
    contexts = sac.context_fn(policy(save("attention", optional=True)), block)
    out = checkpoint(block, torch.ones(3, 8), use_reentrant=False, context_fn=contexts)
    with torch.no_grad():
        block.up.weight.mul_(2.0)
    with pytest.raises(RegionError, match=r"a tensor from outside the region \(float32\[8, 8\]\) was changed in place"):
        out.sum().backward()


class Clamps(nn.Module):
    """Writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.alpha_dropout(x, 0.3, True)
        with torch.no_grad():
            self.out.weight.clamp_(-0.4, 0.4)
        return self.out(h)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("engine", ["auto", "replay"])
def test_what_is_remade_does_not_draw_anew(engine: str, early_stop: bool) -> None:
    """The second call writes to what the replay of the first starts from, which then takes another schedule."""
    rule = {**save("*", shape=["...", ">=4"]), "optional": True}
    value = selective(policy(rule), engine=engine, early_stop=early_stop, verify="never")
    assert all(map(torch.equal, trained(Clamps, calls=2), trained(Clamps, value, calls=2)))


class EndsOtherwise(nn.Module):
    """Draws in each call, and in every second one last by an op that fills what autograd has saved before it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = F.dropout(self.out(x), 0.3)
        return F.rrelu(h, training=True) if self.calls % 2 == 0 else h


def test_early_stop_does_not_cut_before_the_last_draw() -> None:
    assert all(map(torch.equal, trained(EndsOtherwise), trained(EndsOtherwise, FULL)))


def trained(build: Any, value: dict[str, Any] | None = None, calls: int = 1) -> list[Tensor]:
    """Gradients of three steps of one block, and the random state after each."""
    torch.manual_seed(0)
    model = Stack(build())
    if value is not None:
        sac.apply(model, value)
    found = []
    for _ in range(3):
        x = torch.randn(3, 4)
        for _ in range(calls):
            x = model(x)
        model.zero_grad()
        x.square().sum().backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append(torch.get_rng_state())
    return found
