"""report.html from run folders of every kind: complete, damaged, hostile, without labels, unfinished."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kontrast.reports import ReportError, report
from kontrast.reports.curves import curve_plots, number, percent, thin
from kontrast.reports.facts import summary
from kontrast.reports.probe_results import verdict
from kontrast.reports.report import payload, render
from kontrast.reports.run_files import ReportedRun, read_run

from support.made_run import write_run


class Blocks(html.parser.HTMLParser):
    """The tags of a page, and the text of its script blocks."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._inside = tag == "script"
        given = dict(attributes)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, text):
        if self._inside:
            self.scripts.append(text)


def shown(page: Path) -> dict:
    """Read the page's data as a browser would, and check the content security policy."""
    blocks = Blocks(page.read_text("utf-8"))
    data, script = blocks.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in blocks.policy
    assert blocks.policy.startswith("default-src 'none'")
    assert blocks.tags.count("script") == 2
    assert not {"img", "iframe", "object", "base"} & set(blocks.tags)
    return json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def test_a_finished_run(run, tmp_path):
    page = report(run)
    data = shown(page)
    assert page == run / "report.html"
    assert page.stat().st_size < 5_000_000
    assert data["title"] == "nt-xent on digits"
    for fact in ("86.3% of 1,000 test images", "49.6% for raw pixels", "41.8%", "36.7 points"):
        assert fact in data["verdict"]
    assert [plot["id"] for plot in data["curves"]] == [
        "knn",
        "loss",
        "attraction",
        "repulsion",
        "lr",
        "images_per_second",
    ]
    assert [line["label"] for line in data["curves"][0]["references"]] == ["untrained encoder", "raw pixels"]
    assert [group["probe"] for group in data["results"]] == ["knn", "linear"]
    assert [row["features"] for row in data["results"][0]["rows"]] == ["trained", "untrained", "pixels"]
    assert data["runs"][0]["recipe"] == (run / "recipe.toml").read_text()
    assert dict(data["runs"][0]["facts"])["command"] == "kontrast pretrain --recipe digits/nt-xent"
    assert "someone" not in json.dumps(data) and "first checkpoint" not in dict(data["runs"][0]["facts"])
    assert data["runs"][0]["problems"] == []
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_what_a_kill_leaves_is_swept_on_resuming(run, monkeypatch):
    """The name of the half-written page is one that the run's holder removes (files.sweep)."""
    from kontrast.files import sweep

    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            report([run], run / "page.html")
    assert [path for path in run.iterdir() if path.name.startswith(".")]
    sweep(run)
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("epoch", "words"),
    [(1, "1 epoch"), (1 / 24, "0.04 epochs"), (30.0, "30 epochs"), (5 / 3, "1.67 epochs"), (0.0002, "0.0002 epochs")],
)
def test_the_summary_has_the_length_that_was_trained(run, epoch, words):
    """`training.max_steps` can end a run long before the recipe's epochs."""
    lines = [{"step": 1, "epoch": epoch, "loss": 5.0}, {"step": 1, "epoch": epoch, "knn": 0.5}, {"note": "no epoch"}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    parts = summary(read_run(run)).replace("\N{NO-BREAK SPACE}", " ").split(" · ")
    assert parts[:3] == ["resnet-small", words, "4,000 training images"]
    (run / "metrics.jsonl").unlink()
    assert "epoch" not in summary(read_run(run))


@pytest.mark.parametrize(
    ("value", "text"), [(0.5625, "56.3%"), (0.0625, "6.3%"), (0.25, "25.0%"), (0.56249, "56.2%"), (1.0, "100.0%")]
)
def test_percentages_round_halves_up_like_the_script(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.125, "2.13"),
        (-2.125, "−2.13"),
        (999.7, "1,000"),
        (12344.5, "12,345"),
        (0.04, "0.04"),
        (5, "5"),
        (1e20, "1e+20"),
    ],
)
def test_numbers_round_halves_up(value, text):
    assert number(value) == text


