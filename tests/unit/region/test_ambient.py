"""Recomputation gets what was set around the forward: flags of the process, and state of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sac
from sac.full import FullConfig
from sac.torch_private import set_precision
from tests.support.blocks import FULL, Stack, selective
from tests.support.oracle import assert_exact, built_model
from tests.support.programs import WIDTH, Block, Program
from tests.support.runs import Noted
from tests.support.training import assert_same
from tests.support.ways import NONE, Way

Surrounding = Callable[[], AbstractContextManager[Any]]
core = torch._C


# -- Flags of the process


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
    names = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
    return [getattr(core, f"_get_{name}_sdp_enabled")() for name in names]


def deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def cudnn() -> tuple[bool, ...]:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic


def another_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """What context-parallel code puts in the place of torch's: here it scales the queries."""
    return torch.softmax(3 * query @ key.transpose(-2, -1), -1) @ value


FLAGS: dict[str, tuple[Surrounding, Callable[[], Any]]] = {
    "backends": (lambda: sdpa_kernel(SDPBackend.MATH), backends),
    "order of backends": (
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        core._get_sdp_priority_order,
    ),
    "attention": flag(
        lambda: F.scaled_dot_product_attention,
        lambda function: setattr(F, "scaled_dot_product_attention", function),
        another_attention,
    ),
    "default dtype": flag(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "matmul precision": flag(
        lambda: torch.backends.cuda.matmul.fp32_precision,
        lambda value: setattr(torch.backends.cuda.matmul, "fp32_precision", value),
        "tf32",
    ),
    "cudnn": (lambda: torch.backends.cudnn.flags(False, True, deterministic=True, allow_tf32=False), cudnn),
    "mkldnn": flag(core._get_mkldnn_enabled, core._set_mkldnn_enabled, False),
    "deterministic": flag(
        deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]), (True, True)
    ),
}


@pytest.fixture
def known_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")  # by default it is neither set nor unset
    yield
    for backend in ("cuda", "mkldnn"):
        set_precision(backend, "matmul", "none")


def attention(block: Block, x: Tensor) -> Tensor:
    """Depends on each of the flags that matter on a CPU."""
    q, k, v = ((x.float() @ one).view(1, 2, 4, 8).cos() for one in (block.up.weight, block.down.weight, x.float()))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True).reshape(WIDTH, WIDTH)
    return (torch.ones(WIDTH) * 0.3 * h.sin()).cos()  # in the default dtype, if that is a wider one


@pytest.mark.parametrize("way", ["full", "reentrant", "replay", "served rerun", "context_fn", "checkpoint"])
@pytest.mark.parametrize(("surrounding", "read"), FLAGS.values(), ids=FLAGS.keys())
def test_recomputation_sees_the_flags_of_forward(
    surrounding: Surrounding, read: Callable[[], Any], way: str, known_precision: None
) -> None:
    seen, before = Noted(), read()

    def body(block: Block, x: Tensor) -> Tensor:
        seen.append(read())
        return attention(block, x)

    assert_exact(Program("attention", body, around=surrounding), way, "matmuls")
    assert all(value == seen[0] for value in seen)
    assert seen[0] != before == read()


# -- State of the user's own, by providers


class Noting:
    """A provider of a number that notes what is asked of it, and may fail at that."""

    def __init__(self, name: str, log: Noted) -> None:
        self.name, self.log, self.value = name, log, 0
        self.fails: set[str] = set()

    def snapshot(self) -> int:
        self._note(f"{self.name} is {self.value}")
        return self.value

    def restore(self, state: int) -> None:
        self.value = state
        self._note(f"{self.name} becomes {state}")

    def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            self.fails.remove(what)
            raise KeyError(what)


COUNTER = Noting("counter", Noted())  # where no region looks


def counting(block: Block, x: Tensor) -> Tensor:
    """Its scale is the number of calls so far."""
    COUNTER.value += 1
    return (F.dropout(block.up(x), 0.3) * COUNTER.value).sin() * x


def run_by_function(model: Stack, chosen: Any) -> None:
    config = FullConfig(state=(COUNTER,))
    model._call = lambda _, block, *values: sac.checkpoint(block, *values, config=config)  # type: ignore[method-assign]


PROVIDED = [
    Way("function", run_by_function),
    Way("full", lambda model, _: sac.apply(model, {**FULL, "state": (COUNTER,)})),
    Way("selective", lambda model, chosen: sac.apply(model, selective(chosen, engine="rerun", state=(COUNTER,)))),
]


@pytest.mark.parametrize("way", PROVIDED, ids=str)
def test_state_that_no_region_reaches_is_put_back_by_its_provider(way: Way) -> None:
    """Two micro-batches go forward before the first one goes backward."""

    def trained(way: Way) -> dict[str, Tensor]:
        COUNTER.value, seen = 0, {}
        model = built_model(Program("counting", counting), way, "matmuls")
        for step in range(3):
            for loss in [model(torch.randn(WIDTH, WIDTH)).square().sum() for _ in range(2)]:
                loss.backward()
            seen |= {f"{step} {name}": one.grad.clone() for name, one in model.named_parameters() if "up" in name}
            seen[f"{step} count"] = torch.tensor(COUNTER.value)
        return seen

    assert_same(trained(NONE), trained(way))


def changing(x: Tensor, *providers: Noting) -> Tensor:
    """A region that draws a random number and changes the state of each provider."""
    for provider in providers:
        provider.value += 1
        provider.log.append(f"{provider.name} runs")
    return F.dropout(x.sin(), 0.5).exp()


def test_providers_are_asked_in_order_and_undone_in_reverse() -> None:
    log = Noted()
    one, two = Noting("one", log), Noting("two", log)
    x = torch.ones(2, requires_grad=True)
    out = sac.checkpoint(lambda x: changing(x, one, two), x, config=FullConfig(state=(one, two)))
    assert log == ["one is 0", "two is 0", "one runs", "two runs"]
    log.clear()
    one.value, two.value = 10, 20
    out.sum().backward()
    before = ["one is 10", "one becomes 0", "two is 20", "two becomes 0"]
    assert log == [*before, "one runs", "two runs", "two becomes 20", "one becomes 10"]


FAILURES = ["one is 10", "one becomes 0", "two is 20", "two becomes 0", "two becomes 20", "one becomes 10"]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_provider_that_raises_leaves_everything_else_put_back(failure: str) -> None:
    """Also when it is half done: it is given the state of now once more. Then backward can be tried again."""
    log = Noted()
    one, two = Noting("one", log), Noting("two", log)
    x = torch.ones(2, requires_grad=True)
    expected = torch.get_rng_state()
    with torch.autocast("cpu"), sdpa_kernel(SDPBackend.MATH):
        out = sac.checkpoint(lambda x: changing(x, one, two), x, config=FullConfig(state=(one, two)))
    one.value, two.value = 10, 20
    one.fails, two.fails = {failure}, {failure}
    before, flags = torch.get_rng_state(), backends()
    with pytest.raises(KeyError, match=failure):
        out.sum().backward(retain_graph=True)
    assert [one.value, two.value] == [10, 20]
    assert torch.equal(torch.get_rng_state(), before)
    assert backends() == flags
    assert not torch.is_autocast_enabled("cpu")
    x.grad = None
    out.sum().backward()
    torch.set_rng_state(expected)
    twin = torch.ones(2, requires_grad=True)
    changing(twin).sum().backward()
    assert torch.equal(x.grad, twin.grad)
