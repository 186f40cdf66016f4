"""What `sac.apply` refuses, warns of and chooses; a model that it refused is as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.errors import ConfigError, ModelError, PolicyError, RegionError, SacWarning
from tests.promises.test_11_invisible import flat
from tests.support.blocks import llama_stack, policy, save
from tests.support.model_zoo import tiny
from tests.support.training import built

POLICY = "activation_checkpointing.policy"
OPTIONAL = "mark the rule `optional: true` if it may match nothing"
OPS_FIX = f"    fix: `sac trace` lists the ops there are; {OPTIONAL}"
MODULES_FIX = f"    fix: `sac trace` lists the modules there are; {OPTIONAL}"


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


def refusal(model: nn.Module, value: Any, kind: type[Exception] = ModelError) -> str:
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


@pytest.mark.parametrize("value", ["full", "none", "selective"])
def test_second_apply(value: str) -> None:
    model = sac.apply(llama(), "full")
    assert refusal(model, value) == (
        "model.layers.0: sac.apply has been called on this model before\n    fix: call sac.remove(model) first"
    )


def test_apply_on_a_part_of_a_region() -> None:
    model = sac.apply(llama(), "full")
    assert refusal(model.model.layers[0].mlp, "full") == (
        "LlamaMLP: this module is inside a block to which sac has been applied\n"
        "    fix: call sac.remove on the whole model first, or leave this part as it is"
    )


def test_apply_after_context_fn() -> None:
    model = llama()
    sac.context_fn("general", module=model.model.layers[1])
    text = refusal(model, "full")
    assert text == (
        "model.layers.1.self_attn: sac.context_fn has been given a module of this model, whose checkpoint would be "
        "inside a region\n    fix: call sac.remove(model) first"
    )
    sac.apply(sac.remove(model), "full")


OWN = (
    "LlamaForCausalLM: the model's own checkpointing is on: gradient_checkpointing is on in model (LlamaModel) and 2 "
    "more (turn it off with model.activation_checkpointing_disable())\n"
    "    fix: turn it off, then call sac.apply; two at once would run every block three times"
)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("method", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_own_checkpointing_is_on(method: str) -> None:
    model = llama()
    getattr(model, method)()
    assert refusal(model, "full") == OWN
    assert sac.apply(model, "none") is model
    model.activation_checkpointing_disable()
    assert len(paths(sac.apply(model, "full"))) == 2


def test_no_blocks() -> None:
    assert refusal(nn.Linear(3, 3), "full") == (
        "Linear: no transformer blocks were found in this model; it has no list of modules\n"
        "    legal: a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; Hugging Face "
        "layers; a model that is one block\n"
        '    fix: name them, for example blocks: ["path.to.layers.*"], in the config, or under regions: in the policy'
    )


def test_no_model() -> None:
    with pytest.raises(ConfigError) as caught:
        sac.apply("full", llama())  # type: ignore[arg-type]
    assert str(caught.value) == "sac.apply: model is a str\n    legal: a torch.nn.Module"


def test_layers_leave_no_block() -> None:
    assert refusal(llama(), {"mode": "full", "layers": ["5-7"]}) == (
        "LlamaForCausalLM: `layers` leaves no block: the model has stacks of 2\n    fix: choose layers that exist"
    )


def test_frozen_model_whose_adapters_are_to_come() -> None:
    model = llama().requires_grad_(False)
    assert warned(lambda: sac.apply(model, "full")) == []
    assert [one.region.path for one in regions_of(model)] == ["model.layers.0", "model.layers.1"]


LAYERS = {
    "first": ({"first": 1}, [0]),
    "last": ({"last": 2}, [1, 2]),
    "every": ({"every": 2, "offset": 1}, [1]),
    "ranges": (["0", "2-9"], [0, 2]),
    "all": ("all", [0, 1, 2]),
}


@pytest.mark.parametrize(("layers", "expected"), LAYERS.values(), ids=LAYERS.keys())
def test_layers_choose_the_regions(layers: Any, expected: list[int]) -> None:
    model = llama(num_hidden_layers=3)
    assert paths(sac.apply(model, {"mode": "full", "layers": layers})) == [f"model.layers.{i}" for i in expected]
    in_policy = with_rules(save("matmul"))
    in_policy["policy"]["regions"] = {"layers": layers}
    assert paths(sac.apply(sac.remove(model), in_policy)) == [f"model.layers.{i}" for i in expected]


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


NOTE = (
    "share keys and values, so that attention cannot be recomputed: in its blocks the regions are {} other sub-modules"
)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_and_values_are_regions_as_a_whole(family: str) -> None:
    model, _ = tiny(family)
    assert warned(lambda: sac.apply(model, "full")) == []
    assert paths(model) == [f"model.layers.{layer}" for layer in range(4)]
    assert model.config.use_cache is False


@pytest.mark.parametrize(("family", "parts"), [("gemma3n", ["mlp", "altup", "laurel"]), ("gemma4", ["mlp"])])
def test_their_attention_is_left_alone_in_the_reentrant_mode(family: str, parts: list[str]) -> None:
    model, inputs = tiny(family)
    [note] = warned(lambda: sac.apply(model, {"mode": "full", "use_reentrant": True}))
    assert note == f"layers of {type(model).__name__} " + NOTE.format(4 * len(parts))
    assert paths(model) == [f"model.layers.{layer}.{part}" for layer in range(4) for part in parts]
    assert model(**inputs).loss.isfinite()
    assert sac.report(model).notes == (note,)


class TwoTowers(nn.Module):
    """A vision stack next to a language model that shares keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.ModuleList(llama_stack().blocks)
        self.language_model = tiny("gemma4")[0]


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
def test_only_language_blocks_are_divided_for_shared_keys_and_values() -> None:
    model = sac.apply(TwoTowers(), {"mode": "full", "use_reentrant": True})
    vision = [path for path in paths(model) if path.startswith("vision")]
    assert vision == ["vision_tower.0", "vision_tower.1"]
    language = [path for path in paths(model) if path.startswith("language")]
    assert language == [f"language_model.model.layers.{layer}.mlp" for layer in range(4)]


