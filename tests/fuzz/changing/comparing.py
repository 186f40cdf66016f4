"""What a changing program shows after a step, as plain values that can be compared bit for bit."""

from __future__ import annotations

import pickle
import random
import types

import numpy
import torch

from sac.torch_private import UnseenByModes


def shown(value, seen=()):
    """Tensors, numbers and containers of them as plain values; `...` for what is not looked into."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf and value.grad is not None:
            return [bits(value), bits(value.grad)]
        return bits(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, torch.Generator):
        return bits(value.get_state())
    if any(value is one for one in seen):
        return "..."
    seen = (*seen, value)
    if isinstance(value, (list, tuple)):
        return [shown(one, seen) for one in value]
    if isinstance(value, dict):
        return {str(key): shown(one, seen) for key, one in value.items()}
    if isinstance(value, types.SimpleNamespace) or type(value).__name__ == "Record":
        return shown(vars(value), seen)
    return "..."


def bits(tensor):
    tensor = tensor.detach().contiguous()
    if tensor.is_floating_point() and (nans := tensor.isnan()).any():
        tensor = torch.where(nans, torch.nan, tensor)  # the sign of one depends on the kernel
    return [str(tensor.dtype), tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy().tobytes()]


def state_of(model, yielded):
    """All that a step of `model` has left: what the loop yields, and everything in the model and the random states."""
    guard = UnseenByModes()  # what comes too early is poison to a simulated device: its modes need not see reads
    loss, seen, grad, state = yielded
    found = {"loss": shown(loss), "seen": shown(seen), "gradient of the input": shown(grad), "state": shown(state)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = bits(tensor)
        found[f"gradient of {name}"] = shown(tensor.grad)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and name != "forward":
                found[f"{path}.{name}"] = shown(value)
    found["random numbers"] = bits(torch.get_rng_state())
    found["random numbers of Python"] = hash(random.getstate())
    found["random numbers of numpy"] = pickle.dumps(numpy.random.get_state())
    del guard
    return found


def differences(expected, found):
    """The names of what differs."""
    return [name for name in expected if expected[name] != found.get(name, "missing")]


def seeded():
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
