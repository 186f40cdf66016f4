#!/usr/bin/env python3
"""How far are the shipped policies from the best choice at the same bytes? One layer of each kind, at published sizes.

    .venv/bin/python scripts/policy_optimum.py                     every case, under its family's policy
    .venv/bin/python scripts/policy_optimum.py --case llama-8b     these cases
    .venv/bin/python scripts/policy_optimum.py --policy FILE       under this policy instead
    .venv/bin/python scripts/policy_optimum.py --ops               also what the policy and the best choice save
    .venv/bin/python scripts/policy_optimum.py --write docs/planning-numbers.md

Each case is built without data in bfloat16, with the dropout of its config, and runs the ops of an H100. A row is one
kind of layer under one policy: the bytes that the policy holds in it beyond its input, the predicted time of
recomputing the rest by replay, and that of the planner's best save option in no more bytes. `ratio` is the quotient of
these times; `of full` is the policy's time in that of recomputing everything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from pages import write_between
from pareto_block import MIB, Sizes, built

import sac
from sac.blocks.find import find_blocks
from sac.blocks.kv_cache import turn_off_cache
from sac.planner.cost import entry_times
from sac.planner.devices import device_named
from sac.planner.fakes import call, fake_build, fake_inputs, fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.pareto import pareto, priced
from sac.planner.planner import quiet, saved_by
from sac.planner.planning import lowered
from sac.planner.profile import RegionProfile
from sac.planner.tracing import profile_regions
from sac.tools.render import print_rows

DEVICE = "h100"


@dataclass(frozen=True)
class Case:
    """A model of published sizes with few layers: a config of transformers, the class, and the inputs' sizes."""

    policy: str
    model: str
    config: str
    fields: dict[str, Any]
    batch: int
    tokens: int  # 0: the model reads images


