#!/usr/bin/env python3
"""Every family of the installed transformers, tiny and with random weights: does sac.apply work on it?

    .venv/bin/python scripts/hf_sweep.py                          all of them, about half an hour on two free cores
    .venv/bin/python scripts/hf_sweep.py --family llama t5        these
    .venv/bin/python scripts/hf_sweep.py --only-failed rows.json  those that did not pass then, the others as they were
    .venv/bin/python scripts/hf_sweep.py --json rows.json         also write the rows there, as they come

Each family is built from its configuration alone and trained for some steps in a process of its own: without sac, with
`full` and with `selective`. Every family is a row:

    passes           blocks are found; loss, every gradient and every buffer have the same bits as without sac, with
                     dropout and in eval mode; fewer bytes are kept, and `full` runs more FLOPs
    FAILS            one of these is not so
    not trainable    there is no model class, no gradient, no second step, no layer, or two runs without sac differ
    cannot be built  no model could be made from the configuration, or no inputs that its forward takes
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_overhead import shown_progress
from sweep.checking import FAILS, NOT_TRAINABLE, PASSES, Row
from sweep.table import print_table
from sweep.workers import check_all, preload

GIB = 2**30
SETTLED = (PASSES, NOT_TRAINABLE)


def sweep(families: Sequence[str], rows: dict[str, Row], given: argparse.Namespace) -> None:
    """Put the row of each family into ``rows``; they are written to the JSON file as they come."""
    done = 0
    with shown_progress(quiet=False) as progress:
        for row in check_all(families, given.jobs, given.limit, int(given.memory * GIB)):
            rows[row.family] = row
            done += 1
            progress(done, len(families), f"{row.family}: {row.status}")
            if not sys.stderr.isatty():
                print(f"{done}/{len(families)} {row.family}: {row.status} {row.reason[:200]}", file=sys.stderr)
            if given.json and given.json != "-":
                text = json.dumps([asdict(row) for row in rows.values()], indent=1)
                Path(given.json).write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these, by model_type")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as they come; - prints them at the end")
    parser.add_argument("--only-failed", metavar="FILE", help="rows of an earlier run: run what is not settled there")
    parser.add_argument("--limit", type=float, default=120, help="seconds of processor time for one family (120)")
    parser.add_argument("--memory", type=float, default=6, help="GiB for one family (6)")
    given = parser.parse_args()
    preload()
    import transformers

    known = list(transformers.CONFIG_MAPPING.keys())
    unknown = [name for name in given.family or () if name not in known]
    if unknown:
        parser.error(f"transformers {transformers.__version__} does not know {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a clean exit takes the children along
    rows: dict[str, Row] = {}
    if given.only_failed:
        earlier = [Row(**row) for row in json.loads(Path(given.only_failed).read_text(encoding="utf-8"))]
        rows = {row.family: row for row in earlier if row.family in known}
    wanted = given.family or [name for name in known if name not in rows or rows[name].status not in SETTLED]
    sweep(wanted, rows, given)
    ordered = [rows[name] for name in known if name in rows]
    if given.json == "-":
        print(json.dumps([asdict(row) for row in ordered], indent=1))
    else:
        print_table(ordered)
    return int(any(row.status == FAILS for row in ordered))


if __name__ == "__main__":
    sys.exit(main())
