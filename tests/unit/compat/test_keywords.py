"""Keywords of other systems become options by a table: renamed, read, or refused, with all problems at once."""

from __future__ import annotations

import pytest

from sac.compat.keywords import NO_DEBUG, Keyword, only, options_of, raise_if, same
from sac.config_keys import read_flag
from sac.errors import ConfigError

TABLE = {
    **same(["early_stop"]),
    "partition": Keyword("distribute_saved_activations", read_flag),
    "tracker": Keyword(read=only(None, False, found="{!r} belongs to them", fix="leave it out")),
    "debug": NO_DEBUG,
}


def test_values_get_our_names_and_what_has_none_is_only_checked() -> None:
    given = {"early_stop": "as it is", "partition": True, "tracker": None, "debug": False}
    options = {"early_stop": "as it is", "distribute_saved_activations": True}
    assert options_of(given, TABLE, "there") == (options, [])


def test_all_problems_are_told_in_order_and_the_other_values_are_read() -> None:
    options, problems = options_of({"tracker": 0, "partitoin": 1, "early_stop": 2, "debug": 3}, TABLE, "there")
    assert options == {"early_stop": 2}
    assert "\n".join(map(str, problems)) == (
        "there.tracker: 0 belongs to them\n    fix: leave it out\n"
        "there.partitoin: it is not known\n    did you mean: partition\n"
        "    legal: early_stop, partition, tracker, debug\n"
        "there.debug: 3 is not supported: errors of recomputation name the saved tensor without it\n    legal: false"
    )
    with pytest.raises(ConfigError) as caught:
        raise_if(problems)
    assert caught.value.problems == tuple(problems)


def test_keywords_that_are_not_to_be_named_are_read_all_the_same() -> None:
    options, problems = options_of({"partition": False, "x": 1}, TABLE, "there", legal=["early_stop"])
    assert options == {"distribute_saved_activations": False}
    assert [problem.expected for problem in problems] == ["early_stop"]


def test_equal_is_not_the_same() -> None:
    """0 is not False: a flag of another system that is 0 by mistake is told."""
    assert options_of({"tracker": False}, TABLE, "there")[1] == []
    assert len(options_of({"tracker": 0.0}, TABLE, "there")[1]) == 1
