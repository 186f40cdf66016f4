"""What every test needs of the process, and how the tests are dealt out to several processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import re
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# On a loaded machine an example takes as long as it takes; and a run is the same run everywhere.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("any machine")

ROOT = Path(__file__).parents[1]
OWN_CODE = (f"{ROOT / 'sac'}/", f"{ROOT / 'tests'}/")
RANKS = "tests/support/ranks.py"
IMPORT = re.compile(r"^\s*(?:from|import) (tests[\w.]*)(?: import ([\w, ]+))?", re.MULTILINE)


@pytest.fixture(autouse=True)
def random_state_is_left_alone() -> Iterator[None]:
    """Begin each test from one random state, and give the process its own back."""
    before = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(before)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Fail if a thread still runs code of this repository: it could change the random state of tests that follow.

    Threads of torch's own pools stay.
    """
    yield
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            files = {one.f_code.co_filename for one, _ in traceback.walk_stack(frame)}
            assert not [file for file in files if file.startswith(OWN_CODE)], files


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on stderr depends on how long a command takes: progress is shown after seconds."""
    monkeypatch.setattr("sac.tools.commands.PROGRESS_EVERY_S", 3600.0)


@pytest.fixture(scope="session", autouse=True)
def first_step_is_behind() -> None:
    """torch 2.13 keeps some tensors of the first step that a dispatch mode sees in a process, with or without us."""
    from tests.support.blocks import llama_stack, tokens
    from tests.support.process import prepare
    from tests.support.recording import backward_ops
    from tests.support.training import built

    prepare()
    backward_ops(built(llama_stack), tokens())


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_frozen(first_step_is_behind: None) -> None:
    """Collections of garbage are of what the tests of this file make: reports of tests are a million objects too."""
    gc.collect()
    gc.freeze()


class Logged(logging.Handler):
    """What has been logged. pytest's own plugin puts a handler on each of torch's loggers, six times in every test."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.emit = self.records.append

    @contextlib.contextmanager
    def at_level(self, level: int | str, logger: str) -> Iterator[None]:
        """Let a logger take note from this level on."""
        named = logging.getLogger(logger)
        before = named.level
        named.setLevel(level)
        try:
            yield
        finally:
            named.setLevel(before)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def caplog() -> Iterator[Logged]:
    """What loggers hand on to the root while a test runs."""
    handler = Logged()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Where sums may be formed in another order: rounding is far below any mistake then."""
    from tests.support.training import new_tensors_in

    with new_tensors_in(torch.float64):
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report which tests did not run."""
    if "not gpu" in terminalreporter.config.option.markexpr:
        terminalreporter.write_line("not run: tests that need a CUDA device (scripts/test -m gpu)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all files of tests without the cycle collector: there is next to nothing that it could free."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, however the tests were chosen."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


# Note [How tests are dealt out]
# A file is one unit of work: what its tests share (a fixture of the module, outcomes that are kept) is made once. All
# files that use process groups are one unit together, so that there is one pool of ranks per world size in the whole
# run: ranks take seconds to start, and stay. While that worker waits for its ranks, the other one has a processor.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files, those with ranks as one; nothing is said of a run without `--dist` or with another kind of it."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return RANKS if uses_ranks(file) else file

    return ByFile(config, log)


@functools.cache
def uses_ranks(file: str) -> bool:
    """Whether a file of tests imports the pool of ranks, itself or by what it imports."""
    return RANKS in imported_by(file)


@functools.cache
def imported_by(file: str) -> frozenset[str]:
    """The files below tests/ that a file imports, and those that they do."""
    seen: set[str] = set()
    left = [file]
    while left:
        source = (ROOT / left.pop()).read_text(encoding="utf-8")
        for module, names in IMPORT.findall(source):
            path = module.replace(".", "/")
            for found in (path, *(f"{path}/{name.strip()}" for name in names.split(","))):
                if (ROOT / f"{found}.py").is_file() and f"{found}.py" not in seen:
                    seen.add(f"{found}.py")
                    left.append(f"{found}.py")
    return frozenset(seen)
