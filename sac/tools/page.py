"""The page of a comparison, one HTML file: memory over the step, decisions per op, bytes per rule."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from sac.errors import ConfigError, Problem
from sac.planner.peak import CATEGORIES, Curve, short_op
from sac.policy.model import Policy, limits_of
from sac.policy.read import bytes_text
from sac.recompute.op_trace import OpTraceRow
from sac.reporting import Report, group_label, without_call
from sac.tables import count_text, flops_text
from sac.tools.comparison import Comparison, GroupDecisions, ModeResult

# Note [The page of a comparison]
#
# One file that needs nothing else and, by its content security policy, loads nothing: style and script are part of it
# (`page.css`, `page.js`). All tables are in its HTML, readable without the script, in the texts and units of the
# terminal, with exact numbers as `data-value` or title. The script draws the charts from the data at the end of the
# page, which hold what is alive over the step as changes from point to point, and filters and sorts the decisions.
# What is alive comes from the explanation (`sac/planner/peak.py`), whose peak equals the measured one. A mode without
# an explanation has the measured curve, as one row.

_COLOURS = 8  # of modes
_MOST_POINTS = 800  # of a measured curve
_FIXED = CATEGORIES.index("activations")  # the categories before it, which no policy changes, are grey

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" \
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
"""
_STEP = """<section aria-labelledby="step-title">
<h2 id="step-title">Memory over the step</h2>
<div class="tools">
<label><input type="checkbox" id="whole"> with what is there before: weights, gradients, optimizer state</label>
<button type="button" id="to-peak">Go to the peak</button>
</div>
<div class="step">
<div class="charts" id="charts" tabindex="0" role="slider" aria-valuemin="0" aria-label="Moment of the step">
<h3>every mode</h3>
<svg id="lines" aria-hidden="true"></svg>
<h3>what is alive under <b id="stack-of"></b></h3>
<svg id="stack" aria-hidden="true"></svg>
<p class="quiet">Point at a moment, or use the arrow keys. Left half: forward, right half: backward, by number of
events. Choose a mode in the table above.</p>
</div>
<div class="panel">
<p id="moment" class="quiet"></p>
<p><span id="total" class="total"></span> <span id="is-peak" class="quiet" hidden>its peak</span></p>
<p id="beside" class="quiet"></p>
<table><thead><tr><th scope="col">alive</th><th scope="col" class="right">bytes</th></tr></thead>
<tbody id="categories"></tbody></table>
<table><thead><tr><th scope="col">made by, and what keeps it</th><th scope="col" class="right">tensors</th>
<th scope="col" class="right">bytes</th></tr></thead><tbody id="alive"></tbody></table>
</div>
</div>
<noscript><p class="error">The charts need JavaScript.</p></noscript>
</section>
"""


