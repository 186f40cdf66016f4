import pytest
import torch

from sac.ops.save_sets import condition_of


def on(device):
    """Return a stand-in for a tensor on a device that this machine need not have."""
    return Placed._make_wrapper_subclass(Placed, (2,), device=torch.device(device))


class Placed(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["no_such_condition", "absent_of:1", "", "device_to_host & no_such_condition"])
def test_an_unknown_condition_is_a_key_error(name):
    with pytest.raises(KeyError):
        condition_of(name)


@pytest.mark.parametrize(
    ("source", "target", "holds"),
    [
        ("cuda", "cpu", True),
        ("xpu", "cpu", True),
        ("cuda", "cuda", False),
        ("cpu", "cpu", False),
        ("cpu", "cuda", False),
    ],
)
def test_device_to_host_looks_at_both_sides(source, target, holds):
    condition = condition_of("device_to_host")
    assert condition((on(source),), {}, on(target)) is holds
    assert condition((), {"self": on(source)}, on(target)) is holds
    assert condition((on(source),), {"device": torch.device(target)}, None) is holds


def test_device_to_host_is_false_for_what_is_no_copy_of_a_tensor():
    assert condition_of("device_to_host")((), {}, None) is False
    assert condition_of("device_to_host")((on("cuda"),), {}, None) is False
    assert condition_of("device_to_host")((torch.empty(2, device="meta"),), {"device": "cpu"}, None) is False


def test_absent_holds_when_every_named_argument_was_left_out():
    condition = condition_of("absent:2/out,/more")
    assert condition((0, 1, None), {}, None) is True
    assert condition((0, 1), {}, None) is True
    assert condition((0, 1, 2), {}, None) is False
    assert condition((0, 1), {"out": 2}, None) is False
    assert condition((0, 1), {"more": 2}, None) is False


def test_truthy_holds_when_every_named_argument_is_true():
    condition = condition_of("truthy:0/dropout,1/train")
    assert condition((0.1, True), {}, None) is True
    assert condition((0.0, True), {}, None) is False
    assert condition((0.1,), {"train": False}, None) is False
    assert condition((), {}, None) is False


def test_two_conditions_can_be_asked_for_at_once():
    condition = condition_of("truthy:1/train & absent:3/out")
    assert condition((0, True, 1), {}, None) is True
    assert condition((0, True, 1, 0), {}, None) is False
    assert condition((0, False, 1), {}, None) is False