def test_the_margin_is_the_difference_of_the_accuracies(run):
    read = read_run(run)
    for probe in read.probes:
        value = {"trained": 0.5625, "untrained": 0.25, "pixels": 0.5}[probe["features"]]
        probe |= {"accuracy": value, "low": value, "high": value}
    assert "56.3% of" in verdict([read]) and "6.3 points" in verdict([read])
    for probe in read.probes:
        probe["accuracy"] = 0.5
    assert "training did not help" in verdict([read])


def runs_of_one_point(run: Path, losses: list[float]) -> list[ReportedRun]:
    read = [read_run(run) for _ in losses]
    for one, loss in zip(read, losses):
        one.lines, one.speed = [{"step": 1, "epoch": 1, "loss": loss}], []
    return read


def test_runs_of_one_point_have_no_trend(run):
    titles = lambda runs: [plot["title"] for plot in curve_plots(runs, {})]  # noqa: E731
    runs = runs_of_one_point(run, [4.25, 5.5, 4.0, 4.75])
    assert titles(runs) == ["Loss: 4 to 5.5 in 4 runs"]
    assert titles(runs_of_one_point(run, [4.25, 4.25])) == ["Loss: 4.25 in each of 2 runs"]
    runs[0].lines.append({"step": 2, "epoch": 2, "loss": 3.0})
    assert titles(runs) == ["Loss: fell in 1 of 1 runs with more than one point"]


def test_a_loss_has_no_unit(run):
    (plot,) = [plot for plot in curve_plots([read_run(run)], {}) if plot["id"] == "loss"]
    assert plot["y"]["label"] == "loss" and "nats" not in plot["note"]


@pytest.mark.parametrize("lowest", [-0.5, 0.5])
def test_a_loss_below_zero_is_explained(run, lowest):
    read = runs_of_one_point(run, [2.0])
    read[0].lines.append({"step": 2, "epoch": 2, "loss": lowest, "attraction": -3.0})
    loss, attraction = curve_plots(read, {})
    assert ("below zero" in loss["note"]) == (lowest < 0)
    assert "below zero" not in attraction["note"]


def test_the_page_makes_no_requests(run, tmp_path):
    text = report([run], tmp_path / "page.html").read_text("utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text.split('id="data"')[0]))
    addresses |= set(re.findall(r"https?://[^\"'\s)]+", text.rpartition("</script>\n<script>")[2]))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a namespace, which nobody fetches


def test_an_incomplete_last_line_is_normal_and_a_damaged_one_is_reported(run, tmp_path):
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + b'{"step": 41, "loss": 4.')
    data = shown(report([run], tmp_path / "page.html"))
    assert data["runs"][0]["problems"] == []
    assert len(data["curves"][1]["series"][0]["x"]) == 40
    (run / "metrics.jsonl").write_bytes(b'\xff\xfe{"st\n' + whole + b"[1, 2]\n")
    data = shown(report([run], tmp_path / "page.html"))
    (problem,) = data["runs"][0]["problems"]
    assert "metrics.jsonl" in problem and "1 damaged line" in problem
    assert len(data["curves"][1]["series"][0]["x"]) == 40


def test_non_finite_numbers_become_gaps(run, tmp_path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "epoch": 10.25, "loss": NaN, "attraction": -Infinity, "repulsion": 1e999}\n')
    data = shown(report([run], tmp_path / "page.html"))
    for plot in data["curves"][1:4]:
        assert plot["series"][0]["y"][-1] is None
        assert len(plot["series"][0]["y"]) == 41


@pytest.mark.parametrize(
    "missing", ["recipe.toml", "run.json", "metrics.jsonl", "speed.jsonl", "probes.json", "gallery.json", "gallery.png"]
)
def test_any_file_may_be_missing(run, tmp_path, missing):
    (run / missing).unlink()
    data = shown(report([run], tmp_path / "page.html"))
    assert data["runs"][0]["gallery"] is None if "gallery" in missing else data["runs"][0]["gallery"]
    assert bool(data["results"]) == (missing != "probes.json")
    assert bool(data["runs"][0]["problems"]) == (missing == "gallery.png")


