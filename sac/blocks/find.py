"""Find the blocks of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sac.blocks.paths import Node, children_of, clean_path, join, root_node, walk
from sac.blocks.stacks import STACK_NAMES, STRONG, find_stacks, is_callable, numbering
from sac.errors import ConfigError, ModelError, Problem, listing, nearest
from sac.policy.model import Rule

# -- Blocks


@dataclass(frozen=True, slots=True)
class Block:
    """One module to checkpoint: a transformer block or a sub-module of one."""

    path: str  # clean dotted path in the model: "model.layers.3", and "" for the model itself
    module: nn.Module
    layer: int  # its index within its stack
    stack: str  # path of the stack: "model.layers"
    stack_size: int  # number of layers in the whole stack


# -- Pipeline stages: models that hold some or none of the blocks of the whole model

# Note [Stages]
#
# A stage is made by removing layers from the whole model. We recognise it by either of two signs: a list with the name
# of a stack of blocks contains only placeholders, or a stack holds fewer layers than its layer count says. On a stage
# it is not an error if there are no blocks, if `layers` chooses none of those present, or if a rule matches no region:
# the blocks may be on another stage. A note reports this once and training continues, so that one loop over the model
# parts works on every rank.

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def emptied_stacks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the lists that have the name of a stack and hold no block; see Note [Stages]."""
    return tuple(node.path for node in walk(model) if _is_emptied(node))


def is_stage(model: nn.Module, blocks: Sequence[Block]) -> bool:
    """Return whether ``model``, whose blocks are ``blocks``, holds only some of the layers of the whole model."""
    sizes = {block.stack: block.stack_size for block in blocks}
    held = {node.path: _held(node.module) for node in walk(model) if isinstance(node.module, LISTS)}
    return bool(emptied_stacks(model)) or any(size > held.get(path, size) for path, size in sizes.items())


def rules_here(rules: Sequence[Rule], blocks: Sequence[Block]) -> tuple[Rule, ...]:
    """Return the rules that match a region of ``blocks``, or are not limited to some regions."""
    return tuple(
        rule
        for rule in rules
        if not rule.is_for_some_regions
        or any(rule.matches_region(block.path, block.layer, block.stack_size) for block in blocks)
    )


def idle_note(model: nn.Module, blocks: Sequence[Block]) -> str:
    """Return the note for a stage without any region; ``blocks`` are the blocks it has."""
    if blocks:
        layers = ", ".join(f"{block.layer} of {block.stack_size}" for block in blocks)
        why = f"`layers` chooses none of the layers it has ({layers})"
    else:
        why = f"nothing is in `{'`, `'.join(emptied_stacks(model))}`"
    return f"{type(model).__name__}: no block to checkpoint in this part of a model: {why}. sac.apply had nothing to do"


def _is_emptied(node: Node) -> bool:
    named = node.path.rpartition(".")[2].lower() in STACK_NAMES
    return named and isinstance(node.module, LISTS) and _held(node.module) == 0


def _held(module: nn.Module) -> int:
    """Return the number of children of a list, without placeholders for layers that are on another stage."""
    return sum(child is not None and not isinstance(child, nn.Identity) for child in module._modules.values())


# -- The transformer blocks of a model and their sub-modules

__all__ = ["Block", "clean_path", "find_blocks"]

LOOKED_FOR = (
    "a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; Hugging Face layers; "
    "a model that is one block"
)


class Pattern(Protocol):
    """The interface of a path pattern."""

    @property
    def text(self) -> str:
        """The pattern as written."""

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the module at ``path``."""


def find_blocks(model: nn.Module, *, patterns: Sequence[Pattern] = ()) -> tuple[Block, ...]:
    """Return the blocks of a model in model order, each module once and never one inside another.

    Without ``patterns``, blocks are recognised by the structure of the model (Note [What is a block] in ``stacks.py``).
    With ``patterns``, a block is a module that any pattern matches, by clean path or by its path in ``named_modules``.
    The result may be empty for a pipeline stage (see Note [Stages]).

    Raises ``ModelError`` if there is no block, or a pattern matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("model", f"{type(model).__name__} is not a torch.nn.Module"))
    return _matched(model, patterns) if patterns else _recognised(model)


