"""A table whose rows can be opened from the keyboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui import ui

from keel.view.rows import columns_of


class LinkedTable(ui.table, component="linked_table.js"):
    """A table in which the cells of one column are links to the `link` of their row.

    In a slot of `ui.table` a link would lose the focus whenever the page changes: NiceGUI compiles
    the slot's template again, and its elements are replaced. A component is compiled once.
    """

    def __init__(
        self, column: str, rows: list[dict[str, Any]], names: Sequence[str], test: str, **more: Any
    ) -> None:
        super().__init__(rows=rows, columns=columns_of(rows, names), row_key="id", **more)
        self._props["linked"] = column
        self.classes("w-full").props(f"dense flat bordered data-testid={test}")
