"""`sac.plan`: from a budget to a policy, in a process of its own where that is needed."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sac.errors import PlanError, Problem, SacError
from sac.planner.devices import Device
from sac.planner.fakes import Inputs, is_on_meta, off_meta
from sac.planner.gpu_ops import lowered_to, not_lowered
from sac.planner.plan_file import Plan, make_plan
from sac.planner.prepare import figures_of, prepare, refuse_unfit
from sac.planner.search import Progress
from sac.policy.model import Policy

# -- Planning for a device that is not there, in a process of its own

T = TypeVar("T")

# Note [The process of a lowered plan]
#
# The child is forked, as the workers of a DataLoader are: model, inputs and loss function need not be pickled, so they
# may be anything, and nothing is copied. Only what is handed back is pickled: a plan, or an error. Torch's threads do
# not live on in a fork, so the child runs on one; and where autograd has run on a GPU it refuses to run in a fork.


def planned(
    model: nn.Module,
    device: str | torch.device | None,
    make: Callable[[Progress], Plan],
    progress: Progress | None = None,
    *,
    real: bool = False,
) -> Plan:
    """Return what ``make`` does; in a process of its own if it is to see other ops than run where the model is.

    ``make`` is told a function that reports progress, which ``progress`` gets to hear. With ``real`` tensors ops run as
    they do. For ``device`` and errors see ``sac.plan``.
    """
    refuse_unfit(model)
    figures = figures_of(model, device)
    if real or not needs_lowering(model, figures):
        return make(progress or (lambda done, total, label: None))
    made = lowered(make, figures, progress)
    return replace(made, notes=(*made.notes, *not_lowered()))


def needs_lowering(model: nn.Module, device: Device) -> bool:
    """Whether a plan of ``model`` for ``device`` is to see other ops than its tensors run where they are."""
    where = {parameter.device.type for parameter in model.parameters()}
    return device.name != "cpu" and where == {"cpu"}


def lowered(work: Callable[[Progress], T], device: Device, progress: Progress | None = None) -> T:
    """Return what ``work`` returns in a process in which ops run as on ``device``; see Note [Lowering].

    ``work`` is told a function that reports progress, which ``progress`` gets to hear; what it returns is pickled. An
    error that it raises is raised here. Raises ``PlanError`` where no process can be forked, or if it dies.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise _no_child("this system cannot fork a process")
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(its, work, device.name), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: it takes no lock that a thread may hold
        child.start()
    its.close()
    try:
        while True:
            message, found = mine.recv()
            if message == "progress":
                if progress is not None:
                    progress(*found)
            elif message == "result":
                return found  # type: ignore[no-any-return]
            else:
                error, told = found
                raise error from (None if isinstance(error, SacError) else RuntimeError(told))
    except EOFError:
        child.join()
        raise _no_child(f"the process that planned it ended with status {child.exitcode}") from None
    finally:
        mine.close()
        child.terminate()
        child.join()


def _run(pipe: Connection, work: Callable[[Progress], Any], device: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what is there lives as long as the process: the collector need not look at it again and again
    try:
        with lowered_to(device):
            message = "result", work(lambda *done: pipe.send(("progress", done)))
        pipe.send(message)
    except Exception as error:
        pipe.send(("error", (_portable(error), traceback.format_exc())))


def _portable(error: Exception) -> Exception:
    """Return an error that arrives as it is, or one that tells of it."""
    if "fork-based multiprocessing" in str(error):  # torch's own words
        return _no_child("backward has run on a GPU in this process, and autograd cannot run in a fork of it")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _no_child(found: str) -> PlanError:
    fix = "plan before the first backward or in a process of its own, or for the device that the model is on"
    return PlanError(Problem("device", f"planning for another device takes a process of its own: {found}", fix=fix))


# -- ``sac.plan``: from a model, its inputs and a memory budget to a policy


def plan(
    model: nn.Module,
    inputs: Inputs,
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    optimizer: Any = None,
    real: bool = False,
    parallelize: Callable[[nn.Module], Any] | None = None,
    accumulates: bool = False,
    in_flight: int = 1,
) -> Policy:
    """Return the policy that fits one training step of ``model`` into ``budget`` with the least recomputation.

    ``inputs``: a tuple or dict of what the model is called with. ``budget``: the peak of allocated bytes over forward
    and backward of one step, with parameters and gradients, and the state of ``optimizer`` (a name or an optimizer)
    if one is given; an int, a text such as ``"40GiB"``, or a share of the way from the least peak to that without
    checkpointing, ``"50%"``. The loss is ``loss_fn(output)``, else ``output.loss``, else a scalar output. ``device``
    tells whose figures price the ops (``"h100"``, …; default: where the parameters are); of a model on the CPU, or on
    the meta device, those ops are planned that this device would run, in a process of its own. ``engine``: which one
    will run; with rerun all that is not kept runs again. The model and torch's random state are left as they are; no
    data is looked at unless ``real=True``, which trains a copy of the model for some steps instead, where it is.
    ``parallelize`` is given the copy and shards it in place (``fully_shard``, ``parallelize_module``), over a process
    group that sends nothing: the budget is that of one rank then. ``accumulates``: gradients of earlier micro-batches
    are there from the start. ``in_flight``: micro-batches whose activations a pipeline stage holds at once.

    Raises ``PlanError``: a budget below the least peak, a loss or a device that is not known, inputs that are neither a
    tuple nor a dict, a forward that needs data; ``ModelError`` for a model that sac is on, or that has no blocks.
    """
    refuse_unfit(model)
    if not isinstance(inputs, (tuple, list, Mapping)):
        found = f"a {type(inputs).__name__} is not what a model is called with"
        raise PlanError(Problem("inputs", found, "a tuple or a dict of arguments", fix="write (x,) for one argument"))
    given: Inputs = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)  # of any mapping tensors are seen
    if is_on_meta(model):
        model, given = off_meta(model, given, device, real=real)

    def make(progress: Progress) -> Plan:
        planner = prepare(
            model,
            given,
            loss_fn=loss_fn,
            device=device,
            engine=engine,
            optimizer=optimizer,
            real=real,
            parallelize=parallelize,
            accumulates=accumulates,
            in_flight=in_flight,
            progress=progress,
        )
        return make_plan(planner, budget)

    gpus = {parameter.device for parameter in model.parameters() if real and parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=gpus, device_type="cuda"):  # without data nothing is drawn on a GPU
        return planned(model, device, make, real=real).policy
