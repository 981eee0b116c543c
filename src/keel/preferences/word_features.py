"""Features of pairs without a model: hashed words, on the pool's principal components.

Suffixes: `_C` pairs, `_B` buckets, `_H` components.
"""

from __future__ import annotations

import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh
from scipy.sparse import csr_array

from keel.analysis.statistics import Array

BUCKETS = 2048
COMPONENTS = 48
SAMPLED = 10_000
"""Pairs, at most, from which the components are computed."""
_WORDS = re.compile(r"[a-z']+|\d+|[^\sa-z\d]")


@lru_cache(maxsize=100_000)
def _bucket(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace")) % BUCKETS


def hashed_words(text: str) -> dict[int, float]:
    """log(1 + count) of the words in each bucket that has any."""
    counts: dict[int, int] = {}
    for word, count in Counter(_WORDS.findall(text.lower())).items():
        bucket = _bucket(word)
        counts[bucket] = counts.get(bucket, 0) + count
    return {bucket: math.log1p(count) for bucket, count in counts.items()}


def word_differences(answers: Iterable[tuple[str, str]]) -> csr_array:
    """Of each pair of texts: the hashed words of the first less those of the second, (C, B)."""
    values, buckets, ends = array("d"), array("i"), array("q", [0])
    for first, second in answers:
        found = hashed_words(first)
        for bucket, value in hashed_words(second).items():
            found[bucket] = found.get(bucket, 0.0) - value
        left = {bucket: value for bucket, value in found.items() if value}
        buckets.extend(left)
        values.extend(left.values())
        ends.append(len(buckets))
    return csr_array((values, buckets, ends), shape=(len(ends) - 1, BUCKETS))


def principal_features(
    difference_CB: csr_array, components: int = COMPONENTS, seed: int = 0
) -> Array:
    """The pairs on their own principal components, (C, H), scaled to a mean square of 1.

        φ = x V √H / √(Σ_h e_h / C),   Σ x xᵀ = V diag(e) Vᵀ, the H largest e

    No mean is taken away: a pair turned round has the opposite features. Components without
    variance are left out. V is that of `SAMPLED` pairs at random where there are more. Source:
    Pearson 1901, Philos. Mag. 2:559.
    """
    count = difference_CB.shape[0]
    some = difference_CB
    if count > SAMPLED:
        some = difference_CB[np.sort(np.random.default_rng(seed).permutation(count)[:SAMPLED])]
    gram = (some.T @ some).toarray()
    size = len(gram)
    spread, directions = eigh(gram, subset_by_index=[max(size - components, 0), size - 1])
    kept = spread > 1e-9 * max(float(spread[-1]), 1e-300)
    return scaled_features(difference_CB @ directions[:, kept])


def scaled_features(feature_CH: npt.ArrayLike) -> Array:
    """Features with a mean square of 1 over pairs and dimensions, so that one range of prior
    precisions suits all."""
    feature = np.asarray(feature_CH, dtype=np.float64)
    size = float(np.sqrt(np.mean(feature**2))) if feature.size else 0.0
    return feature / size if size > 0 else feature
