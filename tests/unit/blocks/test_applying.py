"""What `sac.apply` refuses, warns of and chooses; a model that it refused is as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.errors import ConfigError, PolicyError, SacWarning
from tests.promises.test_11_invisible import flat
from tests.support.blocks import llama_stack, policy, save
from tests.support.model_zoo import tiny
from tests.support.training import built


def with_rules(*rules: Any, **more: Any) -> dict[str, Any]:
    return {"mode": "selective", "policy": policy(*rules), **more}


def llama(**changes: Any) -> nn.Module:
    return tiny("llama", **changes)[0]


def paths(model: nn.Module) -> list[str]:
    return [forward.region.path for forward in regions_of(model)]


def state(model: nn.Module) -> tuple[Any, ...]:
    """Everything that apply may touch: each module's attributes, and each config's values."""
    configs = {id(c): dict(vars(c)) for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return flat(model), configs


def refusal(model: nn.Module, value: Any, kind: type[Exception] = sac.SacError) -> str:
    """Return the text of the error, and hold that nothing was changed."""
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(kind) as caught:
            sac.apply(model, value)
    assert state(model) == before
    assert isinstance(caught.value, sac.SacError)
    return str(caught.value)


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in seen if issubclass(one.category, SacWarning)]


def given_to_context_fn() -> nn.Module:
    model = llama()
    sac.context_fn("general", module=model.model.layers[1])
    return model


def with_its_own_checkpointing() -> nn.Module:
    model = llama()
    model.activation_checkpointing_enable()
    return model


SCATTERED = {"mode": "full", "distribute_saved_activations": True}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    # name: (the model, the config value, parts of the text)
    "a second apply": (lambda: sac.apply(llama(), "full"), "none", ["model.layers.0: sac is on this module already"]),
    "a part of a region": (
        lambda: sac.apply(llama(), "full").model.layers[0].mlp,
        "full",
        ["LlamaMLP: sac is on this module already", "fix: call sac.remove"],
    ),
    "after context_fn": (given_to_context_fn, "full", ["model.layers.1.self_attn: sac is on this module already"]),
    "own checkpointing": (
        with_its_own_checkpointing,
        "full",
        ["LlamaForCausalLM: the model's own checkpointing is on", "fix: turn it off"],
    ),
    "layers": (llama, {"mode": "full", "layers": ["5-7"]}, ["`layers` leaves no block: the model has stacks of 2"]),
    "no group": (llama, SCATTERED, ["sac.apply.tp_group: inputs are to be scattered", "fix: pass tp_group="]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    build, value, texts = REFUSED[name]
    text = refusal(build(), value)
    assert [part for part in texts if part not in text] == []


def test_none_may_be_applied_beside_checkpointing_of_the_model() -> None:
    model = with_its_own_checkpointing()
    assert sac.apply(model, "none") is model
    model.activation_checkpointing_disable()
    assert len(paths(sac.apply(model, "full"))) == 2


def test_no_model() -> None:
    with pytest.raises(ConfigError, match=r"sac.apply: model is a str\n    legal: a torch.nn.Module"):
        sac.apply("full", llama())  # type: ignore[arg-type]


def test_frozen_model_whose_adapters_are_to_come() -> None:
    model = llama().requires_grad_(False)
    assert warned(lambda: sac.apply(model, "full")) == []
    assert [one.region.path for one in regions_of(model)] == ["model.layers.0", "model.layers.1"]


def test_layers_of_config_and_policy_are_both_kept_to() -> None:
    value = with_rules(save("matmul"), layers={"last": 2})
    value["policy"]["regions"] = {"layers": {"first": 2}}
    assert paths(sac.apply(llama(num_hidden_layers=3), value)) == ["model.layers.1"]


def test_blocks_of_the_config_win() -> None:
    value = with_rules(save("matmul"), blocks="model.layers.*.mlp")
    value["policy"]["regions"] = {"blocks": "model.layers.*"}
    assert paths(sac.apply(llama(), value)) == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_submodules() -> None:
    model = sac.apply(llama(), {"mode": "full", "granularity": "submodule", "layers": {"last": 1}})
    assert paths(model) == ["model.layers.1.self_attn", "model.layers.1.mlp"]


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_and_values_are_regions_as_a_whole(family: str) -> None:
    model, _ = tiny(family)
    assert warned(lambda: sac.apply(model, "full")) == []
    assert paths(model) == [f"model.layers.{layer}" for layer in range(4)]
    assert model.config.use_cache is False
    assert sac.remove(model).config.use_cache is True


def test_their_attention_is_refused_in_the_reentrant_mode() -> None:
    value = {"mode": "full", "use_reentrant": True}
    text = refusal(tiny("gemma4")[0], value)
    assert "its layers share keys and values, so attention cannot be recomputed in reentrant mode" in text
    model, inputs = tiny("gemma4")
    assert paths(sac.apply(model, {**value, "blocks": ["**.mlp"]})) == [f"model.layers.{i}.mlp" for i in range(4)]
    assert model(**inputs).loss.isfinite()


def test_warning_made_an_error_leaves_the_model_as_it_was() -> None:
    nowhere = with_rules(save("matmul", module="mlp"), save("matmul", module="nowhere"))
    model = llama()
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        with pytest.raises(SacWarning, match="no region has the module of rule"):
            sac.apply(model, nowhere)
    assert state(model) == before


def test_rules_that_speak_of_modules_and_layers_that_are_not_there() -> None:
    value = with_rules(
        save("matmul", module="mlp.**"),
        save("aten.mm", module="nowhere"),
        save("aten.bmm", layers=["7"]),
        save("attention", module="self_attn", layers=["8"]),
        save("convolution", module="nowhere.too", optional=True),
    )
    told = warned(lambda: sac.apply(llama(), value))
    assert [text.partition("\n")[0].removeprefix("activation_checkpointing.policy.") for text in told] == [
        'rules[1].module: no region has the module of rule "rule-1" (the model has stacks of 2)',
        'rules[2].layers: no region has the layers of rule "rule-2" (the model has stacks of 2)',
        'rules[3].module: no region has the module and layers of rule "rule-3" (the model has stacks of 2)',
    ]
    assert refusal(llama(), {**value, "strict": True}, PolicyError) == "\n".join(told)


def test_routing_op_that_a_rule_recomputes() -> None:
    model, inputs = tiny("mixtral")
    recompute = {"ops": "aten.topk", "do": "recompute"}
    sac.apply(model, with_rules(save("matmul"), recompute))
    [text] = warned(lambda: model(**inputs).loss.backward())
    assert 'rule "rule-1" recomputes aten.topk.default, which may return something else the second time' in text
    rules = {use.rule: use for kind in sac.report(model).kinds for use in kind.rules}
    assert rules["rule-1"].hits > 0
    assert rules["rule-1"].saved_bytes == 0


def test_family_policy_is_found() -> None:
    assert rule_ids("llama") >= {"attention-inputs", "gate"}
    general = {rule.id for rule in sac.load_policy("general").rules}
    model = sac.apply(built(llama_stack), {"mode": "selective", "blocks": "blocks.*"})
    assert {bound.rule.id for bound in next(regions_of(model)).region.group.table.rules} == general


def rule_ids(family: str) -> set[str]:
    model = sac.apply(tiny(family)[0], "selective")
    return {bound.rule.id for forward in regions_of(model) for bound in forward.region.group.table.rules}