_LLAMA = {"num_hidden_layers": 2, "vocab_size": 1024}
CASES: dict[str, Case] = {
    "llama-8b": Case("llama", "LlamaModel", "LlamaConfig", {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8}, 1, 8192),
    "llama-70b": Case("llama", "LlamaModel", "LlamaConfig", {
        **_LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8}, 1, 8192),
    "qwen3-8b": Case("llama", "Qwen3Model", "Qwen3Config", {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128}, 1, 8192),
    "gemma3-12b": Case("gemma", "Gemma3TextModel", "Gemma3TextConfig", {
        **_LLAMA, "hidden_size": 3840, "intermediate_size": 15360, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256}, 1, 8192),
    "mixtral-8x7b": Case("mixtral", "MixtralModel", "MixtralConfig", {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2}, 1, 8192),
    "qwen3-30b-a3b": Case("moe", "Qwen3MoeModel", "Qwen3MoeConfig", {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "head_dim": 128,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, 1, 8192),
    "deepseek-v3": Case("deepseek_v3", "DeepseekV3Model", "DeepseekV3Config", {
        **_LLAMA, "first_k_dense_replace": 1}, 1, 4096),
    "gpt2-xl": Case("gpt2", "GPT2Model", "GPT2Config", {
        "n_embd": 1600, "n_head": 25, "n_layer": 2, "vocab_size": 1024}, 8, 1024),
    "bert-large": Case("bert", "BertModel", "BertConfig", {
        **_LLAMA, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}, 32, 512),
    "t5-large": Case("t5", "T5Model", "T5Config", {
        "d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 2, "vocab_size": 1024}, 16, 512),
    "t5-1.1-large": Case("t5", "T5Model", "T5Config", {
        "d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_heads": 16, "num_layers": 2, "vocab_size": 1024,
        "feed_forward_proj": "gated-gelu"}, 16, 512),
    "vit-l-16": Case("vit", "ViTModel", "ViTConfig", {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 2}, 64, 0),
    "mamba2-2.7b": Case("mamba", "Mamba2Model", "Mamba2Config", {
        **_LLAMA, "hidden_size": 2560, "state_size": 128, "num_heads": 80, "head_dim": 64, "n_groups": 1,
        "chunk_size": 256}, 1, 2048),
}  # fmt: skip
BLOCKS = {"70b block, real rotary": False, "70b block, complex rotary": True}  # those of pareto_block.py
NAMES = (*CASES, *BLOCKS)


def built_case(name: str) -> tuple[torch.nn.Module, Any]:
    """The model in bfloat16 and its inputs, without data."""
    if name in BLOCKS:
        return built(Sizes(), as_complex=BLOCKS[name])
    import transformers

    case, mode = CASES[name], fake_mode()
    config = getattr(transformers, case.config)(**case.fields)
    model = fake_build(mode)(lambda: getattr(transformers, case.model)(config), torch.bfloat16).train()
    turn_off_cache(model)
    if not case.tokens:
        inputs: dict[str, Any] = {"pixel_values": torch.zeros(case.batch, 3, 224, 224, dtype=torch.bfloat16)}
    else:
        ids = torch.zeros(case.batch, case.tokens, dtype=torch.long)
        inputs = {"input_ids": ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
    return model, fake_inputs(inputs, mode)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of layer of a case under a policy."""

    case: str
    layer: str
    policy: str
    bytes: int
    seconds: float
    full: float
    best: float
    saved: tuple[str, ...] = ()
    best_saves: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.seconds / self.best if self.best else 1.0 if not self.seconds else float("inf")


def rows_of(name: str, policies: Sequence[Any], *, ops: bool = False) -> list[Row]:
    """The rows of a case, made in a process that runs the ops of the device."""

    def work(_: Any) -> list[Row]:
        model, inputs = built_case(name)
        with quiet(), Ledger(512, on_host=False):
            profiles = profile_regions(find_blocks(model), lambda: call(model, inputs))
        found = []
        loaded = [sac.load_policy(policy) for policy in policies]
        by_policy = [(one.name, saved_by(one, model, profiles, lambda: call(model, inputs))) for one in loaded]
        for profile in profiles:
            times = entry_times(profile, device_named(DEVICE))
            front = pareto(profile, times)
            full = priced(profile, times, (), "replay").seconds
            for title, saved_at in by_policy:
                alike = {saved_at[path]: path for path in reversed(profile.paths)}  # layers may have their own rules
                for saved, path in reversed(alike.items()):
                    mine = priced(profile, times, saved, "replay")
                    best = [one for one in front if one.bytes <= mine.bytes][-1]
                    lists = (listed(profile, times, one.saved) if ops else () for one in (mine, best))
                    found.append(Row(name, path, title, mine.bytes, mine.seconds, full, best.seconds, *lists))
        return found

    return lowered(work, device_named(DEVICE))


def listed(profile: RegionProfile, times: Sequence[float], saved: frozenset[int]) -> tuple[str, ...]:
    """What is saved, each with its bytes and the time that saving it alone spares."""
    held = {profile.maker[value]: profile.bytes[value]
            for value in profile.recomputed(saved).held if value in profile.maker}  # fmt: skip
    whole = priced(profile, times, saved, "replay").seconds
    lines = []
    for number in sorted(saved):
        entry = profile.entries[number]
        less = priced(profile, times, saved - {number}, "replay").seconds - whole
        lines.append(f"{entry.module} {entry.op}#{entry.call} {held.get(number, 0) / MIB:.1f} MiB, {less * 1e3:.3f} ms")
    return tuple(lines)


COLUMNS = ("case", "layer", "policy", "MiB", "again, ms", "of full", "best, ms", "ratio")


def cells(row: Row) -> list[str]:
    share = f"{row.seconds / row.full:.0%}" if row.full else "–"
    return [row.case, row.layer, row.policy, f"{row.bytes / MIB:,.1f}", f"{row.seconds * 1e3:.3f}", share,
            f"{row.best * 1e3:.3f}", f"{row.ratio:.3f}"]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=NAMES, default=[*NAMES], metavar="CASE", help=", ".join(NAMES))
    parser.add_argument("--policy", nargs="+", default=[])
    parser.add_argument("--ops", action="store_true")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    for name in given.case:
        family = CASES[name].policy if name in CASES else "llama"
        shipped = [family, "general"] if family == "llama" else [family]  # `general` is for models of this shape
        rows += rows_of(name, given.policy or shipped, ops=given.ops)
        print(f"{name}: done", file=sys.stderr, flush=True)
    print_rows(COLUMNS, [cells(row) for row in rows], right=COLUMNS[3:])
    for row in rows if given.ops else ():
        print(f"\n{row.case} {row.layer}, {row.policy}: {row.ratio:.3f}")
        for one in sorted({*row.saved, *row.best_saves}, key=lambda one: one.split(" MiB")[0]):
            by = [who for who, saved in (("policy", row.saved), ("best", row.best_saves)) if one in saved]
            print(f"  {' and '.join(by)}: {one}")
    if given.write:
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows]
        write_between(given.write, "policy-optimum", "\n" + "\n".join(lines) + f"\n\ntorch {torch.__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
