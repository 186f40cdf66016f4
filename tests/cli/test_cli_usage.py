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
from sac.tools import cli
from sac.tools.cli import main
from sac.tools.comparison import OPTIMIZERS

ROOT = Path(__file__).parents[2]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "comapre", "--model", "x") == (
        'sac: there is no command "comapre"\n'
        "    did you mean: compare\n"
        "    legal: check, trace, compare, plan\n"
        "    fix: `sac --help` says what each does\n"
    )


def test_unknown_flags_are_reported_all_at_once_and_before_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    legal = "    legal: --help, --verbose, --json\n    fix: `sac check --help` says what each does\n"
    assert refusal(capsys, "check", "--jsn", "--verbos=1", "--loud") == (
        f"sac check: there is no --jsn\n    did you mean: --json\n{legal}"
        f"sac check: there is no --verbos\n    did you mean: --verbose\n{legal}sac check: there is no --loud\n{legal}"
    )
    assert "there is no --mode\n    did you mean: --model\n" in refusal(capsys, "trace", "--mode", "selective")


def test_a_missing_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "trace") == (
        "sac trace: the following arguments are required: --model\n    fix: `sac trace --help` lists the arguments\n"
    )


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

    monkeypatch.setitem(cli._COMMANDS, "check", noisy)
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

    monkeypatch.setitem(cli._COMMANDS, "check", warns)
    with pytest.warns(UserWarning, match="of others") as others:
        assert main(["check", "x"]) == 0
    assert capsys.readouterr().err == "warning: no rule of it matches anything\n"
    assert len(others) == 1


def test_arguments_that_a_command_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "check", "llama", "gpt2", "my policy") == (
        "sac check: it takes no argument gpt2 'my policy'\n    fix: `sac check --help` lists the arguments\n"
    )
