"""Breaks the code on purpose, one place at a time, and sees whether the tests notice.

The package is copied to a temporary folder, one passage of one file replaced, and the tests named
next to it run on the copy. A mutant that no test notices has survived, and the command ends with 1.

    python studies/mutations.py [--only TEXT] [--jobs N]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "keel"
TESTS_FAILED = 1
"""pytest's exit code; any other but 0 means that the tests could not run."""


@dataclass(frozen=True)
class Mutation:
    """In `file` (below src/keel), `old` becomes `new`; `tests` ought to fail."""

    what: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


OBJECTIVE = "tests/objective/test_"
GROUP = (f"{OBJECTIVE}group_advantages.py",)
TEMPORAL = (f"{OBJECTIVE}segments.py", f"{OBJECTIVE}gae.py")
POLICY = (f"{OBJECTIVE}surrogates.py", f"{OBJECTIVE}ratios.py")
DIVERGENCE = (f"{OBJECTIVE}divergences.py", f"{OBJECTIVE}enumeration.py")
TURNS = (f"{OBJECTIVE}turns.py",)
CORRECTIONS = tuple(f"{OBJECTIVE}{name}.py" for name in ("corrections", "masks", "variants"))
PREFERENCE = (f"{OBJECTIVE}preference.py",)
JUDGED = ("tests/training/test_trl_preferences.py",)
LEARN = ("tests/learn",)
TEACHER = (f"{OBJECTIVE}distillation.py",)
VALUE = tuple(
    f"{OBJECTIVE}{name}.py"
    for name in ("gae", "divergences", "ratios", "background", "rlax_golden")
)

