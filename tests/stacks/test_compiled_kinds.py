"""What people compile: Hugging Face models as a whole, flex attention, inductor per block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import FULL, Stack, alternate, llama_stack, policy, save, selective, tokens
from tests.support.compiling import Compiled, count
from tests.support.model_zoo import tiny
from tests.support.training import assert_nearly_same, assert_same, built, new_tensors_in

IN_TURN = selective(policy(save("attention"), alternate("matmul")))
TOPK = torch.ops.aten.topk.default
FAMILIES = ["bert", "gpt2", "qwen3_moe", "t5"]  # and a Llama is in the other files


def hugging_face(family: str, value: Any) -> tuple[dict[str, Tensor], Compiled, nn.Module]:
    torch._dynamo.reset()
    log = Compiled()
    layers = {"num_layers": 1, "num_decoder_layers": 1} if family == "t5" else {"num_hidden_layers": 1}
    model, inputs = tiny(family, use_cache=False, **layers)
    if family == "gpt2":  # it has no loss type and logs that, which breaks the graph where logging was set up before
        model.loss_type = "ForCausalLM"
    sac.apply(model, value)
    loss = torch.compile(model, backend=log.backend, fullgraph=True)(**inputs).loss
    loss.backward()
    seen = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return seen | {"loss": loss.detach()}, log, model


def products_of_sac(model: nn.Module) -> tuple[int, int]:
    """How many calls the partitioner was told to save in all regions, and to recompute."""
    traced = [(kind.traced, kind.count) for kind in sac.report(model).kinds]
    assert all(one is not None for one, _ in traced)
    return sum(one.saved * n for one, n in traced), sum(one.recomputed * n for one, n in traced)


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_model_as_one_graph(family: str) -> None:
    expected, plain, _ = hugging_face(family, "none")
    full, log, _ = hugging_face(family, "full")
    assert_same(expected, full)
    chosen, told, model = hugging_face(family, "selective")
    assert_same(expected, chosen)
    (none,), (again,), (some,) = plain.products(), log.products(), told.products()
    assert none <= some < again  # the policy for mixtures of experts keeps every product that there is in this one
    saved, recomputed = products_of_sac(model)
    assert saved > 0
    assert recomputed > 0
    for routed in (log, told):
        assert count(routed.backward[0], TOPK) == 0  # of a mixture of experts; the others have none


def test_inductor_block_by_block() -> None:
    runs = []
    for config in ("none", FULL):
        torch._dynamo.reset()
        model = sac.apply(built(llama_stack).double(), config)
        for block in model.blocks:
            block.compile(fullgraph=True)
        runs.append(stepped_in_float64(model, model))
    assert_nearly_same(*runs)


class Flexible(nn.Module):
    """A block with flex attention, causal, and a product before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - (i - j).abs())
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.gpu  # torch 2.13 has no backward of flex attention on the CPU
@pytest.mark.parametrize(
    ("value", "attentions"),
    [(FULL, 2), (selective(policy(save("attention"))), 0), (selective(policy(save("matmul"))), 2)],
    ids=["full", "attention", "products"],
)
def test_flex_attention(value: Any, attentions: int) -> None:
    """The save-set `attention` means the higher-order op: it is not in the backward graph then."""
    runs = []
    for config in ("none", value):
        torch._dynamo.reset()
        log = Compiled()
        model = sac.apply(built(lambda: Stack(Flexible(), Flexible()), "cuda"), config)
        run = torch.compile(model, backend=log.backend, fullgraph=True)
        runs.append(stepped(model, run, steps=1, device="cuda"))
    assert count(log.backward[0], torch.ops.higher_order.flex_attention) == attentions
    assert_same(*runs)


def stepped(model: nn.Module, run: Any, steps: int = 2, device: str = "cpu") -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        model.zero_grad()
        torch.manual_seed(step)
        (x,) = tokens(device)
        out = run(x.requires_grad_())
        out.square().sum().backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        seen |= {f"{step} output": out.detach().clone(), f"{step} input": x.grad}
    return seen


def stepped_in_float64(model: nn.Module, run: Any) -> dict[str, Tensor]:
    """Inductor fuses other ops together where other values are at hand, so that sums are formed in another order."""
    with new_tensors_in(torch.float64):
        return stepped(model, run)
