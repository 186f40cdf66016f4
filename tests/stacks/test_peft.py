"""PEFT: adapters have the gradients that they have without us, whatever comes first; frozen towers do not run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from sac.errors import ModelError
from tests.stacks.composition import Outcome, differences
from tests.stacks.hf_training import measured
from tests.support.model_zoo import tiny
from tests.support.training import assert_same

peft = pytest.importorskip("peft", reason="tests of adapters need peft")

from sac.compat.huggingface import take_over  # noqa: E402  (needs transformers)

TARGETS = ["q_proj", "v_proj", "down_proj"]
SOFT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=TARGETS),
    "lora and a head": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "lora in the last layer": lambda: peft.LoraConfig(
        r=4, target_modules=TARGETS, layers_to_transform=[1], layers_pattern="layers"
    ),
    "dora": lambda: peft.LoraConfig(r=4, use_dora=True, target_modules=TARGETS),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "language": lambda: peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)"),
    "prompt": lambda: peft.PromptTuningConfig(**SOFT),
    "prefix": lambda: peft.PrefixTuningConfig(**SOFT),  # keys and values in a cache that the model is given
}


def adapted(kind: str, value: Any = "none", *, first: str = "sac", family: str = "llama") -> tuple[Any, dict[str, Any]]:
    """A model with an adapter whose weights are drawn, so that every one of them has a gradient."""
    model, batch = tiny(family)
    turn_off_cache(model)
    if first == "sac":
        sac.apply(model, value)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, ADAPTERS[kind]())
    draw(model)
    if first == "peft":
        sac.apply(model, value)
    return model.train(), batch


def lora(value: Any, kind: str = "lora", first: str = "peft") -> Outcome:
    return measured(*adapted(kind, value, first=first))


def draw(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_the_policy_of_the_family_reaches_the_products_that_are_adapted_later() -> None:
    model, batch = adapted("lora", "selective", first="sac")
    model(**batch).loss.backward()
    (kind,) = sac.report(model).kinds
    hits = {rule.rule: rule.hits for rule in kind.rules}
    assert kind.regions == "model.layers.0-1 (x2)"
    assert hits["attention-inputs"] >= 3
    assert hits["mlp-output"] >= 1


# --- frozen parts


def test_a_frozen_tower_is_not_run_again() -> None:
    def of(value: Any) -> Outcome:
        return measured(*adapted("language", value, first="peft", family="llava"))

    plain, ours = of("none"), of("full")
    assert differences(ours, plain) == []
    assert ours.flops == of({"mode": "full", "blocks": ["**.language_model.layers.*"]}).flops > plain.flops


def test_blocks_below_the_first_adapter_are_not_run_again() -> None:
    last, both = (lora("full", kind).flops - lora("none", kind).flops for kind in ("lora in the last layer", "lora"))
    assert last <= both / 2


# --- what users do with adapters


def test_switching_adapters() -> None:
    found = []
    for value in ("none", "selective"):
        model, batch = adapted("lora", value)
        torch.manual_seed(4)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
        steps = []
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            draw(model)
            model.zero_grad()
            model(**batch).loss.backward()
            steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            assert all(name in trained for trained in steps[-1])
        found.append(steps)
    for plain, ours in zip(*found, strict=True):
        assert_same(plain, ours)


def test_merging_and_unloading() -> None:
    found = []
    for value in ("none", "selective"):
        model, batch = adapted("lora", value)
        model(**batch).loss.backward()
        merged = model.merge_and_unload()
        for parameter in merged.parameters():
            parameter.requires_grad_(True)
        output = merged(**batch)
        output.loss.backward()
        found.append({"logits": output.logits, "gradient": merged.model.layers[0].mlp.up_proj.weight.grad})
    assert len(list(regions_of(merged))) == 2
    assert_same(*found)


# --- the model's own checkpointing


def loaded_in_8_bit() -> nn.Module:
    model, _ = tiny("llama")
    model.is_loaded_in_8bit = True  # what prepare_model_for_kbit_training asks
    return model


def test_preparing_a_quantized_model() -> None:
    """It turns the model's own checkpointing on by default: an error after `sac.apply`, ours after `take_over`."""
    model = sac.apply(loaded_in_8_bit(), "selective")
    with pytest.raises(ModelError, match=r"gradient_checkpointing_enable was called, and sac\.apply has been"):
        peft.prepare_model_for_kbit_training(model)
    model = peft.prepare_model_for_kbit_training(take_over(loaded_in_8_bit()))
    assert not model.is_activation_checkpointing
    assert len(list(regions_of(model))) == 2


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_an_adapted_model_that_is_taken_over(kind: str) -> None:
    """All of a model may be frozen below what PEFT puts around it: what counts is what was taken over."""
    plain = measured(*adapted(kind))
    model, batch = adapted(kind)
    take_over(model).activation_checkpointing_enable({"mode": "full"})
    ours = measured(model, batch)
    assert differences(ours, plain) == []
    assert ours.flops > plain.flops
