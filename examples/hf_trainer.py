"""The Hugging Face Trainer with activation checkpointing, a memory budget, and a training that is taken up again.

    python examples/hf_trainer.py --checkpointing selective --out out/trainer
    python examples/hf_trainer.py --checkpointing selective --out out/trainer --resume     # from its last checkpoint
    python examples/hf_trainer.py --budget 50% --out out/trainer
    torchrun --nproc-per-node 2 examples/hf_trainer.py --fsdp --out out/trainer     # FSDP2 on two GPUs

What the regions keep is among the Trainer's own figures, as sac/kept_bytes and so on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import sac

TEXT = Path(__file__).parent / "text.txt"


def rows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return the text as rows of bytes."""
    text = torch.tensor(list(TEXT.read_bytes()))
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // length * length].view(-1, length)]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the losses that the Trainer has logged, with those of the run that it goes on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointing", default="selective", help="none, full, selective, a policy's name or file")
    parser.add_argument("--budget", help='plan a policy for this peak of one step instead: "40GiB", "50%%"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--out", required=True, help="the folder of the Trainer's checkpoints")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the model by FSDP2 (a budget is for the whole model)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    arguments = parser.parse_args(argv)

    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model, data = LlamaForCausalLM(config), rows()
    value = arguments.checkpointing
    if arguments.budget:
        batch = {name: torch.stack([row[name] for row in data[:4]]) for name in data[0]}
        value = sac.plan(model, batch, arguments.budget, optimizer="adamw")
    sac.apply(model, value)

    fsdp = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": "SHARDED_STATE_DICT"}
    options = TrainingArguments(
        output_dir=arguments.out, max_steps=arguments.steps, save_steps=arguments.save_steps, logging_steps=1,
        per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="constant", report_to=[],
        fsdp=arguments.fsdp or None, fsdp_config=fsdp if arguments.fsdp else None,
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )  # activation_checkpointing (formerly gradient_checkpointing) stays False  # fmt: skip
    trainer = Trainer(model, options, train_dataset=data)
    trainer.train(resume_from_checkpoint=arguments.resume)
    print(sac.report(model))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
