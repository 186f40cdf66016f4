"""Whether a region runs the ops that a plan was made for."""

from __future__ import annotations

from sac.errors import Problem, RegionError
from sac.policy.model import PlannedRegion
from sac.selective.rows import Rows, signature


def check_planned(planned: PlannedRegion | None, rows: Rows | None, path: str) -> None:
    """Raise ``RegionError`` if ``rows``, of the first call of a kind, are not those that the plan was made for.

    ``planned`` is what the plan says of the kind (None: nothing), ``rows`` are None in later calls, ``path`` names the
    region.
    """
    if planned is None or rows is None:
        return
    found = signature(rows.rows)
    if found != planned.signature:
        count = sum(row.bytes > 0 for row in rows.rows)
        raise RegionError(
            Problem(
                str(planned.mark),
                f"{path or 'the model'} runs {count} ops that are not those which the plan was made for "
                f"(signature {found}, planned {planned.signature})",
                fix="plan again for this model, torch version and device: `sac plan …`",
            )
        )
