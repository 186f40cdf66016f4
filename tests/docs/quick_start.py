"""What the snippets of docs/quick-start.md take for granted, by section, and how a section is run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from tests.docs.pages import fenced, sections
from tests.docs.snippet_models import WIDTH, Layer, Model

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
    import lightning

    from tests.stacks.lightning_module import QUIET

    class OtherModule(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.inner(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loader = torch.utils.data.DataLoader(torch.randn(4, 3, WIDTH), batch_size=2)
    return {**plain(), "build_model": Model, "quiet": QUIET, "loader": loader, "OtherModule": OtherModule}


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
    import bitsandbytes

    names = hugging_face()
    model = names["model"]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name.endswith("_proj"):
                made = bitsandbytes.nn.Linear4bit(child.in_features, child.out_features, bias=False, quant_type="nf4")
                data = child.weight.detach()
                made.weight = bitsandbytes.nn.Params4bit(data, requires_grad=False, quant_type="nf4")
                setattr(module, name, made.to("cpu"))
    model.is_loaded_in_4bit = True
    return {**names, "model_in_4_bits": model}


# By heading: names for its snippets (what one leaves stays for the next), packages, whether it takes ranks.
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
    "timm": (timm, ("timm",), False),
    "torchtitan": (torchtitan, ("torchtitan",), False),
    "torchao float8": (float8, ("torchao",), False),
    "QLoRA": (qlora, ("bitsandbytes", "peft", "transformers"), False),
}


def run_section(heading: str) -> list[str]:
    """Run the snippets of a section, each with names of its own; return what their models say of themselves."""
    build, _, _ = SECTIONS[heading]
    names: Names = {}
    said = []
    folder = tempfile.mkdtemp()
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        for number, snippet in enumerate(fenced(sections(PAGE)[heading], "python")):
            torch.manual_seed(0)
            names |= build()
            if heading == "Accelerate":
                from tests.stacks.test_accelerate import accelerator

                names["accelerator"] = stack.enter_context(accelerator())
            if heading == "torch.compile":
                torch._dynamo.reset()
            exec(compile(snippet, f"{PAGE}, {heading}, snippet {number}", "exec"), names)
            said.append(told(names))
    return said


def told(names: Names) -> str:
    """What the report of the snippet's model begins with, if gradients have arrived."""
    model = next(names[name] for name in ("transformer", "stage_model", "model") if name in names)
    assert next(regions_of(model), None) is not None, "sac is not on"
    report = sac.report(model)
    calls = sum(one.region.stats.calls for one in regions_of(model))
    assert calls > 0 or hasattr(names.get("compiled"), "_orig_mod"), "no region was run"
    return str(report).splitlines()[0]


def skip_without(*packages: str) -> None:
    for package in packages:
        if package not in ("timm", "torchtitan"):  # these are imported with stand-ins
            pytest.importorskip(package, reason=f"a section of the page needs {package}")
