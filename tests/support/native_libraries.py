"""Libraries with nothing of torch in them, compiled in a fraction of a second, and compilers that are shell scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from sac.native.target import this_target
from sac.native.trial import PROGRAM

CC = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
HEADER = Path(sysconfig.get_path("include"), "Python.h")
needs_c = pytest.mark.skipif(CC is None or not HEADER.is_file(), reason="needs a C compiler and the headers of Python")

SOURCE = """
#include <Python.h>
#include <stdlib.h>
#include <unistd.h>
static PyObject* built_for(PyObject* self, PyObject* none) {
  return Py_BuildValue("{s:s,s:k,s:s}", "torch", TORCH, "python", (unsigned long)VERSION, "sources", SOURCES);
}
static PyObject* self_test(PyObject* self, PyObject* none) {
  BODY;
  Py_RETURN_NONE;
}
static PyObject* wrap_interpreter(PyObject* self, PyObject* none) { return PyUnicode_FromString(REASON); }
static PyMethodDef methods[] = {{"built_for", built_for, METH_NOARGS, ""}, {"self_test", self_test, METH_NOARGS, ""},
                                {"wrap_interpreter", wrap_interpreter, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_sac_native", NULL, -1, methods};
PyMODINIT_FUNC PyInit__sac_native(void) { INIT; return PyModule_Create(&definition); }
"""


def small_library(path: Path, **defines: str) -> Path:
    """Compile a library for this process.

    ``BODY`` is what its self-test does, ``INIT`` what its import does, ``REASON`` why its engine cannot be used.
    """
    values = {
        "TORCH": f'"{torch.__version__.partition("+")[0]}"',
        "VERSION": "PY_VERSION_HEX",
        "SOURCES": f'"{this_target().digest}"',
        "BODY": "",
        "REASON": '""',
        "INIT": "",
    }
    flags = [f"-D{name}={value}" for name, value in {**values, **defines}.items()]
    includes = [f"-I{sysconfig.get_path(name)}" for name in ("include", "platinclude")]
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    command = [CC or "cc", "-w", "-shared", "-fPIC", *undefined, *flags, *includes, "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    path.chmod(0o644)
    return path


def program_without_torch(folder: Path) -> Path:
    """Return a program for children that calls ``self_test`` of a small library where the real one tries the engine.

    It imports a torch that has a version and little else, which takes no time.
    """
    (folder / "torch" / "utils").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {torch.__version__!r}\n")
    (folder / "torch" / "utils" / "__init__.py").touch()
    (folder / "torch" / "utils" / "_python_dispatch.py").write_text("class TorchDispatchMode: pass\n")
    program = folder / "program.py"
    program.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        f"main = runpy.run_path({str(PROGRAM)!r})['main']\n"
        "main.__globals__['check_engine'] = lambda module: module.self_test()\n"
        "main()\n"
    )
    return program


def compiler_that_runs(folder: Path, script: str) -> Path:
    """Return a compiler that accepts C++20, notes each file that it is to make, and runs a script with ``$out``."""
    path = folder / "compiler"
    path.write_text(
        "#!/bin/sh\n"
        'for word in "$@"; do [ "$word" != -fsyntax-only ] || exit 0; done\n'
        'while [ "$1" != -o ]; do shift; done\n'
        "out=$2\n"
        f'echo "$out" >>{folder}/compiled\n'
        f"{script}\n"
    )
    path.chmod(0o755)
    return path


def compiled_files(folder: Path) -> list[str]:
    """Return the files that the compiler was to make."""
    log = folder / "compiled"
    return log.read_text().splitlines() if log.exists() else []
