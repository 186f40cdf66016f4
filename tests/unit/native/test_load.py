"""A library that fits is loaded once; whatever is wrong with one keeps it off, with a reason, and ends no process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from sac.native import load, places, trial
from sac.native.load import decision, library, status
from sac.native.target import this_target
from tests.support.native_libraries import needs_c, small_library
from tests.unit.native.conftest import put

ON = f"native: on, built for torch {torch.__version__}"
AGAIN = "`sac build --force` builds it again"


# -- On


@needs_c
def test_a_library_that_fits_is_on(good_library: Path, library_file: Path) -> None:
    put(good_library, library_file)
    assert status() == ON
    assert library() is not None
    assert decision().file == library_file


@needs_c
def test_the_decision_is_made_once(good_library: Path, library_file: Path) -> None:
    put(good_library, library_file)
    first = library()
    library_file.unlink()
    assert library() is first


@needs_c
def test_threads_that_ask_at_once_get_the_same(
    good_library: Path, library_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(good_library, library_file)
    made = []
    decide = load.decide
    monkeypatch.setattr(load, "decide", lambda: made.append(decide()) or made[-1])
    threads = [threading.Thread(target=library) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


@needs_c
def test_a_fork_keeps_the_decision(good_library: Path, library_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(good_library, library_file)
    mine = library()
    library_file.unlink()
    assert in_fork(lambda: library() is mine and status() == ON)


def test_a_fork_while_another_thread_decides_can_ask() -> None:
    with load._locks.setdefault(os.getpid(), threading.Lock()):
        assert in_fork(lambda: library() is None)


@needs_c
def test_a_library_inside_the_package_goes_first(
    good_library: Path, library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(good_library, library_file)
    inside = tmp_path / "package"
    inside.mkdir()
    for module in (load, trial):
        monkeypatch.setattr(module, "package_directory", lambda: inside)
    put(good_library, inside / library_file.name).chmod(0o664)  # as the Python files next to it may be
    assert status() == ON
    assert decision().file == inside / library_file.name
    assert [path.name for path in inside.iterdir()] == [library_file.name]  # its marker lies in the cache
    assert len(list(library_file.parent.glob("*.tested"))) == 1


@needs_c
def test_if_the_one_inside_the_package_does_not_work_the_other_is_used(
    good_library: Path, library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(good_library, library_file)
    inside = tmp_path / "package"
    inside.mkdir()
    for module in (load, trial):
        monkeypatch.setattr(module, "package_directory", lambda: inside)
    (inside / library_file.name).write_text("damaged")
    assert status() == ON
    assert decision().file == library_file


# -- Off


@pytest.mark.parametrize("value", ["0", "off", "False", "no"])
def test_switched_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAC_NATIVE", value)
    assert status() == f"native: off, SAC_NATIVE={value}"
    assert library() is None


def test_nothing_is_there(cache: Path) -> None:
    assert status() == "native: off, not built (run `sac build`)"
    cache.rmdir()
    load._decided = None
    assert status() == "native: off, not built (run `sac build`)"


def test_a_process_that_cannot_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert status() == "native: off, Windows is not supported"


def test_built_for_another_torch(cache: Path) -> None:
    words = this_target().file_name.split("-")
    for torch_version, digest in (("2.10.0", "0.so"), ("2.11.0", words[-1])):
        (cache / "-".join([words[0], torch_version, *words[2:-1], digest])).touch()
    assert status().startswith("native: off, built for torch 2.1")
    assert status().endswith(f", and this is torch {torch.__version__} (run `sac build`)")


def test_of_several_that_do_not_fit_the_most_similar_is_named(cache: Path) -> None:
    words = this_target().file_name.split("-")
    (cache / "-".join([words[0], "2.11.0", *words[2:]])).touch()
    (cache / "-".join([*words[:-1], "0.so"])).touch()
    assert status() == "native: off, built from other sources of sac (run `sac build`)"


@needs_c
@pytest.mark.parametrize("of", ["directory", "file"])
def test_writable_by_others(of: str, good_library: Path, library_file: Path) -> None:
    put(good_library, library_file)
    path = library_file if of == "file" else library_file.parent
    path.chmod(0o775)
    assert status() == f"native: off, {path} is writable by other users (chmod go-w {path})"


@needs_c
def test_of_another_user(good_library: Path, library_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(good_library, library_file)
    monkeypatch.setattr(places, "is_trusted_owner", lambda user: False)
    assert status() == f"native: off, {library_file.parent} belongs to another user (id {os.getuid()})"


def test_not_readable(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(library: Path, digest: str) -> str:
        raise PermissionError(13, "Permission denied", str(library))

    library_file.touch(0o644)
    monkeypatch.setattr(load, "outcome", denied)
    assert status() == f"native: off, {library_file} cannot be read: Permission denied"


def test_sources_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied() -> None:
        raise PermissionError(13, "Permission denied", "/some/module.cpp")

    monkeypatch.setattr(load, "this_target", denied)
    assert status() == "native: off, /some/module.cpp cannot be read: Permission denied"


@needs_c
def test_truncated(good_library: Path, library_file: Path) -> None:
    put(good_library, library_file)
    content = library_file.read_bytes()
    library_file.write_bytes(content[: len(content) // 2])
    reason = f"native: off, its self-test failed: ImportError: {library_file}: "
    assert status().startswith((reason, "native: off, its self-test died of SIG"))
    assert status().endswith(f" ({library_file}; {AGAIN})")


@pytest.mark.parametrize(
    ("content", "error"), [("", "file too short"), ("no library\n" * 100, "invalid ELF header")], ids=["empty", "text"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="the texts are those of glibc")
def test_no_library_at_all(content: str, error: str, library_file: Path) -> None:
    library_file.write_text(content)
    library_file.chmod(0o644)
    failed = f"its self-test failed: ImportError: {library_file}: {error}"
    assert status() == f"native: off, {failed} ({library_file}; {AGAIN})"


@needs_c
@pytest.mark.parametrize(
    ("defines", "reason"),
    [
        ({"BODY": "abort()"}, "its self-test died of SIGABRT"),
        ({"BODY": "*(volatile int*)0 = 0"}, "its self-test died of SIGSEGV"),
        ({"INIT": "abort()"}, "its self-test died of SIGABRT"),
        ({"BODY": "exit(0)"}, "its self-test failed: exit status 0"),
        (
            {"BODY": 'PyErr_SetString(PyExc_RuntimeError, "2 + 2 is 5"); return NULL'},
            "its self-test failed: RuntimeError: 2 + 2 is 5",
        ),
        ({"SOURCES": '"others"'}, "its self-test failed: ImportError: it was compiled from other sources"),
        ({"TORCH": '"1.0.0"'}, "its self-test failed: ImportError: it was compiled for torch 1.0.0"),
        ({"VERSION": "0x03070100"}, "its self-test failed: ImportError: it was compiled for Python 3.7"),
    ],
    ids=["aborts", "crashes", "import aborts", "exits", "fails", "other sources", "other torch", "other Python"],
)
def test_self_test_fails(defines: dict[str, str], reason: str, library_file: Path) -> None:
    small_library(library_file, **defines)
    assert status() == f"native: off, {reason} ({library_file}; {AGAIN})"
    assert library() is None


@needs_c
def test_an_engine_that_cannot_be_used_here(library_file: Path) -> None:
    small_library(library_file, REASON='"another library has taken the place"')
    assert status() == "native: off, another library has taken the place"


@needs_c
def test_self_test_hangs(library_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_library(library_file, BODY="sleep(60)")
    monkeypatch.setattr(trial, "TIMEOUT_S", 1.0)
    assert status() == f"native: off, its self-test did not end within 1 s ({library_file}; {AGAIN})"


@needs_c
def test_a_library_that_works_only_in_the_child(good_library: Path, library_file: Path) -> None:
    put(good_library, library_file)
    assert trial.outcome(library_file, this_target().digest) == ""
    text = "damaged on the way\nbetween the two"

    def damaged(path: str) -> None:
        raise ImportError(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "load_file", damaged)
        assert status() == f"native: off, {library_file} cannot be loaded: between the two"


@pytest.mark.slow
def test_import_of_sac_decides_nothing() -> None:
    program = "import sac, sac.native.load as load; print(load._decided)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert run.stdout.split() == ["None"], run.stderr


def in_fork(holds) -> bool:
    """Whether something holds in a forked process, which ends right after."""
    child = os.fork()
    if not child:
        os._exit(0 if holds() else 1)
    return os.waitpid(child, 0)[1] == 0
