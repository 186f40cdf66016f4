"""Whatever a file or mapping holds, reading it gives a policy or one PolicyError."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sac.errors import PolicyError
from sac.policy.load import dump_policy, load_policy
from sac.policy.read import DO_WORDS, DTYPES, POLICY_KEYS, RULE_KEYS

SIGNS = [*"[]{}'\"!\n>", "&x ", "*x", "\n  ", "\n- ", "!!str ", "<<: ", "? ", ": ", ", ", "| ", "---\n", "%YAML 1.1\n"]
WORDS = ["schema: sac/v1\n", "rules:\n  - ", "ops: x", "do: save", "layers: ", "1:8", "~", "-1", "1e99", ".nan", "0x1f"]
TRAPS = ["\\u", "\\Uffffffff", "\x00", "\u2028", "\ufeff", "\t", "\r", "#", "\U0001f600"]
yamlish = st.lists(st.sampled_from(SIGNS + WORDS + TRAPS), max_size=25).map("".join)
POLICY = b"schema: sac/v1\nname: fuzz\nrules:\n- {id: a, ops: [matmul], layers: [0-7], do: save}\ndefault: recompute\n"
places = st.integers(0, len(POLICY))
changed = st.builds(lambda start, text, end: POLICY[:start] + text.encode() + POLICY[end:], places, yamlish, places)
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
        assert dump_policy(load_policy(yaml.safe_load(dump_policy(policy)))) == dump_policy(policy)


@settings(max_examples=300)
@given(contents)
@example(POLICY)
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


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(POLICY_KEYS), values, max_size=4),
    st.lists(st.dictionaries(st.sampled_from(RULE_KEYS), values, max_size=5) | values, max_size=3),
)
@example({}, [{"id": "a", "ops": ["matmul"], "layers": ["0-7"], "optional": True, "do": "save"}])
def test_any_mapping_is_a_policy_or_one_error(policy: dict[str, object], rules: list[object]) -> None:
    assert_policy_or_told(policy | {"rules": rules})
