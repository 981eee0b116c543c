"""Uploads a model folder to the Hugging Face hub. The token comes from the places that
huggingface_hub reads: HF_TOKEN, or what `hf auth login` wrote."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from keel.types import KeelError, one_line

LOG_IN = "run hf auth login, or set HF_TOKEN to a token that may write"


def check_upload(name: str) -> None:
    """Raise KeelError for a name that cannot be a model's on the hub, and if there is no token or
    the hub is off. Nothing is sent."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise KeelError(f"--hub {name}: {one_line(error)}") from None
    if "/" not in name:
        raise KeelError(f"--hub {name}: write OWNER/{name}, with your name or an organisation's")
    if constants.HF_HUB_OFFLINE:
        raise KeelError("--hub: HF_HUB_OFFLINE is set, so that nothing is sent: unset it")
    if get_token() is None:
        raise KeelError(f"--hub: there is no token of the Hugging Face hub: {LOG_IN}")


def upload(folder: Path, name: str, *, private: bool = False) -> str:
    """Make the model `name` on the hub and upload the folder to it; returns its address.

    Raises KeelError if there is a model of that name, the token may not write, or the hub cannot be
    reached.
    """
    hub = HfApi()
    try:
        url = hub.create_repo(name, private=private)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Exported by Keel")
    except (httpx2.HTTPError, OSError, ValueError) as error:
        why = _why(error, name, hub.endpoint)
        token = get_token()
        if token:
            why = why.replace(token, "…")
        rest = f"; the model is in {folder}: hf upload {name} {folder} uploads it"
        raise KeelError(f"--hub {name}: {why}{rest}") from None
    return str(url)


def _why(error: Exception, name: str, endpoint: str) -> str:
    """What went wrong, in one line."""
    if isinstance(error, ValueError):
        return one_line(error)
    if not isinstance(error, HfHubHTTPError):
        return f"{endpoint} cannot be reached ({one_line(error, named=True)})"
    status = error.response.status_code
    if status == HTTPStatus.UNAUTHORIZED:
        return f"the hub does not accept the token: {LOG_IN}"
    if status == HTTPStatus.FORBIDDEN:
        return f"the token may not write to {name.rpartition('/')[0] or name}: {LOG_IN}"
    if status == HTTPStatus.CONFLICT:
        return "there is a model of that name: choose another"
    said = error.server_message or HTTPStatus(status).phrase
    return f"the hub answers {status}: {' '.join(said.split())[:200]}"
