"""Import optional packages on first use, with an error that says how to install them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from sac.errors import ConfigError, Problem


def import_extra(module: str, extra: str) -> ModuleType:
    """Import ``module``, which ``pip install 'sac[extra]'`` installs; raises ``ConfigError`` if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        problem = Problem("python", f"the package '{missing}' is not installed", fix=f"pip install 'sac[{extra}]'")
        raise ConfigError(problem) from error
