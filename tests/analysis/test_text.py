"""Values of recorded tokens, and text made safe to show."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.analysis.text import MEASURES, Tokens, visible

ROW = {
    "tokens": [5, 6, 7],
    "pieces": ["a", "<b>", "\u202e"],
    "written": [True, False, True],
    "log_probs": [-0.5, 0.0, -1.0],
    "old_log_probs": [-0.6, 0.0, -1.5],
    "reference_log_probs": [-0.6, 0.0, -1.0],
    "advantages": [1.0, 0.0, -1.0],
    "ratios": [1.5, 0.0, 0.5],
    "loss/policy": [-0.5, 0.0, 0.25],
    "loss/divergence": [0.1, 0.0, 0.2],
}


def test_kl_is_k3_of_the_policy_to_the_reference() -> None:
    (values,) = (found for measure, found in Tokens(ROW).values.items() if measure.key == "kl")
    assert values[0] == 0
    assert math.isnan(values[1]), "the environment's token"
    assert values[2] == pytest.approx(math.exp(0.5) - 1 - 0.5)


def test_terms_of_the_loss_add_up() -> None:
    terms = Tokens(ROW).loss_terms(2)
    assert terms == pytest.approx({"loss/policy": 0.25, "loss/divergence": 0.2, "loss": 0.45})
    assert Tokens({"tokens": [1], "written": [True]}).loss_terms(0) == {}


def test_only_recorded_measures_are_offered() -> None:
    keys = [measure.key for measure in Tokens(ROW).values]
    assert keys == ["advantages", "log_probs", "ratios", "kl", "loss"]


def test_tokens_are_escaped_and_coloured_by_sign() -> None:
    html = Tokens(ROW).html(MEASURES[0])
    one = r'<span class="(.*?)" data-token="(\d)" style="(.*?)" title="(.*?)">(.*?)</span>'
    spans = re.findall(one, html, re.DOTALL)
    assert [span[4] for span in spans] == ["a", "&lt;b&gt;", r"\u202e"]
    assert [span[0] for span in spans] == ["tok", "tok env", "tok"]
    assert "0,114,178" in spans[0][2]
    assert "213,94,0" in spans[2][2]
    assert "advantage: 1" in spans[0][3]
    assert "never trained on" in spans[1][3]


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_shown_text_has_no_invisible_character(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


def test_long_text_is_cut_with_a_count() -> None:
    assert visible("x" * 1_000_000, 10) == "xxxxxxxxxx… (999,990 more characters)"
    assert visible("a\nb\tc\x1b", lines=True) == "a\nb\tc\\x1b"


def test_prose_keeps_blanks_and_joins_letters() -> None:
    prose = "\u3000天\u00a0b می\u200cشود 👩\u200d💻"
    assert visible(prose, prose=True) == prose
    assert "\u3000" not in visible(prose)
    for text in ("a\u200db", "می\u200c", "\u200cم", "م\u200c\u200cم", "م\u202eم", "\u2028"):
        assert visible(text, prose=True) == visible(text)
