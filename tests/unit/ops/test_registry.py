import pytest
import torch

from sac.ops.registry import NamePattern, find_op, find_ops, op_name, read_registry

REGISTRY = read_registry()


def test_names_of_ops_are_dotted():
    assert op_name(torch.ops.aten.mm.default) == "aten.mm.default"
    assert op_name(torch.ops.aten.mm) == "aten.mm"
    assert op_name(torch.ops.higher_order.flex_attention) == "higher_order.flex_attention"
    assert find_op("higher_order.flex_attention") is torch.ops.higher_order.flex_attention


def test_every_registered_name_finds_its_op():
    for packet, overloads in REGISTRY.packets.items():
        if packet.startswith("higher_order."):
            continue
        ops = find_ops(packet, overloads)
        assert [op_name(op) for op in ops] == [f"{packet}.{overload}" for overload in overloads]


@pytest.mark.parametrize(
    "name", ["aten.no_such_op", "no_such_namespace.mm", "aten.mm.no_such_overload", "aten", "", "aten."]
)
def test_a_name_of_nothing_finds_nothing(name):
    assert find_op(name) is None


@pytest.mark.parametrize(
    ("pattern", "name", "meant"),
    [
        ("aten.mm", "aten.mm.default", True),
        ("aten.mm", "aten.mm_out.default", False),
        ("aten.mm", "aten.addmm.default", False),
        ("aten.mm.default", "aten.mm.out", False),
        ("aten.*mm", "aten.addmm.default", True),
        ("aten.*mm", "aten.addmm_.default", False),
        ("aten.*.out", "aten.mm.out", True),
        ("*", "my_lib.flash.default", True),
        ("higher_order.*", "higher_order.flex_attention", True),
        ("higher_order", "higher_order.flex_attention", False),
        ("aten", "aten.mm.default", False),
        ("aten.m?", "aten.mm.default", True),
        ("aten.[mb]mm", "aten.bmm.default", True),
    ],
)
def test_patterns_match_whole_names(pattern, name, meant):
    assert NamePattern(pattern).matches(name) is meant