@pytest.mark.parametrize("name", ["recipe.toml", "run.json", "probes.json", "gallery.json", "gallery.png", "lens.json",
                                  "transfer.json"])  # fmt: skip
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"[1, 2]", b'{"version": 99}', b"[" * 100_000])
def test_any_file_may_be_damaged(run, tmp_path, name, content):
    (run / name).write_bytes(content)
    data = shown(report([run], tmp_path / "page.html"))
    assert len(data["curves"]) == 6
    if content == b'{"version": 99}' and name.endswith("json") and name != "gallery.json":
        assert "newer" in data["runs"][0]["problems"][0]


def test_a_sprite_of_another_gallery_is_not_shown(run, tmp_path, finished_run):
    gallery = json.loads((run / "gallery.json").read_text())
    (run / "gallery.json").write_text(json.dumps(gallery | {"sprite_sha256": "0" * 64}))
    data = shown(report([run], tmp_path / "page.html"))
    assert data["runs"][0]["gallery"] is None
    assert "gallery.png" in data["runs"][0]["problems"][0]


def test_hostile_names_stay_data(run, tmp_path):
    evil = "</script><img src=x onerror=alert(1)>&\u2028\udcff@SCRIPT@"
    gallery = json.loads((run / "gallery.json").read_text())
    gallery["classes"][0] = gallery["points"][0]["name"] = gallery["queries"][0]["neighbours"][0]["name"] = evil
    (run / "gallery.json").write_text(json.dumps(gallery))
    (run / "recipe.toml").write_text(f'[objective]\nname = "{evil[:-9]}"\n', "utf-8", "replace")
    information = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(information | {"command": [evil], "device": evil}))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "epoch": 1, evil: 3.0}) + "\n")
    page = report([run], tmp_path / "page.html")
    data = shown(page)
    assert data["runs"][0]["gallery"]["classes"][0] == evil
    assert data["runs"][0]["gallery"]["points"][0]["name"] == evil
    assert page.read_text("utf-8").count("<img") == 0
    assert page.read_text("utf-8").count("</script>") == 2


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(), max_size=40))  # surrogates too
def test_any_text_can_be_embedded_in_the_page(text):
    page = render({"title": text, "anything": [text]}).decode("utf-8")
    data, _ = Blocks(page).scripts
    assert json.loads(data)["anything"] == [text]


def test_without_labels_there_is_no_accuracy(finished_run, tmp_path):
    run = write_run(tmp_path / "flat", labelled=False, pictures=finished_run)
    data = shown(report([run], tmp_path / "page.html"))
    assert data["results"] == []
    assert data["runs"][0]["gallery"]["classes"] is None
    assert "no labels" in data["verdict"]


def test_the_verdict_says_that_a_run_is_unfinished(run, tmp_path):
    information = json.loads((run / "run.json").read_text())
    del information["finished"]
    (run / "run.json").write_text(json.dumps(information))
    (run / "probes.json").unlink()
    data = shown(report([run], tmp_path / "page.html"))
    assert not data["runs"][0]["finished"]
    assert "not finished" in data["verdict"] and "10 epochs the loss went from 5.87 to 4.24" in data["verdict"]


def test_the_verdict_admits_failure_and_uncertainty(run):
    read = read_run(run)
    for probe in read.probes:
        if probe["probe"] == "knn" and probe["features"] == "pixels":
            probe |= {"accuracy": 0.9, "low": 0.88, "high": 0.92}
    assert "3.7 points below" in verdict([read]) and "did not help" in verdict([read])
    for probe in read.probes:
        if probe["probe"] == "knn" and probe["features"] == "pixels":
            probe |= {"accuracy": 0.85, "low": 0.83, "high": 0.87}
    assert "1.3 points above" in verdict([read]) and "intervals overlap" in verdict([read])


