"""NeMo Automodel's functions, one import line changed: what its parallelizer does with them, and what each returns."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, noop_context_fn

import sac
from sac.blocks.find import find_blocks
from sac.blocks.install import InstalledForward, ours_on, regions_of
from sac.compat import nemo
from sac.errors import ConfigError, ModelError, SacWarning
from tests.support.layers import stack
from tests.support.model_zoo import tiny
from tests.support.recording import Recorder
from tests.support.training import assert_same
from tests.unit.compat.programs import gradients_of


def step(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The loss, all gradients and the random state after one step."""
    torch.manual_seed(0)
    found = gradients_of(model(**inputs).loss if isinstance(inputs, dict) else model(*inputs).square().sum(), model)
    model.zero_grad()
    return found


def assert_same_step(model: nn.Module, plain: nn.Module, inputs: Any) -> None:
    expected = step(plain, inputs)
    for _ in range(2):
        assert_same(expected, step(model, inputs))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [block.module for block in find_blocks(model)]


def region_paths(model: nn.Module) -> list[str]:
    return [installed.region.path for installed in regions_of(model)]


def policies(model: nn.Module) -> set[str]:
    return {installed.region.group.table.policy.name for installed in regions_of(model)}


def parallelize(model: nn.Module, value: Any) -> None:
    """What NeMo's parallelizer does when activation checkpointing is asked for."""
    is_shared = nemo.detect_kv_sharing_and_maybe_disable_cache(model)
    layers = layers_of(model)
    if nemo.is_selective_activation_checkpointing(value):
        nemo.apply_selective_checkpointing_to_layers(model, layers, is_shared, enable_compile=False)
    else:
        nemo.apply_submodule_checkpointing(layers, is_shared)


@pytest.mark.parametrize("value", ["selective", "SELECTIVE", "full", "true", True, None, {"mode": "selective"}])
def test_only_the_word_is_selective(value: Any) -> None:
    assert nemo.is_selective_activation_checkpointing(value) is (str(value).lower() == "selective")


@pytest.mark.parametrize("value", ["selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3n", "gemma4"])
@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
def test_training_is_that_without(family: str, value: Any) -> None:
    model, inputs = tiny(family)
    plain = copy.deepcopy(model)
    parallelize(model, value)
    assert region_paths(model)
    assert_same_step(model, plain, inputs)


def test_layers_or_their_parts_are_regions() -> None:
    model, _ = tiny("llama")
    parallelize(model, "selective")
    assert region_paths(model) == ["model.layers.0", "model.layers.1"]
    assert policies(model) == {"llama"}  # that of the family
    assert not model.config.use_cache
    sac.remove(model)
    parallelize(model, "full")
    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    assert region_paths(model) == [f"{place}.{part}" for place in range(2) for part in parts]


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_attention_that_shares_keys_and_values_is_left_alone(family: str) -> None:
    model, _ = tiny(family)
    assert nemo.detect_kv_sharing_and_maybe_disable_cache(model)
    assert model.config.get_text_config().use_cache
    with pytest.warns(SacWarning, match="share keys and values, so that attention cannot be recomputed"):
        nemo.apply_selective_checkpointing_to_layers(model, layers_of(model), True)
    on = {name for name, one in model.named_modules() if isinstance(ours_on(one), InstalledForward)}
    assert "model.layers.0.mlp" in on
    assert not any("self_attn" in name for name in on)


def test_layers_that_are_checkpointed_already_are_refused() -> None:
    regions, wrapped = stack(2), stack(2)
    nemo.apply_selective_checkpointing_to_layers(regions, [regions[1]], False)
    wrapped[0].up = checkpoint_wrapper(wrapped[0].up)
    for model, text in ((regions, "1: sac is on this module"), (wrapped, "the model's own checkpointing is on")):
        before = region_paths(model)
        with pytest.raises(ModelError, match=text):
            nemo.apply_selective_checkpointing_to_layers(model, list(model), False)
        assert region_paths(model) == before


def test_layers_that_nemo_has_flagged_are_left_alone() -> None:
    model = stack(2)
    model[0]._nemo_disable_activation_checkpointing = True
    nemo.apply_selective_checkpointing_to_layers(model, list(model), has_kv_sharing=False)
    assert [kind.count for kind in sac.report(model).kinds] == [1]
    assert not isinstance(ours_on(model[0]), InstalledForward)


FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
PRODUCTS = {"schema": "sac/v1", "name": "products", "rules": [{"id": "products", "ops": "matmul", "do": "save"}]}
TE = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"


def test_whole_layers_are_regions_that_are_recomputed_as_a_whole() -> None:
    model = stack(3)
    plain = copy.deepcopy(model)
    nemo.apply_full_layer_checkpointing_to_layers(model, list(model))
    assert region_paths(model) == ["0", "1", "2"]
    assert policies(model) == {"full"}
    assert_same_step(model, plain, (torch.randn(2, 8, 32),))


def test_a_wrapper_is_taken_off() -> None:
    inner = nn.Linear(2, 2)
    for one in (inner, checkpoint_wrapper(inner)):
        assert nemo.unwrap_checkpoint_wrapper(one) is inner


def snapshot_of(inner: Any) -> Callable[[], Any]:
    return partial(nemo.transformer_engine_attention_backend_snapshot_context_fn, inner)


@pytest.mark.parametrize(
    ("context_fn", "policy"),
    [
        (None, "full"),
        (noop_context_fn, "full"),
        (nemo.transformer_engine_attention_backend_snapshot_context_fn, "full"),
        (snapshot_of(nemo.sdpa_backend_snapshot_context_fn), "full"),
        (nemo.make_selective_checkpoint_context_fn(), "general"),
        (snapshot_of(nemo.make_selective_checkpoint_context_fn()), "general"),
        (sac.context_fn(PRODUCTS), "products"),
    ],
)
def test_parts_take_the_context_functions(context_fn: Any, policy: str) -> None:
    model = stack(1)
    plain = copy.deepcopy(model)
    nemo.apply_submodule_checkpointing(list(model), False, context_fn=context_fn)
    assert policies(model) == {policy}
    assert_same_step(model, plain, (torch.randn(2, 8, 32),))


def test_contexts_of_the_callers_own_are_refused() -> None:
    def mine() -> Any:
        return noop_context_fn()

    model = stack(1)
    with pytest.raises(ConfigError, match=r"context_fn: .* makes its own contexts .*\n.*fix: choose per op with"):
        nemo.apply_submodule_checkpointing(list(model), False, context_fn=snapshot_of(mine))
    assert region_paths(model) == []


def test_attention_runs_again_under_the_backends_of_the_forward() -> None:
    context_fn = snapshot_of(nemo.sdpa_backend_snapshot_context_fn)
    x = torch.linspace(-1, 1, 2 * 2 * 8 * 16).view(2, 2, 8, 16).requires_grad_()
    with sdpa_kernel([SDPBackend.MATH]):
        attended = partial(checkpoint, use_reentrant=False, context_fn=context_fn, determinism_check="none")
        out = attended(lambda one: scaled_dot_product_attention(one, one, one).sin(), x)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), Recorder() as backward:
        out.sum().backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    assert backward.count(FLASH) == 0


@pytest.mark.parametrize(
    "run",
    [partial(checkpoint, use_reentrant=False, context_fn=snapshot_of(None)), sac.checkpoint],
    ids=["torch", "sac"],
)
def test_the_choice_of_transformer_engine_is_that_of_the_forward(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = types.ModuleType(TE)  # which holds what was chosen last
    choices: dict[str, Any] = {"attention_params": None, "use_flash_attention": None}
    engine._attention_backends = choices
    monkeypatch.setitem(sys.modules, TE, engine)

    def chooses(x: Tensor) -> Tensor:
        """Chooses on its first call, and saves more for backward in that call."""
        if choices["attention_params"] is None:
            choices["attention_params"] = torch.ones(2)  # not to be compared with ==
            x = x.sin().cos()
        return x.exp().exp()

    found = []
    for call in (lambda function, x: function(x), run):
        choices["attention_params"] = None
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            call(chooses, x).sum().backward()
            found.append(x.grad)
        assert choices["attention_params"] is not None  # as the program left it
    assert torch.equal(torch.stack(found[:2]), torch.stack(found[2:]))


def test_ops_are_ignored_but_for_those_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = set(torch.utils.checkpoint.SAC_IGNORED_OPS)
    monkeypatch.setattr(torch.utils.checkpoint, "SAC_IGNORED_OPS", ignored)
    before = set(ignored)
    nemo.ignore_sac_ops([torch.ops.aten.sin.default, None])
    assert ignored - before == {torch.ops.aten.sin.default}
