"""What is around the package: workflows, hooks, citation, container and packaging say the same as the source tree."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kontrast

from support.dockerfile import Builder, copied_context, overlays_work, read_dockerfile

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")


def read(path: Path):
    yaml = pytest.importorskip("yaml", reason="needs the dependency group dev")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path: Path) -> list[dict]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[list[str]]:
    """Return the words of each line that a workflow runs."""
    lines = [line for step in steps(path) for line in step.get("run", "").splitlines() if line.strip()]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists_with_pinned_actions_and_few_rights(path):
    tree = read(path)
    assert tree["permissions"] == {"contents": "read"} and "concurrency" in tree
    for job in tree["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"] == "ubuntu-latest"
    for step in steps(path):
        assert ("uses" in step) != ("run" in step)
        assert "uses" not in step or PINNED.fullmatch(step["uses"]), step
    named = re.findall(r"@[0-9a-f]{40}(.*)", path.read_text())
    assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", comment) for comment in named), (
        "name the version of each pinned commit"
    )
    for words in commands(path):
        files = [word for word in words if "/" in word and not word.startswith("-")]
        assert all((ROOT / file).exists() for file in files), files
        groups = [words[i + 1] for i, word in enumerate(words) if word == "--group"]
        assert set(groups) <= set(PROJECT["dependency-groups"]), groups


def test_only_publishing_jobs_may_prove_who_they_are():
    rights = {
        (path.stem, name): job.get("permissions", {}) for path in WORKFLOWS for name, job in read(path)["jobs"].items()
    }
    written = {job: right for job, right in rights.items() if right}
    assert written == {
        ("docs", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "publish"): {"id-token": "write", "attestations": "write"},
    }
    assert all(read(WORKFLOWS[0].with_name(f"{name}.yml"))["jobs"][job]["environment"] for name, job in written)
    assert not any("secrets." in path.read_text() for path in WORKFLOWS)


def test_the_tests_run_on_the_pythons_that_the_package_names():
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    named = [line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if ":: Python :: 3." in line]
    assert matrix["python"] == named and PROJECT["project"]["requires-python"] == f">={named[0]}"
    lowest = {"python": named[0], "resolution": "lowest-direct"}
    assert lowest in matrix["include"]
    assert any("-m integration" in " ".join(words) for words in commands(ROOT / ".github" / "workflows" / "tests.yml"))


def test_hooks_run_programs_of_the_group_dev():
    hooks = [hook for repo in read(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    dev = {re.split(r"[>=\[]", name)[0] for name in PROJECT["dependency-groups"]["dev"]}
    for hook in hooks:
        words = shlex.split(hook["entry"])
        assert words[:2] == ["uv", "run"] and words[2] in dev and hook["language"] == "system"
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        assert re.compile(hook.get("files", ""))


def test_the_citation_is_of_this_version_and_of_the_five_papers():
    tree = read(ROOT / "CITATION.cff")
    assert tree["version"] == kontrast.__version__ and tree["license"] == PROJECT["project"]["license"] == "MIT"
    assert {"cff-version", "message", "title", "authors"} <= set(tree) and len(tree["references"]) == 5
    for paper in tree["references"]:
        assert {"type", "title", "authors", "year"} <= set(paper)
        assert all({"family-names", "given-names"} == set(author) for author in paper["authors"])


def test_issue_forms_have_questions():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        tree = read(path)
        if path.stem == "config":
            continue
        ids = [question["id"] for question in tree["body"]]
        assert tree["name"] and tree["description"] and len(ids) == len(set(ids))
        assert all(question["attributes"]["label"] for question in tree["body"])


def test_the_pages_about_the_project_exist_and_link_to_what_exists():
    for name in (
        "SECURITY.md",
        "CODE_OF_CONDUCT.md",
        ".github/pull_request_template.md",
        "docs/project/deprecations.md",
    ):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
        assert all((ROOT / name).parent.joinpath(link).exists() for link in links), links
    assert "deprecations" in (ROOT / "docs" / "project" / "index.md").read_text(encoding="utf-8").splitlines()


def test_the_container_copies_what_exists_and_runs_the_quick_start_without_root():
    defaults, stages = read_dockerfile(ROOT / "Dockerfile")
    python = defaults["PYTHON"]
    assert f"Programming Language :: Python :: {python}" in PROJECT["project"]["classifiers"]
    context = copied_context(ROOT)
    assert all((ROOT / name).exists() for name in context)
    own = [rest for stage in stages for word, rest in stage.steps if word == "COPY" and "--from" not in rest]
    assert sorted(name for rest in own for name in rest.split()[:-1]) == sorted(context)
    assert {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "pyproject.toml"} <= set(context)
    last = dict(stages[-1].steps)
    assert last["USER"] == "kontrast" and last["CMD"] == '["kontrast", "pretrain", "--out", "run"]'
    assert all(stage.base == "python:${PYTHON}-slim" for stage in stages)


def test_the_sdist_includes_what_exists():
    include = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / name.lstrip("/")).exists() for name in include)


def test_the_release_check_says_how_it_is_used():
    done = subprocess.run([sys.executable, ROOT / ".ci" / "release", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--python" in done.stdout and os.access(ROOT / ".ci" / "release", os.X_OK)


@pytest.mark.integration
def test_a_clean_clone_becomes_a_wheel_that_runs_elsewhere(tmp_path):
    """The whole release check: two equal builds, twine, contents, an empty environment, the quick start."""
    words = [sys.executable, ROOT / ".ci" / "release", "--out", tmp_path / "dist"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert {path.suffix for path in (tmp_path / "dist").iterdir()} == {".whl", ".gz"}


@pytest.mark.integration
def test_the_steps_of_the_dockerfile(tmp_path):
    """All instructions, one by one, over this machine's root in place of the base image.

    KONTRAST_TEST_PYTHON is the folder of the Python that stands in for the image's, KONTRAST_TEST_DEVICE the DEVICE.
    """
    if not overlays_work(tmp_path / "probe"):
        pytest.skip("needs the rights to mount an overlay")
    python = os.environ.get("KONTRAST_TEST_PYTHON", os.path.join(sys.base_prefix, "bin"))  # a virtual one may lack pip
    device = os.environ.get("KONTRAST_TEST_DEVICE", "cpu")
    printed = Builder(ROOT, tmp_path / "stages", {"DEVICE": device}, python).build()
    assert "run     run" in printed and "report  run/report.html" in printed
