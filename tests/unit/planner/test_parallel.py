"""Plans for a rank of tensor parallelism, with a divided sequence, FSDP2, and for a pipeline stage: as real ranks."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import sac
from sac.errors import PlanError
from sac.memory_timeline import measure_memory
from sac.planner.by_hand import SELECTIVE
from sac.planner.choices import policy_for
from sac.planner.parallel import Experts, Stage, parallelized, ranks_of, sent, stage_of, tensor_parallel
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.sharding import fake_ranks
from sac.planner.step import Sends
from sac.planner.write_policy import by_hand
from sac.policy.model import Policy
from tests.support.model_zoo import tiny
from tests.support.pairs import in_pairs
from tests.support.prompt_collectives import prompt_collectives
from tests.support.ranks import run_ranks
from tests.unit.planner.plan_models import Stack
from tests.unit.planner.truth import put_on

Layout = tuple[int | None, int | None, bool]  # ranks of FSDP, of tensor parallelism, whether the sequence is divided
LAYOUTS: dict[str, Layout] = {
    "tp": (None, 2, False),
    "tp, sp": (None, 2, True),
    "fsdp, tp": (2, 2, False),
    "fsdp, tp, sp": (2, 2, True),
}
NONE, LEAST, THIRD = "none", "least", "a third of what can be saved"


def _model(family: str = "llama", **changes: Any) -> nn.Module:
    model, _ = tiny(family, **{"num_hidden_layers": 4, **changes})
    model.config.use_cache = False
    return model


def _tokens() -> dict[str, Tensor]:
    ids = torch.arange(64).reshape(2, 32) % 60
    return {"input_ids": ids, "labels": ids}


def _parallelized(layout: Layout) -> Callable[[nn.Module], None]:
    return parallelized(*layout[:2], sequence=layout[2])


def _least(step: Callable[[], object], model: nn.Module) -> int:
    """The peak of a step, at its best of some: what FSDP2 and stages send may be held a little longer, or not."""
    peaks = []
    for number in range(4):
        with prompt_collectives():
            peak = measure_memory(step).peak_bytes
        model.zero_grad(set_to_none=True)
        time.sleep(0.05)
        if number:  # the first step is recorded
            peaks.append(peak)
    return min(peaks)


def _of_rank(family: str, layout: Layout, changes: dict[str, Any], config: Any) -> int:
    model, inputs = _model(family, **changes), _tokens()
    _parallelized(layout)(model)
    if config is not None:
        sac.apply(model, config)
    return _least(lambda: model(**inputs).loss.backward(), model)


def _policy(planner: Planner, choice: tuple[int, ...]) -> Policy:
    return policy_for(planner.profiles, planner.choices, planner.groups, planner.step.paths, choice, "planned")


def _planned(planner: Planner, policy: str) -> tuple[int, Any]:
    """Return the peak of a step that the planner ran, above what was there before, and the config for a real one."""
    static = planner.run(planner.without_checkpointing).static
    if policy == SELECTIVE:
        return by_hand(planner, SELECTIVE).peak - static, {"mode": "selective", "verify": "never"}
    share = {NONE: -1, LEAST: 0, THIRD: 1 / 3}[policy]
    choice = planner.everywhere(lambda group: round(share * len(planner.choices[group])))
    if policy == NONE:
        choice = planner.without_checkpointing
    planner.run(choice)
    peak = planner.point("", choice).peak - static
    return peak, None if policy == NONE else put_on(_policy(planner, choice))


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are enough here; no steps are needed to measure each."""
    monkeypatch.setattr(Planner, "measure", lambda self: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_peak_of_a_rank_is_what_was_predicted(name: str) -> None:
    layout = LAYOUTS[name]
    ranks = ranks_of(*layout[:2])
    changes = {"tie_word_embeddings": name == "tp"}
    with fake_ranks(ranks):
        planner = prepare(_model(**changes), _tokens(), parallelize=_parallelized(layout))
        policies = (NONE, LEAST, SELECTIVE, THIRD) if name == "tp, sp" else (NONE, LEAST)
        planned = [_planned(planner, policy) for policy in policies]
    for said, config in planned:
        assert min(run_ranks(ranks, _of_rank, "llama", layout, changes, config)) == said
    assert planned[1][0] < planned[0][0]


# Over a process group that sends nothing, a step with data takes as much as on real ranks, in a fraction of the time.


@in_pairs(family=("llama", "qwen3", "gemma3"), layout=LAYOUTS, policy=(LEAST, SELECTIVE, THIRD))
@pytest.mark.slow
def test_the_peak_with_data_is_what_was_predicted(family: str, layout: Layout, policy: str) -> None:
    with fake_ranks(ranks_of(*layout[:2])):
        planner = prepare(_model(family), _tokens(), parallelize=_parallelized(layout))
        said, config = _planned(planner, policy)
    with fake_ranks(ranks_of(*layout[:2])):
        assert _of_rank(family, layout, {}, config) == said


def test_the_peak_of_a_long_sequence_is_that_of_the_second_step() -> None:
    """It is in the forward of a layer, which takes less in the first step: see Note [Steps before the step]."""
    ids = torch.arange(320).reshape(2, 160) % 60
    inputs, layout, changes = {"input_ids": ids, "labels": ids}, LAYOUTS["tp, sp"], {"num_hidden_layers": 2}
    with fake_ranks(2):
        planner = prepare(_model(**changes), inputs, parallelize=_parallelized(layout))
        said, config = _planned(planner, LEAST)
    with fake_ranks(2):
        model = _model(**changes)
        _parallelized(layout)(model)
        sac.apply(model, config)
        assert _least(lambda: model(**inputs).loss.backward(), model) == said


@pytest.mark.parametrize("sequence", [False, True])
def test_a_rank_of_two_has_half_of_the_flops_of_each_op(sequence: bool) -> None:
    def flops(planner: Planner) -> dict[Any, int]:
        entries = [one for profile in planner.profiles for one in profile.entries]
        return {(one.module, one.op, one.call): one.flops for one in entries if one.flops}

    whole = flops(prepare(_model(num_hidden_layers=1), _tokens()))
    with fake_ranks(2):
        layout = (None, 2, sequence)
        shared = flops(prepare(_model(num_hidden_layers=1), _tokens(), parallelize=_parallelized(layout)))
    assert shared == {key: count // 2 for key, count in whole.items()}


def _as_dtensors(kind: str) -> Callable[[nn.Module], None]:
    """Return a function that makes all values in the layers of a `_Dense` DTensors, which torch redistributes."""

    def parallelize(model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (2,))
        placed = Shard(1) if kind == "sequence" else Replicate()

        def share(name: str, module: nn.Module, mesh: Any) -> None:
            for key, whole in [*module.named_parameters(recurse=False)]:
                is_split = kind == "columns" and whole.dim() == 2
                placement = Shard(0) if is_split else Replicate()
                setattr(module, key, nn.Parameter(distribute_tensor(whole, mesh, [placement])))

        layers: nn.Module = model.layers  # type: ignore[assignment]
        distribute_module(layers, mesh, share)
        first, last = model.layers[0], model.layers[-1]  # type: ignore[index]
        first.register_forward_pre_hook(
            lambda module, args: DTensor.from_local(args[0], mesh, [Replicate()]).redistribute(placements=[placed])
        )
        last.register_forward_hook(lambda module, args, out: out.full_tensor())

    return parallelize


class _DenseLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate, self.up, self.skip = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.relu(self.gate(y)) * self.up(y) + self.skip(y)  # gradients of x and y are sums


class _Dense(Stack):
    def make(self) -> nn.Module:
        return _DenseLayer()


@pytest.mark.parametrize("kind", ["sequence", "columns", "copies"])
def test_the_peak_of_layers_of_dtensors_is_what_was_predicted(kind: str) -> None:
    x = torch.randn(4, 16, 32)
    with fake_ranks(2):
        planner = prepare(_Dense(), (x,), parallelize=_as_dtensors(kind))
        planned = [_planned(planner, policy) for policy in (NONE, LEAST, THIRD)]
    for said, config in planned:
        with fake_ranks(2):
            model = _Dense()
            _as_dtensors(kind)(model)
            if config is not None:
                sac.apply(model, config)
            assert _least(lambda model=model: model(x).backward(), model) == said


# -- Expert parallelism


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def test_fsdp_warns_of_no_views_in_each_step() -> None:
    with fake_ranks(4), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        planner = prepare(_model(num_hidden_layers=2), _tokens(), parallelize=parallelized(2, 2))
        planner.run(planner.everywhere(lambda group: 0))
    assert not [one for one in told if "view tensor" in str(one.message)]


def _of_rank_with_experts(
    family: str, fsdp: int | None, policies: list[Policy | None], tokens: int | None
) -> tuple[list[int], int]:
    """Return the peaks of this rank, one per policy, and the most tokens that an expert gets.

    With ``tokens``, the router sends as many to each, whatever it has found.
    """
    peaks, counts, inputs = [], [], _tokens()
    for policy in policies:
        model = _model(family, num_hidden_layers=2)
        parallelized(fsdp, None, experts=Experts(2))(model)
        for module in _experts(model):

            def routed(experts: nn.Module, args: Any) -> Any:
                hidden, index, weights = args
                if tokens is not None:
                    index = torch.arange(index.numel()).view_as(index) % (2 * experts.num_experts)
                counts.append(int(2 * torch.bincount(index.flatten()).max()))  # both ranks have the same inputs
                return hidden, index, weights

            module.register_forward_pre_hook(routed)
        if policy is not None:
            sac.apply(model, put_on(policy))
        peaks.append(_least(lambda model=model: model(**inputs).loss.backward(), model))
    return peaks, max(counts)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "fsdp"), [("mixtral", None), ("qwen3_moe", 2), ("deepseek_v3", None)])
