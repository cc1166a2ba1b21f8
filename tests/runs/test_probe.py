"""Probes of a real tiny run: by protocol on fresh crops or cached, over several seeds, fine-tuned, and raced."""

from __future__ import annotations

import dataclasses
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from kontrast.cli.runs import linear_protocol
from kontrast.errors import DataError, UsageError
from kontrast.probes import PROTOCOLS, ProbeResult
from kontrast.reports.report import payload, read_run
from kontrast.runs.probe import PROBES, probe, read_probes, result_table
from kontrast.runs.run import Run
from kontrast.training.build import evaluation_view
from kontrast.training.pretrain import pretrain
from kontrast.training.progress import Progress

from support.tiny_run import IMAGES, copy, images, trained

CPU = torch.device("cpu")
RACE = Path(__file__).parents[2] / "benchmarks" / "probes.py"


def quiet(_: str) -> None:
    pass


def test_a_protocol_trains_on_crops_unless_cached(tmp_path):
    run = Run(copy(tmp_path))
    crops = probe(run, "simclr", device="cpu", say=quiet)
    said: list[str] = []
    cached = probe(run, "simclr", device="cpu", cached=True, say=said.append)
    assert [r.features for r in crops] == ["trained", "untrained", "pixels"]
    assert all("cached" not in r.note for r in crops) and all("cached" in r.note for r in cached)
    assert len(said) == 3 and crops[0].extra["curve"] != cached[0].extra["curve"]
    assert all(r.extra["curve"][-1] == r.accuracy for r in crops)  # the last epoch, not the best


