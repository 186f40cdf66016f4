"""Timing the ops of one block: which are timed, what is fitted to them, and that nothing of the caller's changes."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sac.blocks.find import Block
from sac.errors import PlanError, SacWarning
from sac.planner.calibrate import calibrate, fit_efficiencies, median_seconds, time_overhead
from sac.planner.cost import PRIORS, call_key, op_class, roofline, seconds, unpriced_ops
from sac.planner.devices import DEVICES, device_at_hand
from sac.planner.profile import Entry
from sac.planner.tracing import profile_regions
from sac.recompute.module_tracker import BareMode

B, S, D, HEADS = 2, 16, 32, 4


class Layer(nn.Module):
    """Has attention, dropout, running statistics, an op in place, integers and views."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(S)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.again = nn.Linear(D, D)
        self.drop = nn.Dropout(0.5)

    def forward(self, x_BSD):
        x_BSD = x_BSD.add_(1) if not x_BSD.is_leaf else x_BSD
        q, k, v = self.qkv(self.norm(x_BSD)).view(B, S, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, D)
        x_BSD = x_BSD + self.drop(self.again(self.out(attended)))
        first = x_BSD[..., 0].topk(2).indices
        return torch.gather(x_BSD[..., 0], 1, first)


class Seeing(BareMode):
    """Notes the argument of that place in every call of an op."""

    def __init__(self, op, place):
        super().__init__()
        self.op, self.place, self.seen = op, place, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.op:
            self.seen.append(args[self.place])
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # every op can be run again
        return calibrate(Layer(), (torch.randn(B, S, D),))


def test_it_says_where_it_was_measured(measured):
    assert (measured.device, measured.torch) == ("cpu", torch.__version__)


def test_each_op_that_runs_a_kernel_is_timed_once(measured):
    ops = sorted(key.split()[0] for key in measured.ops)
    assert ops == [
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten.add.Tensor",
        "aten.add_.Tensor",
        "aten.addmm.default",
        "aten.addmm.default",
        "aten.bernoulli_.float",
        "aten.div_.Scalar",
        "aten.gather.default",
        "aten.mul.Tensor",
        "aten.native_batch_norm.default",
        "aten.topk.default",
    ]
    assert all(value > 0 for value in measured.ops.values())
    assert f"aten.addmm.default float32[{B * S}, {D}] {2 * B * S * D * D} FLOP {4 * (D + 2 * B * S * D + D * D)} B" in (
        measured.ops
    )


def test_the_callers_things_are_left_as_they_were():
    block, x = Layer(), torch.randn(B, S, D).requires_grad_().clone()
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    buffers = {name: id(buffer) for name, buffer in block.named_buffers()}
    values, version, random = x.detach().clone(), x._version, torch.get_rng_state()
    calibrate(block, kwargs={"x_BSD": x})
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    assert {name: id(buffer) for name, buffer in block.named_buffers()} == buffers
    assert torch.equal(x, values)
    assert x._version == version
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in block.parameters())
    assert block.training


def test_a_generator_of_the_callers_stands_where_it_stood():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x):
            return x * torch.rand(4, generator=self.generator)

    block = Draws()
    calibrate(block, (torch.ones(4),))
    expected = torch.Generator().manual_seed(1)
    torch.rand(4, generator=expected)  # the block's own run draws; the repeats do not
    assert torch.equal(block.generator.get_state(), expected.get_state())


def test_each_call_is_run_again_a_few_times_on_other_tensors():
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    seeing = Seeing(torch.ops.aten.mm.default, 0)
    with seeing:
        calibrate(nn.Sequential(layer, nn.ReLU(), layer), (x,))
    assert len(seeing.seen) == 2 + 6  # the two calls of the block are one; once unmeasured, five times measured
    assert all(again is seeing.seen[2] for again in seeing.seen[2:])
    assert not any(torch.equal(seeing.seen[2], of_block) for of_block in (x, *seeing.seen[:2]))


def test_integers_are_what_they_were():
    """Other ones might be no legal indices, and offsets say how much there is to multiply."""

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 16)
            self.weight = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

        def forward(self, tokens):
            rows = self.embedding(tokens).bfloat16()
            return nn.functional.grouped_mm(rows, self.weight, offs=torch.tensor([8, 16], dtype=torch.int32))

    tokens = torch.full((16,), 4)
    embedding, grouped = Seeing(torch.ops.aten.embedding.default, 1), Seeing(torch.ops.aten._grouped_mm.default, 2)
    with embedding, grouped:
        calibrate(Grouped(), (tokens,))
    assert len(embedding.seen) == len(grouped.seen) == 7
    assert all(torch.equal(indices, tokens) for indices in embedding.seen)
    assert all(ends.tolist() == [8, 16] for ends in grouped.seen)


def test_the_ops_are_those_of_training():
    """They run with gradients, as in training, whatever the caller has; and by themselves without autocast."""

    class Watched(nn.Module):
        def forward(self, x):
            assert torch.is_grad_enabled()
            with torch.autocast("cpu", enabled=False):
                return x @ x

    seeing = Seeing(torch.ops.aten.mm.default, 0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), seeing:
        calibrate(Watched(), (torch.randn(8, 8),))
    assert [x.dtype for x in seeing.seen] == [torch.float32] * 7


def test_layouts_are_kept():
    """An expanded or transposed operand is run as it was, so strides are part of what is distinct."""

    class Strided(nn.Module):
        def forward(self, x, row):
            return x.t() @ x + row.expand(8, 8) + torch.zeros(0, 8).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops = calibrate(Strided(), (torch.randn(4, 8), torch.randn(8))).ops
    assert f"aten.mm.default float32[8, 8] {2 * 8 * 4 * 8} FLOP {4 * (32 + 32 + 64)} B" in ops
    assert f"aten.add.Tensor float32[8, 8] 0 FLOP {4 * (64 + 8 + 64)} B" in ops


