"""`sac.context_fn` in torch's own checkpoint: what it refuses, and that it keeps to the policy."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sac
from sac.errors import ConfigError, ModelError, PolicyError
from tests.support.blocks import alternate, install, llama_stack, policy, save, selective, tokens, with_dropout
from tests.support.model_zoo import tiny
from tests.support.recording import backward_ops
from tests.support.training import assert_same, assert_same_training, built, train

PLAIN = 28  # products in the backward of two blocks without checkpointing; each block has seven


def products(written: dict[str, Any], entry: str) -> int:
    model = install(built(llama_stack), selective(written), entry)
    return backward_ops(model, tokens()).ops["aten.mm.default"] - PLAIN


CASES = {
    "attention": (policy(save("attention")), 12),
    "all products": (policy(save("matmul")), 0),
    "alternating": (policy(alternate("matmul")), 6),
    "one linear of three alike": (policy(save("matmul", module="self_attn.k_proj")), 10),
}


@pytest.mark.parametrize(("written", "again"), CASES.values(), ids=CASES.keys())
def test_decisions_are_carried_out(written: dict[str, Any], again: int) -> None:
    assert products(written, "context_fn with module") == again
    if not any("module" in rule for rule in written["rules"]):
        assert products(written, "context_fn") == again


@pytest.mark.parametrize("source", ["general", "General", sac.load_policy("general"), {"extends": "general"}])
def test_sources_of_a_policy(source: Any) -> None:
    block = with_dropout(built(llama_stack)).blocks[0]
    twin = with_dropout(built(llama_stack)).blocks[0]
    (x,) = tokens()
    gradients = []
    for one, call in (
        (block, functools.partial(checkpoint, block, use_reentrant=False, context_fn=sac.context_fn(source))),
        (twin, twin),
    ):
        torch.manual_seed(0)
        call(x).sum().backward()
        gradients.append({name: p.grad for name, p in one.named_parameters()})
    assert_same(*gradients)


def test_optional_rules_on_modules_match_nothing_without_the_module() -> None:
    """Not even `module: ""`: without the module it is unknown in which one an op runs."""
    attention = save("attention", id="attention")
    optional = [save("matmul", id=f"optional-{at}", module=at, optional=True) for at in ("", "mlp.**")]
    with_them, without = policy(*optional, attention), policy(attention)
    assert products(with_them, "context_fn") == products(without, "context_fn")
    assert products(with_them, "context_fn with module") < products(without, "context_fn with module")
    with pytest.raises(sac.SacError, match='rule "optional-mlp" matches by module'):
        sac.context_fn(policy({**optional[1], "id": "optional-mlp", "do": "recompute"}, save("matmul", id="rest")))


def test_hugging_face_checkpointing_takes_it() -> None:
    gradients = []
    for own in (False, True):
        model, inputs = tiny("llama", attention_dropout=0.2, use_cache=False)
        if own:
            contexts = sac.context_fn("general")
            kwargs = {"use_reentrant": False, "context_fn": contexts}
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
        torch.manual_seed(0)
        model(**inputs).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*gradients)


def test_rules_on_modules_and_layers_need_the_module() -> None:
    written = policy(save("matmul", module="mlp.**"), save("attention", layers={"first": 1}), save("aten.bmm"))
    with pytest.raises(ConfigError) as caught:
        sac.context_fn(written)
    assert str(caught.value) == (
        'policy.rules[0].module: rule "rule-0" matches by module, and sac.context_fn was given no module\n'
        "    fix: pass the block that is checkpointed: sac.context_fn(policy, module=block)\n"
        'policy.rules[1].layers: rule "rule-1" matches by layers, and sac.context_fn was given no module\n'
        "    fix: pass the block that is checkpointed: sac.context_fn(policy, module=block)"
    )


def test_rules_on_blocks_need_the_model() -> None:
    written = policy(
        save("matmul", blocks="encoder.*", layers={"first": 1}), save("attention"), save("aten.bmm", blocks=["a", "b"])
    )
    told = (
        'policy.rules[0].blocks: rule "rule-0" matches blocks, and sac.context_fn does not know where in the model a '
        "block is\n    fix: use sac.apply on the whole model\n"
        'policy.rules[2].blocks: rule "rule-2" matches blocks, and sac.context_fn does not know where in the model a '
        "block is\n    fix: use sac.apply on the whole model"
    )
    with pytest.raises(ConfigError) as caught:
        sac.context_fn(written)
    assert str(caught.value) == told
    block = llama_stack().blocks[0]
    with pytest.raises(ModelError) as refused:
        sac.context_fn(written, module=block)
    assert str(refused.value) == told
    assert not any("forward" in vars(module) for module in block.modules())


def test_block_that_does_not_tell_its_layer() -> None:
    with pytest.raises(ModelError) as caught:
        sac.context_fn(policy(save("matmul", layers={"first": 1})), module=llama_stack().blocks[0])
    assert str(caught.value) == (
        'policy.rules[0].layers: rule "rule-0" selects layers, but LlamaLikeBlock has no attribute with its number: '
        "layer_idx, layer_id, layer_number, layer_index\n    fix: use sac.apply on the whole model"
    )


def test_last_layers_cannot_be_told_from_one_block() -> None:
    block = tiny("llama")[0].model.layers[0]
    with pytest.raises(ModelError) as caught:
        sac.context_fn(policy(save("matmul", layers={"last": 1})), module=block)
    assert str(caught.value) == (
        'policy.rules[0].layers: rule "rule-0" counts from the last layer, but LlamaDecoderLayer does not say how '
        "many layers there are\n    fix: use sac.apply on the whole model"
    )


def test_refused_block_is_as_it_was() -> None:
    block = tiny("llama")[0].model.layers[0]
    with pytest.raises(ModelError):
        sac.context_fn(policy(save("matmul", layers={"last": 1})), module=block)
    assert not any("forward" in vars(module) for module in block.modules())


def test_layers_of_blocks_that_tell_theirs() -> None:
    written = policy(save("matmul", layers=["1"]))
    for layer, again in ((0, 6), (1, 0)):
        model = built(llama_stack)
        block = model.blocks[layer]
        block.layer_idx = layer
        call = _Checkpointed(block, sac.context_fn(written, module=block))
        assert backward_ops(call, tokens()).ops["aten.mm.default"] == 14 + again


class _Checkpointed(nn.Module):
    """One block under torch's checkpoint."""

    def __init__(self, block: nn.Module, contexts: Any) -> None:
        super().__init__()
        self.block, self.contexts = block, contexts

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False, context_fn=self.contexts)


