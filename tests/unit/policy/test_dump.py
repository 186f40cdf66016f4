"""A policy that is written out and loaded again is the same policy; anything else that is loaded is one error."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sac.errors import PolicyError
from sac.policy.load import load_policy
from sac.policy.read import DO_WORDS, DTYPES, POLICY_KEYS, RULE_KEYS

TRICKY = ["on", "null", "~", "true", "1:8", "1e6", "010", "1.10", "-", "a: b", "a #b", "*", "&a", "!t", "é"]
RULES: list[dict[str, object]] = [
    *({"ops": "attention", "do": do} for do in ("save", "recompute", "offload", "alternate")),
    {"ops": ["matmul", "aten.mm", "aten::bmm.default", "aten.*"], "optional": True},
    *({"ops": "aten.mm", "blocks": ["a.**", name], "module": name} for name in ("", "**", "*_proj", "0", "0.1")),
    {"ops": "aten.mm", "module": "a.{b,c.d}"},
    *({"module": name} for name in ("", "{,x}", "a.*")),
    *({"ops": "aten.mm", "layers": one} for one in ("all", {"first": 2}, {"last": 2**40}, {"every": 2, "offset": 9})),
    {"ops": "aten.mm", "layers": ["0-7", "12"]},
    {"ops": "aten.mm", "layers": {"fraction": 0.25}},
    *({"ops": "aten.mm", "call": one} for one in ({"index": 0}, {"index": [1, 3]}, {"every": 2, "offset": 1})),
    {
        "ops": "aten.mm",
        "shape": ["...", "_", 8, "!=4", ">=4096", "<=2", ">1", "<3"],
        "dtype": ["float16", "float8_e4m3fn"],
    },
    {"function": ["F", "m.*Norm"], "module": "mlp"},
    {"unit": ["rope_{q}", "on"]},
]
POLICIES: list[dict[str, object]] = [
    *({"rules": [{"do": "save", **rule}]} for rule in RULES),
    *({"name": name, "models": [name], "rules": [{"id": name, "ops": "a", "do": "save"}]} for name in TRICKY),
    *({"default": "save", "sets": {name: ["aten.mm", "matmul"]}} for name in ("on", "no", "null", "true", "010")),
    {"default": "offload", "regions": {"blocks": ["model.layers.*", "{a,b}"], "layers": {"first": 3}}},
]


@pytest.mark.parametrize("written", POLICIES, ids=str)
def test_what_is_dumped_loads_to_an_equal_policy(tmp_path: Path, written: dict[str, object]) -> None:
    """Also by another YAML reader: a training config is read by its own, and the policy comes as a mapping."""
    policy = load_policy(written)
    path = tmp_path / "p.yaml"
    path.write_text(policy.to_yaml(), encoding="utf-8")
    assert load_policy(path) == policy
    assert load_policy(yaml.safe_load(policy.to_yaml())) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_dump_reads_well() -> None:
    wide = {
        "id": "wide",
        "ops": ["aten.mm", "aten.bmm"],
        "module": ["mlp.**", "*_proj"],
        "layers": {"every": 2},
        "shape": ["...", "_", ">= 4096"],
        "dtype": "float16",
        "do": "alternate",
    }
    sets = {"attention": "my_lib::flash"}
    policy = load_policy({"name": "llama", "sets": sets, "rules": [{"id": "a", "ops": "matmul", "do": "save"}, wide]})
    assert policy.to_yaml() == (
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
    (tmp_path / "alone.yaml").write_text(child.to_yaml())
    alone = load_policy(tmp_path / "alone.yaml")
    assert alone == child
    assert alone.extends == ()


def test_a_childs_rule_may_cover_its_parents(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("schema: sac/v1\nrules: [{ops: attention, module: a, do: save}]\n")
    (tmp_path / "child.yaml").write_text('schema: sac/v1\nextends: parent.yaml\nrules: [{ops: "*", do: save}]\n')
    child = load_policy(tmp_path / "child.yaml")
    child.save(tmp_path / "saved.yaml")
    assert load_policy(tmp_path / "saved.yaml").rules == child.rules


# -- Whatever a file or mapping holds, reading it gives a policy or one error

SIGNS = [*"[]{}'\"!\n>", "&x ", "*x", "\n  ", "\n- ", "!!str ", "<<: ", "? ", ": ", ", ", "| ", "---\n", "%YAML 1.1\n"]
WORDS = ["schema: sac/v1\n", "rules:\n  - ", "ops: x", "do: save", "layers: ", "1:8", "~", "-1", "1e99", ".nan", "0x1f"]
TRAPS = ["\\u", "\\Uffffffff", "\x00", "\u2028", "\ufeff", "\t", "\r", "#", "\U0001f600"]
yamlish = st.lists(st.sampled_from(SIGNS + WORDS + TRAPS), max_size=25).map("".join)
WRITTEN = b"schema: sac/v1\nname: fuzz\nrules:\n- {id: a, ops: [matmul], layers: [0-7], do: save}\ndefault: recompute\n"
places = st.integers(0, len(WRITTEN))
changed = st.builds(lambda start, text, end: WRITTEN[:start] + text.encode() + WRITTEN[end:], places, yamlish, places)
contents = st.one_of(
    yamlish.map(str.encode), st.binary(max_size=80), st.text(max_size=80).map(lambda t: t.encode()), changed
)


def assert_policy_or_told(source: object) -> None:
    """Hold that `source` is a policy that can be written and read again, or that one error says why it is none."""
    try:
        policy = load_policy(source)  # type: ignore[arg-type]
    except PolicyError as error:
        str(error).encode()  # it can be printed, whatever was in the source
    else:
        assert load_policy(yaml.safe_load(policy.to_yaml())).to_yaml() == policy.to_yaml()


@pytest.mark.slow
@settings(max_examples=50)
@given(contents)
@example(WRITTEN)
@example(b'"\\ud800": 1')
def test_any_bytes_are_a_policy_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "fuzz.yaml"
    path.write_bytes(content)
    assert_policy_or_told(path)


words = st.sampled_from(
    [*RULE_KEYS, *POLICY_KEYS, *DO_WORDS, *DTYPES[:3], "first", "every", "index", "*", "{a", "0-7", "1KiB"]
)
scalars = st.one_of(
    words, st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)
)
keys = st.one_of(words, st.text(max_size=3), st.integers(0, 3), st.none(), st.booleans())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@settings(max_examples=50)
@given(
    st.dictionaries(st.sampled_from(POLICY_KEYS), values, max_size=4),
    st.lists(st.dictionaries(st.sampled_from(RULE_KEYS), values, max_size=5) | values, max_size=3),
)
@example({}, [{"id": "a", "ops": ["matmul"], "layers": ["0-7"], "optional": True, "do": "save"}])
def test_any_mapping_is_a_policy_or_one_error(policy: dict[str, object], rules: list[object]) -> None:
    assert_policy_or_told(policy | {"rules": rules})
