#!/usr/bin/env python3
"""Every family of the installed transformers, tiny and with random weights: does sac.apply work on it?"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sweep.workers import check_all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--only-failed")
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--memory", type=float, default=6)
    args = parser.parse_args()
    import transformers

    families = args.family or list(transformers.CONFIG_MAPPING.keys())
    rows = {}
    if args.only_failed:
        old = json.loads(Path(args.only_failed).read_text())
        rows = {r["family"]: r for r in old}
        done = {r["family"] for r in old if r["status"] in ("passes", "not trainable")}
        families = args.family or [f for f in families if f not in done]
    for row in check_all(families, args.jobs, args.limit, int(args.memory * 2**30), lambda f: None):
        rows[row["family"]] = row
        print(f"{len(rows)} {row['family']}: {row['status']} {row['seconds']} {row['reason'][:300]}", flush=True)
        if args.json and len(rows) % 10 == 0:
            Path(args.json).write_text(json.dumps(list(rows.values()), indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(list(rows.values()), indent=1))
    print(Counter(r["status"] for r in rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
