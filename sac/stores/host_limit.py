"""How much host memory this process may pin: a share of what the machine or the container has left."""

from __future__ import annotations

import os
from pathlib import Path

# Note [Limit of host memory]
#
# Pinned memory cannot be swapped out, and a container that uses more than its limit is killed without a word. So the
# limit is a share of what is available when the first value is offloaded: the machine's `MemAvailable`, or what the
# control group of this process or one above it has left, if that is less. The processes of one node (`LOCAL_WORLD_SIZE`
# of torchrun) share it evenly.


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that are available to this process; None where that cannot be known.

    ``root``: where ``proc`` and ``sys`` are.
    """
    found = [_of_the_machine(root), *_of_control_groups(root)]
    known = [size for size in found if size is not None]
    return min(known) if known else None


def local_processes() -> int:
    """Return the number of training processes on this node, as torchrun tells them."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdigit() else 1


def default_limit(share: float) -> int | None:
    """Return this process's part of ``share`` of the available memory; None: no limit is known."""
    available = available_host_bytes()
    return None if available is None else int(available * share) // local_processes()


def _of_the_machine(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    return None


def _of_control_groups(root: Path) -> list[int | None]:
    """Return what each control group around this process has left: of version 2, or memory controllers of version 1."""
    found: list[int | None] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for count in range(len(parts) + 1):
            folder = base.joinpath(*parts[:count])
            most, now = _number(folder / limit), _number(folder / used)
            found.append(None if most is None or now is None else max(0, most - now))
    return found


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
