"""docs/api.md: its snippet plans, saves, traces and compares."""

from __future__ import annotations

import torch

import sac
from tests.docs.pages import snippets
from tests.docs.snippet_models import WIDTH, Model


def test_the_snippet_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"model": Model(), "inputs": (torch.randn(4, 8, WIDTH),), "loss_fn": lambda out: out.square().mean()}
    [snippet] = snippets("docs/api.md", "python")
    exec(compile(snippet, "docs/api.md", "exec"), names)
    assert sac.load_policy("./planned.yaml") == names["policy"]
    shown = capsys.readouterr().out
    assert "  selective  " in shown
    assert "Model under planned\n" in shown
    assert [line.split()[0] for line in shown.splitlines() if "×" in line] == ["none", "full", "selective", "planned"]
