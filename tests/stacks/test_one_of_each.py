"""One real model, one compiled block and one pair of ranks: what the quick suite sees of the stacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import FULL, LlamaLikeBlock, Stack, alternate, policy, save, selective, tokens
from tests.support.compiling import train_compiled
from tests.support.ranks import run_ranks
from tests.support.training import assert_same, built

IN_TURN = policy(save("attention"), alternate("matmul"))
MODES = {"full": FULL, "selective": selective(IN_TURN)}


def trained_llama(value: Any) -> dict[str, Tensor]:
    """Two steps of a Llama of transformers with two small layers."""
    transformers = pytest.importorskip("transformers", reason="a real model needs transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64, attention_dropout=0.1)
    torch.manual_seed(0)
    model = sac.apply(transformers.LlamaForCausalLM(config).train(), value)
    model.config.use_cache = False
    ids = torch.randint(0, 64, (2, 12))
    seen = {}
    for step in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()} | {
            f"{step} loss": loss.detach()
        }
    return seen


@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_real_model(value: str) -> None:
    assert_same(trained_llama("none"), trained_llama(value))


def one_block() -> Stack:
    return Stack(LlamaLikeBlock(32, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_block(mode: str) -> None:
    """The backward graph holds the products that the mode runs again, and no others."""

    def block_alone(model: nn.Module, backend: Any) -> None:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)

    plain, without = train_compiled(one_block, lambda model: None, compile_it=block_alone)
    ours, log = train_compiled(one_block, lambda model: sac.apply(model, MODES[mode]), compile_it=block_alone)
    assert_same(plain, ours)
    (few,), (more,) = without.products(), log.products()
    assert few < more


def trained_sharded(value: Any) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = built(lambda: Stack(LlamaLikeBlock(32, 4), LlamaLikeBlock(32, 4)))
    for block in model.blocks:
        fully_shard(block)
    sac.apply(model, value)
    seen = {}
    for step in range(2):
        torch.manual_seed(step)
        model(*tokens()).square().sum().backward()
        seen |= {f"{step} {name}": p.grad.to_local().clone() for name, p in model.named_parameters()}
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_a_pair_of_ranks(mode: str) -> None:
    for plain, ours in zip(
        run_ranks(2, trained_sharded, "none"), run_ranks(2, trained_sharded, MODES[mode]), strict=True
    ):
        assert_same(plain, ours)
