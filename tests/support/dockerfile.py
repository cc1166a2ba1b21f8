"""Read a Dockerfile, and execute its instructions step by step where there is no Docker.

Each stage is an overlay over the root of this machine, which stands in for the base image: a step changes nothing
outside of it. That needs the rights of root and a system that lets them mount overlays.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

NETWORK = re.compile(r"SSL_CERT_\w+|REQUESTS_CA_BUNDLE|\w+_proxy|(UV|PIP)_\w+", re.IGNORECASE)
"""The variables that say how this machine reaches a package index, which every step gets."""
KNOWN = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD"}


@dataclass
class Stage:
    """One stage: its name, base image, and its instructions as (word, arguments)."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def read_dockerfile(path: Path) -> tuple[dict[str, str], list[Stage]]:
    """Return the arguments before the first stage with their defaults, and the stages."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    defaults: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.strip().partition(" ")
        assert word in KNOWN, f"{path.name} has the instruction {word}, which this reader does not know"
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name or str(len(stages)), base))
        elif not stages:
            assert word == "ARG", f"{word} before the first FROM"
            name, _, value = rest.partition("=")
            defaults[name] = value
        else:
            stages[-1].steps.append((word, rest.strip()))
    return defaults, stages


def copied_context(root: Path) -> list[str]:
    """Return what .dockerignore lets into the context: it leaves everything out but the lines that begin with `!`."""
    lines = [line for line in (root / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*", "the first line of .dockerignore leaves everything out"
    return [line[1:] for line in lines if line.startswith("!")]


class Builder:
    """Executes the stages below a folder.

    Args:
        root: the folder of the Dockerfile.
        work: where the stages are kept.
        arguments: build arguments, as `--build-arg` gives them.
        path: the folder of the Python that stands in for that of the base image.
    """

    def __init__(self, root: Path, work: Path, arguments: Mapping[str, str], path: str):
        self.defaults, self.stages = read_dockerfile(root / "Dockerfile")
        self.work, self.arguments, self.path = work, arguments, path
        self.context = work / "context"
        self.log: list[str] = []
        for name in copied_context(root):
            place = self.context / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if (root / name).is_dir():
                shutil.copytree(root / name, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(root / name, place)

    def build(self) -> str:
        """Execute all stages up to the last command, and return what that prints."""
        printed = ""
        for stage in self.stages:
            printed = self.execute(stage)
        return printed

    def execute(self, stage: Stage) -> str:
        environment = {name: value for name, value in os.environ.items() if NETWORK.fullmatch(name)}
        environment |= {"PATH": f"{self.path}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}
        folder, user, printed = "/", "root", ""
        self.log.append(f"FROM {stage.base}")
        above = " ".join(f"$ROOT{place}" for place in (Path(self.path), *Path(self.path).parents))
        self.shell([stage.name], f"chmod o+x {above}")  # the image's Python is in no home folder
        for word, rest in stage.steps:
            self.log.append(f"{word} {rest}")
            if word == "ARG":
                name, _, value = rest.partition("=")
                environment[name] = self.arguments.get(name, value.strip('"'))
            elif word == "ENV":
                pairs = (pair.partition("=") for pair in shlex.split(rest))
                environment |= {name: Template(value).substitute(environment) for name, _, value in pairs}
            elif word == "WORKDIR":
                folder = rest
                self.run(stage, f"mkdir -p {rest}", environment, "/", "root")
            elif word == "USER":
                user = rest
            elif word == "COPY":
                self.copy(stage, rest, folder)
            else:
                command = shlex.join(json.loads(rest)) if word == "CMD" else rest
                printed = self.run(stage, command, environment, folder, user)
        return printed

    def copy(self, stage: Stage, rest: str, folder: str) -> None:
        """Copy from the context, or from an earlier stage. A folder is copied as its content, as Docker does."""
        *sources, target = [word for word in rest.split() if not word.startswith("--from=")]
        origin = re.search(r"--from=(\w+)", rest)
        place = f"$ROOT{folder}/{target}" if not target.startswith("/") else f"$ROOT{target}"
        commands = [f"mkdir -p {place}"]
        for source in sources:
            below = f"{self.work}/{origin[1]}/root{source}" if origin else f"{self.context}/{source}"
            commands.append(f"if [ -d {below} ]; then cp -a {below}/. {place}; else cp -a {below} {place}; fi")
        mounted = [origin[1], stage.name] if origin else [stage.name]
        self.shell(mounted, " && ".join(commands))

    def run(self, stage: Stage, command: str, environment: Mapping[str, str], folder: str, user: str) -> str:
        """Run a shell command in a stage."""
        home = "/root" if user == "root" else f"/home/{user}"
        given = shlex.join(["env", "-i", *(f"{k}={v}" for k, v in {"HOME": home, **environment}.items())])
        inner = shlex.quote(f"cd {folder} && {command}")
        switch = "" if user == "root" else f"setpriv --reuid={user} --regid={user} --clear-groups "
        return self.shell([stage.name], f"chroot $ROOT {switch}{given} sh -c {inner}")

    def shell(self, mounted: list[str], script: str) -> str:
        """Run a script in a mount namespace of its own, where the stages are mounted; $ROOT is the root of the last."""
        lines = ["set -e"]
        for name in mounted:
            place = self.work / name
            for part in ("root", "upper", "scratch"):
                (place / part).mkdir(parents=True, exist_ok=True)
            options = f"lowerdir=/,upperdir={place}/upper,workdir={place}/scratch"
            lines += [f"ROOT={place}/root", f"mount -t overlay overlay -o {options} $ROOT"]
            lines += [f"mount --rbind /{part} $ROOT/{part}" for part in ("proc", "dev")]
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", "\n".join([*lines, script])], capture_output=True, text=True
        )
        printed = done.stdout + done.stderr
        assert done.returncode == 0, f"{self.log[-1]} ended with {done.returncode}:\n{printed[-3000:]}"
        return printed


def overlays_work(work: Path) -> bool:
    """Return whether this process may mount an overlay of the root."""
    try:
        for part in ("root", "upper", "scratch"):
            (work / part).mkdir(parents=True)
        options = f"lowerdir=/,upperdir={work}/upper,workdir={work}/scratch"
        mount = f"mount -t overlay overlay -o {options} {work}/root"
        return subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
