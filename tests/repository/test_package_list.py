"""pyproject.toml lists every folder and every file that a wheel has to hold; test_packaging.py builds one."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[2]
CONFIG = read_configuration(ROOT / "pyproject.toml", expand=False)["tool"]["setuptools"]
FOLDERS = {name: CONFIG["package-dir"].get(name, name.replace(".", "/")) for name in CONFIG["packages"]}


def test_every_folder_with_modules_is_a_package() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "sac").rglob("__init__.py")}
    assert found | {"policies", "examples"} == set(FOLDERS.values())


def test_every_other_file_is_package_data() -> None:
    listed = [(Path(FOLDERS[name]), one) for name, patterns in CONFIG["package-data"].items() for one in patterns]
    for folder in ("sac", "policies", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if not path.is_file() or path.suffix in (".py", ".pyc", ".so") or "_sac_native" in path.name:
                continue
            own = path.relative_to(ROOT)
            assert any(own.is_relative_to(at) and fnmatch(own.relative_to(at).as_posix(), one) for at, one in listed), (
                own
            )