MUTATIONS: tuple[Mutation, ...] = (
    # advantages
    Mutation("sign of the advantage", "objective/group.py",
             "reward_S - mean_S, torch", "mean_S - reward_S, torch", GROUP),
    Mutation("biased std (ddof 0)", "objective/group.py",
             "group.squares_S / (group.count_S - ddof).clamp(min=1)",
             "group.squares_S / group.count_S.clamp(min=1)", GROUP),
    Mutation("epsilon inside the root", "objective/group.py",
             "torch.where(group.unequal_S, variance_S, 1.0).sqrt()\n"
             "    return group.centred_S / (std_S + epsilon)",
             "(torch.where(group.unequal_S, variance_S, 1.0) + epsilon).sqrt()\n"
             "    return group.centred_S / std_S", GROUP),
    Mutation("equal rewards not cut to 0", "objective/group.py",
             "unequal_S = present_S & (most_S > least_S)", "unequal_S = present_S", GROUP),
    Mutation("absent rewards counted as 0", "objective/group.py",
             "peers.sum(present_S.to(reward_S.dtype))",
             "peers.sum(torch.ones_like(reward_S))", GROUP),
    Mutation("leave-one-out without G/(G-1)", "objective/group.py",
             "group.centred_S * (group.count_S / (group.count_S - 1).clamp(min=1))",
             "group.centred_S * 1.0", GROUP),
    Mutation("optimal baseline without lengths", "objective/group.py",
             "_deviation(reward_S, groups_S, lengths_S.to(reward_S.dtype))",
             "_deviation(reward_S, groups_S)", GROUP),
    Mutation("whitening: epsilon outside the root", "objective/segments.py",
             "(variance + epsilon).sqrt()", "(variance.sqrt() + epsilon)", GROUP),
    Mutation("whitening: biased variance", "objective/segments.py",
             "(count - 1).clamp(min=1)", "count", GROUP),
    Mutation("process: sum up to the token", "objective/group.py",
             "return to_go(at_end_N, lengths_S)",
             "return at_end_N + at_end_N.sum() - to_go(at_end_N, lengths_S)", GROUP),
    Mutation("GAE without lambda", "objective/gae.py",
             "decay_N = gamma * lam * continues_N", "decay_N = gamma * continues_N", TEMPORAL),
    Mutation("GAE in single precision", "objective/gae.py",
             "gamma * lam * continues_N.to(td_error_N.dtype)",
             "(gamma * lam * continues_N.float())", TEMPORAL),
    Mutation("TD error without gamma", "objective/gae.py",
             "reward_N + gamma * next_value_N", "reward_N + next_value_N", TEMPORAL),
    Mutation("recurrence leaks across ends", "objective/segments.py",
             "index_N[1:] == index_N[:-1], (0, 1), value=False",
             "index_N[1:] >= index_N[:-1], (0, 1), value=False", TEMPORAL),
    Mutation("recurrence one token short", "objective/segments.py",
             "max(total - 1, 0).bit_length()", "max(total - 2, 0).bit_length()", TEMPORAL),
    # ratios and surrogates
    Mutation("sequence ratio without 1/L", "objective/ratios.py",
             "mean_S = segment_mean(log", "mean_S = segment_sum(log", POLICY),
    Mutation("sequence_token not detached", "objective/ratios.py",
             "sequence(log_prob_N.detach(), old", "sequence(log_prob_N, old", POLICY),
    Mutation("clip bounds exchanged", "objective/surrogates.py",
             "clamp(1.0 - low, 1.0 + high)", "clamp(1.0 - high, 1.0 + low)", POLICY),
    Mutation("clip optimistic", "objective/surrogates.py",
             "value_N = torch.minimum(", "value_N = torch.maximum(", POLICY),
    Mutation("dual clip on the wrong side", "objective/surrogates.py",
             "torch.where(advantage_N < 0, torch.maximum",
             "torch.where(advantage_N > 0, torch.maximum", POLICY),
    Mutation("CISPO weight not detached", "objective/weighted.py",
             "exponential(log_ratio_N.detach())", "exponential(log_ratio_N)", POLICY),
    Mutation("SAPO temperatures exchanged", "objective/surrogates.py",
             "masked_fill(advantage_N > 0,", "masked_fill(advantage_N < 0,", POLICY),
    Mutation("SAPO gate of slope 1/4", "objective/surrogates.py",
             "return 4.0 / temperature_N * gate_N", "return gate_N", POLICY),
    Mutation("GMPO clipped after the mean", "objective/surrogates.py",
             "ratio_S = exponential(segment_mean(clipped_N, lengths_S))",
             "ratio_S = exponential(segment_mean(log_ratio_N, lengths_S).clamp(-low, high))",
             POLICY),
    Mutation("GMPO bounds of the ratio", "objective/surrogates.py",
             "log_ratio_N.clamp(-low, high)",
             "log_ratio_N.exp().clamp(1 - low, 1 + high).log()", POLICY),
    Mutation("log-ratios not clamped", "objective/ratios.py",
             "log_ratio_N.clamp(-LIMIT, LIMIT).exp()", "log_ratio_N.exp()", POLICY),
    # losses on judged answers
    Mutation("robust DPO as the conservative one", "objective/preference.py",
             "(probability_C - smoothing) / (1 - 2 * smoothing)",
             "probability_C * (1 - 2 * smoothing) + smoothing", PREFERENCE),
    Mutation("hinge without beta", "objective/preference.py",
             "reward_C = beta * gap_C", "reward_C = gap_C", PREFERENCE),
    Mutation("SimPO's margin on one side", "objective/preference.py",
             "-beta * gap_C - margin, probability_C", "-beta * gap_C + margin, probability_C",
             PREFERENCE),
    Mutation("odds as probabilities", "objective/preference.py",
             "return below_S - (-torch.expm1(below_S)).log()", "return below_S", PREFERENCE),
    Mutation("odds ratio without beta", "objective/preference.py",
             "return beta * _both_ways(gap_C", "return _both_ways(gap_C", PREFERENCE),
    Mutation("likelihood of both answers", "objective/preference.py",
             "return -share_S * log_prob_S / tokens", "return -log_prob_S / tokens", PREFERENCE),
    Mutation("reference point below 0", "objective/preference.py",
             ".mean().clamp(min=0)", ".mean()", PREFERENCE),
    Mutation("reference point with a gradient", "objective/preference.py",
             "log_ratio_S.detach().mean()", "log_ratio_S.mean()", PREFERENCE),
    Mutation("weights of KTO exchanged", "objective/preference.py",
             "desirable_weight * torch.sigmoid(-value_S)",
             "undesirable_weight * torch.sigmoid(-value_S)", PREFERENCE),
    Mutation("length-normalised DPO of sums", "algorithms/preferences.py",
             '{**_SMOOTHED, "beta": 5.0}, means=True', '{**_SMOOTHED, "beta": 5.0}', JUDGED),
    Mutation("CPO with a reference", "algorithms/preferences.py",
             '{**_SMOOTHED, "nll": 1.0}, **_ALONE', '{**_SMOOTHED, "nll": 1.0}', JUDGED),
    Mutation("ORPO's likelihood without the prompt", "algorithms/preferences.py",
             "odds=True, prompt=True", "odds=True", JUDGED),
    Mutation("KTO's answers not exchanged", "training/judged_losses.py",
             "zip(answers, (*answers[-1:], *answers[:-1])", "zip(answers, answers", JUDGED),
    Mutation("KTO's reference point of a micro-batch", "training/judged_losses.py",
             "self.loss(ratio_S, label_S, point,",
             "self.loss(ratio_S, label_S, preference.reference_point("
             "self._ratios(others[span], token_budget)),", JUDGED),
    # weights, divergences, value, entropy, correction
    Mutation("sequence mean without 1/L", "objective/weights.py",
             "(lengths_S.numel() * lengths_S.clamp(min=1).to(dtype))",
             "(lengths_S.numel() * torch.ones_like(lengths_S).to(dtype))", POLICY),
    Mutation("token mean per sequence", "objective/weights.py",
             "total = lengths_S.sum()", "total = (lengths_S.numel() * lengths_S.max())", POLICY),
    Mutation("constant without 1/S", "objective/weights.py",
             "(max(lengths_S.numel(), 1) * constant)", "constant", POLICY),
    Mutation("k3 of the wrong side", "objective/divergences.py",
             "(-difference_N).expm1() + difference_N",
             "difference_N.expm1() - difference_N", DIVERGENCE),
    Mutation("k2 without the half", "objective/divergences.py",
             "0.5 * _difference(", "_difference(", DIVERGENCE),
    Mutation("old and new exchanged", "objective/divergences.py",
             "k3(old_log_prob_N, log_prob_N)", "k3(log_prob_N, old_log_prob_N)", DIVERGENCE),
    Mutation("PPO's rule turned round", "objective/divergences.py",
             "if kl > 1.5 * target:\n        return beta * 2.0",
             "if kl > 1.5 * target:\n        return beta / 2.0", DIVERGENCE),
    # a teacher
    Mutation("prefix weights of what came before", "objective/distillation.py",
             "gain * (left_N / total_N)", "gain * (1.0 - left_N / total_N)", TEACHER),
    Mutation("JSD shares exchanged", "objective/distillation.py",
             "mix * of_teacher_N + (1 - mix) *", "(1 - mix) * of_teacher_N + mix *", TEACHER),
    Mutation("top-k without the rest", "objective/distillation.py",
             ".clamp(max=MOST)", ".clamp(max=-30.0)", TEACHER),
    Mutation("slope of a teacher's divergence not projected", "models/head.py",
             "factor = factor - found.sum(1, keepdim=True)", "factor = factor - 0.0",
             ("tests/models/test_head.py",)),
    Mutation("distillation whitened with the advantage", "learn/loss.py",
             "advantage_N = advantage_N + estimates.distillation_N",
             "advantage_N = segments.whiten(advantage_N + estimates.distillation_N)", TEACHER),
    Mutation("averaged teacher is copied", "models/reference.py",
             "tensor.lerp_(source[name].to(tensor.dtype), rate)", "tensor.copy_(source[name])",
             ("tests/training/test_distillation.py",)),
    Mutation("served teacher scores the token before", "learn/teacher_server.py",
             "device=target_N.device)[target_N]", "device=target_N.device)[target_N - 1]",
             ("tests/training/test_teacher_server.py",)),
    Mutation("served teacher reads the policy's prompt", "training/rl.py",
             "scoring(batch.taught or batch)", "scoring(batch)",
             ("tests/training/test_teacher_server.py",)),
    Mutation("one teacher for all tasks", "training/rl.py",
             "choice.of_task(group.prompt.task)", "choice.of_task('')",
             ("tests/training/test_distillation.py",)),
    Mutation("one model of the server for all tasks", "learn/teacher_server.py",
             "names[at] for at in batch.teachers", "names[0] for at in batch.teachers",
             ("tests/training/test_teacher_server.py",)),
    Mutation("a teacher's numbers at the places of another's", "learn/learner.py",
             "if its == at]", "if its != at]", ("tests/training/test_distillation.py",)),
    Mutation("demonstrations away from the teacher", "algorithms/auxiliary.py",
             "return -taught", "return taught", ("tests/learn/test_teacher_updates.py",)),
    Mutation("log-linear without the distance", "objective/ratios.py",
             "1 / lag_N.clamp(min=1)", "1 / lag_N.clamp(max=1)",
             ("tests/objective/test_ratios.py",)),
    Mutation("log-linear weights from before the update", "learn/loss.py",
             "replace(actions, old_log_prob_N=old_N)",
             "replace(actions, old_log_prob_N=actions.engine_log_prob_N)",
             ("tests/learn/test_log_linear.py",)),
    Mutation("value loss: min for max", "objective/gae.py",
             "0.5 * torch.maximum(", "0.5 * torch.minimum(", VALUE),
    Mutation("value loss without the half", "objective/gae.py",
             "0.5 * torch.maximum(", "torch.maximum(", VALUE),
    Mutation("entropy's sign", "objective/divergences.py",
             "return -(log_prob_NV", "return (log_prob_NV", VALUE),
    Mutation("correction turned round", "objective/corrections.py",
             "log_N = (old_log_prob_N - engine_log_prob_N).detach()\n    if level",
             "log_N = (engine_log_prob_N - old_log_prob_N).detach()\n    if level", CORRECTIONS),
    Mutation("normalised over tokens always", "objective/corrections.py",
             'weight_N.mean() if level == "token" else', 'weight_N.mean() if level else',
             CORRECTIONS),
    Mutation("off-policy mask of good answers", "objective/masks.py",
             "near_N | (advantage_N >= 0)", "near_N | (advantage_N < 0)", CORRECTIONS),
    Mutation("perplexity ratio turned round", "objective/corrections.py",
             "exponential(segment_mean(engine_log_prob_N - old_log_prob_N",
             "exponential(segment_mean(old_log_prob_N - engine_log_prob_N", CORRECTIONS),
    Mutation("χ² without its square", "objective/corrections.py",
             "weight_N.square().mean() - 1", "weight_N.mean() - 1", CORRECTIONS),
    Mutation("online DPO of the easiest pair", "objective/contrasts.py",
             "hard_S = (-sign * margin_S)", "hard_S = (sign * margin_S)", CORRECTIONS),
    Mutation("REAL's slope without the temperature", "objective/contrasts.py",
             "slope_S * (score_S - value_S)", "temperature * slope_S * (score_S - value_S)",
             CORRECTIONS),
    Mutation("FIPO looks back", "objective/surrogates.py",
             "linear_recurrence(decay_N, log_ratio_N.detach())",
             "linear_recurrence(decay_N, log_ratio_N.detach().flip(0)).flip(0)", CORRECTIONS),
    Mutation("VESPO's kernel without its peak at 1", "objective/weighted.py",
             "rate_N * (1 - log_N.exp())", "rate_N * -log_N.exp()", CORRECTIONS),
    Mutation("TOPR fades the right answers", "objective/weighted.py",
             "outcome_S > threshold, torch.ones_like", "outcome_S <= threshold, torch.ones_like",
             CORRECTIONS),
    Mutation("GiGPO: states of all groups together", "learn/anchors.py",
             "setdefault((at, key)", "setdefault((0, key)", ("tests/learn/test_turns.py",)),
    Mutation("GiGPO: rewards of a turn alone, not to go", "objective/turns.py",
             "return_U = returns_to_go(segment_sum(reward_N, lengths_U), turns_S, gamma=gamma)",
             "return_U = segment_sum(reward_N, lengths_U)", TURNS),
    Mutation("MT-GRPO: the last turn is compared as a turn too", "objective/turns.py",
             "turn_U = reward_U.masked_fill(~before_U, torch.nan)", "turn_U = reward_U", TURNS),
    Mutation("turn GAE: the token's λ to the next turn", "objective/turns.py",
             "ahead_U = turn_gamma * turn_lam *", "ahead_U = turn_gamma * lam *", TURNS),
    Mutation("RAE: the average moves before it is used", "objective/baselines.py",
             "(known_S - baseline_R[role_S])",
             "(known_S - (kept_R * baseline_R + (1 - kept_R) * mean_R)[role_S])", TURNS),
    Mutation("the state of an advantage is not resumed", "training/rl.py",
             "estimate(algorithm, batch, rewards, beta, advantage)",
             "estimate(algorithm, batch, rewards, beta)",
             ("tests/training/test_advantage_state.py",)),
    Mutation("MaxRL over the standard deviation's ε", "objective/group.py",
             "group.centred_S / (group.mean_S + epsilon)", "group.centred_S / (1 + epsilon)",
             CORRECTIONS),
    Mutation("auxiliary: gradient through the uncertainty", "objective/auxiliary.py",
             "log_prob_M.detach().exp()", "log_prob_M.exp()", (f"{OBJECTIVE}auxiliary.py",)),
    Mutation("auxiliary: wrong answers imitated", "objective/auxiliary.py",
             "outcome_N > threshold", "outcome_N < threshold", (f"{OBJECTIVE}auxiliary.py",)),
    Mutation("auxiliary: replies learnt as demonstrations", "learn/loss.py",
             "mine_M = batch.actions.imitated_M == imitates",
             "mine_M = batch.actions.imitated_M != imitates", ("tests/learn/test_auxiliary.py",)),
    Mutation("auxiliary: demonstrations leave the others whole", "learn/loss.py",
             "share=1 - share)", "share=1.0)", ("tests/learn/test_auxiliary.py",)),
    Mutation("auxiliary: a reply's place after a selection", "learn/batch.py",
             "own_M + moved(counts)", "own_M",
             ("tests/learn/test_auxiliary.py",)),
    Mutation("masks of a micro-batch", "learn/loss.py",
             "if batch.kept_N is not None:", "if False:", LEARN),
    Mutation("terminated bootstraps", "objective/background.py",
             "torch.where(terminated_B, torch.zeros_like(value_B), value_B)", "value_B", VALUE),
    Mutation("double DQN evaluates online", "objective/background.py",
             "next_target_q_BA.gather(-1, action_B1)", "next_online_q_BA.gather(-1, action_B1)",
             VALUE),
    # joining a row to the maths
    Mutation("sign of the loss", "learn/loss.py",
             "(-1.0, weight_N * surrogate_N)", "(1.0, weight_N * surrogate_N)", LEARN),
    Mutation("mean of each micro-batch", "learn/loss.py",
             "(-1.0, weight_N * surrogate_N)", "(-1.0, surrogate_N / len(surrogate_N))", LEARN),
    Mutation("sign of the divergence", "learn/loss.py",
             "= beta, weight_N * divergence_N", "= -beta, weight_N * divergence_N", LEARN),
    Mutation("divergence without weights", "learn/loss.py",
             "beta, weight_N * divergence_N", "beta, divergence_N / len(divergence_N)", LEARN),
    Mutation("value coefficient dropped", "learn/loss.py",
             "algorithm.value.coefficient * batch", "2 * batch", LEARN),
    Mutation("sign of the entropy bonus", "learn/loss.py",
             "= -algorithm.bonus * batch.token_weight",
             "= algorithm.bonus * batch.token_weight", LEARN),
    Mutation("adaptive bonus applied above the target", "learn/loss.py",
             "coefficient if entropy <= rule.target else 0.0", "coefficient", LEARN),
    Mutation("correction on the divergence's side", "learn/loss.py",
             "surrogate_N * batch.correction_N", "surrogate_N + 0 * batch.correction_N",
             LEARN),
    Mutation("length penalty the same for hard prompts", "rewards/rules.py",
             "right = max(sum(is_right for _, is_right in known), 1)", "right = len(known)",
             ("tests/rewards/test_score.py",)),
    Mutation("factor of cut completions for all", "rewards/scorer.py",
             'if one.finish == "length" else result', 'if one.finish else result',
             ("tests/rewards/test_score.py",)),
    Mutation("prompts outside the window never asked again", "data/curriculum.py",
             "or waited >= self.rule.revisit", "or waited >= 10 * self.rule.revisit",
             ("tests/data/test_curriculum.py",)),
    Mutation("sign of the KL in the reward", "learn/advantages.py",
             "return -beta * estimate(", "return beta * estimate(", LEARN),
    Mutation("returns after whitening", "learn/advantages.py",
             "advantage.returns(signals, advantage_N)",
             "advantage.returns(signals, advantage_N - advantage_N.mean())", LEARN),
    Mutation("targets not moved with their sequence", "learn/batch.py",
             "target_N=chosen.target_N + moved(chosen.lengths),", "target_N=chosen.target_N,",
             LEARN),
    Mutation("tool output among the tokens", "learn/batch.py",
             "written = completion.written.nonzero()[0]",
             "written = completion.written.cumsum() - 1",
             ("tests/training/test_rollout.py",)),
)  # fmt: skip


