"""Random small programs and random policies, as hypothesis strategies over plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import sac
from sac.errors import PolicyError
from tests.fuzz.instructions import INSTRUCTIONS, READ_TWICE, WIDTH, batch_norm, operands_of
from tests.support.blocks import FULL, Stack, policy, selective


@dataclass(frozen=True)
class Line:
    """One instruction: its name, a number to vary it by, and which earlier values it takes (modulo their count)."""

    name: str
    knob: int
    operands: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Lines that each make one value, and which values come out."""

    lines: tuple[Line, ...]
    outputs: tuple[int, ...]
    input_needs_grad: tuple[bool, ...]
    gives_indices: bool = False  # one more output, of integers
    autocast: bool = False

    def build(self) -> Stack:
        """A stack of one such region."""
        return Stack(ProgramBlock(self))

    def make_input(self, device: str) -> tuple[Tensor, ...]:
        """Fresh inputs."""
        return tuple(torch.randn(WIDTH, WIDTH, device=device) for _ in self.input_needs_grad)


class ProgramBlock(nn.Module):
    """Runs a program; holds every weight, buffer and generator that its instructions may want."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        places = [str(at) for at, line in enumerate(program.lines) if line.name == "batch norm"]
        self.batch_norms = nn.ModuleDict({place: batch_norm() for place in places})
        self.generator: torch.Generator | None = None  # a block that holds one is never run without a mode
        if any("by generator" in line.name for line in program.lines):
            self.generator = torch.Generator().manual_seed(3)

    def _apply(self, fn: Any, recurse: bool = True) -> ProgramBlock:
        """Move the generator along with the weights."""
        super()._apply(fn, recurse)
        device = self.scale.device
        if self.generator is not None and self.generator.device != device:
            self.generator = torch.Generator(device).manual_seed(3)
        return self

    def forward(self, *inputs: Tensor) -> Any:
        values = list(inputs)
        for at, line in enumerate(self.program.lines):
            operands = [values[index % len(values)] for index in line.operands]
            values.append(INSTRUCTIONS[line.name](self, at, line.knob, *operands))
        outputs = tuple(values[-1 - index % len(values)] for index in self.program.outputs)
        if self.program.gives_indices:
            return (*outputs, values[-1].detach().argmax(-1))
        return outputs[0] if len(outputs) == 1 else outputs


@st.composite
def programs(draw: st.DrawFn, entry: str, names: tuple[str, ...] = tuple(INSTRUCTIONS)) -> Program:
    """Programs of up to 14 lines that the entry can run, each one of ``names``."""
    names = tuple(name for name in names if not entry.startswith("context_fn") or name not in READ_TWICE)
    lines = draw(st.lists(st.sampled_from(names), min_size=1, max_size=14))
    numbers = st.integers(0, 15)
    written = tuple(Line(name, draw(numbers), tuple(draw(numbers) for _ in range(operands_of(name)))) for name in lines)
    # counted from the end, so that what is simplest is the last value, and trailing lines are mostly read
    outputs = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)))
    needs = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3)))
    return Program(written, outputs, needs, gives_indices=draw(st.booleans()), autocast=draw(st.integers(0, 4)) == 4)


GROUPS = ("*", "aten.*", "sactest::*", "matmul", "attention", "random", "nondeterministic", "*norm*", "*dropout*")
OPS = ("mm", "addmm", "bmm", "sin", "mul", "add", "rand_like", "bernoulli", "native_dropout", "topk", "sort")
MORE_OPS = ("multinomial", "max.dim", "var_mean", "_softmax", "cat", "native_layer_norm", "clone", "gather")
CUSTOM_OPS = ("noisy_scale", "noisy_attention", "scale_by")
SELECTORS = [*GROUPS, *(f"aten.{op}" for op in OPS + MORE_OPS), *(f"sactest::{op}" for op in CUSTOM_OPS)]
MATCHERS = st.sampled_from(
    [
        *({},) * 5,
        {"call": {"index": 0}},
        {"call": {"index": [1, 2]}},
        {"call": {"every": 2}},
        {"call": {"every": 2, "offset": 1}},
        {"shape": ["_", WIDTH]},
        {"shape": ["...", ">=4"]},
        {"dtype": "float32"},
        {"dtype": ["bfloat16", "int64"]},
    ]
)
CALLS = st.sampled_from([None, None, None, {"unit": "*"}, {"function": ["Dirty*", "Masked", "Tanh*"]}])


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Policies of up to six rules, none of which a rule before it makes unreachable."""
    named = draw(CALLS)
    rules: list[dict[str, Any]] = [{**named, "do": "save", "optional": True}] if named else []
    for _ in range(draw(st.integers(0, 5))):
        names = draw(st.lists(st.sampled_from(SELECTORS), min_size=1, max_size=3, unique=True))
        do = draw(st.sampled_from(["save", "save", "recompute", "alternate"]))
        # an optional rule may match nothing, as most of these do
        rules.append({"ops": names, **draw(MATCHERS), "do": do, "optional": True})
        try:
            sac.load_policy(policy(*rules))
        except PolicyError as error:
            if "can never fire" not in str(error):
                raise
            rules.pop()
    return policy(*rules, default=draw(st.sampled_from(["recompute", "recompute", "save"])))


@st.composite
def values(draw: st.DrawFn, entry: str) -> Any:
    """Config values: mostly policies, sometimes full, for which there is no context_fn."""
    if not entry.startswith("context_fn") and draw(st.integers(0, 7)) == 7:
        return FULL
    return selective(draw(policies()))
