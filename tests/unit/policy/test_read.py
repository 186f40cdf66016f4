"""Everything the grammar allows, and what it means as values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import sac.policy
from sac.policy.load import load_policy
from sac.policy.model import Decision, Layers, Policy, Rule
from sac.policy.patterns import PathPattern
from sac.tables import parse_bytes

Load = Callable[[str], Policy]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def write_and_load(text: str) -> Policy:
        Path("p.yaml").write_text(f"schema: sac/v1\n{text}\n", encoding="utf-8")
        return load_policy("p.yaml")

    return write_and_load


def rule(load: Load, text: str) -> Rule:
    return load(f"rules:\n  - {{{text}}}").rules[0]


def test_a_whole_policy_comes_as_values_with_marks(load: Load) -> None:
    policy = load(
        "name: llama\n"
        "models: [llama, mistral]\n"
        "sets: {attention: [my_lib::flash]}\n"
        "regions:\n"
        '  blocks: ["model.layers.*"]\n'
        "  layers: all\n"
        "default: recompute\n"
        "rules:\n"
        "  - id: attention\n"
        "    ops: attention\n"
        "    do: save\n"
        "  - id: small\n"
        "    ops: [matmul, aten.bmm]\n"
        '    module: "self_attn.{q,k}_proj"\n'
        "    do: alternate\n"
    )
    assert policy == Policy(
        name="llama",
        models=("llama", "mistral"),
        sets={"attention": ("my_lib::flash",)},
        blocks=(PathPattern.parse("model.layers.*"),),
        rules=(
            Rule("attention", "save", ops=("attention",)),
            Rule("small", "alternate", ("matmul", "aten.bmm"), PathPattern.parse("self_attn.{q,k}_proj")),
        ),
    )
    assert policy.source == "p.yaml"
    assert policy.where("default") == "p.yaml:8:10"
    assert policy.where("regions.blocks") == "p.yaml:6:11"
    assert policy.where("sets.attention") == "p.yaml:4:19"
    small = policy.rules[1]
    assert small.where() == "p.yaml:13:5"
    assert small.where("module") == "p.yaml:15:13"
    assert [small.where(f"ops[{index}]") for index in (0, 1)] == ["p.yaml:14:11", "p.yaml:14:19"]
    assert small.origin == "llama"


def test_what_is_left_out(load: Load) -> None:
    assert load("default: save\nrules: []") == Policy("p", default=Decision.SAVE)
    policy = load("name: mine\nrules: [{ops: a, do: save}, {id: b, ops: b, do: save}, {ops: c, do: save}]")
    assert [one.id for one in policy.rules] == ["mine.1", "b", "mine.3"]
    assert policy.rules[0].fits_shape((1, 2, 3))


# How a key of a rule is written, and what it is read as.
FORMS = [
    ("do: save", "do", "save"),
    ("do: RECOMPUTE", "do", "recompute"),
    ("do: Offload", "do", "offload"),
    ('do: "Alternate"', "do", "alternate"),
    ("dtype: float32", "dtype", ("float32",)),
    ("dtype: [BFloat16, int64]", "dtype", ("bfloat16", "int64")),
    ("optional: TRUE", "optional", True),
    ("optional: false", "optional", False),
    ('module: [self_attn.**, "*_proj"]', "module", PathPattern.parse("{self_attn.**,*_proj}")),
    ("module: 1.10", "module", PathPattern.parse("1.10")),
]


@pytest.mark.parametrize(("written", "key", "meant"), FORMS)
def test_forms_of_a_rule(load: Load, written: str, key: str, meant: object) -> None:
    given = written if key == "do" else f"{written}, do: save"
    assert getattr(rule(load, f"ops: matmul, {given}"), key) == meant


@pytest.mark.parametrize(
    ("written", "meant", "of_six"),
    [
        ("ALL", Layers(), [0, 1, 2, 3, 4, 5]),
        ("{first: 2}", Layers("first", 2), [0, 1]),
        ("{last: 2}", Layers("last", 2), [4, 5]),
        ("{every: 2}", Layers("every", 2), [0, 2, 4]),
        ("{every: 2, offset: 1}", Layers("every", 2, 1), [1, 3, 5]),
        ('["0-1", "4"]', Layers("numbers", ((0, 1), (4, 4))), [0, 1, 4]),
        ("[0-1, 4, 12]", Layers("numbers", ((0, 1), (4, 4), (12, 12))), [0, 1, 4]),
    ],
)
def test_layers_in_every_form(load: Load, written: str, meant: Layers, of_six: list[int]) -> None:
    layers = rule(load, f"ops: matmul, do: save, layers: {written}").layers
    assert layers == meant
    assert [layer for layer in range(6) if layers.matches(layer, 6)] == of_six
    assert load(f"rules: []\nregions: {{layers: {written}}}").layers == meant


@pytest.mark.parametrize(
    ("written", "meant", "of_six"),
    [
        ("{index: 0}", Layers("index", (0,)), [0]),
        ("{index: [1, 3]}", Layers("index", (1, 3)), [1, 3]),
        ("{every: 2}", Layers("every", 2), [0, 2, 4]),
        ("{every: 2, offset: 3}", Layers("every", 2, 3), [3, 5]),
    ],
)
def test_calls_in_every_form(load: Load, written: str, meant: Layers, of_six: list[int]) -> None:
    call = rule(load, f"ops: matmul, do: save, call: {written}").call
    assert call == meant
    assert [index for index in range(6) if call.matches(index)] == of_six


@pytest.mark.parametrize(
    ("written", "meant", "fits", "fits_not"),
    [
        ("[_, 128]", ("_", 128), [(0, 128), (7, 128)], [(128,), (1, 1, 128), (7, 127)]),
        ('[">=4096"]', (">=4096",), [(4096,)], [(4095,), (1, 4096)]),
        ('["> 1", "<=2", "<3", "!=4"]', (">1", "<=2", "<3", "!=4"), [(2, 2, 2, 2)], [(2, 2, 2, 4)]),
        ("[..., 8]", ("...", 8), [(8,), (1, 8), (1, 2, 8)], [(), (8, 1)]),
        ('["..."]', ("...",), [(), (1,), (1, 2)], []),
    ],
)
def test_shapes(load: Load, written: str, meant: object, fits: list[tuple[int]], fits_not: list[tuple[int]]) -> None:
    found = rule(load, f"ops: matmul, do: save, shape: {written}")
    assert found.shape == meant
    assert [sizes for sizes in fits if not found.fits_shape(sizes)] == []
    assert [sizes for sizes in fits_not if found.fits_shape(sizes)] == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4096", 4096),
        ("1e6", 1_000_000),
        ("1MiB", 2**20),
        ("64 KiB", 2**16),
        ("1.5kb", 1500),
        ("2GB", 2_000_000_000),
        ("1tib", 2**40),
        ("7B", 7),
    ],
)
def test_sizes_in_bytes(written: str, meant: int) -> None:
    assert parse_bytes(written) == meant


def test_a_rule_names_modules_functions_or_units_in_place_of_ops(load: Load) -> None:
    assert rule(load, "module: mlp, do: save").matches_module
    itself = rule(load, 'ops: matmul, do: save, module: ""').module
    assert [itself.matches(path) for path in ("", "mlp")] == [True, False]
    kernel = rule(load, "function: [Liger*Norm*, flash_attn.*.FlashAttnFunc], module: mlp, do: save")
    names = (
        "liger_kernel.ops.rms_norm.LigerRMSNormFunction",
        "flash_attn.interface.FlashAttnFunc",
        "other.FlashAttnFunc",
    )
    assert [kernel.matches_unit(name) for name in names] == [True, True, False]
    assert rule(load, "unit: rope*, do: recompute").matches_unit("", "rope_q")


def test_words_that_yaml_1_1_reads_as_something_else_stay_what_was_written(load: Load) -> None:
    policy = load("name: on\nmodels: [no, 1:8, 010]\nrules: [{id: off, ops: y, do: save}]")
    assert (policy.name, policy.models) == ("on", ("no", "1:8", "010"))
    assert (policy.rules[0].id, policy.rules[0].ops) == ("off", ("y",))


def test_aliases_are_written_out(load: Load) -> None:
    policy = load("rules:\n  - {ops: &mm [aten.mm, aten.bmm], module: a, do: save}\n  - {ops: *mm, do: recompute}")
    assert policy.rules[1].ops == ("aten.mm", "aten.bmm")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfschema: sac/v1\nrules: []\n")
    assert load_policy(path) == Policy("bom")


def test_a_mapping_is_a_policy_and_its_marks_are_paths() -> None:
    policy = load_policy({"default": Decision.SAVE, "rules": ({"ops": "matmul", "module": 0, "do": "recompute"},)})
    assert policy == Policy(
        "inline", (Rule("inline.1", "recompute", ("matmul",), PathPattern.parse("0")),), Decision.SAVE
    )
    assert policy.rules[0].where("ops") == "policy.rules[0].ops"
    assert load_policy(policy) is policy


def test_parsing_does_not_import_torch() -> None:
    for path in Path(sac.policy.__file__).parent.glob("*.py"):
        nodes = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, (ast.Import, ast.ImportFrom))]
        names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
        assert "torch" not in {name.partition(".")[0] for name in names}, path
        ours = {name.split(".")[1] for name in names if name.startswith("sac.")}
        assert ours <= {"errors", "policy", "tables"}, path