def test_the_peak_of_a_rank_with_some_experts_is_at_most_what_was_predicted(family: str, fsdp: int | None) -> None:
    def planned(tokens: int) -> tuple[Planner, list[int]]:
        with fake_ranks(2):
            planner = prepare(
                _model(family, num_hidden_layers=2),
                _tokens(),
                parallelize=parallelized(fsdp, None, experts=Experts(2, tokens)),
            )
            choices = planner.without_checkpointing, planner.everywhere(lambda group: 0)
            return planner, [planner.run(choice).peak - planner.step.static for choice in choices]

    model = _model(family, num_hidden_layers=2)
    even = 2 * 64 * model.config.num_experts_per_tok // _experts(model)[0].num_experts
    planner, said = planned(even)
    policies = [None, _policy(planner, planner.everywhere(lambda group: 0))]
    for tokens in (even, None):
        found = run_ranks(2, _of_rank_with_experts, family, fsdp, policies, tokens)
        most = max(count for _, count in found)
        expected = said if tokens is not None else planned(most)[1]
        if tokens is not None:  # this test makes indices of its own, in each layer
            expected = [one + 2 * 64 * model.config.num_experts_per_tok * 8 for one in expected]
        for peaks, _ in found:
            assert all(real <= predicted for real, predicted in zip(peaks, expected, strict=True))
        if tokens is not None:
            assert most == even
            assert all(real >= 0.95 * predicted for real, predicted in zip(found[0][0], expected, strict=True))


