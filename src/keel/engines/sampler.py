"""How a completion is sampled: a token from logits by one uniform number, and where it ends.

Each sequence has its own random stream, so that its tokens do not depend on the rest of the batch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.models.draw import draw_tokens, invert
from keel.models.kernels import sampling as compiled
from keel.models.text import control_tokens, decode, encode_text, special_tokens
from keel.types import Completion, FinishReason, Group, KeelError, Prompt, Sampling

_CHUNK = 1 << 24
"""Scores turned to float64 at a time (rows × vocabulary), to bound memory: 128 MiB a copy."""
_BLOCK = 32
"""Uniform numbers generated for a sequence at a time; two blocks are kept."""

AHEAD = _BLOCK
"""Most steps whose numbers can be taken at a time."""

GOING, EOS, STOP, LENGTH = range(4)
"""What the last token of a row means for it."""

REASONS: dict[int, FinishReason] = {EOS: "eos", STOP: "stop", LENGTH: "length"}

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def check(sampling: Sampling, n: int) -> None:
    """Raise KeelError for no completions, and for a setting that defines no distribution."""
    if n < 1:
        raise KeelError(f"{n} completions a prompt were asked for: ask for at least 1")
    for name, good, want in (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= sampling.temperature < float("inf"), "0 (greedy) or above"),
        ("top_k", sampling.top_k >= 0, "0 (off) or above"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1 (off)"),
        ("min_p", 0 <= sampling.min_p <= 1, "from 0 (off) to 1"),
        ("stop", all(sampling.stop), "strings that are not empty"),
    ):
        if not good:
            raise KeelError(f"sampling.{name} = {getattr(sampling, name)!r}: give {want}")


def sample_tokens(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], sampling: Sampling
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """A token for each row and its log-probability under the distribution it was sampled from.

    `uniform` (float64, in [0, 1)) chooses by the inverse of the cumulative distribution, so a row's
    token depends on its own logits and number alone. The distribution is softmax(logits / T), cut
    by top-k, then top-p (over what top-k left), then min-p, and renormalised. Temperature 0 takes
    the largest logit (the lowest id among equals) and reports its log-probability at temperature 1;
    truncation does not touch it. Everything is done in float64: by compiled code for float32 logits
    on a CPU, else in chunks over rows.
    """
    if logits.dtype == torch.float32 and logits.device.type == "cpu" and compiled.sample_library():
        if logits.shape[1] > 1 and logits.stride(1) != 1:
            logits = logits.contiguous()
        return compiled.sample_tokens(logits, uniform.contiguous(), sampling)
    rows = max(1, _CHUNK // logits.shape[-1])
    if len(logits) <= rows:
        return _sample_tokens(logits, uniform, sampling)
    parts = [
        _sample_tokens(part, numbers, sampling)
        for part, numbers in zip(torch.split(logits, rows), torch.split(uniform, rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, "R"], sampling: Sampling
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """`sample_tokens` on the device alone, with no work that depends on values: it can be captured.
    On CUDA in float32."""
    if sampling.temperature == 0 or (
        sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0
    ):
        return draw_tokens(logits, uniform, sampling.temperature)
    return _sample_tokens(
        logits, uniform, sampling, torch.float32 if logits.is_cuda else torch.float64
    )


def _sample_tokens(
    logits: Tensor, uniform: Tensor, sampling: Sampling, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    logits = logits.to(dtype)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        log_probs = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
        return tokens[:, 0], log_probs[:, 0]
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    log_prob_V = logits.log_softmax(-1)
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        choice, _ = invert(log_prob_V.exp(), uniform)
        return choice[:, 0], log_prob_V.gather(-1, choice)[:, 0]
    log_prob_V, order = log_prob_V.sort(stable=True, dim=-1, descending=True)
    prob_V = _truncate(log_prob_V.exp(), sampling)
    choice, kept = invert(prob_V, uniform)
    log_probs = log_prob_V.gather(-1, choice) - kept.log()
    return order.gather(-1, choice)[:, 0], log_probs[:, 0]


def _truncate(prob: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    """Zero what top-k, top-p and min-p leave out. `prob` descends along the vocabulary.

    top-p (Holtzman et al. 2020, arXiv:1904.09751): the fewest tokens whose mass reaches p.
    min-p (Nguyen et al. 2024, arXiv:2407.01082): tokens of at least min_p times the likeliest.
    """
    if 0 < sampling.top_k < prob.shape[-1]:
        prob = prob.clone()
        prob[:, sampling.top_k :] = 0
    if sampling.top_p < 1:
        mass = prob.cumsum(-1)
        before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
        prob = prob * (before < sampling.top_p * mass[:, -1:])
    if sampling.min_p > 0:
        prob = prob * (prob >= sampling.min_p * prob[:, :1])
    return prob


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: (…, 4) counters and (…, 2) keys of 32-bit words to (…, 4) random words.

    Ten rounds of (c0, c1, c2, c3) → (hi(M1·c2) ⊕ c1 ⊕ k0, lo(M1·c2), hi(M0·c0) ⊕ c3 ⊕ k1,
    lo(M0·c0)), the key raised by the Weyl constants after each. Source: Salmon et al. 2011,
    "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2.
    """
    c0, c1, c2, c3 = np.moveaxis(counter, -1, 0)
    k0, k1 = np.moveaxis(key, -1, 0)
    first, second = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    for _ in range(10):
        left, right = c0 * first, c2 * second
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ k0,
            right & _LOW,
            (left >> _HALF) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def name_words(seed: int, prompt_id: str, occurrence: int) -> npt.NDArray[np.uint64]:
    """The four 32-bit words that name a group's streams: a hash of seed, prompt and occurrence."""
    digest = hashlib.sha256(f"{seed}/{occurrence}/{prompt_id}".encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u4").astype(np.uint64)


def occurrences(ids: Sequence[str]) -> list[int]:
    """How often each id came before in the list."""
    seen: Counter[str] = Counter()
    counts = []
    for name in ids:
        counts.append(seen[name])
        seen[name] += 1
    return counts


class Uniforms:
    """One uniform number in [0, 1) for each token of each sequence, generated in blocks.

    Sequence s is completion s mod n of prompt s div n. The number of a token is a function of the
    seed, the prompt's id, which of that id's occurrences in the call this is, the completion's
    index in its group, and the token's place only. With `made_P` the first of prompt p is that of
    token `made_P[p]`: earlier calls sampled the ones before.
    """

    def __init__(
        self, ids: Sequence[str], n: int, seed: int, made_P: Sequence[int] | None = None
    ) -> None:
        self._n = n
        self._first = np.repeat(np.array(made_P or [0] * len(ids), dtype=np.int64), n)
        self._words = np.array(
            [
                name_words(seed, name, occurrence)
                for name, occurrence in zip(ids, occurrences(ids), strict=True)
            ],
            dtype=np.uint64,
        ).reshape(-1, 4)
        self._blocks = np.empty((len(ids) * n, 2 * _BLOCK))
        self._made = self._first // _BLOCK * _BLOCK

    def take(
        self, sequences: npt.NDArray[np.int64], places: npt.NDArray[np.int64], steps: int = 1
    ) -> npt.NDArray[np.float64]:
        """The numbers of the tokens at `places` of `sequences`, and of the next ones: (steps,
        sequences), at most `AHEAD` steps. Places start at 0 and never decrease."""
        places = places + self._first[sequences]
        while (short := self._made[sequences] < places + steps).any():
            self._fill(sequences[short])
        columns = (places + np.arange(steps)[:, None]) % (2 * _BLOCK)
        numbers: npt.NDArray[np.float64] = self._blocks[sequences, columns]
        return numbers

    def _fill(self, sequences: npt.NDArray[np.int64]) -> None:
        """The next block of each: two numbers of 53 bits from each counter."""
        places = self._made[sequences]
        words = self._words[sequences // self._n]
        counter = np.empty((len(sequences), _BLOCK // 2, 4), dtype=np.uint64)
        counter[..., 0] = places[:, None] // 2 + np.arange(_BLOCK // 2)
        counter[..., 1] = (sequences % self._n)[:, None]
        counter[..., 2:] = words[:, None, 2:]
        random = philox(counter, words[:, None, :2])
        high, low = random[..., 0::2] >> np.uint64(5), random[..., 1::2] >> np.uint64(6)
        numbers = (high * 67108864.0 + low) / 9007199254740992.0
        columns = (places[:, None] + np.arange(_BLOCK)) % (2 * _BLOCK)
        self._blocks[sequences[:, None], columns] = numbers.reshape(len(sequences), _BLOCK)
        self._made[sequences] += _BLOCK


# ---------------------------------------------------------------- where a completion ends


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a sequence: those of the generation config, or if it has none of the
    model's config; and the tokenizer's.

    Raises KeelError if there is none: completions would always use their whole budget.
    """
    config = model.config.get_text_config()
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = config.eos_token_id if named is None else named
    found = {*_ids(named), *_ids(tokenizer.eos_token_id)}
    inside = tuple(sorted(number for number in found if 0 <= number < config.vocab_size))
    if not inside:
        raise KeelError(
            f"{type(model).__name__} has no end-of-sequence token: "
            "set eos_token on its tokenizer, or eos_token_id in its config.json"
        )
    return inside


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def budgets(
    prompts: Sequence[Prompt], sampling: Sampling, context: int | None
) -> npt.NDArray[np.int64]:
    """How many tokens may be sampled for each prompt: the budget, or what the context leaves.

    Raises KeelError for a prompt that was not encoded or that leaves no room in the context.
    """
    for prompt in prompts:
        if not prompt.tokens:
            raise KeelError(f"prompt '{prompt.id}' has no tokens: encode it before sampling")
        if context is not None and len(prompt.tokens) >= context:
            raise KeelError(
                f"prompt '{prompt.id}' has {len(prompt.tokens)} tokens, which leaves no room in "
                f"the model's context of {context}: shorten it, or set prompts.max_tokens",
                key="prompts.max_tokens",
            )
    room = [sampling.max_tokens] * len(prompts)
    if context is not None:
        room = [min(sampling.max_tokens, context - len(prompt.tokens)) for prompt in prompts]
    return np.array(room, dtype=np.int64)


def split_stops(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The stop strings that are text, and the ids of those that are one special token.

    Raises KeelError for a string that cannot match: one with a control token inside it, since
    these are not part of the text, or with a character that the tokenizer cannot write.
    """
    if not stop:
        return (), ()
    special, control = special_tokens(tokenizer), control_tokens(tokenizer)
    texts: list[str] = []
    for text in stop:
        if text in special:
            continue
        inside = next((token for token in control if token in text), None)
        if inside is not None:
            raise KeelError(
                f"stop = {text!r} never matches: {inside!r} in it is a control token, which is not "
                f"part of the text: give {inside!r} alone, or its id {special[inside]} in stop_ids"
            )
        encode_text(text, f"stop = {text!r}", tokenizer)
        texts.append(text)
    return tuple(texts), tuple(special[text] for text in stop if text in special)


class Stops:
    """Finds after each step which rows ended, and why.

    Ids, and stop strings that are one special token, are looked up in a table. Other stop strings
    are searched for in the decoded last tokens of each row, so that one across several tokens is
    found; control tokens are not text. The end-of-sequence token has precedence over a stop, and a
    stop over the budget. Raises KeelError for a stop that cannot match.
    """

    def __init__(
        self, eos: Sequence[int], sampling: Sampling, tokenizer: Any, vocabulary: int
    ) -> None:
        self.strings, special = split_stops(sampling.stop, tokenizer)
        stops = [*sampling.stop_ids, *special]
        outside = [number for number in stops if not 0 <= number < vocabulary]
        if outside:
            raise KeelError(
                f"sampling.stop_ids holds {outside[0]}, which is not a token: "
                f"give ids from 0 to {vocabulary - 1}",
                key="rollout.stop_ids",
            )
        self.codes_V = np.full(vocabulary, GOING, dtype=np.int8)
        """The code of each token."""
        self.codes_V[stops] = STOP
        self.codes_V[list(eos)] = EOS
        self.by_token = None if self.strings else self.codes_V
        """The codes, if only tokens and the budget end a row."""
        self._tokenizer = tokenizer
        self._control = frozenset(control_tokens(tokenizer).values())
        # A token of text has at least one byte. The first tokens of a window may lose a space or
        # half a character, so a few more are decoded than a string can span.
        longest = max((len(text.encode()) for text in self.strings), default=0)
        self._window = longest + 8
        self._tails: dict[int, list[int]] = {}

    def resume(self, sequence: int, tokens: Sequence[int]) -> None:
        """Let a sequence go on after tokens of an earlier call, in which a stop may begin."""
        own = [token for token in tokens[-2 * self._window :] if token not in self._control]
        self._tails[sequence] = own[-self._window :]

    def ids(self) -> list[int]:
        """The token ids that end a completion, end-of-sequence ids included."""
        return [int(number) for number in np.flatnonzero(self.codes_V)]

    def check(
        self,
        sequences: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        spent: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int8]:
        """The code of each row's new token; `spent` marks rows whose budget is used up."""
        codes = self.codes_V[tokens]
        if spent.any():
            codes[(codes == GOING) & spent] = LENGTH
        if self.strings:
            self._check_strings(sequences, tokens, codes)
        return codes

    def _check_strings(
        self,
        sequences: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        codes: npt.NDArray[np.int8],
    ) -> None:
        tails = [self._tails.setdefault(sequence, []) for sequence in sequences.tolist()]
        for tail, token in zip(tails, tokens.tolist(), strict=True):
            if token not in self._control:
                tail.append(token)
                del tail[: -self._window]
        for row, text in enumerate(decode(self._tokenizer, tails)):
            if codes[row] in (GOING, LENGTH) and any(stop in text for stop in self.strings):
                codes[row] = STOP


class Answers:
    """What has been sampled of each sequence, and the code of what ended it.

    Sequence s is completion s mod n of prompt s div n.
    """

    def __init__(self, count: int, n: int, tokenizer: Any) -> None:
        self._n, self._tokenizer = n, tokenizer
        self.tokens = [array("q") for _ in range(count)]
        self.log_probs = [array("d") for _ in range(count)]
        self.codes = np.zeros(count, dtype=np.int8)

    def extend(self, sequence: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append what a sequence sampled next."""
        self.tokens[sequence].extend(tokens)
        self.log_probs[sequence].extend(log_probs)

    def group(self, prompt: Prompt, number: int) -> Group | None:
        """The finished group of prompt `number`; None if its logits were not finite."""
        sequences = range(number * self._n, (number + 1) * self._n)
        log_probs = [np.array(self.log_probs[s]).astype(np.float32) for s in sequences]
        if not all(np.isfinite(scores).all() for scores in log_probs):
            return None
        ids = [self.tokens[s].tolist() for s in sequences]
        texts = completion_texts(self._tokenizer, ids, [int(self.codes[s]) for s in sequences])
        completions = [
            Completion(
                tokens=np.array(self.tokens[sequence], dtype=np.int64),
                log_probs=scores,
                written=np.ones(len(scores), dtype=np.bool_),
                finish=REASONS[int(self.codes[sequence])],
                text=text,
            )
            for sequence, scores, text in zip(sequences, log_probs, texts, strict=True)
        ]
        return Group(prompt, tuple(completions))


def completion_texts(
    tokenizer: Any, sequences: Sequence[Sequence[int]], codes: Iterable[int]
) -> list[str]:
    """The texts of completions, without the token that ended a sequence."""
    pairs = zip(sequences, codes, strict=True)
    return decode(tokenizer, [ids[:-1] if code == EOS else ids for ids, code in pairs])
