"""Ops as a GPU would run them, on tensors without data, in a process of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from sac.errors import PlanError
from sac.planner.devices import device_named
from sac.planner.fakes import fake_mode
from sac.planner.planning import lowered

fake_mode()  # what it imports is imported once, not in each child
H100, A100 = device_named("h100"), device_named("a100")
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


def ops_of(function: Callable[..., Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Seen:
    """What ``function`` runs in forward and backward on tensors of these shapes."""
    mode = fake_mode()
    with mode:
        given = [torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    with Recording() as recording:
        function(*given).sum().backward()
    return recording.seen


def results(seen: Seen, op: str) -> list[tuple[int, ...]]:
    """The shapes of the results of the one call of ``op``."""
    [found] = [shapes for name, shapes in seen if name == op]
    return found


def attention(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


GROUPED = ((2, 8, 64, 32), (2, 2, 64, 32), (2, 2, 64, 32))
ALIKE = ((2, 8, 64, 32),) * 3


def kernels(seen: Seen) -> list[str]:
    """The kernels of attention, in the order in which they run."""
    return [name for name, _ in seen if "dot_product" in name]


def test_rms_norm_is_one_op_with_its_backward():
    seen = lowered(lambda: ops_of(lambda x, w: F.rms_norm(x, (32,), w), (2, 64, 32), (32,)), H100)
    assert results(seen, "aten._fused_rms_norm") == [(2, 64, 32), (2, 64, 1)]
    assert results(seen, "aten._fused_rms_norm_backward") == [(2, 64, 32), (32,)]
    assert "aten.rsqrt" not in dict(seen)


def test_rms_norm_without_weight_has_no_gradient_for_one():
    seen = lowered(lambda: ops_of(lambda x: F.rms_norm(x, (64, 32)), (2, 64, 32)), H100)
    assert results(seen, "aten._fused_rms_norm") == [(2, 64, 32), (2, 1, 1)]
    assert results(seen, "aten._fused_rms_norm_backward") == [(2, 64, 32)]


def test_attention_on_hopper_is_cudnns():
    seen = lowered(lambda: ops_of(attention(is_causal=True, enable_gqa=True), *GROUPED), H100)
    assert results(seen, CUDNN) == [(2, 8, 64, 32), (2, 8, 64, 1), (), ()]  # result, logsumexp, random state
    assert results(seen, f"{CUDNN}_backward") == [*GROUPED]


def test_attention_on_ampere_is_flash():
    seen = lowered(lambda: ops_of(attention(is_causal=True, enable_gqa=True), *GROUPED), A100)
    assert results(seen, FLASH) == [(2, 8, 64, 32), (2, 8, 64), (2,), (), (0,)]  # …, random state, unused, debug mask
    assert results(seen, f"{FLASH}_backward") == [*GROUPED]


@pytest.mark.parametrize("device", [H100, A100])
def test_grouped_heads_in_full_precision_are_for_no_kernel(device):
    """The one that takes float32 takes as many heads of key and value as of query (torch 2.11 to 2.13)."""

    def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(is_causal=True, enable_gqa=True)(q.float(), k.float(), v.float())

    seen = lowered(lambda: ops_of(in_float32, *GROUPED), device)
    assert kernels(seen) == []
    assert "aten._safe_softmax" in dict(seen)


@pytest.mark.parametrize("device", [H100, A100])
def test_one_head_for_all_is_for_no_kernel_unless_it_is_said(device):
    one = (2, 1, 64, 32)
    assert kernels(lowered(lambda: ops_of(attention(), ALIKE[0], one, one), device)) == []
    assert kernels(lowered(lambda: ops_of(attention(enable_gqa=True), ALIKE[0], one, one), device))


def test_a_user_may_ask_for_flash_instead(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernels(lowered(lambda: ops_of(attention(), *ALIKE), H100)) == [FLASH, f"{FLASH}_backward"]


def test_the_kernels_that_the_model_allows_are_taken():
    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v)

    assert kernels(lowered(lambda: ops_of(chosen, *ALIKE), H100)) == [EFFICIENT, f"{EFFICIENT}_backward"]


@pytest.mark.parametrize(("device", "kernel"), [(H100, CUDNN), (A100, EFFICIENT)])
def test_attention_with_a_mask_and_dropout(device, kernel):
    mask = torch.zeros(2, 1, 64, 64, dtype=torch.bfloat16)
    seen = lowered(lambda: ops_of(lambda q, k, v: attention(dropout_p=0.1)(q, k, v, mask), *ALIKE), device)
    assert kernels(seen) == [kernel, f"{kernel}_backward"]
    assert results(seen, kernel)[0] == ALIKE[0]


def test_a_mask_that_is_learnt_is_not_for_cudnn():
    seen = lowered(lambda: ops_of(attention(), *ALIKE, (2, 1, 64, 64)), H100)
    assert kernels(seen) == [EFFICIENT, f"{EFFICIENT}_backward"]
    assert results(seen, f"{EFFICIENT}_backward")[3] == (2, 8, 64, 64)


def test_a_boolean_mask_becomes_numbers():
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    seen = lowered(lambda: ops_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *ALIKE), A100)
    assert results(seen, "aten.where") == [(2, 1, 64, 64)]
    assert results(seen, EFFICIENT)[0] == ALIKE[0]


@pytest.mark.parametrize("device", [H100, A100])
def test_attention_in_full_precision_is_the_efficient_one(device):
    seen = lowered(lambda: ops_of(attention(is_causal=True), *ALIKE, dtype=torch.float32), device)
    assert results(seen, EFFICIENT) == [(2, 8, 64, 32), (2, 8, 64), (), ()]


def test_attention_that_no_kernel_takes_is_written_out():
    seen = lowered(lambda: ops_of(attention(), *ALIKE, dtype=torch.float64), H100)
    assert not kernels(seen)
    assert [name for name, _ in seen].count("aten.bmm") == 6


def test_heads_of_odd_size_are_padded_for_flash():
    shape = (2, 8, 64, 20)
    seen = lowered(lambda: ops_of(attention(), shape, shape, shape), A100)
    assert results(seen, FLASH)[0] == (2, 8, 64, 24)
    assert [shapes for name, shapes in seen if name == "aten.constant_pad_nd"][:3] == [[(2, 8, 64, 24)]] * 3


def test_multi_head_attention_of_torch_is_lowered_too():
    def work() -> list[str]:
        module = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.bfloat16)
        return kernels(ops_of(lambda x: module(x, x, x, need_weights=False)[0], (2, 16, 64)))

    assert lowered(work, H100) == [CUDNN, f"{CUDNN}_backward"]


def test_dropout_is_one_op():
    seen = lowered(lambda: ops_of(lambda x: F.dropout(x, 0.1), (2, 64)), H100)
    assert results(seen, "aten.native_dropout") == [(2, 64), (2, 64)]
    assert "aten.bernoulli_" not in dict(seen)


@pytest.mark.parametrize(("p", "train", "ops"), [(0.0, True, []), (0.5, False, []), (1.0, True, ["aten.mul"])])
def test_dropout_that_draws_nothing_draws_nothing(p, train, ops):
    seen = lowered(lambda: ops_of(lambda x: F.dropout(x, p, train) + 1, (2, 64)), H100)
    assert [name for name, _ in seen if "dropout" in name or name == "aten.mul"][:1] == ops


def test_layer_norm_is_the_same_op():
    seen = lowered(lambda: ops_of(lambda x: F.layer_norm(x, (64,)), (2, 64)), H100)
    assert results(seen, "aten.native_layer_norm") == [(2, 64), (2, 1), (2, 1)]


def test_recurrent_kernels_are_refused():
    with pytest.raises(PlanError, match="how many bytes that keeps"):
        lowered(lambda: ops_of(lambda x: nn.LSTM(32, 32, dtype=torch.bfloat16)(x)[0], (2, 64, 32)), H100)


def test_this_process_is_as_it_was():
    lowered(lambda: ops_of(attention(), *ALIKE), H100)
    assert kernels(ops_of(attention(), *ALIKE)) == [FOR_CPU, f"{FOR_CPU}_backward"]


def test_a_process_that_dies_is_an_error():
    with pytest.raises(PlanError, match="ended with status -9"):
        lowered(lambda: os.kill(os.getpid(), signal.SIGKILL), H100)
