"""`sac.plan`: compute a policy for a budget, in a separate process if necessary."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sac.engine.rng import random_state_kept
from sac.errors import PlanError, Problem, SacError, listing
from sac.extras import import_solver
from sac.planner.by_hand import SELECTIVE
from sac.planner.devices import Device
from sac.planner.fakes import Inputs, is_on_meta, off_meta
from sac.planner.gpu_ops import lowered_to, not_lowered
from sac.planner.plan_file import Plan, make_plan, with_step_seconds
from sac.planner.plan_view import policy_of_sizes, policy_with_figures
from sac.planner.planner import Progress
from sac.planner.prepare import figures_of, prepare, refuse_unfit
from sac.planner.sizes import plan_sizes
from sac.planner.write_policy import by_hand, plain_baselines
from sac.policy.model import Policy

# -- Planning for an absent device, in a separate process

T = TypeVar("T")

# Note [The process of a lowered plan]
#
# The child process is forked, like the workers of a DataLoader. So model, inputs and loss function need not be
# picklable, and nothing is copied. Only the result is pickled: a plan or an error. Torch's threads do not survive a
# fork, so the child runs on one thread. If autograd has run on a GPU, it refuses to run in a forked process.


def planned(
    model: nn.Module,
    device: str | torch.device | None,
    make: Callable[[Progress], Plan],
    progress: Progress | None = None,
    *,
    real: bool = False,
) -> Plan:
    """Return the result of ``make``, run in a separate process if ``device`` runs other ops than the model's device.

    ``make`` is called with a function that reports progress, which is forwarded to ``progress``. With ``real`` tensors,
    ops run where the model is. For ``device`` and errors see ``sac.plan``.
    """
    refuse_unfit(model)
    figures = figures_of(model, device)
    if real or not needs_lowering(model, figures):
        return make(progress or (lambda done, total, label: None))
    made = lowered(make, figures, progress)
    return replace(made, notes=(*made.notes, *not_lowered()))


def needs_lowering(model: nn.Module, device: Device) -> bool:
    """Return whether ``device`` runs other ops than the device of the tensors of ``model``."""
    where = {parameter.device.type for parameter in model.parameters()}
    return device.name != "cpu" and where == {"cpu"}


def lowered(work: Callable[[Progress], T], device: Device, progress: Progress | None = None) -> T:
    """Run ``work`` in a process in which ops run as on ``device``, and return its result; see Note [Lowering].

    ``work`` is called with a function that reports progress, which is forwarded to ``progress``. Its result is pickled.
    Errors that it raises are raised here. Raises ``PlanError`` if no process can be forked, or if the process dies.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise _no_child("this system cannot fork a process")
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(its, work, device.name), daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the child takes no lock a thread may hold
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
    gc.freeze()  # existing objects live as long as the process: keep the collector from scanning them repeatedly
    try:
        with lowered_to(device):
            message = "result", work(lambda *done: pipe.send(("progress", done)))
        pipe.send(message)
    except Exception as error:
        pipe.send(("error", (_portable(error), traceback.format_exc())))


def _portable(error: Exception) -> Exception:
    """Return ``error`` if it can be pickled, else an error that describes it."""
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


# -- ``sac.plan``


def _refuse_other_devices(model: nn.Module) -> None:
    """Raise ``PlanError`` for a model on a device whose ops are not known."""
    types = {parameter.device.type for parameter in model.parameters()}
    if unknown := types - {"cpu", "cuda", "meta"}:
        found = f"its parameters are on {listing(sorted(unknown))}, whose ops and memory the planner does not know"
        fix = 'to plan for a GPU, keep the model on the CPU or on the meta device and name the GPU: device="h100"'
        raise PlanError(Problem(type(model).__name__, found, "cpu, cuda, meta", fix=fix))


