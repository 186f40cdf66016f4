"""Ops as a GPU would run them, on tensors without data, in a process of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from sac.errors import PlanError, Problem
from sac.planner import gpu_ops as lowering
from sac.planner.devices import device_named
from sac.planner.fakes import fake_mode
from sac.planner.gpu_ops import lowered_to, not_lowered
from sac.planner.plan_file import make_plan
from sac.planner.planning import lowered, needs_lowering, planned
from sac.planner.prepare import prepare
from sac.policy.load import dump_policy, load_policy
from tests.support.model_zoo import tiny

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
    seen = lowered(lambda _: ops_of(lambda x, w: F.rms_norm(x, (32,), w), (2, 64, 32), (32,)), H100)
    assert results(seen, "aten._fused_rms_norm") == [(2, 64, 32), (2, 64, 1)]
    assert results(seen, "aten._fused_rms_norm_backward") == [(2, 64, 32), (32,)]
    assert "aten.rsqrt" not in dict(seen)


def test_rms_norm_without_weight_has_no_gradient_for_one():
    seen = lowered(lambda _: ops_of(lambda x: F.rms_norm(x, (64, 32)), (2, 64, 32)), H100)
    assert results(seen, "aten._fused_rms_norm") == [(2, 64, 32), (2, 1, 1)]
    assert results(seen, "aten._fused_rms_norm_backward") == [(2, 64, 32)]


def test_attention_on_hopper_is_cudnns():
    seen = lowered(lambda _: ops_of(attention(is_causal=True, enable_gqa=True), *GROUPED), H100)
    assert results(seen, CUDNN) == [(2, 8, 64, 32), (2, 8, 64, 1), (), ()]  # result, logsumexp, random state
    assert results(seen, f"{CUDNN}_backward") == [*GROUPED]


def test_attention_on_ampere_is_flash():
    seen = lowered(lambda _: ops_of(attention(is_causal=True, enable_gqa=True), *GROUPED), A100)
    assert results(seen, FLASH) == [(2, 8, 64, 32), (2, 8, 64), (2,), (), (0,)]  # …, random state, unused, debug mask
    assert results(seen, f"{FLASH}_backward") == [*GROUPED]


@pytest.mark.parametrize("device", [H100, A100])
def test_grouped_heads_in_full_precision_are_for_no_kernel(device):
    """The one that takes float32 takes as many heads of key and value as of query (torch 2.11 to 2.13)."""

    def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(is_causal=True, enable_gqa=True)(q.float(), k.float(), v.float())

    seen = lowered(lambda _: ops_of(in_float32, *GROUPED), device)
    assert kernels(seen) == []
    assert "aten._safe_softmax" in dict(seen)


@pytest.mark.parametrize("device", [H100, A100])
def test_one_head_for_all_is_for_no_kernel_unless_it_is_said(device):
    one = (2, 1, 64, 32)
    assert kernels(lowered(lambda _: ops_of(attention(), ALIKE[0], one, one), device)) == []
    assert kernels(lowered(lambda _: ops_of(attention(enable_gqa=True), ALIKE[0], one, one), device))


def test_a_user_may_ask_for_flash_instead(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernels(lowered(lambda _: ops_of(attention(), *ALIKE), H100)) == [FLASH, f"{FLASH}_backward"]


def test_the_kernels_that_the_model_allows_are_taken():
    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v)

    assert kernels(lowered(lambda _: ops_of(chosen, *ALIKE), H100)) == [EFFICIENT, f"{EFFICIENT}_backward"]


@pytest.mark.parametrize(("device", "kernel"), [(H100, CUDNN), (A100, EFFICIENT)])
def test_attention_with_a_mask_and_dropout(device, kernel):
    mask = torch.zeros(2, 1, 64, 64, dtype=torch.bfloat16)
    seen = lowered(lambda _: ops_of(lambda q, k, v: attention(dropout_p=0.1)(q, k, v, mask), *ALIKE), device)
    assert kernels(seen) == [kernel, f"{kernel}_backward"]
    assert results(seen, kernel)[0] == ALIKE[0]


def test_a_mask_that_is_learnt_is_not_for_cudnn():
    seen = lowered(lambda _: ops_of(attention(), *ALIKE, (2, 1, 64, 64)), H100)
    assert kernels(seen) == [EFFICIENT, f"{EFFICIENT}_backward"]
    assert results(seen, f"{EFFICIENT}_backward")[3] == (2, 8, 64, 64)


def test_a_boolean_mask_becomes_numbers():
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    seen = lowered(lambda _: ops_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), *ALIKE), A100)
    assert results(seen, "aten.where") == [(2, 1, 64, 64)]
    assert results(seen, EFFICIENT)[0] == ALIKE[0]


@pytest.mark.parametrize("device", [H100, A100])
def test_attention_in_full_precision_is_the_efficient_one(device):
    seen = lowered(lambda _: ops_of(attention(is_causal=True), *ALIKE, dtype=torch.float32), device)
    assert results(seen, EFFICIENT) == [(2, 8, 64, 32), (2, 8, 64), (), ()]


def test_attention_that_no_kernel_takes_is_written_out():
    seen = lowered(lambda _: ops_of(attention(), *ALIKE, dtype=torch.float64), H100)
    assert not kernels(seen)
    assert [name for name, _ in seen].count("aten.bmm") == 6


def test_heads_of_odd_size_are_padded_for_flash():
    shape = (2, 8, 64, 20)
    seen = lowered(lambda _: ops_of(attention(), shape, shape, shape), A100)
    assert results(seen, FLASH)[0] == (2, 8, 64, 24)
    assert [shapes for name, shapes in seen if name == "aten.constant_pad_nd"][:3] == [[(2, 8, 64, 24)]] * 3


def test_multi_head_attention_of_torch_is_lowered_too():
    def work(_: Any) -> list[str]:
        module = nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.bfloat16)
        return kernels(ops_of(lambda x: module(x, x, x, need_weights=False)[0], (2, 16, 64)))

    assert lowered(work, H100) == [CUDNN, f"{CUDNN}_backward"]


def test_dropout_is_one_op():
    seen = lowered(lambda _: ops_of(lambda x: F.dropout(x, 0.1), (2, 64)), H100)
    assert results(seen, "aten.native_dropout") == [(2, 64), (2, 64)]
    assert "aten.bernoulli_" not in dict(seen)


@pytest.mark.parametrize(("p", "train", "ops"), [(0.0, True, []), (0.5, False, []), (1.0, True, ["aten.mul"])])
def test_dropout_that_draws_nothing_draws_nothing(p, train, ops):
    seen = lowered(lambda _: ops_of(lambda x: F.dropout(x, p, train) + 1, (2, 64)), H100)
    assert [name for name, _ in seen if "dropout" in name or name == "aten.mul"][:1] == ops


def test_layer_norm_is_the_same_op():
    seen = lowered(lambda _: ops_of(lambda x: F.layer_norm(x, (64,)), (2, 64)), H100)
    assert results(seen, "aten.native_layer_norm") == [(2, 64), (2, 1), (2, 1)]


def test_for_a_processor_nothing_is_changed():
    assert FOR_CPU in kernels(lowered(lambda _: ops_of(attention(), *ALIKE), device_named("cpu")))


def test_this_process_is_as_it_was():
    before = ops_of(attention(), *ALIKE)
    assert kernels(lowered(lambda _: ops_of(attention(), *ALIKE), H100))[0] == CUDNN
    assert ops_of(attention(), *ALIKE) == before
    x = torch.randn(2, 8)
    expected = x * (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).rsqrt()
    assert torch.allclose(F.rms_norm(x, (8,)), expected)


def test_what_was_changed_is_changed_back():
    def work(_: Any) -> tuple[list[str], list[str]]:
        with lowered_to("a100"):
            inner = kernels(ops_of(attention(), *ALIKE))
        return inner, kernels(ops_of(attention(), *ALIKE))

    inner, after = lowered(work, device_named("cpu"))
    assert inner[0] == FLASH
    assert after[0] == FOR_CPU


def test_errors_of_the_plan_arrive_as_they_are():
    problem = Problem("budget", "3 bytes", "more", fix="give more")

    def work(_: Any) -> None:
        raise PlanError(problem)

    with pytest.raises(PlanError) as error:
        lowered(work, H100)
    assert error.value.problems == (problem,)
    assert error.value.__cause__ is None


def test_errors_of_the_model_arrive_with_where_they_were_raised():
    def broken_forward(_: Any) -> None:
        raise KeyError("labels")

    with pytest.raises(KeyError) as error:
        lowered(broken_forward, H100)
    assert error.value.args == ("labels",)
    assert "in broken_forward" in str(error.value.__cause__)


def test_an_error_that_cannot_be_handed_over_is_told():
    class OwnError(Exception):
        pass

    def work(_: Any) -> None:
        raise OwnError("no such layer")

    with pytest.raises(RuntimeError) as error:
        lowered(work, H100)
    assert str(error.value) == "OwnError: no such layer"


def test_a_process_that_dies_is_an_error():
    with pytest.raises(PlanError) as error:
        lowered(lambda _: os.kill(os.getpid(), signal.SIGKILL), H100)
    assert str(error.value) == (
        "device: planning for another device takes a process of its own: the process that planned it ended with status "
        "-9\n"
        "    fix: plan before the first backward or in a process of its own, or for the device that the model is on"
    )


def test_autograd_that_refuses_to_run_in_a_fork_is_told_of():
    def work(_: Any) -> None:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")

    with pytest.raises(PlanError, match="backward has run on a GPU in this process"):
        lowered(work, H100)


def test_progress_is_told_here():
    heard: list[tuple[int, int, str]] = []

    def work(progress: Any) -> int:
        progress(1, 2, "half")
        return 5

    assert lowered(work, H100, lambda *done: heard.append(done)) == 5
    assert heard == [(1, 2, "half")]


def test_what_this_torch_lacks_is_noted_and_left_alone(monkeypatch):
    assert not_lowered() == ()
    monkeypatch.setitem(lowering._NEEDED, "_fused_rms_norm_of_tomorrow", "RMS norm")
    assert not_lowered() == (
        f"this torch ({torch.__version__}) has no aten::_fused_rms_norm_of_tomorrow: "
        "RMS norm is planned as the CPU runs it",
    )
    seen = lowered(lambda _: ops_of(lambda x: F.rms_norm(x, (32,)), (2, 64, 32)), H100)
    assert "aten._fused_rms_norm" not in dict(seen)


def test_an_unknown_device_is_an_error():
    with pytest.raises(PlanError, match="the planner has no figures for 'h1000'"), lowered_to("h1000"):
        pass


def test_only_tensors_on_the_cpu_are_lowered_and_only_for_another_device():
    model = nn.Linear(2, 2)
    assert needs_lowering(model, H100)
    assert not needs_lowering(model, device_named("cpu"))
    assert not needs_lowering(model.to("meta"), H100)


class Block(nn.Module):
    """Norm, attention and two products with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


