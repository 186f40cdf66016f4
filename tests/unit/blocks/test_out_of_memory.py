"""An out-of-memory error says where, what is kept, what other modes would free, and how to plan; it stays the error."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks import out_of_memory
from sac.errors import ModelError, SacWarning
from sac.torch_private import NO_TASK, TorchDispatchMode, current_graph_task_id

DIM = 16
INPUTS = torch.linspace(-1, 1, 32 * DIM).reshape(32, DIM)
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Trap(nn.Module):
    """An identity that raises an error once it is set, in forward or in the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.in_backward = False

    def set(self, error: BaseException | None = None, *, in_backward: bool = False) -> BaseException:
        self.error, self.in_backward = error or torch.OutOfMemoryError(SAID), in_backward
        return self.error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None and self.in_backward == (current_graph_task_id() != NO_TASK):
            raise self.error
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.trap = Trap()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.trap(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = Trap()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


def trained(value: Any = None, steps: int = 1) -> Model:
    """Return a model under a mode (None: watched) that has run some steps."""
    model = Model()
    if value is None:
        sac.watch(model)
    else:
        sac.apply(model, value)
    for _ in range(steps):
        model(INPUTS).backward()
    return model


def error_of(step: Callable[[], Any]) -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step()
    return caught.value


def step_of(model: Model) -> Callable[[], Any]:
    return lambda: model(INPUTS).backward()


PLAN = """\
  plan for what fits: sac.plan(model, inputs, budget="SIZE"), then sac.apply with its policy
    on the command line: sac plan --model SPEC --batch N --seq N --dtype float32 --budget SIZE --explain"""

SELECTIVE = f"""\
{SAID}

sac: out of memory in the forward of blocks.1 (mode selective, policy general)
  kept from forward to backward by 3 regions: 30.0 KiB (10.0 KiB so far: the forward of 1 is over)
    blocks.0-2 (x3): 10.0 KiB each, 2.0 KiB of it inputs
      rule matmuls: 8.0 KiB each, most in up
  other modes, by the ops of the first call (bytes at most; a step counts as three forwards):
    none: keeps 72.8 KiB, needs 42.8 KiB more; recomputes 0% of the regions' FLOPs (now 50%), step ×0.86
    full: keeps 6.0 KiB, frees 24.0 KiB; recomputes 100% of the regions' FLOPs (now 50%), step ×1.14
{PLAN}"""

FULL = f"""\
{SAID}

sac: out of memory in the recomputation of blocks.1 (mode full)
  kept from forward to backward by 3 regions: 6.0 KiB
    blocks.0-2 (x3): 2.0 KiB each, 2.0 KiB of it inputs
  other modes, by the ops of the first call (bytes at most; a step counts as three forwards):
    none: keeps 72.8 KiB, needs 66.8 KiB more; recomputes 0% of the regions' FLOPs (now 100%), step ×0.75
    selective (policy general): keeps 36.0 KiB, needs 30.0 KiB more; recomputes 50% of the regions' FLOPs (now 100%), \
step ×0.88
    no mode keeps less than full: use a smaller batch, shard the model, or keep inputs elsewhere
{PLAN}"""


def test_an_error_in_forward_is_explained_whole() -> None:
    model = trained("selective")
    raised = model.blocks[1].trap.set()
    error = error_of(step_of(model))
    assert str(error) == SELECTIVE
    assert error is raised, "it is the user's exception, not another one"


def test_the_page_shows_what_is_said() -> None:
    page = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
    assert f"```\ntorch.OutOfMemoryError: {SELECTIVE}\n```\n" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_in_recomputation_is_explained_whole(reentrant: bool) -> None:
    model = trained({"mode": "full", "use_reentrant": True} if reentrant else "full")
    raised = model.blocks[1].trap.set(in_backward=True)
    error = error_of(step_of(model))
    assert str(error) == FULL
    assert error is raised


def test_an_op_that_runs_out_of_memory_in_a_replay_is_explained() -> None:
    model = trained("selective")
    raised = torch.OutOfMemoryError(SAID)

    class Fails(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.gelu.default:
                raise raised
            return func(*args, **(kwargs or {}))

    loss = model(INPUTS)

    def backward() -> None:
        with Fails():
            loss.backward()

    assert "sac: out of memory in the recomputation of blocks.2 (mode selective, policy general)" in str(
        error_of(backward)
    )


def test_a_watched_model_without_checkpointing_is_explained() -> None:
    model = trained()
    model.blocks[1].trap.set()
    text = str(error_of(step_of(model)))
    assert text.startswith(f"{SAID}\n\nsac: out of memory in the forward of blocks.1 (mode none)\n")
    assert "    full: keeps 6.0 KiB, frees" in text
    assert "    selective (policy general): keeps 36.0 KiB, frees" in text
    assert "blocks.0-2 (x3): " in text
    assert "      autograd: " in text


def test_chunks_are_explained() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    sac.apply(model, {"mode": "full", "layers": {"uniform": 2}})
    model(INPUTS).sum().backward()
    model[2].trap.set()
    text = str(error_of(lambda: model(INPUTS)))
    assert (
        "sac: out of memory in the forward of 2-3 (mode full)\n  kept from forward to backward by 2 regions: " in text
    )


def test_the_first_step_says_what_is_not_known() -> None:
    model = sac.apply(Model(), "selective")
    model.blocks[0].trap.set()
    assert str(error_of(step_of(model))) == (
        f"{SAID}\n\nsac: out of memory in the forward of blocks.0 (mode selective, policy general)\n"
        "  no region has finished a forward yet: what they keep is not known\n"
        '  plan for what fits: sac.plan(model, inputs, budget="SIZE"), then sac.apply with its policy\n'
        "    on the command line: sac plan --model SPEC --batch N --seq N --budget SIZE --explain"
    )


def test_the_allocator_of_the_host_is_explained_and_other_errors_are_not() -> None:
    model = trained("full")
    model.blocks[1].trap.set(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    with pytest.raises(RuntimeError, match=r"sac: out of memory in the forward of blocks\.1"):
        model(INPUTS)
    for other in (RuntimeError("shapes differ"), ValueError(SAID)):
        model.blocks[1].trap.set(other)
        with pytest.raises(type(other)) as caught:
            model(INPUTS)
        assert caught.value is other
        assert "sac:" not in str(other)


def test_a_second_region_adds_nothing() -> None:
    model = trained("full")
    error = model.blocks[1].trap.set()
    with pytest.raises(torch.OutOfMemoryError):
        model(INPUTS)
    once = str(error)
    model.blocks[1].trap.set(error)  # the same exception passes again
    with pytest.raises(torch.OutOfMemoryError):
        model(INPUTS)
    assert str(error) == once


def test_a_failure_of_the_explanation_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(out_of_memory, "_lines", fails)
    model = trained("full")
    model.blocks[1].trap.set()
    assert str(error_of(step_of(model))) == SAID
    out_of_memory.observer(0, 1, 2, 3)


def test_explaining_makes_no_tensor_with_memory() -> None:
    made: list[Tensor] = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.append(out)
            return out

    model = trained("selective")
    error = torch.OutOfMemoryError(SAID)
    with Watches():
        out_of_memory.WATCH.explain(error, "blocks.1", (model.blocks[1],), in_backward=False)
    assert "frees 24.0 KiB" in str(error)
    assert made
    assert {one.device.type for one in made} == {"meta"}


# -- Outside of the regions: torch's observer, which a GPU's allocator calls


def told(model: Model, call: Callable[[], Any]) -> list[str]:
    """Return the warnings of the observer about ``model``: other tests may have left some of theirs."""
    mine = {id(module) for module in model.modules()}
    with (
        patch.object(out_of_memory, "_is_on", lambda module, device: id(module) in mine),
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if issubclass(one.category, SacWarning)]


def test_an_error_outside_of_the_regions_stays_and_the_observer_explains_it() -> None:
    model = trained("selective")
    model.head.set()
    error = error_of(step_of(model))
    assert str(error) == SAID
    (text,) = told(model, lambda: out_of_memory.observer(0, 2 << 30, 80 << 30, 0))
    assert text.splitlines()[:2] == [
        "sac: out of memory outside of the model, outside of the regions: 2.0 GiB were asked for (mode selective, "
        "policy general)",
        "  kept from forward to backward by 3 regions: 30.0 KiB",
    ]


def test_the_observer_names_the_module_of_a_forward_and_the_node_of_a_backward() -> None:
    model = trained("full")

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out_of_memory.observer(0, 1024, 0, 0)
            return x

    model.head = Asks()  # type: ignore[assignment]
    (text,) = told(model, lambda: model(INPUTS))
    assert text.startswith(
        "sac: out of memory in the forward of a Asks, outside of the regions: 1.0 KiB were asked for (mode full)"
    )

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.pow.Tensor_Scalar:
                out_of_memory.observer(0, 1024, 0, 0)
            return func(*args, **(kwargs or {}))

    model.head = nn.Identity()  # type: ignore[assignment]
    loss = model(INPUTS)

    def backward() -> None:
        with Notes():
            loss.backward()

    (text,) = told(model, backward)
    assert text.startswith("sac: out of memory in backward (PowBackward0), outside of the regions")


@pytest.mark.parametrize("value", ["full", "selective", None])
def test_the_observer_is_silent_where_the_error_will_pass_through_a_region(value: Any) -> None:
    model = trained(value)

    class Asks(Trap):
        def forward(self, x: Tensor) -> Tensor:
            out_of_memory.observer(0, 1024, 0, 0)
            return x

    model.blocks[1].trap = Asks()
    assert told(model, step_of(model)) == []


def test_the_observer_never_raises() -> None:
    model = trained("full")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out_of_memory.observer(0, 1024, 0, 0)
    assert told(model, lambda: out_of_memory.observer(0, 1024, 0, 0)), "it had something to say"


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_calls_the_observer() -> None:
    model = sac.apply(Model().cuda(), "full")
    model(INPUTS.cuda()).backward()

    def step() -> None:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 50, device="cuda")

    (text,) = told(model, step)
    assert text.startswith("sac: out of memory outside of the model, outside of the regions: ")


def test_an_error_of_a_backward_outside_of_the_regions_stays() -> None:
    model = trained("full")
    error = torch.OutOfMemoryError(SAID)
    loss = _Raises.apply(model(INPUTS), error)  # type: ignore[no-untyped-call]
    assert error_of(loss.backward) is error
    assert str(error) == SAID


# -- sac.watch


def test_a_watched_model_trains_as_without_sac_and_reports_what_it_keeps() -> None:
    plain = Model()
    watched = sac.watch(copy.deepcopy(plain))
    for _ in range(3):
        for model in (plain, watched):
            model(INPUTS).backward()
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    report = sac.report(watched)
    assert report.mode == "none"
    assert [kind.calls for kind in report.kinds] == [3], "one recorded call of each block; the later ones run plain"
    sac.remove(watched)
    assert all("forward" not in vars(module) for module in watched.modules())


def test_watched_models_can_be_copied_and_pickled() -> None:
    model = trained()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.blocks[1].trap.set()
        assert "sac: out of memory in the forward of blocks.1 (mode none)" in str(error_of(step_of(other)))


def test_watch_refuses_a_model_that_sac_is_on_and_apply_one_that_is_watched() -> None:
    with pytest.raises(ModelError, match=r"^blocks\.0: sac\.apply has been called on this model before"):
        sac.watch(trained("full"))
    with pytest.raises(ModelError, match=r"^blocks\.0: sac\.watch is on this model\n    fix: call sac\.remove"):
        sac.apply(trained(), "full")
    with pytest.raises(sac.SacError, match=r"sac\.watch: model is a int\n    legal: a torch\.nn\.Module"):
        sac.watch(3)  # type: ignore[arg-type]
