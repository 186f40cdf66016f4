"""Never saves what cannot be saved: `ops: "*"` passes over writes and views; a rule for them alone is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import PolicyError
from sac.reporting import decisions_of
from tests.support.blocks import APPLY, FunctionBlock, Stack, install, policy, save, selective, square
from tests.support.training import assert_same_training, built


def of_every_kind(block: FunctionBlock, x: Tensor) -> Tensor:
    """Products among writes, views, a constant, an empty tensor that is filled, and an op that returns no tensor."""
    h = (x @ block.a).t()
    filled = torch.empty(h.shape).fill_(0.5)
    h = torch.add(h, filled).mul_(2.0)
    h[:2].zero_()
    assert torch.equal(h[0].detach(), torch.zeros(8))
    return (h.reshape(-1).view(8, 8) @ block.b).sin() + torch.zeros_like(x)


CANNOT = (
    "add_",
    "mul_",
    "fill_",
    "zero_",
    "t",
    "view",
    "slice",
    "select",
    "detach",
    "empty",
    "zeros",
    "zeros_like",
    "equal",
)


@pytest.mark.parametrize("entry", [*APPLY, "context_fn"])
@pytest.mark.parametrize(
    "chosen", [policy(save("*")), policy(default="save"), policy({"ops": "*", "do": "alternate"})], ids=str
)
def test_a_glob_over_everything_saves_what_can_be_saved(chosen, entry):
    assert_same_training(
        lambda: Stack(FunctionBlock(of_every_kind)), selective(chosen), entry=entry, make_input=square, steps=3
    )


@pytest.mark.parametrize("entry", APPLY)
@pytest.mark.parametrize("chosen", [policy(save("*")), policy(save("matmul"), default="save")], ids=["glob", "default"])
def test_no_decision_is_to_save_what_cannot_be_saved(chosen, entry):
    model = install(built(lambda: Stack(FunctionBlock(of_every_kind))), selective(chosen), entry)
    for _ in range(2):
        model(*(x.requires_grad_() for x in square())).sum().backward()
    saved = {row.op.split(".")[1] for row in decisions_of(model) if row.decision == "save"}
    assert {"mm", "sin"} <= saved
    assert saved & set(CANNOT) == set()


@pytest.fixture
def giving_back():
    """Define ops whose schemas do not say that they give back their argument, or a view of it."""
    library = torch.library.Library("sac_gives_back", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    library.define("viewed(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CPU")
    library.impl("viewed", lambda x: x.view(-1), "CPU")
    yield torch.ops.sac_gives_back
    library._destroy()


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_an_argument_that_an_op_gives_back_is_not_held_as_its_result(giving_back, engine):
    def given_back(block, x):
        h = (x @ block.a).sin()
        same, viewed = giving_back.same(h.detach() * 2), giving_back.viewed(h.detach() * 3)
        return h * same * viewed.view_as(h)

    value = selective(policy(save("sac_gives_back.*")))
    model = install(built(lambda: Stack(FunctionBlock(given_back))), value, f"apply, {engine}")
    model(*(x.requires_grad_() for x in square())).sum().backward()
    rows = {row.op: row.decision for row in decisions_of(model) if row.op.startswith("sac_gives_back")}
    assert rows == {"sac_gives_back.same.default": "recompute", "sac_gives_back.viewed.default": "recompute"}


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        ("aten.add_.Tensor", "it writes its argument `self`"),
        ("aten.view", "it is a view"),
        ("aten.empty.memory_format", "it makes an uninitialised tensor"),
        ("aten.zeros_like", "it makes a constant"),
        ("aten.equal", "it returns no tensor"),
        ("c10d.allreduce_", "c10d ops belong to the infrastructure"),
    ],
)
def test_a_rule_for_such_ops_alone_is_refused_before_anything_runs(ops, reason):
    with pytest.raises(PolicyError) as error:
        sac.apply(Stack(FunctionBlock(of_every_kind)), selective(policy(save(ops))))
    assert f"cannot be saved: {reason}" in str(error.value)
