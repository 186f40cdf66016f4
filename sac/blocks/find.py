"""Find the blocks of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import nn

from sac.blocks.paths import Node, children_of, join, root_node, walk
from sac.blocks.stacks import STACK_NAMES, STRONG, find_layers, is_callable, numbering
from sac.errors import ConfigError, ModelError, Problem, listing, nearest
from sac.policy.model import Rule
from sac.policy.patterns import PathPattern

# -- Blocks


@dataclass(frozen=True, slots=True)
class Block:
    """One module to checkpoint: a transformer block or a sub-module of one."""

    path: str  # clean dotted path in the model: "model.layers.3", and "" for the model itself
    module: nn.Module
    layer: int  # its index within its stack
    stack: str  # path of the stack: "model.layers"
    stack_size: int  # number of layers in the whole stack

    def is_meant_by(self, rule: Rule) -> bool:
        """Return whether `blocks` and `layers` of a rule match this block."""
        return rule.matches_region(self.path, self.layer, self.stack_size)


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
    empty = (path for path, count in _held(model).items() if count == 0)
    return tuple(path for path in empty if path.rpartition(".")[2].lower() in STACK_NAMES)


def is_stage(model: nn.Module, blocks: Sequence[Block]) -> bool:
    """Return whether ``model``, whose blocks are ``blocks``, holds only some of the layers of the whole model."""
    held = _held(model)
    return bool(emptied_stacks(model)) or any(one.stack_size > held.get(one.stack, one.stack_size) for one in blocks)


def rules_here(rules: Sequence[Rule], blocks: Sequence[Block]) -> tuple[Rule, ...]:
    """Return the rules that match a region of ``blocks``, or are not limited to some regions."""
    return tuple(
        rule for rule in rules if not (rule.blocks or rule.layers) or any(one.is_meant_by(rule) for one in blocks)
    )


def idle_note(model: nn.Module, blocks: Sequence[Block]) -> str:
    """Return the note for a stage without any region; ``blocks`` are the blocks it has."""
    layers = ", ".join(f"{block.layer} of {block.stack_size}" for block in blocks)
    why = f"`layers` chooses none of those it has, {layers}" if layers else "its stack is empty"
    return f"{type(model).__name__}: no block to checkpoint in this part of a model: {why}. sac.apply had nothing to do"


def _held(model: nn.Module) -> dict[str, int]:
    """Return the number of children of each list, without placeholders for layers that are on another stage."""
    lists = (node for node in walk(model) if isinstance(node.module, LISTS))
    return {one.path: sum(not isinstance(child.module, nn.Identity) for child in children_of(one)) for one in lists}


# -- The transformer blocks of a model and their sub-modules


def find_blocks(model: nn.Module, *, patterns: Sequence[PathPattern] = ()) -> tuple[Block, ...]:
    """Return the blocks of a model in model order, each module once and never one inside another.

    Without ``patterns``, blocks are recognised by the structure of the model (Note [What is a block] in ``stacks.py``).
    With ``patterns``, a block is a module that any pattern matches, by clean path or by its path in ``named_modules``.
    The result may be empty for a pipeline stage (see Note [Stages]).

    Raises ``ModelError`` if there is no block, or a pattern matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("model", f"{type(model).__name__} is not a torch.nn.Module"))
    return _matched(model, patterns) if patterns else _recognised(model)


def submodules(blocks: Iterable[Block]) -> tuple[Block, ...]:
    """Return the sub-modules of blocks that are worth their own region, or a block without any itself, each once."""
    parts: dict[int, Block] = {}
    for block in blocks:
        nodes = _substantial_children(root_node(block.module))
        inner = [replace(block, path=join(block.path, node.path), module=node.module) for node in nodes]
        for part in inner or [block]:
            parts.setdefault(id(part.module), part)
    return tuple(parts.values())


def _substantial_children(node: Node) -> Iterator[Node]:
    """Yield the children of a module that are more than a norm or one linear map; lists of parts are looked into."""
    for child in children_of(node):
        if not is_callable(child.module):  # a list of parts, as in T5
            yield from _substantial_children(child)
        elif not _is_simple(child.module):
            yield child


def _is_simple(module: nn.Module) -> bool:
    """Return whether a module is at most a norm or one linear map, whose input is kept in any case."""
    if any(True for _ in module.children()):
        return not any(True for _ in module.parameters())
    return sum(p.ndim >= 2 for p in module._parameters.values() if p is not None) <= 1


