"""Published architectures, small: generation, files and caches are what they were.

That training is what it was, for each architecture, is in tests/policies/test_shipped_models.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.stacks.composition import Outcome, differences, forward_done, outcome, train
from tests.support.blocks import alternate, policy
from tests.support.model_zoo import tiny
from tests.support.pairs import in_turn
from tests.support.training import assert_same, descend, state_after

transformers = pytest.importorskip("transformers", reason="models of Hugging Face")


def stepped(model: nn.Module, inputs: dict[str, Any], steps: int = 2) -> dict[str, Tensor]:
    """What some steps of training show."""
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        seen |= state_after(step, model, loss.detach(), "cpu")
        descend(model, 0.05)
    return seen


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("family", ["llama", "gemma3n", "t5", "mamba"])
def test_generation_is_as_it_was(family: str) -> None:
    written = []
    for value in ("none", "selective"):
        model, inputs = tiny(family)
        sac.apply(model.eval(), value)
        main = {name: x for name, x in inputs.items() if name in ("input_ids", "input_features")}
        written.append(model.generate(**main, max_new_tokens=4, do_sample=False))
        if value == "selective":
            stepped(model.train(), inputs, steps=1)  # and training still goes on
    assert torch.equal(*written)


def test_generation_still_uses_its_cache() -> None:
    model, inputs = tiny("llama")
    sac.apply(model.eval(), "full")
    lengths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.generate(input_ids=inputs["input_ids"], max_new_tokens=3, do_sample=False)
    assert lengths == [inputs["input_ids"].shape[1], 1, 1]


def test_saved_files_are_as_they_were(tmp_path: Path) -> None:
    plain, inputs = tiny("llama")
    model, _ = tiny("llama")
    sac.apply(model, "selective")
    stepped(model, inputs, steps=1)
    stepped(plain, inputs, steps=1)
    sac.remove(model)  # the cache switch lies in the config file
    sac.apply(model, "full")
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "plain")]
    assert weights[0] == weights[1]
    again = type(model).from_pretrained(tmp_path / "ours").train()
    assert_same(stepped(plain, inputs), stepped(again, inputs))


@pytest.mark.parametrize(("family", "module"), [("llama", "self_attn"), ("mixtral", "mlp.experts")])
def test_modules_that_are_saved_as_a_whole(family: str, module: str) -> None:
    value = {"mode": "selective", "policy": policy({"module": module, "do": "save"})}

    def trained(mode: Any) -> Outcome:
        model, batch = tiny(family)
        found = train(sac.apply(model, mode), lambda model: model(**batch).loss)
        assert mode is not value or all(kind.rules[0].hits for kind in sac.report(model).kinds)
        return found

    reference, ours, full = trained("none"), trained(value), trained("full")
    assert differences(ours, reference) == []
    assert reference.flops <= ours.flops < full.flops
    assert full.kept_bytes < ours.kept_bytes


# -- Keys and values in a cache. Dynamic and sliding layers, states of a fixed size, both together, a cache for encoder
# and decoder, latent attention.

CACHING = ("llama", "gemma2", "gpt2", "t5", "mamba", "falcon_h1", "deepseek_v3")
Loss = Callable[[Any, dict[str, Any]], Tensor]


def asked_for(model: Any, batch: dict[str, Any]) -> Tensor:
    output = model(**batch, use_cache=True)
    assert (output.get("past_key_values") or output.get("cache_params")) is not None
    return output.loss


def static_cache(model: Any, batch: dict[str, Any]) -> Tensor:
    return two_forwards(model, batch, transformers.StaticCache(config=model.config, max_cache_len=16))


def dynamic_cache(model: Any, batch: dict[str, Any]) -> Tensor:
    return two_forwards(model, batch, transformers.DynamicCache(config=model.config))


def two_forwards(model: Any, batch: dict[str, Any], cache: Any) -> Tensor:
    """The second half of a text attends to the first through the cache; both are in one loss."""
    return sum(
        model(input_ids=half, labels=half, past_key_values=cache, use_cache=True).loss
        for half in batch["input_ids"].split(6, dim=1)
    )


@pytest.mark.parametrize(
    ("loss", "family", "value"),
    [
        *((asked_for, family, value) for value, family in in_turn(CACHING, [("full",), ("selective",)])),
        (static_cache, "llama", "selective"),
        (dynamic_cache, "gemma2", "full"),
    ],
)
def test_caches(loss: Loss, family: str, value: str) -> None:
    def trained(mode: str) -> Outcome:
        model, batch = tiny(family, dropout=0.1)
        return train(sac.apply(model, mode), lambda model: loss(model, batch))

    plain, ours = trained("none"), trained(value)
    assert differences(ours, plain) == []
    assert ours.flops > plain.flops


def test_a_cache_is_afterwards_what_it_was_before_backward() -> None:
    model, batch = tiny("llama", dropout=0.1)
    sac.apply(model, "full")
    output = model(**batch, use_cache=True)
    layers = output.past_key_values.layers
    held = [one for layer in layers for one in (layer.keys, layer.values)]
    before = [one.detach().clone() for one in held]
    output.loss.backward()
    after = [one for layer in layers for one in (layer.keys, layer.values)]
    assert output.past_key_values.layers is layers
    assert all(a is b for a, b in zip(held, after, strict=True))
    assert all(map(torch.equal, before, after))


def test_a_checkpointed_function_that_is_given_a_cache() -> None:
    found = []
    for run in (lambda function, *args, **kwargs: function(*args, **kwargs), sac.checkpoint):
        model, batch = tiny("llama")
        cache = transformers.DynamicCache()
        embedded = model.get_input_embeddings()(batch["input_ids"])
        rotary = model.model.rotary_emb(embedded, torch.arange(12)[None])
        layer = model.model.layers[0]
        hidden = run(layer, embedded, position_embeddings=rotary, past_key_values=cache)
        hidden = run(layer, hidden, position_embeddings=rotary, past_key_values=cache)
        hidden.square().sum().backward()
        found.append([parameter.grad for parameter in layer.parameters()])
        assert cache.get_seq_length() == 24
    assert all(map(torch.equal, *found))


# -- Models whose layers read the keys and values of another layer: whole blocks are regions, and nothing is lost

MODES: dict[str, Any] = {
    "full": "full",
    "full, inputs on the host": {"mode": "full", "store": "host"},
    "rerun": {"mode": "selective", "policy": policy(alternate("matmul")), "engine": "rerun"},
    "replay": {"mode": "selective", "policy": policy(alternate("matmul")), "engine": "replay"},
}


@functools.cache
def in_flight(family: str, mode: str) -> Outcome:
    """Two micro-batches in flight before the first backward, with dropout; layers 2 and 3 read what 0 and 1 wrote."""
    model, batch = tiny(family, dropout=0.1)
    sac.apply(model, MODES.get(mode, "none"))

    def step() -> Tensor:
        losses = [model(**batch).loss for _ in range(2)]
        forward_done()
        for loss in losses:
            loss.backward()
        return losses[0] + losses[1]

    return outcome(step, model)


@pytest.mark.filterwarnings("ignore:blocks|model:sac.errors.SacWarning")
@pytest.mark.parametrize(("family", "mode"), in_turn(list(MODES), [("gemma3n",), ("gemma4",)]))
def test_shared_keys_and_values(family: str, mode: str) -> None:
    plain, ours = in_flight(family, "none"), in_flight(family, mode)
    assert differences(ours, plain) == []
    assert ours.flops > plain.flops
    assert ours.kept_bytes < 0.5 * plain.kept_bytes  # attention is let go
