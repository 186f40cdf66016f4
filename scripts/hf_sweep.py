#!/usr/bin/env python3
"""Every text, encoder-decoder and vision family of the installed transformers, tiny: does sac.apply work on it?

    .venv/bin/python scripts/hf_sweep.py                          all of them
    .venv/bin/python scripts/hf_sweep.py --family llama t5        these
    .venv/bin/python scripts/hf_sweep.py --json rows.json         also write the rows there, as they come

Each family is built from its configuration alone, with random weights, and trained for some steps in a process of its
own: without sac, with `full` and with `selective`. Every family is a row:

    passes           blocks are found; loss, every gradient and every buffer have the same bits as without sac, with
                     dropout and in eval mode; fewer bytes are kept, and `full` runs more FLOPs
    FAILS            one of these is not so
    not trainable    there is no such model class, no gradient, or two runs without sac differ
    cannot be built  no model could be made from the configuration, or it does not take the inputs
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import sac
from sac.blocks.find import find_blocks
from sac.blocks.kv_cache import turn_off_cache
from sac.memory_timeline import mark, measure_memory
from sac.tables import Table, screen_width
from sac.tools.commands import progress_lines
from sac.tools.comparison import count_flops, loss_of
from sac.tools.models import Scale, batches_of

LIMIT_S, LIMIT_BYTES = 120, 10 * 2**30  # of processor time and memory, for one family
PASSES, NOT_TRAINABLE, CANNOT_BUILD, FAILS = "passes", "not trainable", "cannot be built", "FAILS"
STEPS = ("step 0", "step 1", "step 2 in eval mode", "step 3 in eval mode")
MOST_PARAMETERS = 130_000_000
HEADS_OF = ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION")
SCALE = Scale(seq=32, batch=2)


@dataclass
class Row:
    """What came out for one family. Bytes are those alive at the end of forward, FLOPs those of a whole step."""

    family: str
    status: str
    reason: str = ""
    model: str = ""
    size: str = ""
    blocks: dict[str, int] = field(default_factory=dict)
    kept_bytes: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)


class NotTrainable(Exception):
    """There is nothing to train, or it does not train in the same way twice."""


class CannotBuild(Exception):
    """No size of the family can be built and run."""


# -- A tiny model of a family. Nothing is known of a configuration but the names and values of its fields. All widths
# are divided by one number and all counts of heads by another, so that what was equal or a multiple stays so.

SIZES = {"small": (16, 4, 256), "whole heads": (4, 4, 256), "whole vocabulary": (16, 4, 0), "whole width": (1, 1, 256)}
LAYERS = re.compile(r"(^|_)(n_|num_)?(hidden_|decoder_|encoder_)?layers?$|^depth$|^num_blocks$")
STAGES = re.compile(r"^depths$|_depths$|^num_blocks$|^num_layers$")
WIDTH = re.compile(
    r"^(hidden_size|d_model|n_embd|n_inner|dim|hidden_dim|d_ff|d_inner|ffn_dim|embedding_size|embed_dims?|hidden_sizes"
    r"|.*intermediate_size|.*ffn_dim|word_embed_proj_dim|moe_.*size|lru_width|.*lora_rank|.*embed_proj_dim)$"
)
HEADS = re.compile(r"(attention_heads|^n_head|^num_heads|key_value_heads|_heads)$")
HEAD_DIM = re.compile(r"(head_dim|^d_kv|^d_head|^kv_channels|rotary_dim)$")
EXPERTS = re.compile(r"^(n_routed_experts|num_experts|num_local_experts|moe_num_experts)$")


def small_config(config: Any, size: tuple[int, int, int]) -> Any:
    """Return a configuration of the same class, made smaller; raises whatever the class raises for its fields."""
    width, heads, vocab = size
    changed: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        if hasattr(inner, "model_type"):
            changed[name] = small_config(inner, size).to_dict()
        elif isinstance(value, bool) or not isinstance(value, (int, list)):
            continue
        elif name == "vocab_size" and vocab:
            changed[name] = min(value, vocab)
        elif name.endswith("_token_id") and isinstance(value, int) and vocab:
            changed[name] = min(value, vocab - 1)
        elif name == "image_size":
            changed[name] = min(value, 64) if isinstance(value, int) else [min(one, 256) for one in value]
        elif STAGES.search(name) and isinstance(value, list):
            changed[name] = [min(one, 2) for one in value]
        elif LAYERS.search(name) and isinstance(value, int):
            changed[name] = min(value, 2)
        elif EXPERTS.search(name) and isinstance(value, int):
            changed[name] = min(value, 8)
        elif isinstance(value, list):
            if len(value) == getattr(config, "num_hidden_layers", 0) > 4:
                changed[name] = value[:2]
        else:
            by = width if WIDTH.search(name) else heads if HEADS.search(name) or HEAD_DIM.search(name) else 1
            changed[name] = value // by if value % by == 0 and value >= 2 * by else value
    kept = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "transformers_version")}
    return type(config)(**{**kept, **changed})


def model_class(config_class: type) -> Any:
    import transformers

    for head in (*(f"MODEL_FOR_{name}_MAPPING" for name in HEADS_OF), "MODEL_MAPPING"):
        mapping = getattr(transformers, head, {})
        with contextlib.suppress(ValueError):  # it may name a class that transformers lacks
            if config_class in mapping:
                found = mapping[config_class]
                return found[0] if isinstance(found, tuple) else found
    raise NotTrainable("no model class for text or pictures")


def build(family: str, row: Row) -> tuple[nn.Module, dict[str, Any]]:
    """Return the first size of the family that builds and has a gradient, and its inputs."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[family]
    made_by, attempts = model_class(config_class), []
    for name, size in SIZES.items():
        try:
            config = small_config(config_class(), size)
            if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
                config.decoder_start_token_id = 0
            batches = batches_of(made_by, config, SCALE)
            with torch.device("meta"):
                parameters = sum(one.numel() for one in made_by(config).parameters())
            if parameters > MOST_PARAMETERS:
                raise CannotBuild(f"{parameters:,} parameters")
            torch.manual_seed(0)
            model = made_by(config).float().train()
            turn_off_cache(model)
            inputs = dict(batches(0))
            loss = loss_of(copy.deepcopy(model)(**inputs))
        except Exception as error:
            attempts.append(f"{name}: {one_line(error)}")
            continue
        if not loss.requires_grad:
            raise NotTrainable("its output has no gradient")
        row.model, row.size = made_by.__name__, name
        return model, inputs
    raise CannotBuild("; ".join(attempts))


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


