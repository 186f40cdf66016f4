"""The save options of a region: what they cost is what the engine does, and little is lost against trying them all."""

from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sac.planner.pareto import MOST_OPTIONS, SaveOption, pareto, priced
from sac.planner.profile import Entry, Need, RegionProfile
from tests.unit.planner.random_profiles import profiles, random_profile

ENGINES = ("replay", "rerun")


def brute_force(profile, times, engine):
    """Return the costs of the save options that no other beats, of all subsets of the candidates."""
    numbers = [entry.number for entry in profile.candidates]
    subsets = (chosen for count in range(len(numbers) + 1) for chosen in combinations(numbers, count))
    costs = {(one.bytes, one.seconds) for one in (priced(profile, times, chosen, engine) for chosen in subsets)}
    best = []
    for held, seconds in sorted(costs):
        if not best or seconds < best[-1][1]:
            best.append((held, seconds))
    return best


def costs(found):
    return [(one.bytes, one.seconds) for one in found]


def region(entries, needs, size):
    """A profile in which each value has a storage of its own, of ``size`` bytes."""
    count = 1 + max(value for entry in entries for value in (*entry.reads, *entry.makes))
    roots = tuple(range(count))
    return RegionProfile("r", ("r",), (0,), tuple(entries), roots, (size,) * count, tuple(needs))


def op(number, reads, makes, **facts):
    return Entry(number, "m", "op", number, reads, makes, **{"savable": True, **facts})


def at_room(found, room):
    return [seconds for size, seconds in found if size <= room][-1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(12))
def test_little_is_lost_against_all_subsets(seed, engine):
    profile, times = random_profile(Random(seed), entries=30, candidates=9)
    found, best = costs(pareto(profile, times, engine)), brute_force(profile, times, engine)
    assert (found[0], found[-1][1]) == (best[0], best[-1][1])
    lost = [at_room(found, room) - seconds for room, seconds in best]
    assert sum(lost) / len(lost) <= 0.1 * (best[0][1] - best[-1][1])


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=100, deadline=None)
@given(case=profiles(entries=30, candidates=30))
def test_each_point_costs_what_the_engine_says_and_saves_nothing_in_vain(case, engine):
    profile, times = case
    may = {entry.number for entry in profile.candidates}
    for one in pareto(profile, times, engine):
        assert one == priced(profile, times, one.saved, engine)
        assert one.saved <= may
        for number in one.saved:
            less = priced(profile, times, one.saved - {number}, engine)
            assert less.seconds > one.seconds or less.bytes > one.bytes or _holds(profile, one, number, engine)


def _holds(profile, one, number, engine):
    return any(profile.maker[value] == number for value in profile.recomputed(one.saved, engine).held)


@settings(max_examples=50, deadline=None)
@given(case=profiles(entries=20, candidates=20), engine=st.sampled_from(ENGINES))
def test_the_same_profile_gives_the_same_sets(case, engine):
    profile, times = case
    assert pareto(profile, times, engine) == pareto(profile, times, engine)


def test_what_only_feeds_a_saved_value_runs_again_under_rerun_alone():
    chain = region([op(0, (0,), (1,)), op(1, (1,), (2,)), op(2, (2,), (3,))], [Need(2, 3)], size=8)
    times = [1.0, 2.0, 4.0]
    assert pareto(chain, times, "replay") == (SaveOption(frozenset(), 0, 3.0), SaveOption(frozenset({1}), 8, 0.0))
    # The last op is before the last need, so rerun runs it if it is not saved, though nothing reads what it makes.
    assert pareto(chain, times, "rerun") == (
        SaveOption(frozenset({2}), 0, 3.0),
        SaveOption(frozenset({0, 1, 2}), 8, 0.0),
    )


def test_of_two_alike_the_earlier_is_saved():
    both = region([op(0, (0,), (1,)), op(1, (0,), (2,))], [Need(1, 2), Need(2, 2)], size=8)
    assert [one.saved for one in pareto(both, [1.0, 1.0])] == [frozenset(), frozenset({0}), frozenset({0, 1})]


def test_all_results_of_an_entry_are_held_if_backward_reads_them():
    pair = region([op(0, (0,), (1, 2))], [Need(1, 1), Need(2, 1)], size=8)
    assert pareto(pair, [1.0]) == (SaveOption(frozenset(), 0, 1.0), SaveOption(frozenset({0}), 16, 0.0))


def test_what_must_be_saved_is_paid_for_in_every_set():
    routed = region([op(0, (0,), (1,), must_save=True), op(1, (1,), (2,))], [Need(2, 2)], size=8)
    for engine in ("replay", "rerun"):
        found = pareto(routed, [1.0, 1.0], engine)
        assert found == (SaveOption(frozenset(), 8, 1.0), SaveOption(frozenset({1}), 16, 0.0))
        assert pareto(routed, [1.0, 0.0], engine) == (SaveOption(frozenset(), 8, 0.0),)


def test_a_region_of_which_backward_reads_nothing_has_one_keep_set():
    assert pareto(region([op(0, (0,), (1,))], [], size=8), [1.0]) == (SaveOption(frozenset(), 0, 0.0),)


def test_a_long_chain_of_wide_steps_is_searched_whole():
    """120 entries in one part: what cannot be cut by a need falls apart as it is decided."""
    entries = [op(number, (number, max(0, number - 2)), (number + 1,)) for number in range(120)]
    whole = region(entries, [Need(120, 120)], size=4)
    assert costs(pareto(whole, [1.0] * 120)) == [(0, 120.0), (4, 0.0)]


def test_of_too_many_options_every_nth_remains(monkeypatch):
    count = 12
    entries = [op(number, (0,), (number + 1,)) for number in range(count)]
    profile = region(entries, [Need(number + 1, count) for number in range(count)], 8)
    times = [float(number + 1) for number in range(count)]
    every = pareto(profile, times)
    assert len(every) == count + 1 <= MOST_OPTIONS
    monkeypatch.setattr("sac.planner.pareto.MOST_OPTIONS", 5)
    assert pareto(profile, times) == every[::3]
