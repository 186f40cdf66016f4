"""`sac.unit(name, function)` makes a piece of a forward one unit of policy."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac

calls: list[str] = []
Pair = namedtuple("Pair", "first second")


@dataclass
class Angles:
    cos: Tensor
    sin: Tensor


@sac.unit("rope")
def rotate(parts: dict[str, Any], *, angles: Angles) -> Pair:
    calls.append("rope")
    low, high = parts["halves"]
    return Pair(low * angles.cos - high * angles.sin, high * angles.cos + low * angles.sin)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.out, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.mlp = sac.unit("mlp", self.forward_mlp)

    def forward_mlp(self, x: Tensor) -> Tensor:
        calls.append("mlp")
        return F.dropout(self.out(self.norm(x).tanh()), 0.5)

    @sac.unit("gate")
    def gated(self, x: Tensor, *, scale: float) -> Tensor:
        calls.append("gate")
        return x.mul_(scale) + 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        angle = h.mean(-1, keepdim=True)
        rotated = rotate({"halves": list(h.chunk(2, -1))}, angles=Angles(angle.cos(), angle.sin()))
        h = torch.cat([rotated.first, rotated.second], -1)
        return x + self.gated(self.mlp(h) * 1.0, scale=0.5).sin()


def policy(*rules: dict[str, Any]) -> dict[str, Any]:
    named = [{"id": f"rule{number}", **rule} for number, rule in enumerate(rules)]
    return {"schema": "sac/v1", "name": "units", "rules": named}


def trained(value: Any, steps: int = 3, make: Callable[[], nn.Module] = Block, change: Any = None) -> list[Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(make(), make())
    if value is not None:
        sac.apply(model, value if isinstance(value, str) else {"mode": "selective", "blocks": ["*"], **value})
    model = model if change is None else change(model)
    found = []
    for _ in range(steps):
        calls.clear()
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        found += [x.grad, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]
    return found


RULES = {
    "nothing": ({"unit": "rope", "do": "recompute"},),
    "rope": ({"unit": "rope", "do": "save"},),
    "mlp": ({"unit": "m*", "do": "save"},),
    "offloaded": ({"unit": "mlp", "do": "offload"},),
    "an op inside": ({"ops": "aten.addmm", "do": "save"},),
    "a module inside": ({"module": "norm", "do": "save"},),
    "everything": ({"ops": "*", "do": "save"}, {"unit": "none", "do": "recompute", "optional": True}),
}


@pytest.mark.parametrize("engine", ["auto", "replay", "rerun"])
@pytest.mark.parametrize("rules", RULES)
def test_gradients_are_exact_whatever_is_saved(rules: str, engine: str) -> None:
    expected = trained(None)
    assert all(map(torch.equal, expected, trained({"policy": policy(*RULES[rules]), "engine": engine})))


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ("auto", "matched no unit .*\n    did you mean: rope\n    legal: gate, mlp, rope"),
        ("rerun", "runs again as Python"),
    ],
)
def test_a_rule_that_names_no_unit_is_told_what_there_is(engine: str, told: str) -> None:
    rules = policy({"unit": "roep", "do": "save"}, {"ops": "aten.addmm", "do": "save"})
    with pytest.warns(sac.errors.SacWarning, match=told):
        trained({"policy": rules, "engine": engine}, steps=1)


def test_the_report_does_not_list_ops_inside_a_saved_unit_as_recomputed() -> None:
    model: Any = sac.apply(
        nn.Sequential(Block()), {"mode": "selective", "policy": policy(*RULES["mlp"]), "blocks": ["*"]}
    )
    model(torch.ones(4, 8)).sum().backward()
    recomputed = {one.op for kind in sac.report(model).kinds for one in kind.unmatched}
    assert "aten.sin.default" in recomputed
    assert not recomputed & {"aten.tanh.default", "aten.native_dropout.default"}


def test_a_saved_unit_is_not_called_again() -> None:
    expected = trained({"policy": policy({"ops": "aten.cos", "do": "save"})})
    again = calls.copy()
    assert all(map(torch.equal, expected, trained({"policy": policy({"unit": ["rope", "gate"], "do": "save"})})))
    assert (again.count("rope"), again.count("gate"), again.count("mlp")) == (4, 4, 4)
    assert (calls.count("rope"), calls.count("gate"), calls.count("mlp")) == (2, 2, 4)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_units_are_copied_with_their_model(change: Callable[[Any], Any]) -> None:
    value = {"policy": policy({"unit": "rope", "do": "save"})}
    assert all(map(torch.equal, trained(None), trained(value, change=change)))


def test_a_unit_is_its_function_outside_of_regions_and_without_gradients() -> None:
    block, x = Block(), torch.ones(2, 8)
    assert pickle.loads(pickle.dumps(rotate)) is rotate
    assert rotate.__name__ == "rotate"
    assert block.gated(x.clone(), scale=2.0).equal(x * 2 + 1)
    with torch.no_grad():
        model = nn.Sequential(block)
        expected = model(x)
        block.eval(), sac.apply(model, {"mode": "selective", "blocks": ["*"], "policy": policy(*RULES["rope"])})
        assert model(x).shape == expected.shape


def test_the_trace_names_units() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([Block(), Block()])
    value = {"mode": "selective", "blocks": ["*"], "policy": policy({"unit": "rope", "do": "save"})}
    rows = sac.trace(nn.Sequential(*model), (torch.ones(4, 8),), value).rows
    named = {row.op: (row.decision, row.rule) for row in rows if row.op.startswith("unit ")}
    assert named == {"unit rope": ("save", "rule0"), "unit mlp": ("recompute", ""), "unit gate": ("recompute", "")}


class Closure(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).tanh()
        return x + sac.unit("closed", lambda other: other * h)(x * 2)


def test_what_the_region_computes_must_be_an_argument() -> None:
    with pytest.raises(
        sac.SacError, match=r"unit closed reads a tensor that is not among its arguments and that aten.tanh"
    ):
        trained({"policy": policy({"unit": "closed", "do": "save"})}, make=Closure)


class Shared(Block):
    """Its unit reads a buffer and a parameter through its closure, and calls a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        outer = sac.unit("outer", lambda h: self.mlp(h * self.table) + self.inner.weight.sum())
        return x + outer(x * 2).sin()


