"""The rollouts of a run: a step's groups, the tokens of a completion, search over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from nicegui import run as background
from nicegui import ui

from keel.analysis.text import visible
from keel.analysis.token_values import (
    MEASURES,
    describe_token,
    loss_terms,
    measures_of,
    pieces_of,
    step_loss,
    token_html,
)
from keel.runs.rollouts import COMPONENT, EXTRA
from keel.types import KeelError
from keel.view.address import Address
from keel.view.frame import Shown, page, problem
from keel.view.library import Library
from keel.view.rows import PREVIEW, Row, legend, number, prompt_text, score, summary

LONGEST, TOKENS = 20_000, 2_000
"""Characters of a text that is shown, and tokens shown at a time."""


class RolloutsPage:
    """The page of one browser tab."""

    def __init__(self, library: Library, address: Address) -> None:
        name = next((n for n in address.run if n in library.names()), library.names()[0])
        self.run = library.get(name)
        self.steps = {
            (self.run.run.stages[place.stage], place.step): None
            for place in self.run.run.rollout_places()
        }
        stages = [stage for stage, _ in self.steps]
        stage = address.stage if address.stage in stages else (stages[-1] if stages else None)
        self.shown = Shown("/rollouts", address.but(run=(name,), stage=stage))
        self.rows: Sequence[Row] = []

    @property
    def address(self) -> Address:
        return self.shown.address

    @property
    def numbers(self) -> list[int]:
        """The steps that have rollouts, of the stage."""
        return [step for stage, step in self.steps if stage == self.address.stage]

    def build(self) -> None:
        """Build the page."""
        keys = {
            "ArrowLeft": ("earlier step", lambda: self.move(-1)),
            "ArrowRight": ("later step", lambda: self.move(1)),
            "j": ("next completion", lambda: self.choose((self.address.row or 0) + 1)),
            "k": ("previous completion", lambda: self.choose((self.address.row or 0) - 1)),
            "/": ("search", lambda: self.box.run_method("focus")),
        }
        with page(self.shown, f"rollouts of {self.run.name}", keys):
            self._search()
            self.results = ui.column().classes("w-full")
            self.head = ui.row().classes("items-center w-full").style("gap: 8px 14px")
            self.body = ui.column().classes("w-full")
            if not self.numbers:
                problem("this run has no rollouts yet")
                return
            step = self.address.step or self.numbers[-1]
            self.open(step, self.address.row, self.address.token)
            if self._wanted():
                ui.timer(0.05, self.find, once=True)

    # ------------------------------------------------------------ a step

    def move(self, by: int) -> None:
        """Show the next step, or the one before; the same prompt where the step has it."""
        numbers = self.numbers
        if self.address.step in numbers:
            at = numbers.index(self.address.step) + by
            if 0 <= at < len(numbers):
                self.open(numbers[at], None)

    def open(self, step: int, row: int | None, token: int | None = None) -> None:
        """Show a step."""
        try:
            self.rows = self.run.run.rollouts(step, self.address.stage)
        except KeelError as error:
            self.rows = []
            self.body.clear()
            with self.body:
                problem(str(error))
            return
        self.shown.change(step=step)
        self.head.clear()
        with self.head:
            self._steps()
        best = max(range(len(self.rows)), key=lambda at: score(self.rows[at]), default=0)
        self.choose(best if row is None else row, token)

    def _steps(self) -> None:
        numbers = self.numbers
        stages = list(dict.fromkeys(stage for stage, _ in self.steps))
        if len(stages) > 1:
            select = ui.select(stages, value=self.address.stage, label="stage")
            select.on_value_change(lambda e: self._stage(e.value))
        ui.button(icon="chevron_left", on_click=lambda: self.move(-1)).props("flat dense")
        step = ui.number(label="step", value=self.address.step, format="%d")
        step.props("dense data-testid=step").style("width: 90px")
        step.on("keydown.enter", lambda: self.open(_nearest(numbers, step.value), None))
        ui.button(icon="chevron_right", on_click=lambda: self.move(1)).props("flat dense")
        terms = step_loss(self.rows)
        if terms:
            shown = ", ".join(f"{name.removeprefix('loss/')} {v:.4g}" for name, v in terms.items())
            ui.label(f"loss of the step, summed over its tokens: {shown}").classes("muted figure")

    def _stage(self, stage: str) -> None:
        self.shown.change(stage=stage, step=None, row=None)
        self.open(self.numbers[-1], None)

    # ------------------------------------------------------------ a completion

    def choose(self, row: int, token: int | None = None) -> None:
        """Show a completion of the step with its group, and the figures of one of its tokens."""
        if not self.rows:
            return
        row = min(max(row, 0), len(self.rows) - 1)
        self.shown.change(row=row, token=token)
        self.body.clear()
        with self.body:
            one = self.rows[row]
            self._prompt(one)
            self._group(one)
            self._tokens(one)
            self._extras(one)

    def _prompt(self, one: Row) -> None:
        with ui.element("section").classes("panel w-full"):
            with ui.row().classes("items-center"):
                ui.label(visible(f"Prompt {one['prompt_id']}", 200)).style("font-weight: 600")
                ui.button("through the steps", on_click=lambda: self._same_prompt(one)).props(
                    "flat dense no-caps size=sm data-testid=same-prompt"
                )
            _text(prompt_text(one["prompt"]))
            if one.get("expected") is not None:
                ui.label(visible(f"expected: {one['expected']}", 500)).classes("text")

    def _group(self, one: Row) -> None:
        """The completions of the prompt, best first."""
        members = [(at, r) for at, r in enumerate(self.rows) if r["group"] == one["group"]]
        members.sort(key=lambda pair: -score(pair[1]))
        rows = [
            {**summary(r), "id": at, "rank": rank, "shown": "▸" if r is one else ""}
            for rank, (at, r) in enumerate(members, start=1)
        ]
        names = [name for name in rows[0] if name not in ("id", "turns")]
        if any(row["turns"] != 1 for row in rows):
            names.append("turns")
        labels = {"shown": "", "rank": "rank"}
        order = ["shown", "rank", *[name for name in names if name not in ("shown", "rank")]]
        columns = [
            {"name": n, "label": labels.get(n, n), "field": n, "sortable": True, "align": "left"}
            for n in order
        ]
        table = ui.table(rows=rows, columns=columns, row_key="id").classes("w-full")
        table.props("dense flat bordered data-testid=group")
        table.on("rowClick", lambda e: self.choose(e.args[1]["id"]))

    def _tokens(self, one: Row) -> None:
        found = {measure.key: measure for measure in measures_of(one)}
        colour = self.address.colour if self.address.colour in found else next(iter(found), None)
        measure = found.get(colour or "")
        with ui.element("section").classes("panel w-full"):
            with ui.row().classes("items-center w-full").style("gap: 8px 14px"):
                ui.label("Tokens").style("font-weight: 600")
                labels = {m.key: m.label for m in MEASURES if m.key in found}
                select = ui.select(labels, value=colour, label="colour by")
                select.props("dense data-testid=colour")
                select.on_value_change(lambda e: self._colour(e.value))
                if measure is not None:
                    ui.label(legend(one, measure)).classes("muted")
            token = min(max(self.address.token or 0, 0), len(pieces_of(one)) - 1)
            first = max(token, 0) // TOKENS * TOKENS
            html = ui.html(token_html(one, measure, first=first, limit=TOKENS), sanitize=False)
            html.classes("tokens").props("data-testid=tokens")
            html.on(
                "click",
                lambda e: self._token(one, e.args),
                js_handler="(e) => { const t = e.target.dataset.token; if (t) emit(Number(t)) }",
            )
            count = len(pieces_of(one))
            if count > TOKENS:
                with ui.row().classes("items-center"):
                    end = min(first + TOKENS, count)
                    ui.label(f"tokens {first:,} to {end - 1:,} of {count:,}").classes("muted")
                    for label, to in (("earlier", first - TOKENS), ("later", first + TOKENS)):
                        button = ui.button(label, on_click=partial(self._jump, to))
                        button.props("flat dense no-caps").set_enabled(0 <= to < count)
            self.token_card = ui.column().classes("w-full").props("data-testid=token")
        if self.address.token is not None:
            self._token(one, self.address.token)

    def _colour(self, key: str) -> None:
        self.shown.change(colour=key)
        self.choose(self.address.row or 0, self.address.token)

    def _jump(self, token: int) -> None:
        """Show the tokens from another place on."""
        self.choose(self.address.row or 0, token)

    def _token(self, one: Row, token: int) -> None:
        """The figures of a token: what is recorded, and its terms of the loss."""
        if not isinstance(token, int) or not 0 <= token < len(pieces_of(one)):
            return
        self.shown.change(token=token)
        self.token_card.clear()
        with self.token_card:
            piece = visible(pieces_of(one)[token], 200)
            figures = [f"{name} {text}" for name, text in describe_token(one, token)]
            ui.label(f"“{piece}”  " + " · ".join(figures)).classes("text figure")
            terms = loss_terms(one, token)
            if terms:
                parts = [f"{name.removeprefix('loss/')} {v:+.4g}" for name, v in terms.items()]
                ui.label("terms of the loss: " + " · ".join(parts)).classes("text figure")

    def _extras(self, one: Row) -> None:
        """What rewards recorded of the completion, as a judge's words."""
        found = {n: v for n, v in one.items() if n.startswith(EXTRA) and v is not None}
        scores = {name: one[name] for name in one if name.startswith(COMPONENT)}
        if not found:
            return
        with ui.element("div").classes("panels"):
            for name, value in found.items():
                with ui.element("section").classes("panel"):
                    ui.label(visible(name.removeprefix(EXTRA), 100)).style("font-weight: 600")
                    _text(str(value))
            if len(scores) > 1:
                with ui.element("section").classes("panel"):
                    ui.label("components of the reward").style("font-weight: 600")
                    for name, value in scores.items():
                        ui.label(f"{name.removeprefix(COMPONENT)}: {number(value)}")

    # ------------------------------------------------------------ search

    def _search(self) -> None:
        address = self.address
        with ui.row().classes("items-center w-full").style("gap: 8px 12px"):
            self.box = ui.input(label="search completions and prompts", value=address.text or "")
            self.box.props("dense clearable outlined data-testid=search").style("flex: 1 1 220px")
            self.limits: dict[str, ui.number | ui.select] = {}
            for key, label in (
                ("min_reward", "reward ≥"),
                ("max_reward", "reward ≤"),
                ("min_length", "length ≥"),
                ("max_length", "length ≤"),
                ("first_step", "step ≥"),
                ("last_step", "step ≤"),
            ):
                number = ui.number(label=label, value=getattr(address, key))
                self.limits[key] = number.props("dense clearable").style("width: 96px")
            finish = ["eos", "stop", "length"]
            select = ui.select(finish, value=address.finish, label="ended by", clearable=True)
            self.limits["finish"] = select.props("dense").style("width: 110px")
            ui.button("search", on_click=self.search).props("no-caps data-testid=go")
        self.box.on("keydown.enter", self.search)

    async def search(self) -> None:
        """Look for what the fields say."""
        values = {key: field.value for key, field in self.limits.items()}
        whole = ("min_length", "max_length", "first_step", "last_step")
        values = {k: int(v) if k in whole and v is not None else v for k, v in values.items()}
        self.shown.change(text=self.box.value or None, prompt=None, **values)
        await self.find()

    async def _same_prompt(self, one: Row) -> None:
        self.box.value = ""
        self.shown.change(text=None, prompt=one["prompt_id"])
        await self.find()

    def _wanted(self) -> bool:
        query = self.address.but(stage=None).query
        return query != type(query)()

    async def find(self) -> None:
        """Show what fits the address's query."""
        index, query = self.run.index, self.address.query
        self.results.clear()
        with self.results:
            ui.label("reading the rollouts …").classes("muted")
        await background.io_bound(index.update)
        hits = await background.io_bound(index.search, query)
        self.results.clear()
        if hits is None:
            return
        with self.results:
            more = f", the first {len(hits.rows)} shown" if hits.total > len(hits.rows) else ""
            text = f"{hits.total:,} of {index.rows:,} completions{more}"
            ui.label(text).classes("muted").props("data-testid=hits")
            rows = [_hit(at, hit) for at, hit in enumerate(hits.rows)]
            names = ("step", "reward", "length", "finish", "prompt", "completion")
            columns = [
                {"name": n, "label": n, "field": n, "sortable": True, "align": "left"}
                for n in names
            ]
            table = ui.table(rows=rows, columns=columns, row_key="id", pagination=10)
            table.classes("w-full").props("dense flat bordered data-testid=results")
            table.on("rowClick", lambda e: self._open_hit(e.args[1]))

    def _open_hit(self, hit: Row) -> None:
        self.shown.change(stage=hit["stage"])
        self.open(int(hit["step"]), int(hit["row"]))


def rollouts_page(library: Library, address: Address) -> None:
    """Build the page."""
    try:
        found = RolloutsPage(library, address)
    except KeelError as error:
        with page(Shown("/rollouts", address), "rollouts"):
            problem(str(error))
        return
    found.build()


def _text(text: str) -> None:
    ui.label(visible(text, LONGEST, lines=True)).classes("text")


def _hit(at: int, hit: Row) -> dict[str, Any]:
    texts = {name: visible(hit[name], PREVIEW) for name in ("prompt", "completion")}
    same = {name: hit[name] for name in ("stage", "step", "row", "length", "finish")}
    return {"id": at, **same, **texts, "reward": number(hit["reward"])}


def _nearest(numbers: Sequence[int], wanted: float | None) -> int:
    return min(numbers, key=lambda number: abs(number - (wanted or 0)))