def divided(blocks: Iterable[Block], parts_of: Callable[[Block], Iterable[Block]]) -> tuple[Block, ...]:
    """Return the parts of all ``blocks``, in order; a shared module counts once."""
    parts: dict[int, Block] = {}
    for part in (part for block in blocks for part in parts_of(block)):
        parts.setdefault(id(part.module), part)
    return tuple(parts.values())


def submodules(block: Block) -> tuple[Block, ...]:
    """Return the sub-modules of a block that are worth their own region, or the block itself if there are none."""
    parts = tuple(part_of(block, node) for node in substantial_children(root_node(block.module)))
    return parts or (block,)


def substantial_children(node: Node) -> Iterator[Node]:
    """Yield the children of a module that are more than a norm or one linear map; lists of parts are looked into."""
    for child in children_of(node):
        if not is_callable(child.module):  # a list of parts, as in T5
            yield from substantial_children(child)
        elif not _is_simple(child.module):
            yield child


def _is_simple(module: nn.Module) -> bool:
    """Return whether a module is at most a norm or one linear map, whose input is kept in any case."""
    if any(True for _ in module.children()):
        return not any(True for _ in module.parameters())
    return sum(p.ndim >= 2 for p in module._parameters.values() if p is not None) <= 1


def part_of(block: Block, node: Node) -> Block:
    """Return the ``Block`` of a module inside ``block``; the path of ``node`` is relative to ``block``."""
    path = f"{block.path}.{node.path}" if block.path else node.path
    return Block(path, node.module, block.layer, block.stack, block.stack_size)


def _recognised(model: nn.Module) -> tuple[Block, ...]:
    nodes = list(walk(model))
    modules = {node.path: node.module for node in nodes}
    found, emptied = [], emptied_stacks(model)
    for stack in find_stacks(model):
        if emptied and stack.rank < STRONG:  # the rest of a stage without blocks, for example a head
            continue
        size = _counted_size(modules, stack.path, stack.size)
        for node, layer in zip(stack.nodes, stack.layers, strict=True):
            found.append(Block(node.path, node.module, layer, stack.path, size))
    if not found and not emptied:
        raise ModelError(_not_found(model))
    order = {id(node.module): index for index, node in enumerate(nodes)}
    return tuple(sorted(found, key=lambda block: order[id(block.module)]))


def _counted_size(modules: Mapping[str, nn.Module], stack: str, size: int) -> int:
    """Return the size of the whole stack if a pipeline stage holds part of it in a numbered ModuleDict.

    ``layers: {last: 2}`` must mean the same layers on every rank, so the count comes from the owner's config.
    """
    owner, _, name = stack.rpartition(".")
    if not isinstance(modules.get(stack), nn.ModuleDict) or name not in ("layers", "blocks", "h"):
        return size
    for module in (modules.get(owner), modules.get("")):
        for holder in ("config", "model_args", "args", "params"):
            for field in ("n_layers", "num_hidden_layers", "num_layers", "n_layer"):
                count = getattr(getattr(module, holder, None), field, None)
                if isinstance(count, int) and count >= size:
                    return count
    return size


def _matched(model: nn.Module, patterns: Sequence[Pattern]) -> tuple[Block, ...]:
    whole = any(pattern.text == "" for pattern in patterns)  # only the empty pattern may match the model itself
    nodes = [node for node in walk(model, repeats=True) if node.path or whole]
    chosen: dict[str, Node] = {}
    seen: set[int] = set()
    problems, emptied = [], emptied_stacks(model)
    for pattern in patterns:
        fits = [node for node in nodes if pattern.matches(node.path) or pattern.matches(_raw_path(node))]
        elsewhere = any(pattern.matches(join(path, "0")) for path in emptied)
        if not elsewhere and not any(is_callable(node.module) for node in fits):
            problems.append(_matches_nothing(model, pattern, fits, nodes))
    for node in nodes:  # a parent comes before its children
        wanted = any(pattern.matches(node.path) or pattern.matches(_raw_path(node)) for pattern in patterns)
        if not wanted or not is_callable(node.module) or id(node.module) in seen:
            continue
        if not any(node.path.startswith(f"{path}." if path else "") for path in chosen):
            chosen[node.path] = node
            seen.add(id(node.module))
    if problems:
        raise ModelError(problems)
    return tuple(numbered_blocks(model, chosen))


