"""Plan one rank of a tensor- or expert-parallel model, or a pipeline stage: the real module, on one fake rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sac.blocks.find import Block, find_blocks
from sac.errors import PlanError, Problem
from sac.planner.fakes import Inputs
from sac.planner.sharding import shard_blocks

# Note [Parallel plans]
#
# The planner parallelizes the copy of the model with torch's own DTensor, as a real rank does, over a process group
# that sends nothing (`fake_ranks`). So ops, gathered tensors and buffers are those of a real rank.
#
# Tensor parallelism follows the plan that a Hugging Face model class declares (`tp_plan`): which projections are split
# by columns and which by rows. Norms and other small parameters are replicated.
#
# Sequence parallelism: from the first block to the last one, a rank holds its share of the sequence (dimension 1).
# Norms work on this share. The input of a module whose projections are split by columns is gathered; what a projection
# that is split by rows returns is reduced and scattered. The sequence is scattered before the first block, and gathered
# after the last one.
#
# Expert parallelism is that of transformers itself: a rank has an even share of the experts (`ep_plan`), and the ranks
# exchange tokens (`AllToAllEP`). How many tokens an expert gets depends on data, so it is given, from above; every
# rank sends and receives as many to and from each other one. With FSDP2, the same ranks shard everything else. (If they
# were more, experts would be sharded inside of blocks, which cannot be replayed.)
#
# A pipeline stage has an even share of the layers, the first also the embedding, the last also norm, head and loss. It
# receives the hidden states that it continues, and sends its own. Under the schedule 1F1B, stage s of n holds
# n - s + 1 micro-batches when its first backward starts; each holds its received hidden states, too.

_STYLES = ("colwise", "rowwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise")
_REPLICATED = ("replicated_with_grad_allreduce", "replicate")
_SEQUENCE = 1  # the dimension of hidden states that sequence parallelism splits


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``number`` of ``count``, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Read ``2/4``; raises ``PlanError``."""
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        stage = cls(int(found[1]), int(found[2])) if found else None
        if stage is None or not 1 <= stage.number <= stage.count or stage.count < 2:
            raise PlanError(Problem("--pp", f'"{text}" names no stage', 'a stage and their number, such as "1/4"'))
        return stage

    @property
    def in_flight(self) -> int:
        """The number of micro-batches that it holds when its first backward starts, under 1F1B."""
        return self.count - self.number + 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 1

    @property
    def is_last(self) -> bool:
        """Whether it has the head and the loss."""
        return self.number == self.count


# -- Tensor and sequence parallelism


