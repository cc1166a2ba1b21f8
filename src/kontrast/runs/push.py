"""Publish a run's encoder on the Hugging Face Hub, with its card, preprocessing and recipe.

The files are those of `kontrast export --format hub`. A folder that was exported before is uploaded as it is, so that
its README.md can be edited first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kontrast.errors import EnvironmentFault, UsageError
from kontrast.files import read_bytes
from kontrast.runs.export import describe
from kontrast.runs.model_folder import CARD, CONFIG, WEIGHTS, check_license, model_files
from kontrast.runs.run import Run, open_run
from kontrast.training.hub import FILES, TOKEN, check_name, endpoint, hub_faults, import_hub, token


@dataclass(frozen=True)
class PushResult:
    """The model on the hub, its files with their sizes in bytes, and the commit's hash and address, which are empty for
    a dry run."""

    name: str
    files: dict[str, int]
    commit: str = ""
    url: str = ""

    def __str__(self) -> str:
        lines = [f"{size:>13,} {name}" for name, size in self.files.items()]
        lines += [
            f"model   hf://{self.name}" if self.commit else f"nothing was uploaded to hf://{self.name} (--dry-run)"
        ]
        return "\n".join([*lines, *([f"commit  {self.url}"] if self.url else [])])

    def to_dict(self) -> dict[str, Any]:
        return {"model": f"hf://{self.name}", "files": self.files, "commit": self.commit, "url": self.url}


def push(
    run: str | os.PathLike[str],
    name: str,
    *,
    private: bool = False,
    license: str = "",
    message: str = "",
    dry_run: bool = False,
) -> PushResult:
    """Upload the encoder to the Hugging Face Hub, so that `kontrast.load("hf://owner/name")` loads it.

    The model is created if there is none of that name; otherwise a commit is added. The token is read from the variable
    HF_TOKEN. Absolute paths of this machine are left out. This needs the extra `hub`.

    Args:
        run: A run folder or a `kontrast.Run`; or a folder that `kontrast export --format hub` wrote, which is uploaded
            as it is.
        name: The name of the model, "owner/name".
        private: Make a new model private. Default: public.
        license: Of the weights: an identifier such as "cc-by-4.0".
        message: The message of the commit.
        dry_run: Only return what would be uploaded, without a connection.

    Returns:
        The files that were uploaded with their sizes, the hash of the commit and its address.

    Example:
        >>> import kontrast
        >>> kontrast.push("runs/digits", "ada/digits", license="mit", dry_run=True).name
        'ada/digits'
    """
    opened, name = open_run(run), check_name(name)
    files = exported_files(opened, license) or made_files(opened, name, license)
    sizes = {file: len(content) for file, content in files.items()}
    if dry_run:
        return PushResult(name, sizes)
    hub = import_hub("kontrast push")
    if not token():
        advice = "make one with the right to write in your settings on the hub"
        raise EnvironmentFault(f"kontrast push needs a token in the variable {TOKEN}: {advice}")
    with hub_faults(name):
        api = hub.HfApi(endpoint=endpoint(), token=token(), library_name="kontrast")
        api.create_repo(name, private=private, exist_ok=True)
        operations = [hub.CommitOperationAdd(file, content) for file, content in files.items()]
        made = api.create_commit(name, operations, commit_message=message or f"Upload {name} with kontrast")
    return PushResult(name, sizes, made.oid, made.commit_url)


def made_files(run: Run, name: str, license: str) -> dict[str, bytes]:
    """Return the files of a run for the hub."""
    encoder = run.encoder("cpu")
    described = describe(run, encoder)
    return model_files(run, encoder, described, "hub", license=license, title=name, place=f"hf://{name}")


def exported_files(run: Run, license: str) -> dict[str, bytes]:
    """Return the files of an exported folder as they are; none if it is a run folder of another kind."""
    if not all((run.path / file).is_file() for file in (WEIGHTS, CONFIG, CARD)):
        return {}
    if license:
        given = check_license(license)
        raise UsageError(f"--license {given}: {run.path} is exported already; change its {CARD}, or export it again")
    run.encoder("cpu")  # raises if the weights do not fit the recipe or the digest
    return {file: read_bytes(run.path / file) for file in FILES if (run.path / file).is_file()}
