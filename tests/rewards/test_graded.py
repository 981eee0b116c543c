from __future__ import annotations

import builtins
from typing import Any

import pytest

from keel.config.sources import RewardSource
from keel.rewards import graded
from keel.rewards.graded import language_of, language_share, prose
from keel.rewards.outputs import Wrong
from keel.rewards.registry import load_reward
from keel.types import KeelError
from tests.shared import needs_bubblewrap

ENGLISH = "First we add the two numbers, and then we look at what is left of them."
GERMAN = "Zuerst zählen wir die beiden Zahlen zusammen und sehen dann, was übrig bleibt."
CHINESE = "首先我们把两个数字加起来，然后看看还剩下什么。"


def test_languages() -> None:
    pytest.importorskip("lingua")
    for text, code in ((ENGLISH, "en"), (GERMAN, "de"), (CHINESE, "zh")):
        assert [language_of(text) for _ in range(3)] == [code] * 3
    for text in ("", "12 + 5 = 17", "ok", r"\boxed{12}", "```python\nprint('hello world')\n```"):
        assert language_of(text) is None
        assert language_share(text, "en") is None
    from_few = "Wir sehen es nun doch."  # 17 letters
    assert language_of(from_few) is None
    assert language_of(f"{from_few} Also ja.") == "de"
    assert language_of(f"```python\n{ENGLISH * 9}\n```\n{GERMAN}") == "de"
    assert language_share(ENGLISH, "en") == 1.0
    assert language_share(ENGLISH, "de") == 0.0
    letters = [sum(map(str.isalpha, text)) for text in (ENGLISH, GERMAN)]
    mixed = f"{ENGLISH} {GERMAN}"
    assert language_share(mixed, "de") == pytest.approx(letters[1] / sum(letters), abs=1e-12)
    both = f"{ENGLISH[:-1]}: it makes 579. {GERMAN}"
    assert language_share(both, "en") == pytest.approx(0.5, abs=0.1)  # of about as many letters
    # A Chinese character is worth three letters, and its sentences stand apart without a blank.
    characters = sum(map(str.isalpha, CHINESE)) * 3
    expected = characters / (characters + letters[0])
    assert language_share(ENGLISH + CHINESE, "zh") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            r"We see $x + 1$ and \[y\] <b>as</b> `z` \cdot 12 in \begin{align*}a b\end{align*} x .",
            "We see and as in .",
        ),
        # A full stop after a number or a formula ends the sentence.
        (
            "It makes 579. Und x_1=3; also (y+1), 3.5! Ja 2。 Nein.",
            "It makes . Und ; also ! Ja 。 Nein.",
        ),
        # Dollars open and close, or are money.
        (r"at $\$1$, so $3\cdot\$1=\$3$ from it and \$5 more", "at , so from it and more"),
        ("pay 10*$3 for one and x=$4 for two", "pay for one and for two"),
        ("we have $$x$$so $$\ny$$then $ is money", "we have so then $ is money"),
        # What does not close.
        (r"see \( one \( two \) and \[ three", "see one and three"),
        (r"\begin{a} one \begin{b} two \end{b} and \end{c} ten", "one and ten"),
        (r"\begin{a} one \begin{a} two \end{a} and \end{a} ten", "ten"),
        ("one `two\nthree` <b four\n five> ```six", "one `two three` < four five>"),
    ],
)
def test_prose_is_without_code_formulas_and_tags(text: str, words: str) -> None:
    assert prose(text).split() == words.split()


HOSTILE = [
    "a", r"\( ", r"\[ ", r"\begin{a}", "`\n", "```", "$ ", "$$ ", r"$\\", r"\$", "<a ", "<",
    "https://", "，a", "我。", "我，", "{", "\\", "1.", "1", ".", " .,", "é", "_a",
]  # fmt: skip


