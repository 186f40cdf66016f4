"""With ``SAC_BUILD_NATIVE=1``, wheels hold the C++ library, compiled for the torch of this environment.

See docs/native.md. Everything else is in pyproject.toml.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class BinaryDistribution(Distribution):
    """A distribution whose wheels are for one platform and one Python."""

    def has_ext_modules(self) -> bool:
        """Whether there is compiled code."""
        return True


class BuildWithLibrary(build_py):
    """Compile the library next to its Python modules, and run its self-test."""

    def run(self) -> None:
        """Build the package and the library."""
        super().run()
        if self.editable_mode:
            self.announce("an editable install has no library of its own: run `sac build`", level=3)
            return
        sys.path.insert(0, str(Path(__file__).parent))  # the sources that are packaged, and not an installed sac
        try:
            from sac.native.build import build_for_package
        except ModuleNotFoundError as missing:
            sys.exit(
                f"SAC_BUILD_NATIVE=1 compiles for the torch of this environment, and {missing.name} is not here: "
                "install it, then pip wheel --no-build-isolation ."
            )
        build_for_package(Path(self.build_lib, "sac", "native"))


if os.environ.get("SAC_BUILD_NATIVE", "").lower() in ("", "0", "false", "no", "off"):
    setup()
else:
    setup(cmdclass={"build_py": BuildWithLibrary}, distclass=BinaryDistribution)
