"""``sac.checkpoint``: full recomputation of any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sac.policy.model import Policy
from sac.region.frame import Frame
from sac.region.inputs import KeptInputs
from sac.region.state import owners_of
from sac.selective.rerun import RerunRecorder
from sac.selective.table import Table

FULL = Policy(name="full", source="full")


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` as a region that is recomputed as a whole in backward; return its result.

    Arguments and results have any structure. Gradients are bit for bit those of the plain call, dropout included:
    random states, autocast and the buffers of ``function`` (if it is a module) are as they were in forward.
    Nondeterministic routing ops keep their results. Without grad mode it is the plain call.

    Raises ``RegionError`` in backward when the function does not repeat itself, or when an input was changed in place
    after the forward.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    inputs = KeptInputs(args, kwargs)
    name = getattr(function, "__qualname__", type(function).__name__)
    module = function if isinstance(function, nn.Module) else None
    recorder = RerunRecorder(Table(FULL, ()), name)
    recorder.begin(inputs)
    return Frame(function, name, recorder, owners_of(module)).run(inputs, args, kwargs)