def tensor_parallel(model: nn.Module, mesh: Any, *, sequence: bool = False) -> None:
    """Parallelize a Hugging Face model in place over a one-dimensional ``mesh``, as its class declares.

    ``sequence``: also divide the sequence between the projections; see Note [Parallel plans]. Raises ``PlanError`` for
    a model without a declared plan, with a style that is not covered, or with sizes that the ranks do not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    styles = _styles_of(model)
    blocks = find_blocks(model)
    _check_sizes(model, styles, mesh.size())
    tied = _tied(model)
    plan = {name: _style(style, sequence=sequence and _is_in(name, blocks)) for name, style in styles.items()}
    if sequence:
        plan |= _of_norms(blocks, styles)
        _divide_sequence(blocks, styles, mesh)
    parallelize_module(model, mesh, plan)
    for first, *others in tied:
        owner, _, name = first.rpartition(".")
        whole = getattr(model.get_submodule(owner), name)
        for other in others:
            _replace(model, other, whole)


def _styles_of(model: nn.Module) -> dict[str, str]:
    """Return the declared style of each module that is split."""
    declared: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not declared:
        found = f"{type(model).__name__} declares no plan for tensor parallelism (`tp_plan`)"
        fix = "parallelize it yourself: sac.plan(…, parallelize=…)"
        raise PlanError(Problem("--tp", found, "Hugging Face models that declare one", fix=fix))
    patterns = [(_pattern(one), style) for one, style in declared.items()]
    styles: dict[str, str] = {}
    modules = dict(model.named_modules())
    names = {*modules, *dict(model.named_parameters())}
    for name in sorted(names):
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is None or style in _REPLICATED or isinstance(modules.get(name), nn.Identity):
            continue
        if style not in _STYLES or not isinstance(modules.get(name), nn.Linear | nn.Embedding):
            found = f"{name} is split in the style {style!r}, which is not covered"
            fix = "parallelize it yourself: sac.plan(…, parallelize=…)"
            raise PlanError(Problem("--tp", found, f"linear layers and embeddings, {', '.join(_STYLES)}", fix=fix))
        styles[name] = style
    return styles


def _pattern(declared: str) -> re.Pattern[str]:
    return re.compile(re.escape(declared).replace(r"\*", r"\d+"))


def _style(style: str, *, sequence: bool) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if style == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if style == "rowwise":
        return RowwiseParallel(output_layouts=Shard(_SEQUENCE) if sequence else Replicate())
    return ColwiseParallel(output_layouts=Shard(-1) if style == "colwise" else Replicate())


def _check_sizes(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    problems = []
    config = getattr(model, "config", None)
    for field in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, field, None)
        if isinstance(count, int) and count % ranks:
            problems.append(Problem("--tp", f"{ranks} ranks do not divide {field}, which is {count}"))
    for name, style in styles.items():
        size = model.get_submodule(name).get_parameter("weight").shape[1 if style == "rowwise" else 0]
        if size % ranks and "embed" not in style and not problems:
            problems.append(Problem("--tp", f"{ranks} ranks do not divide {name}, whose size is {size}"))
    if problems:
        raise PlanError(problems)


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that several modules share."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def _is_in(name: str, blocks: Iterable[Block]) -> bool:
    return any(name.startswith(f"{block.path}.") for block in blocks)


def _split_parts(block: Block, styles: Mapping[str, str]) -> dict[str, nn.Module]:
    """Return the modules of a block whose projections are split: attention and MLP, by path."""
    paths = {name.rpartition(".")[0] for name in styles if _is_in(name, (block,))}
    return {path: block.module.get_submodule(path.removeprefix(f"{block.path}.")) for path in sorted(paths)}


def _of_norms(blocks: Sequence[Block], styles: Mapping[str, str]) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import SequenceParallel

    plan = {}
    for block in blocks:
        parts = _split_parts(block, styles)
        for path, module in block.module.named_modules(prefix=block.path):
            if not any(path == part or path.startswith(f"{part}.") for part in parts) and any(
                True for _ in module.parameters(recurse=False)
            ):
                plan[path] = SequenceParallel(use_local_output=True)
    return plan


def _divide_sequence(blocks: Sequence[Block], styles: Mapping[str, str], mesh: Any) -> None:
    """Scatter the sequence before the first block, gather it after the last one and before each split part."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def moved(x: Tensor, before: Any, after: Any) -> Any:
        return DTensor.from_local(x, mesh, (before,), run_check=False).redistribute(placements=(after,))

    def enter(module: nn.Module, args: Any, kwargs: Any, *, change: Callable[[Tensor], Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    whole, share = Replicate(), Shard(_SEQUENCE)
    for block in blocks:
        for part in _split_parts(block, styles).values():
            gathered = partial(enter, change=lambda x: moved(x, share, whole))
            part.register_forward_pre_hook(gathered, with_kwargs=True)
    scattered = partial(enter, change=lambda x: moved(x, whole, share).to_local())
    blocks[0].module.register_forward_pre_hook(scattered, with_kwargs=True)
    blocks[-1].module.register_forward_hook(lambda module, args, output: moved(output, share, whole).to_local())


# -- Expert parallelism


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts are divided over ``ranks``. ``tokens``: for plans, the most that one gets in a step, from all ranks."""

    ranks: int
    tokens: int | None = None


def expert_parallel(model: nn.Module, mesh: Any, experts: Experts) -> list[nn.Module]:
    """Give this rank its share of the experts of a Hugging Face model, in place; return the modules that hold experts.

    ``mesh``: of two dimensions, ``ep`` and ``tp``, which has one rank. With ``experts.tokens``, forwards run on tensors
    without data. Raises ``PlanError`` for a model without a declared plan (``ep_plan``), or with too few experts.
    """
    try:
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError:
        found = "the installed transformers cannot divide experts over ranks"
        raise PlanError(Problem("--ep", found, "transformers 5.23 or newer")) from None
    declared: Mapping[str, str] = getattr(model, "ep_plan", None) or {}
    patterns = [_pattern(one) for one, style in declared.items() if style == "ep_dispatch_experts"]
    found_ones: list[Any] = [
        one for name, one in model.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)
    ]
    if not found_ones:
        found = f"{type(model).__name__} has no experts whose division it declares (`ep_plan`)"
        raise PlanError(Problem("--ep", found, "mixtures of experts of Hugging Face"))
    counts = dict.fromkeys(module.num_experts for module in found_ones)
    undivided = [f"{experts.ranks} ranks do not divide {count} experts" for count in counts if count % experts.ranks]
    if undivided:  # before any module is changed
        raise PlanError(Problem("--ep", found) for found in undivided)
    for module in found_ones:
        share = module.num_experts // experts.ranks
        first = share * mesh["ep"].get_local_rank()
        for name, whole in [*module.named_parameters(recurse=False)]:
            mine = whole.detach()[first : first + share].clone()
            setattr(module, name, nn.Parameter(mine, requires_grad=whole.requires_grad))
        module.num_experts = share
        module._is_expert_parallel = True
        exchange = AllToAllEP(module, mesh["ep"], mesh["tp"])
        module.forward = exchange if experts.tokens is None else _Exchange(exchange, share, experts)
    return found_ones


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Exchanges tokens without data: as many as are given."""

    exchange: Any
    share: int  # of experts, on this rank
    experts: Experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        """Run this rank's experts."""
        ranks, tokens = self.experts.ranks, self.experts.tokens
        assert tokens is not None
        sent = top_k_index.numel()
        if tokens * self.share < sent:
            least = -(-sent // self.share)
            found = f"divided evenly, each expert gets {least} tokens, but at most {tokens} are allowed"
            raise PlanError(Problem("--tokens-per-expert", found, f"{least} or more"))
        with _GivenSizes(top_k_index, _even(sent, ranks), _even(tokens * self.share, ranks)):
            return self.exchange(hidden_states, top_k_index, top_k_weights)


def _even(total: int, parts: int) -> list[int]:
    return [total * (one + 1) // parts - total * one // parts for one in range(parts)]


class _GivenSizes(TorchFunctionMode):
    """Answers what depends on the data of the counts that ranks tell each other: how many tokens each sends."""

    def __init__(self, like: Tensor, sent: list[int], received: list[int]) -> None:
        super().__init__()
        self.like = like
        self.sizes = [sent, received]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return self.sizes
        if func is Tensor.repeat_interleave:  # the expert of each received token
            return self.like.new_empty(kwargs["output_size"])
        return func(*args, **(kwargs or {}))


def parallelized(
    fsdp: int | None, tp: int | None, *, sequence: bool = False, experts: Experts | None = None
) -> Callable[[nn.Module], None]:
    """Return a function that parallelizes a model over ``tp`` ranks, and shards it by FSDP2 over ``fsdp`` of these.

    ``experts`` are divided over the ``fsdp`` ranks, or over ranks of their own if that is None.
    Pass it as ``parallelize`` to ``sac.plan``, within ``fake_ranks(ranks_of(…))``; on real ranks it does the same.
    """

    def parallelize(model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        device: Any = next(model.parameters()).device.type
        sizes = {name: count for name, count in (("fsdp", fsdp), ("tp", tp)) if count is not None}
        whole: set[nn.Parameter] = set()
        if experts is not None:
            of_experts = init_device_mesh(device, (experts.ranks, 1), mesh_dim_names=("ep", "tp"))
            for module in expert_parallel(model, of_experts, experts):
                whole.update(module.parameters())
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
        if tp is not None and mesh is not None:
            tensor_parallel(model, mesh["tp"], sequence=sequence)
        if fsdp is not None and mesh is not None:
            shard_blocks(model, mesh["fsdp"], whole)

    return parallelize


def ranks_of(fsdp: int | None, tp: int | None, experts: Experts | None = None) -> int:
    """Return the number of ranks that share a stage."""
    return (fsdp or (experts.ranks if experts is not None else 1)) * (tp or 1)


# -- Pipeline stages


def sent(output: Any) -> Tensor:
    """Return the hidden states that a stage sends: pass it as ``loss_fn`` of a stage that is not the last."""
    hidden: Tensor = output.logits
    return hidden


def stage_of(model: nn.Module, inputs: Inputs | Mapping[str, Any], stage: Stage) -> dict[str, Any]:
    """Reduce a Hugging Face model to a pipeline stage, in place, and return the inputs of the stage.

    See Note [Parallel plans]. Raises ``PlanError`` for models that do not declare their stages (``_pp_plan``), or have
    fewer layers than there are stages.
    """
    declared: Mapping[str, Any] = getattr(model, "_pp_plan", None) or {}
    if not declared or not isinstance(inputs, Mapping) or "input_ids" not in inputs:
        found = f"{type(model).__name__} does not declare how it is divided into stages (`_pp_plan`)"
        fix = "use --in-flight on a model of the stage's layers"
        raise PlanError(Problem("--pp", found, "Hugging Face language models that do", fix=fix))
    stacks = {block.stack for block in find_blocks(model)}
    of_layers = next((name for name in declared if name in stacks), None)
    embedding = next((name for name, (reads, _) in declared.items() if "input_ids" in reads), None)
    layers = model.get_submodule(of_layers) if of_layers is not None else None
    if of_layers is None or embedding is None or len(stacks) > 1 or not isinstance(layers, nn.ModuleList):
        found = f"{type(model).__name__} is not an embedding, one stack of layers, and a head"
        raise PlanError(Problem("--pp", found, fix="use --in-flight on a model of the stage's layers"))
    count = len(layers)
    if count < stage.count:
        found = f"{count} layers are fewer than {stage.count} stages"
        raise PlanError(Problem("--pp", found, f"up to {count} stages"))
    first, last = (count * number // stage.count for number in (stage.number - 1, stage.number))
    config: Any = model.config
    _replace(model, of_layers, nn.ModuleList(layers[first:last]))
    config.num_hidden_layers = last - first
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[first:last]
    given = dict(inputs)
    if not stage.is_first:
        weight = model.get_submodule(embedding).get_parameter("weight")
        _replace(model, embedding, nn.Identity())
        tokens: Tensor = given.pop("input_ids")
        received = weight.new_zeros(*tokens.shape, weight.shape[1])  # without data, if the model has none
        given["inputs_embeds"] = received.detach().requires_grad_()
    if not stage.is_last:
        for name in declared:
            if name not in (of_layers, embedding):
                _replace(model, name, nn.Identity())
        given.pop("labels", None)
    return given


def _replace(model: nn.Module, path: str, by: Any) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, by)
