from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keel.config.stage import Checkpoints
from keel.platform import files
from keel.runs import checkpoint, lifecycle
from keel.runs.checkpoint import damage, newest_whole, prune, writing
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.runs.values import exact, restore
from keel.types import KeelError
from tests.runs.example import Progress, fill, one_stage, two_stages


def save(folder: RunFolder, stage: int, step: int, content: str = "state") -> Path:
    target = folder.checkpoint(stage, step)
    with writing(target) as aside:
        (aside / "state.json").write_text(content)
        (aside / "policy").mkdir()
        (aside / "policy" / "weights").write_bytes(bytes(range(256)))
    return target


def test_manifest_lists_size_and_hash_of_every_file(tmp_path: Path) -> None:
    target = save(one_stage(tmp_path), 0, 5)
    manifest = json.loads((target / "manifest.json").read_text())
    assert list(manifest["files"]) == ["policy/weights", "state.json"]
    # SHA-256 of the bytes 0 … 255, a known number.
    assert manifest["files"]["policy/weights"] == {
        "bytes": 256,
        "sha256": "40aff2e9d2d8922e47afd4648e6967497158785fbd1da870e7110266bf944880",
    }
    assert damage(target) is None


def test_failed_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    target = folder.checkpoint(0, 5)

    def fail() -> None:
        with writing(target) as aside:
            (aside / "state.json").write_text("half")
            assert not target.exists()
            assert folder.list_checkpoints() == []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(folder.checkpoints_folder.iterdir()) == []


def test_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    save(folder, 0, 5, "old")
    target = save(folder, 0, 5, "new")
    assert (target / "state.json").read_text() == "new"
    assert [path.name for path in folder.checkpoints_folder.iterdir()] == ["step-000005"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "printed"),
    [
        (lambda c: flip(c / "policy/weights"), "policy/weights differs from its checksum"),
        (lambda c: (c / "policy/weights").write_bytes(b"x"), "policy/weights has 1 bytes, not 256"),
        (lambda c: (c / "state.json").unlink(), "state.json is missing"),
        (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda c: (c / "manifest.json").write_text('{"format"'), "manifest.json is damaged"),
        (lambda c: (c / "manifest.json").write_text('{"files": []}'), "manifest.json is damaged"),
    ],
)
def test_newest_whole_passes_over_damaged_checkpoints(
    tmp_path: Path, harm: Any, printed: str
) -> None:
    folder = one_stage(tmp_path)
    for step in (5, 10, 15):
        save(folder, 0, step)
    harm(folder.checkpoint(0, 15))
    reports: list[tuple[Path, str]] = []
    found = newest_whole(folder, on_damaged=lambda path, why: reports.append((path, why)))
    assert found is not None
    assert found.path == folder.checkpoint(0, 10)
    assert reports == [(folder.checkpoint(0, 15), printed)]