def mutate(mutation: Mutation, folder: Path) -> None:
    """Copy the package into the folder, with the one passage replaced."""
    shutil.copytree(PACKAGE, folder / "keel", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "keel" / mutation.file
    text = path.read_text()
    if (count := text.count(mutation.old)) != 1:
        raise SystemExit(f"{mutation.what}: {count} times in {mutation.file}, not once: update it")
    path.write_text(text.replace(mutation.old, mutation.new))


def test(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the tests on the package in the folder, which shadows the installed one."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def attempt(mutation: Mutation) -> str | None:
    """The first test that noticed."""
    with tempfile.TemporaryDirectory(prefix="keel-mutant-") as name:
        mutate(mutation, Path(name))
        done = test(Path(name), mutation.tests)
    if done.returncode not in (0, TESTS_FAILED):
        raise SystemExit(f"{mutation.what}: the tests could not run\n{done.stdout}{done.stderr}")
    if done.returncode == 0:
        return None
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "a test"


def untouched(tests: Sequence[str]) -> None:
    """The tests pass on an unchanged copy, and it is the copy that they import."""
    with tempfile.TemporaryDirectory(prefix="keel-mutant-") as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "keel")
        done = test(folder, tests)
        if done.returncode != 0:
            raise SystemExit(f"the tests fail before any mutation\n{done.stdout}{done.stderr}")
        (folder / "keel" / "types.py").write_text("raise RuntimeError\n")
        if test(folder, tests).returncode == 0:
            raise SystemExit("the tests do not import the copy: mutants would all survive")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutations whose description holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at a time")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only in f"{m.file} {m.what}"]
    untouched(sorted({path for m in chosen for path in m.tests}))
    killed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, failed in zip(chosen, pool.map(attempt, chosen), strict=True):
            killed += failed is not None
            mark = "SURVIVED" if failed is None else "killed  "
            print(f"{mark}  {mutation.what:<38} {failed or ''}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
