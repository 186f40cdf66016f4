"""Keys and values in a cache: `use_cache=True` at call time, a cache that is handed in, generating between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from tests.stacks.composition import Outcome, differences, forward_done, outcome
from tests.support.model_zoo import tiny
from tests.support.pairs import in_turn

transformers = pytest.importorskip("transformers", reason="tests/stacks needs transformers")

# Dynamic and sliding layers, states of a fixed size, both together, a cache for encoder and decoder, latent attention.
FAMILIES = ("llama", "gemma2", "gpt2", "t5", "mamba", "falcon_h1", "deepseek_v3")


def language_model(family: str, value: Any) -> tuple[nn.Module, dict[str, Any]]:
    model, batch = tiny(family, dropout=0.1)
    sac.apply(model, value)
    return model, batch


def measured(model: nn.Module, run: Callable[[], Any]) -> Outcome:
    def step() -> Tensor:
        output = run()
        forward_done()
        output.loss.backward()
        return output.loss

    return outcome(step, model)


@pytest.mark.parametrize(("value", "family"), in_turn(FAMILIES, [("full",), ("selective",)]))
def test_gradients_with_a_cache_that_the_call_asks_for(family: str, value: str) -> None:
    found = {}
    for one in ("none", value):
        model, batch = language_model(family, one)
        found[one] = measured(model, lambda model=model, batch=batch: model(**batch, use_cache=True))
        output = model(**batch, use_cache=True)
        assert (output.get("past_key_values") or output.get("cache_params")) is not None
    assert differences(found[value], found["none"]) == []
    assert found[value].flops > found["none"].flops


@pytest.mark.parametrize("value", ["full", "selective", {"mode": "full", "use_reentrant": True}])
def test_a_trained_prefix_has_its_gradient(value: Any) -> None:
    """A prefix of keys and values, as in prefix tuning: it is read through the cache, and no argument of the region."""
    found = {}
    for one in ("none", value):
        model, batch = language_model("llama", one)
        torch.manual_seed(5)
        shape = (2, model.config.num_key_value_heads, 3, model.config.head_dim)
        prefix = nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(4))
        model.prefix = prefix  # so that its gradients are compared too

        def run(model: nn.Module = model, batch: dict[str, Any] = batch, prefix: Any = prefix) -> Any:
            cache = transformers.DynamicCache()
            for layer in range(2):
                cache.update(prefix[2 * layer], prefix[2 * layer + 1], layer)
            return model(**batch, past_key_values=cache)

        found[str(one)] = measured(model, run)
        assert any(name.endswith("prefix.0") for name in found[str(one)].gradients)
    assert differences(found[str(value)], found["none"]) == []
    assert found[str(value)].flops > found["none"].flops


@pytest.mark.parametrize(("family", "kind"), [("llama", "static"), ("gemma2", "dynamic"), ("gemma2", "static")])
def test_two_forwards_on_one_cache(family: str, kind: str) -> None:
    """The second half of a text attends to the first through the cache; both are in one loss."""
    found = {}
    for value in ("none", "full", "selective"):
        model, batch = language_model(family, value)
        first, second = batch["input_ids"].split(6, dim=1)

        def run(model: nn.Module = model, first: Tensor = first, second: Tensor = second) -> Any:
            if kind == "static":
                cache = transformers.StaticCache(config=model.config, max_cache_len=16)
            else:
                cache = transformers.DynamicCache(config=model.config)
            begun = model(input_ids=first, labels=first, past_key_values=cache, use_cache=True)
            output = model(input_ids=second, labels=second, past_key_values=cache, use_cache=True)
            output.loss = output.loss + begun.loss
            return output

        found[value] = measured(model, run)
    for value in ("full", "selective"):
        assert differences(found[value], found["none"]) == []
        assert found[value].flops > found["none"].flops


def test_the_cache_is_afterwards_what_it_was_before_backward() -> None:
    model, batch = language_model("llama", "full")
    output = model(**batch, use_cache=True)
    layers = output.past_key_values.layers
    held = [one for layer in layers for one in (layer.keys, layer.values)]
    before = [one.detach().clone() for one in held]
    output.loss.backward()
    after = [one for layer in layers for one in (layer.keys, layer.values)]
    assert output.past_key_values.layers is layers
    assert all(a is b for a, b in zip(held, after, strict=True))
    assert all(map(torch.equal, before, after))


def test_a_config_that_turns_the_cache_on_again_after_apply() -> None:
    """As a Trainer does whose arguments say `use_cache=True`."""
    found = {}
    for value in ("none", "selective"):
        model, batch = language_model("llama", value)
        model.config.use_cache = True
        found[value] = measured(model, lambda model=model, batch=batch: model(**batch))
    assert differences(found["selective"], found["none"]) == []


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generating_between_two_steps(family: str) -> None:
    found, written = {}, {}
    for value in ("none", "full", "selective"):
        model, batch = language_model(family, value)
        turn_off_cache(model)  # T5 rounds differently with it on
        tokens = []

        def run(model: nn.Module = model, batch: dict[str, Any] = batch, tokens: list[Tensor] = tokens) -> Any:
            model.eval()
            tokens.append(model.generate(input_ids=batch["input_ids"], max_new_tokens=4, do_sample=False))
            model.train()
            return model(**batch)

        found[value] = measured(model, run)
        written[value] = torch.stack(tokens)
        assert value == "none" or any(True for _ in regions_of(model))
    for value in ("full", "selective"):
        assert differences(found[value], found["none"]) == []
        assert torch.equal(written[value], written["none"])


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