@pytest.mark.quick("https://", "\\\\", "\\\\$", "$$ ")
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_long_text_takes_no_long_time(unit: str) -> None:
    """Half a million characters, at which time to the square would be hours."""
    for text in ("abc." + unit * (500_000 // len(unit)), unit * (500_000 // len(unit)) + "b"):
        assert len(prose(text)) <= len(text) + 1
        assert sum(map(len, graded._passages(text))) <= len(text)


def test_lingua_reads_long_words_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes time to the square of a word's length."""
    pytest.importorskip("lingua")
    real, read = graded._detector(), []

    class Detector:
        def detect_language_of(self, text: str) -> Any:
            read.append(text)
            return real.detect_language_of(text)

    monkeypatch.setattr(graded, "_detector", Detector)
    for letters in ("a" * 20_000, "ab\u00e9" * 7_000, "\u0e01\u0e32" * 10_000):
        read.clear()
        language_of(letters)
        assert ["".join(text.split()) for text in read] == [letters]
        assert max(map(len, read[0].split())) == 200


def test_many_environments_take_no_long_time() -> None:
    names = [f"a{n}" for n in range(30_000)]
    begins = "".join(f"\\begin{{{name}}}" for name in names)
    assert prose(begins + "".join(f"\\end{{{name}}}" for name in names)).strip() == ""
    assert prose(begins + "one").strip() == ""


def test_the_reward_of_a_language() -> None:
    pytest.importorskip("lingua")

    def ask(completions: list[Any], columns: dict[str, Any], **options: Any) -> Any:
        reward = load_reward(RewardSource(function="language", options=options))
        assert reward.required == ("completions", *columns)
        assert reward.function is not None
        return reward.function(completions=completions, **columns)

    message = [ENGLISH, [{"role": "assistant", "content": GERMAN}], "12"]
    assert ask(message, {}, wanted="en") == [1, 0, None]
    assert ask(message, {"tongue": ["de", "de", "de"]}, column="tongue") == [0, 1, None]
    assert ask(message[:1], {"tongue": [None]}, column="tongue") == [None]
    assert 0.4 < ask([f"{ENGLISH} {GERMAN}"], {}, wanted="en", share=True)[0] < 0.6
    with pytest.raises(KeelError, match="exactly one of the options wanted and column"):
        ask(message, {})
    with pytest.raises(KeelError, match="exactly one"):
        ask(message, {}, wanted="en", column="tongue")
    with pytest.raises(KeelError, match=r"no language 'english': .*ISO 639-1.* en "):
        ask(message, {}, wanted="english")
    wrong, right = ask(message[:1] * 2, {"tongue": ["xx", "en"]}, column="tongue")
    assert isinstance(wrong, Wrong)
    assert wrong.why.startswith("no language 'xx'")
    assert right == 1
    with pytest.raises(KeelError, match=r"'language': column: 'my tongue' cannot .*: rename the c"):
        ask(message, {}, column="my tongue")
    with pytest.raises(KeelError, match="column: 'class' cannot be an argument's name"):
        ask(message, {}, column="class")
    with pytest.raises(KeelError, match="column: 'completions' comes from the run"):
        ask(message, {}, column="completions")


def test_without_lingua_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "lingua":
            raise ImportError(name)
        return loaded(name, *rest, **more)

    graded._codes.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KeelError, match=r"reward 'language': .*pip install -e .*\[language\]'"):
        load_reward(RewardSource(function="language", options={"wanted": "en"}))


# ---------------------------------------------------------------- mathematics


@needs_bubblewrap
def test_the_reward_of_mathematics() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward(RewardSource(function="math", options={"timeout": 300.0}))
    assert (reward.required, reward.optional) == (
        ("completions", "answer"),
        ("prompts", "openings", "log_summary", "log_extra"),
    )
    logged: dict[str, float] = {}
    extras: dict[str, object] = {}
    texts = ["it is $1/2$", "0.25", "1/2", "what?"]
    message = [[{"role": "assistant", "content": text}] for text in texts]
    gold = [r"\frac{1}{2}", 0.5, None, "0.5"]
    assert reward.function is not None
    for completions in (texts, message):
        values = reward.function(
            completions=completions,
            answer=gold,
            log_summary=lambda found, summary: logged.update(summary(found)),
            log_extra=extras.__setitem__,
        )
        assert values == [1, 0, None, 0]
        assert extras == {"extracted": ["it is $1/2$", "0.25", "1/2", None]}
    assert logged == {"math/timed_out": 0, "math/died": 0}
    assert reward.function(completions=["1"], answer=["1"]) == [1]
    several = [[r"\frac{1}{2}", "2"], ["3", ")("], [None, 0.5]]
    assert reward.function(completions=["2", "4", "1/2"], answer=several) == [1, 0, 1]
    reward.function.close()  # type: ignore[attr-defined]


@needs_bubblewrap
@pytest.mark.slow
def test_tags_timeouts_and_gold_that_cannot_be_read() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward(RewardSource(function="math", options={"timeout": 5, "tag": "answer"}))
    assert reward.function is not None
    logged: dict[str, float] = {}
    texts = [
        "<answer>p - q</answer> 7",
        "p - q",
        r"<answer>$p + 9^{9^{9^{9}}}$</answer>",
        r"<answer>\boxed{p-q}</answer>",
    ]
    values = reward.function(
        completions=texts,
        answer=["p - q"] * 4,
        log_summary=lambda found, summary: logged.update(summary(found)),
    )
    assert values == [1, 0, 0, 1]
    assert sum(logged.values()) == 1  # out of time, or of memory: as fast as the machine is
    texts = ["<answer>Answer: **3**</answer>", "<answer>it is 3</answer>", "<answer></answer>"]
    assert reward.function(completions=texts, answer=["3"] * 3) == [1, 1, 0]
    right, wrong = reward.function(completions=["<answer>1</answer>"] * 2, answer=["1", ")("])
    assert right == 1
    assert isinstance(wrong, Wrong)
    assert wrong.why.startswith("the answer column holds ')(', which cannot be read: use")
    reward.function.close()  # type: ignore[attr-defined]