def test_several_runs_share_one_page(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other" / "run"))
    (other / "recipe.toml").write_text((run / "recipe.toml").read_text().replace("nt-xent", "cacr"))
    probes = json.loads((other / "probes.json").read_text())
    probes["probes"][0] |= {"accuracy": 0.95, "low": 0.93, "high": 0.97}
    (other / "probes.json").write_text(json.dumps(probes))
    page = report([run, other], tmp_path / "page.html")
    data = shown(page)
    names = [one["name"] for one in data["runs"]]
    assert len(set(names)) == 2
    assert names[1] == "other/run"
    assert all(len(plot["series"]) == 2 for plot in data["curves"])
    assert [row[0] for row in data["differences"]] == ["objective.name"]
    for fact in ("2 runs", "“other/run” is ahead", "95.0% (kNN)", f"8.7 points above “{names[0]}”"):
        assert fact in data["verdict"]
    assert page.stat().st_size < 5_000_000


def test_many_runs_stay_under_five_megabytes(run, tmp_path):
    copies = [Path(shutil.copytree(run, tmp_path / f"copy-{i}")) for i in range(12)]
    page = report(copies, tmp_path / "page.html")
    assert page.stat().st_size < 5_000_000
    assert sum(one["gallery"] is not None for one in shown(page)["runs"]) == 8


def test_lens_plots_of_several_runs_are_drawn_together(run, tmp_path):
    plot = {"id": "entropy", "name": "Conditional entropy", "title": "It fell", "x": {"label": "epoch"}}
    plot |= {"y": {"label": "nats"}, "series": [{"name": "H", "x": [1, 2], "y": [3.0, 2.0]}]}
    (run / "lens.json").write_text(json.dumps({"plots": [plot], "numbers": {"alignment": 0.4, "rank": None}}))
    other = Path(shutil.copytree(run, tmp_path / "other"))
    data = shown(report([run], tmp_path / "page.html"))
    assert [one["title"] for one in data["lens"]] == ["It fell"]
    assert [(one["name"], one["value"]) for one in data["numbers"]] == [("alignment", 0.4)]
    data = shown(report([run, other], tmp_path / "page.html"))
    assert [(one["title"], len(one["series"])) for one in data["lens"]] == [("Conditional entropy", 2)]


def weights(image: str) -> dict:
    """Return one query as lens.json has it."""
    one = {"weight": 0.25, "image": image, "name": "test/3/1.png"}
    return {
        "query": {"name": "q", "view": image, "image": image},
        "positives": [one, one],
        "hardest": [one],
        "easiest": [one],
    }


def test_the_weights_of_a_query_have_pictures(run, tmp_path):
    picture = "data:image/png;base64,iVBORw0KGgo="
    (run / "lens.json").write_text(json.dumps({"plots": [], "weights": [weights(picture)]}))
    data = shown(report([run], tmp_path / "page.html"))
    assert len(data["weights"]) == 1 and data["weights"][0]["hardest"][0]["image"] == picture
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (other / "lens.json").write_text(json.dumps({"weights": [weights(picture), weights(picture)]}))
    data = shown(report([run, other], tmp_path / "page.html"))
    assert [entry["run"] for entry in data["weights"]] == [0, 1, 1]  # query by query


@pytest.mark.parametrize(
    "tree", [{"plots": 3}, {"plots": [{"id": 1}, 2]}, {"weights": [{"query": 1}]}, {"numbers": [7]}]
)
def test_a_lens_that_cannot_be_shown_is_reported(run, tmp_path, tree):
    (run / "lens.json").write_text(json.dumps(tree))
    data = shown(report([run], tmp_path / "page.html"))
    assert data["lens"] == data["weights"] == data["numbers"] == []
    assert "lens.json" in data["runs"][0]["problems"][0]


def test_bars_at_different_positions_become_lines(run, tmp_path):
    plot = {"id": "h", "name": "H", "title": "Wide", "kind": "bars", "x": {"label": "a"}, "y": {"label": "b"}}
    other = Path(shutil.copytree(run, tmp_path / "other"))
    for folder, places in ((run, [1, 2]), (other, [1, 3])):
        lines = [{"name": "n", "x": places, "y": [0.5, 0.5]}]
        (folder / "lens.json").write_text(json.dumps({"plots": [plot | {"series": lines}]}))
    (frame,) = shown(report([run, other], tmp_path / "page.html"))["lens"]
    assert frame["kind"] == "line" and "other: Wide." in frame["note"]


def test_the_mean_over_seeds_comes_before_the_seeds(run, tmp_path):
    entries = json.loads((run / "probes.json").read_text())["probes"]
    knn = next(e for e in entries if e["probe"] == "knn" and e["features"] == "trained")
    seeds = [knn | {"seed": n, "accuracy": value, "low": 0.1, "high": 0.9} for n, value in enumerate((0.8, 0.82, 0.84))]
    kept = [e for e in entries if e is not knn]
    (run / "probes.json").write_text(json.dumps({"version": 1, "probes": [*seeds, *kept]}))
    data = shown(report([run], tmp_path / "page.html"))
    rows = next(group for group in data["results"] if group["probe"] == "knn")["rows"]
    mean = rows[0]
    assert mean["label"] == "trained encoder, mean of 3 seeds" and mean["over"] == "seeds"
    assert mean["accuracy"] == pytest.approx(0.82)
    assert mean["high"] - mean["accuracy"] == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)
    assert [(row["label"], row["over"]) for row in rows[1:4]] == [(f"seed {n}", "test images") for n in range(3)]
    assert rows[4]["label"] == "untrained encoder"
    assert "82.0% of" in data["verdict"]


