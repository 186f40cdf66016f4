"""Supervised fine-tuning with TRL: activation checkpointing, a memory budget, and a training that is taken up again.

    python examples/trl_sft.py --checkpointing selective --out out/sft
    python examples/trl_sft.py --checkpointing selective --out out/sft --resume     # from its last checkpoint
    python examples/trl_sft.py --budget 50% --out out/sft

Model and tokenizer are tiny and made here; a real training loads both with `from_pretrained`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import sac

TEXT = Path(__file__).parent / "text.txt"
LENGTH = 64  # tokens of a row


def tokenizer_of(text: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and their most frequent pairs in a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses that the trainer has logged, with those of the run that it goes on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointing", default="selective", help="none, full, selective, a policy's name or file")
    parser.add_argument("--budget", help='plan a policy for this peak of one step instead: "40GiB", "50%%"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--out", required=True, help="the folder of the trainer's checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args(argv)

    set_seed(0)
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = tokenizer_of(text)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, use_cache=False, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    value = arguments.checkpointing
    if arguments.budget:
        tokens = torch.zeros(4, LENGTH, dtype=torch.long)  # of a batch, a plan needs the sizes alone
        value = sac.plan(model, {"input_ids": tokens, "labels": tokens}, arguments.budget, optimizer="adamw")
    sac.apply(model, value)

    options = SFTConfig(
        output_dir=arguments.out, max_steps=arguments.steps, save_steps=arguments.save_steps, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="constant", max_length=LENGTH,
        packing=True, packing_strategy="wrapped",  # rows of LENGTH tokens
        gradient_checkpointing=False,  # TRL has its own on by default
        bf16=False, report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )  # fmt: skip
    lines = [{"text": line} for line in text.split("\n\n") if line.strip()]
    trainer = SFTTrainer(model, options, train_dataset=Dataset.from_list(lines), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=arguments.resume)
    print(sac.report(model))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
