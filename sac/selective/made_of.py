"""Whether a value of a tape is made from parameters alone; see Note [Made from parameters alone]."""

from __future__ import annotations

from bisect import bisect_right

from torch import Tensor, nn
from torch.nn import Parameter

from sac.selective.tape import Tape
from sac.selective.tensors import storage_address
from sac.selective.weights import NOT_PARAMETERS, Origins


class MadeOf:
    """Answers for one tape, when asked: most values never are."""

    def __init__(self, tape: Tape, owners: tuple[nn.Module, ...]) -> None:
        self._tape = tape
        self._origins = Origins(owners)
        self._known: dict[int, int] = {}

    def all_of(self, values: tuple[int, ...] | list[int]) -> int:
        """Return what ``Origins.of`` says of something made of these values together."""
        made_of = 0
        for value in values:
            found = self._of(value)
            if found < 0:
                return NOT_PARAMETERS
            made_of = max(made_of, found)
        return made_of

    def _of(self, value: int) -> int:
        # Not by recursion: a region may hold more ops than Python has frames.
        known, tape = self._known, self._tape
        stack = [value]
        while stack:
            one = stack[-1]
            if one in known:
                stack.pop()
                continue
            entry = self._maker(one)
            if one in tape.constants:
                known[one] = 0
            elif entry is None:
                known[one] = self._of_leaf(one)
            elif getattr(tape.plans[entry], "is_random", False):
                known[one] = NOT_PARAMETERS
            else:
                reads = [read for read in self._reads(one, entry) if read != one]
                unknown = [read for read in reads if read not in known and read not in stack]
                if unknown and not any(known.get(read, 0) < 0 for read in reads):
                    stack.append(unknown[0])  # one at a time: the first that has to do with an input decides
                    continue
                found = [known.get(read, NOT_PARAMETERS if read not in stack else 0) for read in reads]
                known[one] = NOT_PARAMETERS if any(each < 0 for each in found) else max(found, default=0)
            stack.pop()
        return known[value]

    def _reads(self, value: int, entry: int) -> list[int]:
        """Return what the entry that made ``value`` reads, and what those read that have written to it since."""
        tape = self._tape
        writers = tape.writers.get(tape.roots[value], ()) if tape.writers else ()
        return [*tape.reads[entry], *(read for writer in writers for read in tape.reads[writer])]

    def _maker(self, value: int) -> int | None:
        tape = self._tape
        entry = bisect_right(tape.firsts, value) - 1
        if entry < 0 or value >= tape.firsts[entry] + tape.counts.get(entry, 1):
            return None
        return entry

    def _of_leaf(self, value: int) -> int:
        leaf = self._tape.leaves.get(value)
        tensor: Tensor | None = leaf.tensor() if leaf is not None and leaf.position < 0 else None
        if tensor is None:
            return NOT_PARAMETERS
        if isinstance(tensor, Parameter):
            self._origins.name_parameter(value, tensor)
        else:
            self._origins.name_foreign(value, storage_address(tensor))
        return self._origins.of(value)
