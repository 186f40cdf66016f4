"""Private names of torch are read in one file, each with its reason; see Note [Private names of torch]."""

import ast
import inspect
import re
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sac import torch_private

PACKAGE = Path(torch_private.__file__).parent
SOURCE = Path(torch_private.__file__).read_text(encoding="utf-8")

# Names of ours with an underscore may be read on anything; these are torch's, read on objects of torch.
NOT_TORCHS = {"_getframe", "_asdict", "_fields", "_replace", "_slotnames"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` for an expression of names, ``""`` for another one."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def private_names(source: str) -> set[str]:
    """Return the private names of torch that a source reaches by import, by attribute, or by ``getattr``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            paths = [path] if (path := dotted(node)).startswith("torch.") else []
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            owner, name = dotted(node.args[0]), node.args[1]
            is_torch = owner.split(".")[0] in ("torch", "dist", "forward_ad")
            paths = [f"{owner}.{name.value}"] if is_torch and isinstance(name, ast.Constant) else []
        else:
            continue
        # An op is no name of Python's: `torch.ops.aten._grouped_mm`. Storages are objects: see PRIVATE_ATTRIBUTES.
        ours = (path for path in paths if not path.startswith("torch.ops."))
        found |= {path for path in ours if any(map(is_private, path.split(".")))}
    return {path for path in found if path.split(".")[-1] not in torch_private.PRIVATE_ATTRIBUTES}


def defined_names(source: str) -> set[str]:
    """Return every name that a source gives to a function, a class, an attribute or a variable."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


SOURCES = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
OURS = set().union(*map(defined_names, SOURCES.values()))


def test_no_other_file_reads_a_private_name_of_torch():
    # The self-test of the C++ library runs in a process of its own, without sac.
    others = {path: source for path, source in SOURCES.items() if path.name not in ("torch_private.py", "self_test.py")}
    found = {str(path): private_names(source) for path, source in others.items()}
    assert {path: names for path, names in found.items() if names} == {}
    seen = "from torch._subclasses import FakeTensor\nf = getattr(torch, '_neg_view', None)\ntorch._C.f()"
    assert private_names(seen) == {"torch._subclasses.FakeTensor", "torch._neg_view", "torch._C", "torch._C.f"}


def test_private_attributes_of_objects_are_listed():
    read = {
        node.attr: str(path)
        for path, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not dotted(node).startswith("torch.ops.")
        and path.name != "torch_private.py"
    }
    unknown = {name: path for name, path in read.items() if name not in OURS | NOT_TORCHS}
    assert {name: path for name, path in unknown.items() if name not in torch_private.PRIVATE_ATTRIBUTES} == {}


def test_listed_attributes_are_there():
    weight = nn.Linear(2, 2).weight
    output = weight.sum()
    objects = (weight, weight.untyped_storage(), nn.Linear(2, 2), output.grad_fn, torch.ops.aten.mm.default, DTensor)
    generator = torch.Generator()
    names = {name for one in (*objects, generator) for name in dir(one)} | set(DTensor.__slots__)
    assert torch_private.PRIVATE_ATTRIBUTES.keys() - names == set()


def guarded() -> dict[str, object]:
    """Return what the file defines for others, as far as it is not a function or a class of its own."""
    names = re.findall(r"^([A-Za-z]\w*)(?:: [^=\n]+)? = ", SOURCE, re.MULTILINE)
    return {name: getattr(torch_private, name) for name in names}


# What a build may lack without the suite's noticing it elsewhere: in 2.13 nothing.
MISSING_BEFORE_2_13 = {"SHOWS_SAVED_TENSORS", "SHOWS_RESULTS_TO_POLICIES", "MAYBE_ALIASING"}


def test_the_installed_torch_has_every_name():
    known = guarded()
    assert len(known) > 30  # the pattern finds them
    lacking = {name for name, value in known.items() if value is None or value is False}
    assert lacking <= (set() if torch.__version__ >= "2.13" else MISSING_BEFORE_2_13)


def test_every_name_is_used():
    rest = "\n".join(source for path, source in SOURCES.items() if path.name != "torch_private.py")
    functions = [name for name, one in vars(torch_private).items() if inspect.isfunction(one)]
    ours = [
        one
        for one in functions
        if not is_private(one) and getattr(torch_private, one).__module__ == "sac.torch_private"
    ]
    unused = [name for name in (*guarded(), *ours) if not re.search(rf"\b{name}\b", rest)]
    assert unused == ["PRIVATE_ATTRIBUTES"]
