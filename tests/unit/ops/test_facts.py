from typing import Any

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils._python_dispatch import TorchDispatchMode

from sac.ops.facts import traits_of
from sac.ops.registry import find_ops, op_name, read_registry
from sac.torch_private import BOUND

aten = torch.ops.aten
OPS = [op for packet, overloads in read_registry().packets.items() for op in find_ops(packet, overloads)]
WITH_SCHEMA = [op for op in OPS if isinstance(op, torch._ops.OpOverload)]


def test_every_op_has_the_traits_that_its_schema_tells():
    assert len(WITH_SCHEMA) > 3000
    for op in WITH_SCHEMA:
        traits, arguments = traits_of(op), op._schema.arguments
        if any(argument.alias_info and argument.alias_info.is_write for argument in arguments):
            assert traits.mutated_args or traits.mutated_kwargs, op
            assert not traits.savable, op
        if op.is_view and traits.returns_tensor:
            assert not traits.savable, op
        if torch.Tag.nondeterministic_seeded in op.tags or "Generator" in str(op._schema):
            assert traits.is_random, op
            assert traits.may_draw, op
        assert all(not arguments[place].kwarg_only for place in traits.mutated_args), op
        assert {one.name for one in arguments if one.kwarg_only}.issuperset(traits.mutated_kwargs), op
    assert traits_of(aten.add.out).mutated_kwargs == ("out",)
    assert traits_of(aten.add_.Tensor).mutated_args == (0,)
    assert traits_of(aten.rrelu_with_noise.default).mutated_args == (1,)


A, SQUARE, ROWS = torch.randn(4, 6), torch.randn(4, 4), torch.tensor([1, 2])
# Of overloads that the functions of torch's bindings stand for; of the others one tensor.
CALLS = {
    **{
        f"aten.{name}.Tensor": [(A, A), (A, 2.5), (2.5, A), (A, torch.tensor(3.0))]
        for name in ("add", "div", "mul", "sub")
    },
    "aten._softmax.default": [(A, -1, False)],
    "aten.addmm.default": [(SQUARE, SQUARE, SQUARE)],
    "aten.bmm.default": [(torch.randn(2, 4, 4), torch.randn(2, 4, 4))],
    "aten.embedding.default": [(A, ROWS), (A, ROWS, 0, False, True)],
    "aten.expand.default": [(A, [2, -1, 6])],
    "aten.mean.dim": [(A, [-1], True), (A, None), (A, [])],
    "aten.mm.default": [(SQUARE, SQUARE)],
    "aten.native_layer_norm.default": [(A, [6], None, None, 1e-5), (A, [6], A[0], A[1], 1e-5)],
    "aten.permute.default": [(A, [1, 0])],
    "aten.pow.Tensor_Scalar": [(A, 2)],
    "aten.select.int": [(A, -1, 2)],
    "aten.sum.dim_IntList": [(A, [-1], True), (A, None)],
    "aten.transpose.int": [(A, -1, 0)],
    "aten.unsqueeze.default": [(A, 0)],
    "aten.view.default": [(A, [-1])],
}


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made.append(f"{func} {args} {kwargs}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(BOUND))
def test_the_function_of_an_op_calls_this_op(name: str) -> None:
    _, packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    for args in CALLS.get(name, [(A,)]):
        with Calls() as by_function:
            BOUND[name](*args)
        with Calls() as by_op:
            op(*args)
        assert by_function.made == by_op.made
        assert len(by_op.made) == 1


def test_attention_draws_only_with_dropout():
    ops = [op for op in WITH_SCHEMA if traits_of(op).chance >= 0]
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert flash in ops
    assert all(op_name(op).startswith("aten._scaled_dot_product_flash_attention") for op in ops)
    q, state = torch.randn(1, 2, 4, 8), torch.get_rng_state()
    flash(q, q, q, 0.0, True)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "op",
    [aten.mm.default, aten.clone.default, aten._to_copy.default, aten.native_dropout.default,
     aten.bernoulli.p, aten.rand.default, aten.randn_like.default, aten.topk.default, aten.embedding.default,
     aten.index.Tensor, aten.native_layer_norm.default, aten.split_copy.Tensor, aten.lift_fresh_copy.default,
     torch.ops._c10d_functional.all_reduce.default, torch.ops.higher_order.flex_attention,
     torch.ops.higher_order.inductor_compiled_code],
    ids=op_name,
)  # fmt: skip
def test_an_op_that_makes_a_new_tensor_is_savable(op):
    assert traits_of(op).savable
    assert traits_of(op).unsavable_reason == ""
    assert not traits_of(op).is_factory


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (aten.add_.Tensor, "it writes its argument `self`"),
        (aten.mm.out, "it writes its argument `out`"),
        (aten.native_batch_norm.default, "it writes its arguments `running_mean`, `running_var`"),
        (aten._fused_moving_avg_obs_fq_helper.default,
         "it writes its arguments `running_min`, `running_max`, `scale`, `zero_point`"),
        (aten.view.default, "it is a view"),
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
        (torch.ops.profiler._record_function_enter_new.default, "profiler ops belong to the infrastructure"),
        (torch.ops.c10d.allreduce_.default, "c10d ops belong to the infrastructure"),
        (torch.ops._c10d_functional.wait_tensor.default, "it is a view"),
        (torch.ops.inductor.accumulate_grad_.default, "it writes its argument `variable`"),
        (torch.ops.higher_order.print, "it returns no tensor"),
        (triton_kernel_wrapper_mutation, "it writes its arguments"),
    ],
    ids=lambda value: value if isinstance(value, str) else op_name(value),
)  # fmt: skip
def test_why_an_op_cannot_be_saved(op, reason):
    assert traits_of(op).unsavable_reason == reason
    assert not traits_of(op).savable
    assert traits_of(op).is_factory == reason.startswith("it makes")


def test_an_op_that_writes_only_what_it_is_given_is_savable_in_calls_that_give_none():
    library = torch.library.Library("_flash_attn2_cuda_0badcafe", "DEF")
    library.define("fwd(Tensor! q, Tensor k, Tensor v, Tensor(out_!)? out_, float p, Generator? gen_) -> Tensor[]")
    library.define("varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor? out_, Tensor cu_seqlens_q) -> Tensor[]")
    library.define("kvcache(Tensor q, Tensor(a!) cache, Tensor(b!)? more=None) -> Tensor")
    library.define("keyword(Tensor q, *, Tensor(a!)? out=None) -> Tensor")
    ops = torch.ops._flash_attn2_cuda_0badcafe
    fwd, varlen, cache, keyword = (
        traits_of(getattr(ops, name).default) for name in ("fwd", "varlen_fwd", "kvcache", "keyword")
    )
    library._destroy()
    # Flash attention does not write its query, whatever its schema says.
    assert (fwd.mutated_args, fwd.savable_if, fwd.savable, fwd.is_random) == ((3,), "absent:3/out_", False, True)
    assert (varlen.mutated_args, varlen.savable) == ((), True)
    assert (cache.mutated_args, cache.savable_if) == ((1, 2), "")
    assert (keyword.mutated_kwargs, keyword.savable_if) == (("out",), "absent:/out")
    assert traits_of(aten.native_batch_norm.default).savable_if == ""
