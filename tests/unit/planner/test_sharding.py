"""Plans for one rank of many."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sac
from sac.errors import PlanError
from sac.planner.budget import optimizer_bytes
from sac.planner.fakes import fake_copy, fake_mode
from sac.planner.plan_file import make_plan
from sac.planner.prepare import prepare
from sac.planner.sharding import fake_ranks, fsdp_over
from tests.support.ranks import run_ranks

WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs(rows=16):
    return (torch.randn(rows, WIDTH),)


def static_of(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_parameters_gradients_and_states_are_those_of_one_rank():
    with fake_ranks(8):
        planner = prepare(Model(), inputs(), parallelize=fsdp_over(8), optimizer="adamw")
    whole = static_of(Model())
    given = inputs()[0].numel() * 4
    assert planner.step.static == whole // 8 + given
    assert planner.step.extra == 2 * whole // 8


def test_a_sharded_step_is_below_a_whole_one_and_its_plan_fits():
    whole = make_plan(prepare(Model(), inputs()), "40%")
    with fake_ranks(8):
        planner = prepare(Model(), inputs(), parallelize=fsdp_over(8))
        sharded = make_plan(planner, "40%")
    assert sharded.most < whole.most
    assert sharded.point.is_checked
    assert sharded.point.peak <= sharded.budget
    assert not dist.is_initialized()


def _least_peak(model, x):
    """The peak of a step, at its best of some: gloo's threads hold what they have sent a little longer, or not."""
    from sac.memory_timeline import measure_memory

    peaks = []
    for _ in range(4):
        peaks.append(measure_memory(lambda: model(x).backward()).peak_bytes)
        model.zero_grad(set_to_none=True)
        time.sleep(0.05)
    return min(peaks)


def _measured_on_a_rank(value):
    """What a real rank of two allocates, by the profiler, over a step: its peak on top of what was there before."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    if value is not None:
        sac.apply(model, value)
    x = torch.randn(64, WIDTH)
    model(x).backward()
    model.zero_grad(set_to_none=True)
    return _least_peak(model, x)


@pytest.mark.parametrize("value", [None, "full"], ids=["none", "full"])
def test_the_peak_of_a_real_rank_is_what_was_predicted(value):
    measured = min(run_ranks(2, _measured_on_a_rank, value))  # a rank that waits longer holds what it sends longer
    with fake_ranks(2):
        planner = prepare(Model(), inputs(64), parallelize=fsdp_over(2))
        choice = planner.without_checkpointing if value is None else planner.everywhere(lambda kind: 0)
        predicted = planner.run(choice).peak - planner.step.static
    assert predicted == measured


def _split(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def parallelize(model):
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return parallelize


def _measured_tensor_parallel(policy):
    torch.manual_seed(0)
    model = Model()
    _split(2)(model)
    sac.apply(model, {"mode": "selective", "policy": policy, "verify": "never"})
    x = torch.randn(64, WIDTH)
    model(x).backward()
    model.zero_grad(set_to_none=True)
    return _least_peak(model, x)


def test_the_plan_of_a_tensor_parallel_rank_keeps_its_budget_there():
    with fake_ranks(2):
        planner = prepare(Model(), inputs(64), parallelize=_split(2))
        made = make_plan(planner, "50%")
    assert made.point.kept > 0
    measured = run_ranks(2, _measured_tensor_parallel, made.policy)
    assert min(measured) == made.point.peak - planner.step.static


def test_a_rank_of_two_has_half_of_the_flops_of_each_split_op():
    def flops(planner):
        entries = [one for profile in planner.profiles for one in profile.entries]
        return {(one.module, one.op, one.call): one.flops for one in entries if one.flops}

    whole = flops(prepare(Model(), inputs(64)))
    with fake_ranks(2):
        shared = flops(prepare(Model(), inputs(64), parallelize=_split(2)))
    assert sum(shared.values()) * 2 == sum(whole.values())


class Dense(nn.Module):
    """Its gradients of x and of what it normalizes are sums."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.skip = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + torch.relu(self.gate(y)) * self.up(y) + self.skip(y)