@torch.library.custom_op("sac_tests_calibrate::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if not torch.all(x == 1):
        raise ValueError("only ones")
    return x * 1


def test_an_op_that_refuses_is_named_and_the_rest_is_timed():
    class Picky(nn.Module):
        def forward(self, x):
            return picky(x) + 1

    with pytest.warns(SacWarning) as warned:
        ops = calibrate(Picky(), (torch.ones(8, 8),)).ops
    assert [str(warning.message) for warning in warned] == [
        "these ops could not be run by themselves: sac_tests_calibrate.picky.default (ValueError: only ones)"
    ]
    assert warned[0].filename == __file__
    assert "aten.add.Tensor float32[8, 8] 0 FLOP 512 B" in ops


def test_a_block_on_no_device_is_refused():
    with pytest.raises(PlanError, match="the planner has no figures for 'meta'"):
        calibrate(nn.Linear(4, 4, device="meta"), (torch.empty(2, 4, device="meta"),))


def test_a_block_that_runs_nothing_is_refused():
    with pytest.raises(PlanError) as error:
        calibrate(nn.Identity(), (torch.ones(2),))
    assert str(error.value) == "Identity: its forward ran no op on plain tensors that can be timed"


class Clock:
    """Stands in for CUDA's events; each mark is two milliseconds and a bit later."""

    now_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Clock.now_ms += 2 + Clock.now_ms / 100
        self.at_ms = Clock.now_ms

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_a_gpu_is_timed_by_its_events_with_one_wait_for_all_repeats(monkeypatch):
    waits, runs = [], []
    monkeypatch.setattr(Clock, "now_ms", 0.0)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(runs)))
    seconds = median_seconds(lambda: runs.append(1), torch.device("cuda:0"))
    assert waits == [6]
    times_ms = [2 * 1.01**mark for mark in range(1, 6)]
    assert seconds == pytest.approx(times_ms[2] / 1e3)


@pytest.mark.gpu
def test_a_block_on_a_gpu():
    measured = calibrate(Layer().cuda(), (torch.randn(B, S, D, device="cuda"),))
    assert measured.device == device_at_hand(torch.device("cuda")).name
    assert f"aten.addmm.default float32[{B * S}, {D}] {2 * B * S * D * D} FLOP {4 * (D + 2 * B * S * D + D * D)} B" in (
        measured.ops
    )


def entry(op, flops, moved_bytes):
    return Entry(0, "", op, 0, (), (), flops=flops, moved_bytes=moved_bytes, shape=(1,), dtype="bfloat16")


CALLS = [
    entry("aten.mm.default", 10**12, 10**8),
    entry("aten.bmm.default", 10**13, 10**9),
    entry("aten._scaled_dot_product_flash_attention.default", 10**12, 10**8),
    entry("aten.silu.default", 0, 10**8),
    entry("aten.mul.Tensor", 0, 10**9),
]
H100 = DEVICES["h100"]


def test_the_fit_finds_the_efficiencies_by_which_times_were_made():
    true = {**PRIORS, "matmul": 0.55, "attention": 0.31, "memory": 0.77}
    fitted = fit_efficiencies([(call, roofline(call, H100, true)) for call in CALLS], H100)
    assert fitted == pytest.approx({"matmul": 0.55, "attention": 0.31, "memory": 0.77})


def test_the_fit_is_in_logarithms():
    """Twice too slow and twice too fast cancel; a mean of times would not."""
    ideal = roofline(CALLS[0], H100, dict.fromkeys(PRIORS, 0.5)) - H100.launch_s
    slow, fast = ideal * 2 + H100.launch_s, ideal / 2 + H100.launch_s
    assert fit_efficiencies([(CALLS[0], slow), (CALLS[0], fast)], H100) == pytest.approx({"matmul": 0.5})


@pytest.mark.parametrize(
    ("call", "time"),
    [
        (entry("aten.silu.default", 0, 10**6), 1e-3),
        (entry("aten.mm.default", 10**6, 10**3), 1e-3),
        (entry("aten.mm.default", 10**10, 10**9), 1e-3),
        (CALLS[0], H100.launch_s),
        (Entry(0, "", "_c10d_functional.all_reduce.default", 0, (), (), is_collective=True, moved_bytes=10**9), 1.0),
    ],
    ids=["moves little", "multiplies little", "a product that memory bounds", "no more than a launch", "a collective"],
)
def test_calls_that_say_nothing_about_their_class_are_left_out(call, time):
    assert fit_efficiencies([(call, time)], H100) == {}


def test_each_op_of_a_profile_is_found_among_what_was_measured():
    """The tape and the timing see the same calls, and call them by the same key."""
    block, x = Layer(), torch.randn(B, S, D)
    measured = calibrate(block, (x,))
    (profile,) = profile_regions([Block("0", block, 0, "", 1, "language")], lambda: block(x))
    priced = [one for one in profile.entries if op_class(one) != "free"]
    assert {call_key(one) for one in priced} == measured.ops.keys()
    assert [seconds(one, DEVICES["cpu"], measured) for one in priced] == [measured.ops[call_key(one)] for one in priced]
    assert unpriced_ops(profile) == ()


def test_the_overhead_of_this_host_is_measured_and_leaves_no_trace():
    before = torch.random.get_rng_state()
    found = time_overhead(torch.device("cpu"))
    assert found.record_s + found.replayed_call_s > 0
    assert found.rerun_s + found.rerun_call_s > 0
    assert torch.equal(torch.random.get_rng_state(), before)
