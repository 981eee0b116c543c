"""Features and scores of pairs, packed, against stock transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from keel.data.judged_rows import Preference
from keel.models.loading import quiet
from keel.models.reward import reward_model_from
from keel.preferences import labeller as module
from keel.preferences.labeller import head_weights, pair_features, text_features
from keel.training.judged_data import encoder
from tests.models import tiny

ROWS = (
    Preference("one", "12=", "1101", "0010"),
    Preference("two", "3+4=", "11", "100110ab"),
    Preference("three", "5=", "0", ""),
)


def test_features_and_scores_are_those_of_stock_transformers(tmp_path: Path) -> None:
    """Each answer in a call of its own, by the saved model."""
    model = reward_model_from(tiny.policy(), "outcome", 0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    rows = [encoder("pairs", model.reader())(row) for row in ROWS]
    whole = pair_features(model, rows, 10_000)
    split = pair_features(model, rows, 1)
    assert whole.feature_CH.shape == (3, model.head.in_features)
    # float32, with attention over packed sequences in another order.
    near = {"atol": 1e-4, "rtol": 1e-4}
    np.testing.assert_allclose(split.feature_CH, whole.feature_CH, **near)
    np.testing.assert_allclose(split.score_C2, whole.score_C2, **near)
    with quiet():
        model.save(tmp_path)
        stock = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    for c, row in enumerate(rows):
        states = []
        for side, answer in enumerate((row.chosen, row.rejected)):
            with torch.no_grad():
                out = stock(input_ids=torch.tensor([answer.tokens]), output_hidden_states=True)
            states.append(out.hidden_states[-1][0, answer.ends[0]].numpy())
            np.testing.assert_allclose(whole.score_C2[c, side], float(out.logits), **near)
        np.testing.assert_allclose(whole.feature_CH[c], states[0] - states[1], **near)
    difference = whole.feature_CH @ head_weights(model)
    np.testing.assert_allclose(difference, whole.score_C2[:, 0] - whole.score_C2[:, 1], **near)


def test_long_texts_have_no_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    model = reward_model_from(tiny.policy(), "outcome", 0)
    with quiet():
        model.save(tmp_path)
    assert model.context is not None
    long = Preference("long", "1=", "1" * model.context, "0")
    found = text_features(tmp_path, [ROWS[0], long, *ROWS[1:]])
    assert np.isnan(found).all(axis=1).tolist() == [False, True, False, False]
    rows = [encoder("pairs", model.reader())(row) for row in ROWS]
    whole = pair_features(model, rows, 10_000).feature_CH
    np.testing.assert_allclose(found[[0, 2, 3]], whole, atol=1e-4, rtol=1e-4)
    assert text_features(tmp_path, []).shape == (0, model.head.in_features)
