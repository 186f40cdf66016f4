"""How long planning takes, and how much memory, for models that are larger than any machine here."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sac.planner.devices import device_named
from sac.planner.fakes import fake_mode
from sac.planner.plan_file import make_plan
from sac.planner.planning import lowered
from sac.planner.prepare import prepare

SEQUENCE = 8192
GIB = 2**30


def llama70b() -> nn.Module:
    """Llama-3.1-70B, by its published config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
            tie_word_embeddings=False,
        )
    )  # fmt: skip


def deepseek_v2() -> nn.Module:
    """DeepSeek-V2, by its published config: 236B parameters, 160 experts of which 6 are asked."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=102400, hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536,
            num_hidden_layers=60, num_attention_heads=128, num_key_value_heads=128, n_shared_experts=2,
            n_routed_experts=160, routed_scaling_factor=16.0, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
            v_head_dim=128, qk_nope_head_dim=128, topk_method="group_limited_greedy", n_group=8, topk_group=3,
            num_experts_per_tok=6, first_k_dense_replace=1, max_position_embeddings=163840, rms_norm_eps=1e-6,
        )
    )  # fmt: skip


CASES: dict[str, Callable[[], nn.Module]] = {"llama70b": llama70b, "deepseek_v2": deepseek_v2}


@dataclass
class Clock:
    """Wall and user seconds of each phase; a phase ends where the next begins."""

    phases: list[tuple[str, float, float]] = field(default_factory=list)
    began: tuple[str, float, float] | None = None

    def begin(self, label: str) -> None:
        now = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
        if self.began is not None:
            before, wall, user = self.began
            self.phases.append((before, now[0] - wall, now[1] - user))
            print(f"{before:40} {now[0] - wall:7.2f} s {now[1] - user:7.2f} s of user CPU", file=sys.stderr, flush=True)
        self.began = label, *now


def timed(case: str, *, as_json: bool) -> int:
    """Print the seconds of each phase, and the most memory that the process has had."""
    clock = Clock()
    clock.begin("building the model without data")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with fake_mode():
            model = CASES[case]().train()
    finally:
        torch.set_default_dtype(before)
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long)
    device = device_named("h100")
    clock.begin("")

    def work(_: Any) -> dict[str, Any]:
        inner = Clock()
        told = {"": ""}

        def progress(done: int, total: int, label: str) -> None:
            if label != told[""]:
                told[""] = label
                inner.begin(label)

        planner = prepare(model, {"input_ids": ids, "labels": ids}, device=device.name, progress=progress)
        inner.begin("choosing for the layers, and checking")
        made = make_plan(planner, "50%")
        inner.begin("")
        return {
            "phases": inner.phases,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "choices": [len(of_kind) for of_kind in planner.choices],
            "least_bytes": made.least,
            "most_bytes": made.most,
            "plan_peak_bytes": made.point.peak,
            "plan_seconds": made.point.seconds,
            "is_checked": made.point.is_checked,
        }

    found = lowered(work, device)
    found["phases"] = [*clock.phases, *found["phases"]]
    if as_json:
        print(json.dumps({"case": case, **found}, indent=2))
        return 0
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{case}: {parameters / 1e9:.1f}B parameters, {SEQUENCE} tokens, bfloat16, for an H100")
    total = [sum(phase[place] for phase in found["phases"]) for place in (1, 2)]
    print(f"{'in all':40} {total[0]:7.2f} s {total[1]:7.2f} s of user CPU")
    print(f"most memory: {found['peak_rss_bytes'] / GIB:.2f} GiB; choices of each kind of region: {found['choices']}")
    low, high = found["least_bytes"] / GIB, found["most_bytes"] / GIB
    print(f"peaks: {low:.1f} to {high:.1f} GiB; the plan for 50%: {found['plan_peak_bytes'] / GIB:.1f} GiB")
    return 0