def _raw_path(node: Node) -> str:
    """Return the path of a module's outermost wrapper, as ``named_modules`` gives it."""
    return node.wrappers[0][0] if node.wrappers else node.raw


def numbered_blocks(model: nn.Module, chosen: dict[str, Node]) -> Iterator[Block]:
    """Yield the ``chosen`` modules of ``model`` (by clean path) as blocks, numbered within their stacks."""
    modules = {node.path: node.module for node in walk(model, repeats=True)}
    members: dict[str, list[str]] = {}
    for path in chosen:
        members.setdefault(path.rpartition(".")[0], []).append(path)
    numbered: dict[str, tuple[int, int]] = {}
    for stack, paths in members.items():
        names = [path.rpartition(".")[2] for path in paths]
        layers, size = numbering(modules.get(stack), names)
        size = _counted_size(modules, stack, size)
        numbered.update({path: (layer, size) for path, layer in zip(paths, layers, strict=True)})
    for path, node in chosen.items():
        layer, size = numbered[path]
        yield Block(path, node.module, layer, path.rpartition(".")[0], size)


def _not_found(model: nn.Module) -> Problem:
    scripted = next((node for node in walk(model) if isinstance(node.module, torch.jit.ScriptModule)), None)
    if scripted is not None:
        return _is_scripted(scripted)
    lists = _largest_lists(model)
    have = f"; its largest lists: {', '.join(text for _, text in lists)}" if lists else "; it has no list of modules"
    example = f"{lists[0][0]}.*".lstrip(".") if lists else "path.to.layers.*"
    return Problem(
        type(root_node(model).module).__name__,
        f"no transformer blocks were found in this model{have}",
        expected=LOOKED_FOR,
        fix=f'name them, for example blocks: ["{example}"], in the config, or under regions: in the policy',
    )


def _is_scripted(node: Node) -> Problem:
    return Problem(
        node.path or type(node.module).__name__,
        "this module is compiled by TorchScript, which calls its own code and no forward of ours",
        fix="put sac on the plain model; torch.compile goes with it, TorchScript does not",
    )


def _largest_lists(model: nn.Module) -> list[tuple[str, str]]:
    """Return path and description of the lists with the most children."""
    classes = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    lists = [node for node in walk(model) if isinstance(node.module, classes) and len(node.module)]
    lists.sort(key=lambda node: -len(node.module._modules))
    return [(node.path, _described(node)) for node in lists[:3]]


def _described(node: Node) -> str:
    counts: dict[str, int] = {}
    for child in node.module.children():
        counts[type(child).__name__] = counts.get(type(child).__name__, 0) + 1
    inside = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{node.path or 'the model'} ({type(node.module).__name__} of {inside})"


def _matches_nothing(model: nn.Module, pattern: Pattern, fits: Sequence[Node], nodes: Sequence[Node]) -> Problem:
    name = type(root_node(model).module).__name__
    if fits and isinstance(fits[0].module, torch.jit.ScriptModule):
        return _is_scripted(fits[0])
    if fits:
        class_name = type(fits[0].module).__name__
        found = f'"{pattern.text}" matches only {fits[0].path}, a {class_name}, which is not called itself'
        return Problem("regions.blocks", found, fix=f'write "{pattern.text}.*" for its children')
    families = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", node.path) for node in nodes))
    tail = [path for path in families if path.endswith("." + pattern.text)]
    near = tail[0] if tail else nearest(pattern.text, families)
    return Problem(
        "regions.blocks",
        f'"{pattern.text}" matches no module of {name}',
        nearest=f'"{near}"' if near else "",
        expected="" if near else listing(list(dict.fromkeys(_list_patterns(nodes))) or families, limit=8),
        fix="patterns are matched against whole paths from the model down; * is one segment, ** any number",
    )


def _list_patterns(nodes: Sequence[Node]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node.module, (nn.ModuleList, nn.Sequential)) and len(node.module):
            yield re.sub(r"(?<=\.)\d+(?=\.|$)", "*", node.path) + ".*"
