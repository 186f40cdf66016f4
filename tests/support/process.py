"""What a process of tests does once, so that no test does it again: it costs more than what most tests are about."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from tests.support import read_once

_modules = 0


def prepare() -> None:
    """To be called before the first test, in the process of tests and in its ranks."""
    read_once.install()
    seed_no_absent_devices()


def seed_no_absent_devices() -> None:
    """Let `torch.manual_seed` queue nothing for kinds of devices that this machine lacks.

    It would format the stack of its caller for each of them, which takes milliseconds below pytest.
    """
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _nothing  # type: ignore[attr-defined]


def _nothing(seed: Any) -> None:
    return None


def freeze_what_is_imported() -> None:
    """Keep what there is out of all collections of garbage from now on, if modules were imported since the last call.

    Most objects here are modules of packages: a million, which are looked through in half a second, and tests that
    measure memory ask for that a thousand times. What a test makes is collected as ever.
    """
    global _modules
    if len(sys.modules) != _modules:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)
