"""The metrics of a run as columns, read as the file grows. Torch-free."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from keel.types import KeelError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The values of one metric and the steps that have it; null reads as NaN."""

    steps: Array
    values: Array


@dataclass(eq=False)
class FollowedFile:
    """A file of records, of which each `update` reads what was added since.

    A file that was cut, as a resumed run does with the records after its checkpoint, is read again
    from its start. Several readers may share one: each compares `version`, which grows whenever the
    columns change, with that of the columns it last used.
    """

    path: Path
    version: int = 0
    _offset: int = 0
    _tail: bytes = b""
    _columns: dict[str, dict[str, tuple[list[float], list[float]]]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def update(self) -> int:
        """Read what is new; the version after it.

        May be called from any thread, as the other methods.

        Raises:
            KeelError: a line is damaged, or the file cannot be read.
        """
        with self._lock:
            self._update()
            return self.version

    def _update(self) -> None:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < self._offset or not self._ends_as_before(file):
                    self._offset, self._tail, self._columns = 0, b"", {}
                    self.version += 1
                file.seek(self._offset)
                content = file.read(size - self._offset)
        except FileNotFoundError:
            return
        except OSError as error:
            raise KeelError(f"cannot read {self.path}: {error.strerror}: fix it") from error
        end = content.rfind(b"\n") + 1  # the last line may be half written
        # All before any is kept: after a damaged line the same are read again.
        for stage, step, record in [self._parsed(line) for line in content[:end].splitlines()]:
            columns = self._columns.setdefault(stage, {})
            for name, value in record.items():
                if value is not None and not isinstance(value, int | float):
                    continue
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(np.nan if value is None else float(value))
        self._offset += end
        self._tail = (self._tail + content[:end])[-64:]
        self.version += end > 0

    def stages(self) -> list[str]:
        """The stages that have records, in the order of the run."""
        with self._lock:
            return list(self._columns)

    def columns(self, stage: str) -> Mapping[str, Column]:
        """The metrics of a stage by name; without records none."""
        with self._lock:
            found = self._columns.get(stage, {})
            return {name: Column(np.array(s), np.array(v)) for name, (s, v) in found.items()}

    def _ends_as_before(self, file: BinaryIO) -> bool:
        file.seek(self._offset - len(self._tail))
        return file.read(len(self._tail)) == self._tail

    def _parsed(self, line: bytes) -> tuple[str, float, dict[str, Any]]:
        try:
            record = json.loads(line)
            return str(record.pop("stage")), float(record.pop("step")), record
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KeelError(f"cannot read {self.path}: a line is damaged ({error})") from error
