"""Features of pairs without a model: hashed words, on the pool's principal components.

Suffixes: `_C` pairs, `_B` buckets, `_H` components.
"""

from __future__ import annotations

import re
import zlib
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
_WORDS = re.compile(r"[a-z']+|\d+|[^\sa-z\d]")


@lru_cache(maxsize=100_000)
def _bucket(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "replace")) % BUCKETS


def hashed_words(text: str) -> dict[int, float]:
    """log(1 + count) of the words in each bucket that has any."""
    counts = Counter(map(_bucket, _WORDS.findall(text.lower())))
    return {bucket: float(np.log1p(count)) for bucket, count in counts.items()}


def word_differences(answers: Iterable[tuple[str, str]]) -> csr_array:
    """Of each pair of texts: the hashed words of the first less those of the second, (C, B)."""
    values: list[float] = []
    buckets: list[int] = []
    ends = [0]
    for first, second in answers:
        found = hashed_words(first)
        for bucket, value in hashed_words(second).items():
            found[bucket] = found.get(bucket, 0.0) - value
        buckets += found
        values += found.values()
        ends.append(len(buckets))
    return csr_array((values, buckets, ends), shape=(len(ends) - 1, BUCKETS))


def principal_features(difference_CB: csr_array, components: int = COMPONENTS) -> Array:
    """The pairs on their own principal components, (C, H), scaled to a mean square of 1.

        φ = x V √H / √(Σ_h e_h / C),   Σ x xᵀ = V diag(e) Vᵀ, the H largest e

    No mean is taken away: a pair turned round has the opposite features. Components without
    variance are left out. Source: Pearson 1901, Philos. Mag. 2:559.
    """
    gram = (difference_CB.T @ difference_CB).toarray()
    size = len(gram)
    spread, directions = eigh(gram, subset_by_index=[max(size - components, 0), size - 1])
    kept = spread > 1e-9 * max(float(spread[-1]), 1e-300)
    features = np.asarray(difference_CB @ directions[:, kept])
    return scaled_features(features)


def scaled_features(feature_CH: npt.ArrayLike) -> Array:
    """Features with a mean square of 1 over pairs and dimensions, so that one range of prior
    precisions suits all."""
    feature = np.asarray(feature_CH, dtype=np.float64)
    size = float(np.sqrt(np.mean(feature**2))) if feature.size else 0.0
    return feature / size if size > 0 else feature