def test_a_plan_made_in_the_child_comes_back_whole():
    model, inputs = Stack().bfloat16(), (torch.zeros(2, 128, 64, dtype=torch.bfloat16),)
    made = lowered(lambda _: make_plan(prepare(model, inputs, device="h100"), "50%"), H100)
    assert made.pricing.device == H100
    assert made.least <= made.point.peak <= made.budget < made.most
    [profile] = made.profiles
    ops = [entry.op for entry in profile.entries]
    assert f"{CUDNN}.default" in ops
    assert "aten._fused_rms_norm.default" in ops
    assert load_policy(yaml.safe_load(dump_policy(made.policy))).rules == made.policy.rules
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_face_plans_for_another_device():
    model, inputs = Stack().bfloat16(), (torch.zeros(2, 128, 64, dtype=torch.bfloat16),)
    policy = sac.plan(model, inputs, "10%", device="h100")
    ops = {op for rule in policy.rules for op in rule.ops}
    assert ops & {"attention", CUDNN}
    assert "aten._fused_rms_norm" in ops
    assert FOR_CPU not in str(ops)
    with pytest.raises(PlanError, match="is below the least peak of this model and these inputs"):
        sac.plan(model, inputs, 1000, device="h100")


def test_what_this_torch_lacks_stands_in_the_notes_of_a_plan(monkeypatch):
    monkeypatch.setitem(lowering._NEEDED, "_fused_rms_norm_of_tomorrow", "RMS norm")
    model, inputs = Stack().bfloat16(), (torch.zeros(2, 128, 64, dtype=torch.bfloat16),)
    made = planned(model, "h100", lambda _: make_plan(prepare(model, inputs, device="h100"), "10%"))
    assert made.notes == not_lowered()


def test_real_tensors_run_as_they_do_here():
    model = Stack().bfloat16()
    assert planned(model, "h100", lambda _: os.getpid(), real=True) == os.getpid()


def test_norms_that_a_model_writes_out_stay_written_out():
    model, inputs = tiny("llama")
    profiles = lowered(lambda _: prepare(model.bfloat16(), inputs, device="h100").profiles, H100)
    ops = {entry.op for profile in profiles for entry in profile.entries}
    assert "aten.rsqrt.default" in ops
    assert "aten._fused_rms_norm.default" not in ops
