"""Real process groups in tests: worker processes that stay, one pool per world size, gloo over loopback.

They are forked from one process that has imported what most of them need.

`run_ranks(2, function, *args)` calls `function(*args)` in two processes at once, each with the default process group,
and returns what they returned, by rank. `function` is found by name, so it stands at the top of a module; arguments and
results travel as bytes, tensors included. It starts from the same random state in all ranks.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.process import freeze_what_is_imported, prepare

TIMEOUT_SECONDS = 120.0
START_SECONDS = 180.0
IMPORTED_ONCE = ["torch._dynamo", "tests.stacks.data_parallel", "tests.stacks.pipelines"]
GRACE_SECONDS = 3.0  # for the other ranks to end, once one has failed

_pools: dict[int, _Pool] = {}


class RankError(Exception):
    """A function failed in some rank, or did not end; the message holds each failed rank and its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """Return the results of `function(*args)` by rank; raise `RankError` if a rank raises, dies, or hangs.

    The ranks meet after the function, so that one that left a collective to itself is found out here and not later.
    After a `RankError` the next call gets new processes.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(function, args, timeout)
    except BaseException:
        del _pools[world_size]
        pool.kill()
        raise


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self.processes = []
        self.pipes: list[Connection] = []
        before = dict(os.environ)
        os.environ.update(environment())
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                arguments = (rank, world_size, self.store.port, theirs)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.pipes.append(ours)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._collect("did not start", START_SECONDS)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        message = _packed((function, args))
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(message)
            except OSError as error:
                raise RankError(f"rank {rank} is gone: {self._exit(rank)}") from error
        return self._collect(f"{function.__name__} did not end", timeout)

    def _collect(self, late: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        limit = time.monotonic() + timeout
        while len(results) + len(failures) < len(self.pipes):
            waiting = {p: rank for rank, p in enumerate(self.pipes) if rank not in results and rank not in failures}
            ready = wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting.values(), late if failures else f"{late} within {timeout:g} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    worked, content = _unpacked(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    worked, content = False, f"the process is gone: {self._exit(rank)}"
                (results if worked else failures)[rank] = content
                if not worked:
                    limit = min(limit, time.monotonic() + GRACE_SECONDS)
        if failures:
            raise RankError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [results[rank] for rank in range(len(self.pipes))]

    def _exit(self, rank: int) -> str:
        self.processes[rank].join(GRACE_SECONDS)
        return f"exit code {self.processes[rank].exitcode}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()


@atexit.register
def _kill_all() -> None:
    while _pools:
        _pools.popitem()[1].kill()


def environment() -> dict[str, str]:
    """Return what ranks need in their environment: one thread each, and loopback."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GLOO_SOCKET_IFNAME": loopback}


def _work(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))  # some functions are those of a script
    prepare()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=2 * TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    pipe.send_bytes(_packed((True, None)))
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):  # the parent is gone
            os._exit(0)
        try:
            function, args = _unpacked(message)
            freeze_what_is_imported()
            torch.manual_seed(0)  # not what earlier functions have left, which may differ between the ranks
            answer = _packed((True, function(*args)))
            dist.barrier()
        except BaseException:
            answer = _packed((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _packed(value: Any) -> bytes:
    """Return bytes that hold tensors by value, where a pipe of torch's would hand over shared memory."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)
