"""A table whose rows can be opened from the keyboard."""

from __future__ import annotations

from typing import Any

from nicegui import ui


class LinkedTable(ui.table, component="linked_table.js"):
    """A table in which the cells of one column are links to the `link` of their row.

    In a slot of `ui.table` a link would lose the focus whenever the page changes: NiceGUI compiles
    the slot's template again, and its elements are replaced. A component is compiled once.
    """

    def __init__(self, column: str, **options: Any) -> None:
        super().__init__(**options)
        self._props["linked"] = column
