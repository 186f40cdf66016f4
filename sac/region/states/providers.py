"""State of the user's own around a recomputation."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from sac.region.settings import StateProvider


class ProvidedState:
    """What the state providers' state was in the forward.

    Providers are asked in order. Around a recomputation each is given the state of the forward, and afterwards, in
    reverse order, the state that it had right before; also when something raises, the provider itself included.
    """

    __slots__ = ("_forward",)

    def __init__(self, providers: tuple[StateProvider, ...]) -> None:
        self._forward = [(provider, provider.snapshot()) for provider in providers]

    def enter_on(self, stack: ExitStack) -> None:
        """Give each provider the state of the forward, and the state of now when ``stack`` is left."""
        for provider, state in self._forward:
            now: Any = provider.snapshot()
            stack.callback(provider.restore, now)  # first: a restore that raises may have done half its work
            provider.restore(state)

    def drop(self) -> None:
        """Hold no state any more."""
        self._forward = []
