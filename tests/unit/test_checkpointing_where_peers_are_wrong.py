"""What TransformerEngine, Megatron-Core, DeepSpeed and torch get wrong in full recomputation, one test a case.

Each docstring names the peers and what happens there. torch is at hand and is shown to fail where it does; the others
need CUDA, and what is said of them was read in their sources or seen with their code on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from sac.config import COMPARED_BY_CALLS
from sac.errors import RegionError
from sac.full import FullConfig, RngTracker
from tests.support.cases import CASES, WIDTH, Run, Seen, hidden, layer, loss_of, seen
from tests.support.ranks import run_ranks
from tests.support.runs import Noted
from tests.support.stored_regions import differences, plainly


def scattered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return sac.checkpoint(function, *args, distribute_saved_activations=True, tp_group=dist.group.WORLD, **kwargs)


def every_input_scattered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return scattered(function, *args, config=FullConfig(keep="all"), **kwargs)


def wrong(program: Callable[[Run], Seen], run: Run) -> list[str]:
    """Names of what differs from the plain run, in the first call and in a later one."""
    torch.manual_seed(5)
    plain = program(plainly)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found += differences(plain, program(run))
    return found


def right_on_two_ranks(program: Callable[[Run], Seen], run: Run = scattered) -> bool:
    return run_ranks(2, wrong, program, run) == [[], []]


def residual(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    before, address = h.detach().clone(), h.data_ptr()
    out = h + run(model, h)
    assert torch.equal(h, before)
    assert (h.data_ptr(), h.shape) == (address, before.shape)
    return seen(out, x, model)


def test_a_residual_around_a_scattered_region():
    """TransformerEngine and Megatron give the caller's tensor its share as data, DeepSpeed an uninitialised 0-dim one:
    the addition fails, or broadcasts and is silently wrong."""
    assert right_on_two_ranks(residual)


def test_a_forward_without_grad_leaves_the_input_alone():
    """TransformerEngine, Megatron and DeepSpeed scatter it all the same, and never gather it again."""
    assert right_on_two_ranks(CASES["no_grad"].program)


def test_one_input_in_two_regions():
    """The second region of TransformerEngine, Megatron and DeepSpeed finds what the first one left of the tensor."""
    assert right_on_two_ranks(CASES["shared_input"].program)


def odd_sizes(run: Run) -> Seen:
    model, (x, h) = layer(7), hidden(3, 7)
    return seen(run(model, h), x, model)


def test_a_size_that_the_group_does_not_divide():
    """TransformerEngine and Megatron cut the tail off and fail in backward; DeepSpeed refuses."""
    assert right_on_two_ranks(odd_sizes)


def view_and_strided(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(WIDTH, 2 * WIDTH)
    return seen([run(model, h[:, :WIDTH]), run(model, h[:, WIDTH:].t())], x, model)


def test_views_and_strided_inputs():
    """TransformerEngine and Megatron fail on both, after the forward has run."""
    assert right_on_two_ranks(view_and_strided)


def with_dtensor_input(placement: Any) -> list[str]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def program(run: Run) -> Seen:
        torch.manual_seed(5)
        weight = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Replicate()]))
        leaf = distribute_tensor(torch.randn(4, WIDTH), mesh, [placement]).requires_grad_()
        out = run(lambda h: torch.tanh(h @ weight), leaf * 1.5)
        out.square().sum().full_tensor().backward()
        return {"output": out.to_local(), "input": leaf.grad.to_local(), "weight": weight.grad.to_local()}

    return differences(program(plainly), program(scattered))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_dtensor_inputs(placement):
    """TransformerEngine and Megatron mix torch.Tensor and DTensor, and fail."""
    assert run_ranks(2, with_dtensor_input, placement) == [[], []]


def sequence_parallel() -> str:
    torch.manual_seed(dist.get_rank())
    h = torch.randn(4, WIDTH, requires_grad=True)
    COMPARED_BY_CALLS._counts.clear()  # other tests have used this process group
    with pytest.raises(sac.SacError) as caught:
        scattered(torch.sin, h)
    return str(caught.value)


def test_an_input_that_differs_between_ranks_is_found():
    """TransformerEngine, Megatron and DeepSpeed put shares of different tensors together: silently wrong gradients."""
    first, second = run_ranks(2, sequence_parallel)
    assert first == second
    assert "argument 0" in first


def flags_and_keywords(run: Run) -> Seen:
    model, (x, h), scale = layer(), hidden(4, WIDTH), torch.randn(WIDTH, requires_grad=True)

    def body(h: Tensor, flag: bool = False, scale: Tensor | None = None, shift: float = 0.0) -> Tensor:
        h = h * scale if scale is not None else h
        return model(h + shift) if flag else h

    return seen(run(body, h, flag=True, scale=scale * 1.0, shift=0.5), x, scale, model)


def test_keyword_arguments_beside_scattered_ones():
    """DeepSpeed puts a None behind each argument that is no tensor when it partitions: all after it move on by one."""
    assert right_on_two_ranks(flags_and_keywords, every_input_scattered)


def small_arguments(run: Run) -> Seen:
    model, (x, h), (y, scale) = layer(), hidden(4, WIDTH), hidden(2)
    return seen(run(lambda h, scale: model(h * scale.sum()), h, scale), x, y, model)


def test_arguments_with_as_many_elements_as_ranks():
    """DeepSpeed partitions them, and does not gather them again."""
    assert right_on_two_ranks(small_arguments, every_input_scattered)


def second_backward(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(model, h)
    loss_of([out]).backward(retain_graph=True)
    return seen(out, x, model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_backward_through_a_scattered_region(reentrant):
    """TransformerEngine and Megatron crash in its all-gather."""
    assert run_ranks(2, second_backward_in, reentrant) == [[], []]


def second_backward_in(reentrant: bool) -> list[str]:
    return wrong(second_backward, lambda *args: scattered(*args, use_reentrant=reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_is_as_it_was(reentrant):
    """Megatron and DeepSpeed recompute without it: other gradients, or a dtype error."""
    assert wrong(CASES["autocast"].program, lambda *args: sac.checkpoint(*args, use_reentrant=reentrant)) == []


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_random_states_after_an_exception_in_recomputation(reentrant):
    """TransformerEngine and DeepSpeed leave them rewound: what is drawn next was drawn before."""
    tracker = RngTracker("cpu")
    tracker.add("model-parallel-rng", 3)
    runs = Noted()

    def body(h: Tensor) -> Tensor:
        runs.append(1)
        with tracker.fork():
            h = F.dropout(h, 0.5)
        if len(runs) == 2:
            raise Interrupted
        return F.dropout(h.sin(), 0.5).exp()

    out = sac.checkpoint(
        body, torch.randn(4, requires_grad=True) * 1, use_reentrant=reentrant, get_rng_state_tracker=lambda: tracker
    )
    states = torch.get_rng_state(), tracker.get_states()["model-parallel-rng"]
    with pytest.raises(Interrupted):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(tracker.get_states()["model-parallel-rng"], states[1])
    out.sum().backward()


def forks_of_one_name() -> tuple[Tensor, Tensor]:
    tracker = RngTracker("cpu")
    tracker.add("one", 3)
    with tracker.fork("one"):
        first = torch.rand(4)
        with tracker.fork("one"):
            second = torch.rand(4)
    return first, second


def test_a_fork_inside_one_of_the_same_name_goes_on():
    """DeepSpeed's and TransformerEngine's start it again: the same numbers twice."""
    first, second = forks_of_one_name()
    assert not torch.equal(first, second)


def tracker_program(run: Run, tracker: RngTracker) -> Seen:
    tracker.reset()
    tracker.add("model-parallel-rng", 9)
    model, (x, h) = layer(), hidden(4, WIDTH)

    def body(h: Tensor) -> Tensor:
        with tracker.fork():
            return model(F.dropout(h, 0.5))

    with tracker.fork():
        out = run(body, h)
    return seen(out, x, model)


def test_a_region_inside_a_fork_that_forks_the_same_name():
    """Megatron's snapshot lacks the name of the current state: other masks in recomputation."""
    tracker = RngTracker("cpu")
    run = lambda *args: sac.checkpoint(*args, get_rng_state_tracker=lambda: tracker)  # noqa: E731
    assert wrong(lambda run: tracker_program(run, tracker), run) == []


