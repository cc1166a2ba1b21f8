"""The commands `kontrast compare` and `kontrast audit`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kontrast.cli.main import run
from kontrast.cli.studies import parse_list, split_names
from kontrast.studies.study_result import AuditResult
from kontrast.studies.text_tables import aligned, wrapped

from support.tiny_run import images

TINY = ["training.batch=32", "training.warmup=0.0", "training.lr=0.1", "encoder.width=16", "views.size=32"]


def test_compare_prints_one_json_line_and_writes_a_report(tmp_path, capsys):
    arguments = ["compare", "nt-xent", "dcl", str(images()), *TINY, "training.epochs=1", "--seeds", "1"]
    assert run([*arguments, "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[0])
    assert len(lines) == 1 and [row["configuration"] for row in found["rows"]] == ["nt-xent", "dcl"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert found["report"].endswith("report.html") and "Accuracy, kNN" in page
    assert (tmp_path / "out" / "comparison.json").is_file()


def test_audit_prints_its_verdict_before_the_report(tmp_path, capsys):
    arguments = ["audit", str(images()), *TINY, "--bits", "0,2", "--steps", "2", "--device", "cpu"]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("2 random bits ") and "NT-Xent at temperature 0.1" in lines[-2]
    assert (tmp_path / "out" / "report.html").is_file() and (tmp_path / "out" / "audit.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["compare", "nt-xnet"], 2, "did you mean 'nt-xent'?"),
        (["compare", "nt-xent", "no-such-folder"], 2, "'no-such-folder' is not a recipe, an objective or data"),
        (["compare", "digits"], 2, "at least one recipe"),
        (["compare", "nt-xent", "digits", "cifar10"], 2, "unexpected argument 'cifar10'"),
        (["compare", "nt-xent", "--sweep", "objective.temperature"], 2, "must be key.path=value,value"),
        (["compare", "nt-xent", "--seeds", "0"], 2, "at least 1"),
        (["compare", "nt-xent", "training.lrr=1"], 2, "unknown key 'training.lrr'"),
        (["compare", "nt-xent", "--sweep", "objective.temprature=0.1,0.2"], 2, "'temperature'"),
        (["audit", "--bits", "many"], 2, "whole numbers"),
        (["audit", "--objectives", "nt-xnet"], 2, "did you mean 'nt-xent'?"),
        (["audit", "--bits", "99"], 2, "at most 62"),
        (["audit", "no-such-folder"], 3, "no-such-folder"),
        (["audit", "--saturation", "--bits", "0"], 2, "--bits 0"),
        (["audit", "digits", "--saturation", "--steps", "1"], 2, "not DATA"),
        (["audit", "--saturation", "--steps", "1", "--seeds", "2"], 2, "--seeds"),
        (["audit", "--saturation", "--bits", "1024"], 2, "1 to 64"),
        (["audit", "--saturation", "--temperatures", "0"], 2, "--temperatures 0 with --saturation: allowed are"),
        (["audit", "--saturation", "--temperatures", "nan"], 2, "--temperatures nan"),
        (["audit", "--saturation", "--temperatures", "-1"], 2, "--temperatures -1"),
        (["audit", "--saturation", "--temperatures", "1e-320"], 2, "allowed are 1e-06 to"),
        (["audit", "--saturation", "--steps", "-5"], 2, "--steps -5"),
        (["audit", "--saturation", "--batches", "2"], 2, "--batches 2 with --saturation: allowed are 4 to"),
        (["audit", "--saturation", "--encoder", "resnet-19"], 2, "did you mean 'resnet-18'"),
        (["audit", "--saturation", "--epochs", "2", "--steps", "3"], 2, "give one of them"),
        (["audit", "digits", "--epochs", "2"], 2, "--epochs belong to --saturation"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, code, words, tmp_path, capsys):
    assert run([*arguments, "--device", "cpu", "--out", str(tmp_path / "out")]) == code
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("kontrast: ") and words in said[-1], said
    assert not (tmp_path / "out" / "runs").exists()


def test_arguments_are_split_into_names_data_and_overrides(tmp_path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    names, data, overrides = split_names(["quickstart", "dcl", str(folder), "training.epochs=1"])
    assert (names, data, overrides) == (["quickstart", "dcl"], str(folder), ["training.epochs=1"])
    assert split_names(["quickstart", "nowhere"])[0] == ["quickstart", "nowhere"], "an unknown word is refused later"


def test_lists_of_numbers():
    assert parse_list("--bits", "0, 5,5,10", int) == [0, 5, 10]
    assert parse_list("--temperatures", "", float) == []


def test_tables_are_aligned():
    assert aligned([["a", "long"], ["wide cell", "1"]]) == ["a          long", "wide cell  1"]


def test_a_wide_table_breaks_between_columns():
    columns = ["recipe", "accuracy", "over seeds", "over images", "difference", "over seeds", "over images"]
    row = ["nt-xent", "0.123", "0.100 to 0.200", "0.100 to 0.200", "+0.012", "-0.100 to +0.200", "-0.100 to +0.200"]
    lines = aligned([columns, row], 80)
    assert max(map(len, lines)) <= 80
    assert [line.split()[:2] for line in lines] == [["recipe", "accuracy"], ["nt-xent", "0.123"], [],
                                                    ["recipe", "difference"], ["nt-xent", "+0.012"]]  # fmt: skip
    assert len(aligned([row], 110)) == 1 and len(aligned([row])) == 1
    assert aligned([["name", "wide cell"]], 4) == ["name  wide cell"]  # nothing is truncated


def test_tables_with_the_same_note_print_it_once():
    table = {"title": "A", "columns": ["recipe", "difference"], "rows": [["dcl", "+0.012"]], "note": "Against dcl."}
    tables = [table, {**table, "title": "B"}, {**table, "title": "Cost", "note": "A mean."}]
    lines = AuditResult(Path("audit.json"), "Done.", tables, [], [], []).lines()
    shown = [line for line in lines if line in ("A", "B", "Cost", "Against dcl.", "A mean.", "Done.")]
    assert shown == ["A", "B", "Against dcl.", "Cost", "A mean.", "Done."]


def test_sentences_break_between_words():
    text = "dcl is highest by linear probe: 0.167, before nt-xent at 0.125; the paired difference is +0.042"
    lines = wrapped(text, 40)
    assert " ".join(lines) == text and max(map(len, lines)) <= 40 and wrapped(text) == [text]
    assert wrapped("name  one two three four five six", 26, 6) == ["name  one two three four", "      five six"]
