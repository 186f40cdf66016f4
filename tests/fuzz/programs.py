"""Random small programs and random policies, as hypothesis strategies over plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

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
def programs(draw: st.DrawFn, entry: str) -> Program:
    """Programs of up to 14 lines that the entry can run."""
    names = [name for name in INSTRUCTIONS if not entry.startswith("context_fn") or name not in READ_TWICE]
    lines = draw(st.lists(st.sampled_from(names), min_size=1, max_size=14))
    numbers = st.integers(0, 15)
    written = tuple(Line(name, draw(numbers), tuple(draw(numbers) for _ in range(operands_of(name)))) for name in lines)
    # counted from the end, so that what is simplest is the last value, and trailing lines are mostly read
    outputs = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)))
    needs = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3)))
    return Program(written, outputs, needs, gives_indices=draw(st.booleans()), autocast=draw(st.integers(0, 4)) == 4)


# what a rule may name: the words, and the other words that are no wider
SELECTORS: dict[str, tuple[str, ...]] = {
    "*": ("aten.*", "sactest::*"),
    "aten.*": ("matmul", "attention", "random", "nondeterministic", "aten.*norm*", "aten.*dropout*", "aten.sin"),
    "matmul": ("aten.mm", "aten.addmm", "aten.bmm"),
    "random": ("aten.rand_like", "aten.bernoulli", "aten.native_dropout"),
    "nondeterministic": ("aten.topk", "aten.sort", "aten.multinomial"),
    "aten.*norm*": ("aten.native_layer_norm",),
    "aten.*dropout*": ("aten.native_dropout",),
    "sactest::*": ("sactest::noisy_scale", "sactest::noisy_attention", "sactest::scale_by"),
    **dict.fromkeys(("attention", "aten.mm", "aten.addmm", "aten.bmm", "aten.sin", "aten.mul", "aten.add"), ()),
    **dict.fromkeys(("aten.rand_like", "aten.bernoulli", "aten.native_dropout", "aten.topk", "aten.sort"), ()),
    **dict.fromkeys(("aten.multinomial", "aten.max.dim", "aten.var_mean", "aten._softmax", "aten.cat"), ()),
    **dict.fromkeys(("aten.native_layer_norm", "aten.clone", "aten.gather"), ()),
    **dict.fromkeys(("sactest::noisy_scale", "sactest::noisy_attention", "sactest::scale_by"), ()),
}
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


def narrower(selector: str) -> frozenset[str]:
    """The selector and all that it covers."""
    if selector == "aten.*":
        return frozenset(name for name in SELECTORS if not name.startswith(("sactest", "*")))
    if selector == "*":
        return frozenset(SELECTORS)
    return frozenset({selector}).union(*(narrower(name) for name in SELECTORS[selector]))


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Policies of up to five rules, none of which a rule before it makes unreachable."""
    rules: list[dict[str, Any]] = []
    taken: list[tuple[frozenset[str], frozenset[str]]] = []  # of each rule: what it names, by which matchers
    for _ in range(draw(st.integers(0, 5))):
        wanted = draw(st.lists(st.sampled_from(sorted(SELECTORS)), min_size=1, max_size=3, unique=True))
        matchers = draw(MATCHERS)
        wider = [names for names, by in taken if by <= frozenset(matchers)]
        names = [name for name in wanted if not any(name in covered for covered in wider)]
        if not names:
            continue
        # an optional rule may match nothing, as most of these do
        rules.append(
            {
                "ops": names[0] if len(names) == 1 else names,
                **matchers,
                "do": draw(st.sampled_from(["save", "save", "recompute", "alternate"])),
                "optional": True,
            }
        )
        taken.append((frozenset().union(*(narrower(name) for name in names)), frozenset(matchers)))
    return policy(*rules, default=draw(st.sampled_from(["recompute", "recompute", "save"])))


@st.composite
def values(draw: st.DrawFn, entry: str) -> Any:
    """Config values: mostly policies, sometimes full, for which there is no context_fn."""
    if not entry.startswith("context_fn") and draw(st.integers(0, 7)) == 7:
        return FULL
    return selective(draw(policies()))
