"""Every page: links and paths lead somewhere, policies load, tables name what there is, Python is run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.config import parse_config
from sac.ops.save_sets import SAVE_SETS
from sac.policy.read import POLICY_KEYS, RULE_KEYS
from sac.tools.models import config_path
from tests.docs.pages import ROOT, pages, rows, sections, snippets, text_of
from tests.docs.snippet_models import WIDTH, Model
from tests.unit.planner.plan_models import Stack

WRITING = "docs/writing-a-policy.md"
RUN_BY = {
    "README.md": "test_readme.py",
    "docs/api.md": "test_pages.py",
    "docs/full-recompute.md": "test_readme.py",
    "docs/quick-start.md": "test_quick_start.py",
    WRITING: "test_pages.py",
    "docs/budget.md": "test_pages.py",
}


def test_every_page_with_python_is_run_by_a_test() -> None:
    assert {page for page in pages() if snippets(page, "python")} == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert f'"{page}"' in (ROOT / "tests" / "docs" / test).read_text(encoding="utf-8")


def run(page: str, number: int, **names: Any) -> dict[str, Any]:
    """Run one of the page's snippets of Python with these names; return the names that there are then."""
    exec(compile(snippets(page, "python")[number], page, "exec"), names)
    return names


def test_python_on_the_page_of_the_api(tmp_path, monkeypatch, capsys) -> None:
    """The first snippet plans, saves, traces and compares; the second keeps a log with one entry per forward."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    inputs = (torch.randn(4, 8, WIDTH),)
    names = run("docs/api.md", 0, model=Model(), inputs=inputs, loss_fn=lambda out: out.square().mean())
    assert sac.load_policy("./planned.yaml") == names["policy"]
    shown = capsys.readouterr().out
    assert "  selective  " in shown
    assert "Model under planned\n" in shown
    assert [line.split()[0] for line in shown.splitlines() if "×" in line] == ["none", "full", "selective", "planned"]
    names = run("docs/api.md", 1, torch=torch, sac=sac, log=[])
    model = nn.Sequential(names["Logged"](4, 4), nn.Tanh(), names["Logged"](4, 4), nn.Tanh())
    sac.apply(model, {"mode": "full", "blocks": ["0", "2"]})
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert names["log"] == [(2, 4), (2, 4)]


def test_python_on_budgets() -> None:
    names = run("docs/budget.md", 0, sac=sac, model=Stack(), inputs=(torch.randn(4, 32, 16),))
    assert sac.load_policy(names["policy"]).rules


def test_python_on_writing_a_policy() -> None:
    for number in range(len(snippets(WRITING, "python"))):
        names = run(WRITING, number, model=Model())
        assert next(regions_of(names["model"]), None) is not None


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", text_of("README.md")))
    assert linked == {path.name for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text_of(page)):
        if target.startswith("http"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in {_anchor(head) for head in re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M)}, anchor


def _anchor(heading: str) -> str:
    """What a heading is linked by, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [page for page in pages() if page.startswith("docs/")])
def test_paths_are_there(page: str) -> None:
    for path in re.findall(r"`((?:tests|scripts|policies|sac)/[\w./-]+)", text_of(page)):
        assert path == "sac/v1" or (ROOT / path).exists(), path


def test_models_in_commands_are_shipped() -> None:
    named = [name for page in pages() for name in re.findall(r"--model hf:([^\s`]+)", text_of(page))]
    missing = {name for name in named if name != "config.json" and not (ROOT / config_path(name)).exists()}
    assert len(named) > 5
    assert missing == set()


def test_there_are_twelve_promises() -> None:
    told = rows("docs/promises.md", "| promise")
    assert [cells[0] for cells in told] == [str(number) for number in range(1, 13)]
    for cells in told:  # the first file that is named is that of the promise
        assert re.match(rf"`tests/promises/test_{int(cells[0]):02}_\w+\.py`", cells[-1]), cells[0]


@pytest.mark.parametrize("page", [page for page in pages() if snippets(page, "yaml")])
def test_yaml_is_what_it_is_said_to_be(page: str) -> None:
    for snippet in snippets(page, "yaml"):
        value = yaml.safe_load(snippet)
        if "schema" in value:
            assert sac.load_policy(value).name == value["name"]
        else:
            assert parse_config(value["activation_checkpointing"]).mode != "none"


@pytest.mark.parametrize(
    ("head", "names"),
    [("key of a policy", POLICY_KEYS), ("key of a rule", RULE_KEYS), ("save-set", tuple(SAVE_SETS))],
    ids=["policy", "rule", "save-sets"],
)
def test_tables_of_keys_are_complete(head: str, names: tuple[str, ...]) -> None:
    assert [cells[0].strip("`") for cells in rows(WRITING, head)] == list(names)


def test_the_first_policy_uses_every_key() -> None:
    policy = yaml.safe_load(snippets(WRITING, "yaml")[0])
    assert set(policy) == set(POLICY_KEYS)
    assert {key for rule in policy["rules"] for key in rule} == set(RULE_KEYS)


def test_versions_of_the_comparison_are_those_that_tests_run_with() -> None:
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "tests/stacks/no_deps.txt").read_text()
    versions = re.findall(r"(\w+) (\d+\.\d+\.\d+)", sections("docs/evidence.md")["Comparison with other systems"])
    assert len(versions) >= 5
    for name, version in versions:
        assert re.search(rf"^{name}=={re.escape(version)}", pinned, flags=re.MULTILINE), name
