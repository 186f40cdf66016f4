"""One case per form of error about an op name: what was found, and the nearest spelling."""

import pytest

from sac.ops.names import check_sets, resolve_ops


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