# -- One family: is every gradient with checkpointing the same as without, and is memory saved?


def check_family(family: str) -> Row:
    """Return the row of ``family``; exceptions are rows too."""
    row = Row(family, CANNOT_BUILD)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        problems = problems_of(*build(family, row), row)
        row.status, row.reason = (FAILS, "; ".join(problems)) if problems else (PASSES, "")
    except CannotBuild as error:
        row.reason = str(error)
    except NotTrainable as error:
        row.status, row.reason = NOT_TRAINABLE, str(error)
    except Exception as error:
        row.status, row.reason = FAILS, one_line(error)
    return row


def problems_of(model: nn.Module, inputs: dict[str, Any], row: Row) -> list[str]:
    """Return what differs between training without sac and with it."""
    try:
        plain, again = (run(model, inputs, "none", row) for _ in range(2))
    except Exception as error:
        raise NotTrainable(f"without sac: {one_line(error)}") from error
    if names := different(plain, again):
        raise NotTrainable(f"two runs without sac differ: {names}")
    for block in find_blocks(model):
        label = f"{block.stack or 'the model'} ({type(block.module).__name__})"
        row.blocks[label] = row.blocks.get(label, 0) + 1
    problems = []
    for mode in ("full", "selective"):
        try:
            names = different(plain, run(model, inputs, mode, row))
        except Exception as error:
            problems.append(f"{mode}: {one_line(error)}")
            continue
        if names:
            problems.append(f"{mode}: {names} differ")
        if row.kept_bytes[mode] >= row.kept_bytes["none"]:
            problems.append(f"{mode}: {row.kept_bytes[mode]} bytes kept, {row.kept_bytes['none']} without")
    if row.flops.get("full", row.flops["none"]) < row.flops["none"]:
        problems.append(f"full: {row.flops['full']} FLOPs, {row.flops['none']} without")
    return problems


