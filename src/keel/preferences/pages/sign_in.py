"""The page that asks for the annotator's name."""

from __future__ import annotations

from nicegui import ui

from keel.analysis.text import visible
from keel.preferences.annotation.session import AnnotationProject
from keel.preferences.annotation.settings import LONGEST_NAME, annotator_name
from keel.preferences.pages.style import PageAddress, begin_page, show_rubric
from keel.types import KeelError
from keel.view.frame import header, list_keys, other_theme

ABOUT = (
    "You see a prompt and two answers, and say which is better. Each label is stored at once; "
    "you can close the page at any time, and go on later under the same name."
)


def sign_in_page(project: AnnotationProject, address: PageAddress, wrong: str = "") -> None:
    """Build the page."""
    begin_page("Label pairs", address)

    def start() -> None:
        try:
            name = annotator_name(box.value or "")
        except KeelError as error:
            message.text = visible(str(error), 200)
            return
        ui.navigate.to(address.but(annotator=name).url("/"))

    def toggle() -> None:
        ui.navigate.to(address.but(theme=other_theme(address.theme)).url("/"))

    with ui.dialog() as help_, ui.card():
        list_keys({"Enter": ("start", start)})
    with header(toggle, help_):
        ui.label("Label pairs")
    with ui.column().classes("page").style("max-width: 720px"):
        ui.label("Which answer is better?").style("font-size: 22px; font-weight: 600")
        ui.label(ABOUT)
        with ui.row().classes("items-center w-full"):
            box = ui.input(label="your name").props(
                f"outlined dense autofocus maxlength={LONGEST_NAME} data-testid=name"
            )
            box.style("flex: 1 1 220px").on("keydown.enter", start)
            ui.button("Start", on_click=start).props("no-caps data-testid=start")
        message = ui.label(visible(wrong, 200)).classes("text-negative")
        message.props("role=alert data-testid=problem")
        if project.settings.rubric is not None:
            with ui.element("section").classes("panel w-full"):
                show_rubric(project.settings.rubric)
