"""``python -m sac`` is the command ``sac``."""

from sac.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
