"""docs/api.md: its first snippet plans, saves, traces and compares; the second keeps a log."""

from __future__ import annotations

import torch

import sac
from tests.docs.pages import snippets
from tests.docs.snippet_models import WIDTH, Model


def test_the_snippet_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"model": Model(), "inputs": (torch.randn(4, 8, WIDTH),), "loss_fn": lambda out: out.square().mean()}
    snippet, _ = snippets("docs/api.md", "python")
    exec(compile(snippet, "docs/api.md", "exec"), names)
    assert sac.load_policy("./planned.yaml") == names["policy"]
    shown = capsys.readouterr().out
    assert "  selective  " in shown
    assert "Model under planned\n" in shown
    assert [line.split()[0] for line in shown.splitlines() if "×" in line] == ["none", "full", "selective", "planned"]


def test_a_log_has_one_entry_per_forward():
    names = {"torch": torch, "sac": sac, "log": []}
    exec(compile(snippets("docs/api.md", "python")[1], "docs/api.md", "exec"), names)
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([names["Logged"](4, 4), names["Logged"](4, 4)])
    sac.apply(model, {"mode": "full", "blocks": ["blocks.*"]})
    x = torch.ones(2, 4, requires_grad=True)
    for block in model.blocks:
        x = block(x).sin()
    x.sum().backward()
    assert names["log"] == [(2, 4), (2, 4)]
