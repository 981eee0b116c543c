"""`keel prefs synthesize`: completions, pairs and a judge's labels into a preference store.

STORE           the preference store; every answer is written to it as it arrives
STORE.requests  every paid answer, by a hash of its request
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from keel.data.judged_rows import Fields
from keel.data.tables import read_file, refuse_bad
from keel.preferences.agreement import audit_judges
from keel.preferences.records import PromptRecord, content_id
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis_options import (
    CostForecast,
    ModelFolder,
    Role,
    SynthesisOptions,
    Usage,
    build_asker,
    forecast_costs,
    requests_path,
)
from keel.preferences.synthesis_work import (
    FolderSampler,
    Note,
    ProgressNotes,
    Work,
    ask_server,
    check_folder,
    missing_completions,
    missing_labels,
    missing_pairs,
)
from keel.rewards.judge_questions import SpendLimitReached
from keel.rewards.judge_requests import Account, JudgeStore
from keel.types import KeelError


@dataclass(frozen=True, slots=True)
class SynthesisReport:
    """What a synthesis did.

    `left` counts the completions and labels that are still missing, `too_long` prompts that a
    model folder cannot read. `stopped` is the reason if the budget ended it, `account` what all
    requests of the store took.
    """

    forecast: CostForecast | None
    added: Mapping[str, int]
    left: Mapping[str, int]
    too_long: int
    account: Account | None
    stopped: str | None
    audit: Sequence[Mapping[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        return {
            "forecast": None if self.forecast is None else self.forecast.as_dict(),
            "added": dict(self.added),
            "left": dict(self.left),
            "too_long": self.too_long,
            "requests": None if self.account is None else asdict(self.account),
            "stopped": self.stopped,
            "audit": list(self.audit),
        }


def read_prompts(path: str) -> list[PromptRecord]:
    """The prompts of a file (JSONL, or Parquet by its ending): `prompt` as text or messages.

    Other columns stay with the prompt. Raises KeelError for a row that cannot be read.
    """
    found, bad = {}, []
    for row in read_file(path).rows:
        columns = {k: value for k, value in row.values.items() if k not in ("prompt", "tools")}
        try:
            fields = Fields(row.values, row.place)
            record = PromptRecord(fields.prompt("prompt"), {**columns, **fields.tools_column()})
        except KeelError as error:
            bad.append(row.left_out(str(error)))
            continue
        found[record.id] = record
    refuse_bad(bad)
    return list(found.values())


def synthesize(
    store: PreferenceStore,
    options: SynthesisOptions,
    prompts: Sequence[PromptRecord] | None = None,
    *,
    only_forecast: bool = False,
    note: Note = lambda line: None,
) -> SynthesisReport:
    """Sample completions, pair them and have a judge compare each pair in both orders.

    `prompts` are added to the store; None: all that it has. What the store holds is used and not
    asked for again, so that a run that was killed or stopped goes on where it was. A few prompts
    are done first and the rest is forecast from them; with `only_forecast` that is all.

    Raises KeelError for options that do not fit, a server that gives no answers or a model that
    does not load. What was paid for is in the store then. A budget that is used up raises nothing:
    the report's `stopped` has the reason.
    """
    if prompts is not None:
        store.add(prompts)
    chosen = list(store.prompts()) if prompts is None else list(prompts)
    if not chosen:
        raise KeelError(f"{store.path}: it has no prompts: give a file of prompts")
    reference = options.reference
    if reference is not None and not any(reference in prompt.columns for prompt in chosen):
        raise KeelError(f"reference = {reference!r}: no prompt has such a column: fix the name")
    # Whatever cannot be asked is found before anything is paid.
    for model in options.models:
        if isinstance(model, ModelFolder):
            check_folder(model)
    for server in options.servers:
        role: Role = "labels" if server is options.judge else "completions"
        build_asker(store.path, options, server, role).close()
    return _Synthesis(store, options, chosen, note).run(only_forecast)


class _Synthesis:
    """The steps of one synthesis, and what each model took."""

    def __init__(
        self,
        store: PreferenceStore,
        options: SynthesisOptions,
        prompts: Sequence[PromptRecord],
        note: Note,
    ) -> None:
        self.store, self.options, self.prompts, self.note = store, options, prompts, note
        self.usage = Usage()
        self.too_long = 0
        self.loaded: FolderSampler | None = None

    def run(self, only_forecast: bool) -> SynthesisReport:
        before, stopped, forecast = self.store.counts(), None, None
        try:
            forecast = self.forecast()
            if not only_forecast:
                self.process(self.prompts)
        except SpendLimitReached as limit:
            stopped = str(limit)
        after, missing = self.store.counts(), (self.store, self.options, self.prompts)
        return SynthesisReport(
            forecast=forecast,
            added={name: after[name] - before[name] for name in ("completions", "pairs", "labels")},
            left={
                "completions": len(missing_completions(*missing)),
                "labels": sum(work.size for work in missing_labels(*missing)),
            },
            too_long=self.too_long,
            account=self.account(),
            stopped=stopped,
            audit=audit_judges(self.store),
        )

    def account(self) -> Account | None:
        """What all requests of the store took; None if there was none."""
        path = requests_path(self.store.path)
        if not path.exists():
            return None
        with closing(JudgeStore(path)) as requests:
            return requests.account()

    def forecast(self) -> CostForecast | None:
        """Do a few of the prompts and forecast what all take that have work to do.

        It is noted, and entered in the ledger unless one of the same plan is there.
        """
        prompts = self.unfinished()
        if not prompts:
            return None
        sample = prompts[: max(1, min(self.options.forecast_prompts, len(prompts) // 4))]
        self.note(f"sample: {len(sample)} of {len(prompts)} prompts")
        self.process(sample)
        priced = all(server.price is not None for server in self.options.servers)
        ids = {prompt.id for prompt in sample}
        found = forecast_costs(self.usage, priced, ids, len(prompts))
        every = sorted(prompt.id for prompt in self.prompts)
        plan = content_id("synthesize", self.options.identity, every)
        self.store.add_forecast(found.entries(plan, self.options.round))
        for line in found.lines(self.options.budget):
            self.note(line)
        return found

    def unfinished(self) -> list[PromptRecord]:
        """The prompts with work to do, in a random order."""
        missing = (self.store, self.options, self.prompts)
        ids = {pair.prompt for pair in missing_pairs(*missing)}
        ids |= {one.prompt.id for one in missing_completions(*missing) + missing_labels(*missing)}
        return sorted(
            (prompt for prompt in self.prompts if prompt.id in ids),
            key=lambda prompt: content_id(self.options.seed, prompt.id),
        )

    def process(self, prompts: Sequence[PromptRecord]) -> None:
        """Completions, pairs and labels of prompts, as far as they are missing."""
        work = missing_completions(self.store, self.options, prompts)
        for model in self.options.models:
            self.do([one for one in work if one.model == model])
        self.store.add(missing_pairs(self.store, self.options, prompts))
        self.do(missing_labels(self.store, self.options, prompts))

    def do(self, work: Sequence[Work]) -> None:
        """Have a model do its work of one role."""
        if not work:
            return
        notes, model = ProgressNotes(self.note, work), work[0].model
        if isinstance(model, ModelFolder):
            if self.loaded is None or self.loaded.model != model:
                self.loaded = None  # its memory is needed
                self.loaded = FolderSampler(self.options, model)
            long = self.loaded.sample(self.store, work, self.usage, notes)
            self.too_long = max(self.too_long, long)
        else:
            ask_server(self.store, self.options, model, work, self.usage, notes)
