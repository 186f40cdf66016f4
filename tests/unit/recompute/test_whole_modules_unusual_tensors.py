"""A module that is saved as a whole may take and return jagged, sparse, conjugated and strided tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.blocks import FunctionBlock, Stack, policy, save, selective, square
from tests.support.training import assert_same_training
from tests.support.whole_module_blocks import WIDTH, Apply, whole

OFFSETS = torch.tensor([0, 2, 5, WIDTH])  # torch takes two jagged tensors for alike only if they share this tensor


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS)


def written_later(block: Any, x: Tensor) -> Tensor:
    y = block.part(x @ block.a)
    z = y + 1  # saves nothing
    y.mul_(2)
    return (z.sin() * y.cos()).values() @ block.b


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    # name: (the part, the region)
    "jagged in and out": (
        lambda part, x: x @ part.weight,
        lambda block, x: block.part(jagged(x @ block.a)).sin().values() @ block.b,
    ),
    "jagged out": (
        lambda part, x: jagged(x) @ part.weight,
        lambda block, x: block.part(x @ block.a).sin().values() @ block.b,
    ),
    "jagged in": (
        lambda part, x: x.values() @ part.weight,
        lambda block, x: block.part(jagged(x @ block.a)).sin() @ block.b,
    ),
    "jagged inside": (
        lambda part, x: (jagged(x) @ part.weight).values(),
        lambda block, x: block.part(x @ block.a).sin() @ block.b,
    ),
    "jagged in a structure": (
        lambda part, x: {"rows": [jagged(x @ part.weight), jagged(x)], "offsets": OFFSETS},
        lambda block, x: (lambda y: (y["rows"][0].sin() + y["rows"][1]).values() @ block.b)(block.part(x @ block.a)),
    ),
    "jagged and written to by the region": (lambda part, x: jagged(x) @ part.weight, written_later),
    "jagged argument written to": (
        lambda part, x: x.mul_(2),
        lambda block, x: block.part(jagged(x @ block.a)).sin().values() @ block.b,
    ),
    "jagged argument returned": (
        lambda part, x: x,
        lambda block, x: block.part(jagged(x @ block.a)).sin().values() @ block.b,
    ),
    "rows of a jagged argument": (
        lambda part, x: list(x.unbind()),
        lambda block, x: torch.cat([row.sin() for row in block.part(jagged(x @ block.a))]) @ block.b,
    ),
    "sparse": (
        lambda part, x: (x @ part.weight).relu().to_sparse(),
        lambda block, x: torch.sparse.mm(block.part(x @ block.a), block.b).sin(),
    ),
    "compressed rows": (
        lambda part, x: (x @ part.weight).to_sparse_csr(),
        lambda block, x: block.part(x @ block.a).to_dense().sin() @ block.b,
    ),
    "conjugated": (
        lambda part, x: torch.complex(x @ part.weight, x).conj()[:, :3],
        lambda block, x: (block.part(x @ block.a) @ torch.complex(block.b[:3], block.b[:3])).real.sin(),
    ),
    "negated": (
        lambda part, x: torch.complex(x @ part.weight, x).conj().imag,
        lambda block, x: block.part(x @ block.a).sin() @ block.b,
    ),
    "every third column": (
        lambda part, x: (x @ part.weight)[:, ::3],
        lambda block, x: block.part(x @ block.a).sin() @ block.b[:3],
    ),
    "columns": (
        lambda part, x: (x @ part.weight).t()[1:3],
        lambda block, x: (block.part(x @ block.a).sin().sum() * x).sin(),
    ),
    "one row, many times": (
        lambda part, x: (x @ part.weight)[:1].expand(3, WIDTH),
        lambda block, x: (block.part(x @ block.a).sin().sum(0) * x).sin(),
    ),
    "windows that overlap": (
        lambda part, x: (x @ part.weight).flatten().unfold(0, 4, 2)[:3],
        lambda block, x: (block.part(x @ block.a).sin().sum() * x).sin(),
    ),
}

RULES: dict[str, Any] = {
    "modules": policy(whole("part")),
    "modules and products": policy(whole("part"), save("matmul")),
}


def stack_of(name: str) -> Stack:
    part, body = PROGRAMS[name]
    return Stack(*(FunctionBlock(body, WIDTH, part=Apply(part)) for _ in range(2)))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_the_same(name: str, rules: str) -> None:
    assert_same_training(lambda: stack_of(name), selective(RULES[rules]), steps=3, make_input=square)


@pytest.mark.parametrize("engine", ["auto", "replay", "rerun"])
def test_a_jagged_tensor_is_written_to_by_an_op(engine: str) -> None:
    """Its rows are written to, and not where they begin."""

    def build() -> Stack:
        body = lambda block, x: jagged(x @ block.a).mul_(2).sin().values() @ block.b  # noqa: E731
        return Stack(FunctionBlock(body, WIDTH), FunctionBlock(body, WIDTH))

    value = selective(policy(save("matmul")), engine=engine)
    assert_same_training(build, value, steps=3, make_input=square)
