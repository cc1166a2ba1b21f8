"""The names of `import kontrast`: all there, documented, and loaded only when they are used."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys

import pytest

import kontrast

ROOMS = ["data", "errors", "kernels", "lens", "networks", "objectives", "optim", "probes", "views"]
VERBS = ["audit", "compare", "duplicates", "embed", "explain", "export", "finetune", "index", "lens", "load"]
VERBS += ["neighbors", "objective", "pack", "predict", "pretrain", "probe", "push", "report", "reproduce", "select"]
VERBS += ["transfer"]


def run_python(code: str) -> str:
    """Run code in a new process and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_dir_lists_the_api_and_nothing_else():
    importlib.import_module("kontrast.runs.run")  # sets attributes of the package that are not public
    assert sorted(dir(kontrast)) == sorted({"Encoder", "Run", "__version__", *ROOMS, *VERBS})
    assert sorted(kontrast.__all__) == sorted({"Encoder", "Run", *ROOMS, *VERBS})


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_a_documented_function(name):
    verb = getattr(kontrast, name)
    assert callable(verb)
    text = verb.__call__.__doc__ if name == "lens" else verb.__doc__
    for section in ("Args:", "Returns:", "Example:", ">>> "):
        assert section in text, f"kontrast.{name} has no {section}"
    for argument, parameter in inspect.signature(verb).parameters.items():
        stars = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        assert f"    {stars}{argument}: " in text, f"kontrast.{name} does not document {argument}"


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_has_a_docstring_and_public_names(name):
    room = getattr(kontrast, name)
    assert room is importlib.import_module(f"kontrast.{name}") and room.__doc__
    for public in getattr(room, "__all__", []):
        assert getattr(room, public) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_verb"):
        kontrast.no_such_verb  # noqa: B018
    assert not hasattr(kontrast, "evaluate")


def test_importing_kontrast_loads_no_torch():
    code = "import kontrast, sys; dir(kontrast); kontrast.errors; print('torch' in sys.modules, 'typer' in sys.modules)"
    assert run_python(code) == "False False"


def test_a_room_is_loaded_when_it_is_used():
    code = "import kontrast; print(kontrast.objectives.NTXent(temperature=0.5).temperature)"
    assert run_python(code) == "0.5"


IMPORTED = ["kontrast.lens.rank", "kontrast.lens", "kontrast.runs.lens", "kontrast.cli.main"]


@pytest.mark.parametrize("first", [IMPORTED[0], *(pytest.param(m, marks=pytest.mark.slow) for m in IMPORTED[1:])])
def test_lens_is_a_room_and_a_verb_whatever_is_imported_first(first):
    code = f"import kontrast, {first}; print(callable(kontrast.lens), kontrast.lens.effective_rank.__name__)"
    assert run_python(code) == "True effective_rank"


def test_the_verb_lens_has_the_signature_and_docstring_of_its_implementation():
    from kontrast.runs.lens import lens

    assert inspect.signature(kontrast.lens).parameters == inspect.signature(lens).parameters
    assert inspect.getdoc(kontrast.lens.__call__) == inspect.getdoc(lens)


@pytest.mark.parametrize("name", ["explain", "pretrain", "report"])
def test_the_example_of_a_verb_runs(name, tmp_path, monkeypatch):
    """The examples of the other verbs are run by the tests of their rooms."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(getattr(kontrast, name), name, globs={}):
        runner.run(test)
    assert runner.tries and not runner.failures


def test_help_of_pretrain_has_every_section():
    text = run_python("import kontrast; help(kontrast.pretrain)")
    for word in ("Args:", "Returns:", "Example:", "data:", "overrides:", "[N,C,H,W]"):
        assert word in text
