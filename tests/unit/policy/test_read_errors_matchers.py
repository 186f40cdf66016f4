"""Whole texts of the errors about a rule's matchers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.policy.whole_text import assert_whole_text

BYTES = 'a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"'
CALL = "{index: n}, {index: [n, m]} or {every: k, offset: j}, counted from 0"
DIM = '_ for any size, a size such as 128, or "!=", ">=", "<=", ">", "<" and a size'
DTYPES = (
    "float64, float32, float16, bfloat16, complex32, complex64, complex128, bool, int8, int16, int32, int"
    "64, uint8, uint16, uint32, uint64, qint8, quint8, qint32, float8_e4m3fn, float8_e4m3fnuz, float8_e5m"
    "2, float8_e5m2fnuz, float8_e8m0fnu, float4_e2m1fn_x2"
)
LAYERS = 'all, {first: n}, {block: n}, {last: n}, {every: k, offset: j}, {fraction: f}, or a list such as ["0-7", "12"]'
PATTERN = 'a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"'
RANGE = 'a layer such as 12, or a range such as "0-7" (both ends are meant)'
SIX_HUNDRED = ",".join(f"a{i}" for i in range(600))
SHAPE = 'a list such as [_, 128, ">=4096"], with _ for any size and "..." in front for any leading dimensions'


def r(rule: str) -> str:
    """The text of a policy with one rule."""
    return f"schema: sac/v1\nrules:\n  - {{{rule}}}\n"


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a_pattern_with_a_slash": (
        r("ops: a, module: a/b, do: save"),
        (
            'p.yaml:3:22: module is "a/b": module paths are written with dots, not with "/"',
            f"legal: {PATTERN}",
        ),
    ),
    "a_pattern_in_bare_braces": (
        r("ops: a, module: {a,b}, do: save"),
        (
            "p.yaml:3:22: module is a mapping",
            "legal: a pattern, or a list of them",
            'fix: quote it: unquoted braces are a mapping; patterns are written as in "{q_proj,k_proj}"',
        ),
    ),
    "a_pattern_list_with_a_bad_one": (
        r('ops: a, module: [a, "b.{c"], do: save'),
        (
            'p.yaml:3:26: module is "b.{c": a "{" has no "}" after it',
            f"legal: {PATTERN}",
        ),
    ),
    "too_many_patterns": (
        r(f'ops: a, module: ["{{{SIX_HUNDRED}}}", "{{x,{SIX_HUNDRED}}}"], do: save'),
        (
            "p.yaml:3:22: module is not a pattern: its braces spell out more than 1000 paths",
            "fix: write fewer patterns",
        ),
    ),
    "a_range_that_yaml_1_1_reads_as_68": (
        r("ops: a, layers: 1:8, do: save"),
        (
            'p.yaml:3:22: layers is "1:8"',
            f"legal: {LAYERS}",
            'fix: ranges are written as "1-8", in a list: ["1-8"]',
        ),
    ),
    "a_range_outside_of_a_list": (
        r('ops: a, layers: "0-7", do: save'),
        (
            'p.yaml:3:22: layers is "0-7"',
            f"legal: {LAYERS}",
            'fix: ranges are written as "0-7", in a list: ["0-7"]',
        ),
    ),
    "a_layer_outside_of_a_list": (
        r("ops: a, layers: 8, do: save"),
        (
            "p.yaml:3:22: layers is 8",
            f"legal: {LAYERS}",
            "fix: write [8] for that layer alone, {first: 8} for the first ones",
        ),
    ),
    "a_misspelled_all": (
        r("ops: a, layers: al, do: save"),
        (
            'p.yaml:3:22: layers is "al"',
            "did you mean: all",
            f"legal: {LAYERS}",
        ),
    ),
    "no_layers": (
        r("ops: a, layers: [], do: save"),
        (
            "p.yaml:3:22: layers is an empty list",
            f"legal: {LAYERS}",
            "fix: remove it, or name a layer",
        ),
    ),
    "a_range_with_a_colon": (
        r("ops: a, layers: [1:8], do: save"),
        (
            'p.yaml:3:23: an entry of layers is "1:8"',
            f"legal: {RANGE}",
            'fix: ranges are written as "1-8"',
        ),
    ),
    "a_range_the_wrong_way_round": (
        r("ops: a, layers: [8-1], do: save"),
        (
            'p.yaml:3:23: an entry of layers is "8-1"',
            f"legal: {RANGE}",
            'fix: write "1-8"',
        ),
    ),
    "a_negative_layer": (
        r("ops: a, layers: [-1], do: save"),
        (
            "p.yaml:3:23: an entry of layers is -1",
            f"legal: {RANGE}",
        ),
    ),
    "first_of_zero": (
        r("ops: a, layers: {first: 0}, do: save"),
        (
            "p.yaml:3:30: layers.first is 0",
            "legal: a whole number, 1 or more",
        ),
    ),
    "last_of_less": (
        r("ops: a, layers: {last: -3}, do: save"),
        (
            "p.yaml:3:29: layers.last is -3",
            "legal: a whole number, 1 or more",
        ),
    ),
    "every_of_zero": (
        r("ops: a, layers: {every: 0}, do: save"),
        (
            "p.yaml:3:30: layers.every is 0",
            "legal: a whole number, 1 or more",
        ),
    ),
    "half_a_layer": (
        r("ops: a, layers: {first: 1e-3}, do: save"),
        (
            "p.yaml:3:30: layers.first is 1e-3",
            "legal: a whole number, 1 or more",
        ),
    ),
    "a_quoted_number": (
        r('ops: a, layers: {first: "2"}, do: save'),
        (
            'p.yaml:3:30: layers.first is "2"',
            "legal: a whole number, 1 or more",
            "fix: remove the quotes",
        ),
    ),
    "an_octal_number": (
        r("ops: a, layers: {first: 010}, do: save"),
        (
            "p.yaml:3:30: layers.first is 010",
            "legal: a whole number, 1 or more",
            "fix: write 10; a leading zero means base 8 to some readers",
        ),
    ),
    "two_forms_of_layers": (
        r("ops: a, layers: {first: 1, last: 1}, do: save"),
        (
            "p.yaml:3:22: layers has first and last",
            f"legal: {LAYERS}",
            "fix: choose one of the forms",
        ),
    ),
    "an_offset_without_every": (
        r("ops: a, layers: {offset: 1}, do: save"),
        (
            "p.yaml:3:22: layers has offset",
            f"legal: {LAYERS}",
            "fix: choose one of the forms",
        ),
    ),
    "an_unknown_form_of_layers": (
        r("ops: a, layers: {frist: 1}, do: save"),
        (
            'p.yaml:3:23: unknown key "frist" in layers',
            "did you mean: first",
            "legal: first, block, last, every, offset, fraction",
            'fix: write "first"',
        ),
    ),
    "an_empty_form_of_layers": (
        r("ops: a, layers: {}, do: save"),
        (
            "p.yaml:3:22: layers has nothing in it",
            f"legal: {LAYERS}",
            "fix: choose one of the forms",
        ),
    ),
    "a_bare_call": (
        r("ops: a, call: 0, do: save"),
        (
            "p.yaml:3:20: call is 0",
            f"legal: {CALL}",
            "fix: write {index: 0}",
        ),
    ),
    "two_forms_of_call": (
        r("ops: a, call: {index: 0, every: 2}, do: save"),
        (
            "p.yaml:3:20: call has index and every",
            f"legal: {CALL}",
            "fix: choose one of the forms",
        ),
    ),
    "no_call": (
        r("ops: a, call: {index: []}, do: save"),
        (
            "p.yaml:3:28: call.index is an empty list",
            f"legal: {CALL}",
            "fix: remove it, or name a call",
        ),
    ),
    "a_negative_call": (
        r("ops: a, call: {index: [0, -1]}, do: save"),
        (
            "p.yaml:3:32: call.index is -1",
            "legal: a whole number, 0 or more",
        ),
    ),
    "a_bare_shape": (
        r("ops: a, shape: 128, do: save"),
        (
            "p.yaml:3:21: shape is 128",
            f"legal: {SHAPE}",
        ),
    ),
    "an_empty_shape": (
        r("ops: a, shape: [], do: save"),
        (
            "p.yaml:3:21: shape is an empty list",
            f"legal: {SHAPE}",
        ),
    ),
    "dots_not_in_front": (
        r("ops: a, shape: [_, ...], do: save"),
        (
            'p.yaml:3:25: an entry of shape is "..."',
            f"legal: {DIM}",
            'fix: "..." may stand in front only',
        ),
    ),
    "a_star_in_a_shape": (
        r('ops: a, shape: ["*", 1.5], do: save'),
        (
            'p.yaml:3:22: an entry of shape is "*"',
            f"legal: {DIM}",
            'fix: write _ for "any"',
            "p.yaml:3:27: an entry of shape is 1.5",
            f"legal: {DIM}",
        ),
    ),
    "an_unknown_dtype": (
        r("ops: a, dtype: bfloat61, do: save"),
        (
            'p.yaml:3:21: dtype is "bfloat61"',
            "did you mean: bfloat16",
            f"legal: {DTYPES}",
        ),
    ),
    "an_unknown_unit": (
        r("ops: a, min_bytes: 3XB, do: save"),
        (
            'p.yaml:3:25: min_bytes is "3XB": the unit "XB" is none of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB',
            f"legal: {BYTES}",
        ),
    ),
    "half_a_byte": (
        r("ops: a, min_bytes: 0.5, do: save"),
        (
            "p.yaml:3:25: min_bytes is 0.5: it is not a whole number of bytes",
            f"legal: {BYTES}",
        ),
    ),
    "negative_bytes": (
        r("ops: a, min_bytes: -1, do: save"),
        (
            "p.yaml:3:25: min_bytes is -1: it is below zero",
            f"legal: {BYTES}",
        ),
    ),
    "too_many_bytes": (
        r("ops: a, min_bytes: 1e30, do: save"),
        (
            "p.yaml:3:25: min_bytes is 1e30: it is more than 2**63 - 1 bytes",
            f"legal: {BYTES}",
        ),
    ),
    "bytes_that_are_no_number": (
        r("ops: a, min_bytes: [1], do: save"),
        (
            "p.yaml:3:25: min_bytes is a list",
            f"legal: {BYTES}",
        ),
    ),
    "bytes_that_are_a_word": (
        r("ops: a, min_bytes: many, do: save"),
        (
            'p.yaml:3:25: min_bytes is "many": it is not a number with a unit',
            f"legal: {BYTES}",
        ),
    ),
    "optional_yes": (
        r("ops: a, optional: yes, do: save"),
        (
            'p.yaml:3:24: optional is "yes"',
            "legal: true, false",
            "fix: write true, without quotes",
        ),
    ),
    "optional_zero": (
        r("ops: a, optional: 0, do: save"),
        (
            "p.yaml:3:24: optional is 0",
            "legal: true, false",
            "fix: write false, without quotes",
        ),
    ),
    "optional_text": (
        r("ops: a, optional: maybe, do: save"),
        (
            'p.yaml:3:24: optional is "maybe"',
            "legal: true, false",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text_about_matchers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_text(*CASES[name], tmp_path, monkeypatch)
