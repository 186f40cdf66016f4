"""What tests of scattered inputs share: a program run plainly and with scattered regions, on one rank of many."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from sac.full import FullConfig
from tests.support.recording import Recorder
from tests.support.training import same_bits

Run = Callable[..., Any]
Seen = dict[str, Tensor]
Program = Callable[[Run], Seen]


def plainly(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def scattered(
    group: Any = None,
    *,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    store: str = "scattered",
    **config: Any,
) -> Run:
    """Return what calls a function as a region whose input is scattered over `group`, by default all ranks."""
    options = {
        "tp_group": dist.group.WORLD if group is None else group,
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "config": FullConfig(store=store, **config),
    }

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        return sac.checkpoint(function, *args, **options, **kwargs)

    return run


def differences(program: Program, run: Run, turns: int = 3) -> list[str]:
    """Names of what a program shows otherwise with regions than plainly.

    More than one turn, as the first call of a function is run in another way than later ones.
    """
    torch.manual_seed(3)
    plain = program(plainly)
    wrong = []
    for turn in range(turns):
        torch.manual_seed(3)
        ours = program(run)
        names = sorted(plain.keys() ^ ours.keys()) or [name for name in plain if not same_bits(plain[name], ours[name])]
        wrong += [f"turn {turn}: {name}" for name in names]
    return wrong


def summed_up(result: Tensor, x: Tensor) -> Seen:
    """Backward from the result, each element with a weight of its own."""
    ramp = torch.linspace(-1, 2, result.numel()).view(result.shape)
    (result * ramp).abs().float().sum().backward()
    return {"result": result.detach(), "gradient of the input": x.grad}


def weights(model: nn.Module) -> Seen:
    """The gradients of a model's parameters, by name; they are taken off."""
    found = {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def mlp(width: int, **kinds: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width, **kinds), nn.GELU(), nn.Linear(2 * width, width, **kinds))


def bytes_held(recorder: Recorder, besides: Any = ()) -> int:
    """Live bytes when they no longer fall: gloo's own threads release what was sent a little later."""
    held = recorder.live_bytes(besides=besides)
    for _ in range(20):
        time.sleep(0.01)
        held = min(held, recorder.live_bytes(besides=besides))
    return held


def bytes_left(recorder: Recorder, besides: Any = ()) -> int:
    """Live bytes, as soon as gloo's own threads have released finished gathers."""
    for _ in range(200):
        left = recorder.live_bytes(besides=besides)
        if left == 0:
            break
        time.sleep(0.01)
    return left