def test_cache_is_turned_off_and_given_back() -> None:
    model = tiny("llava")[0]
    configs = [model.config.text_config]
    assert [c.use_cache for c in configs] == [True]
    sac.apply(model, "full")
    assert [c.use_cache for c in configs] == [False]
    sac.remove(model)
    assert [c.use_cache for c in configs] == [True]


def test_warning_made_an_error_leaves_the_model_as_it_was() -> None:
    model = tiny("gemma4")[0]
    assert "share keys and values" in refusal_by_warning(model, {"mode": "full", "use_reentrant": True})
    model = llama()
    value = with_rules(save("matmul", module="mlp"), save("matmul", module="nowhere"))
    assert "nowhere" in refusal_by_warning(model, value)


def refusal_by_warning(model: nn.Module, value: Any) -> str:
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        with pytest.raises(SacWarning) as caught:
            sac.apply(model, value)
    assert state(model) == before
    return str(caught.value)


def test_rules_that_speak_of_modules_and_layers_that_are_not_there() -> None:
    value = with_rules(
        save("matmul", module="mlp.**"),
        save("aten.mm", module="nowhere"),
        save("aten.bmm", layers=["7"]),
        save("attention", module="self_attn", layers=["8"]),
        save("convolution", module="nowhere.too", optional=True),
    )
    texts = [
        f'{POLICY}.rules[1].module: rule "rule-1" names module "nowhere", which no region has\n{MODULES_FIX}',
        f'{POLICY}.rules[2].layers: rule "rule-2" names layers that no region has\n{MODULES_FIX}',
        f'{POLICY}.rules[3].module: rule "rule-3" names module "self_attn" in its layers, which no region has\n'
        + MODULES_FIX,
    ]
    assert warned(lambda: sac.apply(llama(), value)) == texts
    assert refusal(llama(), {**value, "strict": True}, PolicyError) == "\n".join(texts)


def test_no_rule_has_a_place() -> None:
    value = with_rules(save("matmul", module="nowhere"))
    assert refusal(llama(), value, PolicyError) == (
        f'{POLICY}.rules[0].module: rule "rule-0" names module "nowhere", which no region has\n{MODULES_FIX}'
    )


def idle(index: int) -> str:
    return f'{POLICY}.rules[{index}]: rule "rule-{index}" matched no op in any region of the model\n{OPS_FIX}'


def run(value: Any) -> nn.Module:
    model, inputs = tiny("llama")
    sac.apply(model, value)
    model(**inputs).loss.backward()
    return model


def test_rule_without_a_hit_warns_once() -> None:
    model, inputs = tiny("llama")
    sac.apply(model, with_rules(save("aten.bmm"), save("aten.mm"), save("convolution", optional=True)))
    assert warned(lambda: model(**inputs).loss.backward()) == [idle(0)]
    assert warned(lambda: model(**inputs).loss.backward()) == []


def test_rule_without_a_hit_raises_when_strict() -> None:
    with pytest.raises(RegionError) as caught:
        run(with_rules(save("aten.bmm"), save("aten.mm"), strict=True))
    assert str(caught.value) == idle(0)
    assert isinstance(caught.value, RuntimeError)


def test_all_rules_without_a_hit_raise_when_strict() -> None:
    with pytest.raises(RegionError) as caught:
        run(with_rules(save("aten.bmm"), save("aten.convolution"), strict=True))
    assert str(caught.value) == f"{idle(0)}\n{idle(1)}"


def test_only_optional_rules_may_all_be_idle() -> None:
    assert warned(lambda: run(with_rules(save("aten.bmm", optional=True)))) == []


def test_routing_op_that_a_rule_recomputes() -> None:
    model, inputs = tiny("mixtral")
    recompute = {"ops": "aten.topk", "do": "recompute"}
    sac.apply(model, with_rules(save("matmul"), recompute))
    [text] = warned(lambda: model(**inputs).loss.backward())
    assert text == (
        f'{POLICY}.rules[1].do: rule "rule-1" recomputes aten.topk.default, which may return something else the '
        "second time: gradients are then wrong, or backward fails"
    )
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


def test_container_of_one_block_is_a_model_with_one_block() -> None:
    stack = nn.ModuleList([llama_stack().blocks[0]])
    assert paths(sac.apply(stack, "full")) == ["0"]
    x = torch.randn(2, 8, 32, requires_grad=True)
    stack[0](x).sum().backward()
    assert x.grad is not None


class AttentionOnly(nn.Module):
    """Layers of attention alone, of which the config says that they share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_kv_shared_layers": 1, "use_cache": True})()
        self.layers = nn.ModuleList(nn.ModuleDict({"self_attn": block.self_attn}) for block in llama_stack().blocks)
        for layer in self.layers:
            layer.forward = layer["self_attn"].forward


def test_sharing_blocks_that_hold_nothing_but_attention() -> None:
    assert refusal(AttentionOnly(), {"mode": "full", "blocks": "layers.*.self_attn"}) == (
        "AttentionOnly: layers of AttentionOnly share keys and values, so that attention cannot be recomputed, and "
        "the blocks contain nothing else to recompute"
    )
