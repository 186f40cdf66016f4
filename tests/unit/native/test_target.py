"""The name of a library's file holds everything that it depends on."""

from __future__ import annotations

import inspect
import struct
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sac.native import target as module
from sac.native.target import Target, elf_build_id, this_target, unsupported

HERE = Target("2.13.0+cpu", "cf30153c4c13", "68c42bb16d4a", "cpython_311", "linux_x86_64", "a0975cf9f754127f")


def test_file_name() -> None:
    name = "_sac_native-2.13.0+cpu-cf30153c4c13-68c42bb16d4a-cpython_311-linux_x86_64-a0975cf9f754127f.so"
    assert HERE.file_name == name
    assert Target.of_file(Path("/some/where", name)) == HERE


@pytest.mark.parametrize("name", ["_sac_native.so", "libtorch.so", "_sac_native-1-2.so", "a-1-2-3-4-5-6.so"])
def test_other_names_are_not_read(name: str) -> None:
    assert Target.of_file(Path(name)) is None


def test_the_name_for_this_process_can_be_read() -> None:
    assert Target.of_file(Path(this_target().file_name)) == this_target()
    assert this_target().torch == torch.__version__


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({}, ""),
        ({"torch": "2.12.0"}, "built for torch 2.12.0, and this is torch 2.13.0+cpu"),
        ({"torch_git": "0"}, "built for another build of torch 2.13.0+cpu"),
        ({"torch_build": "0"}, "built for another build of torch 2.13.0+cpu"),
        ({"python": "cpython_310"}, "built for cpython_310, and this is cpython_311"),
        ({"platform": "linux_aarch64"}, "built for linux_aarch64, and this is linux_x86_64"),
        ({"digest": "0"}, "built from other sources of sac"),
    ],
)
def test_what_does_not_fit_is_said(changed: dict[str, str], difference: str) -> None:
    assert HERE.difference(replace(HERE, **changed)) == difference


def test_likeness_counts_fields_from_the_first_on() -> None:
    assert [HERE.likeness(replace(HERE, **{name: "0"})) for name in HERE.__slots__] == [0, 1, 2, 3, 4, 5]
    assert HERE.likeness(HERE) == 6


def test_sources_flags_and_torch_change_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [this_target().digest]
    for name in ("module.cpp", "engine.h", "engine.cpp"):
        (tmp_path / name).write_text("1")
        monkeypatch.setattr(module, "SOURCES", tmp_path)
        found.append(this_target().digest)
    (tmp_path / "engine.h").write_text("2")
    found.append(this_target().digest)
    (tmp_path / "notes.txt").write_text("not a source")
    assert this_target().digest == found[-1]
    monkeypatch.setattr(module, "flags", lambda: ("-O3",))
    found.append(this_target().digest)
    monkeypatch.setattr(torch.version, "git_version", "0")
    found.append(this_target().digest)
    assert len(set(found)) == len(found)


def test_flags() -> None:
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    assert module.flags()[:6] == ("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", abi)


def test_flags_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert module.flags()[-2:] == ("-undefined", "dynamic_lookup")


# -- Build ids


def elf(*notes: bytes) -> bytes:
    """A 64-bit ELF header with one table entry per note, which begins where the entry says."""
    table, entry = 64, 56
    header = b"\x7fELF\x02\x01" + bytes(26) + struct.pack("<Q", table) + bytes(14)
    header += struct.pack("<HH", entry, len(notes)) + bytes(6)
    entries, data = b"", b""
    start = table + entry * len(notes)
    for note in notes:
        at = start + len(data)
        entries += struct.pack("<IIQQQQQQ", 4, 4, at, at, at, len(note), len(note), 4)
        data += note
    return header + entries + data


def note(kind: int, name: bytes, content: bytes) -> bytes:
    return struct.pack("<III", len(name), len(content), kind) + name + bytes(-len(name) % 4) + content


ID = bytes(range(20))


@pytest.mark.parametrize(
    "head",
    [
        elf(note(3, b"GNU\0", ID)),
        elf(note(1, b"GNU\0", bytes(16)), note(3, b"GNU\0", ID)),
        elf(note(1, b"stapsdt\0", b"12345678") + note(3, b"GNU\0", ID)),
        elf(note(3, b"other\0", bytes(4)) + note(3, b"GNU\0", ID)),
    ],
    ids=["only", "another segment first", "another note first", "another owner's"],
)
def test_build_id(head: bytes) -> None:
    assert elf_build_id(head) == ID.hex()


NO_ID = {
    "empty": b"",
    "text": b"not a library",
    "no notes": elf(),
    "another kind": elf(note(1, b"GNU\0", ID)),
    "cut off": elf(note(3, b"GNU\0", ID))[:-1],
    "cut header": elf()[:40],
    "Mach-O": b"\xcf\xfa\xed\xfe",
}


@pytest.mark.parametrize("head", NO_ID.values(), ids=NO_ID.keys())
def test_no_build_id(head: bytes) -> None:
    assert elf_build_id(head) == ""


def test_without_a_build_id_the_content_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "libtorch_python.so"
    monkeypatch.setattr(module, "_torch_python", lambda: file)
    found = []
    for content in (b"one", b"two"):
        file.write_bytes(content)
        found.append(this_target().torch_build)
    assert len(set(found)) == 2
    assert all(len(one) == 12 for one in found)


# -- Processes that cannot use one


def test_this_process_can() -> None:
    assert unsupported() == ""


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for owner, name, value in (
        (module, "_torch_python", lambda: None),
        (module, "_in_subinterpreter", lambda: True),
        (torch.version, "debug", True),
        (sys, "gettotalrefcount", lambda: 0),
        (sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get),
        (sys.implementation, "name", "pypy"),
        (sys, "platform", "win32"),
    ):
        monkeypatch.setattr(owner, name, value, raising=False)
        found.append(unsupported())
    assert found == [
        "this torch has no libtorch_python",
        "this is a subinterpreter",
        "this torch is a debug build",
        "this Python is a debug build",
        "this Python is free-threaded",
        "this Python is CPython, not CPython",  # what it is comes from `platform`
        "Windows is not supported",
    ]


def test_subinterpreters_know_that_they_are_one() -> None:
    function = textwrap.dedent(inspect.getsource(module._in_subinterpreter))
    inner = f"from importlib import import_module\n{function}\nprint(_in_subinterpreter(), flush=True)"
    outer = (
        "try:\n    import _interpreters as made\nexcept ImportError:\n    import _xxsubinterpreters as made\n"
        f"inner = {inner!r}\nexec(inner)\nmade.run_string(made.create(), inner)\n"
    )
    run = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True"], run.stderr
