"""Finds the transformer blocks of a model, and their sub-modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from sac.blocks.block import Block
from sac.blocks.frozen import drop_frozen, is_trained
from sac.blocks.paths import Node, children_of, clean_path, join, root_node, walk
from sac.blocks.stacks import STRONG, find_stacks, is_callable, numbering
from sac.blocks.stages import emptied_stacks
from sac.blocks.towers import Towers, parse_scope
from sac.errors import ConfigError, ModelError, Problem, listing, nearest

__all__ = ["Block", "clean_path", "drop_frozen", "find_blocks", "is_trained"]

GRANULARITIES = ("block", "submodule")
LOOKED_FOR = (
    "a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; Hugging Face layers; "
    "a model that is one block"
)


class Pattern(Protocol):
    """What is asked of a path pattern: what was written, and whether it means a path."""

    @property
    def text(self) -> str:
        """The pattern as it was written."""

    def matches(self, path: str) -> bool:
        """Return whether the module at ``path`` is meant."""


def find_blocks(
    model: nn.Module,
    *,
    patterns: Sequence[Pattern] = (),
    scope: str | Sequence[str] = "all",
    granularity: str = "block",
) -> tuple[Block, ...]:
    """Return the blocks of a model in model order, each module once and never one inside another.

    Without ``patterns`` blocks are recognised by how the model is built (Note [What is a block] in ``stacks.py``).
    With them a block is what any pattern matches, by clean path or by the path that ``named_modules`` gives.
    ``scope`` keeps the towers it names. ``granularity="submodule"`` gives instead of each block its direct children
    that hold parameters and are more than a norm or one linear map (attention, mlp), or the block if it has none.
    A pipeline stage may hold no block: then there are none (Note [Stages] in ``stages.py``).

    Raises ``ModelError`` when there is no block, none in the scope, or a pattern matches nothing; ``ConfigError`` for
    an illegal scope or granularity.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("model", f"{type(model).__name__} is no torch.nn.Module"))
    towers = parse_scope(scope)
    grain = granularity.strip().lower() if isinstance(granularity, str) else ""
    if grain not in GRANULARITIES:
        near = nearest(granularity, GRANULARITIES) if isinstance(granularity, str) else ""
        raise ConfigError(
            Problem("granularity", f"{granularity!r} is not known", expected=listing(GRANULARITIES), nearest=near)
        )
    blocks = _matched(model, patterns) if patterns else _recognised(model)
    inside = tuple(block for block in blocks if block.tower in towers)
    if blocks and not inside:
        raise ModelError(_out_of_scope(model, blocks, scope))
    if grain == "block":
        return inside
    parts: dict[int, Block] = {}
    for part in (part for block in inside for part in submodules(block)):
        parts.setdefault(id(part.module), part)  # a shared one once
    return tuple(parts.values())


def submodules(block: Block) -> tuple[Block, ...]:
    """Return the sub-modules of a block that are worth a region of their own, or the block itself if none is."""
    parts = tuple(part_of(block, node) for node in substantial_children(root_node(block.module)))
    return parts or (block,)


def substantial_children(node: Node) -> Iterator[Node]:
    """Yield the children of a module that are more than a norm or one linear map, and those of a list of parts."""
    for child in children_of(node):
        if not is_callable(child.module):  # a list of parts, as in T5
            yield from substantial_children(child)
        elif not _is_simple(child.module):
            yield child


def _is_simple(module: nn.Module) -> bool:
    """Return whether a module is no more than a norm or one linear map: its input is kept in any case."""
    if any(True for _ in module.children()):
        return not any(True for _ in module.parameters())
    return sum(p.ndim >= 2 for p in module._parameters.values() if p is not None) <= 1


def part_of(block: Block, node: Node) -> Block:
    """Return the Block of a module inside ``block``; ``node`` has its path from there."""
    path = f"{block.path}.{node.path}" if block.path else node.path
    return Block(path, node.module, block.layer, block.stack, block.stack_size, block.tower)


