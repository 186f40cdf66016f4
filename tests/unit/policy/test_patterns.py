"""What patterns over module paths match, and what is wrong with those that are none."""

from __future__ import annotations

import pytest

from sac.policy.patterns import PathPattern


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("", [""], ["a"]),
        ("self_attn", ["self_attn"], ["", "self_attn.q_proj", "self_attn2", "x.self_attn", "Self_Attn"]),
        ("self_attn.**", ["self_attn", "self_attn.q_proj", "self_attn.q_proj.base"], ["self_attn2", "mlp"]),
        ("*_proj", ["q_proj", "_proj"], ["self_attn.q_proj", "q_proj.x", "proj"]),
        ("**.q*j", ["qj", "q_proj", "a.b.q_proj"], ["q", "q_proj.x"]),
        ("model.layers.*", ["model.layers.0", "model.layers.17"], ["model.layers", "model.layers.0.mlp"]),
        ("self_attn.{q_a_proj,kv_a_proj_with_mqa}", ["self_attn.q_a_proj"], ["self_attn.kv_a_proj"]),
        ("{attn.{q,k},mlp}.w", ["attn.q.w", "attn.k.w", "mlp.w"], ["attn.w", "attn.v.w"]),
        ("q{,_a}_proj", ["q_proj", "q_a_proj"], ["q_b_proj"]),
        ("{,mlp}", ["", "mlp"], ["attn"]),
        ("**.a.**.b", ["a.b", "x.a.y.a.z.b"], ["b.a", "a.b.c"]),
        ("0.1", ["0.1"], ["0x1", "0"]),
    ],
)
def test_what_patterns_mean(pattern: str, matching: list[str], other: list[str]) -> None:
    parsed = PathPattern.parse(pattern)
    assert [path for path in matching if not parsed.matches(path)] == []
    assert [path for path in other if parsed.matches(path)] == []


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a b", "it has a space in it"),
        ("a/b", 'module paths are written with dots, not with "/"'),
        ("layer?", '"?" has no meaning here; only *, ** and {a,b} are special'),
        ("a..b", "it has an empty segment: two dots in a row, or a dot at an end"),
        ("{,a}.b", "it has an empty segment: two dots in a row, or a dot at an end"),
        ("a**", '"**" stands alone between dots, not inside of "a**"'),
        ("{a,b", 'a "{" has no "}" after it'),
        ("a}", 'a "}" has no "{" before it'),
        ("a,b", 'a comma stands outside of braces; alternatives are written "{a,b}", or as a list'),
        ("a.{}", '"{}" has nothing in it'),
        ("{a,b}" * 10, "its braces spell out more than 1000 paths"),
        ("a" * 20_001, "it is 20001 characters long, more than 20000"),
    ],
)
def test_a_bad_pattern_says_why(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        PathPattern.parse(pattern)
    assert str(caught.value) == reason


def test_many_stars_are_matched_in_little_work() -> None:
    assert not PathPattern.parse(".".join(["**", "a"] * 50)).matches(".".join(["a"] * 300 + ["b"]))
    assert not PathPattern.parse("*a" * 50 + "b").matches("a" * 3000)