def test_of_nested_units_the_outer_one_counts() -> None:
    expected = trained(None, make=Shared)
    assert all(map(torch.equal, expected, trained({"policy": policy({"unit": "mlp", "do": "save"})}, make=Shared)))
    assert calls.count("mlp") == 4
    assert all(map(torch.equal, expected, trained({"policy": policy({"unit": "outer", "do": "save"})}, make=Shared)))
    assert calls.count("mlp") == 2


class Tied(nn.Module):
    """Its unit and the ops after it share a weight, of which autocast keeps one cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gated = nn.Parameter(torch.randn(8, 8)), sac.unit("gated", self.gate)

    def gate(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x @ self.weight) * x

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x) @ self.weight


@pytest.mark.filterwarnings("error::sac.errors.SacWarning")  # of a replay that gives way
def test_a_cast_that_autocast_made_in_a_unit_is_made_again_for_others() -> None:
    found = []
    for value in ("none", {"mode": "selective", "policy": "general", "engine": "replay", "blocks": ["*"]}):
        torch.manual_seed(0)
        model = nn.Sequential(Tied(), Tied())
        sac.apply(model, value)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(torch.ones(4, 8))
            out.float().square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("arguments", [(None, len), ("", len), ("rope", 3)])
def test_wrong_arguments_are_errors(arguments: Any) -> None:
    with pytest.raises(TypeError, match=r"sac\.unit"):
        sac.unit(*arguments)


@pytest.mark.slow
def test_a_graph_of_torch_compile_has_what_is_in_units() -> None:
    expected = trained(None, steps=1, make=Compiled)
    value = {"policy": policy({"ops": "aten.addmm", "do": "save", "optional": True})}
    compiled = trained(value, 1, Compiled, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True))
    assert all(map(torch.equal, expected, compiled))


class Compiled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.scaled(sac.unit("inner", self.inner)(x), factor=2.0)

    @sac.unit("scaled")
    def scaled(self, x: Tensor, *, factor: float) -> Tensor:
        return x.sin() * factor