def _recognised(model: nn.Module) -> tuple[Block, ...]:
    towers, nodes = Towers(model), list(walk(model))
    modules = {node.path: node.module for node in nodes}
    found, emptied = [], emptied_stacks(model)
    for stack in find_stacks(model):
        if emptied and stack.rank < STRONG:  # what is left in a stage without blocks is a head, say
            continue
        size = _counted_size(modules, stack.path, stack.size)
        for node, layer in zip(stack.nodes, stack.layers, strict=True):
            found.append(Block(node.path, node.module, layer, stack.path, size, towers.of(node.path)))
    if not found and not emptied:
        raise ModelError(_not_found(model))
    order = {id(node.module): place for place, node in enumerate(nodes)}
    return tuple(sorted(found, key=lambda block: order[id(block.module)]))


def _counted_size(modules: Mapping[str, nn.Module], stack: str, size: int) -> int:
    """Return the size of the whole stack, of which a pipeline stage holds some in a numbered ModuleDict.

    ``layers: {last: 2}`` must mean the same layers on every rank, so the count in the owner's config is asked.
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
    whole = any(pattern.text == "" for pattern in patterns)  # only the empty pattern may mean the model itself
    nodes = [node for node in walk(model, repeats=True) if node.path or whole]
    chosen: dict[str, Node] = {}
    seen: set[int] = set()
    problems, emptied = [], emptied_stacks(model)
    for pattern in patterns:
        fits = [node for node in nodes if pattern.matches(node.path) or pattern.matches(_raw_path(node))]
        elsewhere = any(pattern.matches(join(path, "0")) for path in emptied)
        if not elsewhere and not any(is_callable(node.module) for node in fits):
            problems.append(_matches_nothing(model, pattern, fits, nodes))
    for node in nodes:  # a parent comes before what is inside it
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
    """Return the path of a module's outermost wrapper, where ``named_modules`` would have the module."""
    return node.wrappers[0][0] if node.wrappers else node.raw


def numbered_blocks(model: nn.Module, chosen: dict[str, Node]) -> Iterator[Block]:
    """Yield the blocks of ``model`` that are ``chosen`` (by clean path), numbered in the stacks that they lie in."""
    towers = Towers(model)
    modules = {node.path: node.module for node in walk(model, repeats=True)}
    members: dict[str, list[str]] = {}
    for path in chosen:
        members.setdefault(path.rpartition(".")[0], []).append(path)
    places: dict[str, tuple[int, int]] = {}
    for stack, paths in members.items():
        names = [path.rpartition(".")[2] for path in paths]
        layers, size = numbering(modules.get(stack), names)
        size = _counted_size(modules, stack, size)
        places.update({path: (layer, size) for path, layer in zip(paths, layers, strict=True)})
    for path, node in chosen.items():
        layer, size = places[path]
        yield Block(path, node.module, layer, path.rpartition(".")[0], size, towers.of(path))


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


def _largest_lists(model: nn.Module, limit: int = 3) -> list[tuple[str, str]]:
    """Return path and description of the lists with most children."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    lists = [node for node in walk(model) if isinstance(node.module, kinds) and len(node.module)]
    lists.sort(key=lambda node: -len(node.module._modules))
    return [(node.path, _described(node)) for node in lists[:limit]]


def _described(node: Node) -> str:
    counts: dict[str, int] = {}
    for child in node.module.children():
        counts[type(child).__name__] = counts.get(type(child).__name__, 0) + 1
    inside = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{node.path or 'the model'} ({type(node.module).__name__} of {inside})"


def _out_of_scope(model: nn.Module, blocks: Sequence[Block], scope: str | Sequence[str]) -> Problem:
    counts: dict[str, int] = {}
    for block in blocks:
        counts[block.tower] = counts.get(block.tower, 0) + 1
    have = ", ".join(f"{tower} ({count} blocks)" for tower, count in counts.items())
    wanted = scope if isinstance(scope, str) else ", ".join(scope)
    return Problem(
        type(root_node(model).module).__name__,
        f"no block of this model is in scope {wanted}; it has {have}",
        fix=f"scope: {next(iter(counts))}, or scope: all",
    )


def _matches_nothing(model: nn.Module, pattern: Pattern, fits: Sequence[Node], nodes: Sequence[Node]) -> Problem:
    name = type(root_node(model).module).__name__
    if fits and isinstance(fits[0].module, torch.jit.ScriptModule):
        return _is_scripted(fits[0])
    if fits:
        kind = type(fits[0].module).__name__
        found = f'"{pattern.text}" matches only {fits[0].path}, a {kind}, which is not called itself'
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
