"""GRPO in a loop of your own, without a recipe: the largest of two digits.

python examples/07_own_loop.py
"""

import random

import torch

import keel

torch.set_num_threads(1)
size = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 16}
policy = keel.load_policy({"build": {"alphabet": "0123456789>", **size}, "device": "cpu"})
algorithm = keel.load_algorithm("grpo", divergence=None)
engine = keel.make_engine(policy)
learner = keel.make_learner(policy, algorithm)
sampling = keel.Sampling(max_tokens=1)
rate, rewards_by_step = 3e-3, []

for step in range(1, 81):
    rng = random.Random(step)
    questions = [f"{rng.randrange(10)}{rng.randrange(10)}>" for _ in range(16)]
    groups = engine.sample(keel.encode_prompts(policy, questions), 8, sampling, seed=step)
    answers = [(g.prompt.content, c.text) for g in groups for c in g.completions]
    rewards = [float(text == max(question[:2])) for question, text in answers]
    batch = keel.from_groups(groups, policy.device)
    estimates = keel.estimate(algorithm, batch, rewards)
    ready = keel.prepare(algorithm, batch, estimates, max_tokens=1)
    learner.update(algorithm, ready, beta=0.0, rates=(rate, rate))
    engine.sync(learner.weights())
    rewards_by_step.append(sum(rewards) / len(rewards))

print(f"reward {rewards_by_step[0]:.2f} at step 1, {rewards_by_step[-1]:.2f} at step {step}")
