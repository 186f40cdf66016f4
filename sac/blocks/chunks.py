"""Chunks: several layers of an ``nn.Sequential`` as one region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sac.blocks.find import Block
from sac.blocks.install import Applied, InstalledForward, set_forward, track_module
from sac.blocks.paths import Node, join, root_node, walk
from sac.engine.compiled import run_in_eager, run_traced
from sac.engine.region import Region, RegionGroup
from sac.engine.table import DecisionTable
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
class Chain:
    """A Sequential and its chunks, one region each, as ranges of child positions counted from 0."""

    path: str
    module: nn.Module
    chunks: tuple[range, ...]

    def names(self, chunk: range) -> list[str]:
        """Return the names of the children in ``chunk``."""
        return list(self.module._modules)[chunk.start : chunk.stop]

    def path_of(self, chunk: range) -> str:
        """Return the path of the region for ``chunk``."""
        names = self.names(chunk)
        return join(self.path, names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}")


def find_chains(model: nn.Module, blocks: Sequence[Block], chunks: Layers) -> tuple[Chain, ...]:
    """Return the chains that hold ``blocks``, divided into ``chunks``.

    A module that is called twice counts as two layers. Modules between two layers of a chunk belong to the chunk.
    Raises ``ModelError`` if layers are called by another loop than that of ``nn.Sequential``.
    """
    nodes = {node.path: node for node in walk(model, repeats=True)}
    stacks: dict[str, set[int]] = {}
    for block in blocks:
        stacks.setdefault(block.stack, set()).add(id(block.module))
    problems, chains = [], []
    for path, layers in stacks.items():
        node = nodes[path]
        indices = _places(node, layers) if _is_chain(node.module) else []
        if indices:
            runs = [range(indices[run.start], indices[run.stop - 1] + 1) for run in chunks.spans(len(indices))]
            chains.append(Chain(path, node.module, tuple(runs)))
        else:
            problems.append(_no_chain(path, node.module))
    if problems:
        raise ModelError(problems)
    return tuple(chains)


def _is_chain(module: nn.Module) -> bool:
    own_loop = type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__
    return own_loop and isinstance(module, nn.Sequential) and type(module).__iter__ is nn.Sequential.__iter__


def _places(node: Node, layers: set[int]) -> list[int]:
    """Return the positions at which the chain calls one of ``layers`` (ids of modules without their wrappers)."""
    children = enumerate(node.module._modules.values())
    return [index for index, child in children if child is not None and id(root_node(child).module) in layers]


def _no_chain(path: str, module: nn.Module) -> Problem:
    group = type(module).__name__
    return Problem(
        where=f"{path} ({group})" if path else f"the model ({group})",
        found="its layers cannot be put together in chunks: they are called one by one, or by a forward of its own",
        expected="an nn.Sequential, or a subclass that leaves forward alone",
        fix="choose single layers ({every: k}, {fraction: f}, {first: n}), build them as an nn.Sequential, or call "
        "sac.checkpoint around each chunk in the model's own loop",
    )


class ChunkedForward(InstalledForward):
    """Runs a Sequential with each chunk of its children as one region; see Note [Chunks]."""

    def __init__(self, chain: Chain, groups: Sequence[RegionGroup], applied: Applied) -> None:
        super().__init__(chain.module, applied)
        self.chunks = chain.chunks
        self.regions = tuple(
            Region(group, chain.path_of(chunk)) for chunk, group in zip(chain.chunks, groups, strict=True)
        )

    def __call__(self, input: Any) -> Any:
        """Run the children in order; the name ``input`` is the one that ``nn.Sequential`` uses."""
        if not torch.is_grad_enabled():
            return self.original(input)
        children = [*self.module._modules.values()]
        done = 0
        for chunk, region in zip(self.chunks, self.regions, strict=True):
            input = _run_in_order(children[done : chunk.start], input)
            input = self._run_chunk(region, tuple(children[chunk.start : chunk.stop]), input)
            done = chunk.stop
        return _run_in_order(children[done:], input)

    def _run_chunk(self, region: Region, modules: tuple[Any, ...], input: Any) -> Any:
        function = partial(_run_in_order, modules)
        if not torch.compiler.is_compiling():
            return self._run_region(region, function, modules, input)
        if self.applied.settings.needs_frame:
            return run_in_eager(self._run_region, region, function, modules, input)
        return run_traced(function, region.group.table, (input,), {})

    def _run_region(self, region: Region, function: Any, modules: tuple[nn.Module, ...], input: Any) -> Any:
        self.applied.refuse_both_on()
        return region.run(function, modules, self.applied.settings, (input,), {})


def _run_in_order(modules: Sequence[Any], input: Any) -> Any:
    for module in modules:
        input = module(input)
    return input


def install_chunks(chains: Sequence[Chain], table: DecisionTable, applied: Applied) -> None:
    """Install the regions of ``chains``; the caller has checked that none is installed yet."""
    groups: dict[tuple[object, ...], RegionGroup] = {}
    for chain in chains:
        of_chain = []
        for chunk in chain.chunks:
            names = chain.names(chunk)
            layers = [(name, chain.module._modules[name]) for name in names]
            parts = [part for name, layer in layers if layer is not None for part in layer.named_modules(prefix=name)]
            structure = tuple((path.partition(".")[2], type(part)) for path, part in parts)
            of_chain.append(groups.setdefault((chain.path, structure), RegionGroup(table, applied.mode)))
            for path, part in parts:
                track_module(part, path)
        set_forward(chain.module, ChunkedForward(chain, of_chain, applied))
