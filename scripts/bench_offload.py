"""What offloading gains on GPUs: simulated steps of Llama models on devices with different links to the host.

    scripts/bench_offload.py            # all models and devices, some minutes; --toy: one of them
    scripts/bench_offload.py --host     # instead, the processor time that offloading takes per tensor, measured here

Each step is simulated region by region with the clock of `sac plan` (Note [The clock of transfers]). Nothing runs on a
GPU. The layers have fused norms and flash attention, in bf16; of activations, only those of the layers count.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import sac
from sac.planner.calibrate import time_link
from sac.planner.cost import CUDNN_ATTENTION, MATMUL, MEMORY, PRIORS
from sac.planner.devices import DEVICES, Device
from sac.planner.layers import MemoryConstraint
from sac.planner.link_search import LinkOption, LinkPlan, LinkProblem, Row
from sac.planner.transfer_clock import Link, StepTimes, Windows
from sac.stores import transfers
from sac.stores.transfers import LIMITS, TransferLimits, Transfers
from sac.tables import Table

MIB, GIB = 1 << 20, 1 << 30
WIDE = 2  # bytes of an element


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama model: widths of the residual stream, of keys and of the MLP; layers and tokens in the vocabulary."""

    name: str
    hidden: int
    keys: int
    inner: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU with its link to the host."""

    name: str
    device: Device
    link: Link


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that backward needs: its bytes, the seconds to make it again, and whether it may be sent."""

    name: str
    bytes: int
    again: float
    sends: bool = True


LLAMA_8B = Model("8B", 4096, 1024, 14336, 32, 128256)
LLAMA_70B = Model("70B", 8192, 1024, 28672, 80, 128256)
PCIE5 = Link(55e9, 55e9)
_GRACE = replace(DEVICES["h100"], name="gh200", bytes_per_s=4e12)
MACHINES = (
    Machine("H100, PCIe 5", DEVICES["h100"], PCIE5),
    Machine("B200, PCIe 5", DEVICES["b200"], PCIE5),
    Machine("GH200", _GRACE, Link(295e9, 342e9)),
)
CASES = ((LLAMA_8B, 8192), (LLAMA_8B, 32768), (LLAMA_70B, 8192))


