"""What the tests of torch.compile share: a backend that counts, and training with it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.nn import functional as F

from sac.engine import compiled as traced
from tests.support.blocks import LlamaLikeBlock, Stack, tokens
from tests.support.training import built

# torch 2.13: with ATEN_CPU_CAPABILITY=default, inductor writes `at::vec` into some kernels and leaves its header out.
vectorised_inductor = pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch's inductor writes kernels that do not compile under ATEN_CPU_CAPABILITY=default",
)


class LeanAttention(nn.Module):
    """The products of `blocks.Attention` without rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            project(x_BTD).unflatten(-1, (4, 8)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class LeanBlock(LlamaLikeBlock):
    """The products and paths of a Llama-like block and few other ops: compiling takes time for each op."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = LeanAttention()
        self.input_layernorm, self.post_attention_layernorm = nn.Identity(), nn.Identity()


def lean_stack(blocks: int = 2) -> Stack:
    return Stack(*(LeanBlock() for _ in range(blocks)))


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@dataclass
class Compiled:
    """Keeps the graphs that torch.compile hands to a backend, and runs them as they are; counts the runs of forwards.

    `hidden`: the dispatcher does not see what forwards run, as with inductor; else each op, as with aot_eager.
    """

    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)
    hidden: bool = False
    runs: int = 0

    @property
    def backend(self) -> Callable[..., Any]:
        """What torch.compile takes."""
        return aot_autograd(
            fw_compiler=self._forward,
            inference_compiler=self._forward,
            bw_compiler=self._backward,
            partition_fn=min_cut_rematerialization_partition,
        )

    def _forward(self, graph: GraphModule, inputs: Any) -> Any:
        self.forward.append(graph)

        def run(*args: Any) -> Any:
            self.runs += 1
            guard = torch._C._DisableTorchDispatch() if self.hidden else None
            try:
                return graph.forward(*args)
            finally:
                del guard

        return make_boxed_func(run)

    def _backward(self, graph: GraphModule, inputs: Any) -> Any:
        self.backward.append(graph)
        return make_boxed_func(graph.forward)

    def products(self) -> list[int]:
        """How many matrix products each backward graph holds."""
        return [count(graph, *PRODUCTS) for graph in self.backward]


def count(graph: GraphModule, *ops: Any) -> int:
    """How many nodes of a graph call one of `ops`."""
    return sum(node.target in ops for node in graph.graph.nodes)


Put = Callable[[nn.Module], Any]


def train_compiled(
    build: Callable[[], nn.Module],
    put: Put,
    *,
    make_input: Callable[[], tuple[Tensor, ...]] = tokens,
    compile_it: Callable[[nn.Module, Callable[..., Any]], Any] | None = None,
    steps: int = 1,
) -> tuple[dict[str, Tensor], Compiled]:
    """Build, let `put` put us on it, compile, train; returns the numbers that must not depend on us, and the graphs."""
    torch._dynamo.reset()
    log = Compiled()
    model = built(build)
    put(model)
    whole = compile_it or (lambda model, backend: torch.compile(model, backend=backend, fullgraph=True))
    compiled = whole(model, log.backend)
    torch.manual_seed(2)
    inputs = make_input()
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        out = (compiled if compiled is not None else model)(*(x.detach().requires_grad_() for x in inputs))
        out.square().sum().backward()
        seen[f"output {step}"] = out.detach()
        seen |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return seen, log


def nothing(model: nn.Module) -> None:
    """The model without us."""


def skip_if_results_are_not_told(value: Any) -> None:
    """Skip a test whose policy matches shapes where torch does not show results to a policy that it traces."""
    if "shape" in str(value) and not traced.SHOWS_RESULTS_TO_POLICIES:
        pytest.skip(f"torch {torch.__version__} shows no results to a policy under torch.compile: sac warns of that")
