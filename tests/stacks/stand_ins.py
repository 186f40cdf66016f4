"""Stand-ins for packages that a stack imports and does not need for training on a CPU: they let its import succeed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

TORCHVISION = (
    "torchvision",
    "torchvision.datasets",
    "torchvision.ops",
    "torchvision.ops.misc",
    "torchvision.transforms",
)
TORCHVISION += ("torchvision.transforms.functional", "torchvision.models", "torchvision.models.feature_extraction")
TITAN_KERNELS = ("torchtitan.distributed.minimal_async_ep.kernels",)  # Triton, for experts on GPUs


class _Named(type):
    """A class whose unknown members are their own names, as those of an enumeration may be."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIn(ModuleType):
    """A module in which every public name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


@contextmanager
def standing_in(names: tuple[str, ...]) -> Iterator[None]:
    """Let `import name` give a stand-in, until the end: whoever looks for the package later does not find it."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        module = sys.modules[name] = StandIn(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        parent, _, last = name.rpartition(".")
        if parent in missing:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def import_timm() -> ModuleType:
    """`timm`, which imports torchvision for its data sets; skips the test where it is not installed."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    try:
        importlib.import_module("torchvision")
    except ImportError:
        with standing_in(TORCHVISION):
            return _import("timm")
    return _import("timm")


def import_titan(name: str) -> ModuleType:
    """A module of torchtitan, whose models import Triton kernels that no dense model runs."""
    try:
        importlib.import_module("triton")
    except ImportError:
        with standing_in(TITAN_KERNELS):
            return _import(name)
    return _import(name)


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    pytest.importorskip(package, reason=f"{package} is installed by hand, see tests/stacks/no_deps.txt")
    return importlib.import_module(name)
