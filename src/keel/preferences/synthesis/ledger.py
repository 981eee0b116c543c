"""What answered requests took: entries of the store's ledger, and sums for the forecast.

The money is in the entries alone, and not on labels and completions too, so that it counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from keel.preferences.store.records import CostRecord
from keel.preferences.store.store import PreferenceStore
from keel.preferences.synthesis.options import ModelServer, requests_path
from keel.rewards.judge.requests import Asker
from keel.rewards.judge.store import Account, Cost, JudgeStore

Role = Literal["completions", "labels"]
"""What a model is asked for."""


@dataclass(frozen=True, slots=True)
class PaidCall:
    """An answered request to a server, by its key. `seconds` is None where another process sent it;
    `prompt` is the prompt that it was for, `bytes_in` the length of its messages."""

    key: str
    prompt: str
    cost: Cost
    seconds: float | None
    bytes_in: int

    def entries(
        self, server: ModelServer, role: Role, round: int, concurrency: int
    ) -> Iterator[CostRecord]:
        """Its entries of the ledger. Hours are those of a run that keeps all requests busy."""
        purpose = f"{role} of {server.model}"
        amounts: dict[str, float | None] = {
            "dollars": None if server.price is None else self.cost.dollars,
            "input tokens": self.cost.tokens_in,
            "output tokens": self.cost.tokens_out,
            "hours": None if self.seconds is None else self.seconds / 3600 / concurrency,
        }
        for unit, amount in amounts.items():
            if amount is not None:
                id = f"{self.key}/{unit}"
                # Two processes may send one request at the same moment; both took their time.
                id += f"/{amount!r}" if unit == "hours" else ""
                yield CostRecord(id, "api", amount, unit, purpose, round)


class CallUsage:
    """Sums over what one model was asked for in this process; `asked` counts completions or
    labels, of which one may take several requests."""

    def __init__(self) -> None:
        self.asked = self.calls = self.timed = 0
        self.bytes_in = self.bytes_out = self.tokens_in = self.tokens_out = 0
        self.dollars = self.seconds = 0.0
        self.of_prompt: defaultdict[str, float] = defaultdict(float)
        """Tokens of each prompt."""

    def add(self, call: PaidCall) -> None:
        """Count a request."""
        self.calls += 1
        self.bytes_in += call.bytes_in
        self.tokens_in += call.cost.tokens_in
        self.tokens_out += call.cost.tokens_out
        self.dollars += call.cost.dollars
        self.of_prompt[call.prompt] += call.cost.tokens
        if call.seconds is not None:
            self.timed += 1
            self.seconds += call.seconds


def paid_calls(
    asker: Asker, prompt: str, costs: Mapping[str, Cost], bytes_in: int
) -> list[PaidCall]:
    """The requests with these costs, which had messages of equal length."""
    return [
        PaidCall(key, prompt, cost, asker.seconds.get(key), bytes_in) for key, cost in costs.items()
    ]


def settle(store: PreferenceStore, round: int) -> Account | None:
    """Add the entries of paid requests that have none, as those whose process was killed.

    Returns the account of the file of requests, None where there is none.
    """
    path = requests_path(store.path)
    if not path.exists():
        return None
    entered = {id for (id,) in store.database.rows("SELECT id FROM costs")}
    requests = JudgeStore(path)
    try:
        missing = [
            CostRecord(f"{key}/{unit}", "api", amount, unit, f"requests to {model}", round)
            for key, model, cost in requests.costs()
            if f"{key}/input tokens" not in entered
            for unit, amount in (
                ("dollars", cost.dollars),
                ("input tokens", cost.tokens_in),
                ("output tokens", cost.tokens_out),
            )
            if unit != "dollars" or amount
        ]
        store.add_costs(missing)
        return requests.account()
    finally:
        requests.close()


def spent(store: PreferenceStore, round: int) -> dict[str, dict[str, float]]:
    """The ledger of a round: sums by unit, `actual` and `forecast`, machine hours apart."""
    found: dict[str, dict[str, float]] = {"actual": {}, "forecast": {}}
    rows = store.database.rows(
        "SELECT kind, unit, forecast, SUM(amount) FROM costs WHERE round = ? AND kind <> 'human'"
        " GROUP BY kind, unit, forecast ORDER BY unit",
        (round,),
    )
    for kind, unit, forecast, amount in rows:
        name = f"machine {unit}" if kind == "gpu" else unit
        found["forecast" if forecast else "actual"][name] = amount
    return found