def _recognised(model: nn.Module) -> tuple[Block, ...]:
    layers, rank = find_layers(model)
    if emptied := emptied_stacks(model):
        layers = layers if rank >= STRONG else []  # the rest of a stage without blocks, for example a head
    if not layers and not emptied:
        raise ModelError(_not_found(model))
    order = {id(node.module): index for index, node in enumerate(walk(model))}
    layers.sort(key=lambda node: order[id(node.module)])
    return numbered_blocks(model, {node.path: node for node in layers})


def _matched(model: nn.Module, patterns: Sequence[PathPattern]) -> tuple[Block, ...]:
    whole = any(pattern.text == "" for pattern in patterns)  # only the empty pattern may match the model itself
    nodes = [node for node in walk(model, repeats=True) if node.path or whole]
    problems, emptied, wanted = [], emptied_stacks(model), set()
    for pattern in patterns:
        fits = [node for node in nodes if _fits(pattern, node)]
        called = [node.path for node in fits if is_callable(node.module)]
        wanted.update(called)
        if not called and not any(pattern.matches(join(path, "0")) for path in emptied):
            problems.append(_matches_nothing(model, pattern, fits, nodes))
    if problems:
        raise ModelError(problems)
    chosen: dict[str, Node] = {}
    seen: set[int] = set()
    for node in nodes:  # a parent comes before its children
        inside = any(node.path.startswith(f"{path}." if path else "") for path in chosen)
        if node.path in wanted and not inside and id(node.module) not in seen:
            chosen[node.path] = node
            seen.add(id(node.module))
    return numbered_blocks(model, chosen)


def _fits(pattern: PathPattern, node: Node) -> bool:
    """Return whether a pattern matches a clean path, or that of the outermost wrapper in ``named_modules``."""
    return pattern.matches(node.path) or pattern.matches(node.wrappers[0][0] if node.wrappers else node.raw)


def numbered_blocks(model: nn.Module, chosen: dict[str, Node]) -> tuple[Block, ...]:
    """Return the ``chosen`` modules of ``model`` (by clean path) as blocks, numbered within their stacks."""
    modules = {node.path: node.module for node in walk(model, repeats=True)}
    members: dict[str, list[str]] = {}
    for path in chosen:
        members.setdefault(path.rpartition(".")[0], []).append(path)
    blocks: dict[str, Block] = {}
    for stack, paths in members.items():
        layers, size = numbering(modules.get(stack), [path.rpartition(".")[2] for path in paths])
        size = _counted_size(modules, stack, size)
        for path, layer in zip(paths, layers, strict=True):
            blocks[path] = Block(path, chosen[path].module, layer, stack, size)
    return tuple(blocks[path] for path in chosen)


def _counted_size(modules: Mapping[str, nn.Module], stack: str, size: int) -> int:
    """Return the size of the whole stack if a pipeline stage holds part of it in a numbered ModuleDict.

    ``layers: {last: 2}`` must mean the same layers on every rank, so the count comes from the owner's config.
    """
    owner, _, name = stack.rpartition(".")
    if not isinstance(modules.get(stack), nn.ModuleDict) or name not in ("layers", "blocks", "h"):
        return size
    places = product((owner, ""), ("config", "model_args", "args", "params"))
    configs = [getattr(modules.get(path), holder, None) for path, holder in places]
    names = ("n_layers", "num_hidden_layers", "num_layers", "n_layer")
    counts = (getattr(config, name, None) for config in configs for name in names)
    return next((count for count in counts if isinstance(count, int) and count >= size), size)


def _not_found(model: nn.Module) -> Problem:
    lists = [node for node in walk(model) if isinstance(node.module, LISTS)]
    largest = max(lists, key=lambda node: len(node.module._modules), default=None)
    example = join(largest.path, "*") if largest else "path.to.layers.*"
    return Problem(
        type(root_node(model).module).__name__,
        "no transformer blocks were found in this model",
        expected="a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; Hugging Face "
        "layers; a model that is one block",
        fix=f'name them, for example blocks: ["{example}"], in the config, or under regions: in the policy',
    )


def _matches_nothing(model: nn.Module, pattern: PathPattern, fits: Sequence[Node], nodes: Sequence[Node]) -> Problem:
    if fits:
        class_name = type(fits[0].module).__name__
        found = f'"{pattern.text}" matches only {fits[0].path}, a {class_name}, which is not called itself'
        return Problem("regions.blocks", found, fix=f'write "{pattern.text}.*" for its children')
    families = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", node.path) for node in nodes))
    near = next((path for path in families if path.endswith("." + pattern.text)), "") or nearest(pattern.text, families)
    return Problem(
        "regions.blocks",
        f'"{pattern.text}" matches no module of {type(root_node(model).module).__name__}',
        nearest=f'"{near}"' if near else "",
        expected="" if near else listing(families, limit=8),
        fix="patterns are matched against whole paths from the model down; * is one segment, ** any number",
    )
