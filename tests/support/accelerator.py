"""An accelerator that is neither the CPU nor CUDA, compiled from `accelerator.cpp`: what MPS, XPU or an NPU is to sac.

`attach` makes it a device of this process, for good: call it in a process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "sim"


def compile_accelerator(folder: Path, compiler: list[str]) -> Path:
    """Compile the device into ``folder``, if that has not been done."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    file = folder / f"accelerator_{digest}.so"
    if not file.exists():
        words = [*compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-w", str(SOURCE), "-o", f"{file}.{os.getpid()}"]
        words += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        for path in (*include_paths(), sysconfig.get_path("include")):
            words += ["-isystem", path]
        words += [*(f"-L{path}" for path in library_paths()), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        subprocess.run(words, check=True)
        os.replace(f"{file}.{os.getpid()}", file)
    return file


def attach(file: Path) -> None:
    """Make the device ``sim`` one of this process, with what torch asks the module of a device for."""
    attached = ctypes.PyDLL(str(file)).attach
    attached.restype = ctypes.py_object
    default = attached()
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.synchronize = lambda device=None: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: module.default_generators[0].manual_seed(seed)
    module.get_rng_state = lambda device=None: module.default_generators[0].get_state()
    module.set_rng_state = lambda state, device=None: module.default_generators[0].set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    module.default_generators = (default,)
