"""The whole text of every error about an op name, as the caller prints it."""

import pytest

from sac.errors import Problem
from sac.ops.names import NameProblem, check_sets, resolve_ops
from sac.ops.registry import read_registry

SETS = (
    "attention, matmul, grouped_matmul, low_precision_matmul, convolution, collective, nondeterministic, "
    "device_to_host, random, scaling, compiled"
)
FORMS = "an op (aten.mm, aten::mm), one overload (aten.mm.default), a glob (aten.*mm*)"


def told(problem: NameProblem) -> str:
    return str(Problem("p.yaml:3:9", problem.found, problem.legal, problem.nearest, problem.fix))


def only_problem(name, **kwargs):
    (problem,) = resolve_ops([name], **kwargs).problems
    assert (problem.index, problem.text) == (0, name)
    return told(problem)


def test_a_misspelled_set():
    assert only_problem("atention") == (
        'p.yaml:3:9: unknown save-set "atention"\n'
        "    did you mean: attention\n"
        f"    legal: {SETS}; or {FORMS}\n"
        "    fix: write an op with its namespace, or define the set under `sets:`"
    )


def test_a_set_that_the_policy_defines_is_legal_and_near():
    assert only_problem("my_ketnels", extra_sets={"my_kernels": ["aten.mm"]}) == (
        'p.yaml:3:9: unknown save-set "my_ketnels"\n'
        "    did you mean: my_kernels\n"
        f"    legal: {SETS}, my_kernels; or {FORMS}\n"
        "    fix: write an op with its namespace, or define the set under `sets:`"
    )


def test_an_op_without_its_namespace():
    assert only_problem("mm") == (
        'p.yaml:3:9: unknown save-set "mm"\n'
        "    did you mean: aten.mm\n"
        f"    legal: {SETS}; or {FORMS}\n"
        "    fix: write an op with its namespace, or define the set under `sets:`"
    )


@pytest.mark.parametrize("text", ["", "a b", "aten.", "aten.mm.default.more", "aten/mm", ".mm"])
def test_what_cannot_be_a_name(text):
    assert only_problem(text) == (
        f'p.yaml:3:9: "{text}" is not the name of an op\n    legal: a save-set ({SETS}), {FORMS}'
    )


@pytest.mark.parametrize("for_saving", [True, False])
def test_an_unknown_op(for_saving):
    assert only_problem("aten::adddmm", for_saving=for_saving) == (
        "p.yaml:3:9: no op aten.adddmm is registered\n"
        "    did you mean: aten.addmm\n"
        "    fix: correct the name, or put it into a save-set under `sets:`, where a missing op is skipped"
    )


def test_an_unknown_higher_order_op():
    assert only_problem("higher_order.flex_atention") == (
        "p.yaml:3:9: no op higher_order.flex_atention is registered\n"
        "    did you mean: higher_order.flex_attention\n"
        "    fix: correct the name, or put it into a save-set under `sets:`, where a missing op is skipped"
    )


def test_an_unknown_namespace():
    assert only_problem("my_lib::flash") == (
        "p.yaml:3:9: no op of a namespace my_lib is registered\n"
        "    fix: import the library that registers it before sac reads the policy, or put the name into a save-set "
        "under `sets:`, where a missing op is skipped"
    )


def test_a_misspelled_namespace():
    assert only_problem("atne.mm") == (
        "p.yaml:3:9: no op of a namespace atne is registered\n"
        "    did you mean: aten.mm\n"
        "    fix: import the library that registers it before sac reads the policy, or put the name into a save-set "
        "under `sets:`, where a missing op is skipped"
    )


def test_an_unknown_overload():
    overloads = ", ".join(f"aten.mm.{overload}" for overload in read_registry().packets["aten.mm"])
    assert only_problem("aten.mm.defalt") == (
        "p.yaml:3:9: aten.mm has no overload defalt\n"
        "    did you mean: aten.mm.default\n"
        f"    legal: {overloads}\n"
        "    fix: write aten.mm to mean all its overloads"
    )


def test_an_overload_of_a_higher_order_op():
    assert only_problem("higher_order.flex_attention.default") == (
        "p.yaml:3:9: higher_order.flex_attention has no overload default\n"
        "    did you mean: higher_order.flex_attention\n"
        "    legal: higher_order.flex_attention\n"
        "    fix: write higher_order.flex_attention to mean all its overloads"
    )


def test_an_empty_glob_over_aten():
    assert only_problem("aten.*no_such*") == (
        "p.yaml:3:9: the glob aten.*no_such* matches no registered op\n"
        "    fix: a glob is compared with whole names such as aten.mm and aten.mm.default; * stands for any characters"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("aten.add_", "aten.add_ cannot be saved: it writes its argument `self`\n    fix: name the form that does not "
         "write, aten.add, or leave it out: it is run again in backward"),
        ("aten.add_.Tensor", "aten.add_.Tensor cannot be saved: it writes its argument `self`\n    fix: name the form "
         "that does not write, aten.add, or leave it out: it is run again in backward"),
        ("aten.mm.out", "aten.mm.out cannot be saved: it writes its argument `out`\n"
         "    fix: leave it out: it is run again in backward"),
        ("aten.native_batch_norm", "aten.native_batch_norm cannot be saved: it writes its arguments `running_mean` and "
         "`running_var`\n    fix: leave it out: it is run again in backward"),
        ("aten.view", "aten.view cannot be saved: it is a view\n"
         "    fix: name the op that makes the tensor it looks at; the view costs nothing to make again"),
        ("_c10d_functional::wait_tensor", "_c10d_functional.wait_tensor cannot be saved: it is a view\n"
         "    fix: name the op that makes the tensor it looks at; the view costs nothing to make again"),
        ("aten.empty_like", "aten.empty_like cannot be saved: it makes an uninitialised tensor\n"
         "    fix: leave it out: it is run again in backward"),
        ("aten.zeros_like", "aten.zeros_like cannot be saved: it makes a constant\n"
         "    fix: leave it out: it is run again in backward"),
        ("aten._local_scalar_dense", "aten._local_scalar_dense cannot be saved: it returns no tensor\n"
         "    fix: leave it out: it is run again in backward"),
        ("profiler._record_function_enter_new", "profiler._record_function_enter_new cannot be saved: profiler ops "
         "belong to the infrastructure\n    fix: leave it out: it is run again in backward"),
    ],
)  # fmt: skip
def test_naming_what_has_nothing_savable(name, said):
    assert only_problem(name) == f"p.yaml:3:9: {said}"
    assert resolve_ops([name], for_saving=False).problems == ()


def test_every_wrong_name_is_told_at_its_place():
    resolved = resolve_ops(["aten.mm", "aten.view", "matmul", "aten.mmm", "zzz.*", "aten.add_"])
    assert [(problem.index, problem.text) for problem in resolved.problems] == [
        (1, "aten.view"),
        (3, "aten.mmm"),
        (5, "aten.add_"),
    ]
    assert {"aten.mmm", "zzz.*"} <= set(resolved.missing)


def test_the_entries_of_a_policys_own_sets_are_checked_too():
    sets = {"fine": ["aten.mm", "matmul", "not_installed::op"], "mine": ["aten.mm", "aten.addmn", "mm", "aten.view"]}
    problems = check_sets(sets)
    assert list(problems) == ["mine"]
    assert [(problem.index, problem.found) for problem in problems["mine"]] == [
        (1, "no op aten.addmn is registered"),
        (2, 'unknown save-set "mm"'),
        (3, "aten.view cannot be saved: it is a view"),
    ]
