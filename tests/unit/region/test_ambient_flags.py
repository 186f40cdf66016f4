"""Recomputation gets the kernels of the forward: flags of the process that were set around the forward only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sac
from sac.engine.flags import _FLAGS
from sac.torch_private import set_precision
from tests.support.blocks import FunctionBlock
from tests.support.runs import Noted
from tests.support.stateful import ON_EACH_WAY, WAYS, Surrounding, Way, as_it_is, stack_of, stepped
from tests.support.training import assert_same

core = torch._C
MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION


@contextmanager
def changed(read: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


def flag(read: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> tuple[Surrounding, Callable[[], Any]]:
    return lambda: changed(read, put, value), read


def backends() -> list[Any]:
    names = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
    return [getattr(core, f"_get_{name}_sdp_enabled")() for name in names if hasattr(core, f"_get_{name}_sdp_enabled")]


def deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def be_deterministic(on: bool, warns: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=warns)


def cudnn() -> tuple[bool, ...]:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic, flags.allow_tf32


def another_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """What context-parallel code puts in the place of torch's: here it scales the queries."""
    return torch.softmax(3 * query @ key.transpose(-2, -1), -1) @ value


FLAGS: dict[str, tuple[Surrounding, Callable[[], Any]]] = {
    "backends": (lambda: sdpa_kernel(MATH), backends),
    "overrideable": (lambda: sdpa_kernel([MATH, SDPBackend.OVERRIDEABLE]), backends),
    "order of backends": (lambda: sdpa_kernel([MATH, FLASH], set_priority=True), core._get_sdp_priority_order),
    "attention": flag(
        lambda: F.scaled_dot_product_attention,
        lambda function: setattr(F, "scaled_dot_product_attention", function),
        another_attention,
    ),
    "default dtype": flag(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "matmul precision": flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "newer matmul precision": flag(
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
        "tf32",
    ),
    "cudnn": (lambda: torch.backends.cudnn.flags(False, True, deterministic=True, allow_tf32=False), cudnn),
    "mkldnn": flag(core._get_mkldnn_enabled, core._set_mkldnn_enabled, False),
    "deterministic": flag(deterministic, lambda value: be_deterministic(*value), (True, False)),
    "deterministic, warns": flag(deterministic, lambda value: be_deterministic(*value), (True, True)),
}
ON_EACH_FLAG = pytest.mark.parametrize(("surrounding", "read"), FLAGS.values(), ids=FLAGS.keys())


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")  # by default it is neither set nor unset
    before = [read() for read, _ in _FLAGS]
    yield
    assert [read() for read, _ in _FLAGS] == before
    for backend in ("cuda", "mkldnn"):
        set_precision(backend, "matmul", "none")


def attention(block: FunctionBlock, x: Tensor) -> Tensor:
    """Depends on each of the flags that matter on a CPU."""
    q, k, v = ((x.float() @ weight).view(1, 2, 4, 8).cos() for weight in (block.a, block.b, block.a.sin()))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(8, 8)
    return (torch.ones(8) * 0.3 * h.sin()).cos()  # in the default dtype, if that is a wider one


def values_seen(read: Callable[[], Any], way: Way, **surroundings: Surrounding) -> Noted:
    """Train without regions and with them; the bits are equal, and the flag's values in all forwards are returned."""
    seen = Noted()

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        seen.append(read())
        return attention(block, x)

    assert_same(stepped(stack_of(body), as_it_is, **surroundings), stepped(stack_of(body), way, **surroundings))
    return seen


@ON_EACH_WAY
@ON_EACH_FLAG
def test_recomputation_sees_the_flags_of_forward(surrounding: Surrounding, read: Callable[[], Any], way: Way) -> None:
    before = read()
    seen = values_seen(read, way, forward=surrounding)
    assert len(seen) == 12 or (len(seen) == 18 and way is not WAYS["replay"])
    assert all(value == seen[0] for value in seen)
    assert seen[0] != before


@ON_EACH_FLAG
def test_flags_are_put_back_when_recomputation_raises(surrounding: Surrounding, read: Callable[[], Any]) -> None:
    seen = Noted()

    def body(x: Tensor) -> Tensor:
        seen.append(read())
        if len(seen) == 2:
            raise KeyError("the user's own")
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    before = read()
    with surrounding():
        out = sac.checkpoint(body, x)
    with pytest.raises(KeyError):
        out.sum().backward()
    assert read() == before
    out.sum().backward()
    assert seen[0] == seen[1] == seen[2] != before == read()
