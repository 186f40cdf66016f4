"""Where libraries lie: next to sac's own code, or in a cache directory to which only this user can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

CACHE_VARIABLE = "SAC_CACHE_DIR"


def package_directory() -> Path:
    """Return the directory of a library that was installed with sac, as part of a wheel."""
    return Path(__file__).parent


def cache_directory() -> Path | None:
    """Return the directory that ``sac build`` writes to; None if no variable names one and the user has no home.

    It is ``sac/native`` in the first of: ``SAC_CACHE_DIR``, ``XDG_CACHE_HOME``, ``~/.cache``.
    """
    if given := os.environ.get(CACHE_VARIABLE):
        root = Path(given).absolute()
    elif (given := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(given):  # its standard ignores relative paths
        root = Path(given)
    else:
        try:
            root = Path.home() / ".cache"
        except RuntimeError:
            return None
    return root / "sac" / "native"


# Note [Who may write a library]
#
# Loading a library runs its code. In the cache, a library is loaded only if no other user could have put it there:
#  1. The directory and the file belong to the user, to root, or to the owner of sac's own code, which runs anyway. The
#     last two allow a cache that an administrator has built.
#  2. Neither is writable by group or others. A marker that says that a library has passed its self-test lies in the
#     same directory, so the same holds for it.
# A library inside the installed package is as trustworthy as the Python files next to it: it is not checked.


def distrusted(path: Path) -> str:
    """Return why a file or directory of the cache is not used, ``""`` if it is. See Note [Who may write a library].

    Raises ``OSError`` if the path cannot be looked at.
    """
    found = path.stat()
    if not is_trusted_owner(found.st_uid):
        return f"{path} belongs to another user (id {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable by other users (chmod go-w {path})"
    return ""


def is_trusted_owner(user: int) -> bool:
    """Whether files of this user may be loaded."""
    return user in (os.geteuid(), 0, Path(__file__).stat().st_uid)


def make_private(directory: Path) -> None:
    """Make a directory with what it lies in; those that are not there yet are made for this user alone."""
    for one in [*reversed(directory.parents), directory]:
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)