@pytest.mark.parametrize(
    ("family", "experts", "text"),
    [
        (
            "llama",
            Experts(2, 64),
            "--ep: LlamaForCausalLM has no experts whose division it declares (`ep_plan`)\n"
            "    legal: mixtures of experts of Hugging Face",
        ),
        ("mixtral", Experts(3, 64), "--ep: 3 ranks do not divide 4 experts"),
        (
            "mixtral",
            Experts(2, 63),
            "--tokens-per-expert: divided evenly, each expert gets 64 tokens, but at most 63 are allowed\n"
            "    legal: 64 or more",
        ),
    ],
)
def test_experts_that_cannot_be_divided(family: str, experts: Experts, text: str) -> None:
    with fake_ranks(experts.ranks), pytest.raises(PlanError) as error:
        prepare(_model(family, num_hidden_layers=2), _tokens(), parallelize=parallelized(None, None, experts=experts))
    assert str(error.value) == text


def test_experts_are_checked_before_any_is_divided() -> None:
    model = _model("mixtral", num_hidden_layers=3)
    first, *others = _experts(model)
    for count, one in zip((3, 5), others, strict=True):
        one.num_experts = count
    before = [(name, one.shape) for name, one in model.named_parameters()]
    with fake_ranks(2), pytest.raises(PlanError) as error:
        parallelized(None, None, experts=Experts(2, 64))(model)
    assert str(error.value) == "--ep: 2 ranks do not divide 3 experts\n--ep: 2 ranks do not divide 5 experts"
    assert [(name, one.shape) for name, one in model.named_parameters()] == before
    assert first.num_experts == 4


