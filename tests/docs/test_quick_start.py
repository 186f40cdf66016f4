"""docs/quick-start.md: every snippet of it runs, and trains with regions on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sac
from sac.blocks.install import regions_of
from tests.docs.pages import fenced, sections
from tests.docs.snippet_models import WIDTH, Layer, Model
from tests.support.blocks import llama_stack
from tests.support.compiling import vectorised_inductor
from tests.support.ranks import run_ranks

PAGE = "docs/quick-start.md"
Names = dict[str, Any]


def plain() -> Names:
    torch.manual_seed(0)
    model = Model()
    return {
        "model": model,
        "batch": torch.randn(2, 3, WIDTH),
        "batches": [torch.randn(2, 3, WIDTH) for _ in range(2)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "torch": torch,
        "Layer": Layer,
        "device": torch.device("cpu"),
    }


def tensor_parallel() -> Names:
    from torch.distributed.device_mesh import init_device_mesh

    return {**plain(), "tp_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}


def pipeline() -> Names:
    return {
        **plain(),
        "stage_model": Model(),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "loss_fn": lambda out, target: (out - target).square().mean(),
        "target": torch.zeros(2, 3, WIDTH),
    }


def hugging_face() -> Names:
    from tests.stacks.hf_training import arguments, rows
    from tests.support.model_zoo import tiny

    model, batch = tiny("llama")
    folder = Path(tempfile.mkdtemp(dir="."))
    quiet = {"max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    return {
        "torch": torch,
        "model": model,
        "batch": batch,
        "dataset": rows(batch),
        "args": arguments(folder),
        "model_init": lambda: tiny("llama")[0],
        "other_arguments": {**quiet, "output_dir": str(folder), "dataloader_pin_memory": False},
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def trl() -> Names:
    from datasets import Dataset

    from tests.stacks.test_trl import TEXTS, tokenizer

    names = hugging_face()
    names["other_arguments"] |= {"bf16": False, "max_length": 16}
    texts = [{"text": text} for text in TEXTS * 2]
    return {**names, "dataset": Dataset.from_list(texts), "tokenizer": tokenizer()}


def lightning() -> Names:
    from tests.stacks.lightning_module import QUIET, Module, batches

    given = {"build_model": llama_stack, "quiet": QUIET, "loader": batches()}
    return {**plain(), **given, "OtherModule": partial(Module, late=False)}


def diffusers() -> Names:
    from tests.stacks import diffusion_models

    transformer, inputs = diffusion_models.dit()
    return {"transformer": transformer.train(), "inputs": inputs}


def timm() -> Names:
    from tests.stacks.stand_ins import import_timm

    import_timm()
    return {"images": torch.randn(2, 3, 32, 32)}


def torchtitan() -> Names:
    from tests.stacks import titan_models

    return {"model": titan_models.build(), "tokens": torch.randint(titan_models.VOCABULARY, (2, 8))}


def float8() -> Names:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)
    return {**plain(), "float8_config": config}


def qlora() -> Names:
    from tests.stacks import qlora_models

    return {**hugging_face(), "model_in_4_bits": qlora_models.build().unload()}


# By heading: names for its snippets (what one leaves stays for the next), packages that are no stand-ins, whether it
# takes ranks.
SECTIONS: dict[str, tuple[Callable[[], Names], tuple[str, ...], bool]] = {
    "Plain PyTorch": (plain, (), False),
    "DDP": (plain, (), True),
    "FSDP2": (plain, (), True),
    "FSDP1": (plain, (), True),
    "Tensor parallel": (tensor_parallel, (), True),
    "Pipeline parallel": (pipeline, (), True),
    "torch.compile": (plain, (), False),
    "Hugging Face Trainer": (hugging_face, ("transformers", "accelerate"), False),
    "Accelerate": (hugging_face, ("transformers", "accelerate"), False),
    "PEFT": (hugging_face, ("transformers", "peft"), False),
    "TRL": (trl, ("trl", "peft"), False),
    "Lightning": (lightning, ("lightning",), False),
    "diffusers": (diffusers, ("diffusers",), False),
    "timm": (timm, (), False),
    "torchtitan": (torchtitan, (), False),
    "torchao float8": (float8, ("torchao",), False),
    "QLoRA": (qlora, ("bitsandbytes", "peft", "transformers"), False),
}


def run_section(heading: str) -> list[str]:
    """Run the snippets of a section, each with names of its own; return what their models say of themselves."""
    build, _, _ = SECTIONS[heading]
    names: Names = {}
    said = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        for number, snippet in enumerate(fenced(sections(PAGE)[heading], "python")):
            torch.manual_seed(0)
            torch._dynamo.reset()
            names |= build()
            if heading == "Accelerate":
                from tests.stacks.test_accelerate import accelerator

                names["accelerator"] = stack.enter_context(accelerator())
            exec(compile(snippet, f"{PAGE}, {heading}, snippet {number}", "exec"), names)
            said.append(told(names))
    return said


def told(names: Names) -> str:
    """What the report of the snippet's model begins with, if regions have been run."""
    model = next(names[name] for name in ("transformer", "stage_model", "model") if name in names)
    assert next(regions_of(model), None) is not None, "sac is not on"
    calls = sum(one.region.stats.calls for one in regions_of(model))
    assert calls > 0 or hasattr(names.get("compiled"), "_orig_mod"), "no region was run"
    return str(sac.report(model)).splitlines()[0]


def test_every_section_is_run() -> None:
    assert list(sections(PAGE)) == list(SECTIONS)


@pytest.mark.filterwarnings("ignore")  # of the stacks themselves
@pytest.mark.parametrize(
    "heading", [pytest.param(one, marks=vectorised_inductor if one == "torch.compile" else ()) for one in SECTIONS]
)
def test_section(heading: str) -> None:
    _, packages, takes_ranks = SECTIONS[heading]
    for package in packages:
        pytest.importorskip(package, reason=f"a section of the page needs {package}")
    found = run_ranks(2, run_section, heading) if takes_ranks else [run_section(heading)]
    count = len(fenced(sections(PAGE)[heading], "python"))
    assert count > 0
    for said in found:
        assert len(said) == count
        assert all(line.startswith("activation checkpointing: selective,") for line in said), said