class DenseModel(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Dense() for _ in range(LAYERS))


def _as_dtensors(kind):
    """Return a function that makes all values in the layers of a model DTensors, which torch redistributes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    def parallelize(model):
        mesh = init_device_mesh("cpu", (2,))
        placed = Shard(1) if kind == "sequence" else Replicate()

        def share(name, module, mesh):
            for key, whole in [*module.named_parameters(recurse=False)]:
                is_split = kind == "columns" and whole.dim() == 2
                setattr(
                    module, key, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0) if is_split else Replicate()]))
                )

        distribute_module(model.layers, mesh, share)
        model.layers[0].register_forward_pre_hook(
            lambda module, args: DTensor.from_local(args[0], mesh, [Replicate()]).redistribute(placements=[placed])
        )
        model.layers[-1].register_forward_hook(lambda module, args, out: out.full_tensor())

    return parallelize


@pytest.mark.parametrize("kind", ["sequence", "columns", "copies"])
def test_the_plan_of_layers_of_dtensors_keeps_its_budget(kind):
    """Over a process group that sends nothing, a step with data takes as much as on real ranks."""
    x = torch.randn(4, 16, WIDTH)
    for share in ("0%", "50%"):
        with fake_ranks(2):
            planner = prepare(DenseModel(), (x,), parallelize=_as_dtensors(kind))
            made = make_plan(planner, share)
        with fake_ranks(2):
            model = DenseModel()
            _as_dtensors(kind)(model)
            sac.apply(model, {"mode": "selective", "policy": made.policy, "verify": "never"})
            model(x).backward()  # the first step is recorded
            model.zero_grad(set_to_none=True)
            peak = _least_peak(model, x)
        assert 0.97 * (made.point.peak - planner.step.static) <= peak <= made.point.peak - planner.step.static


def test_fsdp_warns_of_no_views_in_each_step():
    with fake_ranks(4), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planner = prepare(Model(), inputs(), parallelize=fsdp_over(4))
        planner.run(planner.everywhere(lambda group: 0))
    assert not [one for one in told if "view tensor" in str(one.message)]


def test_state_of_optimizers_is_counted_per_rank():
    with fake_ranks(4):
        copied = fake_copy(Model(), fake_mode())
        fsdp_over(4)(copied)
        states = optimizer_bytes("adamw", copied.parameters())
    assert states == 2 * static_of(Model()) // 4


@pytest.mark.parametrize("count", [0, 1, True, "8"])
def test_a_number_of_ranks_that_is_none(count):
    with pytest.raises(PlanError) as error, fake_ranks(count):
        pass
    assert str(error.value) == f"ranks: {count!r} ranks to shard over\n    legal: 2, 3, 4, …"


def test_a_process_group_that_is_there_is_left_alone():
    with fake_ranks(2):
        with pytest.raises(PlanError) as error, fake_ranks(4):
            pass
        assert dist.get_world_size() == 2
    assert str(error.value) == (
        "ranks: a process group is already initialized, but a plan for other ranks needs one that sends nothing\n"
        "    fix: plan in a process of its own"
    )


def _plan_beside_training(kind):
    """Plan on one rank of two, while the other goes on; return the error, or whether the plan has a policy."""
    model = Model()
    if kind == "split":
        _split(2)(model)
    if dist.get_rank():
        return None
    try:
        return len(
            sac.plan(model, inputs(), "50%", parallelize=fsdp_over(2) if kind == "to be sharded" else None).rules
        )
    except PlanError as error:
        return str(error)


def test_one_rank_of_a_training_cannot_plan_for_ranks_that_it_would_send_to():
    assert run_ranks(2, _plan_beside_training, "to be sharded")[0] == (
        "ranks: a process group is already initialized, but a plan for other ranks needs one that sends nothing\n"
        "    fix: plan in a process of its own"
    )


def test_one_rank_of_a_training_plans_a_tensor_parallel_model_alone():
    assert run_ranks(2, _plan_beside_training, "split")[0] > 0
