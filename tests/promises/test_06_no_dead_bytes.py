"""Bytes: nothing is kept that backward cannot read, and what is kept, saved-tensor hooks see.

Bytes are counted by weak references to storages, not through sac's own accounting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import sac
from tests.support.blocks import (
    APPLY,
    FULL,
    FunctionBlock,
    GatedMLP,
    RootMeanSquareNorm,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
)
from tests.support.custom_ops import scale_by
from tests.support.recording import Recorder, backward_ops, kept_bytes, step
from tests.support.stock import install_stock
from tests.support.training import built

ATTENTION_AND_ALTERNATING = selective(policy(save("attention"), alternate("matmul")))
EVERYTHING = selective(policy(default="save"))
EVERYTHING_BY_GLOB = selective(policy(save("*")))
ON_EACH_ENTRY = pytest.mark.parametrize("entry", [*APPLY, "context_fn"])
ON_EACH_ENGINE = pytest.mark.parametrize("entry", APPLY)
WIDTH = 64
FLOAT = 4  # bytes


def inputs(rows: int = 256, width: int = WIDTH) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return (torch.randn(rows, width, requires_grad=True),)


def kept(build: Callable[[], nn.Module], value: Any, entry: str = "apply", given: tuple[Tensor, ...] = ()) -> int:
    return kept_bytes(install(built(build), value, entry), given or inputs())


def kept_by_stock(build: Callable[[], nn.Module], value: Any, given: tuple[Tensor, ...] = ()) -> int:
    return kept_bytes(install_stock(built(build), value), given or inputs())


def chain(block: FunctionBlock, x: Tensor) -> Tensor:
    """Four products: the last one's value only feeds a sum, so backward never reads it."""
    h = ((x @ block.a).sin() @ block.b).sin()
    h = (h @ block.a).sin() @ block.b
    return x + h


def wide(body: Callable[..., Any]) -> Stack:
    return Stack(FunctionBlock(body, width=WIDTH))


@ON_EACH_ENTRY
def test_product_that_backward_cannot_read_is_not_kept(entry: str) -> None:
    """All four are named, and the last is dead; stock keeps all four."""
    value = selective(policy(save("matmul")))
    assert kept_by_stock(lambda: wide(chain), value) == 4 * 256 * WIDTH * FLOAT
    assert kept(lambda: wide(chain), value, entry) == 3 * 256 * WIDTH * FLOAT


def llama() -> Stack:
    return llama_stack(2, d=WIDTH)


def embeddings() -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return (torch.randn(4, 32, WIDTH, requires_grad=True),)


class FusedNormBlock(nn.Module):
    """The block on which stock's "save all" kept twice what no checkpointing does: RMSNorm, SDPA, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = RootMeanSquareNorm(WIDTH), RootMeanSquareNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = GatedMLP(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return h + self.mlp(self.mlp_norm(h))


@ON_EACH_ENTRY
@pytest.mark.parametrize("value", [EVERYTHING, EVERYTHING_BY_GLOB], ids=["default: save", "ops: '*'"])
@pytest.mark.parametrize("build", [llama, lambda: Stack(FusedNormBlock())], ids=["llama", "fused"])
def test_saving_everything_keeps_no_more_than_no_checkpointing(
    build: Callable[[], nn.Module], value: Any, entry: str
) -> None:
    without = kept(build, "none", given=embeddings())
    assert kept_by_stock(build, selective(policy(save("*"))), embeddings()) > 1.1 * without  # stock cannot
    assert kept(build, value, entry, embeddings()) <= 1.01 * without


def test_full_keeps_only_block_inputs() -> None:
    """Of two blocks: the input of the second; that of the first was made outside."""
    assert kept(llama, FULL, given=embeddings()) == 4 * 32 * WIDTH * FLOAT


class FillsAStorage(torch.autograd.Function):
    """Gives its kernel memory as a storage, as the interpreter of Triton's kernels does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        same = torch.empty(0).set_(out.untyped_storage(), 0, out.shape, out.stride())
        same.detach().numpy()[...] = 2 * x.detach().numpy()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize("value", [selective(policy()), selective(policy(save("matmul")))])
def test_storages_that_ops_are_given_are_not_held(value: Any) -> None:
    def with_kernel(block: FunctionBlock, x: Tensor) -> Tensor:
        return FillsAStorage.apply(x @ block.a).sin() + x

    assert kept(lambda: wide(with_kernel), value) == kept(lambda: wide(lambda b, x: (2 * (x @ b.a)).sin() + x), value)


