"""Records of many tables of names, such as the attributes of a region's modules, that are compared all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, islice
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from sac.native.load import library

# The entries that nn.Module itself puts into a module's dict. They come first, with "training" as the first of them,
# except where something was set before nn.Module.__init__ ran.
STANDARD_NAMES = tuple(vars(nn.Module()))
STANDARD_COUNT = len(STANDARD_NAMES)


FoundEntries = Sequence[Any]  # lengths of the tables, how many entries of each count, and the names and values of these


class Holder:
    """A record of an object that holds other objects: its earlier contents, and how to restore them."""

    __slots__ = ()

    def now(self) -> Any:
        """Return the current contents, as a copy that later changes do not affect."""
        raise NotImplementedError

    def before(self) -> Any:
        """Return the contents from when the forward began."""
        raise NotImplementedError

    def differs(self, now: Any) -> bool:
        """Return whether the recorded contents differ from ``now``."""
        raise NotImplementedError

    def put(self, wanted: Any) -> None:
        """Replace the contents by ``wanted``."""
        raise NotImplementedError

    def again(self) -> Holder:
        """Return a new record of the same object with its current contents."""
        raise NotImplementedError


class TablesHolder(Holder):
    """Many tables of names, such as the attributes of modules, without stand-ins: compared all at once.

    ``first``: the position of the first entry that is part of the state. ``names`` and ``values``: the entries of all
    tables, one after the other; if ``first`` is not 0, those of each table from the last to the first. ``counts``: how
    many are of each table. Contents are given as the tables that differ from the record, by position.
    """

    __slots__ = ("_first", "_lengths", "_walked", "counts", "names", "tables", "values")

    def __init__(
        self, tables: list[Any], first: int, walked: list[Any] | None = None, found: FoundEntries | None = None
    ) -> None:
        """``walked``: what the C++ library walks over instead of ``tables``: the classes that these belong to.

        ``found``: the entries, if the library has walked over the tables already.
        """
        self.tables = tables
        self._first = first
        self._walked = tables if walked is None else walked
        native: Any
        if found is None and (native := library()) is not None:
            found = native.flat_entries(self._walked, first)
        if found is not None:
            self._lengths, self.counts, self.names, self.values = found
            return
        self._lengths = [*map(len, tables)]
        self.counts = [length - first if length > first else 0 for length in self._lengths]
        self.names, self.values = self._flat_names(), self._flat_values()

    # In tables of modules' dicts from the last entry to the first: the standard entries are not touched.

    def _flat_names(self) -> list[str]:
        tables = compress(self.tables, self.counts)
        if not self._first:
            return [*chain.from_iterable(tables)]
        return [*chain.from_iterable(map(islice, map(reversed, tables), filter(None, self.counts)))]

    def _flat_values(self) -> list[Any]:
        values = [table.values() for table in compress(self.tables, self.counts)]
        if not self._first:
            return [*chain.from_iterable(values)]
        return [*chain.from_iterable(map(islice, map(reversed, values), filter(None, self.counts)))]

    def now(self) -> dict[int, dict[str, Any]]:
        """See ``Holder``."""
        tables = self.tables
        native: Any = library()
        if native is not None and native.holds_entries(
            self._walked, self._first, self._lengths, self.names, self.values
        ):
            return {}
        if (
            [*map(len, tables)] == self._lengths
            and all(map(is_, self._flat_values(), self.values))
            and self._flat_names() == self.names
        ):
            return {}
        found = {}
        for position, recorded in enumerate(self.recorded()):
            now = self._entries(position)
            if not are_identical(now, recorded):
                found[position] = now
        return found

    def before(self) -> dict[int, dict[str, Any]]:
        """See ``Holder``."""
        return {}

    def differs(self, now: dict[int, dict[str, Any]]) -> bool:
        """See ``Holder``."""
        return bool(now)

    def put(self, wanted: dict[int, dict[str, Any]]) -> None:
        """See ``Holder``."""
        now = self.now()
        if now or wanted:
            for position, recorded in enumerate(self.recorded()):
                if position in now or position in wanted:
                    self._put(position, wanted.get(position, recorded))

    def recorded(self) -> Iterator[dict[str, Any]]:
        """Yield the recorded entries of each table."""
        end = 0
        for count in self.counts:
            begin, end = end, end + count
            names, values = self.names[begin:end], self.values[begin:end]
            if self._first:
                names.reverse()
                values.reverse()
            yield dict(zip(names, values, strict=True))

    def _entries(self, position: int) -> dict[str, Any]:
        """Return the current entries of a table that are part of the state."""
        return dict(islice(self.tables[position].items(), self._first, None))

    def _put(self, position: int, wanted: dict[str, Any]) -> None:
        """Replace these entries by ``wanted``; their order counts among submodules."""
        table, now = self.tables[position], self._entries(position)
        if not are_identical(now, wanted):
            for name in now if [*now] != [*wanted] else ():
                del table[name]
            table.update(wanted)


class AttributesHolder(TablesHolder):
    """The attributes of modules, given by their dicts from the last module to the first.

    ``objects``: the values that are not plain, from the first module to the last; filled in by the one who looks at
    them.
    """

    __slots__ = ("objects",)

    def __init__(
        self, helds: list[dict[str, Any]], found: FoundEntries | None = None, objects: list[Any] | None = None
    ) -> None:
        super().__init__(helds, STANDARD_COUNT, found=found)
        self.objects: list[Any] = [] if objects is None else objects

    def are_usual(self) -> bool:
        """Return whether the first entries of these dicts are those of nn.Module."""
        native: Any = library()
        if native is not None and native.all_begin_with(self.tables, "training"):
            return True
        return [*map(next, map(iter, self.tables))] == ["training"] * len(self.tables)


class ModuleTables(NamedTuple):
    """What one walk over a region's modules has recorded of them; only attributes are not None if Python has walked.

    ``classes``: those of the modules, each once. ``buffers``: the modules that have some, with a copy of their table.
    ``parameters`` and ``buffers`` are None if a module has a table of another kind (a scripted module).

    ``survey``: if the record of the call is to make a survey. ``reached``: what the call can reach, if a survey has
    found it; then there are no ``attributes``, ``classes`` and ``submodules``. See Note [Surveys].
    """

    attributes: AttributesHolder | None
    classes: list[type] | None = None
    submodules: TablesHolder | None = None
    parameters: TablesHolder | None = None
    training: list[bool] | None = None
    buffers: list[tuple[nn.Module, dict[str, Any]]] | None = None
    survey: Callable[..., None] | None = None
    reached: Any = None


def module_tables(found: Any) -> ModuleTables:
    """Return what ``modules_below`` of the C++ library has ``found``."""
    (helds, *attributes), objects, classes, (tables, *submodules), parameters, training, buffers = found
    return ModuleTables(
        AttributesHolder(helds, attributes, objects),
        classes,
        TablesHolder(tables, 0, found=submodules),
        None if parameters is None else TablesHolder(parameters[0], 0, found=parameters[1:]),
        training,
        buffers,
    )


def are_identical(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Return whether two dictionaries have the same names in the same order, for the same objects."""
    return [*one] == [*other] and all(map(is_, one.values(), other.values()))
