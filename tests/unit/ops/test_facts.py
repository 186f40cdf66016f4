import pytest
import torch

from sac.ops.facts import OVERSTATED_WRITES, OpTraits, traits_of
from sac.ops.registry import find_ops, op_name, read_registry

aten = torch.ops.aten
OPS = [op for packet, overloads in read_registry().packets.items() for op in find_ops(packet, overloads)]
WITH_SCHEMA = [op for op in OPS if isinstance(op, torch._ops.OpOverload)]


def test_every_registered_op_has_traits():
    assert len(OPS) > 3000
    assert all(isinstance(traits_of(op), OpTraits) for op in OPS)


def test_no_op_that_its_schema_says_writes_is_savable():
    writing = [op for op in WITH_SCHEMA if any(a.alias_info and a.alias_info.is_write for a in op._schema.arguments)]
    assert len(writing) > 1000
    assert [op_name(op) for op in writing if traits_of(op).savable] == []
    assert [op_name(op) for op in writing if not (traits_of(op).mutated_args or traits_of(op).mutated_kwargs)] == []


def test_every_view_of_torch_is_a_view():
    assert [
        op_name(op) for op in WITH_SCHEMA if op.is_view and traits_of(op).returns_tensor and traits_of(op).savable
    ] == []


def test_every_op_with_the_random_tag_or_a_generator_is_random():
    tagged = [op for op in WITH_SCHEMA if torch.Tag.nondeterministic_seeded in op.tags]
    assert tagged
    assert all(traits_of(op).is_random and traits_of(op).may_draw for op in tagged)
    assert all(traits_of(op).is_random for op in WITH_SCHEMA if "Generator" in str(op._schema))


def test_arguments_are_found_at_their_positions():
    for op in WITH_SCHEMA:
        traits, arguments = traits_of(op), op._schema.arguments
        assert all(not arguments[place].kwarg_only for place in traits.mutated_args)
        keyword_only = {argument.name for argument in arguments if argument.kwarg_only}
        assert keyword_only.issuperset(traits.mutated_kwargs)
    assert traits_of(aten.add.out).mutated_kwargs == ("out",)
    assert traits_of(aten.add_.Tensor).mutated_args == (0,)
    assert traits_of(aten.rrelu_with_noise.default).mutated_args == (1,)


@pytest.mark.parametrize(
    "op",
    [aten.mm.default, aten.softmax.int, aten.clone.default, aten._to_copy.default, aten.native_dropout.default,
     aten.bernoulli.p, aten.rand.default, aten.topk.default, aten.embedding.default, aten.index.Tensor, aten.mul.Tensor,
     aten.native_layer_norm.default, aten.split_copy.Tensor, aten.lift_fresh_copy.default, aten.nonzero.default,
     torch.ops._c10d_functional.all_reduce.default, torch.ops.higher_order.flex_attention,
     torch.ops.higher_order.inductor_compiled_code],
    ids=op_name,
)  # fmt: skip
def test_an_op_that_makes_a_new_tensor_is_savable(op):
    assert traits_of(op).savable
    assert traits_of(op).unsavable_reason == ""


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (aten.add_.Tensor, "it writes its argument `self`"),
        (aten.mm.out, "it writes its argument `out`"),
        (aten.native_batch_norm.default, "it writes its arguments `running_mean`, `running_var`"),
        (aten._fused_moving_avg_obs_fq_helper.default,
         "it writes its arguments `running_min`, `running_max`, `scale`, `zero_point`"),
        (aten.view.default, "it is a view"),
        (aten.split.Tensor, "it is a view"),
        (aten.detach.default, "it is a view"),
        (aten.lift_fresh.default, "it is a view"),
        (aten._unsafe_view.default, "it is a view"),
        (aten.empty.memory_format, "it makes an uninitialised tensor"),
        (aten.new_empty_strided.default, "it makes an uninitialised tensor"),
        (torch.ops.prims.empty_strided.default, "it makes an uninitialised tensor"),
        (aten.zeros_like.default, "it makes a constant"),
        (aten.arange.start_step, "it makes a constant"),
        (aten.fill.Scalar, "it makes a constant"),
        (aten._local_scalar_dense.default, "it returns no tensor"),
        (aten.equal.default, "it returns no tensor"),
        (torch.ops.profiler._record_function_enter_new.default, "profiler ops belong to the infrastructure"),
        (torch.ops.c10d.allreduce_.default, "c10d ops belong to the infrastructure"),
        (torch.ops._c10d_functional.wait_tensor.default, "it is a view"),
        (torch.ops.inductor.accumulate_grad_.default, "it writes its argument `variable`"),
        (torch.ops.higher_order.print, "it returns no tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else op_name(value),
)  # fmt: skip
def test_why_an_op_cannot_be_saved(op, reason):
    assert traits_of(op).unsavable_reason == reason
    assert not traits_of(op).savable