def test_probes_on_other_images_are_separate_groups(run, tmp_path):
    """They have their own controls, no chance level, and no reference lines in the run's curves."""
    entries = json.loads((run / "probes.json").read_text())["probes"]
    for place, entry in enumerate(entries):  # each kind of features chooses its own strength
        entry["protocol"]["C"] = place
    other = [e | {"accuracy": 0.3, "protocol": {**e["protocol"], "data": "cats"}} for e in entries]
    (run / "probes.json").write_text(json.dumps({"version": 1, "probes": [*entries, *other]}))
    data = shown(report([run], tmp_path / "page.html"))
    found = {group["title"]: (len(group["rows"]), group["chance"]) for group in data["results"]}
    assert found == {
        "kNN": (3, 0.1), "linear probe": (3, 0.1), "kNN on cats": (3, None), "linear probe on cats": (3, None)
    }  # fmt: skip
    curve = next(plot for plot in data["curves"] if plot["id"] == "knn")
    assert [line["y"] for line in curve["references"]] == [0.418, 0.496]


def test_equal_runs_share_the_highest_accuracy(run):
    read = [read_run(run), read_run(run)]
    assert "“{0}” and “{0}”".format(read[0].name) in verdict(read) and "86.3% (kNN)" in verdict(read)


def test_runs_with_different_classes_have_no_chance_level(run):
    read = [read_run(run), read_run(run)]
    assert {group["chance"] for group in payload(read)["results"]} == {0.1}
    read[1].gallery |= {"classes": ["cat", "dog"], "classes_present": 2}
    assert {group["chance"] for group in payload(read)["results"]} == {None}


def test_classes_without_images_do_not_count_for_the_chance_level(run):
    """Labels 3 and 7 of a shard's .cls files are two classes, although the numbers go up to seven."""
    read = read_run(run)
    read.gallery |= {"classes": [str(n) for n in range(8)], "classes_present": 2}
    assert {group["chance"] for group in payload([read])["results"]} == {0.5}


def test_the_verdict_of_an_embeddings_file(tmp_path):
    lens = {"version": 1, "plots": [], "numbers": [{"name": "effective rank", "value": 3.0, "note": ""}]}
    (tmp_path / "lens.json").write_text(json.dumps(lens))
    assert "embeddings file" in verdict([read_run(tmp_path)])


