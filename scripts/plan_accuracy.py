#!/usr/bin/env python3
"""Does a budget hold, and is it used? Random trainings under random budgets, measured in real steps.

    .venv/bin/python scripts/plan_accuracy.py --pairs 1000     a pair of a model and a budget takes 1 to 20 s
    .venv/bin/python scripts/plan_accuracy.py --device cuda    the same on a GPU, with its allocator

Each pair is a family of models with random sizes, and a budget between the least peak and that without checkpointing.
The first step is observed, the next ones may correct the plan, and then a step is measured by torch's profiler, with
parameters, gradients, optimizer state and inputs. Room: from the peak of full recomputation to the budget (nan: none).
A step above its budget, also one that sac itself measures, makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peft
import torch
import transformers
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.memory_timeline import measure_memory

transformers.logging.set_verbosity_error()
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "GPTNeoX": {"hidden_dropout": 0.1},
    "GPT2": {"resid_pdrop": 0.1, "attn_pdrop": 0.0},
    "Mamba": {"state_size": 8},
    "ViT": {"image_size": 96, "patch_size": 8, "num_labels": 8},
    "Bert": {},
    "T5": {"d_kv": 16, "decoder_start_token_id": 0},
}
TASKS = {"ViT": "ImageClassification", "Bert": "MaskedLM", "T5": "Seq2SeqLM"}
FAMILIES = [*CONFIGS, "Llama frozen", "Llama bfloat16", "Llama LoRA"]


def drawn(family: str, draw: random.Random) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of a family with random sizes, and its inputs."""
    width, layers, rows = 32 * draw.choice([2, 4, 6]), draw.choice([3, 4, 6, 8]), draw.choice([2, 4])
    length = draw.choice([32, 64, 128])
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 4, "vocab_size": 96, "use_cache": False}
    sizes |= {"d_ff": 2 * width, "num_layers": layers}  # as T5 calls them
    name, _, change = family.partition(" ")
    config = getattr(transformers, f"{name}Config")(**sizes, **CONFIGS[name])
    model = getattr(transformers, f"AutoModelFor{TASKS.get(name, 'CausalLM')}").from_config(config)
    if change == "frozen":
        for parameter in [*model.parameters()][: len([*model.parameters()]) // 2]:
            parameter.requires_grad_(False)
    elif change == "LoRA":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    if family == "ViT":
        return model, {"pixel_values": torch.randn(rows, 3, 96, 96), "labels": torch.zeros(rows, dtype=torch.long)}
    tokens = torch.randint(0, 96, (rows, length))
    return model.to(getattr(torch, change, torch.float32)), {"input_ids": tokens, "labels": tokens}


def last_step(model: nn.Module, inputs: dict[str, Tensor], steps: int, device: str) -> int:
    """Train, and return the peak of the last step in bytes."""
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    model.train()

    def run() -> None:
        model(**inputs).loss.backward()

    for _ in range(steps - 1):
        run()
        optimizer.step()
        optimizer.zero_grad()
    states = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    known = [*model.parameters(), *model.buffers(), *inputs.values(), *states]
    there = sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in known}.values())
    there = torch.cuda.memory_allocated() if device == "cuda" else there
    return there + measure_memory(run, device).peak_bytes


def pair(number: int, device: str) -> tuple[str, float, float, bool, bool]:
    """Return family, share of the range, room used, whether a step was too large, and whether a faster option fits."""
    draw = random.Random(number)
    family, share = FAMILIES[number % len(FAMILIES)], draw.uniform(0.03, 1.0)
    torch.manual_seed(number)
    model, inputs = drawn(family, draw)
    model, inputs = model.to(device), {name: one.to(device) for name, one in inputs.items()}
    with warnings.catch_warnings(record=True) as told, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        sac.apply(model, {"mode": "selective", "budget": f"{100 * share:.2f}%"})
        peak = last_step(model, inputs, 6, device)
    plan = next(regions_of(model)).applied.fitting.fitted
    over = peak > plan.budget or any("more than the budget" in str(one.message) for one in told)
    room = plan.budget - plan.least
    fits = plan.next_faster is not None and plan.next_faster[0] <= plan.budget
    return family, share, (peak - plan.least) / room if room > 0 else float("nan"), over, fits


def main() -> int:
    """Train the pairs, print the distribution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--first", type=int, default=0, help="number of the first pair")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, begun = [], time.time()
    for number in range(options.first, options.first + options.pairs):
        rows.append(pair(number, options.device))
        family, share, used, is_over, _ = rows[-1]
        above = ", ABOVE THE BUDGET" if is_over else ""
        print(f"pair {number}: {family} at {share:.0%} of the range, {used:.2%} of the room used{above}", flush=True)
    for family in [*FAMILIES, "all"]:
        some = [row for row in rows if row[0] == family or family == "all"]
        if room := [row[2] for row in some if row[2] == row[2]]:
            low = [row for row in some if row[2] < 0.97]
            print(
                f"{family:16} {len(some):5} pairs, {sum(row[3] for row in some)} above the budget, room used: median "
                f"{statistics.median(room):.1%}, least {min(room):.1%}, below 97 %: {len(low)}, of them with a faster "
                f"option that fits: {sum(row[4] for row in low)}"
            )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {time.time() - begun:.0f} s")
    return int(any(one[3] for one in rows))


if __name__ == "__main__":
    sys.exit(main())