def save_page(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page of a comparison to a file, in UTF-8; create the folder if it is missing.

    Raises ``ConfigError`` if the file cannot be written.
    """
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page_of(comparison), encoding="utf-8")
    except OSError as error:
        raise ConfigError(Problem(str(path), f"the file cannot be written: {error.strerror}")) from error
    return path


def page_of(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML; see Note [The page of a comparison]."""
    title, about = escape(comparison.model), comparison.footnote().splitlines()
    where = escape(about[0].removeprefix(f"{comparison.model}, "))
    notes = "".join(f"<p>{escape(line)}</p>" for line in about[1:])
    sections = (
        _modes(comparison),
        _STEP if any(row.memory is not None for row in comparison.rows) else "",
        _decisions(comparison.rows),
        _policies(comparison.rows),
    )
    return (
        f"{_HEAD}<title>sac compare: {title}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1><p class="quiet">{where}</p></header>\n'
        f"<main>\n{''.join(sections)}</main>\n<footer>{notes}</footer>\n"
        f'<script type="application/json" id="data">{_data(comparison.rows)}</script>\n'
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files("sac.tools").joinpath(name).read_text(encoding="utf-8")


# -- The table of modes, in which one is chosen


def _modes(comparison: Comparison) -> str:
    table = comparison.table()
    highest = max((row.peak_bytes for row in comparison.rows), default=0) or 1
    head = "".join(_header(name, is_right=name in table.right) for name in table.columns)
    lines = []
    for number, (cells, row) in enumerate(zip(table.rows, comparison.rows, strict=True)):
        name = f'<span class="swatch" style="background: var(--mode-{number % _COLOURS})"></span>{escape(row.mode)}'
        if row.error:
            lines.append(
                f'<tr><th scope="row">{name}</th><td colspan="{len(cells) - 1}" class="error">{escape(row.error)}</td>'
            )
            continue
        choice = f'<input type="radio" name="mode" value="{number}">'
        line = f'<tr><th scope="row"><label>{choice}<span id="mode-{number}">{name}</span></label></th>'
        for column, cell in zip(table.columns[1:], cells[1:], strict=True):
            bar = f'<span class="bar" style="width: {row.peak_bytes / highest:.1%}"></span>' if column == "peak" else ""
            line += f'<td class="right"{_exactly(column, row)}>{escape(cell)}{bar}</td>'
        lines.append(line)
    body = "".join(f"{line}</tr>\n" for line in lines)
    failed = "".join(
        f'<p class="error">{escape(row.mode)}: not explained: {escape(row.not_explained)}</p>'
        for row in comparison.rows
        if row.not_explained
    )
    return (
        '<section aria-labelledby="modes-title"><h2 id="modes-title">Modes</h2><div class="scroll">'
        f'<table id="modes"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{failed}</section>\n'
    )


def _exactly(column: str, row: ModeResult) -> str:
    """Return the attributes that hold the exact number behind a cell."""
    numbers: Mapping[str, Any] = {
        "kept": row.kept_bytes,
        "kept per block": row.typical_region_bytes,
        "peak": row.peak_bytes,
        "recomputed": row.recompute_flops,
        "step": row.median_step_ms,
        "loss": row.losses[-1] if row.losses else None,
        "gradient difference": row.max_gradient_difference,
    }
    number = numbers[column]
    return "" if number is None else f' data-value="{number}" title="{number}"'


def _header(name: str, *, is_right: bool = False, sorts: bool = False) -> str:
    shown = f'<button type="button">{escape(name)}</button>' if sorts else escape(name)
    side = ' class="right"' if is_right else ""
    return f'<th scope="col"{side}>{shown}</th>'


# -- The decisions per op, one column per mode

# A row is one call of an op in regions whose decisions are alike under each mode: modes may group them differently.
_Call = tuple[str, str, int]  # module, op, call


def _decisions(rows: Sequence[ModeResult]) -> str:
    decided = {row.mode: row.decisions for row in rows if row.decisions}
    if not decided:
        return ""
    groups_at: dict[str, list[GroupDecisions | None]] = {}
    for place, groups in enumerate(decided.values()):
        for group in groups:
            for path in group.paths:
                groups_at.setdefault(path, [None] * len(decided))[place] = group
    alike: dict[tuple[int, ...], list[str]] = {}  # paths of regions, by the identity of their groups
    for path, found in groups_at.items():
        alike.setdefault(tuple(map(id, found)), []).append(path)
    regions = [group_label(paths) for paths in alike.values()]
    several = len(regions) > 1
    columns = ("module", *(["regions"] if several else []), "op", "call", "shape", "bytes", "FLOPs", *decided)
    numbers = ("call", "bytes", "FLOPs")
    head = "".join(_header(name, is_right=name in numbers, sorts=True) for name in columns)
    body = "".join(
        line
        for name, paths in zip(regions, alike.values(), strict=True)
        for line in _calls_of(name if several else "", groups_at[paths[0]])
    )
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in regions)
    choice = f'<label>regions <select name="region"><option value="">all</option>{options}</select></label>'
    return (
        '<section aria-labelledby="decisions-title"><h2 id="decisions-title">Decisions per op</h2>'
        f'<p class="quiet">Of one region of {escape(", ".join(regions))}, in the order of the forward. '
        "Bytes are those of the op's results.</p>"
        '<form id="filter"><label>filter <input type="search" name="words" placeholder="module, op, rule">'
        f"</label>{choice if several else ''}"
        '<label>show <select name="which"><option value="all">every call</option>'
        '<option value="different">decided differently</option><option value="kept">kept under some mode</option>'
        '<option value="recomputed">kept under none</option></select></label>'
        '<label><input type="checkbox" name="views"> views and other calls without memory of their own</label>'
        '<output id="shown" aria-live="polite"></output></form>'
        f'<div class="scroll tall" tabindex="0" role="region" aria-label="Decisions per op"><table id="decisions">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>\n"
    )


def _calls_of(region: str, groups: Sequence[GroupDecisions | None]) -> Iterator[str]:
    """Yield a row for each call in these regions; ``groups``: their group under each mode.

    ``region`` names them, for a column of its own; empty if there are no others.
    """
    by_mode: list[dict[_Call, OpTraceRow]] = [
        {(row.module, row.op, row.call): row for row in (group.rows if group is not None else ())} for group in groups
    ]
    for call in dict.fromkeys(call for of_mode in by_mode for call in of_mode):
        decided = [of_mode.get(call) for of_mode in by_mode]
        yield _decided(next(row for row in decided if row is not None), region, decided)


def _decided(call: OpTraceRow, region: str, decided: Sequence[OpTraceRow | None]) -> str:
    shape = "×".join(map(str, call.shape))
    has_memory = any(one is not None and (one.bytes or one.flops or one.rule) for one in decided)
    cells = "".join(map(_decision, decided))
    words = ",".join(one.decision if one is not None else "" for one in decided)
    flops = flops_text(call.flops) if call.flops else "–"
    where = f'<td class="path">{escape(region)}</td>' if region else ""
    return (
        f'<tr data-region="{escape(region)}" data-decided="{words}" data-memory="{int(has_memory)}">'
        f'<th scope="row" class="path">{escape(call.module or "(region)")}</th>'
        f'{where}<td class="path op" title="{escape(call.op)}">{escape(short_op(call.op))}</td>'
        f'<td class="right">{call.call}</td>'
        f'<td class="path" title="{call.dtype}">{shape}</td>'
        f'<td class="right" data-value="{call.bytes}" title="{call.bytes}">{bytes_text(call.bytes)}</td>'
        f'<td class="right" data-value="{call.flops}">{flops}</td>{cells}</tr>\n'
    )


def _decision(row: OpTraceRow | None) -> str:
    if row is None:
        return "<td>–</td>"
    why = "" if row.reason == "default" else f'<span class="why">{escape(row.reason.removeprefix("rule "))}</span>'
    return f'<td><span class="do {row.decision}">{row.decision}</span>{why}</td>'


# -- The policies, with bytes per rule


def _policies(rows: Sequence[ModeResult]) -> str:
    parts = [
        _policy(number, row, row.policy, row.report)
        for number, row in enumerate(rows)
        if row.policy is not None and row.report is not None
    ]
    if not parts:
        return ""
    return (
        '<section aria-labelledby="policies-title"><h2 id="policies-title">What is kept, by rule</h2>'
        f'<p class="quiet">Bytes in the last forward.</p><div class="policies">{"".join(parts)}</div></section>\n'
    )


def _policy(number: int, row: ModeResult, policy: Policy, report: Report) -> str:
    swatch = f'<span class="swatch" style="background: var(--mode-{number % _COLOURS})"></span>'
    named = f" <small>policy {escape(policy.name)}</small>" if policy.name != row.mode else ""
    rest = [f"everything else: {policy.default.value}", *without_call(report.zero_hit_rules)]
    columns = ("rule", "what it matches", "calls", "per region", "all regions")
    head = "".join(_header(name, is_right=place > 1) for place, name in enumerate(columns))
    otherwise = "".join(f"<li>{escape(str(one))}</li>" for one in report.alternatives)
    return (
        f"<article><h3>{swatch}{escape(row.mode)}{named}</h3>"
        f'<div class="scroll"><table class="rules"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(_rules(policy, report))}</tbody></table></div>"
        f"<p class='quiet'>{escape('; '.join(rest))}</p>"
        + (f"<p>Decided otherwise, predicted per step:</p><ul>{otherwise}</ul>" if otherwise else "")
        + (f"<details><summary>YAML</summary><pre>{escape(policy.to_yaml())}</pre></details>" if policy.rules else "")
        + "</article>"
    )


def _rules(policy: Policy, report: Report) -> Iterator[str]:
    rules = {rule.id: rule for rule in policy.rules}
    on_host = sum((kind.offloaded_bytes + kind.input_host_bytes) * kind.count for kind in report.kinds)
    whole = report.kept_bytes + on_host or 1
    for kind in report.kinds:
        if len(report.kinds) > 1:
            yield f'<tr><th scope="rowgroup" colspan="5" class="quiet">{escape(kind.regions)}</th></tr>'
        for use in kind.rules:
            if use.hits:
                rule = rules.get(use.rule)
                ops = ", ".join(rule.ops) or "the module as a whole" if rule is not None else ""
                matches = "; ".join((ops, *limits_of(rule))) if rule is not None else ""
                yield _rule(use.rule, matches, str(use.hits), use.saved_bytes, kind.count, whole)
        yield _rule("inputs", f"of {count_text(kind.count, 'region')}", "", kind.input_bytes, kind.count, whole)
        for name, size in (*((one.rule, one.host_bytes) for one in kind.offloads), ("inputs", kind.input_host_bytes)):
            if size:
                yield _rule(name, "in host memory", "", size, kind.count, whole)
    total = f'<td class="right" data-value="{report.kept_bytes}">{bytes_text(report.kept_bytes)}</td>'
    together = "together, on the device" if on_host else "together"
    yield f'<tr><th scope="row">{together}</th><td></td><td></td><td></td>{total}</tr>'


def _rule(name: str, matches: str, calls: str, size: int, count: int, whole: int) -> str:
    return (
        f'<tr><th scope="row">{escape(name)}</th><td class="meaning"><small>{escape(matches)}</small></td>'
        f'<td class="right">{calls}</td><td class="right" data-value="{size}">{bytes_text(size)}</td>'
        f'<td class="right" data-value="{size * count}">{bytes_text(size * count)}'
        f'<span class="bar" style="width: {size * count / whole:.1%}"></span></td></tr>'
    )


# -- What the script draws


def _data(rows: Sequence[ModeResult]) -> str:
    colours = [f"fixed-{number}" if number < _FIXED else f"live-{number - _FIXED}" for number in range(len(CATEGORIES))]
    categories = [*zip(CATEGORIES, colours, strict=True)]
    modes = [_alive_over(row) if row.memory is not None else None for row in rows]
    return json.dumps({"categories": categories, "modes": modes}, separators=(",", ":")).replace("<", "\\u003c")


def _alive_over(row: ModeResult) -> dict[str, Any]:
    """Return what is alive over a mode's step: ``changes`` has, per point, a row, its bytes and tensors, and so on."""
    if row.explained is None:
        return _measured(row)
    curve: Curve = row.explained.curve
    texts = {text: number for number, text in enumerate(dict.fromkeys(point.moment for point in curve.points))}
    changes: list[list[int]] = []
    before: Mapping[int, tuple[int, int]] = {}
    for point in curve.points:
        changed = [key for key in before.keys() | point.alive.keys() if before.get(key) != point.alive.get(key)]
        changes.append([number for key in sorted(changed) for number in (key, *point.alive.get(key, (0, 0)))])
        before = point.alive
    return {
        "mode": row.mode,
        "x": [round(point.x, 5) for point in curve.points],
        "moments": [texts[point.moment] for point in curve.points],
        "texts": [*texts],
        "rows": [(CATEGORIES.index(one.category), one.where, short_op(one.op), one.kept_by) for one in curve.rows],
        "before": sorted(curve.before),
        "changes": changes,
    }


def _measured(row: ModeResult) -> dict[str, Any]:
    points = row.curve()
    run = -(-len(points) // _MOST_POINTS)
    highest = [max(points[at : at + run], key=lambda point: point[1]) for at in range(0, len(points), run)]
    return {
        "mode": row.mode,
        "x": [round(x, 5) for x, _ in highest],
        "moments": [int(x >= 1) for x, _ in highest],
        "texts": ["in the forward", "in the backward"],
        "rows": [(len(CATEGORIES) - 1, "(model)", "", "")],
        "before": [],
        "changes": [[0, round(size), 0] for _, size in highest],
    }
