"""Plans in files: a training that is taken up again under the same conditions makes the same decisions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sac.fitting.fit import Fitted
from sac.native.places import cache_directory
from sac.policy.model import dump_policy

Saved = tuple[tuple[int, ...] | None, ...]  # as in `Fitted`


def directory_of(written: Any) -> Path | None:
    """Return the directory of plans that the config names, by default one in the cache; None for none."""
    if written is False:
        return None
    return cache_directory("plans") if written is None else Path(written).expanduser()


def key_of(*conditions: Any) -> str:
    """Return a name for a plan made under these conditions, and those of this installation."""
    text = repr((version("sac"), torch.__version__, conditions))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read(directory: Path | None, key: str) -> Saved | None:
    """Return what the plan of this name saves at each position, or None if there is none that can be read."""
    if directory is None:
        return None
    try:
        found = json.loads((directory / f"{key}.json").read_text("utf-8"))["saved"]
        return tuple(None if one is None else tuple(map(int, one)) for one in found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(directory: Path | None, key: str, fitted: Fitted) -> None:
    """Write a plan; does nothing if the directory cannot be written to, since the plan can be made again."""
    if directory is None:
        return
    text = json.dumps({"about": str(fitted), "saved": fitted.saved, "policy": dump_policy(fitted.policy)}, indent=1)
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f"{key}.{os.getpid()}.part"
        part.write_text(text, "utf-8")
        part.replace(directory / f"{key}.json")
