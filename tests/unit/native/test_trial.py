"""A library is tried once: the outcome is remembered by its content, and where it cannot be, each process tries."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

import pytest

from sac.native import load, trial
from sac.native.load import status
from sac.native.target import this_target
from sac.native.trial import outcome, turn
from tests.support.native_libraries import needs_c, small_library
from tests.unit.native.conftest import put

pytestmark = needs_c


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries for which a child was started."""
    found: list[Path] = []
    run = trial.try_in_child

    def counted(library: Path, digest: str) -> str:
        found.append(library)
        return run(library, digest)

    monkeypatch.setattr(trial, "try_in_child", counted)
    return found


def ask_again() -> str:
    load._decided = None
    return status()


def marker_of(file: Path) -> Path:
    (marker,) = file.parent.glob(f"{file.name}.*.tested")
    return marker


def test_a_success_is_remembered(good_library: Path, library_file: Path, tries: list[Path]) -> None:
    put(good_library, library_file)
    assert ask_again() == ask_again()
    assert tries == [library_file]
    assert json.loads(marker_of(library_file).read_text()) == {"failure": ""}


def test_a_failure_is_remembered(library_file: Path, tries: list[Path]) -> None:
    small_library(library_file, BODY="abort()")
    assert ask_again() == ask_again()
    assert tries == [library_file]
    assert json.loads(marker_of(library_file).read_text()) == {"failure": "its self-test died of SIGABRT"}


def test_other_content_is_tried_again(good_library: Path, library_file: Path, tries: list[Path]) -> None:
    put(good_library, library_file)
    assert ask_again().startswith("native: on")
    times = library_file.stat()
    content = library_file.read_bytes()
    library_file.unlink()  # it is loaded: writing to it would change the code of this process
    library_file.write_bytes(content[:-1] + b"x")
    library_file.chmod(0o644)
    os.utime(library_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    ask_again()
    assert len(tries) == 2


def test_another_self_test_is_run(
    good_library: Path, library_file: Path, tries: list[Path], quick_children: Path
) -> None:
    put(good_library, library_file)
    ask_again()
    with quick_children.open("a") as program:
        program.write("raise SystemExit('a stricter one')\n")
    failed = f"its self-test failed: a stricter one ({library_file}; `sac build --force` builds it again)"
    assert ask_again() == f"native: off, {failed}"
    assert len(tries) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', '{"failure": 1}'])
def test_a_damaged_marker_counts_as_none(text: str, good_library: Path, library_file: Path, tries: list[Path]) -> None:
    put(good_library, library_file)
    ask_again()
    marker_of(library_file).write_text(text)
    assert ask_again().startswith("native: on")
    assert len(tries) == 2


def test_a_marker_that_others_may_write_counts_as_none(
    good_library: Path, library_file: Path, tries: list[Path]
) -> None:
    put(good_library, library_file)
    ask_again()
    marker_of(library_file).chmod(0o666)
    assert ask_again().startswith("native: on")
    assert len(tries) == 2


def test_a_read_only_cache_with_a_marker_is_not_written_to(
    good_library: Path, library_file: Path, tries: list[Path]
) -> None:
    put(good_library, library_file)
    ask_again()
    library_file.parent.chmod(0o555)
    before = {path.name: path.stat().st_mtime_ns for path in library_file.parent.iterdir()}
    assert ask_again().startswith("native: on")
    assert len(tries) == 1
    assert {path.name: path.stat().st_mtime_ns for path in library_file.parent.iterdir()} == before


def test_in_a_read_only_cache_without_a_marker_each_process_tries(
    good_library: Path, library_file: Path, tries: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(good_library, library_file)

    def denied(*arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(trial, "make_private", denied)  # called before the lock's file and the marker are written
    assert ask_again().startswith("native: on")
    assert ask_again().startswith("native: on")
    assert len(tries) == 2


def test_processes_that_find_no_marker_take_turns(
    good_library: Path, library_file: Path, tmp_path: Path, quick_children: Path
) -> None:
    put(good_library, library_file)
    log = tmp_path / "tries"
    with quick_children.open("a") as program:
        program.write(f"open({str(log)!r}, 'a').write('tried ')\n")
    children = []
    for _ in range(3):
        if not (child := os.fork()):
            os._exit(0 if outcome(library_file, this_target().digest) == "" else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert log.read_text() == "tried "


def test_without_an_interpreter_nothing_is_tried(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_file.touch(0o644)
    library_file.chmod(0o644)
    monkeypatch.setattr(sys, "executable", "")
    reason = "its self-test cannot run: this process does not know its Python interpreter"
    assert outcome(library_file, "") == reason
    assert list(library_file.parent.glob("*.tested")) == []  # that says nothing of the library


def test_an_interpreter_that_is_gone(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library_file.touch(0o644)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    missing = "[Errno 2] No such file or directory: '/no/such/python'"
    assert outcome(library_file, "") == f"its self-test cannot run: {missing}"
    assert list(library_file.parent.glob("*.tested")) == []


# -- Locks


def is_free(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_lock_that_nobody_holds_is_taken(tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):  # the second time, the file of the lock is there
        with turn(tmp_path / "lock", 0.0, lambda: told.append("waiting")):
            assert not is_free(tmp_path / "lock")
        assert is_free(tmp_path / "lock")
    assert told == []


def test_a_lock_that_is_held_for_too_long_is_passed_by(tmp_path: Path) -> None:
    told: list[str] = []
    with (tmp_path / "lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with turn(tmp_path / "lock", 0.2, lambda: told.append("waiting")):
            pass
    assert told == ["waiting"]


def test_the_lock_of_a_process_that_died_is_free(tmp_path: Path) -> None:
    if not (child := os.fork()):
        with turn(tmp_path / "lock", 0.0):
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    told: list[str] = []
    with turn(tmp_path / "lock", 0.0, lambda: told.append("waiting")):
        assert not is_free(tmp_path / "lock")
    assert told == []


def test_files_that_cannot_be_locked_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", unsupported)
        with turn(tmp_path / "lock", 60.0, lambda: told.append("waiting")):
            patch.undo()
            assert is_free(tmp_path / "lock")
    assert told == []