# -- Pipeline stages

MICRO_BATCHES = 4


def _on_two_stages(configs: list[Any], tp: int | None, sequence: bool) -> int:
    """Run a pipeline of two stages under 1F1B, and return the peak of this rank's stage above what was there before."""
    rank, ranks = dist.get_rank(), tp or 1
    stage = Stage(rank // ranks + 1, 2)

    def parallelize(model: nn.Module) -> None:
        if tp is not None:
            mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("pp", "tp"))["tp"]
            tensor_parallel(model, mesh, sequence=sequence)

    return _of_stage(stage, parallelize, configs[stage.number - 1], (rank + ranks) % (2 * ranks))


def _of_stage(stage: Stage, parallelize: Callable[[nn.Module], None], config: Any, other: int) -> int:
    """Run a stage, which sends to rank ``other`` and receives from it, and return its peak."""
    model = _model()
    given = stage_of(model, _tokens(), stage)
    parallelize(model)
    if config is not None:
        sac.apply(model, config)
    sends: list[Any] = []

    def forward() -> tuple[Tensor | None, Tensor]:
        if stage.is_first:
            hidden = sent(model(**given))
            sends.append(dist.isend(hidden.detach(), other))  # sending at once, both stages would wait for each other
            return None, hidden
        received = torch.empty_like(given["inputs_embeds"])
        dist.recv(received, other)
        received.requires_grad_()
        return received, model(**{**given, "inputs_embeds": received}).loss

    def backward(received: Tensor | None, result: Tensor) -> None:
        if stage.is_first:
            gradient = torch.empty_like(result)
            dist.recv(gradient, other)
            sends.pop(0).wait()
            result.backward(gradient)
        else:
            result.backward()
            assert received is not None
            assert received.grad is not None
            dist.send(received.grad, other)

    def step() -> None:
        flying = [forward() for _ in range(stage.in_flight - 1)]
        for _ in range(MICRO_BATCHES - stage.in_flight + 1):
            flying.append(forward())
            backward(*flying.pop(0))
        while flying:
            backward(*flying.pop(0))

    if not stage.is_first:
        given["inputs_embeds"] = given["inputs_embeds"].detach()
    return _least(step, model)


def _planned_stage(stage: Stage, layout: Layout, policies: tuple[str, ...]) -> list[tuple[int, Any]]:
    model = _model()
    inputs = stage_of(model, _tokens(), stage)
    ranks = ranks_of(*layout[:2])
    with fake_ranks(ranks) if ranks > 1 else nullcontext():
        planner = prepare(
            model,
            inputs,
            loss_fn=None if stage.is_last else Sends(sent),
            parallelize=_parallelized(layout) if ranks > 1 else None,
            in_flight=stage.in_flight,
            accumulates=True,
        )
        found = [_planned(planner, policy) for policy in policies]
        # In a real stage, gradients and what is received do not exist before the step.
        first = replace(planner, accumulates=False, step=copy.deepcopy(planner.step), records={})
        of_step = planner.step.received + planner.step.static - first.run(planner.without_checkpointing).static
    return [(peak + of_step, config) for peak, config in found]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(None, None, False), LAYOUTS["tp"], LAYOUTS["tp, sp"]], ids=["", "tp", "tp, sp"])
