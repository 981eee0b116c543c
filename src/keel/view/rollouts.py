"""The rollouts of a run: a step's groups, the tokens of a completion, search over all steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from nicegui import run as background
from nicegui import ui

from keel.analysis.text import Tokens, visible
from keel.types import KeelError
from keel.view.address import CHOICES, KINDS, LARGEST, SEARCHED, Address
from keel.view.frame import EVERY, LinkedTable, Shown, page, problem
from keel.view.library import Library
from keel.view.rollout_rows import (
    PREVIEW,
    Row,
    figure,
    legend,
    number,
    prompt_text,
    summary,
    verdicts,
)

LONGEST, TOKENS = 20_000, 2_000
"""Characters of a text that is shown, and tokens shown at a time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion of a step, all that is shown of it, the group it is in as lines, the place of
    that among the groups, and the best completion of each group."""

    row: int
    one: Row
    group: list[dict[str, Any]]
    loss: dict[str, float]
    place: int
    groups: tuple[int, ...]


class RolloutsPage:
    """The page of one browser tab. It holds the completion shown, and no more of the step."""

    def __init__(self, library: Library, address: Address) -> None:
        self.run = library.chosen(address.run)[0]
        self.steps = self.run.rollout_steps()
        stages = [stage for stage, _ in self.steps]
        stage = address.stage if address.stage in stages else (stages[-1] if stages else None)
        self.shown = Shown("/rollouts", address.but(run=(self.run.name,), stage=stage))
        self.asked = 0
        self.choice: Choice | None = None
        self.searches = 0

    @property
    def address(self) -> Address:
        return self.shown.address

    @property
    def numbers(self) -> list[int]:
        """The steps that have rollouts, of the stage."""
        return [step for stage, step in self.steps if stage == self.address.stage]

    def build(self) -> None:
        """Build the page; what is read from files comes after it."""
        keys = {
            "ArrowLeft": ("earlier step", lambda: self.move(-1)),
            "ArrowRight": ("later step", lambda: self.move(1)),
            "n": ("next group", lambda: self.turn(1)),
            "p": ("previous group", lambda: self.turn(-1)),
            "j": ("next completion", lambda: self.advance(1)),
            "k": ("previous completion", lambda: self.advance(-1)),
            ".": ("next token", lambda: self._step_token(1)),
            ",": ("previous token", lambda: self._step_token(-1)),
            "/": ("search", lambda: self.box.run_method("focus")),
        }
        with page(self.shown, f"rollouts of {self.run.name}", keys):
            self._search()
            self.results = ui.column().classes("w-full")
            self._head()
            self.body = ui.column().classes("w-full")
            with self.body:
                if self.numbers:
                    ui.label("reading the step …").classes("muted")
                else:
                    problem("this run has no rollouts yet")
        if self.numbers:
            ui.timer(0.0, self._first, once=True)
        if self._wanted():
            ui.timer(0.05, self.find, once=True)
        ui.timer(EVERY, self.follow)

    async def _first(self) -> None:
        address = self.address
        await self.open(address.step or self.numbers[-1], address.row, address.token)

    async def follow(self) -> None:
        """Offer the steps that were written since."""
        steps = await background.io_bound(self.run.rollout_steps)
        if steps is None or steps == self.steps:
            return
        self.steps = steps
        if self.address.stage is None and steps:
            self.shown.change(stage=steps[-1][0])
            await self._first()
        self._offer()

    # ------------------------------------------------------------ a step

    async def move(self, by: int) -> None:
        """Show the next step, or the one before; the same prompt if the step has it."""
        numbers = self.numbers
        if self.address.step in numbers:
            at = numbers.index(self.address.step) + by
            if 0 <= at < len(numbers):
                await self.open(numbers[at], None)

    async def go(self, wanted: float | None) -> None:
        """Show the step nearest to a number, or the newest; nothing if there are none."""
        numbers = self.numbers
        if numbers:
            near = numbers[-1] if wanted is None else min(numbers, key=lambda n: abs(n - wanted))
            await self.open(near, None)

    async def open(self, step: int, row: int | None, token: int | None = None) -> None:
        """Show a step; without `row` the best completion of the group whose rewards differ most."""
        self.shown.change(step=step, row=row, token=token)
        self.step.value = step
        self.loss.text = ""
        await self._show(row)

    async def choose(self, row: int, token: int | None = None) -> None:
        """Show a completion of the step with its group, and the figures of one of its tokens."""
        self.shown.change(token=token)
        await self._show(row)

    async def advance(self, by: int) -> None:
        """Show a completion further down or up; keys that come while one is read add up."""
        self.shown.change(row=max(0, (self.address.row or 0) + by))
        await self.choose(self.address.row or 0)

    async def turn(self, by: int) -> None:
        """Show the next group of the step, or the one before."""
        if self.choice is None:
            return
        at = self.choice.place + by
        if 0 <= at < len(self.choice.groups):
            await self.choose(self.choice.groups[at])

    async def _show(self, row: int | None) -> None:
        """Read a completion of the address's step, and show it unless another was asked for."""
        step = self.address.step
        if step is None:
            return
        self.asked += 1
        asked, found = self.asked, None
        try:
            found = await background.io_bound(self._read, step, row)
            wrong = None
        except KeelError as error:
            wrong = str(error)
        if asked != self.asked or self.body.is_deleted:
            return
        self.body.clear()
        with self.body:
            if wrong is not None:
                problem(wrong)
            elif found is not None:
                self.choice = found
                self.shown.change(row=found.row)
                self.loss.text = _loss_text(found.loss)
                self._prompt(found)
                self._group(found.group)
                self._tokens(Tokens(found.one))
                self._verdicts(found.one)

    def _read(self, step: int, row: int | None) -> Choice | None:
        """What is shown of a completion; None of an empty step. Runs in a thread: a large step
        takes a second."""
        rows = self.run.rows(str(self.address.stage), step)
        if not len(rows):
            return None
        at = rows.widest[0][0] if row is None else min(max(row, 0), len(rows) - 1)
        groups = tuple(members[0] for members in rows.by_group.values())
        group = [
            {**summary(rows[place]), "id": place, "rank": rank, "shown": "▸" if place == at else ""}
            for rank, place in enumerate(rows.by_group[rows.groups[at]], start=1)
        ]
        place = [*rows.by_group].index(rows.groups[at])
        return Choice(at, rows[at], group, rows.loss, place, groups)

    def _head(self) -> None:
        """The controls of the step, hidden while there is none."""
        with ui.row().classes("items-center w-full").style("gap: 8px 14px") as self.head:
            ui.label(visible(self.run.name, 100)).style("font-weight: 600")
            self.stages = ui.select([], label="stage")
            self.stages.on_value_change(lambda e: self._stage(e.value))
            _icon("chevron_left", "earlier step", lambda: self.move(-1))
            self.step = ui.number(label="step", value=self.address.step, format="%d")
            self.step.props("dense data-testid=step").style("width: 90px")
            self.step.on("keydown.enter", lambda: self.go(self.step.value))
            _icon("chevron_right", "later step", lambda: self.move(1))
            self.count = ui.label().classes("figure")
            self.count.props("data-testid=newest aria-live=polite")
            _icon("last_page", "newest step", lambda: self.go(None))
            self.loss = ui.label().classes("muted figure")
        self.head.set_visibility(False)
        self._offer()

    def _offer(self) -> None:
        """Offer the stages and steps that have rollouts; what is being typed stays."""
        if self.steps:
            self.head.set_visibility(True)
        stages = list(dict.fromkeys(stage for stage, _ in self.steps))
        if stages != self.stages.options:
            self.stages.set_options(stages, value=self.address.stage)
        self.stages.set_visibility(len(stages) > 1)
        self.count.text = f"newest: step {self.numbers[-1]:,}" if self.numbers else ""

    async def _stage(self, stage: str | None) -> None:
        if stage not in (None, self.address.stage):
            self.shown.change(stage=stage)
            self._offer()
            await self.go(None)

    # ------------------------------------------------------------ a completion

    def _prompt(self, choice: Choice) -> None:
        one, place, count = choice.one, choice.place, len(choice.groups)
        with ui.element("section").classes("panel w-full"):
            with ui.row().classes("items-center"):
                back = _icon("chevron_left", "previous group", lambda: self.turn(-1))
                ui.label(f"{place + 1} of {count}").classes("figure").props("data-testid=place")
                on = _icon("chevron_right", "next group", lambda: self.turn(1))
                back.set_enabled(place > 0)
                on.set_enabled(place < count - 1)
                ui.label(visible(f"Prompt {one['prompt_id']}", 200)).style("font-weight: 600")
                ui.button("through the steps", on_click=lambda: self._same_prompt(one)).props(
                    "flat dense no-caps size=sm data-testid=same-prompt"
                )
            _text(prompt_text(one["prompt"]))
            if one.get("expected") is not None:
                ui.label(visible(f"expected: {one['expected']}", 500)).classes("text")

    def _group(self, rows: list[dict[str, Any]]) -> None:
        """The completions of the prompt, best first."""
        names = [name for name in rows[0] if name not in ("id", "turns", "rank", "shown")]
        if any(row["turns"] != 1 for row in rows):
            names.append("turns")
        for row in rows:
            row["link"] = self.address.but(row=row["id"], token=None).url("/rollouts")
        table = LinkedTable("rank", rows, ["shown", "rank", *names], "group")
        table.classes("wide")
        table.columns[0]["label"] = ""
        table.on("rowClick", lambda e: self.choose(e.args[1]["id"]))

    def _tokens(self, tokens: Tokens) -> None:
        found = {measure.key: measure for measure in tokens.values}
        colour = self.address.colour if self.address.colour in found else next(iter(found), None)
        measure, count = found.get(colour or ""), len(tokens)
        with ui.element("section").classes("panel w-full"):
            with ui.row().classes("items-center w-full").style("gap: 8px 14px"):
                ui.label("Tokens").style("font-weight: 600")
                labels = {key: measure.label for key, measure in found.items()}
                select = ui.select(labels, value=colour, label="colour by")
                select.props("dense data-testid=colour")
                select.on_value_change(lambda e: self._colour(e.value))
                if measure is not None:
                    ui.label(legend(tokens, measure)).classes("muted")
            token = min(max(self.address.token or 0, 0), count - 1)
            first = max(token, 0) // TOKENS * TOKENS
            html = ui.html(tokens.html(measure, first=first, limit=TOKENS), sanitize=False)
            html.classes("tokens").props("data-testid=tokens")
            html.on(
                "click",
                lambda e: self._token(tokens, e.args),
                js_handler="(e) => { const t = e.target.dataset.token; if (t) emit(Number(t)) }",
            )
            if count > TOKENS:
                row = self.address.row or 0
                with ui.row().classes("items-center"):
                    end = min(first + TOKENS, count)
                    ui.label(f"tokens {first:,} to {end - 1:,} of {count:,}").classes("muted")
                    for label, to in (("earlier", first - TOKENS), ("later", first + TOKENS)):
                        button = ui.button(label, on_click=partial(self.choose, row, to))
                        button.props("flat dense no-caps").set_enabled(0 <= to < count)
            self.token_card = ui.column().classes("w-full").props("data-testid=token")
        if self.address.token is not None:
            self._token(tokens, self.address.token)

    async def _colour(self, key: str) -> None:
        self.shown.change(colour=key)
        await self.choose(self.address.row or 0, self.address.token)

    async def _step_token(self, by: int) -> None:
        """Show the figures of the next token, or of the one before."""
        token = self.address.token
        await self.choose(self.address.row or 0, 0 if token is None else max(token + by, 0))

    def _token(self, tokens: Tokens, token: int) -> None:
        """The figures of a token: what is recorded, and its terms of the loss."""
        if not 0 <= token < len(tokens):
            return
        self.shown.change(token=token)
        self.token_card.clear()
        with self.token_card:
            piece = visible(tokens.pieces[token], 200)
            figures = [f"{name} {text}" for name, text in tokens.describe(token)]
            ui.label(f"“{piece}”  " + " · ".join(figures)).classes("text figure")
            terms = tokens.loss_terms(token)
            if terms:
                parts = [f"{name.removeprefix('loss/')} {v:+.4g}" for name, v in terms.items()]
                ui.label("terms of the loss: " + " · ".join(parts)).classes("text figure")

    def _verdicts(self, one: Row) -> None:
        """The score of each reward side by side, with what it recorded, such as a judge's words."""
        found = verdicts(one)
        if len(found) < 2 and not any(verdict.words for verdict in found):
            return  # the table has the one score
        with ui.element("div").classes("panels").props("data-testid=verdicts"):
            for verdict in found:
                with ui.element("section").classes("panel"):
                    with ui.row().classes("items-center"):
                        ui.label(visible(verdict.name, 100)).style("font-weight: 600")
                        if verdict.score is not None:
                            ui.label(number(verdict.score)).classes("figure")
                    for kind, text in verdict.words:
                        if kind:
                            ui.label(visible(kind, 60)).classes("muted")
                        _text(text)

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
            finish = CHOICES["finish"]
            select = ui.select([*finish], value=address.finish, label="ended by", clearable=True)
            self.limits["finish"] = select.props("dense").style("width: 110px")
            ui.button("search", on_click=self.search).props("outline no-caps data-testid=go")
        self.box.on("keydown.enter", self.search)

    async def search(self) -> None:
        """Look for what the fields say."""
        values = {key: _limit(key, field.value) for key, field in self.limits.items()}
        self.shown.change(text=self.box.value or None, prompt=None, **values)
        await self.find()

    async def _same_prompt(self, one: Row) -> None:
        self.box.value = ""
        self.shown.change(text=None, prompt=one["prompt_id"])
        await self.find()

    def _wanted(self) -> bool:
        return any(getattr(self.address, name) is not None for name in SEARCHED)

    async def find(self) -> None:
        """Show what fits the address's query, unless another search began since."""
        self.searches += 1
        search = self.searches
        self.results.clear()
        with self.results:
            ui.label("reading the rollouts …").classes("muted")
        hits = await background.io_bound(self.run.index.search, self.address)
        if hits is None or search != self.searches or self.results.is_deleted:
            return
        self.results.clear()
        with self.results:
            more = f", the first {len(hits.rows)} shown" if hits.total > len(hits.rows) else ""
            text = f"{hits.total:,} of {hits.searched:,} completions{more}"
            ui.label(text).classes("muted").props("data-testid=hits")
            for name in hits.damaged:
                problem(f"rollouts/{name} is damaged and left out")
            rows = [self._hit(at, hit) for at, hit in enumerate(hits.rows)]
            names = ("step", "reward", "length", "finish", "prompt", "completion")
            table = LinkedTable("step", rows, names, "results", pagination=10)
            table.classes("wide")
            table.on("rowClick", lambda e: self._open_hit(e.args[1]))

    def _hit(self, at: int, hit: Row) -> dict[str, Any]:
        texts = {name: visible(hit[name], PREVIEW) for name in ("prompt", "completion")}
        same = {name: hit[name] for name in ("stage", "step", "row", "length", "finish")}
        link = self.address.but(stage=hit["stage"], step=hit["step"], row=hit["row"], token=None)
        reward = figure(hit["reward"])
        return {"id": at, **same, **texts, "reward": reward, "link": link.url("/rollouts")}

    async def _open_hit(self, hit: Row) -> None:
        self.shown.change(stage=hit["stage"])
        self.stages.value = hit["stage"]
        self._offer()
        await self.open(int(hit["step"]), int(hit["row"]))


def _text(text: str) -> None:
    ui.label(visible(text, LONGEST, lines=True)).classes("text")


def _loss_text(terms: Mapping[str, float]) -> str:
    shown = ", ".join(f"{name.removeprefix('loss/')} {v:.4g}" for name, v in terms.items())
    return f"loss of the step, summed over its tokens: {shown}" if terms else ""


def _icon(icon: str, name: str, do: Callable[[], object]) -> ui.button:
    """A button with a picture, and a name for who does not see it."""
    button = ui.button(icon=icon, on_click=do).props(f'flat dense aria-label="{name}"')
    return button.tooltip(name)


def _limit(key: str, value: Any) -> Any:
    """A condition of the search as an address can hold it."""
    if not isinstance(value, int | float):
        return value
    return KINDS[key](min(max(value, -LARGEST), LARGEST))
