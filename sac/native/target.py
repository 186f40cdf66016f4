"""What a library is compiled for: torch, Python, platform and sources. All of it is in the name of its file."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import sysconfig
from dataclasses import astuple, dataclass
from importlib import import_module
from pathlib import Path

import torch

MODULE = "_sac_native"
SOURCES = Path(__file__).with_name("csrc")
_BUILD_ID_DIGITS = 12
_ELF_NOTE, _ELF_GNU_BUILD_ID = 4, 3  # PT_NOTE, NT_GNU_BUILD_ID


@dataclass(frozen=True, slots=True)
class Target:
    """What one library fits. ``digest`` covers the other fields, the flags of the compiler and all sources.

    torch's C++ interface differs between any two builds of torch, so the version alone does not identify one:
    ``torch_git`` is the commit that it was built from, ``torch_build`` the build id of its ``libtorch_python``.
    """

    torch: str
    torch_git: str
    torch_build: str
    python: str
    platform: str
    digest: str

    @property
    def file_name(self) -> str:
        """Return the name of the file of a library for this target."""
        return "-".join((MODULE, *astuple(self))) + ".so"

    @classmethod
    def of_file(cls, path: Path) -> Target | None:
        """Return what the library in a file is for, by the file's name; None if it has no name of ours."""
        first, *fields = path.name.removesuffix(".so").split("-")
        return cls(*fields) if first == MODULE and len(fields) == len(cls.__slots__) else None

    def likeness(self, other: Target) -> int:
        """Return how many fields from the first one on are equal."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return next((index for index, (mine, yours) in enumerate(pairs) if mine != yours), len(self.__slots__))

    def difference(self, other: Target) -> str:
        """Return why a library for ``other`` does not fit here, in words; ``""`` if it does."""
        if self.torch != other.torch:
            return f"built for torch {other.torch}, and this is torch {self.torch}"
        if (self.torch_git, self.torch_build) != (other.torch_git, other.torch_build):
            return f"built for another build of torch {self.torch}"
        if self.python != other.python:
            return f"built for {other.python}, and this is {self.python}"
        if self.platform != other.platform:
            return f"built for {other.platform}, and this is {self.platform}"
        return "" if self.digest == other.digest else "built from other sources of sac"


def this_target() -> Target:
    """Return what a library has to be compiled for to be loaded in this process. Takes a few milliseconds."""
    words = (
        _word(torch.__version__),
        _word(str(torch.version.git_version))[:_BUILD_ID_DIGITS],
        _word(_build_id())[:_BUILD_ID_DIGITS],
        _word(str(sys.implementation.cache_tag)),
        _word(f"{sys.platform}_{platform.machine()}"),
    )
    digest = hashlib.sha256("\n".join((*words, *flags())).encode())
    for path in source_files():
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return Target(*words, digest.hexdigest()[:16])


def source_files() -> list[Path]:
    """Return the C++ files, of which ``module.cpp`` includes all others."""
    return sorted(path for path in SOURCES.glob("*") if path.suffix in (".cpp", ".h"))


def flags() -> tuple[str, ...]:
    """Return the flags of the compiler that decide what comes out of it. Paths are not among them."""
    # NDEBUG: inline code of torch's headers has members that depend on it, and torch's wheels are built with it.
    common = ("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(_new_abi())}")
    return (*common, "-undefined", "dynamic_lookup") if sys.platform == "darwin" else common


def unsupported() -> str:
    """Return why no library can be used in this process, whatever was compiled; ``""`` if one can."""
    if sys.platform == "win32":
        return "Windows is not supported"
    if sys.implementation.name != "cpython":
        return f"this Python is {platform.python_implementation()}, not CPython"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python is free-threaded"
    if hasattr(sys, "gettotalrefcount"):
        return "this Python is a debug build"
    if torch.version.debug:
        return "this torch is a debug build"
    if _in_subinterpreter():
        return "this is a subinterpreter"
    if _torch_python() is None:
        return "this torch has no libtorch_python"
    return ""


def torch_folder(name: str) -> Path:
    """Return a folder of the installed torch: ``include`` or ``lib``."""
    return Path(torch.__file__).parent / name


def _word(text: str) -> str:
    """Return a text without the characters that separate the words of a file name."""
    return re.sub(r"[^\w.+]", "_", text)


def _new_abi() -> bool:
    return bool(torch.compiled_with_cxx11_abi())


def _in_subinterpreter() -> bool:
    for name in ("_interpreters", "_xxsubinterpreters"):  # of Python 3.13 and later, and of 3.10 to 3.12
        try:
            interpreters = import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() != interpreters.get_main())
    return False


def _torch_python() -> Path | None:
    """Return the library that holds torch's Python bindings. conda may have put it into its own folder."""
    ending = "dylib" if sys.platform == "darwin" else "so"
    folders = (torch_folder("lib"), Path(sys.prefix, "lib"))
    return next((path for path in (folder / f"libtorch_python.{ending}" for folder in folders) if path.is_file()), None)


def _build_id() -> str:
    """Return the id that the linker gave to ``libtorch_python``; a hash of its content if it has none (macOS)."""
    path = _torch_python()
    if path is None:
        return "none"
    with path.open("rb") as file:
        found = elf_build_id(file.read(1 << 16))  # notes are at the beginning of a library, before its code
        if found:
            return found
        file.seek(0)
        content = hashlib.blake2b()
        while block := file.read(1 << 20):
            content.update(block)
    return content.hexdigest()


def elf_build_id(head: bytes) -> str:
    """Return the GNU build id in the first bytes of an ELF file as digits, ``""`` if there is none.

    The layout is that of elf(5), for 64 bits in little-endian order.
    """
    if head[:6] != b"\x7fELF\x02\x01":
        return ""

    def number(start: int, size: int) -> int:
        return int.from_bytes(head[start : start + size], "little")

    table, entry_size, entries = number(32, 8), number(54, 2), number(56, 2)
    for entry in range(table, table + entries * entry_size, entry_size or 1):
        if number(entry, 4) != _ELF_NOTE:
            continue
        note, end = number(entry + 8, 8), number(entry + 8, 8) + number(entry + 32, 8)
        while note + 12 <= min(end, len(head)):
            name_size, size, kind = number(note, 4), number(note + 4, 4), number(note + 8, 4)
            name = note + 12
            start = name + -(-name_size // 4) * 4
            if kind == _ELF_GNU_BUILD_ID and head[name : name + 4] == b"GNU\0" and start + size <= len(head):
                return head[start : start + size].hex()
            note = start + -(-size // 4) * 4
    return ""
