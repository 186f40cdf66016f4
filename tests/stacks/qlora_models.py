"""A tiny Llama whose linear layers bitsandbytes holds in 4 bits, with trained adapters of PEFT."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

for package in ("bitsandbytes", "peft", "transformers"):
    pytest.importorskip(package, reason=f"{package} is in the extras `stacks` and `hf`")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

LAYERS, WIDTH, HIDDEN = 2, 64, 128
ADAPTED = ["q_proj", "v_proj", "up_proj"]
LINEARS = 7  # of each layer, all of them in 4 bits


@functools.cache
def _written() -> tempfile.TemporaryDirectory[str]:
    """A model in full precision on disk, from where alone Transformers quantises."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    directory = tempfile.TemporaryDirectory()
    LlamaForCausalLM(config).save_pretrained(directory.name)
    return directory


def build(**adapter: Any) -> nn.Module:
    """The quantised model with adapters on some of its layers; `adapter` are further keys of `LoraConfig`."""
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = LlamaForCausalLM.from_pretrained(_written().name, quantization_config=quantised, dtype=torch.float32)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=ADAPTED, **adapter))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def loss(model: nn.Module, length: int = 16) -> Tensor:
    """The language model's loss on some tokens."""
    ids = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, labels=ids).loss
