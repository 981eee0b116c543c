"""A model in memory, data in memory, a reward function: the largest of two digits.

Run it as a script, or cell by cell in an editor that knows `# %%`:
    python examples/04_from_python.py
"""

# %% A model: here a small one with random weights; AutoModelForCausalLM.from_pretrained is usual.
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import keel

words = ["<pad>", "<eos>", *"0123456789>"]
characters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
characters.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", model_max_length=16
)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=None,
)
model = LlamaForCausalLM(config)

# %% Data: rows with `prompt` and any columns; datasets.Dataset.from_list(rows) does as well.
rows = [{"prompt": f"{a}{b}>", "largest": str(max(a, b))} for a in range(10) for b in range(10)]


# %% A reward function, with TRL's signature.
def right(completions, largest, **columns):  # type: ignore[no-untyped-def]
    """1 for the answer, else 0."""
    return [float(text == gold) for text, gold in zip(completions, largest, strict=True)]


# %% A callback: it ends the run once the reward is high enough.
class StopEarly:
    def on_step(self, state: keel.RunState) -> None:
        if state.metrics["reward"] > 0.8:
            state.control.stop("the reward is above 0.8")


# %% Train.
arguments = {
    "model": model,
    "tokenizer": tokenizer,
    "data": rows,
    "rewards": right,
    "algorithm": {
        "preset": "grpo",
        "divergence": None,
    },  # or just "grpo", which stays near the start
    "steps": 80,
    "threads": 1,
    "rollout": {"prompts_per_step": 16, "group_size": 8, "max_tokens": 1},
    "optimizer": {"learning_rate": 3e-3},
    "evaluation": {"prompts": 10, "every": 0},
}
run = keel.train(**arguments, callbacks=[StopEarly()])

# %% Look at it.
rewards = [record["reward"] for record in run.metrics()]
print(f"reward {rewards[0]:.2f} at step 1, {rewards[-1]:.2f} at step {len(rewards)}")
for rollout in run.rollouts(step=len(rewards))[:3]:
    print(rollout["prompt"], rollout["completion"], rollout["reward"])

# %% The trained model, as transformers loads it.
policy = run.policy()
prompt = tokenizer("37>", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(policy.generate(**prompt, max_new_tokens=1)[0]))
