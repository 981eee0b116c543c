"""Checkpoints, written completely or not at all and verified by checksums. Without pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from keel.platform import files
from keel.runs.layout import FolderEntry, Place, RunFolder
from keel.runs.values import changes, exact, restore
from keel.types import KeelError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor


MANIFEST = "manifest.json"
FORMAT = 1
STOP = "stop"
"""Set in the manifest of a checkpoint that is there only because the run was asked to stop."""
BROKEN = (errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors of a damaged file; others mean that it cannot be read by us, or now."""
RECORD = "record.json"
SHOWN = 3
"""Differences that a message lists."""
R = TypeVar("R", bound="DataclassInstance")


@contextmanager
def writing(target: Path, stop: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` when the block ends well and is deleted otherwise.

    At the end a manifest with the SHA-256 and size of every file is added, all is synced and the
    folder renamed; one of this name is deleted before. With `stop` the checkpoint is deleted once
    there is a newer one (see `prune`). Raises KeelError if the folder cannot be written.
    """
    aside = files.aside(target)
    with files.os_errors(target):
        files.make_folder(target.parent)
        if aside.exists():
            files.remove(aside)
        aside.mkdir()
        try:
            yield aside
            _finish(aside, target.name, stop)
            if target.exists():
                shutil.rmtree(target)
            aside.rename(target)
            files.sync_path(target.parent)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)  # the next start deletes what remains
            raise


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None when every file is there, byte for byte.

    Further files are no damage. Raises KeelError if it cannot be judged: it may not be read, or
    another version of Keel wrote it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise KeelError(
                f"checkpoint {path} has format {manifest['format']!r}, not {FORMAT}: "
                "use the version of Keel that wrote it"
            )
        if manifest["name"] != path.name:
            return f"it is {manifest['name']}, under another name"
        for name, facts in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != facts["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {facts['bytes']}"
            if files.sha256(file) != facts["sha256"]:
                return f"{name} differs from its checksum"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        if error.errno not in BROKEN:
            raise KeelError(f"cannot read {path}: {error.strerror}: fix the folder") from error
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def newest_whole(
    folder: RunFolder, on_damaged: Callable[[Path, str], None] | None = None
) -> FolderEntry | None:
    """The newest checkpoint that is whole; the damaged ones passed over are reported with why."""
    for entry in reversed(folder.list_checkpoints()):
        wrong = damage(entry.path)
        if wrong is None:
            return entry
        if on_damaged is not None:
            on_damaged(entry.path, wrong)
    return None


def unknown(folder: RunFolder) -> list[Path]:
    """The checkpoints of stages that the recipe does not have."""
    listed = {entry.path for entry in folder.list_checkpoints()}
    found = (path.parent for path in sorted(folder.checkpoints_folder.glob(f"*/{MANIFEST}")))
    return [p for p in found if p not in listed and not p.name.startswith(files.ASIDE)]


def check_model(path: Path) -> None:
    """Raises KeelError if a reward model that a stage wrote, with a manifest, is damaged."""
    wrong = damage(path) if (path / MANIFEST).exists() else None
    if wrong is not None:
        raise KeelError(
            f"reward model {path} is damaged ({wrong}): restore it from a copy, or train its stage "
            "again"
        )


def prune(folder: RunFolder, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Deletes all checkpoints but the newest `keep` and the protected ones; returns the deleted.

    Those written because of a stop are deleted first, unless one is the newest: a run that was
    never stopped has none.
    """
    found = [entry.path for entry in folder.list_checkpoints()]
    deleted = [path for path in found[:-1] if _of_a_stop(path)]
    old = [path for path in found if path not in deleted][:-keep]
    deleted += [path for path in old if path not in protect]
    for path in deleted:
        files.remove(path)
    return deleted


def _of_a_stop(path: Path) -> bool:
    """Whether this checkpoint was written only because the run was stopped."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get(STOP) is True


def _finish(folder: Path, name: str, stop: bool) -> None:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": files.sha256(path),
        }
        for path in found
    }
    manifest = folder / MANIFEST
    content = {"format": FORMAT, "name": name, **({STOP: True} if stop else {}), "files": listed}
    manifest.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    for path in (*found, manifest):
        files.sync_path(path)
    for inside in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        files.sync_path(inside)


# ---------------------------------------------------------------- state


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes tensors, from any device and also with shared storage, as safetensors, bit for bit."""
    from safetensors.torch import save_file

    own: dict[str, Tensor] = {}
    seen: set[int] = set()  # safetensors refuses tensors that share storage
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        storage = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    with files.os_errors(path):
        save_file(own, path, metadata)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises KeelError if it is not a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise KeelError(f"cannot read {path}: {error}: resume from another checkpoint") from error


def save_json(path: Path, state: Mapping[str, Any]) -> None:
    """Writes state as JSON such that `load_json` gives an equal value (see `exact`)."""
    text = json.dumps(exact(state), ensure_ascii=True, allow_nan=False, indent=1)
    with files.os_errors(path):
        path.write_text(text + "\n", "utf-8")


def load_json(path: Path) -> Any:
    """The state that `save_json` wrote. Raises KeelError for another file."""
    try:
        return restore(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KeelError(f"cannot read {path}: {error}: resume from another checkpoint") from error


def load_record(path: Path, kind: type[R]) -> R:
    """The dataclass whose fields `save_json` wrote. Raises KeelError for a file with others."""
    state = load_json(path)
    known = {f.name for f in fields(kind)}
    if set(state) != known:
        raise KeelError(
            f"checkpoint {path.parent} was written by another version of Keel (it holds "
            f"{', '.join(sorted(set(state) ^ known))} otherwise): resume with that version"
        )
    return kind(**state)


# ---------------------------------------------------------------- record.json


@dataclass(frozen=True, slots=True)
class Recorded:
    """The content of record.json: the recipe, and hashes of its inputs and of what is recorded."""

    recipe: Mapping[str, Any]
    inputs: Mapping[str, str]
    metrics: str
    files: Mapping[str, str]

    def write(self, checkpoint: Path) -> None:
        """Write record.json into a checkpoint that is being written."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=1, sort_keys=True)
        (checkpoint / RECORD).write_text(text + "\n", "utf-8")


def read(checkpoint: Path) -> Recorded:
    """The record of a whole checkpoint."""
    try:
        return Recorded(**json.loads((checkpoint / RECORD).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise KeelError(
            f"cannot read {checkpoint / RECORD}: {error}: resume with the version that wrote it"
        ) from error


def changed(known: Recorded, recipe: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """How recipe and inputs differ from those of a checkpoint; empty if they do not."""
    parts = [f"{c.name} = {c.b} (was {c.a})" for c in changes(known.recipe, recipe)]
    # A name that only one of them has is a change of the recipe.
    both = sorted(known.inputs.keys() & inputs.keys())
    parts += [f"the content of {name}" for name in both if known.inputs[name] != inputs[name]]
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return ", ".join(parts[:SHOWN]) + more


def records_until(folder: RunFolder, last: Place) -> list[tuple[Place, bytes]]:
    """The complete records of metrics.jsonl up to a place. Raises KeelError for a damaged one."""
    found = []
    for number, line, record in files.read_jsonl(folder.metrics):
        try:
            place = Place(folder.stages.index(record["stage"]), int(record["step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise files.damaged_line(folder.metrics, number, error) from error
        if place <= last:
            found.append((place, line))
    return found


def check(folder: RunFolder, newest: FolderEntry, known: Recorded) -> list[str]:
    """Compares the run folder with its newest checkpoint's record; returns the rollouts lost since.

    Nothing that follows depends on rollouts and evaluations before a checkpoint: those missing or
    changed are only reported, each as `PATH is missing` or `PATH is damaged`. Raises KeelError
    if metrics, sampled examples, labels or reward models from before the checkpoint are.
    """
    if known.metrics != _metrics_hash(folder, newest.place):
        changed = [
            entry.path.name for entry in folder.list_checkpoints() if _differs(folder, entry)
        ]
        which = " to ".join(dict.fromkeys((changed[0], changed[-1])))
        raise KeelError(
            f"{folder.metrics} is not what checkpoint {newest.path.name} was written with: restore "
            f"it from a copy, or delete checkpoints {which}, and --resume repeats what they hold"
        )
    lost = []
    for name, digest in known.files.items():
        path = folder.path / name
        if path.is_file() and files.sha256(path) == digest:
            continue
        what = "is damaged" if path.is_file() else "is missing"
        if path.name == MANIFEST:
            path, what = path.parent, "is not the reward model that this run trained"
        if path.parent not in (folder.rollouts_folder, folder.evaluations_folder):
            raise KeelError(f"{path} {what}: restore it from a copy")
        lost.append(f"{name} {what}")
    return lost


def _metrics_hash(folder: RunFolder, last: Place) -> str:
    lines = (line for _, line in records_until(folder, last))
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _differs(folder: RunFolder, entry: FolderEntry) -> bool:
    """Whether metrics.jsonl is not what a checkpoint was written with."""
    known = None if damage(entry.path) else read(entry.path)
    return known is None or known.metrics != _metrics_hash(folder, entry.place)