def run(model: nn.Module, inputs: dict[str, Any], mode: str, row: Row) -> dict[str, Tensor]:
    """Train a copy for some steps and return losses, gradients and buffers; bytes and FLOPs go into the row."""
    model = copy.deepcopy(model)
    if mode != "none":
        sac.apply(model, mode)

    def step() -> Tensor:
        loss = loss_of(model(**copy.deepcopy(inputs)))
        mark("forward")
        loss.backward()
        return loss.detach()

    def prepare(*, training: bool = True) -> None:
        model.train(training)
        model.zero_grad()
        torch.manual_seed(1)

    found: dict[str, Tensor] = {}
    for name in STEPS:
        prepare(training="eval" not in name)
        found[f"{name}: loss"] = step()
        found |= {f"{name}: {key}": one.grad.clone() for key, one in model.named_parameters() if one.grad is not None}
    found |= {f"buffer: {key}": one.clone() for key, one in model.named_buffers()}
    prepare()
    row.kept_bytes[mode] = measure_memory(step).at("forward")
    prepare()
    row.flops[mode] = count_flops(step)
    return found


def different(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    names = [n for n in {**expected, **found} if n not in expected or n not in found or not same(expected[n], found[n])]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def same(left: Tensor, right: Tensor) -> bool:
    if left.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    equal = (left == right) | ((left != left) & (right != right))
    return left.shape == right.shape and left.dtype == right.dtype and bool(equal.all())


# -- Children that check one family each, under limits of time and memory


def check_all(families: Sequence[str], jobs: int) -> Iterator[Row]:
    """Yield the row of each family as it is ready. A child that dies, hangs or grows too large is a row as well."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(families))
    running: dict[Any, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            family = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(family, sender), daemon=True)
            child.start()
            sender.close()
            running[receiver] = (family, child, time.monotonic())
        ready = wait(list(running), timeout=0.5)
        for receiver, (family, child, begun) in list(running.items()):
            if receiver in ready:
                try:
                    row = receiver.recv()
                except EOFError:
                    child.join()
                    row = Row(family, CANNOT_BUILD, f"its process ended with exit code {child.exitcode}")
            elif time.monotonic() - begun > 10 * LIMIT_S:
                row = Row(family, CANNOT_BUILD, f"killed after {10 * LIMIT_S} s")
            else:
                continue
            child.kill()
            child.join()
            receiver.close()
            del running[receiver]
            yield row


def _child(family: str, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sender.send(check_family(family))
    sender.close()


# -- The rows as a table

COLUMNS = ("family", "model", "blocks", "kept: full", "selective", "FLOPs: full", "selective", "result")


def cells(row: Row) -> list[str]:
    shares = [
        f"{100 * numbers[mode] / numbers['none']:.0f} %" if mode in numbers and numbers.get("none") else ""
        for numbers in (row.kept_bytes, row.flops)
        for mode in ("full", "selective")
    ]
    blocks = str(sum(row.blocks.values())) if row.blocks else ""
    return [row.family, row.model, blocks, *shares, row.status + (f": {row.reason[:200]}" if row.reason else "")]


def print_table(rows: Sequence[Row]) -> None:
    """Print the counts and one line for each family."""
    counts = Counter(row.status for row in rows)
    words = {PASSES: "pass", FAILS: "FAIL", NOT_TRAINABLE: NOT_TRAINABLE, CANNOT_BUILD: CANNOT_BUILD}
    print(f"{len(rows)} families: " + ", ".join(f"{counts[status]} {word}" for status, word in words.items()))
    print(Table(COLUMNS, tuple(tuple(cells(row)) for row in rows), right=COLUMNS[2:7]).text(screen_width()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", metavar="NAME", help="only these, by model_type")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there as they come")
    given = parser.parse_args()
    import transformers

    known = list(transformers.CONFIG_MAPPING.keys())
    if unknown := [name for name in given.family or () if name not in known]:
        parser.error(f"transformers {transformers.__version__} does not know {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a clean exit takes the children along
    rows, wanted = dict[str, Row](), given.family or known
    with progress_lines() as progress:
        for done, row in enumerate(check_all(wanted, given.jobs), 1):
            rows[row.family] = row
            progress(done, len(wanted), f"{row.family}: {row.status}")
            if given.json:
                Path(given.json).write_text(json.dumps([asdict(one) for one in rows.values()], indent=1))
    ordered = [rows[name] for name in known if name in rows]
    print_table(ordered)
    return int(any(row.status == FAILS for row in ordered))


if __name__ == "__main__":
    sys.exit(main())
