"""The two sides of stored rows, and what is counted on the way to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from keel.data.preferences.schema import Labelled, Preference, Stepwise
from keel.data.tables import all_bad
from keel.runs.quarantine import LeftOut, shortened
from keel.types import KeelError, Side

T = TypeVar("T", bound=Preference | Labelled | Stepwise)
E = TypeVar("E", bound="Sized")


@dataclass(frozen=True, slots=True)
class Sides(Generic[T]):
    """Rows on two sides; no prompt, and no value of the group column, is on both.

    `left_out` are the rows on neither: bad ones, train rows whose prompt or group is also held out
    (`overlap` counts these), and, where the source says to drop them, those with an empty answer
    (`dropped`).
    """

    train: tuple[T, ...]
    heldout: tuple[T, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def overlap(self) -> int:
        return sum(row.why == "overlap" for row in self.left_out)

    @property
    def dropped(self) -> int:
        return sum(row.why == "empty" for row in self.left_out)


def sides_of(places: Sequence[float], validation_fraction: float) -> list[Side]:
    """The side of each row from where its key lies in [0, 1) (`base.position`).

    Few rows may all fall on one side: the key nearest to the other goes over, so that two
    different keys always give two sides. One key alone is on the train side.
    """
    held = {p for p in places if p < validation_fraction}
    different = set(places)
    if len(different) < 2:
        held = set()
    elif not held:
        held = {min(different)}
    elif held == different:
        held = different - {max(different)}
    return ["heldout" if p in held else "train" for p in places]


class Sized(Protocol):
    """A row in tokens."""

    @property
    def longest(self) -> int: ...


class Sieve(Generic[T, E]):
    """Encodes rows, and says which will not do: those longer than `limit` are in `left_out`.

    What the encoder raises names the row's place.
    """

    def __init__(self, encode: Callable[[T], E], limit: int | None) -> None:
        self.encode = encode
        self.limit = limit
        self.left_out: list[LeftOut] = []
        self._encoded: dict[str, E] = {}

    def __call__(self, row: T) -> E:
        origin = row.origin
        found = self._encoded.pop(row.id, None)
        try:
            found = self.encode(row) if found is None else found
        except KeelError as error:
            raise KeelError(str(error) if origin is None else f"{origin.place}: {error}") from error
        if origin is not None and self.limit is not None and found.longest > self.limit:
            reason = f"{origin.place}: {found.longest} tokens, more than {self.limit}"
            self.left_out.append(LeftOut(origin.source, origin.line, reason, origin.row, "long"))
        return found

    def without_bad(self, sides: Sides[T]) -> Sides[T]:
        """The rows that can be encoded; the others go among the sides' left out.

        Raises KeelError where no train row is left.
        """
        bad: list[LeftOut] = []
        train = tuple(row for row in sides.train if self._takes(row, bad))
        if not train:
            raise all_bad(bad[0].source, bad)
        held = tuple(row for row in sides.heldout if self._takes(row, bad))
        return Sides(train, held, (*sides.left_out, *bad))

    def _takes(self, row: T, bad: list[LeftOut]) -> bool:
        try:
            self._encoded[row.id] = self.encode(row)
        except KeelError as error:
            origin = row.origin
            if origin is None:
                raise
            reason = shortened(f"{origin.place}: {error}")
            bad.append(LeftOut(origin.source, origin.line, reason, origin.row))
            return False
        return True
