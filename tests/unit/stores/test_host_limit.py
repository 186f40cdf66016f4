"""How much host memory may be pinned: machine, control groups, local processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.stores.host_limit import available_host_bytes, default_limit, local_processes

MEMINFO = "MemTotal:       2000000 kB\nMemFree:         100000 kB\nMemAvailable:    1000000 kB\n"
GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(path: str, most: str, now: int) -> dict[str, str]:
    return {f"sys/fs/cgroup/{path}memory.max": f"{most}\n", f"sys/fs/cgroup/{path}memory.current": f"{now}\n"}


PLACES = {
    "the machine": ({"proc/meminfo": MEMINFO}, 1_000_000 << 10),
    "a group without a limit": (
        {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **group("a/", "max", 5)},
        1_000_000 << 10,
    ),
    "a group": ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n", **group("a/b/", "700", 100)}, 600),
    "the group above it": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            **group("a/b/", "700", 100),
            **group("a/", "500", 200),
        },
        300,
    ),
    "the root of a container": ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", **group("", "900", 1000)}, 0),
    "version 1": (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "4096",
            "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "96",
        },
        4000,
    ),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("place", PLACES)
def test_available_memory(tmp_path: Path, place: str) -> None:
    files, expected = PLACES[place]
    assert available_host_bytes(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(("text", "count"), [("", 1), ("8", 8), ("0", 1), ("many", 1)])
def test_processes_of_a_node_share(monkeypatch: pytest.MonkeyPatch, text: str, count: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert local_processes() == count
    monkeypatch.setattr("sac.stores.host_limit.available_host_bytes", lambda: 64 * GIB)
    assert default_limit(0.5) == 32 * GIB // count


def test_no_limit_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sac.stores.host_limit.available_host_bytes", lambda: None)
    assert default_limit(0.5) is None
