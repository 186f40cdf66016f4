"""What dispatch modes have in common: Dynamo is told once, not at every op, to leave them; they hear of modules."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac.selective.scope import ModulePass, enter, leave
from sac.selective.table import Table

# Note [Out of Dynamo's sight]
#
# torch wraps the `__torch_dispatch__` of every mode in `torch._disable_dynamo`, so that Dynamo, where it watches the
# code around a region (after a graph break), does not compile the mode. The wrapper costs about a fifth of an empty
# mode's time, on every op. Private names of torch (2.11 to 2.13) do the same at no cost: the code of the method is
# marked to be run as it is, with all that it calls. Where they are missing, torch's wrapper stays.
# Held by test_modes_are_not_compiled.

_frames = torch._C._dynamo.eval_frame
_mark = getattr(_frames, "set_code_exec_strategy", None)
_Strategy = getattr(_frames, "_FrameExecStrategy", None)
_Action = getattr(_frames, "_FrameAction", None)
CAN_MARK = _mark is not None and _Strategy is not None and hasattr(_Action, "SKIP")


def run_as_it_is(code: CodeType) -> None:
    """Let Dynamo neither compile this code nor what it calls."""
    if _mark is not None and _Strategy is not None and _Action is not None:
        _mark(code, _Strategy(_Action.SKIP, _Action.SKIP))


class BareMode(TorchDispatchMode):
    """See Note [Out of Dynamo's sight]."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        method = cls.__dict__.get("__torch_dispatch__")
        if CAN_MARK and method is not None:
            run_as_it_is(method.__code__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not CAN_MARK


class RegionMode(BareMode):
    """A mode around one run of a region, which is told in which of its modules an op runs; see ``Scoped``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function inside the region may be used under this mode."""
        return True

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.path = ""
        self.plans = table.scope("")

    def whole_modules(self) -> ModulePass | None:
        """Return what runs modules that are saved as a whole, None if nothing does; asked as the mode is entered."""
        return None

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._outer = enter(self, self.whole_modules())
        return self

    def __exit__(self, *error: Any) -> None:
        leave(self._outer)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
