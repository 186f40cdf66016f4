"""The policies that come with sac, and how a name or path becomes a file."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from sac.errors import PolicyError, listing, nearest
from sac.policy.model import Mark
from sac.policy.nodes import Findings, shown

_ENDINGS = (".yaml", ".yml")


def shipped_directory() -> Path:
    """Return the directory of the shipped policies: package data, or ``policies/`` of a checkout run in place."""
    try:
        return Path(str(resources.files("sac.policies")))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[2] / "policies"


def shipped_policies() -> tuple[str, ...]:
    """Return the names of the shipped policies, sorted."""
    return tuple(sorted(path.stem for path in shipped_directory().glob("*.yaml")))


def is_shipped(mark: Mark) -> bool:
    """Return whether what stands at ``mark`` was written by us and not by the user."""
    return Path(mark.file).parent == shipped_directory()


def shipped_policy_path(name: str) -> Path:
    """Return the file of a shipped policy; raises ``PolicyError`` for an unknown name. Case and ``-``/``_`` are one."""
    findings = Findings()
    path = _find_shipped(name, Mark("policy"), findings)
    if path is None:
        raise PolicyError(findings.problems())
    return path


def looks_like_path(text: str) -> bool:
    """Return whether ``text`` names a file and not a shipped policy."""
    return text.lower().endswith(_ENDINGS) or any(sep in text for sep in (os.sep, os.altsep) if sep)


def find_file(text: str, base: Path, mark: Mark, findings: Findings) -> Path | None:
    """Return the file that ``text`` names: a shipped policy, or a path (relative ones start at ``base``)."""
    if not looks_like_path(text):
        return _find_shipped(text, mark, findings)
    try:
        path = base / os.path.expanduser(text)
        path.stat()  # not exists(): what else it passes over differs between versions of Python
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        near = nearest(Path(text).stem, shipped_policies())
        fix = f'the shipped policy is written "{near}", without a path' if near else "check the path"
        findings.add(mark, f'there is no file "{shown(text)}"', nearest=near, fix=fix)
        return None
    except OSError as error:
        findings.add(mark, f'the file "{shown(text)}" cannot be reached: {error.strerror}', fix="check the path")
        return None
    return path


def _find_shipped(name: str, mark: Mark, findings: Findings) -> Path | None:
    names = shipped_policies()
    word = name.strip().lower().replace("-", "_")
    if word in names:
        return shipped_directory() / f"{word}.yaml"
    fix = 'to name a file, give a path that ends in .yaml or has a "/" in it'
    found = f'no shipped policy is called "{shown(name)}"'
    findings.add(mark, found, expected=listing(names), nearest=nearest(word, names), fix=fix)
    return None