class Layer:
    """One layer on one device, with one sequence: what backward needs, and seconds of forward and backward."""

    def __init__(self, model: Model, device: Device, tokens: int) -> None:
        peak = device.peak("bfloat16")
        hidden, inner = WIDE * tokens * model.hidden, WIDE * tokens * model.inner
        qkv = model.hidden + 2 * model.keys

        def product(rows: int, columns: int) -> float:
            return 2 * tokens * rows * columns / (peak * PRIORS[MATMUL]) + device.launch_s

        def moved(size: int) -> float:
            return size / (device.bytes_per_s * PRIORS[MEMORY]) + device.launch_s

        attention = 2 * tokens * tokens * model.hidden / (peak * PRIORS[CUDNN_ATTENTION]) + device.launch_s
        norm, rotary = moved(2 * hidden), moved(2 * WIDE * tokens * (model.hidden + model.keys))
        self.input = Value("x", hidden, 0.0)
        self.values = (
            Value("norm 1", hidden, norm, sends=False),
            Value("q, k, v", WIDE * tokens * qkv, product(model.hidden, qkv) + rotary),
            Value("attention", hidden + 4 * tokens * (model.hidden // 128), attention),
            Value("residual", hidden, product(model.hidden, model.hidden) + moved(3 * hidden)),
            Value("norm 2", hidden, norm, sends=False),
            Value("gate", inner, product(model.hidden, model.inner)),
            Value("up", inner, product(model.hidden, model.inner)),
            Value("silu", inner, moved(2 * inner), sends=False),
            Value("gated", inner, moved(3 * inner), sends=False),
        )
        down = product(model.inner, model.hidden)
        products = product(model.hidden, qkv) + product(model.hidden, model.hidden) + down
        products += 2 * product(model.hidden, model.inner)
        self.forward = sum(one.again for one in self.values) + down + moved(3 * hidden)
        self.backward = 2 * products + 2.5 * attention + 2 * (2 * norm + moved(2 * inner) + moved(3 * inner))
        self.bytes = hidden + sum(one.bytes for one in self.values)
        self.gradients = 2 * inner  # of the gated MLP, at the top of backward
        head = 2 * tokens * model.hidden * model.vocabulary / (peak * PRIORS[MATMUL])
        self.pause = 3 * head + 12 * tokens * model.vocabulary / (device.bytes_per_s * PRIORS[MEMORY])

    def option(self, decisions: str, *, inputs: bool) -> LinkOption:
        """Return the option with a decision per value: k(eep), r(ecompute), o(ffload)."""
        pairs = [*zip(self.values, decisions, strict=True)]
        held = sum(one.bytes for one, do in pairs if do == "k") + (0 if inputs else self.input.bytes)
        sent = tuple(one.bytes for one, do in pairs if do == "o")
        return LinkOption(
            held, sum(one.again for one, do in pairs if do == "r"), sent, self.input.bytes if inputs else 0
        )

    def options(self, decisions: str, *, inputs: bool) -> tuple[LinkOption, ...]:
        """Return the options of which no other is better in bytes held and sent and seconds."""
        allowed = [decisions if one.sends else decisions.replace("o", "") for one in self.values]
        every = {self.option("".join(one), inputs=inputs) for one in itertools.product(*allowed)}
        front: list[LinkOption] = []
        for one in sorted(every, key=lambda one: (one.held, one.carried, one.seconds, one.sent)):
            if not any(other.seconds <= one.seconds and other.carried <= one.carried for other in front):
                front.append(one)
        return tuple(front)

    def problem(self, options: Iterable[LinkOption], link: Link, layers: int) -> LinkProblem:
        """Return the search among ``options`` for each of the layers."""
        found = tuple(options)
        own = {False: self.bytes, True: self.bytes + self.gradients}
        rows = [
            Row(MemoryConstraint(0, at, (own[back],) * len(found)), at, back)
            for at in range(layers)
            for back in (False, True)
        ]
        rows.append(Row(MemoryConstraint(0, layers), layers, False))
        times = StepTimes((self.forward,) * layers, (self.backward,) * layers, self.pause)
        return LinkProblem((0,) * layers, (found,), tuple(rows), times, link)


NONE, FULL, SELECTIVE, EVERYTHING = "kkkkkkkkk", "rrrrrrrrr", "rkkrrkrrr", "ooooooooo"
_NO_WINDOW = Windows(0, 0)
_USUAL = Windows(LIMITS.in_flight, LIMITS.ahead)


@dataclass(frozen=True, slots=True)
class Result:
    """A row of the table: what was simulated, and what it was searched for (bytes of the peak), if it was."""

    label: str
    plan: LinkPlan | None
    bound: float = 0.0


def simulated(model: Model, machine: Machine, tokens: int) -> Iterator[Result]:
    """Yield the usual choices, and the best plans of two and of three decisions at the same peaks."""
    layer, link, layers = Layer(model, machine.device, tokens), machine.link, model.layers

    def run(decisions: str, *, inputs: bool = False, windows: Windows = _NO_WINDOW, kept_last: int = 0) -> LinkPlan:
        options = (layer.option(decisions, inputs=inputs), layer.option(NONE, inputs=inputs))
        choice = (0,) * (layers - kept_last) + (1,) * kept_last
        return layer.problem(options, link, layers).run(choice, windows)

    def best(decisions: str, budget: int) -> Result:
        ways = (False, True) if "o" in decisions else (False,)
        problems = [layer.problem(layer.options(decisions, inputs=inputs), link, layers) for inputs in ways]
        found = [plan for one in problems if (plan := one.best(budget)) is not None]
        plan = min(found, key=lambda plan: plan.clocked.seconds, default=None)
        window = plan.windows.in_flight if plan is not None else 0
        return Result("", plan, min(one.bound(budget, window) for one in problems))

    full, selective = run(FULL), run(SELECTIVE)
    yield Result("none", run(NONE))
    yield Result("full", full)
    yield Result("full, inputs on the host", run(FULL, inputs=True, windows=Windows(0, 2 * layer.input.bytes)))
    yield Result("selective: attention, every 2nd product", selective)
    most = Windows(max(_USUAL.in_flight, layer.bytes), max(_USUAL.ahead, layer.bytes))
    yield Result("offload everything", run(EVERYTHING, inputs=True, windows=most, kept_last=2))
    for name, peak in (("full's peak + 1 %", int(full.peak * 1.01)), ("selective's peak", selective.peak)):
        for decisions, words in (("kr", "save, recompute"), ("kro", "save, recompute, offload")):
            yield replace(best(decisions, peak), label=f"{words}; {name}")


def table_of(results: Iterable[Result]) -> Table:
    """Return the rows with their times next to none and full."""
    rows, found = [], [*results]
    none, full = (
        next(one.plan for one in found if one.label == label and one.plan is not None) for label in ("none", "full")
    )
    for one in found:
        if one.plan is None:
            rows.append((one.label, *("–" for _ in range(7))))
            continue
        ran, seconds = one.plan.clocked, one.plan.clocked.seconds
        rows.append(
            (
                one.label,
                f"{one.plan.peak / GIB:.2f}",
                f"{1e3 * seconds:.0f}",
                f"{seconds / none.clocked.seconds - 1:+.1%}",
                f"{seconds / full.clocked.seconds - 1:+.1%}",
                f"{1e3 * ran.stall:.0f}",
                f"{ran.host / GIB:.1f}",
                f"{1e3 * one.bound:.0f}" if one.bound else "",
            )
        )
    columns = ("plan", "peak GiB", "ms", "to none", "to full", "stall ms", "host GiB", "bound ms")
    return Table(columns, tuple(rows), right=columns[1:])


def break_even() -> Table:
    """Return what a layer's forward hides of what it saves, and when an exposed copy is as fast as recomputation."""
    rows = []
    for machine in MACHINES:
        for model, tokens in CASES:
            layer, link = Layer(model, machine.device, tokens), machine.link
            hidden = layer.forward * link.down
            depth = machine.device.peak("bfloat16") * PRIORS[MATMUL] / link.down
            sequence = machine.device.peak("bfloat16") * PRIORS[CUDNN_ATTENTION] / link.down
            rows.append(
                (
                    machine.name,
                    f"{model.name}, {tokens // 1024}k",
                    f"{layer.bytes / MIB:.0f}",
                    f"{hidden / MIB:.0f}",
                    f"{min(1.0, hidden / layer.bytes):.0%}",
                    f"{depth / 1e3:.1f}k",
                    f"{sequence / 1e3:.1f}k",
                )
            )
    columns = ("device", "model, tokens", "saved MiB", "hidden MiB", "share", "product from", "attention from")
    return Table(columns, tuple(rows), right=columns[2:])


# -- The processor time of the host


class NoStream:
    """A stream, an event and their module, on a device that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        """Do nothing."""

    wait_stream = wait_event = synchronize = wait

    def record_event(self, event: Any = None) -> Any:
        return event or self

    def current_stream(self, device: Any = None) -> NoStream:
        return self

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    Stream = Event = property(lambda self: lambda *args, **kwargs: NoStream())


class Products(nn.Module):
    """A block of small products, each of which is kept."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = (x @ self.weight).sin()
        return x


REGIONS = 8


def step_of(do: str, count: int) -> Callable[[], None]:
    """Return a step of regions of ``count`` products each, under a rule that says ``do``; some have been run."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Products(count) for _ in range(REGIONS))
    rules = [{"id": "products", "ops": "matmul", "do": do}]
    policy = {"schema": "sac/v1", "name": "products", "rules": rules}
    sac.apply(model, {"mode": "selective", "verify": "never", "policy": policy})
    x = torch.randn(16, 16, requires_grad=True)

    def step() -> None:
        h = x
        for block in model.blocks:
            h = block(h)
        h.sum().backward()

    for _ in range(4):
        step()
    return step


@contextlib.contextmanager
def idle_device() -> Iterator[None]:
    """Take the CPU for a device whose streams take no time."""
    with contextlib.ExitStack() as stack:
        limits = TransferLimits(smallest=1, in_flight=1 << 14, ahead=1 << 14, host=1 << 28)
        for owner, name, value in (
            (transfers, "has_own_memory", lambda device: True),
            (transfers, "streams_of", lambda device: NoStream()),
            (transfers, "LIMITS", limits),
            (Transfers, "host_memory", lambda self, size: torch.empty(size, dtype=torch.uint8)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


class TorchClock:
    """Times torch's calls that take longer than reading an attribute: nanoseconds, without those of the clock."""

    PLACES: tuple[tuple[Any, str], ...] = (
        (torch, "empty"),
        *((Tensor, name) for name in ("set_", "detach", "copy_", "__getitem__")),
        (NoStream, "current_stream"),
    )

    def __init__(self) -> None:
        self.spent = 0.0
        self._own = 0.0
        nothing = self._timed(lambda: None)
        for _ in range(10_000):
            nothing()
        self._own, self.spent = self.spent / 10_000, 0.0

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.thread_time_ns() - begin - self._own

        return timed

    def during(self, step: Callable[[], None]) -> float:
        """Return the seconds that torch's calls take in a step."""
        self.spent = 0.0
        with contextlib.ExitStack() as stack:
            for owner, name in self.PLACES:
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            step()
        return self.spent / 1e9


def bytecodes(step: Callable[[], None]) -> int:
    """Return how many bytecodes of sac's own a step runs."""
    count, own = 0, str(Path(sac.__file__).parent)

    def inside(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return inside

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(own):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    before = sys.gettrace()
    threading.settrace(called)
    sys.settrace(called)
    try:
        step()
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
    return count


def bytecodes_per_tensor() -> float:
    """Return how many bytecodes more a step takes for each tensor that it offloads and does not save."""
    with idle_device():
        few, many = ([bytecodes(step_of(do, count)) for do in ("save", "offload")] for count in (8, 24))
    return ((many[1] - many[0]) - (few[1] - few[0])) / (16 * REGIONS)


def microseconds_per_tensor(rounds: int = 60) -> tuple[float, float]:
    """Return the processor time that a step takes more for each tensor that it offloads: all, and in torch's calls."""
    with idle_device():
        clock = TorchClock()
        steps = {(do, count): step_of(do, count) for do in ("save", "offload") for count in (8, 24)}
        taken: dict[Any, list[float]] = {(key, of): [] for key in steps for of in ("all", "torch")}
        gc.disable()
        for _ in range(rounds):
            for key, step in steps.items():
                begin = time.process_time()
                step()
                taken[key, "all"].append(time.process_time() - begin)
                taken[key, "torch"].append(clock.during(step))
        gc.enable()
    middle = {key: statistics.median(of) for key, of in taken.items()}

    def each(of: str) -> float:
        many, few = (middle[("offload", count), of] - middle[("save", count), of] for count in (24, 8))
        return (many - few) / (16 * REGIONS) * 1e6

    return each("all"), each("torch")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--toy", action="store_true", help="one model of four layers on one device")
    parser.add_argument("--host", action="store_true", help="the processor time of the host per tensor, instead")
    given = parser.parse_args()
    toy = given.toy
    if given.host:
        torch.set_num_threads(1)
        every, of_torch = microseconds_per_tensor()
        own = f"{every - of_torch:.1f} µs of sac's own ({bytecodes_per_tensor():.0f} bytecodes)"
        print(f"per offloaded tensor: {own} and {of_torch:.1f} µs in torch's calls")
        return
    if torch.cuda.is_available():
        rates = time_link(torch.device("cuda"))
        if rates is not None:
            print(f"this GPU's link, measured: {Link(*rates)}\n")
    print("per layer: what backward needs, and what the link carries down while its forward runs")
    print(break_even().text(120))
    cases = [(replace(LLAMA_8B, layers=4), 8192)] if toy else CASES
    for machine in MACHINES[:1] if toy else MACHINES:
        for model, tokens in cases:
            print(f"\nLlama {model.name}, {model.layers} layers, {tokens} tokens, {machine.name} ({machine.link})")
            print(table_of(simulated(model, machine, tokens)).text(120))


if __name__ == "__main__":
    main()
