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


def certain(matcher: OpMatcher, *ops: object) -> bool:
    """Whether every call of these ops matches."""
    return all(matcher.matches(op) and not matcher.conditional(op) for op in ops)


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


def test_a_packet_an_overload_and_a_glob_mean_what_can_be_saved_of_them():
    assert meant(resolve_ops(["aten.mm"])) == {f"aten.mm.{one}" for one in PACKETS["aten.mm"] if "out" not in one}
    assert meant(resolve_ops(["aten.mm.default"])) == {"aten.mm.default"}
    assert certain(resolve_ops(["higher_order::flex_attention"]), torch.ops.higher_order.flex_attention)
    everything = meant(resolve_ops(["*"]))
    assert everything == {op_name(op) for op in OPS if traits_of(op).savable}
    assert {"aten.mm.default", "aten.addmm.default"} < meant(resolve_ops(["aten.*mm*"])) < everything
    assert meant(resolve_ops(["aten.relu_*"])) == set()
    assert resolve_ops(["aten.relu_*"]).problems == {}


def test_a_rule_that_recomputes_may_name_what_cannot_be_saved():
    matcher = resolve_ops(["aten.add_", "aten.view", "aten.empty.memory_format"], for_saving=False)
    assert matcher.problems == {}
    assert certain(matcher, aten.add_.Tensor, aten.view.default, aten.empty.memory_format)


@pytest.mark.parametrize(
    ("written", "is_named"),
    [("aten.topk", True), ("nondeterministic", True), ("*", False), ("aten.t*", False), ("aten.sort", False)],
)
def test_an_op_is_named_by_itself_or_a_set_but_not_by_a_glob(written, is_named):
    assert resolve_ops([written]).names(aten.topk.default) is is_named


def test_a_condition_falls_away_when_the_op_is_also_meant_without_it():
    copies = resolve_ops(["device_to_host"])
    assert copies.matches(aten._to_copy.default)
    assert copies.conditional(aten._to_copy.default) == "device_to_host"
    assert not copies.matches(aten.mm.default)
    assert certain(resolve_ops(["device_to_host", "aten._to_copy"]), aten._to_copy.default)
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    assert certain(resolve_ops(["nondeterministic", "collective"]), exchange)


def test_ops_registered_after_the_policy_was_read_are_found(library):
    attention, everything, nowhere = resolve_ops(["attention"]), resolve_ops(["*"]), resolve_ops(["late_library.*"])
    assert nowhere.missing == ("late_library.*",)
    assert nowhere.problems == {}
    fwd, bwd = "varlen_fwd(Tensor! q, Tensor k) -> Tensor[]", "bwd(Tensor q) -> Tensor"
    flash = library("_flash_attn2_cuda_c0ffee", fwd, bwd)
    late = library("late_library", "route(Tensor q) -> Tensor")
    assert certain(attention, flash.varlen_fwd.default)
    assert not attention.matches(flash.bwd.default)
    assert certain(everything, flash.varlen_fwd.default, flash.bwd.default)
    assert certain(nowhere, late.route.default)


@pytest.mark.parametrize(
    "name", ["flash_attn._flash_attn_varlen_forward", "flash_attn_3.fwd", "flash_attn_3._flash_attn_forward",
             "_flash_attn3_cuda_ab12cd.fwd", "_vllm_fa2_C.varlen_fwd", "xformers_flash3.flash_fwd",
             "xformers.efficient_attention_forward_cutlass", "aiter.fmha_v3_varlen_fwd", "aiter.mha_fwd",
             "sageattention_internal.sageattn_autotuned"]
)  # fmt: skip
def test_attention_means_the_kernels_of_other_libraries_but_not_their_backward(name):
    entries = resolve_ops(["attention"]).entries
    backward = f"{name.replace('fwd', 'bwd').replace('forward', 'backward')}_bwd.default"
    assert any(entry.matches(f"{name}.default") for entry in entries)
    assert not any(entry.matches(backward) for entry in entries)


def test_expert_parallel_dispatch_must_be_saved_when_its_library_comes(library):
    for namespace in ("deepep", "hybridep"):
        names = ("dispatch", "combine", "dispatch_bwd")
        ops = library(namespace, *(f"{name}(Tensor x) -> Tensor" for name in names))
        assert is_must_save(ops.dispatch.default) == (True, "")
        assert is_must_save(ops.combine.default) == is_must_save(ops.dispatch_bwd.default) == (False, "")
        assert certain(resolve_ops(["collective"]), ops.combine.default)
        assert not resolve_ops(["collective"]).matches(ops.dispatch_bwd.default)


def test_an_op_that_may_write_is_meant_in_the_calls_that_give_it_nothing_to_write(library):
    ops = library("sac_optional", "fwd(Tensor q, Tensor(a!)? out=None) -> Tensor", "needs(Tensor(a!) q) -> Tensor")
    matcher = resolve_ops(["sac_optional::fwd", "sac_optional::*"])
    assert matcher.problems == {}
    assert [matcher.matches(op) for op in (ops.fwd.default, ops.needs.default)] == [True, False]
    condition = condition_of(matcher.conditional(ops.fwd.default))
    assert [condition(args, {}, None) for args in ((1,), (1, 2))] == [True, False]
    assert certain(resolve_ops(["sac_optional::fwd"], for_saving=False), ops.fwd.default)


def test_a_policy_adds_to_a_set_and_defines_its_own(library):
    mine = library("sac_mine", "flash(Tensor q) -> Tensor", "route(Tensor q) -> Tensor")
    sets = {"attention": ["sac_mine::flash"], "all_mine": ["attention", "sac_mine.route"], "empty": []}
    attention, own = resolve_ops(["attention"], sets), resolve_ops(["all_mine"], sets)
    fused = aten._flash_attention_forward.default
    assert set_names(sets) == (*SAVE_SETS, "all_mine", "empty")
    assert certain(attention, mine.flash.default, fused)
    assert not attention.matches(mine.route.default)
    assert certain(own, mine.flash.default, mine.route.default, fused)
    assert own.names(mine.route.default)
    assert meant(resolve_ops(["empty"], sets)) == set()


def test_sets_may_name_each_other_and_what_is_not_installed():
    sets = {"a": ["b", "aten.mm", "a"], "b": ["a", "aten.bmm"], "mine": ["not_installed::kernel", "none.*", "aten.mm"]}
    both = meant(resolve_ops(["aten.mm", "aten.bmm"]))
    assert meant(resolve_ops(["a"], sets)) == meant(resolve_ops(["b"], sets)) == both
    mine = resolve_ops(["mine"], sets)
    assert mine.missing == ("not_installed.kernel", "none.*")
    assert mine.problems == {}
    assert certain(mine, aten.mm.default)
    assert check_sets(sets) == {}


@given(st.sampled_from(sorted(packet for packet, overloads in PACKETS.items() if overloads)), st.booleans())
@settings(max_examples=60)
def test_every_spelling_resolves_alike(packet, with_overload):
    name = f"{packet}.{PACKETS[packet][0]}" if with_overload else packet
    plain, spelled = resolve_ops([name]), resolve_ops([name.replace(".", "::", 1)])
    assert plain.entries == spelled.entries
    assert [(p.found, p.fix) for p in plain.problems.values()] == [(p.found, p.fix) for p in spelled.problems.values()]
    assert bool(plain.problems) == (not any(plain.matches(op) for op in find_ops(packet, PACKETS[packet])))
