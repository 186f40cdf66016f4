"""The time of one op: which roof holds it, by which efficiency, and what is left out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sac.planner.cost import (
    CLASSES,
    PRIORS,
    entry_times,
    is_causal,
    op_class,
    seconds,
    unpriced_ops,
)
from sac.planner.devices import DEVICES
from sac.planner.profile import Entry, RegionProfile

H100, A100 = DEVICES["h100"], DEVICES["a100"]
N = 8192


def entry(op="aten.mm.default", **facts):
    return Entry(
        **{"number": 0, "module": "", "op": op, "call": 0, "reads": (), "makes": (), "dtype": "bfloat16"} | facts
    )


def profile(*entries):
    return RegionProfile("block", ("block",), (0,), entries, (), (), ())


MM = entry(flops=2 * N**3, moved_bytes=3 * 2 * N**2, shape=(N, N))
ADD = entry("aten.add.Tensor", moved_bytes=3 * 2 * N**2, shape=(N, N))


def test_there_is_a_prior_for_each_class():
    assert set(PRIORS) == set(CLASSES)
    assert all(0 < prior <= 1 for prior in PRIORS.values())


def test_a_large_product_is_bound_by_the_matrix_units():
    assert seconds(MM, H100) == pytest.approx(2 * N**3 / (989.4e12 * 0.70) + 4e-6)


def test_a_thin_product_is_bound_by_memory():
    thin = entry(flops=2 * N * N, moved_bytes=2 * N * N + 4 * N, shape=(1, N))
    assert seconds(thin, H100) == pytest.approx((2 * N * N + 4 * N) / (3.35e12 * 0.85) + 4e-6)


def test_what_does_not_multiply_is_bound_by_memory():
    assert seconds(ADD, H100) == pytest.approx(3 * 2 * N**2 / (3.35e12 * 0.85) + 4e-6)


def test_attention_has_an_efficiency_of_its_own():
    attention = entry("aten._scaled_dot_product_flash_attention.default", flops=MM.flops, moved_bytes=MM.moved_bytes)
    assert seconds(attention, H100) == pytest.approx(MM.flops / (989.4e12 * 0.40) + 4e-6)


@pytest.mark.parametrize(
    "free",
    [
        replace(MM, op=""),
        entry("aten.view.default", is_view=True, moved_bytes=9),
        entry("_c10d_functional.wait_tensor.default", is_view=True, is_collective=True, moved_bytes=9),
        entry("aten.empty_like.default", moved_bytes=9),
        entry("aten.new_empty.default", moved_bytes=9),
    ],
    ids=["an unseen alias", "a view", "a wait", "uninitialised", "uninitialised by another"],
)
def test_what_runs_no_kernel_takes_no_time(free):
    assert seconds(free, H100) == 0


def test_an_op_of_no_size_takes_its_launch():
    assert seconds(entry("aten.add.Tensor"), H100) == H100.launch_s


def test_a_collective_sends_its_bytes_over_the_link():
    gather = entry("_c10d_functional.all_gather_into_tensor.default", is_collective=True, moved_bytes=9 * 2**20)
    assert seconds(gather, H100) == pytest.approx(9 * 2**20 / (450e9 * 0.80) + 4e-6)


@pytest.mark.parametrize(
    ("dtype", "figure"), [("bfloat16", 989.4e12), ("float16", 989.4e12), ("float32", 66.9e12), ("float64", 66.9e12)]
)
def test_the_peak_is_that_of_the_dtype(dtype, figure):
    assert seconds(replace(MM, dtype=dtype), H100) == pytest.approx(MM.flops / (figure * 0.70) + 4e-6)


def test_a_scaled_product_runs_by_the_dtype_of_its_operands():
    scaled = replace(MM, op="aten._scaled_mm.default")
    assert seconds(scaled, H100) == pytest.approx(MM.flops / (1978.9e12 * 0.70) + 4e-6)
    assert seconds(scaled, A100) == seconds(MM, A100)  # it has no such units


@pytest.mark.parametrize(
    ("op", "flops", "kind"),
    [
        ("aten.mm.default", 1, "matmul"),
        ("aten.addmm.default", 1, "matmul"),
        ("aten.bmm.default", 1, "matmul"),
        ("aten.baddbmm.default", 1, "matmul"),
        ("aten._grouped_mm.default", 1, "matmul"),
        ("aten.linear.default", 0, "matmul"),
        ("aten.convolution.default", 1, "matmul"),
        ("my_lib.priced.default", 1, "matmul"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", 1, "attention"),
        ("aten._scaled_dot_product_cudnn_attention.default", 1, "cudnn attention"),
        ("higher_order.flex_attention", 0, "attention"),
        ("flash_attn._flash_attn_forward.default", 0, "attention"),
        ("aten.silu.default", 0, "memory"),
        ("aten._fused_rms_norm.default", 0, "memory"),
        ("aten.add_.Tensor", 0, "memory"),
        ("my_lib.unknown.default", 0, "memory"),
        ("", 0, "free"),
    ],
)
def test_classes(op, flops, kind):
    assert op_class(entry(op, flops=flops)) == kind


def test_causal_attention_takes_half_of_the_flops_that_are_counted():
    whole = entry("aten._flash_attention_forward.default", flops=10**13, moved_bytes=1, shape=(1,))
    causal = replace(whole, is_causal=True)
    assert seconds(causal, H100) - H100.launch_s == pytest.approx((seconds(whole, H100) - H100.launch_s) / 2)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((0.0, True), {}, True), ((0.0, False), {}, False), ((), {"is_causal": True}, True), ((), {}, False)],
)
def test_a_call_that_is_told_to_be_causal(args, kwargs, expected):
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    qkv = [torch.zeros(1, 1, 2, 2)] * 3
    assert is_causal(op, (*qkv, *args), kwargs) is expected
    assert not is_causal(torch.ops.aten.mm.default, (*qkv, True), {"is_causal": True})


def test_ops_that_multiply_without_a_formula_are_named_once_and_in_order():
    entries = (
        entry("my_lib.fused.default", moved_bytes=8, shape=(2, 2)),
        entry("aten.mv.default", moved_bytes=8, shape=(2,)),
        entry("my_lib.fused.default", moved_bytes=8, shape=(2, 2)),
        entry("higher_order.flex_attention", shape=(2,)),
    )
    assert unpriced_ops(profile(*entries)) == ("my_lib.fused.default", "aten.mv.default", "higher_order.flex_attention")


@pytest.mark.parametrize(
    "priced",
    [
        MM,
        ADD,
        entry("prims.mul.default"),
        entry("profiler._record_function_enter_new.default"),
        entry("aten.mm.default", shape=(0, 8)),
        entry("my_lib.alias.default", is_view=True),
        entry("_c10d_functional.all_reduce.default", is_collective=True),
    ],
    ids=lambda priced: priced.op,
)
def test_ops_that_are_priced_right_are_not_named(priced):
    assert unpriced_ops(profile(priced)) == ()


def test_an_op_without_a_formula_is_priced_by_its_bytes():
    attention = entry("flash_attn._flash_attn_forward.default", moved_bytes=ADD.moved_bytes)
    assert seconds(attention, H100) == seconds(ADD, H100)


def test_times_of_a_profile_are_in_its_order():
    view = entry("aten.view.default", is_view=True)
    assert entry_times(profile(MM, view, ADD), H100) == (seconds(MM, H100), 0.0, seconds(ADD, H100))


sizes = st.integers(0, 2**60)


@given(sizes, sizes, st.sampled_from(["aten.mm.default", "aten.add.Tensor", "aten._flash_attention_forward.default"]))
def test_more_work_never_takes_less_time_and_a_better_device_never_more(flops, moved, op):
    one = entry(op, flops=flops, moved_bytes=moved)
    time = seconds(one, H100)
    assert time >= H100.launch_s
    assert seconds(replace(one, flops=2 * flops), H100) >= time
    assert seconds(replace(one, moved_bytes=2 * moved), H100) >= time
    assert seconds(one, DEVICES["h200"]) <= time <= seconds(one, A100)
