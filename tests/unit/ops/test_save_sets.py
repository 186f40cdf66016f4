import pytest
import torch
import torch.distributed as dist

from sac.ops.facts import traits_of
from sac.ops.names import is_must_save, resolve_ops
from sac.ops.registry import find_ops, op_name, read_registry
from sac.ops.save_sets import SAVE_SETS, condition_of

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
OPS = [op for packet, overloads in read_registry().packets.items() for op in find_ops(packet, overloads)]

MEMBERS = {
    "attention": [
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default, aten._flash_attention_forward.default,
        aten._efficient_attention_forward.default, aten._cudnn_attention_forward.default,
        torch.ops.higher_order.flex_attention,
    ],
    "matmul": [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default],
    "grouped_matmul": [aten._grouped_mm.default, aten._scaled_grouped_mm.default],
    "low_precision_matmul": [aten._scaled_mm.default, aten._int_mm.default, aten._weight_int8pack_mm.default],
    "convolution": [aten.convolution.default, aten.cudnn_convolution.default, aten._conv_depthwise2d.default],
    "collective": [c10d.all_reduce.default, c10d.all_to_all_single.default, c10d.reduce_scatter_tensor.default],
    "nondeterministic": [aten.topk.default, aten.sort.default, aten.sort.stable, aten.multinomial.default,
                         aten.histc.default],
    "device_to_host": [aten._to_copy.default],
    "random": [aten.bernoulli.p, aten.rand.default, aten.rand_like.default, aten.native_dropout.default],
    "scaling": [aten.amax.default, aten.aminmax.default, aten.max.default],
    "compiled": [torch.ops.higher_order.inductor_compiled_code, torch.ops.higher_order.invoke_subgraph],
}  # fmt: skip

STRANGERS = {
    "attention": [
        aten._scaled_dot_product_flash_attention_backward.default, aten._scaled_dot_product_attention_math.default,
        aten._flash_attention_backward.default, aten._softmax.default, aten.mm.default,
    ],
    "matmul": [aten.mm.out, aten.addmm_.default, aten._scaled_mm.default, aten.mul.Tensor, aten.dot.default],
    "low_precision_matmul": [aten.mm.default],
    "convolution": [aten.convolution_backward.default],
    "collective": [c10d.wait_tensor.default, c10d.all_reduce_.default, torch.ops.c10d.allreduce_.default],
    "nondeterministic": [aten.max.dim, aten.native_dropout.default, aten.mm.default],
    "random": [aten.bernoulli_.float, aten.rand.out, aten._scaled_dot_product_flash_attention.default],
    "scaling": [aten.max.dim, aten.max.other],
}  # fmt: skip


def test_every_set_of_the_design_is_there():
    assert tuple(MEMBERS) == tuple(SAVE_SETS)


@pytest.mark.parametrize("name", SAVE_SETS)
def test_a_set_means_its_members_and_no_strangers_and_nothing_that_cannot_be_saved(name):
    matcher = resolve_ops([name])
    assert matcher.problems == {}
    assert [op_name(op) for op in MEMBERS[name] if not matcher.matches(op)] == []
    assert [op_name(op) for op in STRANGERS.get(name, ()) if matcher.matches(op)] == []
    assert [op_name(op) for op in OPS if matcher.matches(op) and not traits_of(op).savable] == []


def test_every_random_op_that_a_mode_can_see_is_random_or_attention_or_a_network_of_its_own():
    known = resolve_ops(["random", "attention"])
    tagged = [
        op for op in OPS if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) and traits_of(op).savable
    ]
    composite = "CompositeImplicitAutograd"
    visible = [op for op in tagged if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite)]
    rest = {op_name(op) for op in visible if not known.matches(op) and "backward" not in op_name(op)}
    # Inductor registers its own when some other test imports it; they are in compiled graphs only.
    rest = {name for name in rest if not name.startswith("prims.inductor_")}
    # Of the rest, RNNs draw for their dropout, one makes the state for that, and one is tagged though it draws nothing.
    assert rest <= {"aten._cudnn_rnn.default", "aten.miopen_rnn.default", "aten._lstm_mps.default",
                    "aten._cudnn_init_dropout_state.default",
                    "aten._nested_tensor_softmax_with_shape.default"}  # fmt: skip


def test_routing_choices_must_be_saved_in_every_mode():
    assert is_must_save(aten.topk.default) == (True, "")
    assert is_must_save(c10d.all_to_all_single.default) == (True, "")
    assert is_must_save(aten._cudnn_rnn.default) == is_must_save(aten.miopen_rnn.default) == (True, "")
    assert is_must_save(aten.mm.default) == (False, "")
    assert is_must_save(aten.topk.values) == (False, "")


@pytest.mark.parametrize(
    ("save_set", "function"),
    [
        ("attention", "flash_attn.flash_attn_interface.FlashAttnVarlenFunc"),
        ("attention", "transformer_engine.pytorch.attention.FusedAttnFunc_qkvpacked"),
        ("matmul", "megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication"),
        ("matmul", "transformer_engine.pytorch.module.linear._Linear"),
        ("collective", "megatron.core.tensor_parallel.mappings._ReduceFromModelParallelRegion"),
        ("collective", "torch.distributed.nn.functional._AllReduce"),
        ("*", "any.Function"),
    ],
)
def test_save_sets_know_common_functions(save_set: str, function: str) -> None:
    assert resolve_ops([save_set]).matches_unit(function)
    assert not resolve_ops(["random"]).matches_unit(function)


# -- Collectives


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_result_may_be_waited_for_again_and_later(group):
    """Waiting hands back the tensor it waits for, so what a region keeps is complete once backward has waited."""
    x = torch.arange(4.0)
    result = c10d.all_to_all_single(x, [4], [4], group.group_name)
    assert c10d.wait_tensor(result) is result
    assert c10d.wait_tensor(result) is result
    assert torch.equal(result, x)
    assert result.data_ptr() != x.data_ptr()
    assert traits_of(c10d.wait_tensor.default).is_view


# -- Conditions


def on(device):
    """Return a stand-in for a tensor on a device that this machine need not have."""
    return Placed._make_wrapper_subclass(Placed, (2,), device=torch.device(device))


class Placed(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("source", "target", "holds"),
    [
        ("cuda", "cpu", True),
        ("xpu", "cpu", True),
        ("cuda", "cuda", False),
        ("cpu", "cpu", False),
        ("cpu", "cuda", False),
    ],
)
def test_device_to_host_looks_at_both_sides(source, target, holds):
    condition = condition_of("device_to_host")
    assert condition((on(source),), {}, on(target)) is holds
    assert condition((), {"self": on(source)}, on(target)) is holds
    assert condition((on(source),), {"device": torch.device(target)}, None) is holds


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "holds"),
    [
        ("device_to_host", (), {}, False),
        ("device_to_host", (torch.empty(2, device="meta"),), {"device": "cpu"}, False),
        ("absent:2/out,/more", (0, 1, None), {}, True),
        ("absent:2/out,/more", (0, 1), {}, True),
        ("absent:2/out,/more", (0, 1, 2), {}, False),
        ("absent:2/out,/more", (0, 1), {"out": 2}, False),
        ("absent:2/out,/more", (0, 1), {"more": 2}, False),
    ],
)
def test_conditions_on_arguments(name, args, kwargs, holds):
    assert condition_of(name)(args, kwargs, None) is holds
