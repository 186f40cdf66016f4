#!/usr/bin/env python3
"""What checkpointing itself costs: step time (forward + backward) of one block, in one run, for each way to do it.

    .venv/bin/python scripts/bench_overhead.py                 all cases, about three minutes
    .venv/bin/python scripts/bench_overhead.py --quick         few rounds: that it works, not how fast it is
    .venv/bin/python scripts/bench_overhead.py --ranks         two layers on two ranks instead: TP, DTensor, FSDP2

The ways take turns, one step each, and begin with another one in every round. A ratio is the median of the ratios in
single rounds. With one thread the clock is the process's CPU time, which other programs do not disturb; with several
it is the wall's. Before anything is timed, each way's gradients are compared with those of the plain block, bit for
bit, in its first step and after it is warm, and the FLOPs of one step are counted: that is how much it recomputes.
scripts/bench_gpu.py does the same on blocks of a real model, on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sac
from sac.memory_timeline import measure_memory
from sac.tables import Table, bytes_text, screen_width
from sac.tools.commands import progress_lines
from sac.tools.comparison import count_flops
from tests.support.blocks import Attention, GatedMLP, LlamaLikeBlock, alternate, policy, save
from tests.support.fused import FusedBlock, RMSNorm

Step = Callable[[Tensor], Tensor]
Progress = Callable[[int, int, str], None]
ATEN = torch.ops.aten
THREADS = torch.get_num_threads()  # torch's own choice

# -- The blocks: Llama-like ones of any size, with grouped queries or a mixture of experts

CHOSEN_EXPERTS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Some blocks and one input. 0 threads: torch's own choice; 0 kv_heads: as many as heads; 0 experts: one MLP.

    ``calls``: the block is so many calls of an autograd Function on raw memory, like Liger's norm, and nothing else.
    ``fused``: norms, rotation and activation are such Functions.
    """

    key: str
    d: int
    heads: int
    hidden: int
    batch: int
    seq: int
    rounds: int
    warm_up: int
    threads: int = 0
    kv_heads: int = 0
    experts: int = 0
    layers: int = 1
    calls: int = 0
    fused: bool = False

    @property
    def label(self) -> str:
        heads = f"{self.heads} heads" + (f" ({self.kv_heads} KV)" if self.kv_heads else "")
        mlp = f"{CHOSEN_EXPERTS} of {self.experts} experts of {self.hidden}" if self.experts else f"MLP {self.hidden}"
        layers = f"{self.layers} layers, " if self.layers > 1 else ""
        layer = f"{self.calls} calls of an autograd Function" if self.calls else f"{heads}, {mlp}"
        layer += ", norms, rotation and SwiGLU as autograd Functions" if self.fused else ""
        return f"{layers}d={self.d}, {layer}, batch {self.batch}, {self.seq} tokens"


SMALL = Case("small", d=32, heads=4, hidden=64, batch=2, seq=8, rounds=400, warm_up=20, threads=1)
MIXTURE = replace(SMALL, key="moe", experts=4, rounds=200)
LAYER = Case("layer", d=1024, heads=16, hidden=4096, batch=2, seq=256, rounds=10, warm_up=1)
CALLS = replace(SMALL, key="calls", rounds=50, calls=50)
FUSED = replace(LAYER, key="fused", fused=True)
FULL_RUN = (SMALL, MIXTURE, LAYER, FUSED, CALLS)
QUICK_RUN = (
    *(replace(case, rounds=3, warm_up=2) for case in (SMALL, MIXTURE, replace(SMALL, key="fused", fused=True), CALLS)),
    replace(LAYER, d=128, heads=4, hidden=512, seq=64, rounds=2),
)


class Calls(LlamaLikeBlock):
    """Calls of one autograd Function."""

    def __init__(self, width: int, calls: int) -> None:
        super().__init__(width)
        self.weight, self.calls = nn.Parameter(torch.ones(width)), calls

    def forward(self, x_BTD: Tensor) -> Tensor:
        for _ in range(self.calls):
            x_BTD = RMSNorm.apply(x_BTD, self.weight)
        return x_BTD * 1.0  # its backward writes over the gradient that it is given


