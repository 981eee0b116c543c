"""What the pages for annotators have in common: address, style, rubric; and the sign-in page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from markdown_it import MarkdownIt
from nicegui import ui

from keel.analysis.text import visible
from keel.preferences.annotation import (
    LONGEST_NAME,
    LONGEST_RUBRIC,
    AnnotationProject,
    Rubric,
    annotator_name,
)
from keel.types import KeelError
from keel.view.address import Parts
from keel.view.frame import begin, header, list_keys, other_theme

STYLE = """
.nicegui-content { padding: 0; }
.annotate { display: flex; flex-direction: column; flex-wrap: nowrap; gap: 8px; width: 100%;
            max-width: 1500px; margin: 0 auto; padding: 8px 16px 10px; min-height: 540px;
            height: calc(100dvh - 46px); align-items: stretch; }
.pair { display: flex; flex-direction: column; gap: 8px; flex: 1 1 0; min-height: 0; }
.prompt { flex: none; max-height: 24%; overflow: auto;
          background: rgba(128,128,128,.08); }
.sides { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 8px;
         flex: 1 1 0; min-height: 0; }
.side { display: flex; flex-direction: column; min-height: 0; padding: 0; overflow: hidden; }
.side .muted { padding: 6px 14px; border-bottom: 1px solid rgba(128,128,128,.2);
               font-weight: 600; flex: none; }
.side .words { flex: 1 1 0; overflow: auto; padding: 10px 14px; }
.side .words:focus-visible, .prompt:focus-visible { outline: 2px solid #0072B2;
                                                    outline-offset: -2px; }
.words { line-height: 1.55; font-size: 15px; }
.words div { white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; unicode-bidi: plaintext;
             text-align: start; }
.mono .words, .words .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace;
                             font-size: 13px; line-height: 1.5; }
.words .code { background: rgba(128,128,128,.09); border-radius: 4px; padding: 4px 8px; }
.role { font-size: 12px; opacity: .68; }
.words + .role { margin-top: 6px; }
.choices { display: grid; grid-template-columns: 1fr auto 1fr; gap: 8px; flex: none; }
.others { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 6px; flex: none; }
.others .status { flex: 1 1 160px; }
kbd { border: 1px solid currentColor; border-radius: 4px; padding: 0 6px; margin-right: 8px;
      font: 600 12px/18px ui-monospace, "DejaVu Sans Mono", monospace; opacity: .8; }
.choices .q-btn, .others .q-btn { text-transform: none; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 10px;
           width: 100%; }
.figures .value { font-size: 24px; font-weight: 600; line-height: 1.3; }
.rubric { line-height: 1.5; }
.rubric :is(h1, h2, h3, h4) { font-size: 16px; line-height: 1.4;
                              font-weight: 600; margin: 8px 0 4px; }
.rubric :is(p, ul, ol, pre, table) { margin: 0 0 8px; } .rubric pre { white-space: pre-wrap; }
.rubric ul { list-style: disc; } .rubric ol { list-style: decimal; }
.rubric :is(ul, ol) { padding-inline-start: 22px; }
.rubric :is(td, th) { padding: 2px 10px 2px 0; text-align: start; vertical-align: top; }
@media (max-width: 600px) {
  .annotate { padding: 6px 8px 8px; }
  .sides { grid-template-columns: minmax(0, 1fr);
           grid-template-rows: minmax(0, 1fr) minmax(0, 1fr); }
  .side .muted { padding: 2px 10px; } .side .words { padding: 6px 10px; }
  .choices .q-btn, .others .q-btn { padding: 4px 8px; }
  .annotate kbd, .wide { display: none; }
}
"""


@dataclass(frozen=True, slots=True)
class PageAddress(Parts):
    """The query of the pages for annotators: whose page it is, its theme and font ("mono")."""

    annotator: str = ""
    theme: str = ""
    font: str = ""

    @staticmethod
    def read(query: Mapping[str, str]) -> PageAddress:
        """The address of query parameters; others are left out."""
        return PageAddress(**{name: query.get(name, "") for name in asdict(PageAddress())})


def begin_page(title: str, address: PageAddress) -> None:
    """The style, title and theme of a page."""
    begin(title, address.theme)
    ui.add_css(STYLE)


def show_words(text: str, limit: int) -> ui.element:
    """A text as its author wrote it, whatever its direction; what acts on it is escaped.

    Blocks between lines that begin with ``` are in monospace.
    """
    shown = visible(text.replace("\r\n", "\n"), limit, lines=True, prose=True)
    with ui.element("div").classes("words") as words:
        for block, code in split_code(shown):
            # A browser shows no empty line at the end of a block.
            label = ui.label(f"{block}\n" if block.endswith("\n") or not block else block)
            label.props("dir=ltr" if code else "dir=auto")
            label.classes("code" if code else "")
    return words


def split_code(text: str) -> list[tuple[str, bool]]:
    """The text in blocks that a newline separates, and of each whether it is fenced code."""
    blocks: list[tuple[list[str], bool]] = [([], False)]
    for line in text.split("\n"):
        lines, code = blocks[-1]
        fence = line.lstrip().startswith("```")
        if fence and not code:
            blocks.append(([line], True))
            continue
        lines.append(line)
        if fence:
            blocks.append(([], False))
    return [("\n".join(lines), code) for lines, code in blocks if lines]


def show_rubric(rubric: Rubric) -> None:
    """The instructions: Markdown without HTML and images, of which a browser would load some."""
    ui.html("<h2>Rubric</h2>", sanitize=False)
    markdown = MarkdownIt("commonmark", {"html": False, "breaks": True})
    text = visible(rubric.text.replace("\r\n", "\n"), LONGEST_RUBRIC, lines=True, prose=True)
    made = markdown.enable("table").disable("image").render(text)
    ui.html(made, sanitize=False).classes("rubric").props("data-testid=rubric dir=auto")
    ui.label(visible(rubric.id)).classes("muted")


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
