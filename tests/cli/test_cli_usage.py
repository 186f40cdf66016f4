"""The command as a tool: errors of usage, help, paths with ``~``, what others log, tables in a pipe."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from sac.errors import SacWarning
from sac.tools import commands
from sac.tools.cli import main
from sac.tools.comparison import OPTIMIZERS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", ["", "comapre", "check --jsn", "trace --mode selective", "trace", "check a b"])
def test_wrong_usage_ends_with_two(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    streams = capsys.readouterr()
    assert (ended.value.code, streams.out) == (2, "")
    assert streams.err.startswith("usage: sac")


@pytest.mark.parametrize("command", [[], ["trace"], ["compare"], ["plan"]])
def test_help_imports_neither_torch_nor_yaml(command: list[str]) -> None:
    program = f"""
        import sys
        from sac.tools.cli import main
        try:
            main([*{command}, "--help"])
        except SystemExit as ended:
            print(ended.code, {{"torch", "yaml", "numpy"}} & sys.modules.keys())
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout.splitlines()[-1] == "0 set()"


def test_help_has_the_exit_codes_and_the_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    for command, text in (([], "130  interrupted (Ctrl-C)"), (["compare"], ", ".join(OPTIMIZERS))):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        assert text in capsys.readouterr().out


def test_what_others_log_and_warn_of_is_held_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    level = logging.getLogger().level
    shown = []

    def noisy(arguments: object) -> int:
        shown.extend(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in ("other", "torch.x", "sac.x"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            warnings.warn("ours", SacWarning, stacklevel=1)
        shown.extend(str(one.message) for one in caught)
        return 0

    monkeypatch.setattr(commands, "check", noisy)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["check", "x"]) == 0
    assert shown == [False, False, True, "ours"]
    assert logging.getLogger().level == level


def test_warnings_of_sac_have_no_line_of_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warns(arguments: object) -> int:
        warnings.warn("no rule of it matches anything", SacWarning, stacklevel=1)
        warnings.warn("of others", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(commands, "check", warns)
    with pytest.warns(UserWarning, match="of others") as others:
        assert main(["check", "x"]) == 0
    assert capsys.readouterr().err == "warning: no rule of it matches anything\n"
    assert len(others) == 1
