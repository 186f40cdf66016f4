"""Published architectures, small: training, evaluation, generation, files, copies and caches are what they were.

The oracle is the same model with its cache off, as training is meant to be: GPT-2 and T5 round differently with it on,
since the cache lays keys and values out anew.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from sac.policy.load import shipped_policies
from tests.stacks.composition import Outcome, differences, forward_done, outcome, train
from tests.support.blocks import alternate, policy
from tests.support.model_zoo import FAMILIES, tiny
from tests.support.pairs import in_turn
from tests.support.recording import Recorder, without_collector
from tests.support.training import assert_same, descend, state_after

transformers = pytest.importorskip("transformers", reason="models of Hugging Face")

QUICK = [
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
]
ALL = [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES]
quiet = pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")


def stepped(model: nn.Module, inputs: dict[str, Any], steps: int = 2) -> dict[str, Tensor]:
    """What some steps of training show; dropout is drawn from the same seed."""
    torch.manual_seed(3)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        loss = model(**inputs).loss
        loss.backward()
        seen |= state_after(step, model, loss.detach(), "cpu")
        descend(model, 0.05)
    return seen


@functools.cache
def without_us(family: str) -> dict[str, Tensor]:
    plain, inputs = tiny(family, dropout=0.1)
    turn_off_cache(plain)
    return stepped(plain, inputs)


@quiet
@pytest.mark.parametrize("value", ["full", "selective"])
@pytest.mark.parametrize("family", ALL)
def test_training_is_that_without_checkpointing(family: str, value: str) -> None:
    model, inputs = tiny(family, dropout=0.1)
    sac.apply(model, value)
    assert any(True for _ in regions_of(model))
    assert_same(without_us(family), stepped(model, inputs))


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
def test_a_copy_is_a_model_of_its_own(family: str, value: str) -> None:
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
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**tiny("llama")[1]).loss

    plain, *ours = (
        train(sac.apply(tiny("llama", attention_dropout=0.1)[0], value), loss)
        for value in ("none", "full", "selective")
    )
    assert [differences(one, plain) for one in ours] == [[], []]


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("llama", "self_attn"),  # returns a tuple
        ("qwen3_moe", "mlp"),
        ("mixtral", "mlp.experts"),
        ("gpt2", "{attn,mlp}"),
        ("bert", "attention"),
    ],
)
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


# -- Twenty steps: the same losses in every mode, and no memory gathers

VALUES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "full, parts of blocks": {"mode": "full", "granularity": "submodule"},
    "full, one layer": {"mode": "full", "layers": {"last": 1}},
    **{name: name for name in shipped_policies()},
}


def twenty_steps(value: Any, recorder: Recorder | None = None) -> tuple[list[float], list[int]]:
    """Train with AdamW; return the loss of each step, and the bytes that live between steps."""
    model, inputs = tiny("llama", attention_dropout=0.1, attn_implementation="eager")
    sac.apply(model, value)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, living = [], []
    for _ in range(20):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        del loss
        living += [recorder.live_bytes()] if recorder else []
    return losses, living


@functools.cache
def reference_losses() -> tuple[float, ...]:
    losses = tuple(twenty_steps("none")[0])
    assert losses[-1] < 0.7 * losses[0]  # it learns
    return losses


@quiet  # rules of other families' policies find no place
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_losses_are_those_without_checkpointing(value: Any) -> None:
    assert twenty_steps(value)[0] == list(reference_losses())


@pytest.mark.parametrize("value", ["none", "full", "selective"])
def test_living_bytes_do_not_grow(value: str) -> None:
    recorder = Recorder()
    with without_collector(), recorder:
        losses, living = twenty_steps(value, recorder)
    assert losses == list(reference_losses())
    assert len(set(living[3:])) == 1, living  # by then all that is learnt in first steps is known


# -- Keys and values in a cache. Dynamic and sliding layers, states of a fixed size, both together, a cache for encoder
# and decoder, latent attention.

CACHING = ("llama", "gemma2", "gpt2", "t5", "mamba", "falcon_h1", "deepseek_v3")
Loss = Callable[[Any, dict[str, Any]], Tensor]


def asked_for(model: Any, batch: dict[str, Any]) -> Tensor:
    output = model(**batch, use_cache=True)
    assert (output.get("past_key_values") or output.get("cache_params")) is not None
    return output.loss


def two_forwards(model: Any, batch: dict[str, Any], *, static: bool) -> Tensor:
    """The second half of a text attends to the first through the cache; both are in one loss."""
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=16)
        if static
        else transformers.DynamicCache(config=model.config)
    )
    return sum(
        model(input_ids=half, labels=half, past_key_values=cache, use_cache=True).loss
        for half in batch["input_ids"].split(6, dim=1)
    )


def trained_prefix(model: Any, batch: dict[str, Any]) -> Tensor:
    """As in prefix tuning: it is read through the cache, and no argument of the region."""
    if not hasattr(model, "prefix"):  # a child, so that its gradients are compared too
        torch.manual_seed(5)
        shape = (2, model.config.num_key_value_heads, 3, model.config.head_dim)
        model.prefix = nn.ParameterList(nn.Parameter(torch.randn(shape)) for _ in range(4))
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(model.prefix[2 * layer], model.prefix[2 * layer + 1], layer)
    return model(**batch, past_key_values=cache).loss


def turned_on_after_apply(model: Any, batch: dict[str, Any]) -> Tensor:
    """As a Trainer does whose arguments say `use_cache=True`."""
    model.config.use_cache = True
    return model(**batch).loss


def generating_before(model: Any, batch: dict[str, Any]) -> Tensor:
    turn_off_cache(model)  # T5 rounds differently with it on
    written = model.eval().generate(input_ids=batch["input_ids"], max_new_tokens=4, do_sample=False)
    return model.train()(**batch).loss + written.float().mean()


STATIC, DYNAMIC = (functools.partial(two_forwards, static=static) for static in (True, False))


@pytest.mark.parametrize(
    ("loss", "family", "values"),
    [
        *((asked_for, family, (value,)) for value, family in in_turn(CACHING, [("full",), ("selective",)])),
        *((asked_for, family, ("full",)) for family in ("gemma3n", "gemma4")),
        (trained_prefix, "llama", ("full", "selective", {"mode": "full", "use_reentrant": True})),
        (STATIC, "llama", ("full", "selective")),
        (DYNAMIC, "gemma2", ("full", "selective")),
        (STATIC, "gemma2", ("full", "selective")),
        (turned_on_after_apply, "llama", ("selective",)),
        (generating_before, "llama", ("full", "selective")),
        (generating_before, "t5", ("full", "selective")),
    ],
)
def test_caches(loss: Loss, family: str, values: tuple[Any, ...]) -> None:
    def trained(value: Any) -> Outcome:
        model, batch = tiny(family, dropout=0.1)
        return train(sac.apply(model, value), lambda model: loss(model, batch))

    plain = trained("none")
    assert loss is not trained_prefix or any("prefix.0" in name for name in plain.gradients)
    for value in values:
        ours = trained(value)
        assert differences(ours, plain) == []
        assert ours.flops > plain.flops or loss is turned_on_after_apply


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

ALTERNATE = policy(alternate("matmul"))
MODES: dict[str, Any] = {
    "full": "full",
    "full, inputs on the host": {"mode": "full", "store": "host"},
    "selective": "selective",
    "rerun": {"mode": "selective", "policy": ALTERNATE, "engine": "rerun"},
    "auto": {"mode": "selective", "policy": ALTERNATE},
    "replay": {"mode": "selective", "policy": ALTERNATE, "engine": "replay"},
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


def test_what_was_shared_is_afterwards_what_it_was() -> None:
    model, batch = tiny("gemma4")
    sac.apply(model, "full")
    shared = transformers.cache_utils.KVSharingDict()
    loss = model(**batch, shared_kv_states=shared).loss
    before = {name: tuple(held) for name, held in shared.items()}
    copies = [one.detach().clone() for held in before.values() for one in held]
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    loss.backward()
    assert before.keys() == shared.keys() == {"sliding_attention", "full_attention"}
    after = [one for held in shared.values() for one in held]
    assert all(one is other for one, other in zip(after, (x for held in before.values() for x in held), strict=True))
    assert all(map(torch.equal, after, copies))
    assert all(map(torch.equal, first, (one.grad for one in model.parameters() if one.grad is not None)))
