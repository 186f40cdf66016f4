"""Regions under forward-mode differentiation and under `torch.func` transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from sac.errors import Problem, RegionError
from sac.tensors import version_of
from sac.torch_private import (
    NO_TASK,
    current_graph_task_id,
    enter_vmap,
    forward_ad_level,
    leave_vmap,
    transform_is_active,
    tree_flatten,
    tree_unflatten,
    without_transforms,
)

# -- Inputs with tangents (forward-mode differentiation)

# Note [Tangents]
#
# A dual tensor holds its tangent while the `dual_level` in which it was made is active. `detach`, which a region uses
# to keep an input, drops the tangent. So the tangents of a region's arguments are separate inputs: the function
# receives tensors and their tangents separately and makes dual tensors from them, in both passes. A recomputation after
# the end of the level enters its own level.
#
# External tensors (parameters made dual) lose their tangents with the level. A recomputation that needs one after that
# is an error.
#
# Under a policy that keeps whole modules, a call with tangents runs without checkpointing: the kept results of modules
# have no tangents. Calls inside a level neither use nor leave evidence: whether an external tensor has a tangent
# decides which ops run, but is not part of the input signature.

_KEYWORD = "_sac_tangents"


def dual_level_is_on() -> bool:
    """Return whether the program is inside ``torch.autograd.forward_ad.dual_level``."""
    return forward_ad_level() >= 0


class OnTangents:
    """A region's function, which receives the tangents of its arguments separately; see Note [Tangents].

    ``path`` names the region in messages.
    """

    def __init__(self, function: Callable[..., Any], owners: Iterable[nn.Module], path: str) -> None:
        self._function = function
        self._path = path
        self._places: list[int] = []
        self._duals = [one for one in _tensors_of(owners) if _tangent_of(one) is not None]
        self._written: list[tuple[torch.Tensor, int]] = []  # the caller's tensors, with their versions; in the forward

    @property
    def is_needed(self) -> bool:
        """Whether an argument or a tensor of the region's modules has a tangent; valid after ``taken_from``."""
        return bool(self._places or self._duals)

    def taken_from(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments without tangents, and the tangents under a separate keyword."""
        leaves, spec = tree_flatten((args, kwargs))
        tangents: list[torch.Tensor] = []
        primals: dict[int, torch.Tensor] = {}  # a tensor that is passed twice stays one tensor
        for index, leaf in enumerate(leaves):
            tangent = _tangent_of(leaf)
            if tangent is None:
                continue
            if id(leaf) not in primals:
                primals[id(leaf)] = forward_ad.unpack_dual(leaf).primal
                self._written.append((leaf, version_of(leaf)))
            self._places.append(index)
            tangents.append(torch.zeros_like(tangent) if tangent._is_zerotensor() else tangent)
            leaves[index] = primals[id(leaf)]
        if not self._places:
            return args, kwargs
        args, kwargs = tree_unflatten(leaves, spec)
        return args, {**kwargs, _KEYWORD: tuple(tangents)}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function on dual tensors."""
        self._check_outside()
        tangents = kwargs.pop(_KEYWORD, ())
        with nullcontext() if dual_level_is_on() else forward_ad.dual_level():
            leaves, spec = tree_flatten((args, kwargs))
            duals: dict[int, torch.Tensor] = {}
            for index, tangent in zip(self._places, tangents, strict=True):
                primal = leaves[index]
                if id(primal) not in duals:
                    duals[id(primal)] = forward_ad.make_dual(primal, tangent)
                leaves[index] = duals[id(primal)]
            args, kwargs = tree_unflatten(leaves, spec)
            output = self._function(*args, **kwargs)
        self._check_written()
        return output

    def _check_outside(self) -> None:
        if any(_tangent_of(one) is None for one in self._duals):
            raise RegionError(
                Problem(
                    self._path or "region",
                    "a parameter or buffer had a tangent in forward and has none in recomputation: the dual_level that "
                    "it was made in is over",
                    fix="call backward inside the dual_level of the forward",
                )
            )

    def _check_written(self) -> None:
        written, self._written = self._written, []
        if any(version_of(leaf) != version for leaf, version in written):
            raise RegionError(
                Problem(
                    self._path or "region",
                    "the region wrote in place to an input that carries a tangent (forward-mode differentiation)",
                    fix="clone the input inside the region before writing to it",
                )
            )


def _tangent_of(value: Any) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor) or nn.parameter.is_lazy(value):
        return None
    tangent: torch.Tensor | None = forward_ad.unpack_dual(value).tangent
    return tangent


def _tensors_of(owners: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules: parameters, buffers, plain attributes."""
    for owner in owners:
        for held in (vars(owner), owner._parameters, owner._buffers):
            yield from (one for one in held.values() if isinstance(one, torch.Tensor))


def refuse_reentrant(path: str) -> None:
    """Raise ``RegionError``: the autograd functions of sac have no forward-mode formula."""
    raise RegionError(
        Problem(
            path or "region",
            "a reentrant region is called on a tensor that carries a tangent (forward-mode differentiation), or its "
            "modules hold one",
            fix="pass use_reentrant=False",
        )
    )


# -- Transforms of ``torch.func`` around a region


def refuse_transforms(path: str) -> None:
    """Raise ``RegionError`` if the region ``path`` is called inside ``vmap``, ``grad`` or another transform.

    Tensors of transforms have no storage and their graph accepts no hooks: torch's own checkpoint fails there too. A
    region that runs in a recomputation is outside the transforms, although backward may be batched
    (``is_grads_batched``).
    """
    if transform_is_active() and current_graph_task_id() == NO_TASK:
        raise RegionError(
            Problem(
                path or "region",
                "this region is called inside a transform of torch.func (grad, vjp, vmap, jvp, ...), whose tensors "
                "cannot be kept",
                fix="call sac.remove(model) before the transform, or torch.autograd instead of torch.func; "
                "torch.func.functional_call by itself is fine",
            )
        )


class outside_transforms:  # noqa: N801
    """Leaves the active transforms, such as those around a batched backward, and enters them again at the end.

    A recomputation does not depend on them: it runs once for all gradients of the batch, on the inputs of the forward.
    Inside a ``vmap`` it could not draw random numbers.
    """

    __slots__ = ("_depth", "_without")

    def __enter__(self) -> None:
        self._depth = 0
        if enter_vmap is not None and leave_vmap is not None:
            self._depth = enter_vmap() - 1
            leave_vmap()
        for _ in range(self._depth):
            leave_vmap()
        self._without: Any = None
        if transform_is_active():
            self._without = without_transforms()
            self._without.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._without is not None:
                self._without.__exit__(*error)
        finally:
            for _ in range(self._depth):
                enter_vmap()
