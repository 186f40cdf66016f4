"""``SAC_TRACE``: tells each decision once per op and region kind, through ``logging`` or as JSON lines in a file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict

from sac.errors import ConfigError, Problem
from sac.recompute.op_rows import OpTraceRow

VARIABLE = "SAC_TRACE"
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")

_log = logging.getLogger("sac.reporting")


def check_trace_target() -> None:
    """Raise ``ConfigError`` now if ``SAC_TRACE`` names a file that cannot be written."""
    value = os.environ.get(VARIABLE, "")
    if value.lower() in (*_OFF, *_ON):
        return
    try:
        with open(value, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(
            Problem(VARIABLE, f'"{value}" cannot be written: {error.strerror}', expected="1, or a path for JSON lines")
        ) from error


def log_decisions(region: str, rows: Sequence[OpTraceRow]) -> None:
    """Tell the decisions of one region kind, if ``SAC_TRACE`` asks for them; ``region`` is its first region's path."""
    value = os.environ.get(VARIABLE, "")
    if value.lower() in _OFF:
        return
    if value.lower() in _ON:
        _log_rows(region, rows)
        return
    with open(value, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"region": region, **asdict(row)}) + "\n")


def _log_rows(region: str, rows: Sequence[OpTraceRow]) -> None:
    if not _log.isEnabledFor(logging.INFO) and not _log.hasHandlers():
        logging.basicConfig(format="%(name)s: %(message)s")  # the user asked to see it and has set up no logging
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    told: set[tuple[str, str, str, str]] = set()
    for row in rows:
        key = (row.module, row.op, row.decision, row.reason)
        if key not in told:
            told.add(key)
            place = f"{region}.{row.module}" if row.module else region
            _log.info("%-9s %s in %s (%s)", row.decision.upper(), row.op, place or "the region", row.reason)
