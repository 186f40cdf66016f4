"""Chunks: several layers of an ``nn.Sequential`` as one region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from sac.blocks.find import Block
from sac.blocks.install import Applied, InstalledForward, RegionForward, set_forward, track_modules
from sac.blocks.paths import join, root_node, walk
from sac.engine.region import RegionGroup
from sac.errors import ModelError, Problem
from sac.policy.model import Layers

# Note [Chunks]
#
# A region is one call. If a model calls its layers one by one, several of them cannot become one region from outside,
# because the code between the calls is the model's own. The only loop that we know is that of `nn.Sequential.forward`,
# so chunks are supported on Sequential and on subclasses that do not override `forward`. There we install a forward on
# the container that runs the same loop, with some of its children inside regions. Each child is called as before, with
# its hooks. The container's own hooks run once, since we replace only its forward.


@dataclass(frozen=True, slots=True)
class Chunk:
    """The children of ``chain``, a Sequential, at these positions. ``block``: a copy of this part of it."""

    chain: nn.Module
    positions: range
    block: Block


def find_chunks(model: nn.Module, blocks: Sequence[Block], layers: Layers) -> tuple[Chunk, ...]:
    """Return the chunks that hold ``blocks``, as ``layers`` divides them.

    A module that is called twice counts as two layers. Modules between two layers of a chunk belong to the chunk.
    Raises ``ModelError`` if layers are called by another loop than that of ``nn.Sequential``.
    """
    modules = {node.path: node.module for node in walk(model, repeats=True)}
    members: dict[str, set[int]] = {}
    for block in blocks:
        members.setdefault(block.stack, set()).add(id(block.module))
    problems, chunks = [], []
    for path, ids in members.items():
        chain = modules[path]
        names = list(chain._modules)
        children: list[Any] = list(chain._modules.values())
        called = [i for i, child in enumerate(children) if child is not None and id(root_node(child).module) in ids]
        if not called or not _is_chain(chain):
            problems.append(_no_chain(path, chain))
            continue
        for span in layers.spans(len(called)):
            first, last = called[span.start], called[span.stop - 1]
            name = names[first] if first == last else f"{names[first]}-{names[last]}"
            part = nn.Sequential(*children[first : last + 1])
            block = Block(join(path, name), part, first, path, len(children))
            chunks.append(Chunk(chain, range(first, last + 1), block))
    if problems:
        raise ModelError(problems)
    return tuple(chunks)


def _is_chain(module: nn.Module) -> bool:
    own_loop = type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__
    return own_loop and isinstance(module, nn.Sequential) and type(module).__iter__ is nn.Sequential.__iter__


def _no_chain(path: str, module: nn.Module) -> Problem:
    group = type(module).__name__
    return Problem(
        where=f"{path} ({group})" if path else f"the model ({group})",
        found="its layers cannot be put together in chunks: they are called one by one, or by a forward of its own",
        expected="an nn.Sequential, or a subclass that leaves forward alone",
        fix="choose single layers ({every: k}, {fraction: f}, {first: n}), build them as an nn.Sequential, or call "
        "sac.checkpoint around each chunk in the model's own loop",
    )


class ChunkForward(RegionForward):
    """Runs the children of a chunk as one region."""

    def __init__(self, chunk: Chunk, group: RegionGroup, applied: Applied) -> None:
        super().__init__(chunk.block, group, applied)
        self.module, self.positions = chunk.chain, chunk.positions

    @property
    def layers(self) -> tuple[Any, ...]:
        """The children as they are now: FSDP wraps them after ``sac.apply``."""
        return tuple(self.module._modules.values())[self.positions.start : self.positions.stop]

    @property
    def original(self) -> Any:
        """What the Sequential does with these children."""
        return partial(_run_in_order, self.layers)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.region.run(self.original, self.layers, self.applied.settings, args, kwargs)


class ChunkedForward(InstalledForward):
    """Runs a Sequential with each chunk of its children as one region; see Note [Chunks]."""

    def __init__(self, chain: nn.Module, chunks: Sequence[ChunkForward], applied: Applied) -> None:
        super().__init__(chain, applied)
        self.chunks, self.regions = chunks, tuple(chunk.region for chunk in chunks)

    def __call__(self, input: Any) -> Any:
        """Run the children in order; the name ``input`` is the one that ``nn.Sequential`` uses."""
        children, done = tuple(self.module._modules.values()), 0
        for chunk in self.chunks:
            input = chunk(_run_in_order(children[done : chunk.positions.start], input))
            done = chunk.positions.stop
        return _run_in_order(children[done:], input)


def _run_in_order(modules: Sequence[Any], input: Any) -> Any:
    for module in modules:
        input = module(input)
    return input


def install_chunks(chunks: Sequence[Chunk], groups: Sequence[RegionGroup], applied: Applied) -> None:
    """Install a region on each chunk; the caller has checked that none is installed yet."""
    track_modules([chunk.block.module for chunk in chunks])
    chains: dict[nn.Module, list[ChunkForward]] = {}
    for chunk, group in zip(chunks, groups, strict=True):
        chains.setdefault(chunk.chain, []).append(ChunkForward(chunk, group, applied))
    for chain, forwards in chains.items():
        set_forward(chain, ChunkedForward(chain, forwards, applied))
