"""A policy that is written out and loaded again is the same policy."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sac.policy.load import dump_policy, load_policy
from sac.policy.model import Calls, Decision, Dim, Layers, Policy, Rule
from sac.policy.patterns import PathPattern
from sac.policy.read import DTYPES, takes_all_of

TRICKY = ["on", "null", "~", "true", "1:8", "1e6", "010", "1.10", "-", "a: b", "a #b", "*", "&a", "!t", "é"]
printable = st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable() and text.strip() == text)
texts = printable | st.sampled_from(TRICKY)
set_names = st.from_regex(r"\w[\w-]{0,8}", fullmatch=True) | st.sampled_from(["on", "no", "null", "true", "010"])
op_names = st.sampled_from(["attention", "matmul", "aten.mm", "aten::mm", "aten.mm.default", "aten.*", "my_lib::Flash"])
patterns = st.sampled_from(["", "**", "self_attn.**", "*_proj", "0", "0.1", "a.{b,c.d}", "{,x}"]).map(PathPattern.parse)
wholes = st.integers(1, 2**40)
ranges = st.tuples(st.integers(0, 99), st.integers(0, 99)).map(sorted).map(tuple)
layers = st.one_of(
    st.just(Layers()),
    st.builds(Layers, first=wholes),
    st.builds(Layers, last=wholes),
    st.builds(Layers, every=wholes, offset=st.integers(0, 9)),
    st.builds(Layers, ranges=st.lists(ranges, min_size=1, max_size=3).map(tuple)),
)
calls = st.one_of(
    st.builds(Calls, index=st.frozensets(st.integers(0, 99), min_size=1, max_size=3)),
    st.builds(Calls, every=wholes, offset=st.integers(0, 9)),
)
dims = st.just(Dim()) | st.builds(Dim, st.sampled_from(["==", "!=", ">=", "<=", ">", "<"]), st.integers(0, 2**40))
shapes = st.builds(
    lambda front, rest: (Dim("..."), *rest) if front else tuple(rest),
    st.booleans(),
    st.lists(dims, min_size=1, max_size=3),
)
dos = st.sampled_from(["save", "recompute", "offload", "alternate"])
op_rules = st.builds(
    Rule,
    id=st.just(""),
    do=dos,
    ops=st.lists(op_names, min_size=1, max_size=3).map(tuple),
    blocks=st.lists(patterns, max_size=2).map(tuple),
    module=st.none() | patterns,
    layers=st.none() | layers,
    call=st.none() | calls,
    shape=st.none() | shapes,
    dtype=st.lists(st.sampled_from(DTYPES), unique=True, max_size=2).map(tuple),
    optional=st.booleans(),
)
module_rules = st.builds(
    Rule,
    id=st.just(""),
    do=dos,
    blocks=st.lists(patterns, max_size=2).map(tuple),
    module=patterns,
    layers=st.none() | layers,
)
names = st.lists(st.sampled_from(["F", "m.*Norm", "rope_{q}", "on"]), min_size=1, max_size=2).map(tuple)
unit_rules = st.builds(Rule, id=st.just(""), do=dos, functions=names, module=st.none() | patterns) | st.builds(
    Rule, id=st.just(""), do=dos, units=names
)


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    rules: list[Rule] = []
    for rule in draw(st.lists(op_rules | module_rules | unit_rules, max_size=4)):
        if not any(takes_all_of(earlier, rule) for earlier in rules):
            rules.append(rule)
    ids = draw(st.lists(texts, unique=True, min_size=len(rules), max_size=len(rules)))
    named = tuple(replace(rule, id=one) for rule, one in zip(rules, ids, strict=True))
    return Policy(
        name=draw(texts),
        rules=named,
        default=draw(st.sampled_from(Decision)),
        models=tuple(draw(st.lists(texts, max_size=2))),
        sets=draw(
            st.dictionaries(set_names, st.lists(op_names, min_size=1, max_size=2, unique=True).map(tuple), max_size=2)
        ),
        blocks=tuple(draw(st.lists(patterns, max_size=2))),
        layers=draw(layers),
    )


@given(policies())
def test_what_is_dumped_loads_to_an_equal_policy(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> None:
    """Also by another YAML reader: a training config is read by its own, and the policy comes as a mapping."""
    path = tmp_path_factory.mktemp("dump") / "p.yaml"
    path.write_text(dump_policy(policy), encoding="utf-8")
    assert load_policy(path) == policy
    assert load_policy(yaml.safe_load(dump_policy(policy))) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_dump_reads_well() -> None:
    wide = {
        "id": "wide",
        "ops": ["aten.mm", "aten.bmm"],
        "module": ["mlp.**", "*_proj"],
        "layers": {"every": 2},
        "shape": ["...", "_", ">= 4096"],
        "dtype": "torch.half",
        "do": "alternate",
    }
    sets = {"attention": "my_lib::flash"}
    policy = load_policy({"name": "llama", "sets": sets, "rules": [{"id": "a", "ops": "matmul", "do": "save"}, wide]})
    assert dump_policy(policy) == (
        "schema: sac/v1\n"
        "name: llama\n"
        "sets: {attention: 'my_lib::flash'}\n"
        "default: recompute\n"
        "rules:\n"
        "- {id: a, ops: matmul, do: save}\n"
        "- id: wide\n"
        "  ops: [aten.mm, aten.bmm]\n"
        "  module: '{mlp.**,*_proj}'\n"
        "  layers: {every: 2, offset: 0}\n"
        "  shape: ['...', _, '>=4096']\n"
        "  dtype: float16\n"
        "  do: alternate\n"
    )


def test_a_dump_of_a_child_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(
        "schema: sac/v1\ndefault: save\nrules: [{id: p, ops: matmul, do: recompute}]\n"
    )
    (tmp_path / "child.yaml").write_text("schema: sac/v1\nextends: parent.yaml\nrules: [{ops: attention, do: save}]\n")
    child = load_policy(tmp_path / "child.yaml")
    (tmp_path / "alone.yaml").write_text(dump_policy(child))
    alone = load_policy(tmp_path / "alone.yaml")
    assert alone == child
    assert alone.extends == ()
