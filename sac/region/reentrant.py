"""The reentrant frame: a region as one autograd function, whose backward runs the region and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sac.region.call import Recorder
from sac.region.inputs import KeptInputs
from sac.region.settings import PLAIN, Settings


class ReentrantFrame:
    """One call of one region; the counterpart of ``Frame``, made and run in the same way."""

    def __init__(
        self,
        function: Callable[..., Any],
        path: str,
        recorder: Recorder | None,
        owners: tuple[nn.Module, ...] = (),
        settings: Settings = PLAIN,
    ) -> None:
        self.input_bytes = (0, 0)

    def run(self, inputs: KeptInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward; returns the function's result."""
        raise NotImplementedError
