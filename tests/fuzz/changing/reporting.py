"""Tables of many runs, and one program as a file that reproduces its failure."""

from __future__ import annotations

import contextlib
import pprint
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.changing import comparing
from tests.fuzz.changing.runs import ENGINES, EQUAL, ERROR, LIMIT, REFUSED, UNSEEN, WRONG, Outcome, Prepared, value_of

KINDS = (EQUAL, LIMIT, REFUSED, WRONG, UNSEEN, ERROR)
FAILURES = {True: (WRONG, ERROR, REFUSED), False: (WRONG, ERROR)}  # what must not be: of an engine, of another way
Results = dict[int, tuple[frozenset[str], dict[str, Outcome]]]
PUT = {
    "torch": "    program.call = functools.partial(checkpoint, use_reentrant=False)",
    "checkpoint": "    program.call = sac.checkpoint",
    "context_fn": (
        "    made = {block: sac.context_fn(VALUE['policy'], module=block) for block in model.blocks}\n"
        "    program.call = lambda block, *args, **kwargs: checkpoint(\n"
        "        block, *args, use_reentrant=False, context_fn=made[block], **kwargs\n"
        "    )"
    ),
}
MAIN = '''
VALUE = {value}


def put(program, model):
    """Under {way}."""
{put}


def run(with_us):
    """Run this file anew, so that its globals are as they were."""
    spec = importlib.util.spec_from_file_location("changing_program", __file__)
    program = sys.modules["changing_program"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    seeded()
    model = program.Model()
    if with_us:
        put(program, model)
    seeded()
    for yielded in program.train(model):
        yield state_of(model, yielded)


if __name__ == "__main__":
    import functools
    import importlib.util
    import sys

    import sac
    from torch.utils.checkpoint import checkpoint

    expected = list(run(False))
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


def tables(results: Results, ways: tuple[str, ...], seconds: float, jobs: int, rows: int = 30) -> Iterator[str]:
    """Counts by way, failures by feature (so many rows at most), and the seeds that fail."""
    runs = sum(len(outcomes) for _, outcomes in results.values())
    speed = f"{len(results) / seconds / jobs:.1f} programs/s for each of {jobs} process{'es' * (jobs > 1)}"
    yield f"{len(results)} programs, {runs} runs, {seconds:.0f} s: {speed}"
    yield ""
    yield f"{'way':<12}{'programs':>9}" + "".join(f"{kind:>8}" for kind in KINDS)
    for way in ways:
        counts = Counter(outcomes[way].kind for _, outcomes in results.values() if way in outcomes)
        yield f"{way:<12}{sum(counts.values()):>9}" + "".join(f"{counts[kind] or '':>8}" for kind in KINDS)
    yield ""
    yield from _by_feature(results, tuple(way for way in ways if way != "torch"), rows)
    yield ""
    for way in ways:
        for kind in FAILURES[way in ENGINES]:
            outcomes_of_way = ((seed, outcomes.get(way)) for seed, (_, outcomes) in results.items())
            seeds = sorted(seed for seed, one in outcomes_of_way if one is not None and one.kind == kind)
            if seeds and way != "torch":
                more = f" … ({len(seeds)} in all)" if len(seeds) > 10 else ""
                yield f"{way:<10} {kind:<8} {' '.join(map(str, seeds[:10]))}{more}"


def _by_feature(results: Results, ways: tuple[str, ...], rows: int) -> Iterator[str]:
    """For the features that fail most often: in how many of the programs that have them, by way."""
    failed: dict[str, Counter[str]] = defaultdict(Counter)
    ran: dict[str, Counter[str]] = defaultdict(Counter)
    for features, outcomes in results.values():
        for feature in features:
            for way, one in outcomes.items():
                ran[feature][way] += 1
                failed[feature][way] += one.kind in FAILURES[way in ENGINES]

    def rate(feature: str) -> float:
        return sum(failed[feature][way] for way in ways) / sum(ran[feature].values())

    chosen = sorted((feature for feature in ran if rate(feature)), key=rate, reverse=True)
    if not chosen:
        yield f"no failures in programs of {len(ran)} features"
        return
    yield f"{'failures, of programs with':<30}" + "".join(f"{way:>11}" for way in ways)
    for feature in chosen[:rows]:
        cells = (f"{failed[feature][way] or '·'}/{ran[feature][way]}" for way in ways)
        yield f"{feature[:29]:<30}" + "".join(f"{cell:>11}" for cell in cells)
    if len(chosen) > rows:
        yield f"… and {len(chosen) - rows} more features; --features {len(chosen)} lists them"


def reproduction(prepared: Prepared, way: str) -> str:
    """The program as a file that runs without us and then under a way, and says which step differs."""
    source = Path(comparing.__file__).read_text().partition("from __future__ import annotations\n")[2]
    value = pprint.pformat(value_of(way, prepared.program.seed), width=110, sort_dicts=False)
    main = MAIN.format(value=value, way=way, put=PUT.get(way, "    sac.apply(model, VALUE)"))
    return f"{prepared.source}\n# -- what follows runs and compares\n{source}\n{main}"
