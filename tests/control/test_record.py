"""The film: one greedy episode from its seed, in part where it is long, or why there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from keel.config.control import Environment
from keel.control.record import COUNTER, FRAMES, record_video
from keel.types import KeelError
from tests.control import worlds

SEED = 6


def shown(path: Path) -> list[tuple[int, int]]:
    """The step and the mark's last byte of each picture (see Drawn)."""
    with Image.open(path) as film_:
        colours = [np.array(f.convert("RGB"))[COUNTER, 0] for f in ImageSequence.Iterator(film_)]
    return [(int(r) // 4 * 16 + int(g) // 16, int(b)) for r, g, b in colours]


def played(path: Path, length: int) -> tuple[int, list[tuple[int, int]]]:
    choice = Environment(id=worlds.DRAWN, options={"length": length})
    return record_video(path, worlds.choose_all, choice, SEED, 10_000), shown(path)


def test_film_shows_every_state_of_the_episode(tmp_path: Path) -> None:
    steps, pictures = played(tmp_path / "film.gif", 40)
    assert steps == 40
    mark = worlds.mark_of(SEED, 0) % 256
    assert pictures == [(n, mark) for n in range(41)]


@pytest.mark.parametrize("length", [FRAMES - 1, FRAMES, FRAMES + 1, 2 * FRAMES + 111])
def test_a_long_episode_is_shown_in_part(tmp_path: Path, length: int) -> None:
    steps, pictures = played(tmp_path / "film.gif", length)
    assert steps == length
    numbers = [number for number, _ in pictures]
    assert FRAMES // 2 <= len(numbers) <= FRAMES + 1
    assert (numbers[0], numbers[-1]) == (0, length)
    # At one pace; the last state is shown whatever the pace.
    assert len(set(np.diff(numbers[:-1]))) == 1
    assert numbers == sorted(set(numbers))


def test_an_environment_without_rendering_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "film.gif"
    with pytest.raises(KeelError, match=r"Counter-v0.*cannot be rendered") as caught:
        record_video(path, worlds.choose_all, Environment(id=worlds.COUNTER), SEED, 10_000)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
