import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sac.ops.facts import traits_of
from sac.ops.names import OpMatcher, check_sets, is_must_save, resolve_ops, set_names
from sac.ops.registry import find_ops, op_name, read_registry
from sac.ops.save_sets import SAVE_SETS, condition_of

aten = torch.ops.aten
PACKETS = read_registry().packets
OPS = [op for packet, overloads in PACKETS.items() for op in find_ops(packet, overloads)]


def meant(matcher: OpMatcher) -> set[str]:
    return {op_name(op) for op in OPS if matcher.matches(op)}


def certain(matcher: OpMatcher, op: object) -> bool:
    """Whether every call of the op matches."""
    return matcher.matches(op) and not matcher.conditional(op)


@pytest.fixture
def library():
    made: list[torch.library.Library] = []

    def define(namespace: str, *schemas: str) -> object:
        made.append(torch.library.Library(namespace, "DEF"))
        for schema in schemas:
            made[-1].define(schema)
        return getattr(torch.ops, namespace)

    yield define
    for each in made:
        each._destroy()


def test_a_packet_means_all_its_overloads_that_can_be_saved():
    matcher = resolve_ops(["aten.mm"])
    assert meant(matcher) == {f"aten.mm.{overload}" for overload in PACKETS["aten.mm"] if "out" not in overload}
    assert meant(resolve_ops(["aten.mm.default"])) == {"aten.mm.default"}


def test_a_glob_means_what_can_be_saved_of_it():
    everything = meant(resolve_ops(["*"]))
    assert everything == {op_name(op) for op in OPS if traits_of(op).savable}
    assert {"aten.mm.default", "aten.addmm.default"} < meant(resolve_ops(["aten.*mm*"])) < everything
    assert meant(resolve_ops(["aten.relu_*"])) == set()
    assert resolve_ops(["aten.relu_*"]).problems == {}


def test_a_rule_that_recomputes_may_name_what_cannot_be_saved():
    matcher = resolve_ops(["aten.add_", "aten.view", "aten.empty.memory_format"], for_saving=False)
    assert matcher.problems == {}
    assert all(certain(matcher, op) for op in [aten.add_.Tensor, aten.view.default, aten.empty.memory_format])


def test_higher_order_ops_have_names_too():
    matcher = resolve_ops(["higher_order.flex_attention"])
    assert matcher.problems == {}
    assert certain(matcher, torch.ops.higher_order.flex_attention)
    assert resolve_ops(["higher_order::flex_attention"]).matches(torch.ops.higher_order.flex_attention)


def test_an_op_is_named_by_itself_or_a_set_but_not_by_a_glob():
    assert resolve_ops(["aten.topk"]).names(aten.topk.default)
    assert resolve_ops(["nondeterministic"]).names(aten.topk.default)
    assert not resolve_ops(["*"]).names(aten.topk.default)
    assert not resolve_ops(["aten.t*"]).names(aten.topk.default)
    assert resolve_ops(["*", "aten.topk"]).names(aten.topk.default)
    assert not resolve_ops(["aten.sort"]).names(aten.topk.default)


def test_a_condition_falls_away_when_the_op_is_also_meant_without_it():
    assert resolve_ops(["device_to_host"]).conditional(aten._to_copy.default) == "device_to_host"
    assert resolve_ops(["device_to_host"]).matches(aten._to_copy.default)
    assert not certain(resolve_ops(["device_to_host"]), aten._to_copy.default)
    assert certain(resolve_ops(["device_to_host", "aten._to_copy"]), aten._to_copy.default)
    assert certain(
        resolve_ops(["nondeterministic", "collective"]), torch.ops._c10d_functional.all_to_all_single.default
    )
    assert resolve_ops(["device_to_host"]).conditional(aten.mm.default) == ""
    assert not certain(resolve_ops(["device_to_host"]), aten.mm.default)


def test_ops_registered_after_the_policy_was_read_are_found(library):
    attention, everything, nowhere = resolve_ops(["attention"]), resolve_ops(["*"]), resolve_ops(["late_library.*"])
    assert nowhere.missing == ("late_library.*",)
    assert nowhere.problems == {}
    flash = library(
        "_flash_attn2_cuda_c0ffee", "varlen_fwd(Tensor! q, Tensor k) -> Tensor[]", "bwd(Tensor q) -> Tensor"
    )
    late = library("late_library", "route(Tensor q) -> Tensor")
    assert certain(attention, flash.varlen_fwd.default)
    assert not attention.matches(flash.bwd.default)
    assert certain(everything, flash.varlen_fwd.default)
    assert certain(everything, flash.bwd.default)
    assert certain(nowhere, late.route.default)


