"""`sac compare --html`: the numbers of the page, that it needs nothing else, and what it does in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import sac
from sac.errors import ConfigError
from sac.policy.read import bytes_text
from sac.reporting import OffloadUse
from sac.tools.cli import main
from sac.tools.comparison import Comparison, ModeResult
from sac.tools.page import page_of
from tests.cli.test_cli_explain import Recurrent
from tests.support import browser as browsers
from tests.support.blocks import FULL, llama_stack, policy, save, selective, tokens
from tests.support.browser import Browser
from tests.support.training import built

POLICY = """
schema: sac/v1
name: mine
default: recompute
rules:
  - {id: products, ops: matmul, do: save}
  - {id: norms, ops: "aten.native_layer_norm", do: save}
  - {id: never, ops: attention, optional: true, do: save}
"""
Row = dict[str, Any]


class Tables(HTMLParser):
    """The tables of a page by id: rows of cells, each with its text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[dict[str, str]]]] = {}
        self._table = ""
        self._cell: dict[str, str] | None = None
        self.data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "table":
            self._table = found.get("id") or found.get("class", "")
            self.rows.setdefault(self._table, [])
        elif tag == "tr":
            self.rows[self._table].append([])
        elif tag in ("th", "td"):
            self._cell = {"text": "", **found}
            self.rows[self._table][-1].append(self._cell)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell["text"] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Row]:
    """A page, and the JSON of the same run."""
    folder = tmp_path_factory.mktemp("page")
    mine, page, out = folder / "mine.yaml", folder / "new" / "page.html", folder / "out.json"
    mine.write_text(POLICY)
    spec = ["--model", "tests.unit.planner.plan_models:stack", "--modes", f"full,{mine},nonsense/{mine.name}"]
    with pytest.MonkeyPatch.context() as patch, out.open("w") as stdout:
        patch.setattr("sys.stdout", stdout)
        patch.setattr("sac.tools.arguments.check_value", lambda *_: None)  # a mode that is refused keeps its row
        assert main(["compare", *spec, "--steps", "2", "--html", str(page), "--json"]) == 1
    return page, json.loads(out.read_text())


def modes_of(found: Row) -> list[Row]:
    return [row for row in found["modes"] if "error" not in row]


def test_the_numbers_of_the_page_are_those_of_the_json(written: tuple[Path, Row]) -> None:
    path, found = written
    tables = Tables(path.read_text(encoding="utf-8"))
    head, *rows = tables.rows["modes"]
    names = [cell["text"] for cell in head]
    failed = rows.pop()
    assert failed[1]["text"] == found["modes"][-1]["error"]
    for cells, row in zip(rows, modes_of(found), strict=True):
        shown = dict(zip(names, cells, strict=True))
        assert shown["mode"]["text"] == row["mode"]
        for column, key in (
            ("kept", "kept_bytes"),
            ("peak", "peak_bytes"),
            ("recomputed", "recompute_flops"),
            ("step", "median_step_ms"),
            ("gradient difference", "max_gradient_difference"),
        ):
            assert float(shown[column]["data-value"]) == row[key]
        assert float(shown["loss"]["data-value"]) == row["losses"][-1]
        assert shown["peak"]["text"].startswith(f"{bytes_text(row['peak_bytes'])} (")


def test_what_is_alive_at_each_peak_is_that_of_the_json(written: tuple[Path, Row]) -> None:
    path, found = written
    data = Tables(path.read_text(encoding="utf-8")).data
    assert data["modes"].pop() is None
    for mode, row in zip(data["modes"], modes_of(found), strict=True):
        live: dict[int, int] = {}
        highest, at_peak, moment = -1, live, ""
        for changes, number in zip(mode["changes"], mode["moments"], strict=True):
            live = live | dict(zip(changes[::3], changes[1::3], strict=True))
            if sum(live.values()) > highest:
                highest, at_peak, moment = sum(live.values()), live, mode["texts"][number]
        explained = row["explained"]
        assert (highest, moment) == (explained["peak_bytes"], explained["moment"])
        assert sum(at_peak.get(number, 0) for number in mode["before"]) == explained["before_bytes"]
        assert highest - explained["before_bytes"] == row["peak_bytes"]
        sums: dict[str, int] = {}
        for number, size in at_peak.items():
            name = data["categories"][mode["rows"][number][0]][0]
            sums[name] = sums.get(name, 0) + size
        assert {name: size for name, size in sums.items() if size} == explained["categories"]


