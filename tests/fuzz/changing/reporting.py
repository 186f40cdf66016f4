"""Tables of many runs, and one program as a file that reproduces its failure."""

from __future__ import annotations

import contextlib
import pprint
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.changing import comparing
from tests.fuzz.changing.runs import EQUAL, ERROR, REFUSED, UNSEEN, WRONG, Outcome, Prepared, value_of

KINDS = (EQUAL, REFUSED, WRONG, UNSEEN, ERROR)
Results = dict[int, tuple[frozenset[str], dict[str, Outcome]]]
PUT = {
    "torch": "    call = functools.partial(checkpoint, use_reentrant=False)",
    "checkpoint": "    call = sac.checkpoint",
    "context_fn": (
        "    made = {block: sac.context_fn(VALUE['policy'], module=block) for block in model.blocks}\n"
        "    call = lambda block, *args: checkpoint(block, *args, use_reentrant=False, context_fn=made[block])"
    ),
}
MAIN = '''
VALUE = {value}


def put(model):
    """Under {way}."""
    global call
{put}


def run(with_us):
    seeded()
    model = Model()
    if with_us:
        put(model)
    seeded()
    for yielded in train(model):
        yield state_of(model, yielded)


if __name__ == "__main__":
    import functools
    import sys

    import sac
    from torch.utils.checkpoint import checkpoint

    expected = list(run(False))
    for name in [name for name in globals() if name.isupper() and name not in ("VALUE", "STEPS", "KINDS", "AUTOCAST")]:
        sys.exit("this program has globals that change: run each half in a process of its own") if False else None
    for step, found in enumerate(run(True)):
        wrong = differences(expected[step], found)
        print(f"step {{step}}:", f"differs in {{', '.join(wrong)}}" if wrong else "equal")
'''


class _Here:
    """A pool that works in this process."""

    def imap_unordered(self, function: Callable[[Any], Any], tasks: Iterable[Any], chunksize: int) -> Iterator[Any]:
        return map(function, tasks)


@contextlib.contextmanager
def here() -> Iterator[_Here]:
    yield _Here()


def tables(results: Results, ways: tuple[str, ...], seconds: float, jobs: int) -> Iterator[str]:
    """Counts by way, counts of failures by feature, and the seeds that fail."""
    runs = sum(len(outcomes) for _, outcomes in results.values())
    yield f"{len(results)} programs, {runs} runs in {seconds:.0f} s by {jobs} processes: {len(results) / seconds / jobs:.1f} programs/s each"
    yield ""
    yield f"{'way':<12}{'programs':>9}" + "".join(f"{kind:>9}" for kind in KINDS)
    for way in ways:
        counts = Counter(outcomes[way].kind for _, outcomes in results.values() if way in outcomes)
        yield f"{way:<12}{sum(counts.values()):>9}" + "".join(f"{counts[kind] or '':>9}" for kind in KINDS)
    yield ""
    yield from _by_feature(results, ways)
    yield ""
    for way in ways:
        for kind in (WRONG, ERROR, REFUSED, UNSEEN):
            seeds = sorted(seed for seed, (_, outcomes) in results.items() if way in outcomes and outcomes[way].kind == kind)
            if seeds and way != "torch":
                more = f" … ({len(seeds)} in all)" if len(seeds) > 14 else ""
                yield f"{way:<11} {kind:<8} {' '.join(map(str, seeds[:14]))}{more}"


def _by_feature(results: Results, ways: tuple[str, ...]) -> Iterator[str]:
    """For each feature, in how many of its programs each way was not equal."""
    width = 9
    yield f"{'not equal with':<36}" + "".join(f"{way[:width]:>{width + 1}}" for way in ways)
    rows: dict[str, dict[str, list[int]]] = defaultdict(lambda: {way: [0, 0] for way in ways})
    for features, outcomes in results.values():
        for feature in features:
            for way, one in outcomes.items():
                rows[feature][way][0] += one.kind != EQUAL
                rows[feature][way][1] += 1
    for feature in sorted(rows):
        cells = (f"{failed}/{runs}" if failed else f"·/{runs}" for failed, runs in rows[feature].values())
        yield f"{feature[:35]:<36}" + "".join(f"{cell:>{width + 1}}" for cell in cells)


def reproduction(prepared: Prepared, way: str) -> str:
    """The program as a file that runs without us and then under a way, and says which step differs."""
    source = Path(comparing.__file__).read_text().partition("from __future__ import annotations\n")[2]
    value = pprint.pformat(value_of(way, prepared.program.seed), width=110, sort_dicts=False)
    main = MAIN.format(value=value, way=way, put=PUT.get(way, "    sac.apply(model, VALUE)"))
    return f"{prepared.source}\n# -- what follows runs and compares\n{source}\n{main}"
