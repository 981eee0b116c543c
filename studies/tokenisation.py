"""Tokens in training, in evaluation and through AutoTokenizer of the saved folder, by family.

    python studies/tokenisation.py [--prompts 1000]

Of each supported family a tiny random model with a byte-level tokenizer of its own is saved; the
prompts are read by the policy's encoder, by the saved folder loaded again, and by plain
transformers. Ends with 1 where any prompt differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile

from transformers import AutoTokenizer

from keel.config.model import BuildModel, Model
from keel.models.chat import Encoder
from keel.models.families import FAMILIES
from keel.models.policy import load_policy
from keel.models.tokenizer_round_trip import PROBES, quiet
from keel.types import Prompt

ONE_KV_HEAD_EACH = ("gpt2", "gpt_neox", "gpt_bigcode", "opt")


def prompts(count: int) -> list[str]:
    """Varied texts: pieces of the probes, shuffled and joined; a seeded choice."""
    rng = random.Random(0)
    pieces = [word for text in PROBES for word in (text, *text.split(" "), text[: len(text) // 2])]
    made = [" ".join(rng.choices(pieces, k=rng.randint(1, 8))) for _ in range(count)]
    return [text if text.strip() else "blank" for text in made]


def differing(family: str, texts: list[str]) -> int:
    """How many prompts are read otherwise by any of the three."""
    build = BuildModel(
        family=family,
        tokenizer="bytes",
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=None if family in ONE_KV_HEAD_EACH else 2,
    )
    policy = load_policy(Model(build=build, device="cpu"), 0)
    with tempfile.TemporaryDirectory() as folder, quiet():
        policy.save(folder)
        again = load_policy(Model(name=folder, device="cpu"), 0)
        stock = AutoTokenizer.from_pretrained(folder)
    wrong = 0
    for number, text in enumerate(texts):
        read = [
            encoder(Prompt(str(number), text))
            for encoder in (Encoder(one.tokenizer, served=one.served) for one in (policy, again))
        ]
        assert read[0] is not None
        assert read[1] is not None
        wrong += len({read[0].tokens, read[1].tokens, tuple(stock(text)["input_ids"])}) > 1
    return wrong


def main() -> int:
    """Print a line a family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1000)
    texts = prompts(parser.parse_args().prompts)
    found = {family: differing(family, texts) for family in sorted(FAMILIES)}
    for family, wrong in found.items():
        print(f"{family:<20}{wrong:>6} of {len(texts)} differ")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
