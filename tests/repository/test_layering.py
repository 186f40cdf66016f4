"""The house's rules about imports, read from the source and from a fresh interpreter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sac

PACKAGE = Path(__file__).parents[2] / "sac"

# From the bottom up. A module may import from units that stand in a lower layer, and from its own unit.
LAYERS = (
    {"errors"},
    {"torch_private"},
    {"decision_log", "extras", "tables"},
    {"tensors"},
    {"memory_timeline", "outer_hooks"},
    {"checksums"},
    {"policy"},
    {"ops"},
    {"config_keys"},
    {"stores"},
    {"engine"},
    {"rng_tracker"},
    {"config"},
    {"blocks"},
    {"reporting"},
    {"planner"},
    {"checkpointing"},
    {"full"},
    {"compat"},
    {"tools"},
    {"__init__", "__main__"},  # the face
)
RANKS = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}


def unit_of(parts: tuple[str, ...]) -> str:
    return parts[1] if len(parts) > 1 else "__init__"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> tuple[str, ...]:
    return ("sac", *path.relative_to(PACKAGE).with_suffix("").parts)


def imported_units(source: str) -> set[str]:
    """Return the units of sac that a source imports anywhere, in functions too; not what only type checkers see."""
    tree = ast.parse(source)
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {
                unit_of(tuple(alias.name.split("."))) for alias in node.names if alias.name.split(".")[0] == "sac"
            }
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            parts = tuple((node.module or "").split("."))
            if parts == ("sac",):
                found |= {alias.name if alias.name in RANKS else "__init__" for alias in node.names}
            elif parts[0] == "sac":
                found.add(unit_of(parts))
    return found


def upward(unit: str, source: str) -> list[str]:
    return sorted(used for used in imported_units(source) if used != unit and RANKS[used] >= RANKS[unit])


def test_imports_go_down_only():
    units = {path: unit_of(name_of(path)) for path in modules()}
    homeless = set(units.values()) - RANKS.keys()
    assert not homeless, f"give {sorted(homeless)} a place in LAYERS"
    found = {str(path): upward(unit, path.read_text(encoding="utf-8")) for path, unit in units.items()}
    assert {path: used for path, used in found.items() if used} == {}
    assert upward("policy", "def f():\n    import sac.config\nfrom sac import apply") == ["__init__", "config"]


def imported_files(source: str) -> set[str]:
    """Return the modules of sac that a source imports anywhere, also where only type checkers look."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that cannot be put into an order in which each imports only earlier ones."""
    left = dict(imports)
    while free := [name for name, used in left.items() if not used & left.keys() - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_file_imports_one_that_leads_back_to_it():
    imports = {}
    for path in modules():
        name = ".".join(name_of(path)).removesuffix(".__init__")
        imports[name] = imported_files(path.read_text(encoding="utf-8"))
    assert circles(imports) == []
    assert circles(imports | {"sac.errors": {"sac.config"}}) != []


def test_no_module_has_the_name_of_a_function_of_the_face():
    stems = {path.stem for path in modules()} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not stems & {*sac.__all__}


@pytest.mark.slow
def test_import_of_sac_brings_no_third_party_package_but_torch_and_yaml_and_not_the_command_line():
    program = (
        "import sys, torch, yaml\n"
        "before = {*sys.modules}\n"
        "import sac\n"
        "names = {*sys.modules} - before\n"
        "print(*sorted({name.partition('.')[0] for name in names} - {*sys.stdlib_module_names}))\n"
        "print(*sorted(name for name in names if name.startswith('sac.')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent, check=True
    )
    packages, ours = run.stdout.splitlines()
    assert packages == "sac"
    loaded = {unit_of(tuple(name.split("."))) for name in ours.split()}
    assert not {unit for unit in loaded if RANKS[unit] > RANKS["__init__"]}