def test_a_triton_kernel_that_writes_is_not_savable():
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    assert traits_of(triton_kernel_wrapper_mutation).unsavable_reason == "it writes its arguments"
    assert not traits_of(triton_kernel_wrapper_mutation).returns_tensor


def test_constants_are_factories_and_draws_are_not():
    factories = [aten.zeros.default, aten.full_like.default, aten.new_ones.default, aten.eye.default,
                 aten.linspace.default, aten.scalar_tensor.default, aten.tril_indices.default,
                 aten.empty_like.default]  # fmt: skip
    assert all(traits_of(op).is_factory for op in factories)
    assert [traits_of(op).is_uninitialised for op in factories] == [False] * 7 + [True]
    draws = [
        aten.rand.default,
        aten.randn_like.default,
        aten.randint.low,
        aten.randperm.default,
        aten.normal.float_float,
    ]
    assert not any(traits_of(op).is_factory for op in draws)
    assert all(traits_of(op).savable for op in draws)


def test_only_ops_that_may_draw_need_their_generator_compared():
    assert not traits_of(aten.mm.default).may_draw
    assert traits_of(aten.native_dropout.default).may_draw
    assert not traits_of(torch.ops._c10d_functional.all_reduce.default).may_draw
    assert traits_of(torch.ops.higher_order.flex_attention).may_draw
    assert traits_of(len).may_draw  # a callable without a schema
    assert traits_of(len).savable


@pytest.fixture
def library():
    made = torch.library.Library("_flash_attn2_cuda_0badcafe", "DEF")
    made.define("fwd(Tensor! q, Tensor k, Tensor v, Tensor(out_!)? out_, float p, Generator? gen_) -> Tensor[]")
    made.define("varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor? out_, Tensor cu_seqlens_q) -> Tensor[]")
    made.define("kvcache(Tensor q, Tensor(a!) cache, Tensor(b!)? more=None) -> Tensor")
    made.define("keyword(Tensor q, *, Tensor(a!)? out=None) -> Tensor")
    yield torch.ops._flash_attn2_cuda_0badcafe
    made._destroy()


def test_an_op_that_writes_only_what_it_is_given_is_savable_in_calls_that_give_none(library):
    fwd = traits_of(library.fwd.default)
    assert fwd.mutated_args == (3,)
    assert fwd.is_random
    assert fwd.unsavable_reason == "it writes its argument `out_`"
    assert fwd.savable_if == "absent:3/out_"
    assert not fwd.savable
    assert traits_of(library.keyword.default).savable_if == "absent:/out"
    assert traits_of(library.keyword.default).mutated_kwargs == ("out",)


def test_flash_attention_does_not_write_its_query_whatever_its_schema_says(library):
    assert [glob for glob, names in OVERSTATED_WRITES if names == ("q",)]
    assert traits_of(library.varlen_fwd.default).mutated_args == ()
    assert traits_of(library.varlen_fwd.default).savable


def test_an_op_that_writes_what_it_must_be_given_is_never_savable(library):
    assert traits_of(library.kvcache.default).savable_if == ""
    assert traits_of(library.kvcache.default).mutated_args == (1, 2)
    assert traits_of(aten.native_batch_norm.default).savable_if == ""
