"""The file that holds what was measured: it comes back as it was, and what is no such file is told."""

import json
import warnings
from dataclasses import replace

import pytest
import torch

from sac.errors import PlanError, SacWarning
from sac.planner.cost import OVERHEAD, Calibration, call_key, load_calibration, save_calibration
from sac.planner.profile import Entry

MEASURED = Calibration(
    "h100", torch.__version__, {"matmul": 0.61, "memory": 1 / 3}, {"aten.mm.default bfloat16[8, 8] 1 FLOP 2 B": 1e-5}
)
RAW = {"schema": "sac/calibration/v1", "device": "h100", "torch": torch.__version__, "efficiencies": {}, "ops": {}}


def told(path, raw):
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    with pytest.raises(PlanError) as error:
        load_calibration(path)
    return str(error.value).replace(str(path), "FILE")


def test_a_calibration_comes_back_as_it_was(tmp_path):
    save_calibration(MEASURED, tmp_path / "h100.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_calibration(str(tmp_path / "h100.json")) == MEASURED


def test_overheads_come_back_and_are_not_required(tmp_path):
    measured = replace(MEASURED, overhead=OVERHEAD)
    save_calibration(measured, tmp_path / "h100.json")
    assert load_calibration(tmp_path / "h100.json") == measured
    (tmp_path / "old.json").write_text(json.dumps(RAW))
    assert load_calibration(tmp_path / "old.json").overhead is None


def test_the_file_is_json_with_a_schema(tmp_path):
    save_calibration(MEASURED, tmp_path / "h100.json")
    raw = json.loads((tmp_path / "h100.json").read_text())
    assert [*raw] == ["schema", "device", "torch", "efficiencies", "ops", "overhead"]
    assert raw["schema"] == "sac/calibration/v1"


def test_a_key_says_what_was_called():
    entry = Entry(
        3, "mlp", "aten.mm.default", 1, (0,), (1,), flops=4096, moved_bytes=768, shape=(8, 16), dtype="bfloat16"
    )
    assert call_key(entry) == "aten.mm.default bfloat16[8, 16] 4096 FLOP 768 B"


def test_another_torch_is_warned_of(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**RAW, "torch": "1.0"}))
    with pytest.warns(SacWarning) as warned:
        assert load_calibration(path).torch == "1.0"
    assert str(warned[0].message) == (
        f"{path}: it was measured with torch 1.0, and this is torch {torch.__version__}; calibrate again"
    )
    assert warned[0].filename == __file__


def test_a_missing_file(tmp_path):
    with pytest.raises(PlanError) as error:
        load_calibration(tmp_path / "none.json")
    assert str(error.value) == f"{tmp_path / 'none.json'}: the file cannot be read: No such file or directory"


def test_a_directory_is_not_written_over(tmp_path):
    with pytest.raises(PlanError) as error:
        save_calibration(MEASURED, tmp_path)
    assert str(error.value) == f"{tmp_path}: the file cannot be written: Is a directory"


def test_what_is_no_json(tmp_path):
    assert told(tmp_path / "a", "rules:\n") == (
        "FILE: this is not JSON: Expecting value: line 1 column 1 (char 0)\n    legal: a calibration file"
    )
    assert told(tmp_path / "b", "[" * 100_000).startswith("FILE: this is not JSON: ")
    (tmp_path / "c").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="this is not JSON"):
        load_calibration(tmp_path / "c")


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ([], "it has no schema"),
        (None, "it has no schema"),
        ({"device": "h100"}, "it has no schema"),
        ({"schema": "sac/v1"}, 'schema is "sac/v1"'),
        ({"schema": 1}, "schema is 1"),
    ],
)
def test_what_is_no_calibration(tmp_path, raw, found):
    text = told(tmp_path / "file", raw)
    assert text == f'FILE: this is not a calibration file: {found}\n    legal: schema: "sac/calibration/v1"'


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    raw = {
        "schema": "sac/calibration/v1",
        "device": 7,
        "efficiencies": {"matmull": 0.5, "memory": 0, "attention": True, "collective": float("nan")},
        "ops": {"aten.mm.default": "fast", "aten.bmm.default": -1e-6},
        "overhead": {"record_s": 0, "rerun_s": -1, "rerun": 1},
    }
    classes = "    legal: matmul, attention, cudnn attention, memory, collective"
    number = "    legal: a number above 0"
    assert told(tmp_path / "file", raw).splitlines() == [
        'FILE: "device" is 7',
        "    legal: text",
        'FILE: "torch" is missing',
        "    legal: text",
        'FILE: "efficiencies" has "matmull"',
        "    did you mean: matmul",
        classes,
        'FILE: "efficiencies" has 0 for "memory"',
        number,
        'FILE: "efficiencies" has true for "attention"',
        number,
        'FILE: "efficiencies" has NaN for "collective"',
        number,
        'FILE: "ops" has "fast" for "aten.mm.default"',
        number,
        'FILE: "ops" has -1e-06 for "aten.bmm.default"',
        number,
        'FILE: "overhead" lacks replayed_call_s, rerun_call_s',
        "    legal: record_s, rerun_s, replayed_call_s, rerun_call_s",
        'FILE: "overhead" has -1 for "rerun_s"',
        "    legal: a number of 0 or more",
        'FILE: "overhead" has "rerun"',
        "    did you mean: rerun_s",
        "    legal: record_s, rerun_s, replayed_call_s, rerun_call_s",
    ]


@pytest.mark.parametrize(
    ("name", "unit"), [("efficiencies", "class of op"), ("ops", "call"), ("overhead", "part of it")]
)
def test_a_part_that_is_no_mapping(tmp_path, name, unit):
    assert told(tmp_path / "file", {**RAW, name: [1]}) == (
        f'FILE: "{name}" is [1]\n    legal: a mapping with a number per {unit}'
    )