def test_the_decisions_are_those_of_a_trace(written: tuple[Path, Row], capsys: pytest.CaptureFixture[str]) -> None:
    path, found = written
    head, *rows = Tables(path.read_text(encoding="utf-8")).rows["decisions"]
    names = [cell["text"] for cell in head]
    full, mine = (row["mode"] for row in modes_of(found)[1:])
    assert names == ["module", "op", "call", "shape", "bytes", "FLOPs", full, mine]
    assert main(["trace", "--model", "tests.unit.planner.plan_models:stack", "--policy", mine, "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert len(rows) == len(traced)
    for cells, row in zip(rows, traced, strict=True):
        shown = dict(zip(names, cells, strict=True))
        assert shown["module"]["text"] == (row["module"] or "(region)")
        assert shown["op"]["title"] == row["op"]
        assert [int(shown[name]["data-value"]) for name in ("bytes", "FLOPs")] == [row["bytes"], row["flops"]]
        assert shown[mine]["text"].startswith(row["decision"])
        assert row["rule"] in shown[mine]["text"]
        assert shown[full]["text"].startswith("recompute")


def test_modes_that_group_layers_differently_are_next_to_each_other(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    modes = {"full": FULL, "some": selective(policy(save("matmul", layers={"first": 1})))}
    sac.compare(built(llama_stack), tokens(), modes, steps=2, html=path)
    page = path.read_text(encoding="utf-8")
    assert "Of one region of blocks.0, blocks.1, in the order of the forward." in page
    head, *rows = Tables(page).rows["decisions"]
    names = [cell["text"] for cell in head]
    assert names == ["module", "regions", "op", "call", "shape", "bytes", "FLOPs", "full", "some"]
    shown = [dict(zip(names, (cell["text"] for cell in row), strict=True)) for row in rows]
    first, second = ([{**row, "regions": ""} for row in shown if row["regions"] == f"blocks.{n}"] for n in (0, 1))
    assert [row.pop("some").startswith("save") for row in first] == [row["op"] == "mm" for row in first]
    assert all(row.pop("some").startswith("recompute") for row in second)
    assert first == second, "full decides the same in both blocks"


def test_the_bytes_of_each_rule_are_those_of_the_report(written: tuple[Path, Row]) -> None:
    path, found = written
    page = path.read_text(encoding="utf-8")
    rules = [[cell["text"] for cell in row] for row in Tables(page).rows["rules"]]
    mine = modes_of(found)[-1]["report"]
    (kind,) = mine["kinds"]
    used = {rule["rule"]: rule for rule in kind["rules"]}
    row = next(row for row in rules if row[0] == "products")
    assert row[1:3] == ["matmul", str(used["products"]["hits"])]
    size = used["products"]["saved_bytes"]
    assert row[3:] == [bytes_text(size), bytes_text(size * kind["count"])]
    assert ["together", "", "", "", bytes_text(mine["kept_bytes"])] in rules
    assert "everything else: recompute; rules without a call: never" in page
    assert "schema: sac/v1" in page


def test_the_page_needs_nothing_else(written: tuple[Path, Row]) -> None:
    page = written[0].read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a namespace
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=\"(?!data:,)", page)
    assert "default-src 'none'" in page
    assert "<title>sac compare: " in page
    assert '<html lang="en">' in page


def test_names_are_escaped() -> None:
    row = ModeResult("<b>&", error="</script><script>alert(1)</script>")
    page = page_of(Comparison('<i>"model"', 1, "cpu", "2", 2, (row,)))
    assert "<b>" not in page
    assert "<i>" not in page
    assert page.count("<script") == 2
    assert "&lt;/script&gt;" in page


def test_python_writes_the_same_page_and_a_loss_of_ones_own_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    modes = {"one": selective(policy(save("matmul")))}
    found = sac.compare(
        built(llama_stack), tokens(), modes, steps=2, loss_fn=lambda out: out.float().abs().mean(), html=path
    )
    assert path.read_text(encoding="utf-8") == page_of(found)
    for row in found.rows:
        assert row.explained is not None
        assert row.explained.peak_bytes - row.explained.before_bytes == row.peak_bytes
        assert "not seen by the explanation" not in row.explained.by_category()


def test_what_waits_in_host_memory_is_listed_apart() -> None:
    (row,) = sac.compare(built(llama_stack), tokens(), {"full": "full"}, steps=2).rows[1:]
    assert row.report is not None
    (kind,) = row.report.kinds
    assert kind.count == 2
    moved = replace(kind, offloads=(OffloadUse("far", 1024, 0, {}),), input_host_bytes=2048)
    page = page_of(Comparison("m", 1, "cpu", "2", 2, (replace(row, report=replace(row.report, kinds=(moved,))),)))
    rules = [[cell["text"] for cell in cells] for cells in Tables(page).rows["rules"]]
    assert ["far", "in host memory", "", "1.0 KiB", "2.0 KiB"] in rules
    assert ["inputs", "in host memory", "", "2.0 KiB", "4.0 KiB"] in rules
    assert rules[-1] == ["together, on the device", "", "", "", bytes_text(row.report.kept_bytes)]


def test_a_mode_that_is_not_explained_shows_the_measured_curve(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "page.html"
    (row,) = sac.compare(Recurrent(), (torch.zeros(4, 2, 8),), ["none"], steps=2, html=path).rows
    page = path.read_text(encoding="utf-8")
    (mode,) = Tables(page).data["modes"]
    assert max(changes[1] for changes in mode["changes"]) == row.peak_bytes
    assert f"none: not explained: {row.not_explained}" in page


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    inside = str(tmp_path / "file" / "page.html")
    spec = ["compare", "--model", "tests.unit.planner.plan_models:stack"]
    for path, reason in ((str(tmp_path), "Is a directory"), (inside, "Not a directory")):
        assert main([*spec, "--html", path]) == 1
        streams = capsys.readouterr()
        assert (streams.out, streams.err) == ("", f"{path}: the file cannot be written: {reason}\n")
        with pytest.raises(ConfigError, match=reason):
            sac.compare(built(llama_stack), tokens(), html=path)


# -- In a browser


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    lacks = browsers.missing()
    if lacks:
        pytest.skip(lacks)
    with browsers.browser(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture
def opened(window: Browser, written: tuple[Path, Row]) -> Browser:
    """The page as it is when it is opened, whatever other tests have done on it."""
    window.console(), window.requests()  # those of other tests
    window.open(written[0])
    return window


def text(page: Browser, selector: str) -> str:
    return str(page.run("return document.querySelector(arguments[0]).textContent", selector))


def shown_rows(page: Browser) -> list[str]:
    rows = "[...document.querySelectorAll('#decisions tbody tr')]"
    return list(page.run(f"return {rows}.filter((row) => !row.hidden).map((row) => row.textContent)"))


@pytest.mark.slow
def test_hovering_shows_what_is_alive(opened: Browser, written: tuple[Path, Row]) -> None:
    _, full, mine = modes_of(written[1])
    assert text(opened, "#total") == bytes_text(mine["peak_bytes"]), "the last mode, at its peak"
    assert text(opened, "#moment") == f"{mine['mode']}, {mine['explained']['moment']}"
    assert not opened.run("return document.getElementById('is-peak').hidden")
    opened.point("#lines", 0.3)
    assert ", in the forward of layers." in text(opened, "#moment")
    assert "rule products" in text(opened, "#alive")
    assert opened.run("return document.getElementById('is-peak').hidden")
    opened.point("#stack", 0.9)
    assert ", in the backward of layers." in text(opened, "#moment")
    opened.click("#modes input[value='1']")
    assert text(opened, "#total") == bytes_text(full["peak_bytes"])
    opened.click("#whole")
    assert text(opened, "#total") == bytes_text(full["explained"]["peak_bytes"])
    opened.click("#whole")


@pytest.mark.slow
def test_the_charts_work_with_the_keyboard(opened: Browser) -> None:
    at = "return Number(document.getElementById('charts').getAttribute('aria-valuenow'))"
    opened.press("#charts", "Home")
    assert opened.run(at) == 0
    opened.press("#charts", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert opened.run(at) == 1
    assert opened.run("return document.getElementById('charts').getAttribute('aria-valuetext')").endswith(
        text(opened, "#moment").partition(", ")[2]
    )


@pytest.mark.slow
def test_the_filter_filters_and_columns_sort(opened: Browser) -> None:
    every = shown_rows(opened)
    assert text(opened, "#shown").startswith(f"{len(every)} of ")
    opened.press("#filter input", *"UP MM")
    assert [row.startswith("upaddmm") for row in shown_rows(opened)] == [True]
    opened.run("document.querySelector('#filter input').value = ''")
    opened.run("const one = document.querySelector('#filter select'); one.value = 'different'; "
               "one.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
    different = shown_rows(opened)
    assert len(different) == 3
    assert all("save" in row for row in different), "two products and a norm"
    opened.run("document.getElementById('filter').reset()")
    opened.click("#filter [name=views]")
    assert len(shown_rows(opened)) > len(every)
    opened.click("#decisions th:nth-child(5) button")
    sizes = opened.run(
        "return [...document.querySelectorAll('#decisions tbody td:nth-child(5)')].map((c) => +c.dataset.value)"
    )
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_fits_a_phone_and_a_screen(opened: Browser, width: int) -> None:
    opened.resize(width, 900)
    wide, inner = opened.run("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= inner
    drawn = opened.run("return document.querySelector('#lines path').getBoundingClientRect().width")
    assert drawn > 0.5 * min(inner, 600)


@pytest.mark.slow
def test_nothing_is_requested_and_the_console_is_empty(opened: Browser, written: tuple[Path, Row]) -> None:
    assert opened.console() == []
    assert opened.requests() == [written[0].as_uri()]