def dying_after(survive: int) -> None:
    """In a child: it dies at the call after `survive` that open a file or change the disk."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **names: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > survive:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **names)

        return call

    for name in ("rename", "fsync", "unlink", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    io.open = counted(io.open)  # which pathlib calls


def until_killed(act: Callable[[], object]) -> Iterator[bool]:
    """Do something in a child that is killed one system call later each time; whether it was."""
    for survive in range(60):
        process = os.fork()
        if process == 0:
            try:
                dying_after(survive)
                act()
            finally:
                os._exit(0)
        status = os.waitpid(process, 0)[1]
        assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
        yield os.WIFSIGNALED(status)
        if os.WIFEXITED(status):
            assert survive > 5
            return
    pytest.fail("it never ended by itself")


def test_writer_killed_at_any_instant_leaves_whole_checkpoints(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    save(folder, 0, 4, "before")
    for killed in until_killed(lambda: save(folder, 0, 5, "new")):
        left = [entry.place.step for entry in folder.list_checkpoints()]
        assert left in ([4], [4, 5])
        assert [damage(entry.path) for entry in folder.list_checkpoints()] == [None] * len(left)
        files.remove_leftovers(folder.checkpoints_folder)
        assert len(list(folder.checkpoints_folder.iterdir())) == len(left)
        if killed and left == [4, 5]:
            files.remove(folder.checkpoint(0, 5))
    assert left == [4, 5]


def test_pruning_killed_at_any_instant_leaves_whole_checkpoints(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)

    def prune_four() -> None:
        prune(folder, keep=1, protect=[folder.checkpoint(0, 2)])

    for step in (2, 4, 6, 8):
        save(folder, 0, step)
    for killed in until_killed(prune_four):
        left = [entry.place.step for entry in folder.list_checkpoints()]
        assert {2, 8} <= set(left)
        assert [damage(entry.path) for entry in folder.list_checkpoints()] == [None] * len(left)
        files.remove_leftovers(folder.checkpoints_folder)
        for step in {4, 6} - set(left) if killed else ():
            save(folder, 0, step)
    assert left == [2, 8]


# ---------------------------------------------------------------- state


def test_tensors_round_trip_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 4, generator=generator)
    tensors = {
        "float32": wide,
        "tied": wide,
        "row": wide[2],
        "transposed": wide.t(),
        "bfloat16": wide.bfloat16(),
        "float64": wide.double() / 3,
        "odd": torch.tensor([math.nan, -math.inf, -0.0, 1e-45]),
        "step": torch.tensor(7.0),
        "random": generator.get_state(),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }
    checkpoint.save_tensors(tmp_path / "a.safetensors", tensors)
    back = checkpoint.load_tensors(tmp_path / "a.safetensors")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        raw, own = back[name].contiguous(), tensor.contiguous()
        assert raw.view(-1).view(torch.uint8).equal(own.view(-1).view(torch.uint8)), name
    again = dict(reversed(tensors.items()))
    checkpoint.save_tensors(tmp_path / "b.safetensors", again)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_files_without_state_are_refused(tmp_path: Path) -> None:
    for read in (checkpoint.load_tensors, checkpoint.load_json):
        with pytest.raises(KeelError, match="cannot read"):
            read(tmp_path / "absent")
    # A pickle is never read, whatever its name.
    torch.save({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(KeelError, match="cannot read"):
        checkpoint.load_tensors(tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text('{"$type": "array", "dtype": "|O", "shape": [1], "data": ""}')
    with pytest.raises(KeelError, match="cannot read"):
        checkpoint.load_json(tmp_path / "x.json")


leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
state = st.recursive(
    leaf,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(state)
def test_state_round_trips_through_json(value: Any) -> None:
    back = restore(json.loads(json.dumps(exact(value), allow_nan=False)))
    # Equality does not distinguish -0.0, nan, and True from 1; repr does.
    assert repr(back) == repr(value)


def test_arrays_and_numpy_scalars_round_trip() -> None:
    arrays: list[Any] = [
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.array([math.nan, -0.0, 0.1], np.float32),
        np.zeros((0, 3)),
        np.array(3.5),
        np.array([2**63], np.uint64),
    ]
    for array in arrays:
        back = restore(json.loads(json.dumps(exact(array))))
        assert back.dtype == array.dtype
        assert back.shape == array.shape
        assert back.tobytes() == array.tobytes()
        assert back.flags.writeable
    scalars: list[Any] = [np.float32(0.1), np.float64("nan"), np.int64(-5), np.bool_(True)]
    for scalar in scalars:
        back = restore(json.loads(json.dumps(exact(scalar))))
        assert type(back) is type(scalar)
        assert back.tobytes() == scalar.tobytes()


@pytest.mark.parametrize(
    "value", [{1: 2}, {"$type": 1}, torch.ones(1), np.array([object()]), {1, 2}, b"x"]
)
def test_state_that_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        exact({"state": value})


# ---------------------------------------------------------------- keeping


def test_newest_of_the_run_and_best_of_each_stage_are_kept(tmp_path: Path) -> None:
    folder = two_stages(tmp_path)
    with lifecycle.run_lifecycle(folder, False) as (writer, _):
        best = {(0, 1): None, (0, 2): 2, (0, 3): 2, (0, 4): 2, (1, 1): 1, (1, 2): 1, (1, 3): 1}
        kept = []
        for (stage, step), at in best.items():
            writer.checkpoint(Progress(stage, step, at), fill, Checkpoints(keep=2))
            kept.append([entry.path.name for entry in folder.list_checkpoints()])
    assert kept[1] == ["warmup-step-000001", "warmup-step-000002"]
    assert kept[3] == [f"warmup-step-00000{n}" for n in (2, 3, 4)]
    assert kept[4] == ["warmup-step-000002", "warmup-step-000004", "rl-step-000001"]
    assert kept[6] == ["warmup-step-000002", *(f"rl-step-00000{n}" for n in (1, 2, 3))]
    assert json.loads(folder.run_json.read_text()) == {"best": {"rl": 1, "warmup": 2}}
    printed = [row for row in load(folder.path).events() if row["event"] == "checkpoint"]
    assert [(row["stage"], row["step"]) for row in printed][-1] == ("rl", 3)
    size = sum(p.stat().st_size for p in folder.checkpoint(1, 3).iterdir())
    assert printed[-1]["bytes"] == size > 2
    assert printed[-1]["seconds"] > 0


def test_checkpoint_of_a_stop_is_deleted_with_the_next(tmp_path: Path) -> None:
    """Every two steps of six, with a stop wherever one may come: as if there had been none."""
    folder = one_stage(tmp_path)
    choice, kept = Checkpoints(every=2, keep=2), []
    with lifecycle.run_lifecycle(folder, False) as (writer, _):
        for step in range(6):
            writer.checkpoint(Progress(0, step, 1 if step else None), fill, choice, 5)
            kept.append([entry.place.step for entry in folder.list_checkpoints()])
    assert kept == [[0], [1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 4, 5]]
    assert '"stop"' not in "".join(p.read_text() for p in folder.path.glob("checkpoints/*/man*"))


def test_prune_deletes_checkpoints_that_manifests_mark_as_of_a_stop(tmp_path: Path) -> None:
    """A process may die between the next checkpoint and the going of what a stop left."""
    folder = one_stage(tmp_path)
    for step in (2, 3, 4):
        with writing(folder.checkpoint(0, step), stop=step != 2) as aside:
            fill(aside)
    assert damage(folder.checkpoint(0, 3)) is None
    assert prune(folder, keep=3) == [folder.checkpoint(0, 3)]
    assert prune(folder, keep=3) == []


def test_existing_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    folder = one_stage(tmp_path)
    for resume in (False, True):
        with lifecycle.run_lifecycle(folder, resume) as (writer, _):
            writer.checkpoint(Progress(0, 2, None), fill, Checkpoints())
            before = folder.checkpoint(0, 2).stat().st_ino
            writer.checkpoint(Progress(0, 2, None), lambda aside: 1 / 0, Checkpoints())
    assert folder.checkpoint(0, 2).stat().st_ino == before


def test_best_after_the_resumed_checkpoint_is_forgotten(tmp_path: Path) -> None:
    """run.json may know a best that lies past the checkpoint gone back to."""
    folder = two_stages(tmp_path)
    (folder.run_json).write_text('{"best": {"warmup": 2, "rl": 7}}')
    with lifecycle.run_lifecycle(folder, False) as (writer, _):
        writer.checkpoint(Progress(1, 1, None), fill, Checkpoints(keep=1))
    assert json.loads(folder.run_json.read_text())["best"] == {"warmup": 2}


def test_unreadable_checkpoint_is_an_error_not_damage(tmp_path: Path) -> None:
    """It would be thrown away for that."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = one_stage(tmp_path)
    (save(folder, 0, 5) / "state.json").chmod(0o600)
    process = os.fork()
    if process == 0:
        os.chdir(folder.checkpoints_folder)
        os.setuid(65534)
        try:
            damage(Path("step-000005"))
        except KeelError as error:
            os._exit(0 if "cannot read step-000005: Permission denied" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    target = save(one_stage(tmp_path), 0, 5)
    text = (target / "manifest.json").read_text()
    (target / "manifest.json").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(KeelError, match="has format 2, not 1: use the version of Keel"):
        damage(target)
