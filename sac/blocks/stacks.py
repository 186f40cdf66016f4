"""Find stacks of blocks by the structure of a model.

Note [What is a block]
A stack is a ModuleList, a ModuleDict with numbered keys, or a Sequential. Its blocks are the children that hold
parameters and consist of several modules. The search goes from the root down:

1. Hugging Face declares which modules may be checkpointed (``GradientCheckpointingLayer``, ``_no_split_modules``). Such
   a module is a block wherever it is located, except for a single convolution that is not to be split over devices
   (ResNet).
2. A child is a stage if it consists mainly of a stack of similar blocks (Swin, timm, ALBERT's groups). The blocks
   inside the stage are used instead of the stage. A block with parts in a list is not a stage: its parts differ from
   one another (T5), or are a few parts with one convolution each (ResNet, EnCodec), of which a region would keep as
   much as autograd does.
3. The search does not look inside a block, and a list of experts is never a stack.
4. Lists of heads, projections and the like have the same structure. So stacks have a rank, and only the best rank
   found is used: first, stacks that Hugging Face declares, or whose blocks contain a token mixer, or that have the name
   of a stack; otherwise any list of composed modules; otherwise a list of one module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence, Set

from torch import nn

from sac.blocks.paths import Node, children_of, class_names, root_node

MIXER = re.compile(r"attn|attention|mixer|mixing|mamba|ssm|rwkv|retention|recurrent", re.IGNORECASE)
STACK_NAMES = frozenset({"layers", "layer", "blocks", "block", "h", "resblocks"})
NUMBERED = re.compile(r"(?:.*\D)?(\d+)")
BLOCK_CONVOLUTIONS = 6  # up to this many parts with one convolution each are a block, not a stage
STAGE_MATRICES = 2  # number of matrices of a stage outside of its blocks: a patch merger, a position embedding

DECLARED, STRONG, PLAIN, WEAK = 3, 2, 1, 0


def find_layers(model: nn.Module) -> tuple[list[Node], int]:
    """Return the blocks of a model, and the rank of their stacks; see Note [What is a block]."""
    root = root_node(model)
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    stacks = list(_visit(root, declared, set()))
    if _is_one_block(root, stacks):
        return [root], STRONG
    best = max((rank for _, rank in stacks), default=WEAK)
    return [node for nodes, rank in stacks if rank >= min(best, STRONG) for node in nodes], best


def numbering(parent: nn.Module | None, names: Sequence[str]) -> tuple[tuple[int, ...], int]:
    """Return the layer index of each chosen child (by name) of ``parent``, and the size of the stack.

    A numbered ModuleDict keeps its own numbers (a pipeline stage has some of them). A ModuleList keeps its positions if
    the other children are empty placeholders. Otherwise the chosen children are counted from 0.
    """
    if isinstance(parent, nn.ModuleDict):
        numbers = tuple(int(match[1]) for name in names if (match := NUMBERED.fullmatch(name)))
        if len(set(numbers)) == len(names):
            return numbers, max(numbers) + 1
    if isinstance(parent, nn.ModuleList) and all(name.isdecimal() for name in names):
        others = [child for name, child in parent._modules.items() if name not in names]
        if all(child is None or isinstance(child, nn.Identity) for child in others):
            return tuple(int(name) for name in names), len(parent)
    return tuple(range(len(names))), len(names)


def is_callable(module: nn.Module) -> bool:
    """Return whether a module has its own forward (a ModuleList has none)."""
    return getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward


def has_mixer(module: nn.Module) -> bool:
    """Return whether a module is or contains a token mixer with parameters: attention, a state space model, …"""
    return any(_is_mixer(name, part) for name, part in module.named_modules())


def _visit(node: Node, declared: Set[str], seen: set[int]) -> Iterator[tuple[list[Node], int]]:
    """Yield the blocks of each stack at or below ``node`` with the rank of the stack; a shared block is listed once.

    ``declared``: the class names in Hugging Face's ``_no_split_modules``. ``seen``: ids of modules.
    """
    if id(node.module) in seen:
        return
    seen.add(id(node.module))
    children, is_list = children_of(node), _is_container(node)
    blocks = [child for child in children if _is_block(child, declared, is_listed=is_list)]
    unseen = {id(block.module): block for block in reversed(blocks) if id(block.module) not in seen}
    seen.update(unseen)
    if unseen:
        yield [*unseen.values()], _rank(node, [*unseen.values()], declared)
    for child in children:
        if child not in blocks:
            yield from _visit(child, declared, seen)


def _is_block(node: Node, declared: Set[str], *, is_listed: bool) -> bool:
    """Return whether a module is a block: outside of lists, one that is declared as a layer."""
    if not is_callable(node.module) or _is_stage(node, declared):
        return False
    return _is_declared(node.module, declared if is_listed else ()) or (is_listed and _is_composed(node.module))


def _rank(node: Node, blocks: list[Node], declared: Set[str]) -> int:
    if any(_is_declared(block.module, declared) for block in blocks):
        return DECLARED
    if any(has_mixer(block.module) for block in blocks):
        return STRONG
    if len(blocks) < 2:
        return WEAK
    named = not STACK_NAMES.isdisjoint(_words(node.path))
    return STRONG if named and _are_alike(blocks) else PLAIN


def _is_mixer(path: str, module: nn.Module) -> bool:
    named = MIXER.search(path.rpartition(".")[2]) or MIXER.search(type(module).__name__)
    return named is not None and any(True for _ in module.parameters())


def _is_declared(module: nn.Module, names: Collection[str]) -> bool:
    classes = class_names(module)
    is_named = any(cls in names for cls in classes) and not _is_one_convolution(module)
    return is_named or "GradientCheckpointingLayer" in classes


def _is_one_convolution(module: nn.Module) -> bool:
    kernels = [p for p in module.parameters() if p.ndim >= 2]
    return len(kernels) == 1 and kernels[0].ndim >= 3


def _is_container(node: Node) -> bool:
    """Return whether the children of a module can be a stack."""
    if any(word.startswith("expert") for word in _words(node.path)):
        return False
    if isinstance(node.module, nn.ModuleDict):
        return all(NUMBERED.fullmatch(key) for key in node.module)
    return isinstance(node.module, (nn.ModuleList, nn.Sequential))


def _is_composed(module: nn.Module) -> bool:
    parts = sum(1 for _ in module.modules()) - 1
    return parts >= 2 and any(True for _ in module.parameters())


def _is_stage(node: Node, declared: Set[str]) -> bool:
    """Return whether a module consists mainly of a stack of similar blocks, which are then used instead of it."""
    lists = [inner for inner in _lists_below(node) if _are_alike(_parts(inner))]
    parts = [part.module for inner in lists for part in _parts(inner)]
    if not parts:
        return False
    if any(_is_declared(part, declared) for part in parts):
        return True
    if all(any(has_mixer(child) for child in part.children()) for part in parts):
        return not _mixes_outside(node.module, parts)
    if _is_declared(node.module, declared) or _mixes_outside(node.module, parts):
        return False
    if len(parts) <= BLOCK_CONVOLUTIONS and all(_count_matrices(part) == 1 for part in parts):
        return False
    within = {id(p) for part in parts for p in part.parameters()}
    outside = [p for p in node.module.parameters() if p.ndim >= 2 and id(p) not in within]
    return len(outside) <= STAGE_MATRICES


def _count_matrices(module: nn.Module) -> int:
    """Return how many modules at or below ``module`` have their own matrix or kernel; two factors count as one."""
    return sum(any(p is not None and p.ndim >= 2 for p in part._parameters.values()) for part in module.modules())


def _mixes_outside(module: nn.Module, parts: list[nn.Module]) -> bool:
    inside = {id(m) for part in parts for m in part.modules()}
    return any(name and id(part) not in inside and _is_mixer(name, part) for name, part in module.named_modules())


def _lists_below(node: Node) -> Iterator[Node]:
    """Yield the topmost lists at or below a module that could be stacks."""
    if _is_container(node) and _parts(node):
        yield node
        return
    for child in children_of(node):
        yield from _lists_below(child)


def _parts(node: Node) -> list[Node]:
    return [child for child in children_of(node) if is_callable(child.module) and _is_composed(child.module)]


def _are_alike(nodes: Sequence[Node]) -> bool:
    """Return whether some class occurs twice or there is only one node: a hybrid stack is still a stack."""
    classes = {type(node.module) for node in nodes}
    return len(nodes) == 1 or len(classes) < len(nodes)


def _is_one_block(root: Node, stacks: Sequence[tuple[list[Node], int]]) -> bool:
    """Return whether the model is one block: it contains a token mixer, and no stack in it does."""
    if any(rank == DECLARED or any(has_mixer(node.module) for node in nodes) for nodes, rank in stacks):
        return False
    if _is_container(root) or any(isinstance(module, nn.Embedding) for module in root.module.modules()):
        return False
    return len(children_of(root)) >= 2 and any(_is_mixer(child.path, child.module) for child in children_of(root))


def _words(path: str) -> set[str]:
    return set(path.rpartition(".")[2].lower().split("_"))