class GraphSafe:
    """A tracker of generators, as TransformerEngine and Megatron use under CUDA graphs: its states are live objects."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.Generator().manual_seed(4)}

    def get_states(self) -> dict[str, torch.Generator]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Generator]) -> None:
        self.states = states

    def draw(self, shape: torch.Size) -> Tensor:
        return torch.rand(shape, generator=self.states["model-parallel-rng"])


def test_a_tracker_whose_states_are_generators():
    """TransformerEngine and Megatron keep references to them: what they put back has moved on with the forward."""

    def program(run: Run, tracker: GraphSafe) -> Seen:
        model, (x, h) = layer(), hidden(4, WIDTH)
        return seen(run(lambda h: model(h * tracker.draw(h.shape)), h), x, model)

    torch.manual_seed(5)
    plain = program(plainly, GraphSafe())
    torch.manual_seed(5)
    tracker = GraphSafe()
    ours = program(lambda *args: sac.checkpoint(*args, get_rng_state_tracker=lambda: tracker), tracker)
    assert differences(plain, ours) == []


def test_dropout_in_a_fork_under_torch():
    """torch knows no trackers: its gradients are wrong in both modes."""
    for reentrant in (False, True):
        for checkpoint, is_right in ((torch_checkpoint, False), (sac.checkpoint, True)):
            tracker = RngTracker("cpu")
            more = {"get_rng_state_tracker": lambda tracker=tracker: tracker} if is_right else {}

            def program(run: Run, tracker: RngTracker = tracker) -> Seen:
                tracker.reset()
                tracker.add("model-parallel-rng", 9)
                model, (x, h) = layer(), hidden(4, WIDTH)

                def body(h: Tensor) -> Tensor:
                    with tracker.fork():
                        return model(F.dropout(h, 0.5))

                return seen(run(body, h), x, model)

            run = lambda *args, c=checkpoint, m=more, r=reentrant: c(*args, use_reentrant=r, **m)  # noqa: E731
            assert (wrong(program, run) == []) is is_right


def test_a_failed_add_does_not_use_its_seed_up():
    """In TransformerEngine, Megatron and DeepSpeed the seed is noted before the name is looked at."""
    tracker = RngTracker("cpu")
    tracker.add("one", 1)
    with pytest.raises(sac.SacError):
        tracker.add("one", 2)
    tracker.add("two", 2)


def test_an_input_changed_between_forward_and_backward():
    """The light modes of TransformerEngine and DeepSpeed do not look; nor does torch at keyword arguments."""
    for pass_on in (lambda run, h: run(torch.sin, h), lambda run, h: run(lambda h: h.sin(), h=h)):
        h = torch.randn(4, requires_grad=True) * 1
        out = pass_on(sac.checkpoint, h)
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RegionError, match="was changed in place"):
            out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_that_need_no_gradient_train_the_weights(reentrant):
    """TransformerEngine, Megatron and DeepSpeed return a detached output without a word; torch warns."""
    model = layer()
    sac.checkpoint(model, torch.randn(4, WIDTH), use_reentrant=reentrant).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_outputs_in_a_dict_keep_their_gradients(reentrant):
    """TransformerEngine and Megatron lose them silently in the reentrant mode."""

    def program(run: Run) -> Seen:
        model, (x, h) = layer(), hidden(4, WIDTH)
        return seen(run(lambda h: {"hidden": model(h), "list": [h.exp()]}, h), x, model)

    assert wrong(program, lambda *args: sac.checkpoint(*args, use_reentrant=reentrant)) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_activation_in_a_keyword_argument_and_outside(reentrant):
    """TransformerEngine's reentrant mode passes keyword tensors with their graph: "backward a second time"."""

    def program(run: Run) -> Seen:  # exact in numbers that do not round: the reentrant mode adds in another order
        x = torch.arange(4.0).requires_grad_()
        h = x * 2
        return seen(run(lambda a, other: a * other, h, other=h) + h, x)

    assert wrong(program, lambda *args, **kwargs: sac.checkpoint(*args, use_reentrant=reentrant, **kwargs)) == []


def test_scatter_of_a_plain_torch_module():
    """TransformerEngine hands modules that are not its own to torch, and drops scatter and tracker silently."""
    assert run_ranks(2, kept_bytes_of_a_plain_module) == [16, 16]


def kept_bytes_of_a_plain_module() -> int:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    container = nn.Sequential(model)
    sac.apply(
        container,
        {"mode": "full", "blocks": ["0"], "distribute_saved_activations": True},
        tp_group=dist.group.WORLD,
    )
    out = container(torch.randn(2, 4, requires_grad=True))
    out.sum().backward()
    return sac.report(container).to_dict()["kinds"][0]["input_bytes"]