def test_a_run_finds_its_images_from_another_working_folder(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    shutil.copytree(images(), here / "photos")
    shutil.copytree(images() / "0", elsewhere / "photos")  # of the same name, and not the run's
    settings = {"training.epochs": 1, "training.batch": 32, "encoder.width": 16, "evaluation.every": 0}
    monkeypatch.chdir(here)
    path = pretrain("photos", recipe="quickstart", overrides=settings, out=tmp_path / "run", device="cpu", say=quiet)
    monkeypatch.chdir(elsewhere)
    assert sum(len(Run(path).data(split)) for split in ("train", "test")) == IMAGES
    again = pretrain(out=path, resume=True, device="cpu", say=quiet)
    assert Run(again).recipe.data.source == "photos"
    (here / "photos").rename(tmp_path / "gone")
    assert len(Run(path).data("train")) < IMAGES / 4  # what the recipe names, as it reads from here


def test_probes_use_the_center_crop_of_the_recipe():
    run = Run(trained())
    narrow = dataclasses.replace(run.recipe, evaluation=dataclasses.replace(run.recipe.evaluation, crop=0.5))
    picture = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    picture[..., 5:23, 5:23] = 255
    key = torch.zeros(1, dtype=torch.int64)
    whole, middle = (evaluation_view(recipe)(picture, key) for recipe in (run.recipe, narrow))
    assert whole.min() < whole.max() and middle.min() == middle.max() == whole.max()


def test_each_seed_is_saved_and_the_table_shows_the_mean(tmp_path):
    run = Run(copy(tmp_path))
    results = probe(run, "simclr", device="cpu", cached=True, seeds=2, say=quiet)
    assert [(r.features, r.seed) for r in results][:2] == [("trained", 0), ("trained", 1)]
    probe(run, "knn", device="cpu", seeds=2, say=quiet)
    probe(run, "simclr", device="cpu", cached=True, say=quiet)  # replaces only the first seed
    kept = json.loads((run.path / "probes.json").read_text())["probes"]
    assert sorted((e["probe"], e["features"], e["seed"]) for e in kept) == sorted(
        [("simclr", f, s) for f in ("trained", "untrained", "pixels") for s in (0, 1)]
        + [("knn", f, 0) for f in ("trained", "untrained", "pixels")]
    )
    table = result_table(results)
    mean = sum(r.accuracy for r in results[:2]) / 2
    assert table[1].split()[:2] == ["simclr", f"{mean:.3f}"] and table[2].startswith("2 seeds")
    with pytest.raises(UsageError, match="at least one seed"):
        probe(run, "knn", seeds=0, say=quiet)
    with pytest.raises(UsageError, match="epochs = -1"):
        probe(run, "finetune", epochs=-1, say=quiet)


def test_every_probe_has_top_5_and_an_accuracy_per_class(tmp_path):
    run = Run(copy(tmp_path))
    classes = run.data("train").classes
    for kind in ("", "few-shot", "simclr", "finetune"):
        results = probe(run, kind, device="cpu", cached=kind == "simclr", epochs=int(kind == "finetune"), say=quiet)
        for r in results:
            assert r.accuracy <= r.top5 <= 1 and [row["class"] for row in r.per_class] == classes, (kind, r.features)
            assert r.mean_per_class == pytest.approx(sum(row["accuracy"] for row in r.per_class) / len(classes))
        first = result_table(results)[1:3]
        assert first[1].split()[0] == "top-5" and first[1].split()[1] == f"{results[0].top5:.3f}"
    kept = json.loads((run.path / "probes.json").read_text())["probes"]
    assert all(entry["top5"] and len(entry["per_class"]) == 10 for entry in kept)
    (group,) = [g for g in payload([read_run(run.path)])["results"] if g["probe"] == "knn"]
    assert group["classes"]["columns"] == ["class", "test images", "trained encoder", "untrained encoder", "raw pixels"]
    assert len(group["classes"]["rows"]) == 10 and group["rows"][0]["top5"] > 0


def test_an_interval_over_seeds_stays_between_zero_and_one():
    found = [ProbeResult("linear", a, a, a, 10, {}, seed, features="trained") for seed, a in enumerate((0.1, 0.9))]
    assert result_table(found)[2].split() == ["2", "seeds", "0.000", "to", "1.000"]


def test_fine_tuning_on_crops_with_a_protocol_a_search_and_few_shots(tmp_path):
    run = Run(copy(tmp_path))
    given = {"device": "cpu", "epochs": 1, "say": quiet}
    plain, crops = (probe(run, "finetune", cached=cached, **given)[0] for cached in (True, False))
    assert crops.protocol["augmented"] and not plain.protocol["augmented"]
    mae = probe(run, "finetune", protocol="mae", **given)[0]
    assert (mae.protocol["optimizer"], mae.protocol["layer_decay"]) == ("adamw", 0.65)
    few = probe(run, "finetune", shots=3, search=True, **given)[0]
    assert few.probe == "finetune-3-shot" and few.over == "seeds" and few.protocol["shots"] == 3
    assert len(few.protocol["searched"]) >= 3 and len(few.per_class) == 10
    assert probe(run, "few-shot", shots=2, **{**given, "epochs": 0})[0].protocol["shots"] == 2
    kept = {entry["probe"] for entry in read_probes(run.path / "probes.json")}
    assert kept == {"finetune", "finetune-3-shot", "few-shot"}
    for kind, options in (("knn", {"protocol": "mae"}), ("knn", {"shots": 2}), ("", {"search": True})):
        with pytest.raises(UsageError, match="'finetune'"):
            probe(run, kind, device="cpu", say=quiet, **options)


def test_fine_tuning_reports_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kontrast.training.progress.SECONDS_BETWEEN_LINES", 0.0)
    results = probe(Run(copy(tmp_path)), "finetune", device="cpu", epochs=1, say=quiet)
    assert [r.features for r in results] == ["trained", "untrained"]
    assert results[0].protocol["epochs"] == 1
    assert "finetune, trained" in capsys.readouterr().err


def record_bars(monkeypatch: pytest.MonkeyPatch) -> list[Progress]:
    """Every bar that starts from now on."""
    bars: list[Progress] = []
    enter = Progress.__enter__
    monkeypatch.setattr(Progress, "__enter__", lambda bar: bars.append(bar) or enter(bar))
    return bars


@pytest.mark.parametrize(
    ("kind", "fits", "shown"), [("", 3, True), ("knn", 1, True), ("simclr", 2, False), ("finetune", 0, False)]
)
def test_one_bar_spans_extraction_and_fits_of_all_features(tmp_path, monkeypatch, capsys, kind, fits, shown):
    """kNN once and the linear probe at two seeds; a probe with bars of its own makes the outer one silent."""
    run, bars = Run(copy(tmp_path)), record_bars(monkeypatch)
    monkeypatch.setitem(PROTOCOLS, "simclr", dataclasses.replace(PROTOCOLS["simclr"], epochs=2))
    monkeypatch.setitem(PROBES, "linear", PROBES["simclr"])  # for a fit of two epochs
    monkeypatch.setattr("kontrast.training.progress.SECONDS_BETWEEN_LINES", 0.0)
    probe(run, kind, device="cpu", seeds=2, epochs=1, say=quiet)
    outer, *inner = [bar for bar in bars if not bar.title.startswith("read ")]
    assert outer.title == "probe" and outer.silent == (not shown) == bool(inner)
    assert not any(bar.silent for bar in inner)
    if fits:
        assert outer.done == outer.total == 3 * (1 + fits) * IMAGES
    told = capsys.readouterr()
    assert not told.out and ("probe " in told.err) == shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_bar_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setitem(PROTOCOLS, "simclr", dataclasses.replace(PROTOCOLS["simclr"], epochs=2))
    monkeypatch.setattr("sys.stderr", Terminal())
    run = Run(copy(tmp_path))
    for kind in ("knn", "finetune", "simclr"):
        assert probe(run, kind, device="cpu", epochs=1, say=quiet)
    assert "images/s" in sys.stderr.getvalue()


def test_without_labels_the_bar_spans_the_extraction(tmp_path, monkeypatch):
    run, bars = Run(copy(tmp_path)), record_bars(monkeypatch)
    shutil.copytree(images() / "0", tmp_path / "flat")
    with pytest.raises(DataError, match="flat has no labels"):
        probe(run, data=str(tmp_path / "flat"), device="cpu", say=quiet)
    assert bars[-1].title == "probe" and bars[-1].done == bars[-1].total == len(list((tmp_path / "flat").iterdir()))


def test_missing_test_images_are_not_reported_as_missing_labels(tmp_path):
    settings = {"training.epochs": 1, "training.batch": 32, "encoder.width": 16, "evaluation.every": 0}
    settings |= {"data.test_share": 0}
    run = pretrain(images(), recipe="quickstart", overrides=settings, out=tmp_path / "run", device="cpu", say=quiet)
    said: list[str] = []
    assert not probe(run, device="cpu", say=said.append)
    assert said[-1].startswith("no test images: data.test_share is 0;") and (run / "gallery.json").is_file()
    assert f"`kontrast report {run}`" in said[-1]  # a probe does not write the report
    with pytest.raises(DataError, match=r"no test images: data\.test_share is 0"):
        probe(run, data=str(images()), device="cpu", say=quiet)


def test_classes_too_small_to_hold_any_out_have_no_test_images(tmp_path):
    for label in ("0", "1"):
        (tmp_path / "few" / label).mkdir(parents=True)
        for path in sorted((images() / label).iterdir())[:2]:
            shutil.copy(path, tmp_path / "few" / label)
    with pytest.raises(DataError, match=r"no test images: data\.test_share of 0\.2"):
        probe(Run(copy(tmp_path)), data=str(tmp_path / "few"), device="cpu", say=quiet)


def test_results_with_other_labels_are_saved_separately(tmp_path):
    """Each names its CSV file; once, the second replaced the first."""
    run = Run(copy(tmp_path))
    probe(run, "knn", device="cpu", say=quiet)
    names = [name for part in ("train", "test") for name in run.data(part).names]
    for file, odd in (("odd.csv", lambda n: n % 2), ("small.csv", lambda n: n < 5)):
        rows = [f"{name},{int(odd(int(name.split('/')[0])))}" for name in names]
        (tmp_path / file).write_text("\n".join(["name,label", *rows]))
        probe(run, "knn", labels=tmp_path / file, device="cpu", say=quiet)
    kept = [p for p in read_probes(run.path / "probes.json") if p["features"] == "trained" and p["probe"] == "knn"]
    files = [None, str(tmp_path / "odd.csv"), str(tmp_path / "small.csv")]
    assert [p["protocol"].get("labels") for p in kept] == files
    page = payload([read_run(run.path)])
    assert [g["title"].split("/")[0] for g in page["results"]] == ["kNN", "kNN by ", "kNN by "]
    assert [g["chance"] for g in page["results"]] == [None] * 3 and [len(g["rows"]) for g in page["results"]] == [3] * 3
    assert f"{100 * kept[-1]['accuracy']:.1f}%" in page["verdict"]


def test_a_protocol_is_a_linear_probe():
    assert (
        linear_protocol("linear", "cacr") == "cacr"
        and linear_protocol("", "moco") == "moco"
        and linear_protocol("knn", "") == "knn"
    )
    with pytest.raises(UsageError, match="not for 'knn'"):
        linear_protocol("knn", "cacr")
    with pytest.raises(UsageError, match="did you mean 'cacr'"):
        linear_protocol("linear", "cacrr")


def test_the_benchmark_times_every_probe():
    found = runpy.run_path(str(RACE))["race"](Run(trained()), ["simclr"], CPU, False)
    assert [row["probe"] for row in found["rows"]] == ["knn", "logistic", "simclr, cached", "simclr, crops"]
    assert all(row["seconds"] > 0 and row["within"] for row in found["rows"])
    json.dumps(found)


def test_a_class_too_small_for_few_shot_is_an_error(tmp_path):
    run, few = Run(copy(tmp_path)), tmp_path / "few"
    for name in ("owl", "zebra"):
        shutil.copytree(images() / "0", few / name)
    for path in sorted((few / "zebra").iterdir())[4:]:
        path.unlink()
    with pytest.raises(DataError, match=r"'zebra' has 3 train images.* 5"):
        probe(run, "few-shot", data=str(few), device="cpu", say=quiet)


def test_seeds_of_few_shot_draw_different_images(tmp_path):
    results = probe(Run(copy(tmp_path)), "few-shot", device="cpu", seeds=2, say=quiet)
    assert [r.protocol["seeds"] for r in results if r.features == "trained"] == [[0, 1, 2], [3, 4, 5]]