def test_unknown_policy() -> None:
    with pytest.raises(PolicyError) as caught:
        sac.context_fn("lama")
    assert str(caught.value).startswith('policy: no shipped policy is called "lama"\n    did you mean: llama\n')


def test_offloading_is_refused() -> None:
    with pytest.raises(PolicyError) as caught:
        sac.context_fn(policy({"ops": "matmul", "do": "offload"}, default="offload"))
    assert str(caught.value) == (
        'policy.rules[0].do: rule "rule-0" offloads, but torch.utils.checkpoint keeps nothing in host memory\n'
        "    legal: save, recompute, alternate\n"
        "    fix: use sac.apply on the whole model, or save\n"
        "policy.default: the default offloads, but torch.utils.checkpoint keeps nothing in host memory\n"
        "    legal: save, recompute\n"
        "    fix: use sac.apply on the whole model, or save"
    )


def test_result_pickles() -> None:
    contexts = pickle.loads(pickle.dumps(sac.context_fn("general")))
    (x,) = tokens()
    block = built(llama_stack).blocks[0]
    checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_module_can_be_given_back() -> None:
    block = built(llama_stack).blocks[0]
    sac.context_fn(policy(save("matmul", module="mlp.**")), module=block)
    assert any("forward" in vars(module) for module in block.modules())
    sac.remove(block)
    assert not any("forward" in vars(module) for module in block.modules())


def test_module_may_be_given_twice() -> None:
    block = built(llama_stack).blocks[0]
    sac.context_fn(policy(save("attention")), module=block)
    contexts = sac.context_fn(policy(save("matmul")), module=block)
    assert backward_ops(_Checkpointed(block, contexts), tokens()).ops["aten.mm.default"] == 14


@pytest.mark.parametrize("entry", ["context_fn", "context_fn with module"])
def test_training_with_dropout(entry: str) -> None:
    value = selective(policy(save("attention"), alternate("matmul")))
    assert_same_training(lambda: with_dropout(llama_stack()), value, entry=entry, steps=3)


def test_forward_without_grad() -> None:
    model = install(built(llama_stack), selective(policy(save("matmul"))), "context_fn")
    x = tokens()
    with torch.no_grad():
        assert torch.equal(model(*x), built(llama_stack)(*x))


def test_one_function_serves_many_blocks() -> None:
    contexts = sac.context_fn(policy(alternate("matmul")))
    model = built(llama_stack)
    model.context_fns = [contexts] * 2
    assert_same(train(built(llama_stack), steps=2), train(model, steps=2))
