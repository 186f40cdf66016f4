"""Everything the grammar allows, and what it means as values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy
from sac.policy.model import Calls, Decision, Dim, Layers, Policy, Rule, SourceLocation
from sac.policy.patterns import PathPattern
from sac.policy.read import parse_bytes

Load = Callable[[str], Policy]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def write_and_load(text: str) -> Policy:
        Path("p.yaml").write_text(text, encoding="utf-8")
        return load_policy("p.yaml")

    return write_and_load


def rule(load: Load, text: str) -> Rule:
    return load(f"schema: sac/v1\nrules:\n  - {{{text}}}\n").rules[0]


def test_a_whole_policy_comes_as_values_with_marks(load: Load) -> None:
    policy = load(
        "schema: sac/v1\n"
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
    assert policy.where("blocks") == "p.yaml:6:11"
    assert policy.where("models") == "p.yaml:3:9"
    assert policy.set_locations == {"attention": SourceLocation("p.yaml", 4, 8)}
    small = policy.rules[1]
    assert small.where() == "p.yaml:13:5"
    assert small.where("module") == "p.yaml:15:13"
    assert [str(mark) for mark in small.op_locations] == ["p.yaml:14:11", "p.yaml:14:19"]
    assert small.origin == "llama"


def test_a_policy_of_only_a_default_is_legal(load: Load) -> None:
    policy = load("schema: sac/v1\ndefault: save\nrules: []\n")
    assert policy == Policy("p", default=Decision.SAVE)


def test_rules_without_id_are_called_after_the_policy(load: Load) -> None:
    policy = load(
        "schema: sac/v1\nname: mine\nrules: [{ops: a, do: save}, {id: b, ops: b, do: save}, {ops: c, do: save}]\n"
    )
    assert [one.id for one in policy.rules] == ["mine.1", "b", "mine.3"]


def test_offload_and_whole_module_rules_parse(load: Load) -> None:
    assert rule(load, "ops: matmul, do: offload").do == "offload"
    whole = rule(load, "module: mlp, do: save")
    assert whole.matches_module
    assert whole.module == PathPattern.parse("mlp")


def test_decisions_that_take_turns(load: Load) -> None:
    found = rule(load, "ops: matmul, do: alternate")
    assert found.kept_as == "save"
    assert [found.keeps_turn(turn) for turn in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("word", ["save", "Save", "RECOMPUTE", "Offload", "alternate", '"SAVE"'])
def test_words_are_case_insensitive(load: Load, word: str) -> None:
    assert rule(load, f"ops: matmul, do: {word}").do == word.strip('"').lower()


@pytest.mark.parametrize(
    ("written", "meant", "of_six"),
    [
        ("all", Layers(), [0, 1, 2, 3, 4, 5]),
        ("ALL", Layers(), [0, 1, 2, 3, 4, 5]),
        ("{first: 2}", Layers(first=2), [0, 1]),
        ("{last: 2}", Layers(last=2), [4, 5]),
        ("{every: 2}", Layers(every=2), [0, 2, 4]),
        ("{every: 2, offset: 1}", Layers(every=2, offset=1), [1, 3, 5]),
        ("{first: 1e1}", Layers(first=10), [0, 1, 2, 3, 4, 5]),
        ('["0-1", "4"]', Layers(ranges=((0, 1), (4, 4))), [0, 1, 4]),
        ("[0-1, 4, 12]", Layers(ranges=((0, 1), (4, 4), (12, 12))), [0, 1, 4]),
    ],
)
def test_layers_in_every_form(load: Load, written: str, meant: Layers, of_six: list[int]) -> None:
    layers = rule(load, f"ops: matmul, do: save, layers: {written}").layers
    assert layers == meant
    assert sorted(layers.select(6)) == of_six
    assert load(f"schema: sac/v1\nrules: []\nregions: {{layers: {written}}}\n").layers == meant


@pytest.mark.parametrize(
    ("written", "meant", "of_six"),
    [
        ("{index: 0}", Calls(index=frozenset({0})), [0]),
        ("{index: [1, 3]}", Calls(index=frozenset({1, 3})), [1, 3]),
        ("{every: 2}", Calls(every=2), [0, 2, 4]),
        ("{every: 2, offset: 3}", Calls(every=2, offset=3), [3, 5]),
    ],
)
def test_calls_in_every_form(load: Load, written: str, meant: Calls, of_six: list[int]) -> None:
    call = rule(load, f"ops: matmul, do: save, call: {written}").call
    assert call == meant
    assert [index for index in range(6) if call.matches(index)] == of_six


@pytest.mark.parametrize(
    ("written", "meant", "fits", "fits_not"),
    [
        ("[_, 128]", (Dim(), Dim("==", 128)), [(0, 128), (7, 128)], [(128,), (1, 1, 128), (7, 127)]),
        ('[">=4096"]', (Dim(">=", 4096),), [(4096,)], [(4095,), (1, 4096)]),
        (
            '["> 1", "<=2", "<3", "!=4"]',
            (Dim(">", 1), Dim("<=", 2), Dim("<", 3), Dim("!=", 4)),
            [(2, 2, 2, 2)],
            [(2, 2, 2, 4)],
        ),
        ("[..., 8]", (Dim("..."), Dim("==", 8)), [(8,), (1, 8), (1, 2, 8)], [(), (8, 1)]),
        ('["..."]', (Dim("..."),), [(), (1,), (1, 2)], []),
    ],
)
def test_shapes(load: Load, written: str, meant: object, fits: list[tuple[int]], fits_not: list[tuple[int]]) -> None:
    found = rule(load, f"ops: matmul, do: save, shape: {written}")
    assert found.shape == meant
    assert [sizes for sizes in fits if not found.fits_shape(sizes)] == []
    assert [sizes for sizes in fits_not if found.fits_shape(sizes)] == []


def test_a_rule_without_shape_fits_every_shape(load: Load) -> None:
    assert rule(load, "ops: matmul, do: save").fits_shape((1, 2, 3))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("float32", ("float32",)),
        ("torch.bfloat16", ("bfloat16",)),
        ("Half", ("float16",)),
        ("[float, torch.float32, int64]", ("float32", "int64")),
        ("bool", ("bool",)),
    ],
)
def test_dtypes_come_under_the_names_torch_prints(load: Load, written: str, meant: tuple[str, ...]) -> None:
    assert rule(load, f"ops: matmul, do: save, dtype: {written}").dtype == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1e6", 1_000_000),
        ('"1e6"', 1_000_000),
        ("1MiB", 2**20),
        ('"64 KiB"', 2**16),
        ("1.5kb", 1500),
        ("2GB", 2_000_000_000),
        ("1tib", 2**40),
        ("7B", 7),
    ],
)
def test_sizes_in_bytes(written: str, meant: int) -> None:
    assert parse_bytes(written.strip('"')) == meant


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_optional_is_a_boolean(load: Load, word: str) -> None:
    assert rule(load, f"ops: matmul, do: save, optional: {word}").optional is True
    assert rule(load, "ops: matmul, do: save, optional: false").optional is False


def test_words_that_yaml_1_1_reads_as_something_else_stay_what_was_written(load: Load) -> None:
    policy = load(
        "schema: sac/v1\nname: on\nmodels: [no, 1:8, 010]\nrules: [{id: off, ops: y, module: 1.10, do: save}]\n"
    )
    assert policy.name == "on"
    assert policy.models == ("no", "1:8", "010")
    assert policy.rules[0].id == "off"
    assert policy.rules[0].ops == ("y",)
    assert policy.rules[0].module == PathPattern.parse("1.10")


def test_a_list_of_module_patterns_matches_any_of_them(load: Load) -> None:
    module = rule(load, 'ops: matmul, do: save, module: [self_attn.**, "*_proj"]').module
    assert module == PathPattern.parse("{self_attn.**,*_proj}")


def test_the_empty_module_is_the_region_itself(load: Load) -> None:
    module = rule(load, 'ops: matmul, do: save, module: ""').module
    assert module.matches("")
    assert not module.matches("mlp")


def test_aliases_are_written_out(load: Load) -> None:
    policy = load(
        "schema: sac/v1\nrules:\n"
        "  - {ops: &mm [aten.mm, aten.bmm], module: a, do: save}\n"
        "  - {ops: *mm, do: recompute}\n"
    )
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
    assert policy.where("default") == "policy.default"


def test_a_policy_comes_back_as_it_is() -> None:
    policy = Policy("mine")
    assert load_policy(policy) is policy


def test_parsing_does_not_import_torch() -> None:
    import ast

    import sac.policy

    for path in Path(sac.policy.__file__).parent.glob("*.py"):
        imports = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = {getattr(node, "module", None) or node.names[0].name for node in imports}
        assert {name.split(".")[0] for name in names} <= {
            *("__future__", "codecs", "collections", "dataclasses", "decimal", "enum", "fnmatch", "importlib", "math"),
            *("operator", "os", "pathlib", "re", "typing", "yaml", "sac"),
        }, path
        ours = {name.split(".")[1] for name in names if name.startswith("sac.")}
        assert ours <= {"errors", "policy", "tables"}, path


def test_a_rule_names_a_function_or_a_unit_in_place_of_ops(load: Load) -> None:
    kernel = rule(load, "function: [Liger*Norm*, flash_attn.*.FlashAttnFunc], module: mlp, do: save")
    assert kernel.matches_unit("liger_kernel.ops.rms_norm.LigerRMSNormFunction")
    assert kernel.matches_unit("flash_attn.flash_attn_interface.FlashAttnFunc")
    assert not kernel.matches_unit("other.FlashAttnFunc")
    assert not kernel.matches_unit("", "LigerNorm")
    assert not kernel.matches_module
    piece = rule(load, "unit: rope*, do: recompute")
    assert piece.matches_unit("", "rope_q")
    assert not piece.matches_unit("m.rope", "")
    policy = load(
        "schema: sac/v1\nrules:\n  - {id: a, function: F, do: save}\n  - {id: b, unit: F, do: save}\n"
        "  - {id: c, ops: matmul, do: save}\n"
    )
    assert load(policy.to_yaml()) == policy


def test_a_rule_has_one_of_ops_function_and_unit(load: Load) -> None:
    with pytest.raises(PolicyError, match="both ops and function"):
        rule(load, "ops: matmul, function: F, do: save")
    with pytest.raises(PolicyError, match=r'the rule "p\.2" can never fire'):
        load('schema: sac/v1\nrules:\n  - {function: "m.*", do: save}\n  - {function: m.Fn, do: recompute}\n')
