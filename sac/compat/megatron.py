"""Megatron-Core's activation checkpointing (``megatron.core.tensor_parallel``), implemented with ``sac.checkpoint``.

If Megatron-Core is loaded in this process, its tensor-parallel group, ranks and tracker of random states are used.

Intentional differences: regions are non-reentrant; the caller's tensor is not touched; autocast is restored, and FP8
state of TransformerEngine, whatever ``fp8`` says; arguments and results have any structure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from sac.checkpointing import run_as
from sac.engine.untraced import never_compiled
from sac.errors import ConfigError, Problem, RegionError, warn
from sac.outer_hooks import OuterPacked, active_hooks, fetch
from sac.rng_tracker import CudaRNGStatesTracker, process_tracker, seed_model_parallel
from sac.tensors import Place, place_of, plain_address, version_of, version_watch
from sac.torch_private import SAVED_TENSOR_PREFIX, SHOWS_SAVED_TENSORS, next_node_number, tree_leaves

__all__ = [
    "CheckpointWithoutOutput", "CudaRNGStatesTracker", "checkpoint", "get_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
]  # fmt: skip

_RANDOM = "megatron.core.tensor_parallel.random"


def get_cuda_rng_tracker(*flags: bool, **named: bool) -> Any:
    """Return the tracker of this process: Megatron's own if Megatron is loaded, else one of ours.

    The arguments are those of Megatron's function. Raises ``ConfigError`` for another type of tracker without Megatron.
    """
    if _RANDOM in sys.modules:
        return sys.modules[_RANDOM].get_cuda_rng_tracker(*flags, **named)
    if any((*flags, *named.values())):
        found, fix = "this type of tracker belongs to Megatron", "leave the flags out, or import megatron"
        raise ConfigError(Problem("megatron.get_cuda_rng_tracker", found, fix=fix))
    return process_tracker()


def model_parallel_cuda_manual_seed(seed: int, *flags: bool, **named: Any) -> None:
    """Seed the default generator and the streams of ``get_cuda_rng_tracker``; see ``sac.full.seed_model_parallel``.

    The arguments are those of Megatron's function, which does the seeding if Megatron is loaded. Otherwise ``tp_rank``
    is needed, ``ep_rank`` is 0 by default, and ``etp_rank`` is ``tp_rank``.
    """
    if _RANDOM in sys.modules:
        sys.modules[_RANDOM].model_parallel_cuda_manual_seed(seed, *flags, **named)
        return
    tp, ep, etp = (named.pop(name, None) for name in ("tp_rank", "ep_rank", "etp_rank"))
    tracker = get_cuda_rng_tracker(*flags, **named)
    seed_model_parallel(seed, tp, ep or 0, tp if etp is None else etp, tracker=tracker)


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any) -> Any:
    """Run ``function(*args)`` as a region that is recomputed in backward; return its result.

    ``distribute_saved_activations``: keep the first floating-point input scattered over Megatron's tensor-parallel
    group; None means false, as in Megatron. The tracker of ``get_cuda_rng_tracker`` is restored for recomputation.

    Raises ``ConfigError`` if there is no group to scatter over, and otherwise what ``sac.checkpoint`` raises.
    """
    scatters, group = False if distribute_saved_activations is None else distribute_saved_activations, None
    state = sys.modules.get("megatron.core.parallel_state")
    if scatters is True and state is not None:
        group = state.get_tensor_model_parallel_group(check_initialized=False)
    return _run(function, args, {}, distribute_saved_activations=scatters, tp_group=group)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Any:
    options["get_rng_state_tracker"] = get_cuda_rng_tracker
    takes_discardable = _discardable and any(plain_address(leaf) in _discardable for leaf in tree_leaves(args))
    with saved_tensors_hooks(_pack, fetch) if takes_discardable and active_hooks() is None else nullcontext():
        return run_as("megatron.checkpoint", function, args, kwargs, **options)


# -- Regions whose outputs are released until backward

# Note [Discarded outputs]
#
# The ops after a region usually save the region's output for their own backward, although the region can recompute it.
# A region that ends packs its outputs as if autograd saved them there, so that its recomputation returns them. To
# discard an output, the graph between the region and a later tensor is walked: each saved tensor in the memory of the
# output gets hooks (as in `saved_tensors_hooks`, but added afterwards), which keep its position instead of its data.
# What the walk does not see holds the output as before. In backward, the first consumer reruns the region, once for all
# consumers and for the region's own backward. Regions hold their inputs themselves: `_run` puts the same hooks around
# those that take such an output, so that a chain of regions holds none of the outputs between them.


class CheckpointWithoutOutput:
    """One region whose output is released once its consumers have run, and recomputed in backward.

    Intentional differences: no storage is resized, so the output's memory is freed with the caller's own references,
    and consumers that do not lead to the hook tensor keep what they saved; a wrong hook tensor causes a warning. Each
    region discards its own output, also in a chain: there is no manager.
    """

    def __init__(self, fp8: Any = False) -> None:
        self._outputs: list[_Output] | None = None

    @never_compiled
    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Run ``run_function(*args)`` as a region; return its result. In a compiled function, it runs in eager mode."""
        region = partial(_call_and_pack, run_function)  # not a closure: calls are recognized by the function's parts
        region.__qualname__ = getattr(run_function, "__qualname__", "function")  # type: ignore[attr-defined]
        outputs: list[_Output] = []  # a rerun gets another list
        result = _run(region, args, {"outputs": outputs})
        taken = {*map(plain_address, tree_leaves(args))}
        self._outputs = [output for output in outputs if output.address not in taken]
        for output in self._outputs:
            _discardable.setdefault(output.address, output)
        return result

    @never_compiled
    def discard_output_and_register_recompute(self, hook_tensor: Any) -> None:
        """Release the output in what was saved between the region and ``hook_tensor``, a tensor computed from it.

        If ``hook_tensor`` does not depend on the output, or the output was changed in place, it is kept, with a
        warning. Raises ``RegionError`` if nothing was checkpointed.
        """
        if self._outputs is None:
            where, fix = "megatron.CheckpointWithoutOutput", "call checkpoint(run_function, *args) first"
            raise RegionError(Problem(where, "there is no output to discard", fix=fix))
        outputs, self._outputs = self._outputs, []
        unchanged = {output.address: output for output in outputs if version_of(output.watch) == output.version}
        nodes: set[Any] = {None}
        waiting: list[Any] = [getattr(leaf, "grad_fn", None) for leaf in tree_leaves(hook_tensor) if outputs]
        while waiting:
            node = waiting.pop()
            if node in nodes:
                continue
            nodes.add(node)
            if node._sequence_nr() >= outputs[0].number:  # not from before the region: numbers go up in each thread
                waiting += (following for following, _ in node.next_functions)
                for saved in _saved_in(node):
                    if (output := unchanged.get(plain_address(saved.data))) is not None:
                        saved.register_hooks(output.hold, fetch)
        starts = {output.start for output in outputs} - {None}
        reason = "" if SHOWS_SAVED_TENSORS else "this version of torch does not show what its graph has saved"
        if starts and not starts & nodes:
            reason = "the tensor given does not depend on the region's output"
        if any(output.address not in unchanged for output in outputs):
            reason = "the region's output was changed in place after the region"
        if reason:
            warn(f"{reason}: it is kept until backward")


