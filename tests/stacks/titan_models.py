"""A tiny Llama 3 of torchtitan, its own activation checkpointing, and ours in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.stacks.composition import Outcome, train
from tests.stacks.stand_ins import import_titan

llama3 = import_titan("torchtitan.models.llama3")
own = import_titan("torchtitan.distributed.activation_checkpoint")

from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from sac.compat.torchtitan import SacAC  # noqa: E402  (needs torchtitan)

WIDTH, HIDDEN, HEADS, VOCABULARY, LAYERS = 64, 128, 4, 64, 3
BATCH, TOKENS = 2, 16


def build(layers: int = LAYERS) -> nn.Module:
    """The model on the CPU, with torch's attention in the place of the one that needs a compiler or a GPU."""
    rope = ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=TOKENS, theta=500000, scaling="llama")
    blocks = llama3._build_llama3_layers(
        fuse_qkv=True, n_layers=layers, dim=WIDTH, n_heads=HEADS, hidden_dim=HIDDEN, rope=rope, attn_backend="flex"
    )
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)),
        layers=blocks,
    )
    torch.manual_seed(0)
    model: nn.Module = config.build()
    model.init_states()
    return model


def loss(model: nn.Module) -> Tensor:
    """The mean square of the logits of some tokens."""
    ids = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return model(ids).square().mean()


class SelectiveACWithCPUAttention(own.SelectiveAC):
    """torchtitan's selective policy; its list of ops names the attention of GPUs only."""

    @dataclass(kw_only=True, slots=True)
    class Config(own.SelectiveAC.Config):
        """The keys of its parent."""

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}


def trained(mode: Any) -> Outcome:
    """Train under torchtitan's own selective policy, or in one of our modes."""
    own_policy = SelectiveACWithCPUAttention.Config()
    model = build()
    (own_policy if mode == "torchtitan's" else SacAC.Config(value=mode)).build(dump_folder="").apply(model)
    return train(model, loss)
