"""`sac build`: what it compiles, when it compiles, and what it says if it cannot."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sac.native import build as module
from sac.native import load, places, trial
from sac.native.build import BuildError, Progress, arguments, build, find_compiler
from sac.native.target import SOURCES, this_target
from sac.tools.cli import main
from tests.support.native_libraries import compiled_files, compiler_that_runs, needs_c, small_library
from tests.unit.native.conftest import put

ROOT = Path(__file__).parents[3]
ON = f"native: on, built for torch {torch.__version__}"
INSTALL = "apt install g++, dnf install gcc-c++ or conda install gxx; on macOS xcode-select --install"


@pytest.fixture
def compiler(good_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler whose result is a library that works."""
    return use(compiler_that_runs(tmp_path, f"cp {good_library} $out"), monkeypatch)


def use(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


def refusal(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails says on stderr."""
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert out == ""
    return err


# -- What is printed, and what lies there afterwards


@needs_c
def test_build_and_build_again(
    compiler: Path, library_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build"]) == 0
    assert capsys.readouterr() == (
        f"built: {library_file}\n{ON}\n",
        f"compiling for torch {torch.__version__} with {compiler}, which takes about a minute\n",
    )
    assert main(["build"]) == 0
    assert capsys.readouterr() == (f"built already: {library_file}\n{ON}\n", "")
    assert len(compiled_files(tmp_path)) == 1


@needs_c
def test_force(compiler: Path, library_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(Progress())
    assert main(["build", "--force"]) == 0
    assert capsys.readouterr().out == f"built: {library_file}\n{ON}\n"
    assert len(compiled_files(tmp_path)) == 2
    assert len(list(library_file.parent.glob("*.tested"))) == 1


@needs_c
def test_one_that_was_installed_with_sac_is_enough(
    good_library: Path, compiler: Path, library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    inside = tmp_path / "package"
    inside.mkdir()
    for owner in (module, load, trial):
        monkeypatch.setattr(owner, "package_directory", lambda: inside)
    put(good_library, inside / library_file.name)
    assert main(["build"]) == 0
    assert capsys.readouterr() == (f"built already: {inside / library_file.name}\n{ON}\n", "")
    assert compiled_files(tmp_path) == []
    assert build(Progress(), force=True).file == library_file


@needs_c
def test_check(compiler: Path, library_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--check"]) == 1
    assert capsys.readouterr() == ("native: off, not built (run `sac build`)\n", "")
    assert compiled_files(tmp_path) == []
    build(Progress())
    load._decided = None
    assert main(["build", "--check"]) == 0
    assert capsys.readouterr() == (f"{ON}\n{library_file}\n", "")


def test_check_and_force_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["build", "--check", "--force"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "sac build: argument --force: not allowed with argument --check\n"
        "    fix: `sac build --help` lists the arguments\n"
    )


@needs_c
def test_it_builds_although_the_library_is_switched_off(
    compiler: Path, library_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SAC_NATIVE", "0")
    assert main(["build"]) == 0
    assert capsys.readouterr().out == f"built: {library_file}\nnative: off, SAC_NATIVE=0\n"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
@needs_c
def test_only_the_user_may_write_it(umask: int, compiler: Path, library_file: Path) -> None:
    library_file.parent.rmdir()
    before = os.umask(umask)
    try:
        build(Progress())
    finally:
        os.umask(before)
    assert stat.S_IMODE(library_file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(library_file.stat().st_mode) == 0o644
    assert load.status() == ON


@needs_c
def test_nothing_else_is_left(compiler: Path, library_file: Path) -> None:
    build(Progress())
    endings = sorted(path.name.rpartition(".")[2] for path in library_file.parent.iterdir())
    assert endings == ["lock", "so", "tested"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr() == ("sac 0.1.0\nnative: off, not built (run `sac build`)\n", "")


# -- The command of the compiler


def test_the_compiler_is_given_what_torch_gives_it() -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    words = arguments(this_target(), "out.so")
    text = " ".join(words)
    assert words[:5] == ["-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared"]
    assert f'-DSAC_SOURCES="{this_target().digest}"' in words
    assert all(f"-isystem {path}" in text for path in include_paths())
    assert all(f"-L{path}" in words for path in library_paths())
    assert f"{SOURCES / 'module.cpp'} -o out.so" in text
    assert words[-4:] == ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def test_without_setuptools_the_paths_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)  # its import fails
    assert module._torch_paths() == (include_paths(), library_paths())


def test_the_compiler_is_that_of_cxx_or_the_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("clang++", "g++", "ccache"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() == ["g++"]
    monkeypatch.setenv("CXX", "ccache clang++")
    assert find_compiler() == ["ccache", "clang++"]


# -- Many processes


@needs_c
def test_of_processes_that_build_at_once_one_compiles(
    good_library: Path, library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(compiler_that_runs(tmp_path, f"sleep 0.5; cp {good_library} $out"), monkeypatch)
    children = []
    for number in range(3):
        if not (child := os.fork()):
            try:  # a child that raises would run the rest of the suite
                built = build(Progress(waiting=(tmp_path / f"waited{number}").touch), force=True)
                os._exit(10 + built.compiled if built.file == library_file else 1)
            finally:
                os._exit(2)
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes == [10, 10, 11]
    assert len(compiled_files(tmp_path)) == 1
    assert len(list(tmp_path.glob("waited*"))) == 2


def test_waiting_is_said(library_file: Path, compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fcntl

    with library_file.with_suffix(".lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_PATIENCE_S", 0.2)
            assert main(["build"]) == 0
    assert capsys.readouterr().err.startswith("waiting for another process that compiles\ncompiling for torch ")


@needs_c
def test_a_compiler_that_was_killed_leaves_no_library(
    good_library: Path, library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(compiler_that_runs(tmp_path, "echo half >$out; kill -9 $$"), monkeypatch)
    with pytest.raises(BuildError, match="ended with status -9"):
        build(Progress())
    assert not library_file.exists()
    assert list(library_file.parent.glob("*.tmp")) == []


def test_an_interrupted_build_ends_the_compiler(
    library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = tmp_path / "number"
    use(compiler_that_runs(tmp_path, f"echo $$ > {number}; sleep 300"), monkeypatch)

    def interrupt(seconds: float) -> None:
        if number.exists() and number.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(Progress(elapsed=interrupt))
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)
    assert [path.suffix for path in library_file.parent.iterdir()] == [".lock"]


@needs_c
def test_leftovers_of_a_killed_build_are_removed(compiler: Path, library_file: Path) -> None:
    old, new = (library_file.with_name(f"{module._temporary_prefix(library_file)}{name}.tmp") for name in "ab")
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    build(Progress())
    assert (old.exists(), new.exists()) == (False, True)


# -- A library that does not work


@needs_c
def test_the_self_test_fails(library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    crashing = small_library(tmp_path / "crashing.so", BODY="abort()")
    use(compiler_that_runs(tmp_path, f"cp {crashing} $out"), monkeypatch)
    assert main(["build"]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"{library_file}: its self-test died of SIGABRT",
        "    fix: sac works without the library",
    ]
    assert refusal(["build"], capsys) == (
        f"{library_file}: its self-test died of SIGABRT\n    fix: sac build --force builds it again\n"
    )
    assert len(compiled_files(tmp_path)) == 1


@needs_c
def test_a_failure_of_the_past_is_looked_into(good_library: Path, library_file: Path, compiler: Path) -> None:
    put(good_library, library_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sac.native.trial.TIMEOUT_S", 0.001)  # as on a machine that was busy
        assert load.status().startswith("native: off, its self-test did not end")
    assert not build(Progress()).compiled
    load._decided = None
    assert load.status() == ON


# -- What is missing


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refusal(["build"], capsys) == (
        "sac build: no C++ compiler: none of c++, g++, clang++ is on PATH\n"
        f"    fix: install one ({INSTALL}), or name yours: CXX=… sac build\n"
    )


def test_the_named_compiler_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert refusal(["build"], capsys) == (
        "sac build: there is no program no-such-compiler, which CXX names\n    fix: name a C++ compiler, or unset CXX\n"
    )


def test_an_old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho \"error: unrecognized option '-std=c++20'\"\nexit 1\n")
    old.chmod(0o755)
    use(old, monkeypatch)
    assert refusal(["build"], capsys) == (
        f"sac build: {old} does not compile C++20: error: unrecognized option '-std=c++20'\n"
        f"    fix: install g++ 11, clang 14 or newer ({INSTALL}), or name another one: CXX=… sac build\n"
    )


def test_no_headers_of_python(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_python_includes", lambda: [str(tmp_path)])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert refusal(["build"], capsys) == (
        f"sac build: the headers of Python are missing: no Python.h in {tmp_path}\n"
        f"    fix: apt install python{version}-dev (python3-dev for the system's Python) or dnf install python3-devel\n"
    )


def test_no_headers_of_torch(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_torch_paths", lambda: ([str(tmp_path)], []))
    assert refusal(["build"], capsys) == (
        f"sac build: the headers of torch are missing: no ATen/ATen.h in {tmp_path}\n"
        "    fix: install torch from its wheel, which has them (pip install torch)\n"
    )


def test_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "SOURCES", tmp_path)
    assert refusal(["build"], capsys) == (
        f"sac build: the sources are missing: {tmp_path} has no module.cpp\n    fix: install sac again\n"
    )


def test_windows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "unsupported", lambda: "Windows is not supported")
    assert refusal(["build"], capsys) == "sac build: no library can be built: Windows is not supported\n"


def test_an_error_of_the_compiler(
    library_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = use(compiler_that_runs(tmp_path, "seq -f 'line %g' 20; echo error >&2; exit 3"), monkeypatch)
    assert main(["build"]) == 1
    log = library_file.with_suffix(".log")
    lines = [*(f"line {number}" for number in range(1, 21)), "error"]
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"sac build: {compiler} ended with status 3; the end of its output:",
        *(f"    | {line}" for line in lines[-12:]),
        f"    fix: the whole output is in {log}; sac works without the library",
    ]
    assert log.read_text().splitlines() == lines


# -- The directory


def test_a_directory_that_others_may_write_to(compiler: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.chmod(0o775)
    assert refusal(["build"], capsys) == (
        f"sac build: {cache} is writable by other users (chmod go-w {cache})\n"
        "    fix: name another directory: SAC_CACHE_DIR=… sac build\n"
    )


@needs_c
def test_a_file_that_others_may_write_to(
    good_library: Path, compiler: Path, library_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(good_library, library_file).chmod(0o666)
    assert refusal(["build"], capsys) == (
        f"sac build: {library_file} is writable by other users (chmod go-w {library_file})\n"
        "    fix: build it again: sac build --force\n"
    )
    assert main(["build", "--force"]) == 0


def test_a_directory_of_another_user(
    compiler: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "is_trusted_owner", lambda user: False)
    assert refusal(["build"], capsys) == (
        f"sac build: {cache} belongs to another user (id {os.getuid()})\n"
        "    fix: name another directory: SAC_CACHE_DIR=… sac build\n"
    )


def test_a_directory_that_cannot_be_made(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAC_CACHE_DIR", str(tmp_path / "file"))
    assert refusal(["build"], capsys) == (
        f"sac build: {tmp_path / 'file' / 'sac' / 'native'} cannot be written: Not a directory\n"
        "    fix: name a directory of yours: SAC_CACHE_DIR=… sac build\n"
    )


def test_a_directory_that_is_read_only(
    compiler: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(**options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(module.tempfile, "mkstemp", denied)
    assert main(["build"]) == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"sac build: {cache} cannot be written: Read-only file system",
        "    fix: name a directory of yours: SAC_CACHE_DIR=… sac build",
    ]


def test_no_directory(compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "cache_directory", lambda: None)
    assert refusal(["build"], capsys) == (
        "sac build: there is no directory for the library: the user has no home\n"
        "    fix: name one: SAC_CACHE_DIR=… sac build\n"
    )


# -- The real one


@pytest.mark.slow
def test_the_real_library_is_compiled_and_passes_its_self_test(tmp_path: Path) -> None:
    try:
        find_compiler()
        module._check_headers()
    except BuildError as missing:
        pytest.skip(str(missing))
    environment = {**os.environ, "SAC_CACHE_DIR": str(tmp_path / "real"), "PYTHONPATH": str(ROOT)}
    for command in (["build"], ["build", "--check"]):
        run = subprocess.run(
            [sys.executable, "-m", "sac.tools.cli", *command], capture_output=True, text=True, env=environment
        )
        assert run.returncode == 0, run.stderr
        assert ON in run.stdout.splitlines()