@ON_EACH_ENGINE
def test_attention_and_alternating_matmuls_keep_less_than_stock(entry: str) -> None:
    def build() -> Stack:
        return llama_stack(1, d=WIDTH)

    ours = kept(build, ATTENTION_AND_ALTERNATING, entry, embeddings())
    stock = kept_by_stock(build, ATTENTION_AND_ALTERNATING, embeddings())
    without = kept(build, "none", given=embeddings())
    assert ours < without
    assert ours <= 0.88 * stock, f"{ours} bytes against stock's {stock}: {ours / stock:.3f}"
    run_by_ours = backward_ops(install(built(build), ATTENTION_AND_ALTERNATING, entry), embeddings())
    run_by_stock = backward_ops(install_stock(built(build), ATTENTION_AND_ALTERNATING), embeddings())
    assert run_by_ours.product_flops <= run_by_stock.product_flops
    assert run_by_ours.count("scaled_dot_product") <= run_by_stock.count("scaled_dot_product")


def one_row(block: FunctionBlock, x: Tensor) -> Tensor:
    """The product is only needed for one of its rows; a saved view of it would pin all 256."""
    row = scale_by(x, 3.0)[:1]
    return (row.sin() * x) @ block.a


def packed_part(block: FunctionBlock, x: Tensor) -> Tensor:
    """A saved product of which autograd keeps one small part, and nothing is recomputed."""
    narrow = (x @ block.a).split([4, WIDTH - 4], dim=1)[0]
    return x + narrow.sin().sum(1, keepdim=True)


@ON_EACH_ENTRY
def test_small_view_does_not_pin_its_base(entry: str) -> None:
    """Without checkpointing all 64 columns stay for the four."""
    assert kept(lambda: wide(packed_part), selective(policy(save("matmul"))), entry) <= 256 * 8 * FLOAT


@ON_EACH_ENTRY
def test_views_are_not_saved(entry: str) -> None:
    """Stock keeps the slice of a product, and with it all 256 rows; ours passes views over."""
    value = selective(policy({"id": "views", "ops": ["aten.sl*", "aten.sin"], "do": "save"}))
    assert kept(lambda: wide(one_row), value, entry) <= 16 * WIDTH * FLOAT


@ON_EACH_ENGINE
def test_saved_values_are_freed_one_by_one_in_backward(entry: str) -> None:
    """Peak in backward: a region's kept values do not wait for the whole backward."""
    model = install(built(llama), ATTENTION_AND_ALTERNATING, entry)
    (x,) = embeddings()
    step(model, (x,))
    before = kept_bytes(model, (x,), warm=0)
    halfway: list[int] = []
    recorder = Recorder()
    with recorder:
        middle = model.blocks[0](x)
        out = model.blocks[1](middle)
    middle.register_hook(lambda grad: halfway.append(recorder.live_bytes(besides=(middle, out))))
    out.sum().backward()
    assert halfway[0] <= 0.6 * before


class CountingHooks(torch.autograd.graph.saved_tensors_hooks):
    """What save_on_cpu would be handed: bytes of each storage that is packed, and how many unpacks came back."""

    def __init__(self) -> None:
        self.packed: dict[int, tuple[StorageWeakRef, int]] = {}
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.packed.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return x.detach().clone()

    def _unpack(self, x: Tensor) -> Tensor:
        self.unpacked += 1
        return x


@ON_EACH_ENTRY
def test_outer_saved_tensors_hooks_see_what_is_kept(entry: str) -> None:
    """The input of the region and three products; stock hands over the input alone, and keeps the rest itself."""
    model = install(built(lambda: wide(chain)), selective(policy(save("matmul"))), entry)
    reference = built(lambda: wide(chain))
    (x,) = inputs()
    step(model, (x,))
    hooks = CountingHooks()
    with hooks:
        out = model(x)
    products = 3 * 256 * WIDTH * FLOAT
    assert sum(size for _, size in hooks.packed.values()) >= products + 256 * WIDTH * FLOAT
    out.sum().backward()
    assert hooks.unpacked >= 4
    expected = torch.autograd.grad(reference(x).sum(), list(reference.parameters()))
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        assert torch.equal(ours.grad, theirs)


@ON_EACH_ENGINE
def test_cheap_values_that_only_saved_ops_read_are_let_go(entry: str) -> None:
    """All but one op saved: a norm's inner sums are read by saved ops only, which recomputation serves as they are."""
    value = {"mode": "selective", "policy": {"default": "save", "rules": [{"ops": "aten.silu", "do": "recompute"}]}}
    x = embeddings()
    model = install(built(llama), value, entry)
    assert kept_bytes(model, x) <= 1.06 * kept_bytes(built(llama), x)
    assert sum(kind["dead_bytes"] for kind in sac.report(model).to_dict()["kinds"]) > 0