class MixtureOfExperts(nn.Module):
    """A router, the best experts of each token, and a loop over experts, as published models have it in eager."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, hidden) for _ in range(experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        weights_NK, chosen_NK = self.router(x_ND).softmax(-1).topk(CHOSEN_EXPERTS, dim=-1)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        out_ND = torch.zeros_like(x_ND)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen_NK == index).nonzero(as_tuple=True)
            out_ND.index_add_(0, row, expert(x_ND[row]) * weights_NK[row, slot].unsqueeze(-1))
        return out_ND.view_as(x_BTD)


def build(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Return the blocks, their input, and the gradient of their output; both are (batch, seq, d)."""
    torch.manual_seed(0)
    shape = (case.batch, case.seq, case.d)
    with torch.device(device):
        blocks = nn.Sequential(*(_block(case) for _ in range(case.layers))).to(dtype)
        return blocks, torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def _block(case: Case) -> LlamaLikeBlock:
    if case.calls:
        return Calls(case.d, case.calls)
    block = (FusedBlock if case.fused else LlamaLikeBlock)(case.d, case.heads, case.hidden)
    if case.kv_heads:
        block.self_attn = Attention(case.d, case.heads, case.kv_heads)
    if case.experts:
        block.mlp = MixtureOfExperts(case.d, case.hidden, case.experts)
    rotary = block.self_attn
    again = -(-case.seq // len(rotary.cos))
    rotary.cos, rotary.sin = rotary.cos.repeat(again, 1), rotary.sin.repeat(again, 1)  # positions start over: same cost
    return block


# -- The ways to checkpoint them

POLICY = policy(save("attention", optional=True), alternate("matmul", optional=True))
ATTENTION_MODULE = policy({"module": "self_attn", "do": "save", "optional": True})
BASELINE, TORCH_FULL, STOCK = "none", "torch full", "stock SAC"
ATTENTION = frozenset({
    ATEN._scaled_dot_product_flash_attention_for_cpu.default, ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default, ATEN._scaled_dot_product_cudnn_attention.default,
})  # fmt: skip
ROUTING = frozenset({ATEN.topk.default, ATEN.nonzero.default})  # sac keeps them under every policy
MATMULS = frozenset({ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default})


class StockPolicy:
    """What `POLICY` says, in the form that torch's selective checkpointing takes: attention, and every other matmul.

    torch 2.11 and 2.12 ask in recomputation too, and count from the start there.
    """

    def __init__(self) -> None:
        self.matmuls = [0, 0]

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION or op in ROUTING:
            return CheckpointPolicy.MUST_SAVE
        if op in MATMULS:
            self.matmuls[context.is_recompute] += 1
            if self.matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def stock_contexts() -> Any:
    return create_selective_checkpoint_contexts(StockPolicy())


def by_torch(blocks: nn.ModuleList, **options: Any) -> None:
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def torch_remat(blocks: nn.ModuleList) -> None:
    """Each block under torch_remat's checkpoint, with its attention module as a region that is saved."""
    import torch_remat as remat

    def saved(forward: Step, x: Tensor) -> Tensor:
        out = remat.region(forward, "attention", recompute=False)(x)
        remat.recompute_needs_tensor(out)
        return out

    for index, block in enumerate(blocks):
        block.self_attn.forward = partial(saved, block.self_attn.forward)
        block.forward = remat.checkpoint(region_name=f"block {index}")(block.forward)


def by_sac(blocks: nn.ModuleList, **value: Any) -> None:
    sac.apply(blocks, {**value, "blocks": ["*"]})


def sac_context_fn(blocks: nn.ModuleList) -> None:
    by_torch(blocks, context_fn=sac.context_fn(POLICY))


WAYS: dict[str, Callable[[nn.ModuleList], None]] = {
    BASELINE: lambda blocks: None,
    TORCH_FULL: by_torch,
    "torch_remat": torch_remat,
    STOCK: partial(by_torch, context_fn=stock_contexts),
    "sac full": partial(by_sac, mode="full"),
    "sac rerun": partial(by_sac, mode="selective", policy=POLICY, engine="rerun"),
    "sac replay": partial(by_sac, mode="selective", policy=POLICY, engine="replay"),
    "sac.context_fn": sac_context_fn,
    "sac whole module": partial(by_sac, mode="selective", policy=ATTENTION_MODULE),
    "full, always": partial(by_sac, mode="full", verify="always"),
    "replay, always": partial(by_sac, mode="selective", policy=POLICY, engine="replay", verify="always"),
}
ON_RANKS = (BASELINE, TORCH_FULL, STOCK, "sac full", "sac rerun", "sac replay")


def cannot_run() -> dict[str, str]:
    """Return the ways that cannot run here, and why: a package that is not installed, a policy that is refused."""
    reasons = {}
    for mode, put in WAYS.items():
        try:
            put(nn.ModuleList([LlamaLikeBlock()]))
        except (ModuleNotFoundError, sac.SacError) as error:
            reasons[mode] = f"cannot run: {str(error).splitlines()[0]}"
    return reasons


# -- Steps of the ways, checked against each other, then timed in turns


class Times(NamedTuple):
    """Seconds of one step, and until the host was done with it."""

    step: float
    host: float


class HostClock:
    """Reads one of the `time` module's functions."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def times(self, begin: float, end: float) -> Times:
        return Times(end - begin, end - begin)


class CudaClock:
    """Events on the current stream, and the wall's time at which each was put there."""

    def now(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter()

    def times(self, begin: Any, end: Any) -> Times:
        end[0].synchronize()
        return Times(begin[0].elapsed_time(end[0]) / 1e3, end[1] - begin[1])


CPU_TIME = HostClock(time.process_time)
WALL_TIME = HostClock(time.perf_counter)


class Count(TorchDispatchMode):
    """Counts ops without `detach`, by which the ways hold tensors, and collectives among them.

    An op on DTensors is counted by what it runs: that is where its collectives are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        self.ops += func is not ATEN.detach.default
        is_waiting = func is torch.ops._c10d_functional.wait_tensor.default
        self.collectives += func.namespace.strip("_").startswith("c10d") and not is_waiting
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Counted:
    """Ops that a forward runs; FLOPs of a step, collectives of each pass."""

    forward_ops: int
    flops: int
    collectives: tuple[int, int]


class Runner:
    """A step of a model on one input."""

    def __init__(self, step: Step, parameters: Iterable[Tensor], x: Tensor, weights: Tensor, clock: Any) -> None:
        self.step, self.parameters = step, list(parameters)
        self.x, self.weights, self.clock = x.clone().requires_grad_(), weights, clock

    def pass_through(self, between: Callable[[], object] = lambda: None) -> None:
        """Run one forward and backward, which adds to existing gradients; `between` is called in between."""
        output = self.step(self.x)
        between()
        output.backward(self.weights)

    def clear(self) -> None:
        for tensor in (self.x, *self.parameters):
            tensor.grad = None

    def run(self) -> Times:
        """Run one forward and backward from no gradients."""
        self.clear()
        begin = self.clock.now()
        self.pass_through()
        return self.clock.times(begin, self.clock.now())

    def count(self) -> Counted:
        """Count what the dispatcher runs, in one step each."""
        self.clear()
        forward: list[int] = []
        with Count() as counted:
            self.pass_through(lambda: forward.extend((counted.ops, counted.collectives)))
        return Counted(forward[0], count_flops(self.run), (forward[1], counted.collectives - forward[1]))

    def kept_bytes(self) -> int:
        """Return the bytes that a forward leaves for backward, besides its result."""
        outputs: list[Tensor] = []
        end = measure_memory(lambda: outputs.append(self.step(self.x))).end_bytes
        return end - sum(one.nbytes for one in outputs if type(one) is Tensor)

    def gradients(self) -> list[Tensor]:
        """Return those of the last step; of a DTensor, this rank's share."""
        found = [tensor.grad for tensor in (self.x, *self.parameters) if tensor.grad is not None]
        return [one.to_local() if isinstance(one, DTensor) else one for one in found]


def shared_runner(mode: str, blocks: nn.Sequential, x: Tensor, weights: Tensor, clock: Any) -> Runner:
    """One way, on modules of its own with everybody's parameters: gradients are those of who ran last."""
    parameters = list(blocks.parameters())
    own = copy.deepcopy(blocks, {id(parameter): parameter for parameter in parameters})
    WAYS[mode](nn.ModuleList(own))
    return Runner(own, parameters, x, weights, clock)


def warmed_up(runner: Runner, steps: int, reference: list[Tensor] | None) -> tuple[Counted, list[Tensor], bool]:
    """Run some steps and a counted one; return the count, the last gradients, and whether they are the reference's.

    The first step has to have the same gradients as the last.
    """
    runner.run()
    first = runner.gradients()
    for _ in range(steps):
        runner.run()
    counted = runner.count()
    runner.run()
    last = runner.gradients()
    return counted, last, same(first, last) and (reference is None or same(last, reference))


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def time_rounds(
    case: Case, runners: dict[str, Runner], advance: Callable[[str], None] = lambda label: None
) -> dict[str, list[Times]]:
    """Return the times of each way, by round. Python's cycle collector runs between rounds, not inside a step."""
    found: dict[str, list[Times]] = {mode: [] for mode in runners}
    order = list(runners)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for index in range(case.rounds):
            turn = index % len(order)
            for mode in order[turn:] + order[:turn]:
                found[mode].append(runners[mode].run())
            gc.collect()
            advance(f"{case.key}: round {index + 1}")
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def ratio(left: list[Times], right: list[Times]) -> float:
    """The median over rounds of the ratio of two ways' steps."""
    return median(mine.step / theirs.step for mine, theirs in zip(left, right, strict=True))


# -- What is printed, and what it says of where it ran


def environment(script: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "command": shlex.join([".venv/bin/python", f"scripts/{script}", *sys.argv[1:]]),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    """The first column names the row; the others are numbers."""
    print(Table(columns, tuple(map(tuple, rows)), columns[1:]).text(screen_width()))


def counting(progress: Progress, total: int) -> Callable[[str], None]:
    """One more of `total` steps is done, each time that it is called with what was done."""
    done = iter(range(1, total + 1))
    return lambda label: progress(next(done, total), total, label)


# -- The benchmark


# A row is one way in one case: `step_ms` is the median, ratios are medians of those in single rounds. `ops` are those
# that one plain forward dispatches.
Result = dict[str, Any]


def measure(case: Case, runners: dict[str, Runner], label: str, clock: str, advance: Callable[[str], None]) -> Result:
    """Verify, count, warm up and time every way of one case."""
    counted, equal, kept, reference = {}, {}, {}, None
    for mode, runner in runners.items():
        advance(f"{case.key}: {mode}")
        counted[mode], gradients, equal[mode] = warmed_up(runner, case.warm_up, reference)
        kept[mode] = runner.kept_bytes()
        reference = reference or gradients
    times = time_rounds(case, runners, advance)

    def row(mode: str) -> Result:
        return {
            "mode": mode,
            "step_ms": 1000 * median(each.step for each in times[mode]),
            "ratio_to_none": ratio(times[mode], times[BASELINE]),
            "ratio_to_torch_full": ratio(times[mode], times[TORCH_FULL]),
            "flops_to_none": counted[mode].flops / (counted[BASELINE].flops or 1),
            "kept_bytes": kept[mode],
            "gradients_equal": equal[mode],
            "collectives": "{} + {}".format(*counted[mode].collectives),
        }

    return {
        "case": case.key,
        "label": label,
        "ops": counted[BASELINE].forward_ops,
        "threads": torch.get_num_threads(),
        "clock": clock,
        "rounds": case.rounds,
        "rows": [row(mode) for mode in runners],
    }


def measure_all(cases: list[Case], modes: list[str], progress: Progress) -> list[Result]:
    """Every case in turn."""
    advance = counting(progress, sum(len(modes) + case.rounds for case in cases))
    results = []
    for case in cases:
        torch.set_num_threads(case.threads or THREADS)
        clock = CPU_TIME if torch.get_num_threads() == 1 else WALL_TIME
        blocks, x, weights = build(case)
        runners = {mode: shared_runner(mode, blocks, x, weights, clock) for mode in modes}
        name = "CPU time" if clock is CPU_TIME else "wall time"
        results.append(measure(case, runners, case.label, name, advance))
    return results


KINDS = {
    "tp": "plain tensors, DTensor weights: colwise and rowwise linear layers",
    "dtensor": "DTensors all the way: the same, norms in shards of the sequence",
    "fsdp2": "fully_shard on each layer and on the model",
}


def measure_on_ranks(rounds: int) -> list[Result]:
    """Every kind of parallel layers, on two processes with gloo; the times are those of rank 0."""
    from tests.support.ranks import run_ranks

    return [run_ranks(2, measure_rank, kind, rounds, timeout=3600)[0] for kind in KINDS]


def measure_rank(kind: str, rounds: int) -> Result:
    """What one rank measures."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    from tests.stacks.model_parallel import layer_plan
    from tests.stacks.parallel_llama import Sizes, built

    torch.set_num_threads(1)
    mesh, sizes = init_device_mesh("cpu", (dist.get_world_size(),)), Sizes()

    def runner(way: str) -> Runner:
        model = built(sizes, first=False, last=False)
        layers = model.layers.values()
        generator = torch.Generator().manual_seed(dist.get_rank() if kind == "fsdp2" else 0)
        x, weights = (torch.randn(2, 8, sizes.width, generator=generator) for _ in range(2))
        for layer in layers if kind != "fsdp2" else ():
            parallelize_module(layer, mesh, layer_plan("dtensor" if kind == "dtensor" else "replicated"))
        if kind == "dtensor":
            model.cos, model.sin = (distribute_tensor(one, mesh, [Replicate()]) for one in (model.cos, model.sin))
            x, weights = (distribute_tensor(one, mesh, [Shard(1)]) for one in (x, weights))
        WAYS[way](nn.ModuleList(layers))
        for module in (*layers, model) if kind == "fsdp2" else ():
            fully_shard(module, mesh=mesh)
        return Runner(model, model.parameters(), x, weights, CPU_TIME)

    case = replace(SMALL, key=kind, rounds=rounds, warm_up=5)
    label = f"{KINDS[kind]}; {sizes.n_layers} layers, d={sizes.width}, 2 ranks"
    return measure(case, {way: runner(way) for way in ON_RANKS}, label, "CPU time of rank 0", lambda _: None)


COLUMNS = ("way", "step", "÷ none", "÷ full", "kept", "FLOPs", "collectives", "equal")


def cells(row: Result) -> list[str]:
    times = [f"{row['step_ms']:.2f} ms", *(f"{row[name]:.2f}" for name in ("ratio_to_none", "ratio_to_torch_full"))]
    equal = "yes" if row["gradients_equal"] else "NO"
    flops = f"{row['flops_to_none']:.2f}" if row["flops_to_none"] else "–"
    return [row["mode"], *times, bytes_text(row["kept_bytes"]), flops, row["collectives"], equal]


def print_results(results: list[Result], skipped: dict[str, str], seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    for result in results:
        how = f"{result['threads']} thread(s), {result['clock']}, {result['rounds']} rounds"
        print(f"\n{result['case']}: {result['label']}\n{result['ops']} ops in forward; {how}")
        print_table(COLUMNS, [cells(row) for row in result["rows"]])
        if result["case"] == CALLS.key:
            ms = {row["mode"]: row["step_ms"] for row in result["rows"]}
            print(f"sac replay - torch full: {1e3 * (ms['sac replay'] - ms[TORCH_FULL]) / CALLS.calls:.0f} µs per call")
    print("", *(f"{mode} {reason}" for mode, reason in skipped.items()), sep="\n")
    print(
        "step: median. ÷: median of the ratios in single rounds, to no checkpointing and torch full. kept: for\n"
        "backward. FLOPs: of a step, ÷ none. collectives: of forward + backward. equal: gradients, to those without\n"
        "checkpointing, in each bit. stock SAC, sac rerun, sac replay and sac.context_fn hold attention and every\n"
        "2nd matmul; torch_remat and sac whole module the attention module. always: with verify: always.\n"
        f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds of small cases")
    parser.add_argument("--case", choices=[case.key for case in FULL_RUN], help="only this case")
    parser.add_argument("--ranks", action="store_true", help="layers on two ranks")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    chosen = QUICK_RUN if given.quick else FULL_RUN
    cases = [replace(case, rounds=given.rounds or case.rounds) for case in chosen if given.case in (None, case.key)]
    skipped = {} if given.ranks else cannot_run()
    seen = environment("bench_overhead.py")
    if given.ranks:
        from bench_overhead import measure_on_ranks  # ranks find the function by the name of its module

        results = measure_on_ranks(given.rounds or (5 if given.quick else 100))
    else:
        with progress_lines() as progress:
            results = measure_all(cases, [mode for mode in WAYS if mode not in skipped], progress)
    if given.json:
        print(json.dumps({**seen, "skipped": skipped, "cases": results}, indent=2))
    else:
        print_results(results, skipped, seen)
    ours = (row for result in results for row in result["rows"] if row["mode"].startswith("sac"))
    return 0 if all(row["gradients_equal"] for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