def test_the_title_names_the_entropy_nearest_to_its_maximum(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    for folder, value in ((run, 4.5), (other, 5.0)):
        line = {"step": 9999, "epoch": 10, "conditional_entropy": value, "conditional_entropy_max": 5.54}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    curves = shown(report([run, other], tmp_path / "page.html"))["curves"]
    (plot,) = [curve for curve in curves if curve["id"] == "conditional_entropy"]
    assert plot["title"] == "Conditional entropy: “other” ends nearest its maximum, at 5 nats"
    assert plot["references"] == [{"y": 5.54, "label": "maximum"}]
    with (run / "metrics.jsonl").open("a") as file:  # fewer images have a lower maximum
        file.write(
            json.dumps({**line, "step": 10000, "conditional_entropy": 3.8, "conditional_entropy_max": 3.85}) + "\n"
        )
    curves = shown(report([run, other], tmp_path / "page.html"))["curves"]
    (plot,) = [curve for curve in curves if curve["id"] == "conditional_entropy"]
    assert plot["title"] == f"Conditional entropy: “{run.name}” ends nearest its maximum, at 3.8 nats"


def test_thinning_keeps_the_spikes_of_a_long_run():
    x, y = list(range(50_000)), [float(i % 7) for i in range(50_000)]
    y[31_234] = 99.0
    thinned = thin(x, y, 300)
    assert len(thinned["x"]) == 300
    assert max(thinned["high"]) == 99.0
    assert thinned["x"][-1] == 49_999
    assert 2.9 < thinned["y"][10] < 3.1


@pytest.mark.parametrize("first", [0, 1])
def test_whole_epochs_are_divided_by_their_steps(run, first):
    lines = [{"step": s, "epoch": s // 5 + first, "loss": 1.0} for s in range(20)]
    lines.append({"epoch": 4, "knn": 0.5})
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curves = {plot["id"]: plot["series"][0]["x"] for plot in payload([read_run(run)])["curves"]}
    assert curves["loss"] == pytest.approx([s / 5 for s in range(20)])
    assert curves["knn"] == [4]


def test_one_line_per_epoch_is_drawn_at_its_epoch(run):
    lines = [{"step": 10 * e, "epoch": float(e), "loss": 1.0} for e in (1, 2, 3)]
    lines += [{"step": 10 * e, "epoch": e, "effective_rank": 5.0} for e in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curves = {plot["id"]: plot["series"][0]["x"] for plot in payload([read_run(run)])["curves"]}
    assert curves["loss"] == curves["effective_rank"] == [1, 2, 3]


def test_folders_without_a_run_are_refused(tmp_path):
    for path, words in ((tmp_path / "none", "no run folder"), (tmp_path, "not a run folder")):
        with pytest.raises(ReportError, match=words):
            report(path, tmp_path / "page.html")
    with pytest.raises(ReportError, match="0 runs"):
        report([], tmp_path / "page.html")
    with pytest.raises(ReportError, match="--out"):
        report([tmp_path, tmp_path])
    assert not list(tmp_path.iterdir())


def test_the_page_needs_neither_torch_nor_a_utf8_locale(run, tmp_path):
    script = (
        "import sys, pathlib; from kontrast.reports import report; "
        "report([pathlib.Path(sys.argv[1])], pathlib.Path(sys.argv[2])); "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'sklearn'}), "
        "[m for m in sys.modules if m.startswith('kontrast.') and not m.startswith('kontrast.reports')])"
    )
    bare = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    page = tmp_path / "page.html"
    done = subprocess.run([sys.executable, "-c", script, run, page], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[] []"
    report([run], tmp_path / "here.html")
    assert page.read_bytes() == (tmp_path / "here.html").read_bytes()


@pytest.mark.parametrize("loss", [False, 10**400, "1", None])
def test_a_loss_that_is_not_a_number_is_ignored(tmp_path, loss):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "epoch": loss, "loss": loss, "effective_rank": loss}))
    assert "No training step" in report([run], tmp_path / "page.html").read_text()
