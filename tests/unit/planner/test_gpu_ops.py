"""Ops as a GPU would run them, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from sac.errors import PlanError
from sac.planner.gpu_ops import lowered_to
from sac.torch_private import FakeTensorMode

H100, A100 = "h100", "a100"
CUDNN = "aten._scaled_dot_product_cudnn_attention"
FLASH = "aten._scaled_dot_product_flash_attention"
EFFICIENT = "aten._scaled_dot_product_efficient_attention"
FOR_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
Seen = list[tuple[str, list[tuple[int, ...]]]]


class Recording(TorchDispatchMode):
    """Notes each op with the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, (tuple, list)) else [out]
        self.seen.append((str(func).rpartition(".")[0], [tuple(x.shape) for x in results if isinstance(x, Tensor)]))
        return out


def ops_of(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Seen:
    """What ``function`` runs in forward and backward on tensors of these shapes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        given = [torch.empty(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    with Recording() as recording:
        function(*given).sum().backward()
    return recording.seen


def lowered(function: Callable[[], Seen], device: str) -> Seen:
    with lowered_to(device):
        return function()


def results(seen: Seen, op: str) -> list[tuple[int, ...]]:
    """The shapes of the results of the one call of ``op``."""
    [found] = [shapes for name, shapes in seen if name == op]
    return found


def kernels(seen: Seen) -> list[str]:
    """The kernels of attention, in the order in which they run."""
    return [name for name, _ in seen if "dot_product" in name]


def attention(*, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Callable[..., Tensor]:
    return lambda *given: F.scaled_dot_product_attention(*(x.to(dtype) for x in given), **options)


def masked(dtype: torch.dtype, **options: Any) -> Callable[..., Tensor]:
    mask = torch.ones(2, 1, 64, 64, dtype=dtype)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, **options)


def by_choice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        return F.scaled_dot_product_attention(q, k, v)


def multi_head(x: Tensor) -> Tensor:
    return nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.bfloat16)(x, x, x, need_weights=False)[0]


X, Q, ONE = (2, 64, 32), (2, 8, 64, 32), (2, 1, 64, 32)
GROUPED, ALIKE, SHARED, ODD = (Q, (2, 2, 64, 32), (2, 2, 64, 32)), (Q,) * 3, (Q, ONE, ONE), ((2, 8, 64, 20),) * 3
CAUSAL = attention(is_causal=True, enable_gqa=True)
FLOAT, DOUBLE = torch.float32, torch.float64
RMS, BACK = "aten._fused_rms_norm", "aten._fused_rms_norm_backward"
# By name: the device, the function, its arguments, the kernel of attention, and other ops: the shapes of their results
# (the first of them), or whether they run. Results of flash are followed by a random state, an unused one, and a mask.
CASES: dict[str, tuple[Any, Callable[..., Tensor], tuple[tuple[int, ...], ...], str, dict[str, Any]]] = {
    "rms norm": (H100, lambda x, w: F.rms_norm(x, (32,), w), (X, (32,)), "",
                 {RMS: [X, (2, 64, 1)], BACK: [X, (32,)], "aten.rsqrt": False}),
    "rms norm without weight": (H100, lambda x: F.rms_norm(x, (64, 32)), (X,), "", {RMS: [X, (2, 1, 1)], BACK: [X]}),
    "layer norm": (H100, lambda x: F.layer_norm(x, (32,)), (X,), "",
                   {"aten.native_layer_norm": [X, (2, 64, 1), (2, 64, 1)]}),
    "dropout": (H100, lambda x: F.dropout(x, 0.1), (X,), "", {"aten.native_dropout": [X, X], "aten.bernoulli_": False}),
    "dropout of nothing": (H100, lambda x: F.dropout(x, 0.0) + 1, (X,), "",
                           {"aten.native_dropout": False, "aten.mul": False}),
    "dropout in evaluation": (H100, lambda x: F.dropout(x, 0.5, False) + 1, (X,), "",
                              {"aten.native_dropout": False, "aten.mul": False}),
    "Hopper": (H100, CAUSAL, GROUPED, CUDNN, {CUDNN: [Q, (2, 8, 64, 1), (), ()], f"{CUDNN}_backward": [*GROUPED]}),
    "Ampere": (A100, CAUSAL, GROUPED, FLASH,
               {FLASH: [Q, (2, 8, 64), (2,), (), (0,)], f"{FLASH}_backward": [*GROUPED]}),
    # The kernel that takes float32 takes as many heads of key and value as of query (torch 2.11 to 2.13).
    "grouped heads in float32": (H100, attention(dtype=FLOAT, enable_gqa=True), GROUPED, "",
                                 {"aten._safe_softmax": True}),
    "one head for all that is said": (A100, attention(enable_gqa=True), SHARED, FLASH, {}),
    "a choice of the model": (H100, by_choice, ALIKE, EFFICIENT, {}),
    "mask and dropout, Hopper": (H100, masked(torch.bfloat16, dropout_p=0.1), ALIKE, CUDNN, {CUDNN: [Q]}),
    "mask and dropout, Ampere": (A100, masked(torch.bfloat16, dropout_p=0.1), ALIKE, EFFICIENT, {EFFICIENT: [Q]}),
    "a mask that is learnt": (H100, attention(), (*ALIKE, (2, 1, 64, 64)), EFFICIENT,
                              {f"{EFFICIENT}_backward": [*ALIKE, (2, 8, 64, 64)]}),
    "a boolean mask": (A100, masked(torch.bool), ALIKE, EFFICIENT, {"aten.where": [(2, 1, 64, 64)], EFFICIENT: [Q]}),
    "float32": (A100, attention(dtype=FLOAT, is_causal=True), ALIKE, EFFICIENT, {EFFICIENT: [Q, (2, 8, 64), (), ()]}),
    "float64": (H100, attention(dtype=DOUBLE), ALIKE, "", {"aten.bmm": True}),
    "heads of odd size": (A100, attention(), ODD, FLASH, {FLASH: [(2, 8, 64, 24)], "aten.constant_pad_nd": True}),
    "torch.nn": (H100, multi_head, ((2, 16, 64),), CUDNN, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ops_are_those_of_the_device(name):
    device, function, shapes, kernel, others = CASES[name]
    seen = lowered(lambda: ops_of(function, *shapes), device)
    assert kernels(seen) == ([kernel, f"{kernel}_backward"] if kernel else [])
    for op, expected in others.items():
        if isinstance(expected, bool):
            assert (op in dict(seen)) is expected, op
        else:
            assert results(seen, op)[: len(expected)] == expected, op


def test_a_user_may_ask_for_flash_instead(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernels(lowered(lambda: ops_of(attention(), *ALIKE), H100)) == [FLASH, f"{FLASH}_backward"]


def test_recurrent_kernels_are_refused():
    with pytest.raises(PlanError, match="how many bytes that keeps"):
        lowered(lambda: ops_of(lambda x: nn.LSTM(32, 32, dtype=torch.bfloat16)(x)[0], (2, 64, 32)), H100)


def test_this_process_is_as_it_was():
    lowered(lambda: ops_of(attention(), *ALIKE), H100)
    assert kernels(ops_of(attention(), *ALIKE)) == [FOR_CPU, f"{FOR_CPU}_backward"]
