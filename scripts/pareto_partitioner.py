"""What the partitioner of torch.compile saves of one block under its memory budget, priced as the planner prices it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pareto_block import Sizes, built
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sac.ops.flops import flops_of
from sac.planner.cost import PRIORS, moved_bytes, roofline
from sac.planner.devices import Device, device_named
from sac.planner.planning import lowered
from sac.planner.profile import Entry

BUDGETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Partition:
    """What is saved beyond parameters and inputs at a budget of `activation_memory_budget`, and what runs again."""

    budget: float
    bytes: int
    seconds: float


def partitions(sizes: Sizes, budgets: Sequence[float], *, as_complex: bool) -> list[Partition]:
    """The partitioner's choices for a block as an H100 runs it; raises what torch raises where it does not run."""
    device = device_named("h100")
    return lowered(lambda _: [_partition(sizes, budget, device, as_complex=as_complex) for budget in budgets], device)


def _partition(sizes: Sizes, budget: float, device: Device, *, as_complex: bool) -> Partition:
    import torch._functorch.config as settings
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    model, inputs = built(sizes, as_complex=as_complex)
    block: nn.Module = model.layers[0]
    names = [name for name, _ in block.named_parameters()]
    graphs: list[fx.Graph] = []

    def run(x: Tensor, angles: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x, angles))

    def keep(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    with settings.patch(activation_memory_budget=budget), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        compiled = aot_function(run, keep, keep, partition_fn=min_cut_rematerialization_partition)
        compiled(*inputs, *block.parameters()).sum().backward()
    forward, backward = graphs
    return Partition(budget, _saved_bytes(forward), _seconds_again(forward, backward, device))


def _saved_bytes(forward: fx.Graph) -> int:
    """The bytes of what forward hands to backward, except what it was given; a view counts as what it is a view of."""
    [output] = [node for node in forward.nodes if node.op == "output"]
    bases = {_base(node) for node in output.args[0][1:] if isinstance(node, fx.Node)}
    return sum(_bytes(node) for node in bases if node.op != "placeholder")


def _base(node: fx.Node) -> fx.Node:
    while _is_view(node):
        node = node.args[0]
    return node


def _is_view(node: fx.Node) -> bool:
    op: Any = node.target
    return isinstance(op, torch._ops.OpOverload) and (op.is_view or op._schema.name == "aten::_unsafe_view")


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _seconds_again(forward: fx.Graph, backward: fx.Graph, device: Device) -> float:
    """The time of the ops of backward's graph that are copies of forward's: the partitioner leaves them their names."""
    known = {node.name for node in forward.nodes if node.op == "call_function"}
    again = [node for node in backward.nodes if node.name in known and not _is_view(node)]
    return sum(_seconds(node, device) for node in again if isinstance(node.target, torch._ops.OpOverload))


def _seconds(node: fx.Node, device: Device) -> float:
    args, kwargs = tree_map_only(fx.Node, lambda one: one.meta["val"], (node.args, node.kwargs))
    out = node.meta["val"]
    first = next(value for value in tree_leaves(out) if isinstance(value, Tensor))
    entry = Entry(
        number=0,
        module="",
        op=str(node.target),
        call=0,
        reads=(),
        makes=(),
        flops=flops_of(node.target, args, kwargs, out),
        moved_bytes=moved_bytes(args, kwargs, out),
        dtype=str(first.dtype).removeprefix("torch."),
    )
    return roofline(entry, device, PRIORS)
