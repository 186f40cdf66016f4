"""Children that check one family each, under limits of time and memory."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.stacks.stand_ins import TORCHVISION, standing_in

from .checking import CANNOT_BUILD, Row, check_family

POLL_S = 0.2
PATIENCE = 10  # times the limit of processor time, before a child that does nothing is killed
# Imported once, in the process that the children are forked from.
PRELOADED = ["sweep.checking", "torch._dynamo", "transformers.modeling_layers",
             "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"]  # fmt: skip


def preload() -> None:
    """Import what every family needs, once."""
    for name in PRELOADED:
        importlib.import_module(name)
    _offer_timm()


def _offer_timm() -> None:
    """Let transformers use timm without torchvision, of which timm's backbones need nothing.

    Where timm is not installed nothing is done: the families that need it then say so.
    """
    from transformers import utils
    from transformers.utils import import_utils

    try:
        with standing_in(TORCHVISION):
            importlib.import_module("timm")
    except ImportError:
        return
    told = import_utils.BACKENDS_MAPPING["timm"][1]
    import_utils.BACKENDS_MAPPING["timm"] = (lambda: True, told)
    for place in (import_utils, utils):
        place.is_timm_available = lambda: True


def check_all(families: Sequence[str], jobs: int, limit_s: float, limit_bytes: int) -> Iterator[Row]:
    """Yield the row of each family as it is ready. A child that dies, hangs or grows too large is a row as well."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(families))
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            family = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(family, limit_s, sender), daemon=True)
            child.start()
            sender.close()
            running[receiver] = (family, child, time.monotonic())
        ready = wait(list(running), timeout=POLL_S)
        for receiver in list(running):
            family, child, begun = running[receiver]
            row = None
            if receiver in ready:
                row = _received(receiver, family, child)
            elif time.monotonic() - begun > PATIENCE * limit_s:
                row = Row(family, CANNOT_BUILD, f"killed after {PATIENCE * limit_s:.0f} s")
            elif (used := _resident_bytes(child.pid)) > limit_bytes:
                row = Row(family, CANNOT_BUILD, f"killed at {used / 2**30:.1f} GiB")
            if row is not None:
                child.kill()
                child.join()
                receiver.close()
                del running[receiver]
                yield row


def _received(receiver: Connection, family: str, child: Any) -> Row:
    try:
        return receiver.recv()
    except EOFError:
        child.join()
        return Row(family, CANNOT_BUILD, f"its process ended with exit code {child.exitcode} (-24: out of time)")


def _child(family: str, limit_s: float, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 5))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sender.send(check_family(family, limit_s))
    sender.close()


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # it has just ended, or this is no Linux
        return 0
