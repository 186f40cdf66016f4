"""What pip installs: the wheel has the policies and the type marker, and works where it is put."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")  # a copy, since a build leaves folders in its source
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("sac", "policies"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    _pip("install", "--no-deps", "--target", str(target), str(wheel))
    return target


def test_wheel_holds_every_module_policy_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sac").rglob("*.py")}
    policies = {f"sac/policies/{path.name}" for path in (ROOT / "policies").glob("*.yaml")}
    assert policies
    assert modules | policies | {"sac/py.typed", "sac/policies/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "examples/"))]
    assert [name for name in names if name.endswith("LICENSE")]


def test_installed_package_finds_its_policies(installed):
    program = (
        "import sac, sac.policy.load as files\n"
        "print(sac.__file__)\n"
        "for name in files.shipped_policies():\n"
        "    print(name, files.load_policy(name).source)\n"
    )
    lines = _run_there(installed, "-c", program).splitlines()
    assert Path(lines[0]).is_relative_to(installed)
    loaded = dict(line.split(" ", 1) for line in lines[1:])
    assert loaded.keys() == {path.stem for path in (ROOT / "policies").glob("*.yaml")}
    assert "general" in loaded
    assert all(str(installed) in source for source in loaded.values())


def test_console_script_is_installed_and_checks_a_shipped_policy(installed):
    assert (installed / "bin" / "sac").exists()
    assert "general" in _run_there(installed, str(installed / "bin" / "sac"), "check", "general")


def _run_there(installed: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=installed.parent, env=environment
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _pip(*arguments: str) -> None:
    run = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
