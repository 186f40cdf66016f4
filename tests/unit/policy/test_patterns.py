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
        ("a b", '" " has no meaning here; dots, *, ** and {a,b} are special'),
        ("a/b", '"/" has no meaning here; dots, *, ** and {a,b} are special'),
        ("a..b", 'a segment between dots is empty, or has more than "**" in it'),
        ("{,a}.b", 'a segment between dots is empty, or has more than "**" in it'),
        ("a**", 'a segment between dots is empty, or has more than "**" in it'),
        ("{a,b", 'a "{" has no "}" after it'),
    ],
)
def test_a_bad_pattern_says_why(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        PathPattern.parse(pattern)
    assert str(caught.value) == reason
