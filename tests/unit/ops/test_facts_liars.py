"""The lists that correct schemas, held against what the ops of this torch really do to their arguments."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sac.ops.facts import HIDDEN_ALIASES, HIDDEN_WRITES, traits_of
from sac.ops.registry import find_ops, op_name, read_registry

aten = torch.ops.aten
NEWER_THAN_TORCH_2_11 = {"_c10d_functional.irecv", "_c10d_functional.batch_p2p_ops"}


def tensors_in(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


class Audit(TorchDispatchMode):
    """Compares every op's arguments and generator before and after, and notes where its traits are wrong."""

    def __init__(self):
        super().__init__()
        self.wrong = set()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        traits, names = traits_of(op), [argument.name for argument in op._schema.arguments]
        written = {names[place] for place in traits.mutated_args} | set(traits.mutated_kwargs)
        passed = [*zip(names, args, strict=False), *kwargs.items()]
        given = [(name, tensor) for name, value in passed for tensor in tensors_in(value)]
        before = [tensor.clone() for _, tensor in given]
        drawn = torch.get_rng_state()
        out = op(*args, **kwargs)
        self.seen.add(op_name(op))
        for (name, tensor), old in zip(given, before, strict=True):
            if name not in written and not torch.equal(tensor.nan_to_num(), old.nan_to_num()):
                self.wrong.add(f"{op_name(op)} writes {name}")
            if not (traits.is_view or written) and any(storage_of(o) == storage_of(tensor) for o in tensors_in(out)):
                self.wrong.add(f"{op_name(op)} aliases {name}")
        if not traits.is_random and not torch.equal(drawn, torch.get_rng_state()):
            self.wrong.add(f"{op_name(op)} draws")
        return out


def train(module, *inputs):
    results = [t for t in tensors_in(module(*inputs)) if t.requires_grad]
    sum(result.sum() for result in results).backward()


def convolutional(x):
    aten.batch_norm_update_stats(x, torch.zeros(3), torch.ones(3), 0.1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.RReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4))(x)


def attention(x):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)(x)


def recurrent(x):
    return [nn.LSTM(8, 8, batch_first=True)(x), nn.GRU(8, 8, batch_first=True)(x)]


def shaping(x):
    return [x.reshape(-1), x.flatten(1), x.unflatten(-1, (2, 4)), x.mT.reshape(8, -1), torch.cat([x, x]), x.unbind(0),
            *x.chunk(2, -1), *x.unsafe_chunk(2, -1), *x.unsafe_split(1), *torch.unsafe_split_with_sizes(x, [1, 1]),
            F.pad(x, (0, 1)), F.pad(x, (0, 0)), x.roll(1), x.flip(0), x.repeat(1, 1, 2), x.expand(2, -1, -1),
            x.contiguous(), x.to(torch.float64), x.to(torch.float32), x.masked_fill(x > 0, 1.0), x[0], x[x > 0],
            x.tril(), x.gather(0, (x > 0).long()), x.index_select(0, torch.tensor([0])), torch.where(x > 0, x, 0.0),
            x.diagonal(dim1=1, dim2=2)]  # fmt: skip


def choosing(x):
    return [*x.topk(2), *x.sort(), *x.kthvalue(1), x.amax(), x.cumsum(0), *x.max(0), x.std(), x.logsumexp(-1),
            torch.einsum("bij,bkj->bik", x, x), F.one_hot(x.argmax(-1), 8),
            F.embedding(x.argmax(-1), x.view(6, 8).repeat(2, 1))]  # fmt: skip


def drawing(x):
    return [F.dropout(x), F.alpha_dropout(x, 0.1, True), torch.rand_like(x) * x, torch.bernoulli(x.sigmoid()),
            torch.normal(x, 1.0), F.gumbel_softmax(x), F.rrelu(x, training=True), F.dropout(x, 0.0),
            F.dropout(x, 0.5, False), F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
            torch.multinomial(x[0].exp(), 2)]  # fmt: skip


@pytest.mark.parametrize("program", [convolutional, attention, recurrent, shaping, choosing, drawing])
def test_traits_tell_what_every_op_of_a_program_does(program):
    torch.manual_seed(0)
    shape = (2, 3, 8, 8) if program is convolutional else (2, 3, 8)
    with Audit() as audit:
        train(program, torch.randn(shape, requires_grad=True))
    assert audit.wrong == set()
    assert len(audit.seen) > 10


def test_every_entry_of_the_lists_is_an_op_whose_schema_is_silent():
    import torch.distributed._functional_collectives  # noqa: F401 registers the last of them
    from torch._inductor import inductor_prims  # noqa: F401

    packets = read_registry().packets
    assert {packet for packet in [*HIDDEN_WRITES, *HIDDEN_ALIASES] if packet not in packets} <= NEWER_THAN_TORCH_2_11
    for packet, names in HIDDEN_WRITES.items():
        if packet not in packets:
            continue
        silent = [op for op in find_ops(packet, packets[packet]) if not op._schema.is_mutable]
        assert silent, packet
        for op in silent:
            arguments = op._schema.arguments
            assert tuple(arguments[place].name for place in traits_of(op).mutated_args) == names
    for packet in HIDDEN_ALIASES:
        assert any(traits_of(op).is_view for op in find_ops(packet, packets[packet])), packet


ALIASES = {
    aten._unsafe_view.default: ([4],),
    aten.unsafe_split.Tensor: (1,),
    aten.unsafe_split_with_sizes.default: ([1, 1],),
    aten.lift.default: (),
    aten.dequantize.self: (),
    aten.to_dense.default: (),
    aten.sum_to_size.default: ([2, 2],),
    aten.type_as.default: (torch.zeros(1),),
    aten.data.default: (),
}


@pytest.mark.parametrize("op", ALIASES, ids=op_name)
def test_unsaid_aliases_share_storage(op):
    x = torch.randn(2, 2)
    assert any(storage_of(result) == storage_of(x) for result in tensors_in(op(x, *ALIASES[op])))
    assert traits_of(op).is_view
