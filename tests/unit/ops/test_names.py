import pytest
import torch

from sac.ops.facts import traits_of
from sac.ops.names import OpMatcher, check_sets, is_must_save, resolve_ops, set_names
from sac.ops.registry import NamePattern, find_ops, op_name, read_registry
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


# -- Names of ops


def test_every_registered_name_finds_its_op():
    for packet, overloads in PACKETS.items():
        if packet.startswith("higher_order."):
            continue
        ops = find_ops(packet, overloads)
        assert [op_name(op) for op in ops] == [f"{packet}.{overload}" for overload in overloads]


@pytest.mark.parametrize(
    ("pattern", "name", "meant"),
    [
        ("aten.mm", "aten.mm.default", True),
        ("aten.mm", "aten.mm_out.default", False),
        ("aten.mm", "aten.addmm.default", False),
        ("aten.mm.default", "aten.mm.out", False),
        ("aten.*mm", "aten.addmm.default", True),
        ("aten.*mm", "aten.addmm_.default", False),
        ("aten.*.out", "aten.mm.out", True),
        ("*", "my_lib.flash.default", True),
        ("higher_order.*", "higher_order.flex_attention", True),
        ("higher_order", "higher_order.flex_attention", False),
        ("aten", "aten.mm.default", False),
        ("aten.m?", "aten.mm.default", True),
        ("aten.[mb]mm", "aten.bmm.default", True),
    ],
)
def test_patterns_match_whole_names(pattern, name, meant):
    assert NamePattern(pattern).matches(name) is meant


# -- What is meant by them


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


# -- Errors: what was found, and the nearest spelling


@pytest.mark.parametrize(
    ("name", "found", "nearest"),
    [
        ("atention", 'unknown save-set "atention"', "attention"),
        ("mm", 'unknown save-set "mm"', "aten.mm"),
        ("a b", '"a b" is not the name of an op', ""),
        ("aten.mm.default.more", '"aten.mm.default.more" is not the name of an op', ""),
        ("aten::adddmm", "no op aten.adddmm is registered", "aten.addmm"),
        ("higher_order.flex_atention", "no op higher_order.flex_atention is reg", "higher_order.flex_attention"),
        ("my_lib::flash", "no op of a namespace my_lib is registered", ""),
        ("atne.mm", "no op of a namespace atne is registered", "aten.mm"),
        ("aten.mm.defalt", "aten.mm has no overload defalt", "aten.mm.default"),
        ("aten.*no_such*", "the glob aten.*no_such* matches no registered op", ""),
        ("aten.add_", "aten.add_ cannot be saved: it writes its argument `self`", ""),
        ("aten.view", "aten.view cannot be saved: it is a view", ""),
    ],
)
def test_a_wrong_name(name, found, nearest):
    (problem,) = resolve_ops([name]).problems.values()
    assert found in problem.found
    assert problem.nearest == nearest
    assert problem.fix or problem.expected
    may_recompute = "cannot be saved" in problem.found
    assert (resolve_ops([name], for_saving=False).problems == {}) is may_recompute


def test_a_set_that_the_policy_defines_is_legal_and_near():
    (problem,) = resolve_ops(["my_ketnels"], {"my_kernels": ["aten.mm"]}).problems.values()
    assert problem.nearest == "my_kernels"
    assert "compiled, my_kernels" in problem.expected


def test_every_wrong_name_is_told_at_its_place():
    resolved = resolve_ops(["aten.mm", "aten.view", "matmul", "aten.mmm", "zzz.*"])
    assert list(resolved.problems) == [1, 3]
    assert {"aten.mmm", "zzz.*"} <= set(resolved.missing)


def test_the_entries_of_a_policys_own_sets_are_checked_too():
    sets = {"fine": ["aten.mm", "matmul", "not_installed::op"], "mine": ["aten.mm", "aten.addmn", "mm", "aten.view"]}
    problems = check_sets(sets)
    assert list(problems) == ["mine"]
    assert [problem.found for problem in problems["mine"]] == [
        "no op aten.addmn is registered",
        'unknown save-set "mm"',
        "aten.view cannot be saved: it is a view",
    ]
