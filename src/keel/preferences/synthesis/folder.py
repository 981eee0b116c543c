"""Completions that the native engine samples from a model folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

from keel.config.model import Model
from keel.preferences.store.store import PreferenceStore
from keel.preferences.synthesis.forecast import Usage
from keel.preferences.synthesis.options import ModelFolder, SynthesisOptions
from keel.preferences.synthesis.work import ProgressNotes, Work, sample_record
from keel.types import Group, Prompt

Ready = tuple[Prompt, list[Work]]
"""An encoded prompt, and its samples that are missing."""


def check_folder(model: ModelFolder) -> None:
    """Raise KeelError if there is no such model."""
    from keel.models.loading import read_config

    read_config(_spec(model))


def _spec(model: ModelFolder) -> Model:
    return Model.model_validate({"name": model.model, "device": model.device})


class FolderSampler:
    """A model folder, loaded, and the native engine that samples from it.

    Raises KeelError for a model that does not load.
    """

    def __init__(self, options: SynthesisOptions, model: ModelFolder) -> None:
        from keel.engines.native import NativeEngine
        from keel.models.chat import Encoder
        from keel.models.policy import load_policy
        from keel.training.setup import longest_prompt

        self.options, self.model = options, model
        policy = load_policy(_spec(model), options.seed)
        self.engine = NativeEngine(
            policy.model,
            policy.tokenizer,
            max_num_seqs=model.max_num_seqs,
            autocast=policy.autocast,
        )
        longest = longest_prompt(None, policy.context, options.sampling.max_tokens, "max_tokens")
        self.encode = Encoder(policy.tokenizer, longest, served=policy.served)

    def sample(
        self, store: PreferenceStore, work: Sequence[Work], usage: Usage, notes: ProgressNotes
    ) -> int:
        """Sample what is missing, into the store; how many prompts are too long for the model.

        A completion depends on model, prompt, number and seed alone, so that one that a kill lost
        is sampled again. Raises KeelError if memory runs out.
        """
        from keel.learn.token_budget import oom_context

        options = self.options
        of_prompts = [list(some) for _, some in groupby(work, key=lambda one: one.prompt.id)]
        ready: list[Ready] = []
        for some in of_prompts:
            record = some[0].prompt
            prompt = self.encode(Prompt(record.id, record.content, tools=record.tools))
            if prompt is not None:
                ready.append((prompt, some))
        size = max(1, self.model.max_num_seqs // options.samples)
        for start in range(0, len(ready), size):
            part = ready[start : start + size]
            begin = time.monotonic()

            def write(place: int, group: Group, part: Sequence[Ready] = part) -> None:
                nonlocal begin
                now = time.monotonic()
                seconds, begin = now - begin, now
                self._write(store, part[place][1], group, seconds, usage)
                notes.add(len(part[place][1]))

            with oom_context(
                f"{len(part)} prompts were answered", "lower max_num_seqs or max_tokens"
            ):
                prompts = [prompt for prompt, _ in part]
                self.engine.sample(
                    prompts, options.samples, options.sampling, options.seed, on_group=write
                )
        return len(of_prompts) - len(ready)

    def _write(
        self,
        store: PreferenceStore,
        work: Sequence[Work],
        group: Group,
        seconds: float,
        usage: Usage,
    ) -> None:
        """The completions of a prompt that are missing, in one transaction; `seconds` is of all.

        Half of a character, which UTF-8 cannot encode, becomes a question mark.
        """
        store.add(
            sample_record(
                self.options,
                one,
                completion.text.encode("utf-8", "replace").decode("utf-8"),
                tokens=len(completion),
                seconds=seconds / len(work),
                finish=completion.finish,
            )
            for one in work
            for completion in (group.completions[one.sample],)
        )
        usage.add(
            "completions", self.model.model, work[0].prompt.id, {"machine_hours": seconds / 3600}
        )