def _saved_in(node: Any) -> Iterator[Any]:
    """Yield the saved tensors of a graph node, except those that hooks hold: reading these could recompute them."""
    for name in dir(type(node)) if SHOWS_SAVED_TENSORS else ():
        found = getattr(node, name) if name.startswith(SAVED_TENSOR_PREFIX) else None
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            if saved is not None and saved.unpack_hook is None and saved.data is not None:
                yield saved


def _call_and_pack(function: Callable[..., Any], *args: Any, outputs: list[_Output]) -> Any:
    """Call ``function``; pack the tensors that it returns with the hooks of the region, and add them to ``outputs``."""
    result, hooks = function(*args), active_hooks()
    if hooks is not None and torch.is_grad_enabled():
        tensors = [leaf for leaf in tree_leaves(result) if plain_address(leaf) is not None]
        outputs += [_Output(tensor, partial(hooks[1], hooks[0](tensor.detach()))) for tensor in tensors]
    return result


class _Output:
    """A tensor that a region returned, which is not held: how it lay in memory, and what returns it again."""

    def __init__(self, tensor: torch.Tensor, again: Callable[[], torch.Tensor]) -> None:
        self.again, self.start, self.watch = again, tensor.grad_fn, version_watch(tensor)
        self.number = next_node_number()  # of the first node after the region
        self.address, self.version, self.layout = plain_address(tensor), version_of(tensor), _layout(tensor)
        self.keeps_address = StorageWeakRef(tensor.untyped_storage())  # which is then not given to other memory

    def hold(self, tensor: torch.Tensor) -> OuterPacked:
        """Return what to hold in place of a tensor in the memory of the output."""
        return OuterPacked((tensor.dtype, place_of(tensor)), self._fetch)

    def _fetch(self, part: tuple[torch.dtype, Place]) -> Any:
        """Return a tensor in the memory of the output, which the region recomputes unless it has before.

        Raises ``RegionError`` if the output lies in its memory in another way than in forward, or if that is the same
        memory, which is then not the region's own, and was written to.
        """
        tensor = self.again()
        is_written = plain_address(tensor) == self.address and version_of(tensor) != self.version
        if is_written or _layout(tensor) != self.layout:
            found = f"a discarded output was {self.layout} and is {_layout(tensor)} in recomputation, or was written to"
            fix = "let the region make its results in the same way in both passes, in memory of their own"
            raise RegionError(Problem("region", found, fix=fix))
        with torch.no_grad():
            return tensor.new_empty(0, dtype=part[0]).set_(tensor.untyped_storage(), *part[1])


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return *place_of(tensor), tensor.untyped_storage().nbytes()


_discardable: WeakValueDictionary[int | None, _Output] = WeakValueDictionary()  # by storage address


def _pack(tensor: torch.Tensor) -> Any:
    """Return what a region holds in place of an input."""
    output = _discardable.get(plain_address(tensor))
    return output.hold(tensor) if output is not None and version_of(tensor) == output.version else tensor
