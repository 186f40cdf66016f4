"""Module paths as the model's author wrote them, without the names that wrappers add.

Note [Clean paths]
DDP, FSDP1, ``torch.compile``, ``checkpoint_wrapper`` and PEFT wrap a module in another one, and the paths of
``named_modules`` then contain both names. A policy refers to the unwrapped model, so every path here is the path before
wrapping, and a wrapped module is represented by the innermost module, whose forward the block's author wrote.
``module`` and ``model`` are also ordinary names, so these two are dropped only below a class that is a wrapper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

from torch import nn

from sac.torch_private import WRAPPED_NAMES

# Class (or base class) -> attribute name of the wrapped module, for wrappers that use an ordinary name.
WRAPPER_CLASSES = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "Float16Module": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One module of a model: its raw path (with wrappers' names), its clean path, and the wrappers around it."""

    raw: str
    path: str
    module: nn.Module
    wrappers: tuple[tuple[str, nn.Module], ...] = ()  # raw path and module, outermost first


def join(parent: str, name: str) -> str:
    """Return the path of the child ``name`` of the module at ``parent``."""
    return f"{parent}.{name}" if parent else name


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's class and its bases, since FSDP2 replaces the class by a subclass."""
    return tuple(cls.__name__ for cls in type(module).__mro__)


def wrapped_name(module: nn.Module) -> str:
    """Return the attribute name under which ``module`` holds the wrapped module, or ``""`` if it is not a wrapper."""
    names = (*WRAPPED_NAMES, *(WRAPPER_CLASSES.get(cls, "") for cls in class_names(module)))
    return next((name for name in names if name in module._modules), "") if module._modules else ""


def root_node(model: nn.Module) -> Node:
    """Return the model itself, without the wrappers around it."""
    return _look_through("", "", model)


def children_of(node: Node) -> list[Node]:
    """Return the direct children of a node in order, each without its wrappers."""
    return [
        _look_through(join(node.raw, name), join(node.path, name), child)
        for name, child in node.module._modules.items()  # named_children() would skip the second use of a module
        if child is not None
    ]


def walk(model: nn.Module, *, repeats: bool = False) -> Iterator[Node]:
    """Yield every module from the root down, in the order of ``named_modules``.

    A module that is used at several paths is yielded once, under the first path, unless ``repeats`` is true.
    """
    seen: set[int] = set()
    ahead = [root_node(model)]
    while ahead:
        node = ahead.pop()
        if not repeats and id(node.module) in seen:
            continue
        seen.add(id(node.module))
        yield node
        ahead.extend(reversed(children_of(node)))


def parts_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield clean path and module of ``module`` and all below, each once; a wrapper has its wrapped module's path."""
    for node in walk(module):
        for _, wrapper in node.wrappers:
            yield node.path, wrapper
        yield node.path, node.module


def _look_through(raw: str, path: str, module: nn.Module) -> Node:
    wrappers: list[tuple[str, nn.Module]] = []
    while name := wrapped_name(module):
        held = module._modules[name]
        if held is None:
            break
        wrappers.append((raw, module))
        raw, module = join(raw, name), held
    return Node(raw, path, module, tuple(wrappers))


# -- Common names of several paths


def group_label(paths: Iterable[str]) -> str:
    """Return a common name for paths that differ in numbers: ``model.layers.0-31 (x32)``, ``layers.0,2,4 (x3)``.

    Numbers at several places are ranges if each goes with each, ``stages.0-3.blocks.0-1 (x8)``; otherwise the first
    path stands for all.
    """
    paths = list(paths)
    if len(paths) == 1:
        return paths[0] or "(model)"
    split = [path.split(".") for path in paths]
    columns = [set(words) for words in zip(*split, strict=False)]
    numbered = all(len(words) == 1 or all(word.isdigit() for word in words) for words in columns)
    if numbered and len(set(map(len, split))) == 1 and prod(map(len, columns)) == len(set(paths)):
        return f"{'.'.join(map(_ranges, columns))} (x{len(paths)})"
    return f"{paths[0]}, … (x{len(paths)})"


def _ranges(words: set[str]) -> str:
    if len(words) == 1:
        return next(iter(words))
    numbers = enumerate(sorted(map(int, words)))
    runs = ([number for _, number in run] for _, run in groupby(numbers, lambda pair: pair[1] - pair[0]))
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
