"""Whatever a file or mapping holds, reading it gives a policy or one PolicyError."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac.errors import PolicyError
from sac.policy.load import dump_policy, load_policy
from sac.policy.read import DO_WORDS, DTYPES, PLAN_KEYS, PLANNED_KEYS, POLICY_KEYS, RULE_KEYS

SIGNS = [
    "[",
    "]",
    "{",
    "}",
    "&x ",
    "*x",
    "'",
    '"',
    "\n",
    "\n  ",
    "\n- ",
    "!!str ",
    "!",
    "<<: ",
    "? ",
    ": ",
    ", ",
    "| ",
    ">",
]
WORDS = [
    "schema: sac/v1\n",
    "rules:\n  - ",
    "ops: x",
    "do: save",
    "layers: ",
    "---\n",
    "...",
    "%YAML 1.1\n",
    "1:8",
    "~",
]
TRAPS = ["\\u", "\\Uffffffff", "\x00", "\u2028", "\ufeff", "\t", "\r", "#", "-1", "1e99", ".nan", "0x1f", "\U0001f600"]
yamlish = st.lists(st.sampled_from(SIGNS + WORDS + TRAPS), max_size=25).map("".join)
contents = st.one_of(yamlish.map(str.encode), st.binary(max_size=80), st.text(max_size=80).map(lambda t: t.encode()))


def loads_or_says_why(source: object) -> None:
    try:
        dump_policy(load_policy(source))  # type: ignore[arg-type]
    except PolicyError as error:
        told = str(error)
        told.encode()  # it can be printed, whatever was in the source
    else:
        return
    assert told


@settings(deadline=None, max_examples=300)
@given(contents)
def test_any_bytes_are_a_policy_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "fuzz.yaml"
    path.write_bytes(content)
    loads_or_says_why(path)


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


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(st.sampled_from(POLICY_KEYS), values, max_size=4),
    st.lists(st.dictionaries(st.sampled_from(RULE_KEYS), values, max_size=5) | values, max_size=3),
)
def test_any_mapping_is_a_policy_or_one_error(policy: dict[str, object], rules: list[object]) -> None:
    loads_or_says_why(policy)
    loads_or_says_why(policy | {"rules": rules})


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(PLAN_KEYS), values, max_size=2),
    st.lists(st.dictionaries(st.sampled_from(PLANNED_KEYS), values, max_size=3) | values, max_size=3),
)
def test_any_plan_is_a_policy_or_one_error(plan: dict[str, object], regions: list[object]) -> None:
    loads_or_says_why({"rules": [], "plan": plan})
    loads_or_says_why({"rules": [], "plan": plan | {"regions": regions}})
