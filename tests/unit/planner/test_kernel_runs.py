"""The bound of a CPU kernel's memory is never below what the allocator sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sac.blocks.find import find_blocks
from sac.memory_timeline import measure_memory
from sac.ops.flops import flops_of
from sac.planner import kernel_runs
from sac.planner.fakes import fake_copy, fake_inputs, fake_mode
from sac.planner.kernel_runs import SizedCall, TensorMeta, meta_of, peak_bounds
from sac.planner.live_bytes import KernelWorkspace, Ledger
from sac.planner.step import run_step
from sac.torch_private import tree_map_only
from tests.unit.planner.truth import model_named

ATEN = torch.ops.aten
X, W, TOKENS = torch.zeros(1024, 96), torch.zeros(96, 2048), torch.zeros(4, 512, dtype=torch.long)
HEADS = torch.zeros(2, 32, 256, 16)
BF = torch.zeros(64, 64, dtype=torch.bfloat16).t()
PLANES = [torch.zeros(2, 3, 224, 224, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
CONVOLVED: tuple[Any, ...] = ([16, 16], [0, 0], [1, 1], False, [0, 0], 1)


def _kernel(planes: Tensor) -> tuple[Tensor, Tensor]:
    return planes.new_zeros(48, 3, 16, 16), planes.new_zeros(48)


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a pointwise op": (ATEN.mul.Tensor, (X, X)),
    "a softmax": (ATEN._log_softmax.default, (X, 1, False)),
    "its backward": (ATEN._log_softmax_backward_data.default, (X, X, 1, torch.float32)),
    "an embedding": (ATEN.embedding.default, (W, TOKENS)),
    "a copy": (ATEN._to_copy.default, (X,)),
    "a write": (ATEN.mul_.Tensor, (X, X)),
    "a product": (ATEN.mm.default, (X, W)),
    "a product of transposed operands": (ATEN.mm.default, (W.t(), X.t())),
    "a batch of products": (ATEN.bmm.default, (torch.zeros(32, 64, 32), torch.zeros(32, 32, 64))),
    "a loss": (ATEN.nll_loss_forward.default, (X, torch.zeros(1024, dtype=torch.long), None, 1, -100)),
    "attention": (ATEN._scaled_dot_product_flash_attention_for_cpu.default, (HEADS, HEADS, HEADS, 0.0, True)),
    "the gradient of an embedding": (
        ATEN.embedding_dense_backward.default,
        (torch.zeros(4, 512, 48), TOKENS, 90, -1, False),
    ),
    "a sum": (ATEN.sum.dim_IntList, (X, [0])),
    "a layer norm": (ATEN.native_layer_norm.default, (X, [96], None, None, 1e-5)),
    "a sort": (ATEN.sort.default, (X,)),
    "a narrow product in bfloat16": (
        ATEN.addmm.default,
        (*(torch.zeros(*s).bfloat16() for s in ((64,), (4096, 64))), BF),
    ),
    **{f"a convolution, {one.dtype}": (ATEN.convolution.default, (one, *_kernel(one), *CONVOLVED)) for one in PLANES},
    **{
        f"its backward, {one.dtype}": (
            ATEN.convolution_backward.default,
            (one.new_zeros(2, 48, 14, 14), one, _kernel(one)[0], [48], *CONVOLVED, [True, True, True]),
        )
        for one in PLANES
    },
}


def _call(func: Any, args: tuple[Any, ...]) -> SizedCall:
    out = func(*args)
    given = {one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)}
    results = [out] if isinstance(out, Tensor) else [one for one in out if isinstance(one, Tensor)]
    made = tuple(meta_of(one) for one in results if one.untyped_storage()._cdata not in given)
    return SizedCall(func, tree_map_only(Tensor, meta_of, args), {}, made, flops_of(func, args, {}, out))


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_runs, "LARGE_BYTES", 2**17)
    monkeypatch.setattr(kernel_runs, "LARGE_FLOPS", 2**22)


@pytest.mark.parametrize("name", CALLS)
def test_no_bound_is_below_the_peak_of_the_call(name: str) -> None:
    func, args = CALLS[name]
    call = _call(func, args)
    assert call.is_large
    assert peak_bounds([call])[0] >= measure_memory(lambda: func(*args)).peak_bytes


def test_a_call_that_does_not_run_at_another_size_counts_with_a_copy_of_its_arguments() -> None:
    broken = SizedCall(ATEN.mm.default, (meta_of(X), meta_of(X)), {}, (meta_of(W),), 10**6)
    assert peak_bounds([broken]) == [broken.bytes]


def test_a_dimension_is_divided_wherever_it_occurs() -> None:
    meta = TensorMeta((4, 96, 8), (8, 32, 1), torch.float32)
    assert meta.divided(96, 12) == TensorMeta((4, 12, 8), (8, 32, 1), torch.float32)
    assert TensorMeta((96, 5), (1, 96), torch.float32).divided(96, 12) == TensorMeta((12, 5), (1, 12), torch.float32)
    assert TensorMeta((96, 5), (0, 1), torch.float32).divided(96, 12) == TensorMeta((12, 5), (0, 1), torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Llama", torch.float32),
        ("ViT", torch.float32),
        ("Mamba2", torch.bfloat16),
        ("DeepSeek-V3", torch.bfloat16),
        ("Whisper", torch.bfloat16),
    ],
)
def test_a_step_with_smaller_calls_is_never_below_one_with_the_calls_themselves(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = model_named(name)
    inputs = {key: one.to(dtype) if one.is_floating_point() else one for key, one in inputs.items()}
    turned = fake_copy(model.to(dtype), mode := fake_mode())
    blocks = [(block.path, block.module) for block in find_blocks(turned)]
    peaks = []
    for large in (2**30, 2**14):
        monkeypatch.setattr(kernel_runs, "LARGE_BYTES", large)
        monkeypatch.setattr(kernel_runs, "LARGE_FLOPS", large)
        record = run_step(turned, fake_inputs(inputs, mode), blocks, Ledger(workspace=KernelWorkspace()))
        peaks.append([phase.peak for phase in record.phases])
    assert all(bound >= peak for peak, bound in zip(*peaks, strict=True))


def test_collectives_count_with_their_results_and_are_not_run() -> None:
    """Other ranks would have to meet in them: there is not even a process group here."""
    ops, x = torch.ops._c10d_functional, torch.zeros(4, 8)
    made = meta_of(torch.zeros(8, 8)), meta_of(torch.zeros(2, 8))
    calls = [
        SizedCall(ops.all_gather_into_tensor.default, (meta_of(x), 2, "nobody"), {}, made[:1], 0),
        SizedCall(ATEN.mul.Tensor, (meta_of(x), meta_of(x)), {}, (meta_of(x),), 0),
        SizedCall(ops.reduce_scatter_tensor.default, (meta_of(x), "sum", 2, "nobody"), {}, made[1:], 0),
        SizedCall(ops.wait_tensor.default, (made[1],), {}, (), 0),
    ]
    assert peak_bounds(calls) == [256, 128, 64, 0]