def plan(
    model: nn.Module,
    inputs: Inputs | Callable[[int], Inputs],
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    optimizer: Any = None,
    real: bool = False,
    parallelize: Callable[[nn.Module], Any] | None = None,
    sizes: Sequence[int] | None = None,
) -> Policy:
    """Return the policy that fits one training step of ``model`` into ``budget`` with the least recomputation time.

    ``inputs``: the arguments of the model, as a tuple or a dict; with ``sizes``, a function from a size to these.
    ``budget``: the peak of allocated bytes over forward and backward of one step, including parameters, gradients, and
    the state of ``optimizer`` (a name or an optimizer) if one is given. It is an int (bytes), a text such as
    ``"40GiB"``, or a share of the way from the least peak to the peak without checkpointing, such as ``"50%"``.
    ``loss_fn``: the loss is ``loss_fn(output)``, else ``output.loss``, else a scalar output.
    ``device``: the device whose figures price the ops (``"h100"``, …; default: the device of the parameters). For a
    model on the CPU or on the meta device, the ops that this device would run are planned, in a separate process.
    ``engine``: the engine that will run; with rerun, everything that is not saved runs again.
    ``real``: if True, train a copy of the model for some steps, on its device. Otherwise no data is read.
    ``parallelize``: a function that shards the copy in place (``fully_shard``, ``parallelize_module``), over a process
    group that sends nothing; the budget is then that of one rank.
    ``sizes``: batch sizes, or lengths of sequences, to choose among, such as ``range(1, 65)``. Some of them are tried:
    powers of two, then sizes around the best and up to the largest that fits. The policy is that of the size with the
    most predicted tokens (else rows) per second, ``policy.figures.size``; its ``table()`` has a row per tried size.
    The model and torch's random state are not changed. The policy's ``table()`` shows the plan next to the usual
    choices, and ``save(path)`` writes it with its figures in comments.

    Raises ``PlanError`` for a budget below the least peak, an unknown loss or device, inputs that are neither a tuple
    nor a dict, sizes that do not ascend, or a forward that needs data; ``ModelError`` for a model that sac is already
    on or that has no blocks; ``ConfigError`` if SciPy is not installed.
    """
    refuse_unfit(model)
    _refuse_other_devices(model)
    import_solver()

    def plan_of(inputs: Any, progress: Progress | None = None) -> Plan:
        given, placed = _given(inputs), model
        if is_on_meta(placed):
            placed, given = off_meta(placed, given, device, real=real)

        def make(progress: Progress) -> Plan:
            planner = prepare(
                placed,
                given,
                loss_fn=loss_fn,
                device=device,
                engine=engine,
                optimizer=optimizer,
                real=real,
                parallelize=parallelize,
                progress=progress,
            )
            made = make_plan(planner, budget)
            if sizes is not None:
                return with_step_seconds(planner, made)
            return replace(made, baselines=(*plain_baselines(planner), by_hand(planner, SELECTIVE)))

        with random_state_kept(model.parameters() if real else ()):  # without data, nothing is drawn on a GPU
            return planned(placed, device, make, progress, real=real)

    if sizes is None:
        return policy_with_figures(plan_of(inputs))
    if not callable(inputs):
        found = f"with sizes, a {type(inputs).__name__} is not a function of a size"
        raise PlanError(Problem("inputs", found, "a function that returns a tuple or a dict of arguments"))
    make_inputs: Callable[[int], Inputs] = inputs

    def of_size(size: int, progress: Progress) -> tuple[Plan, Any]:
        inputs = make_inputs(size)
        return plan_of(inputs, progress), inputs

    return policy_of_sizes(plan_sizes("size", sizes, of_size, budget, lambda done, total, label: None))


def _given(inputs: Any) -> Inputs:
    """Return the arguments of the model; raises ``PlanError`` if they are neither a tuple nor a dict."""
    if not isinstance(inputs, (tuple, list, Mapping)):
        found = f"a {type(inputs).__name__} is not what a model is called with"
        raise PlanError(Problem("inputs", found, "a tuple or a dict of arguments", fix="write (x,) for one argument"))
    return dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)  # pytrees look into dicts only
