import pytest
import torch

from sac.ops.facts import traits_of
from sac.ops.names import is_must_save, resolve_ops
from sac.ops.registry import find_ops, is_glob, op_name, read_registry
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


@pytest.mark.parametrize("name", tuple(SAVE_SETS))
def test_a_set_means_its_members(name):
    matcher = resolve_ops([name])
    assert matcher.problems == {}
    assert [op_name(op) for op in MEMBERS[name] if not matcher.matches(op)] == []


@pytest.mark.parametrize("name", STRANGERS)
def test_a_set_does_not_mean_strangers(name):
    matcher = resolve_ops([name])
    assert [op_name(op) for op in STRANGERS[name] if matcher.matches(op)] == []


@pytest.mark.parametrize("name", tuple(SAVE_SETS))
def test_no_set_means_an_op_that_cannot_be_saved(name):
    matcher = resolve_ops([name])
    assert [op_name(op) for op in OPS if matcher.matches(op) and not traits_of(op).savable] == []


@pytest.mark.parametrize("name", tuple(SAVE_SETS))
def test_every_entry_of_a_set_that_is_registered_has_something_savable(name):
    packets = read_registry().packets
    for entry in SAVE_SETS[name].entries:
        if entry.name in packets:
            assert resolve_ops([entry.name]).problems == {}, entry.name


def test_every_condition_of_a_set_exists():
    conditions = {entry.condition for each in SAVE_SETS.values() for entry in each.entries if entry.condition}
    assert "device_to_host" in conditions
    assert all(callable(condition_of(name)) for name in conditions)


def test_missing_are_exactly_the_entries_that_this_torch_lacks():
    matcher = resolve_ops(["matmul", "attention"])
    assert set(matcher.missing) == {
        entry.name
        for name in ("matmul", "attention")
        for entry in SAVE_SETS[name].entries
        if not read_registry().has(next(e.pattern for e in matcher.entries if e.pattern.text == entry.name))
    }
    assert "aten.mm" not in matcher.missing


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
    assert is_must_save(aten._cudnn_rnn.default) == (True, "truthy:11/dropout,12/train")
    assert is_must_save(aten.mm.default) == (False, "")
    assert is_must_save(aten.topk.values) == (False, "")


def test_the_dropout_of_a_cudnn_rnn_is_read_at_its_place():
    for op in (aten._cudnn_rnn.default, aten.miopen_rnn.default):
        places = [place.partition("/") for place in is_must_save(op)[1].removeprefix("truthy:").split(",")]
        assert [op._schema.arguments[int(place)].name for place, _, _ in places] == ["dropout", "train"]
        assert [name for _, _, name in places] == ["dropout", "train"]


def test_no_name_in_a_set_is_written_twice():
    for save_set in SAVE_SETS.values():
        names = [entry.name for entry in save_set.entries]
        assert len(names) == len(set(names))
        assert all("::" not in name and (is_glob(name) or name.count(".") in (1, 2)) for name in names)


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
