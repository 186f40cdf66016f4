"""A cache directory of its own for each test, and children that start in a moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sac.native import load, trial
from sac.native.load import library
from sac.native.target import MODULE, this_target
from tests.support.native_libraries import program_without_torch, small_library

# Files with such names test the library that this machine has.
OF_THIS_MACHINE = ("test_engine", "test_state", "test_walk", "test_watched")


@pytest.fixture(autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of libraries, which is empty; no decision has been made. Both are only this test's."""
    if request.path.name.startswith(OF_THIS_MACHINE):
        yield tmp_path
        return
    for name in ("SAC_NATIVE", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SAC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "_decided", None)
    loaded = sys.modules.get(MODULE)
    directory = tmp_path / "cache" / "sac" / "native"
    directory.mkdir(parents=True, mode=0o700)
    yield directory
    if loaded is None:
        sys.modules.pop(MODULE, None)
    else:
        sys.modules[MODULE] = loaded


@pytest.fixture(autouse=True)
def quick_children(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children run the self-test of small libraries, without torch. Returns the program."""
    if request.path.name.startswith(OF_THIS_MACHINE):
        return tmp_path
    program = program_without_torch(tmp_path / "stub")
    monkeypatch.setattr(trial, "PROGRAM", program)
    return program


@pytest.fixture
def switch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Turn the library on and off in the modules that the test's file lists as ``SWITCHED``."""
    native = library()

    def to(is_on: bool) -> None:
        for module in request.module.SWITCHED:
            monkeypatch.setattr(module, "library", lambda: native if is_on else None)

    return to


@pytest.fixture(scope="session")
def good_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_library(tmp_path_factory.mktemp("good") / "library.so")


@pytest.fixture
def library_file(cache: Path) -> Path:
    """Where a library for this process has to lie."""
    return cache / this_target().file_name


def put(source: Path, file: Path) -> Path:
    """Put a copy of a library where there is none."""
    assert not file.exists()  # if it is loaded, writing to it would change the code of this process
    file.write_bytes(source.read_bytes())
    os.chmod(file, 0o644)
    return file
