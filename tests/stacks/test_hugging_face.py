"""Published architectures, small: gradients, losses without grad, generation, files and copies are what they were.

The oracle is the same model with its cache off, as training is meant to be: GPT-2 and T5 round differently with it on,
since the cache lays keys and values out anew.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from tests.support.model_zoo import FAMILIES, tiny
from tests.support.training import assert_same

QUICK = (
    "llama",
    "gemma2",
    "gpt2",
    "mixtral",
    "deepseek_v3",
    "mamba",
    "bert",
    "t5",
    "vit",
    "whisper",
    "llava",
    "gemma3n",
)
ALL = [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES]
quiet = pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")


def stepped(model: nn.Module, inputs: dict[str, Any], steps: int = 2) -> dict[str, torch.Tensor]:
    """Losses, gradients and buffers of some steps; dropout is drawn from the same seed."""
    torch.manual_seed(3)
    seen: dict[str, torch.Tensor] = {}
    for step in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
        seen |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        seen |= {f"buffer {name} {step}": buffer.clone() for name, buffer in model.named_buffers()}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad / (1 + p.grad.norm())
                    p.grad = None
    return seen


@quiet
@pytest.mark.parametrize("value", ["full", "selective"])
@pytest.mark.parametrize("family", ALL)
def test_gradients_are_those_without_checkpointing(family: str, value: str) -> None:
    plain, inputs = tiny(family, dropout=0.1)
    turn_off_cache(plain)
    reference = stepped(plain, inputs)
    model, _ = tiny(family, dropout=0.1)
    sac.apply(model, value)
    assert any(True for _ in regions_of(model))
    assert_same(reference, stepped(model, inputs))


@quiet
@pytest.mark.parametrize("family", QUICK)
def test_evaluation_is_as_it_was(family: str) -> None:
    losses = []
    for value in ("none", "full"):
        model, inputs = tiny(family)
        sac.apply(model.eval(), value)
        with torch.no_grad():
            losses.append(model(**inputs).loss)
    assert torch.equal(*losses)


@quiet
@pytest.mark.parametrize("family", ["llama", "gemma3n", "gpt2", "t5", "whisper", "mamba"])
def test_generation_is_as_it_was(family: str) -> None:
    written = []
    for value in ("none", "selective"):
        model, inputs = tiny(family)
        sac.apply(model.eval(), value)
        main = {name: x for name, x in inputs.items() if name in ("input_ids", "input_features")}
        written.append(model.generate(**main, max_new_tokens=4, do_sample=False))
        if value == "selective" and any(True for _ in regions_of(model)):
            stepped(model.train(), inputs, steps=1)  # and training still goes on
    assert torch.equal(*written)


def test_generation_still_uses_its_cache() -> None:
    model, inputs = tiny("llama")
    sac.apply(model.eval(), "full")
    lengths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.generate(input_ids=inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert lengths == [inputs["input_ids"].shape[1], 1, 1]


@pytest.mark.parametrize("family", ["llama", "bert", "vit"])
def test_saved_files_are_as_they_were(family: str, tmp_path: Path) -> None:
    plain, inputs = tiny(family)
    model, _ = tiny(family)
    sac.apply(model, "selective")
    stepped(model, inputs, steps=1)
    stepped(plain, inputs, steps=1)
    assert list(model.state_dict()) == list(plain.state_dict())
    sac.remove(model)  # the cache switch lies in the config file
    sac.apply(model, "full")
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "plain")]
    assert weights[0] == weights[1]
    again = type(model).from_pretrained(tmp_path / "ours").train()
    assert_same(stepped(plain, inputs), stepped(again, inputs))


@pytest.mark.parametrize("value", ["full", "selective"])
@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_copy_is_a_model_of_its_own(family: str, value: str) -> None:
    model, inputs = tiny(family, dropout=0.1)
    sac.apply(model, value)
    stepped(model, inputs, steps=1)
    twin, plain = copy.deepcopy(model), tiny(family, dropout=0.1)[0]
    plain.load_state_dict(twin.state_dict())
    turn_off_cache(plain)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert_same(stepped(plain, inputs), stepped(twin, inputs))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    sac.remove(twin)
    assert not list(regions_of(twin))
    assert list(regions_of(model))


def test_half_precision_under_autocast() -> None:
    seen = []
    for value in ("none", "full", "selective"):
        model, inputs = tiny("llama", attention_dropout=0.1)
        sac.apply(model, value)
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            loss = model(**inputs).loss
        loss.backward()
        seen.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(seen[0], seen[1])
    assert_same(seen[0], seen[2])
