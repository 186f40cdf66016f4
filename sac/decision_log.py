"""``SAC_TRACE``: each decision, once per op and region group, through ``logging`` or as JSON lines in a file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from sac.errors import ConfigError, Problem

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


def log_decisions(region: str, rows: Sequence[Any]) -> None:
    """Log the rows of one region group if ``SAC_TRACE`` asks for it; ``region`` is the path of its first region."""
    value = os.environ.get(VARIABLE, "")
    if value.lower() in _OFF:
        return
    if value.lower() in _ON:
        _log_rows(region, rows)
        return
    with open(value, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(replace(row, region=region))) + "\n")


def _log_rows(region: str, rows: Sequence[Any]) -> None:
    if not _log.isEnabledFor(logging.INFO):
        if not _log.hasHandlers():
            logging.basicConfig(format="%(name)s: %(message)s")  # the user asked for the log but has not set it up
        _log.setLevel(logging.INFO)
    for module, op, decision, reason in dict.fromkeys((row.module, row.op, row.decision, row.reason) for row in rows):
        where = f"{region}.{module}" if module else region
        _log.info("%-9s %s in %s (%s)", decision.upper(), op, where or "the region", reason)
