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


TRAIN_WITHOUT_OUT = "truthy:1/train & absent:3/out"


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "holds"),
    [
        ("device_to_host", (), {}, False),
        ("device_to_host", (torch.empty(2, device="meta"),), {"device": "cpu"}, False),
        ("absent:2/out,/more", (0, 1, None), {}, True),
        ("absent:2/out,/more", (0, 1), {}, True),
        ("absent:2/out,/more", (0, 1, 2), {}, False),
        ("absent:2/out,/more", (0, 1), {"out": 2}, False),
        ("absent:2/out,/more", (0, 1), {"more": 2}, False),
        ("truthy:0/dropout,1/train", (0.1, True), {}, True),
        ("truthy:0/dropout,1/train", (0.0, True), {}, False),
        ("truthy:0/dropout,1/train", (0.1,), {"train": False}, False),
        ("truthy:0/dropout,1/train", (), {}, False),
        (TRAIN_WITHOUT_OUT, (0, True, 1), {}, True),
        (TRAIN_WITHOUT_OUT, (0, True, 1, 0), {}, False),
        (TRAIN_WITHOUT_OUT, (0, False, 1), {}, False),
    ],
)
def test_conditions_on_arguments(name, args, kwargs, holds):
    assert condition_of(name)(args, kwargs, None) is holds