def test_the_peak_of_a_pipeline_stage_is_what_was_predicted(layout: Layout) -> None:
    policies, ranks = (NONE, LEAST, THIRD), ranks_of(*layout[:2])
    stages = [_planned_stage(Stage(number, 2), layout, policies) for number in (1, 2)]
    for (first, first_config), (second, second_config) in zip(*stages, strict=True):
        real = run_ranks(2 * ranks, _on_two_stages, [first_config, second_config], *layout[1:])
        assert (min(real[:ranks]), min(real[ranks:])) == (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_the_peak_of_a_stage_that_fsdp_shards_is_what_was_predicted(number: int) -> None:
    layout, stage = LAYOUTS["fsdp, tp, sp"], Stage(number, 2)
    for said, config in _planned_stage(stage, layout, (NONE, LEAST)):
        with fake_ranks(ranks_of(*layout[:2])):
            assert _of_stage(stage, _parallelized(layout), config, 1) == said


def test_stages_have_every_layer_once_and_only_the_ends_have_embedding_and_head() -> None:
    layers, ends = [], []
    for number in (1, 2, 3):
        model = _model(num_hidden_layers=7)
        inputs = stage_of(model, _tokens(), Stage(number, 3))
        layers.append(len(model.model.layers))
        names = {name.rpartition(".")[0] for name, _ in model.named_parameters() if "layers" not in name}
        ends.append((sorted(names), sorted(inputs)))
    assert layers == [2, 2, 3]
    assert ends == [
        (["model.embed_tokens"], ["input_ids"]),
        ([], ["inputs_embeds"]),
        (["lm_head", "model.norm"], ["inputs_embeds", "labels"]),
    ]


def test_layers_of_two_kinds_keep_their_kinds_in_a_stage() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    model = _model("gemma3", layer_types=kinds)
    stage_of(model, _tokens(), Stage(2, 2))
    assert model.config.layer_types == kinds[2:]
    assert [layer.self_attn.layer_type for layer in model.model.layers] == kinds[2:]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/1", "a/b", "1/2/3"])
def test_a_stage_that_is_none(text: str) -> None:
    with pytest.raises(PlanError) as error:
        Stage.parse(text)
    assert str(error.value) == f'--pp: "{text}" names no stage\n    legal: a stage and their number, such as "1/4"'


REFUSED = "    fix: parallelize it yourself: sac.plan(…, parallelize=…)"


@pytest.mark.parametrize(
    ("family", "ranks", "text"),
    [
        (
            "bert",
            2,
            "--tp: BertForMaskedLM declares no plan for tensor parallelism (`tp_plan`)\n"
            f"    legal: Hugging Face models that declare one\n{REFUSED}",
        ),
        (
            "phi3",
            2,
            "--tp: model.layers.0.mlp.down_proj is split in the style 'rowwise_split_input', which is not covered\n"
            "    legal: linear layers and embeddings, colwise, rowwise, colwise_gather_output, colwise_rep, "
            f"embedding_rowwise\n{REFUSED}",
        ),
        ("llama", 4, "--tp: 4 ranks do not divide num_key_value_heads, which is 2"),
        (
            "mixtral",
            2,
            "--tp: model.layers.0.mlp.experts is split in the style 'moe_tp_experts', which is not covered\n"
            "    legal: linear layers and embeddings, colwise, rowwise, colwise_gather_output, colwise_rep, "
            f"embedding_rowwise\n{REFUSED}",
        ),
    ],
)
def test_models_that_cannot_be_split(family: str, ranks: int, text: str) -> None:
    with fake_ranks(ranks), pytest.raises(PlanError) as error:
        prepare(_model(family), _tokens(), parallelize=parallelized(None, ranks))
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("family", "stage", "text"),
    [
        (
            "gpt2",
            Stage(1, 2),
            "--pp: GPT2LMHeadModel does not declare how it is divided into stages (`_pp_plan`)\n"
            "    legal: Hugging Face language models that do\n"
            "    fix: use --in-flight on a model of the stage's layers",
        ),
        (
            "t5",
            Stage(1, 2),
            "--pp: T5ForConditionalGeneration does not declare how it is divided into stages (`_pp_plan`)\n"
            "    legal: Hugging Face language models that do\n"
            "    fix: use --in-flight on a model of the stage's layers",
        ),
        ("llama", Stage(1, 5), "--pp: 4 layers are fewer than 5 stages\n    legal: up to 4 stages"),
    ],
)
def test_models_without_such_stages(family: str, stage: Stage, text: str) -> None:
    layers = {"llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers"}[family]
    model, _ = tiny(family, **{layers: 4})
    with pytest.raises(PlanError) as error:
        stage_of(model, _tokens(), stage)
    assert str(error.value) == text
