"""The K/V cache switch, models that share keys and values, and checkpointing that a model brings along."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from sac.blocks.find import find_blocks
from sac.blocks.kv_cache import (
    cache_configs,
    kv_free_submodules,
    shares_kv,
    takes_shared_kv,
    turn_off_cache,
)
from sac.blocks.other_checkpointing import existing_checkpointing
from sac.errors import ModelError
from tests.support.model_zoo import FAMILIES, tiny
from tests.support.plain_zoo import Block, plain

WITHOUT_CACHE = {"distilbert", "albert", "vit", "dinov2", "siglip", "clip", "swin"}
SHARING = {"gemma3n", "gemma4"}


# --- use_cache


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cache_is_made_once_it_is_off(family: str) -> None:
    model, inputs = tiny(family)
    turned = turn_off_cache(model)
    assert bool(turned) == (family not in WITHOUT_CACHE)
    output = model(**inputs)
    for name in ("past_key_values", "cache_params"):
        assert output.get(name) is None
    assert list(cache_configs(model)) == []


def test_layers_that_share_through_the_cache_keep_it() -> None:
    model = nn.Linear(1, 1)
    inner = SimpleNamespace(model_type="inner", use_cache=True, num_kv_shared_layers=2)
    model.config = SimpleNamespace(model_type="outer", use_cache=True, text_config=inner)
    assert turn_off_cache(model) == ()
    assert len(list(cache_configs(model))) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_who_hands_shared_keys_and_values_on_as_an_argument(family: str) -> None:
    blocks = find_blocks(tiny(family)[0])
    assert {takes_shared_kv(block.module) for block in blocks} == {family in SHARING}


def test_what_a_block_is_not_handed_itself_it_does_not_take() -> None:
    class Attention(nn.Module):
        def forward(self, x, shared_kv_states):
            return x

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Attention()

        def forward(self, x, shared_kv_states):
            return self.self_attn(x, shared_kv_states)

    class PassingOn(Named):
        def forward(self, x, **kwargs):
            return self.self_attn(x, **kwargs)

    class FromElsewhere(Named):
        def forward(self, x):
            return self.self_attn(x, self.shared)

    assert [takes_shared_kv(kind()) for kind in (Named, PassingOn, FromElsewhere)] == [True, True, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_undoing_brings_every_switch_back(family: str) -> None:
    model, _ = tiny(family)
    before = list(cache_configs(model))
    for restore in turn_off_cache(model):
        restore.undo()
    assert list(cache_configs(model)) == before
    assert all(config.use_cache is True for config in before)


def test_turning_off_leaves_the_loss_as_it_was() -> None:
    model, inputs = tiny("llama")
    with_cache = model(**inputs)
    turn_off_cache(model)
    assert with_cache.past_key_values is not None
    assert torch.equal(model(**inputs).loss, with_cache.loss)


def test_sub_configs_are_reached_from_the_configs_that_hold_them() -> None:
    inner = SimpleNamespace(use_cache=True)
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type="outer", text_config=inner, use_cache=False)
    assert list(cache_configs(model)) == [inner]
    assert [restore.config for restore in turn_off_cache(model)] == [inner]
    assert inner.use_cache is False


def test_a_config_that_is_off_stays_so_when_undone() -> None:
    model, _ = tiny("llama", use_cache=False)
    assert turn_off_cache(model) == ()
    assert model.config.use_cache is False


def test_generation_still_uses_its_cache() -> None:
    model, inputs = tiny("llama")
    model.eval()
    wanted = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    turn_off_cache(model)
    lengths: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))
    made = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    assert torch.equal(made, wanted)
    assert lengths == [inputs["input_ids"].shape[1], 1, 1, 1]  # one token at a time: the rest comes from the cache


def test_config_that_cannot_be_written() -> None:
    @dataclass(frozen=True)
    class Frozen:
        use_cache: bool = True

    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].config, model[1].config = SimpleNamespace(use_cache=True), Frozen()
    with pytest.raises(ModelError) as caught:
        turn_off_cache(model)
    assert str(caught.value) == (
        "Frozen: use_cache is on, so a recomputed block would write its cache twice, and this config cannot be "
        "changed\n"
        "    fix: build the model with use_cache=False"
    )
    assert model[0].config.use_cache is True


# --- shared keys and values


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_share_keys_and_values(family: str) -> None:
    assert shares_kv(tiny(family)[0]) == (family in SHARING)


@pytest.mark.parametrize("family", sorted(SHARING))
def test_sharing_is_off_when_no_layer_reads_another(family: str) -> None:
    assert not shares_kv(tiny(family, num_kv_shared_layers=0)[0])


def test_sharing_is_told_by_modes_and_by_modules() -> None:
    model = nn.Linear(1, 1)
    assert not shares_kv(model)
    model.config = SimpleNamespace(model_type="x", text_config=SimpleNamespace(model_type="y"))
    assert not shares_kv(model)
    model.config.text_config.kv_sharing_modes = ["store", None]
    assert not shares_kv(model)
    model.config.text_config.kv_sharing_modes = ["store", "reuse_but_indexer"]
    assert shares_kv(model)
    attention = nn.Linear(1, 1)
    attention.is_kv_shared_layer = True
    assert shares_kv(nn.Sequential(attention))


@pytest.mark.parametrize("family", sorted(SHARING))
def test_regions_of_a_sharing_model_are_free_of_attention(family: str) -> None:
    model, _ = tiny(family)
    blocks = find_blocks(model)
    for block in blocks:
        free = kv_free_submodules(block)
        assert f"{block.path}.mlp" in [part.path for part in free]
        inside = {id(module) for part in free for module in part.module.modules()}
        assert all(id(module) not in inside for module in block.module.self_attn.modules())
        for part in free:
            assert part.module is model.get_submodule(part.path)
            assert (part.layer, part.stack, part.stack_size) == (block.layer, block.stack, block.stack_size)


def test_attention_inside_a_part_is_walked_around() -> None:
    class Temporal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = Block(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

        def forward(self, x):
            return self.after(self.inner(x))

    (block,) = find_blocks(nn.Sequential(Temporal()))
    assert [part.path for part in kv_free_submodules(block)] == ["0.inner.feed_forward", "0.after"]


def test_block_of_attention_alone_has_no_free_part() -> None:
    (block, *_) = find_blocks(plain("transformer_encoder")[0])
    assert kv_free_submodules(block) == ()


# --- the model's own checkpointing


def test_nothing_is_told_when_nothing_is_on() -> None:
    assert existing_checkpointing(tiny("llama")[0]) == ""
    assert existing_checkpointing(plain("titan")[0]) == ""


def test_hugging_face_checkpointing_is_told() -> None:
    model, _ = tiny("llama")
    model.activation_checkpointing_enable()
    assert existing_checkpointing(model) == (
        "gradient_checkpointing is on in model (LlamaModel) and 2 more "
        "(turn it off with model.activation_checkpointing_disable())"
    )
    model.activation_checkpointing_disable()
    assert existing_checkpointing(model) == ""


def test_one_layer_is_enough() -> None:
    model, _ = tiny("bert")
    model.bert.encoder.layer[1].gradient_checkpointing = True
    assert existing_checkpointing(nn.Sequential(model.bert.encoder)) == (
        "gradient_checkpointing is on in 0.layer.1 (BertLayer) (set gradient_checkpointing=False)"
    )


def test_timm_checkpointing_is_told() -> None:
    model, _ = plain("timm")
    model.grad_checkpointing = True
    assert existing_checkpointing(model) == (
        "grad_checkpointing is on in the model (TimmStyle) (turn it off with model.set_grad_checkpointing(False))"
    )


def test_checkpoint_wrapper_is_told_around_and_inside_a_block() -> None:
    model, _ = plain("titan")
    model.layers["1"] = checkpoint_wrapper(model.layers["1"])
    assert existing_checkpointing(model) == "checkpoint_wrapper is around layers.1 (Block) (build the model without it)"
    model, _ = plain("titan")
    for layer in model.layers.values():
        layer.feed_forward = checkpoint_wrapper(layer.feed_forward)
    assert existing_checkpointing(model) == (
        "checkpoint_wrapper is around layers.0.feed_forward (SwiGLU) and 2 more (build the model without it)"
    )


def test_offload_wrapper_is_no_checkpointing() -> None:
    model, _ = plain("titan")
    model.layers["1"] = offload_wrapper(model.layers["1"])
    assert existing_checkpointing(model) == ""


def test_composable_checkpoint_is_told() -> None:
    from torch.distributed._composable import checkpoint

    model, _ = plain("titan")
    checkpoint(model.layers["2"])
    assert existing_checkpointing(model) == (
        "torch's composable checkpoint() is on layers.2 (Block) (build the model without it)"
    )


def test_megatron_recompute_is_told() -> None:
    model, _ = plain("titan")
    model.config = SimpleNamespace(recompute_granularity=None)
    assert existing_checkpointing(model) == ""
    model.config.recompute_granularity = "selective"
    assert existing_checkpointing(model) == (
        "recompute_granularity='selective' is in the config of the model (TitanStyle) (set it to None)"
    )
