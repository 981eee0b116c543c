"""Classic control compared with stable-baselines3: environment steps per second, and return.

    OMP_NUM_THREADS=1 python benchmarks/control_speed.py [NAME ...] [--repeats 3] [--json FILE]

Both train on CartPole-v1 with the same hyperparameters, alternating, each in a separate process on
one thread. Keel's time runs from the first step to the last record, with records and checkpoints;
stable-baselines3's is that of `learn()`. Returns are of 50 greedy episodes after the last step.
Adam's epsilon is 1e-5 (PPO) or 1e-8 (DQN) in both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ENVIRONMENT = "CartPole-v1"
EPISODES = 50
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # stable-baselines3's defaults
    "ppo-sb3": {
        "algorithm": "ppo",
        "steps": 61_440,
        "envs": 1,
        "rollout": 2048,
        "minibatches": 32,
        "epochs": 10,
        "gamma": 0.99,
        "lam": 0.95,
        "rate": 3e-4,
        "linear": False,
        "entropy": 0.0,
    },
    # cleanrl/ppo.py
    "ppo-cleanrl": {
        "algorithm": "ppo",
        "steps": 102_400,
        "envs": 4,
        "rollout": 128,
        "minibatches": 4,
        "epochs": 4,
        "gamma": 0.99,
        "lam": 0.95,
        "rate": 2.5e-4,
        "linear": True,
        "entropy": 0.01,
    },
    # rl-zoo3's ppo.yml, the clip range held fixed
    "ppo-zoo": {
        "algorithm": "ppo",
        "steps": 102_400,
        "envs": 8,
        "rollout": 32,
        "minibatches": 1,
        "epochs": 20,
        "gamma": 0.98,
        "lam": 0.8,
        "rate": 1e-3,
        "linear": True,
        "entropy": 0.0,
    },
    # cleanrl/dqn.py
    "dqn-cleanrl": {
        "algorithm": "dqn",
        "steps": 250_000,
        "hidden": [120, 84],
        "rate": 2.5e-4,
        "capacity": 10_000,
        "warmup": 10_000,
        "batch": 128,
        "every": 10,
        "updates": 1,
        "target": 500,
        "share": 0.5,
        "final": 0.05,
    },
    # rl-zoo3's dqn.yml
    "dqn-zoo": {
        "algorithm": "dqn",
        "steps": 50_000,
        "hidden": [256, 256],
        "rate": 2.3e-3,
        "capacity": 100_000,
        "warmup": 1_000,
        "batch": 64,
        "every": 256,
        "updates": 128,
        "target": 10,
        "share": 0.16,
        "final": 0.04,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="of the steps, for a quick look")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "NAME", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        side, name, seed = arguments.one
        setting = {**SETTINGS[name], "steps": int(SETTINGS[name]["steps"] * arguments.share)}
        print(json.dumps(SIDES[side](setting, int(seed))))
        return
    results = [compare(name, arguments) for name in arguments.names or SETTINGS]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turns, a line of the table."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(arguments.repeats):
        seed = arguments.first + repeat
        for side in SIDES:
            command = [sys.executable, "-W", "ignore", __file__, "--share", str(arguments.share)]
            command += ["--one", side, name, str(seed)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    speed = {side: median(one["speed"] for one in found[side]) for side in SIDES}
    pairs = zip(found["keel"], found["sb3"], strict=True)
    ratio = median(ours["speed"] / theirs["speed"] for ours, theirs in pairs)
    returns = {side: median(one["return"] for one in found[side]) for side in SIDES}
    print(
        f"{name:<12} keel {speed['keel']:>7.0f} steps/s  sb3 {speed['sb3']:>7.0f} steps/s  "
        f"ratio {ratio:.2f}  return {returns['keel']:.0f} and {returns['sb3']:.0f}",
        flush=True,
    )
    return {"name": name, "ratio": ratio, "speed": speed, "return": returns, "runs": found}


def keel(setting: Mapping[str, Any], seed: int) -> dict[str, float]:
    """One run of ours."""
    from keel.config.control import ReturnEvaluation
    from keel.config.control_load import load_control
    from keel.config.fields import derive
    from keel.control.evaluate import returns_of
    from keel.control.run import control, trained

    overrides = _ppo(setting) if setting["algorithm"] == "ppo" else _dqn(setting)
    with tempfile.TemporaryDirectory() as folder:
        text = [f"seed={seed}", "evaluation.episodes=0", "watching.film=false", *overrides]
        place = Path(folder) / "recipe.toml"
        # From the generic settings: none that are tuned for this environment.
        place.write_text(_toml(setting), encoding="utf-8")
        recipe = load_control(place, None, text)
        clock = _Clock()
        run = control(recipe, Path(folder) / "run", callbacks=[clock])
        seconds = clock.end - clock.start
        learner = trained(run.path)
        steps = learner.steps
        environment, choice = recipe.stage.environment, ReturnEvaluation(episodes=EPISODES)
        totals, _ = returns_of(learner.greedy(), environment, choice, derive(seed, "after"))
    return {"speed": steps / seconds, "return": float(totals.mean())}


class _Clock:
    """When a run began to step, and when its last row was on record."""

    start = end = 0.0

    def on_stage(self, *_: object) -> None:
        self.start = time.perf_counter()

    def on_step(self, *_: object) -> None:
        self.end = time.perf_counter()


def _toml(setting: Mapping[str, Any]) -> str:
    stage = "policy_gradient" if setting["algorithm"] == "ppo" else "q_learning"
    row = "algorithm = {preset = 'ppo', divergence = 'none'}\n" if stage[0] == "p" else ""
    return f"stage = '{stage}'\n{row}environment = {{id = '{ENVIRONMENT}'}}\n"


def _ppo(setting: Mapping[str, Any]) -> Sequence[str]:
    return (
        f"steps={setting['steps']}",
        f"environment.count={setting['envs']}",
        f"rollout_steps={setting['rollout']}",
        f"minibatches={setting['minibatches']}",
        f"epochs={setting['epochs']}",
        f"algorithm.advantage.gamma={setting['gamma']}",
        f"algorithm.advantage.lam={setting['lam']}",
        f"algorithm.entropy={setting['entropy']}",
        "algorithm.value={coefficient=1.0, clip='none'}",
        f"optimizer.learning_rate={setting['rate']}",
        f"optimizer.schedule={'linear' if setting['linear'] else 'constant'}",
        "optimizer.epsilon=1e-5",
        "optimizer.max_grad_norm=0.5",
    )


def _dqn(setting: Mapping[str, Any]) -> Sequence[str]:
    return (
        f"steps={setting['steps']}",
        f"network.hidden={setting['hidden']}",
        "network.activation=relu",
        "gamma=0.99",
        "loss=huber",
        f"optimizer.learning_rate={setting['rate']}",
        "optimizer.max_grad_norm=10.0",
        f"replay.capacity={setting['capacity']}",
        f"replay.warmup={setting['warmup']}",
        f"replay.batch_size={setting['batch']}",
        f"update_every={setting['every']}",
        f"updates={setting['updates']}",
        f"target.every={setting['target']}",
        f"exploration.share={setting['share']}",
        f"exploration.final={setting['final']}",
    )


def sb3(setting: Mapping[str, Any], seed: int) -> dict[str, float]:
    """One run of theirs."""
    import torch
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    envs = make_vec_env(ENVIRONMENT, setting.get("envs", 1), seed=seed)
    options: dict[str, Any] = {"device": "cpu", "seed": seed}
    if setting["algorithm"] == "ppo":
        rate = setting["rate"]
        model: Any = PPO(
            "MlpPolicy",
            envs,
            n_steps=setting["rollout"],
            batch_size=setting["rollout"] * setting["envs"] // setting["minibatches"],
            n_epochs=setting["epochs"],
            gamma=setting["gamma"],
            gae_lambda=setting["lam"],
            ent_coef=setting["entropy"],
            learning_rate=(lambda left: left * rate) if setting["linear"] else rate,
            **options,
        )
    else:
        model = DQN(
            "MlpPolicy",
            envs,
            learning_rate=setting["rate"],
            buffer_size=setting["capacity"],
            learning_starts=setting["warmup"],
            batch_size=setting["batch"],
            gamma=0.99,
            train_freq=setting["every"],
            gradient_steps=setting["updates"],
            target_update_interval=setting["target"],
            exploration_fraction=setting["share"],
            exploration_final_eps=setting["final"],
            policy_kwargs={"net_arch": setting["hidden"]},
            **options,
        )
    start = time.perf_counter()
    model.learn(setting["steps"])
    seconds = time.perf_counter() - start
    after = make_vec_env(ENVIRONMENT, 1, seed=seed + 10_000)
    mean, _ = evaluate_policy(model, after, n_eval_episodes=EPISODES, deterministic=True)
    return {"speed": model.num_timesteps / seconds, "return": float(mean)}


SIDES = {"keel": keel, "sb3": sb3}

if __name__ == "__main__":
    main()
