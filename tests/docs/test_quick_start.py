"""docs/quick-start.md: every snippet of it runs, and trains with regions on."""

from __future__ import annotations

import pytest

from tests.docs.pages import fenced, sections
from tests.docs.quick_start import PAGE, SECTIONS, run_section, skip_without
from tests.support.machine import vectorised_inductor
from tests.support.ranks import run_ranks

ON = "activation checkpointing: selective,"


def test_every_section_is_run() -> None:
    assert list(sections(PAGE)) == list(SECTIONS)


@pytest.mark.filterwarnings("ignore")  # of the stacks themselves
@pytest.mark.parametrize(
    "heading",
    [pytest.param(one, marks=vectorised_inductor if one == "torch.compile" else ()) for one in SECTIONS],
)
def test_section(heading: str) -> None:
    _, packages, takes_ranks = SECTIONS[heading]
    skip_without(*packages)
    found = run_ranks(2, run_section, heading) if takes_ranks else [run_section(heading)]
    count = len(fenced(sections(PAGE)[heading], "python"))
    assert count > 0
    for said in found:
        assert len(said) == count
        assert all(line.startswith(ON) for line in said), said
