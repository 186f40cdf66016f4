"""Libraries are read from directories that no other user may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sac.native import places
from sac.native.places import cache_directory, distrusted, is_trusted_owner, make_private


def test_the_cache_directory_is_named_by_the_first_variable_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAC_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert cache_directory() == Path("/one/sac/native")
    monkeypatch.setenv("SAC_CACHE_DIR", "")
    assert cache_directory() == Path("/two/sac/native")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == Path("/three/.cache/sac/native")
    monkeypatch.setenv("SAC_CACHE_DIR", "relative")
    assert cache_directory() == Path.cwd() / "relative/sac/native"


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SAC_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory() is None


def test_directories_are_made_for_their_user_alone(tmp_path: Path) -> None:
    made = tmp_path / "a" / "b"
    make_private(made)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, made.parent)] == [0o700, 0o700]


def test_directories_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o755)
    make_private(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o555])
def test_trusted_modes(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert distrusted(tmp_path) == ""


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_what_others_may_write_to_is_not_trusted(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert distrusted(tmp_path) == f"{tmp_path} is writable by other users (chmod go-w {tmp_path})"


def test_what_another_user_owns_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "is_trusted_owner", lambda user: False)
    assert distrusted(tmp_path) == f"{tmp_path} belongs to another user (id {os.getuid()})"


def test_trusted_owners_are_the_user_root_and_the_owner_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    of_the_code = Path(places.__file__).stat().st_uid
    assert all(map(is_trusted_owner, (4711, 0, of_the_code)))
    assert not is_trusted_owner(max(4711, of_the_code) + 1)
