"""Models, inputs and ranks without data, so that a step of any size can run anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sac.blocks.find import find_blocks
from sac.errors import PlanError, Problem, SacError
from sac.torch_private import FakeCopyMode, FakeTensor, FakeTensorMode, silent_store, tree_map_only

# Note [Fake tensors]
#
# Parameters, buffers and floating-point inputs of the copy are fake: they have a shape, a dtype and a device, and ops
# on them return more fake tensors. Integer and boolean inputs stay real. Values that a model computes from these alone
# (positions, whether a mask masks anything) are computed, and the model may read them, so it runs the same ops as in
# training. For this reason no fake mode is active: the mode comes with a fake argument of an op. (Under an active mode,
# Hugging Face models detect tracing and build masks that they do not build otherwise.)
#
# No device that trains runs the ops of the meta device: attention decomposes into products, and the replacements for a
# GPU's ops (gpu_ops.py) are not called. So tensors on it are replaced by fake tensors of the CPU.

Inputs = tuple[Any, ...] | dict[str, Any]
Build = Callable[[Callable[[], nn.Module], torch.dtype], nn.Module]


def arguments_of(inputs: Any, error: type[SacError]) -> Inputs:
    """Return the arguments of a model; raises ``error`` if ``inputs`` are neither a tuple nor a dict."""
    if not isinstance(inputs, (tuple, list, Mapping)):
        found = f"a {type(inputs).__name__} is not what a model is called with"
        raise error(Problem("inputs", found, "a tuple or a dict of arguments", fix="write (x,) for one argument"))
    return dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)  # pytrees look into dicts only


def build_on_meta(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return the model that ``make`` builds, on the meta device; one whose class reads data on the CPU, with data.

    Some read data to initialize weights (ViT), or for their own sizes (stochastic depth).
    """
    try:
        with torch.device("meta"):
            return make().to(dtype)
    except RuntimeError:
        return make().to(dtype)


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a deep copy of ``model`` whose tensors are fake, without gradients; the model is not changed.

    Raises ``PlanError`` if the model cannot be copied.
    """
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    known: dict[int, Any] = {}
    try:
        for tensor in [*model.parameters(), *model.buffers(), *attributes]:
            fake = _faked(tensor.detach(), mode)
            known[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        with FakeCopyMode(mode):  # for tensors that objects hold
            return copy.deepcopy(model, known)
    except Exception as error:
        found = f"the model cannot be copied: {type(error).__name__}: {error}"
        raise PlanError(Problem(type(model).__name__, found, fix="plan the model before it is sharded")) from error


def _faked(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor, on the CPU in place of the meta device."""
    if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
        return mode.from_tensor(tensor)
    with mode:
        device = "cpu" if tensor.is_meta else tensor.device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_inputs(inputs: Inputs, mode: FakeTensorMode) -> Inputs:
    """Return ``inputs`` with fake tensors in place of floating-point ones and of those on the meta device."""

    def faked(tensor: Tensor) -> Tensor:
        has_value = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
        if has_value and not isinstance(tensor, FakeTensor):
            return tensor
        return _faked(tensor.detach(), mode).requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, faked, inputs)  # type: ignore[no-any-return]


@contextmanager
def without_data(model: nn.Module) -> Iterator[None]:
    """Run a step; raises ``PlanError`` if it does not run. The error of an op that needs data names it."""
    try:
        yield
    except SacError:
        raise
    except Exception as error:
        found = f"a step of it does not run on tensors without data: {type(error).__name__}: {error}"
        fix = "see that it runs with these inputs without sac; if so, it needs data: give sac.apply a `budget`"
        raise PlanError(Problem(type(model).__name__, found, fix=fix)) from error


# -- Sharded models on one machine: a process group that sends nothing, and FSDP2 over it


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Act as rank 0 of ``count`` ranks with collectives that send nothing.

    Memory and ops are those of a real rank; data is not. Raises ``PlanError`` if a process group exists that sends.
    """
    refuse_senders()
    dist.init_process_group("fake", store=silent_store(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def refuse_senders() -> None:
    """Raise ``PlanError`` if the process group sends data: ranks of a training would wait for each other's plans."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        found = "a process group is already initialized, but a plan for other ranks needs one that sends nothing"
        raise PlanError(Problem("ranks", found, fix="plan in a process of its own"))


def fsdp_over(count: int) -> Callable[[nn.Module], None]:
    """Return a function that shards a model by FSDP2 over ``count`` ranks: one unit per block, and one for the rest.

    Pass it as ``parallelize`` to ``sac.plan``, within ``fake_ranks(count)``.
    """

    def parallelize(model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (count,))
        for module in (*(block.module for block in find_blocks(model)), model):
            fully_shard(module, mesh=mesh)

    return parallelize


class QuickChunks(TorchFunctionMode):
    """Cuts a tensor without data into at most two tensors: the chunks of equal size are one tensor, the first.

    FSDP2 and DTensor cut each parameter into a chunk per rank, and the one rank there is (`fake_ranks`) uses the first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and type(args[0]) is FakeTensor and args[0].numel():
            return _chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _chunks(whole: Tensor, count: int, dim: int = 0) -> tuple[Tensor, ...]:
    size = -(-whole.shape[dim] // count)
    full, rest = divmod(whole.shape[dim], size)
    last = (whole.narrow(dim, full * size, rest),) if rest else ()
    return (whole.narrow(dim, 0, size),) * full + last
