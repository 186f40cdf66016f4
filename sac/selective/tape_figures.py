"""What one call of a region keeps for backward, counted from its tape, for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from sac.region.handles import Handle
from sac.selective.stats import NO_RULE, KeptFigures
from sac.selective.tensors import storage_address, storage_bytes, tensor_parts


def figures_of_tape(
    kept: Mapping[int, Tensor],
    held: Iterable[int],
    loose: Iterable[Handle],
    rule_of: Mapping[int, int],
    hits: Mapping[int, int],
) -> KeptFigures:
    """Count each storage once, under its rule.

    ``kept``: values that were held until the end of the forward, of which the ``held`` stay. ``loose``: handles that
    keep a value of their own. ``rule_of``: values that a rule saves.
    """
    stays = {*held}
    sizes: dict[int, tuple[int, int]] = {}  # address of a storage -> bytes, rule
    rule_at: dict[int, int] = {}
    dead: dict[int, int] = {}
    for value, tensor in kept.items():
        rule = rule_of.get(value, NO_RULE)
        for part in tensor_parts(tensor):
            address = storage_address(part)
            rule_at[address] = rule
            if value in stays:
                sizes[address] = storage_bytes(part), rule
            elif value in rule_of:
                dead[address] = storage_bytes(part)
    for handle in loose:
        if isinstance(handle.value, Tensor):
            rule = rule_at.get(handle.storage, NO_RULE)
            for part in tensor_parts(handle.value):
                sizes.setdefault(storage_address(part), (storage_bytes(part), rule))
    rules = dict.fromkeys(rule_of.values(), 0)
    for size, rule in sizes.values():
        rules[rule] = rules.get(rule, 0) + size
    lost = sum(size for address, size in dead.items() if address not in sizes)
    return KeptFigures(sum(size for size, _ in sizes.values()), lost, rules, dict(hits))