@pytest.mark.parametrize(
    "name", ["flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward", "flash_attn_3.fwd",
             "flash_attn_3._flash_attn_forward", "_flash_attn3_cuda_ab12cd.fwd", "_vllm_fa2_C.varlen_fwd",
             "xformers_flash.flash_fwd", "xformers_flash3.flash_fwd", "xformers.efficient_attention_forward_cutlass",
             "aiter.fmha_v3_varlen_fwd", "aiter.mha_fwd", "sageattention_internal.sageattn_autotuned"]
)  # fmt: skip
def test_attention_means_the_kernels_of_other_libraries_but_not_their_backward(name):
    attention = resolve_ops(["attention"])
    entries = [entry for entry in attention.entries if entry.matches(f"{name}.default")]
    assert entries
    assert not any(
        e.matches(f"{name.replace('fwd', 'bwd').replace('forward', 'backward')}_bwd.default") for e in entries
    )


def test_expert_parallel_dispatch_must_be_saved_when_its_library_comes(library):
    for namespace, names in {
        "deepep": ["dispatch", "combine"],
        "hybridep": ["dispatch", "combine", "dispatch_bwd"],
    }.items():
        ops = library(namespace, *(f"{name}(Tensor x) -> Tensor" for name in names))
        assert is_must_save(ops.dispatch.default) == (True, "")
        assert is_must_save(ops.combine.default) == (False, "")
        assert certain(resolve_ops(["collective"]), ops.combine.default)
    assert is_must_save(torch.ops.hybridep.dispatch_bwd.default) == (False, "")
    assert not resolve_ops(["collective"]).matches(torch.ops.hybridep.dispatch_bwd.default)


def test_an_op_that_may_write_is_meant_in_the_calls_that_give_it_nothing_to_write(library):
    ops = library("sac_optional", "fwd(Tensor q, Tensor(a!)? out=None) -> Tensor", "needs(Tensor(a!) q) -> Tensor")
    matcher = resolve_ops(["sac_optional::fwd", "sac_optional::*"])
    assert matcher.problems == {}
    assert matcher.matches(ops.fwd.default)
    assert not matcher.matches(ops.needs.default)
    condition = condition_of(matcher.conditional(ops.fwd.default))
    assert condition((1,), {}, None)
    assert not condition((1, 2), {}, None)
    assert certain(resolve_ops(["sac_optional::fwd"], for_saving=False), ops.fwd.default)


def test_a_policy_adds_to_a_set_and_defines_its_own(library):
    mine = library("sac_mine", "flash(Tensor q) -> Tensor", "route(Tensor q) -> Tensor")
    sets = {"attention": ["sac_mine::flash"], "all_mine": ["attention", "sac_mine.route"], "empty": []}
    assert set_names(sets) == (*SAVE_SETS, "all_mine", "empty")
    attention = resolve_ops(["attention"], sets)
    assert certain(attention, mine.flash.default)
    assert certain(attention, aten._scaled_dot_product_flash_attention.default)
    assert not attention.matches(mine.route.default)
    own = resolve_ops(["all_mine"], sets)
    assert all(
        certain(own, op) for op in [mine.flash.default, mine.route.default, aten._flash_attention_forward.default]
    )
    assert own.names(mine.route.default)
    assert meant(resolve_ops(["empty"], sets)) == set()


def test_sets_that_name_each_other_end():
    sets = {"a": ["b", "aten.mm", "a"], "b": ["a", "aten.bmm"]}
    assert (
        meant(resolve_ops(["a"], sets))
        == meant(resolve_ops(["b"], sets))
        == meant(resolve_ops(["aten.mm", "aten.bmm"]))
    )


def test_a_set_may_name_what_is_not_installed():
    sets = {"mine": ["not_installed::kernel", "not_installed.*", "aten.mm"]}
    matcher = resolve_ops(["mine"], sets)
    assert matcher.missing == ("not_installed.kernel", "not_installed.*")
    assert matcher.problems == {}
    assert certain(matcher, aten.mm.default)
    assert check_sets(sets) == {}


@given(st.sampled_from(sorted(packet for packet, overloads in PACKETS.items() if overloads)), st.data())
@settings(max_examples=60, deadline=None)
def test_every_spelling_resolves_alike(packet, data):
    name = data.draw(st.sampled_from([packet, f"{packet}.{PACKETS[packet][0]}"]))
    plain, spelled = resolve_ops([name]), resolve_ops([name.replace(".", "::", 1)])
    assert plain.entries == spelled.entries
    assert plain.missing == spelled.missing == ()
    assert [(p.found, p.fix) for p in plain.problems.values()] == [(p.found, p.fix) for p in spelled.problems.values()]
    ops = find_ops(packet, PACKETS[packet])
    assert [plain.matches(op) for op in ops] == [spelled.matches(op) for op in ops]
    assert bool(plain.problems) == (not any(plain.matches(op) for op in ops))
