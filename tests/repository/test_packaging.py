"""What pip installs: the wheel has the policies and the type marker, and works where it is put."""

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import sac

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sac"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")  # a copy, since a build leaves folders in its source
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("sac", "policies", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--wheel-dir", str(out), str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with sac, installed from the wheel, and the packages that it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    _pip("--python", str(folder / "bin" / "python"), "install", "--no-deps", "--no-compile", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("sac-*.dist-info/METADATA")
    required = Parser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    for name in _all_required(required):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            (packages / top).symlink_to(distribution(name).locate_file(top))
    return folder


def _all_required(required: list[str]) -> set[str]:
    """The names of packages that are required without an extra, and those that these require."""
    found: set[str] = set()
    left = [*required]
    while left:
        one = Requirement(left.pop())
        if (one.marker is None or one.marker.evaluate({"extra": ""})) and one.name not in found:
            found.add(one.name)
            left += distribution(one.name).requires or []
    return found


def test_wheel_holds_every_module_policy_and_the_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sac").rglob("*.py")}
    policies = {f"sac/policies/{path.name}" for path in (ROOT / "policies").glob("*.yaml")}
    examples = {f"sac/examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert {"sac/examples/llama-3.2-1b.json", "sac/examples/text.txt", "sac/examples/__init__.py"} <= examples
    assert policies
    assert modules | policies | examples | {"sac/py.typed", "sac/policies/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "examples/"))]
    assert [name for name in names if name.endswith("LICENSE")]
    assert wheel.name.endswith("-py3-none-any.whl")


def test_installed_package_finds_its_policies_and_has_a_command(empty, tmp_path):
    program = (
        "import sac, sac.policy.load as files\n"
        "print(sac.__file__)\n"
        "for name in files.shipped_policies(): print(name, files.load_policy(name).source)\n"
    )
    lines = _run_in(empty, tmp_path, "python", "-c", program).stdout.splitlines()
    assert Path(lines[0]).is_relative_to(empty)
    loaded = dict(line.split(" ", 1) for line in lines[1:])
    assert loaded.keys() == {path.stem for path in (ROOT / "policies").glob("*.yaml")}
    assert all(str(empty) in source for source in loaded.values())
    assert "general" in _run_in(empty, tmp_path, "sac", "check", "general").stdout


# In an empty environment: no NumPy, no transformers


def test_compare_of_a_shipped_example_in_an_empty_environment(empty, tmp_path):
    model = ["--model", "sac.examples.training_loop:small", "--layers", "2"]
    told = _run_in(
        empty, tmp_path, "sac", "compare", *model, "--steps", "2", "--modes", "none,full,selective,gpt2", "--json"
    )
    rows = {row["mode"]: row for row in json.loads(told.stdout)["modes"]}
    assert all("error" not in row and row["max_gradient_difference"] == 0 for row in rows.values())
    assert rows["full"]["kept_bytes"] < rows["gpt2"]["kept_bytes"] < rows["none"]["kept_bytes"]
    assert "UserWarning" not in told.stderr


def test_what_an_empty_environment_lacks_is_said_before_a_model_is_built(empty, tmp_path):
    told = _run_in(empty, tmp_path, "sac", "compare", "--model", "hf:llama-3.2-1b", expected=1)
    assert "python: the package 'transformers' is not installed\n    fix: pip install 'sac[hf]'" in told.stderr
    assert told.stdout == ""


@pytest.mark.parametrize("version", ["3.10", "3.13", "3.14"])
def test_what_needs_no_torch_runs_on_every_python(version, tmp_path):
    """All code compiles there; policies and the command line, which do not import torch, work."""
    python = f"python{version}"
    environment = {**os.environ, "PYENV_VERSION": version, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        subprocess.run([python, "-c", ""], check=True, capture_output=True, env=environment)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"there is no {python} here")
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)  # without its compiled part
    program = (
        "import pathlib, sys, sac\n"
        "from sac.tools.cli import main\n"
        "for file in pathlib.Path(sac.__file__).parent.rglob('*.py'): compile(file.read_text('utf-8'), file, 'exec')\n"
        "for path in [*pathlib.Path('policies').glob('*.yaml')][:3]:\n"
        "    pathlib.Path(sys.argv[1]).write_text(sac.load_policy(path.stem).to_yaml())\n"
        "    assert sac.load_policy(sys.argv[1]).rules == sac.load_policy(path.stem).rules\n"
        "print(sys.version.split('.')[:2], 'torch' in sys.modules)\n"
        "main(['--help'])"
    )
    run = subprocess.run(
        [python, "-W", "error", "-c", program, str(tmp_path / "written.yaml")],
        env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{version.split('.')} False\nusage: sac")


def _run_in(
    environment: Path, folder: Path, command: str, *arguments: str, expected: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command of an environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SAC_"))}
    run = subprocess.run(
        [environment / "bin" / command, *arguments], capture_output=True, text=True, cwd=folder, env=kept
    )
    assert run.returncode == expected, run.stderr
    return run


def _pip(*arguments: str) -> None:
    run = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_module_can_be_imported_and_the_face_stays_functions():
    for path in PACKAGE.rglob("*.py"):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    assert all(callable(getattr(sac, name)) for name in sac.__all__)
