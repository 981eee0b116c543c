"""Reinforcement learning of the policy on its own rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from keel.config.rl import RolloutStage

if TYPE_CHECKING:
    from keel.training.setup import RunContext
    from keel.training.state import Progress


class RLStage(RolloutStage):
    """Reinforcement learning."""

    panels: ClassVar[str] = "rl"
    stage: Literal["rl"] = "rl"

    def train(self, run: RunContext, progress: Progress) -> Progress:
        from contextlib import closing

        from keel.training import loop, rl, rl_stage

        with rl_stage.place(run, self, progress) as models:
            progress = rl_stage.begin(run, self, progress)
            made = rl_stage.build_loop(run, self, models, progress)
            with closing(made):
                work = rl.sample_only if self.samples_only else loop.run
                progress = work(made, progress)
                rl_stage.note_costs(self, made)
            rl_stage.show(run, self, made, progress)
        return progress


STAGE = RLStage
