"""Models on the Hugging Face Hub: `hf://owner/name`, or `hf://owner/name@revision` for a branch, tag or commit.

Only the files of a model that kontrast wrote are downloaded, into the cache of huggingface_hub. The folder is read
like a run folder that was received from others. The only token is that of the variable HF_TOKEN.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kontrast.errors import CheckpointError, EnvironmentFault, KontrastError, UsageError, shorten

FILES = ("model.safetensors", "recipe.toml", "run.json", "config.json", "README.md", "probes.json")
"""The files of a model on the hub; the first three are what kontrast reads."""
NEEDED = FILES[:3]
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
PLACE = re.compile(rf"hf:/{{1,2}}(?P<name>{NAME.pattern})(?:@(?P<revision>[\w.][\w./-]*))?", re.ASCII)
"""`pathlib` makes one slash of two."""
TOKEN = "HF_TOKEN"


def is_hub(place: str) -> bool:
    """Return whether a run, or what `--from` names, is a model on the hub."""
    return place.startswith("hf:/")


def check_name(name: str) -> str:
    """Return the name of a model on the hub, if it has the form owner/name."""
    if not NAME.fullmatch(name) or len(name) > 96 or "--" in name or ".." in name or name.endswith(".git"):
        rule = "letters, digits, '-', '_' and '.' in both, at most 96 in all"
        raise UsageError(f"{shorten(name)} is not a model's name: give owner/name ({rule})")
    return name


def fetch(place: str) -> Path:
    """Download a model, unless it is in the cache, and return its folder.

    Args:
        place: hf://owner/name or hf://owner/name@revision.
    """
    found = PLACE.fullmatch(place)
    if found is None:
        raise UsageError(
            f"{shorten(place)} is not a model on the hub: give hf://owner/name or hf://owner/name@revision"
        )
    name, revision = check_name(found["name"]), found["revision"]
    hub = import_hub(place)
    with hub_faults(name, revision):
        folder = Path(
            hub.snapshot_download(
                name, revision=revision, allow_patterns=list(FILES), token=token() or False, endpoint=endpoint()
            )
        )
    missing = [file for file in NEEDED if not (folder / file).is_file()]
    if missing:
        advice = f"`kontrast push` did not make it; timm may load it: timm.create_model('hf-hub:{name}')"
        raise CheckpointError(f"hf://{name} has no {missing[0]}: {advice}")
    return folder


def token() -> str:
    """Return the token that the user set, or an empty string."""
    return os.environ.get(TOKEN, "").strip()


def endpoint() -> str | None:
    """Return the address of another hub than the public one, if the user set it."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def import_hub(place: str) -> Any:
    """Import huggingface_hub, or raise an error that names the extra."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise EnvironmentFault(f"{place} needs {error.name}: pip install 'kontrast[hub]'") from None
    return huggingface_hub


@contextlib.contextmanager
def hub_faults(name: str, revision: str | None = None) -> Iterator[None]:
    """Turn what huggingface_hub raises, which are many types of exceptions, into one line."""
    try:
        yield
    except KontrastError:
        raise
    except Exception as error:
        raise explain(error, name, revision) from error


def explain(error: BaseException, name: str, revision: str | None) -> KontrastError:
    """Return the error for the user: what the hub answered, and what to do."""
    place, status = f"hf://{name}", status_of(error)
    if type(error).__name__ == "RevisionNotFoundError":
        return UsageError(f"{place} has no revision {revision!r}: give a branch, a tag or a whole commit hash")
    if status == 404:
        return UsageError(f"{place} does not exist, or {TOKEN} may not see it: check owner and name")
    if status == 401:
        given = f"the hub does not accept the token in {TOKEN}, or {place} does not exist: check both"
        none = f"{place} does not exist or is private: check the name, or set {TOKEN} to a token that may read it"
        return EnvironmentFault(given if token() else none)
    if status == 403:
        return EnvironmentFault(
            f"the token in {TOKEN} has no right to do this with {place}: ask its owner, or give another"
        )
    reason = f"answered {status}" if status else " ".join(str(error).split())[:200] or type(error).__name__
    advice = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and try again"
    return EnvironmentFault(f"{place}: the hub {'' if status else 'can not be reached: '}{reason}; {advice}")


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status of an error or of what caused it; 0 if there was no answer."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return 0
