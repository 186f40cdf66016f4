"""PEFT: adapters have the gradients that they have without us, whatever comes first; frozen towers do not run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from sac.errors import ModelError
from tests.stacks.composition import Outcome, assert_recomputed, differences, train
from tests.stacks.hf_training import measured
from tests.support.model_zoo import tiny
from tests.support.training import same_bits

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
    "prompt": lambda: peft.PromptTuningConfig(**SOFT),
    "prefix": lambda: peft.PrefixTuningConfig(**SOFT),  # keys and values in a cache that the model is given
    "p-tuning": lambda: peft.PromptEncoderConfig(**SOFT, encoder_hidden_size=8),
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


def trained_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


# --- every kind of adapter, before and after sac.apply


@pytest.mark.parametrize("kind", ADAPTERS)
def test_gradients_of_adapters(kind: str) -> None:
    """No `enable_input_require_grads` is needed: what a frozen block hands on is run again all the same."""
    names = trained_names(adapted(kind)[0])
    for first in ("sac", "peft"):
        plain, _ = assert_recomputed(lambda value: lora(value, kind, first), "full")  # noqa: B023
        kept = lora("selective", kind, first)  # `adapters` runs no product again
        assert differences(kept, plain) == []
        assert kept.kept_bytes < plain.kept_bytes
        assert len(plain.gradients) == len(names) > 0
        assert not any(name.endswith("forward") for name in adapted(kind, "full", first=first)[0].state_dict())


def test_the_policy_of_the_family_reaches_the_products_that_are_adapted_later() -> None:
    model, batch = adapted("lora", "selective", first="sac")
    model(**batch).loss.backward()
    (kind,) = sac.report(model).kinds
    hits = {rule.rule: rule.hits for rule in kind.rules}
    assert kind.regions == "model.layers.0-1 (x2)"
    assert hits["attention-inputs"] >= 3
    assert hits["mlp-output"] >= 1


# --- frozen parts


def language_adapter() -> Any:
    return peft.LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)")


def vision_language_model(value: Any, *, first: str) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny("llava")
    turn_off_cache(model)
    if first == "sac":
        sac.apply(model, value)
    torch.manual_seed(3)
    model = peft.get_peft_model(model, language_adapter())
    draw(model)
    if first == "peft":
        sac.apply(model, value)
    return model, batch


@pytest.mark.parametrize("first", ["sac", "peft"])
def test_a_frozen_tower_is_not_run_again(first: str) -> None:
    plain = measured(*vision_language_model("none", first=first))
    model, batch = vision_language_model("full", first=first)
    ours = measured(model, batch)
    assert differences(ours, plain) == []
    assert any("vision" in one.region.path for one in regions_of(model))
    language = {"mode": "full", "blocks": ["**.language_model.layers.*"]}
    assert ours.flops == measured(*vision_language_model(language, first=first)).flops
    assert ours.flops > plain.flops


def test_blocks_below_the_first_adapter_are_not_run_again() -> None:
    last, both = (lora("full", kind).flops - lora("none", kind).flops for kind in ("lora in the last layer", "lora"))
    assert last <= both / 2


# --- what users do with adapters


def test_switching_adapters() -> None:
    found = []
    for value in ("none", "full", "selective"):
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
    for steps in found[1:]:
        for ours, plain in zip(steps, found[0], strict=True):
            assert list(ours) == list(plain)
            assert all(same_bits(ours[name], plain[name]) for name in plain)


def two_forwards(model: Any, batch: dict[str, Any]) -> Outcome:
    """As in preference training: two forwards in one loss, the reference being the model without its adapter."""

    def loss(model: Any) -> Tensor:
        chosen = model(**batch).loss
        rejected = model(input_ids=batch["labels"], labels=batch["input_ids"]).loss
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).loss
        return chosen - 0.5 * rejected + reference

    return train(model, loss)


def test_a_reference_without_the_adapter() -> None:
    assert_recomputed(lambda value: two_forwards(*adapted("lora", value)), "full", "selective")


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_merging_and_unloading(kind: str) -> None:
    logits = []
    for value in ("none", "selective"):
        model, batch = adapted(kind, value)
        model(**batch).loss.backward()
        merged = model.merge_and_unload()
        assert type(merged).__name__ == "LlamaForCausalLM"
        for parameter in merged.parameters():
            parameter.requires_grad_(True)
        output = merged(**batch)
        output.loss.backward()
        logits += [output.logits, merged.model.layers[0].mlp.up_proj.weight.grad]
        if value != "none":
            assert len(list(regions_of(merged))) == 2
            sac.remove(merged)
            assert not [one for one in merged.modules() if "forward" in vars(one)]
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])


def test_saving_and_loading(tmp_path: Path) -> None:
    written = []
    for value in ("none", "selective"):
        model, batch = adapted("lora and a head", value)
        model(**batch).loss.backward()
        model.save_pretrained(tmp_path / value)
        written.append((tmp_path / value / "adapter_model.safetensors").read_bytes())
        base, _ = tiny("llama")
        again = peft.PeftModel.from_pretrained(sac.apply(base, value), tmp_path / value, is_trainable=True)
        turn_off_cache(again)
        assert torch.equal(again.eval()(**batch).logits, model.eval()(**batch).logits)
        assert trained_names(again) == trained_names(model)
    assert written[0] == written[1]


# --- the model's own checkpointing


def loaded_in_8_bit() -> nn.Module:
    model, _ = tiny("llama")
    model.is_loaded_in_8bit = True  # what prepare_model_for_kbit_training asks
    return model


def test_preparing_a_quantized_model_turns_nothing_on_beside_us() -> None:
    model = sac.apply(loaded_in_8_bit(), "selective")
    with pytest.raises(ModelError, match=r"gradient_checkpointing_enable was called, and sac\.apply has been"):
        peft.prepare_model_for_kbit_training(model)
    model = sac.apply(loaded_in_8_bit(), "selective")
    prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert not prepared.is_activation_checkpointing
    assert len(list(regions_of(prepared))) == 2


def test_preparing_a_quantized_model_that_is_taken_over() -> None:
    model = peft.prepare_model_for_kbit_training(
        take_over(loaded_in_8_bit()), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    assert not model.is_activation_checkpointing
    torch.manual_seed(3)
    model = peft.get_peft_model(model, ADAPTERS["lora"]())  # the model was all frozen when its blocks were looked for
    draw(model)
    plain, batch = adapted("lora")
    ours, reference = measured(model, batch), measured(plain, batch)
    assert differences(ours, reference) == []
    assert ours.flops > reference.flops


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_an_adapted_model_that_is_taken_over(kind: str) -> None:
    """All of a model may be frozen below what PEFT puts around it: what counts is what was taken over."""
    plain = measured(*adapted(kind))
    model, batch = adapted(kind)
    take_over(model).activation_checkpointing_enable({"mode": "full"})
    ours = measured(model, batch)
    assert differences(ours, plain) == []
    assert ours.flops > plain.flops
