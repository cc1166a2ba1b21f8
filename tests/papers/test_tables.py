"""The papers' tables: definitions, stored results, and verdicts on the papers' claims."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kontrast.cli.papers import parse_seeds
from kontrast.config.overrides import flat
from kontrast.config.recipe import to_tree
from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.objectives import objective
from kontrast.papers import claims, table_data
from kontrast.papers.measure import CROPS, MEASURES, TABLE_PROBES, mean_and_error
from kontrast.papers.reproduce import TableRunner
from kontrast.papers.result_pages import CURVES, NUMBERS, make_pages
from kontrast.papers.results_file import read_results, refuse_other_settings
from kontrast.papers.save_results import add_runs, merge_results
from kontrast.papers.tables import load_table, read_table, relevant_settings, table_names
from kontrast.training.learner import build_student
from kontrast.training.option_checks import check_options

REPOSITORY = Path(__file__).parents[2]
PAPERS = {
    "cacr": "table-2 cifar100 table-3 table-8 table-9 ablations figure-8 figure-9 figure-10 cost",
    "dcl": "batch-sizes temperatures",
    "gcl": "figure-3 figure-5 figure-6 figure-a1 figure-b1 figure-c1c mnist table-d1 table-d2 table-d3",
    "jcl": "moco",
    "uniclr": "figure-2 table-1 table-3",
}
TABLES = {f"{paper}-{name}" for paper, names in PAPERS.items() for name in names.split()}
read_once = functools.cache(load_table)
CELLS = [(name, cell.name) for name in table_names() for cell in read_once(name).cells]


def table_of(*names: str):
    cells = [{"name": name, "label": name.upper(), "recipe": "quickstart"} for name in names]
    tree = {"title": "T", "paper": "P", "about": "A.", "probes": ["linear", "knn"], "settings": []}
    return read_table("made", {**tree, "groups": [{"name": "g", "title": "G", "where": "w", "cells": cells}]}, "made")


def run_of(seed: int, accuracy: float, **more):
    probe = {"accuracy": accuracy, "low": accuracy - 0.01, "high": accuracy + 0.01, "n": 10_000}
    facts = {"seed": seed, "kontrast": "0", "torch": "0", "device": "D", "precision": "float32", "seconds": 90.0}
    facts |= {"epochs": 2, "at_once": 1, "probes": {"linear": probe}, "numbers": {}, "curves": {}}
    return {**facts, **more}


def keep(out: Path, table, name: str, seed: int, accuracy: float, changed=None, data="D", **more):
    cell = next(c for c in table.cells if c.name == name)
    recipe = table.recipe(cell, [f"{k}={v}" for k, v in (changed or {}).items()])
    run = run_of(seed, accuracy, **more)
    facts = {"changed": changed or {}, "settings": relevant_settings(recipe), "data": data}
    add_runs(out, table, [(cell, facts, run)])


def test_the_tables_exist():
    assert set(table_names()) >= TABLES


@pytest.mark.parametrize(
    ("table", "cells"), [("gcl-table-d1", 80), ("gcl-table-d2", 60), ("gcl-table-d3", 60)], ids=lambda value: str(value)
)
def test_table_d_has_all_cells_of_the_paper(table, cells):
    """Five losses by batch sizes by epochs, each with its own number."""
    found = [cell for cell in read_once(table).cells if re.search(r"-b\d+-\d00$", cell.name)]
    assert len(found) == cells and all(cell.paper for cell in found)
    for cell in found:
        recipe = read_once(table).recipe(cell)
        loss, batch, epochs = re.fullmatch(r"(.+)-b(\d+)-(\d+)", cell.name).groups()
        assert cell.recipe.endswith(f"gcl-{loss}")
        assert (recipe.training.batch, recipe.training.epochs) == (int(batch), int(epochs))
    assert found[0].paper == {"gcl-table-d1": 87.4, "gcl-table-d2": 65.4, "gcl-table-d3": 66.6}[table]
    assert found[-1].paper == {"gcl-table-d1": 93.2, "gcl-table-d2": 69.8, "gcl-table-d3": 70.9}[table]


def test_the_arms_of_figure_6_differ_in_one_thing():
    """A momentum teacher with its bank; a supervised and an untrained control with the same encoder and images."""
    table = load_table("gcl-figure-6")
    plain, moco, supervised, untrained = (
        table.select([f"{group}-4"])[0] for group in ("nt-xent-0.2", "moco", "supervised", "untrained")
    )
    before, after = (flat(to_tree(table.recipe(cell))) for cell in (plain, moco))
    differing = {key.split(".")[0] for key in before | after if before.get(key) != after.get(key)}
    assert differing == {"title", "teacher", "bank"}
    assert (supervised.learner, untrained.learner) == ("supervised", "untrained")
    for control in (supervised, untrained):
        assert table.recipe(control) == table.recipe(plain)


def test_figure_5_trains_as_the_other_figures_of_gcl():
    """It differs from figure 6 in the added feature, the batch size and the length of the training."""
    five, six = read_once("gcl-figure-5"), read_once("gcl-figure-6")
    digits, bits = (
        flat(to_tree(t.recipe(t.select([name])[0]))) for t, name in ((five, "tau-0.2-16"), (six, "batch-256-4"))
    )
    differing = {key for key in digits | bits if digits.get(key) != bits.get(key)} - {"title"}
    assert differing == {"data.overlay_digits", "data.random_bits", "training.epochs", "training.warmup"}
    assert (digits["training.epochs"], digits["objective.reduction"]) == (200, "simclr_tf")
    for name, change in (("batch-128-16", "training.batch"), ("layers-1-16", "head.layers")):
        other = flat(to_tree(five.recipe(five.select([name])[0])))
        assert {key for key in digits if digits[key] != other.get(key)} == {change}


@pytest.mark.parametrize(("table", "name"), CELLS)
def test_every_cell_is_a_valid_recipe(table, name):
    table = read_once(table)
    cell = next(c for c in table.cells if c.name == name)
    recipe = table.recipe(cell)
    check_options(recipe, objective(recipe.objective.name, **recipe.objective.arguments))
    assert recipe.checkpoints.every == 0 or recipe.checkpoints.every >= 20, "a checkpoint each epoch is waste"
    assert cell.label and cell.where and (cell.paper is None or 1 < cell.paper < (100 if table.probes else 5000))
    assert set(table.probes) <= set(TABLE_PROBES) and set(table.measures) <= set(MEASURES)
    assert table.measures != ("multiplier",) or "temperature" in recipe.objective.arguments


def test_both_sets_of_uniclrs_figure_2_have_the_same_variants():
    table = read_once("uniclr-figure-2")
    pairs = zip(table.select(["sim-affinity"]), table.select(["cifar100"]), strict=True)
    for ten, hundred in pairs:
        one, other = (flat(to_tree(table.recipe(cell))) for cell in (ten, hundred))
        assert ten.label == hundred.label
        assert {key for key in one | other if one.get(key) != other.get(key)} - {"title"} == {"data.source"}


def test_uniclrs_table_3_has_the_rivals_of_the_paper():
    table = read_once("uniclr-table-3")
    found = {cell.name: cell.paper for cell in table.cells}
    rivals = ("simclr", "simsiam", "dino", "zero-cl")
    assert [found[name] for name in rivals] == [90.74, 90.51, 89.19, 90.81]
    assert [found[f"cifar100-{name}"] for name in rivals] == [65.39, 65.86, 66.38, 70.33]
    assert [found[f"imagenet100-{name}"] for name in rivals if name != "simsiam"] == [77.48, 74.84, 79.26]
    assert all(table.recipe(cell).data.source == cell.group for cell in table.cells)
    assert {table.recipe(cell).encoder.name for cell in table.select(["imagenet100"])} == {"resnet-50"}


def test_the_table_of_costs_is_about_the_time_of_a_step():
    table = read_once("cacr-cost")
    assert table.main == "step_time" and table.main in NUMBERS and not table.probes
    assert [cell.paper for cell in table.select(["alexnet"])] == [2.1, 2.6, 3.5, 4.5, 5.4, 6.4]
    assert [cell.paper for cell in table.select(["moco"])] == [837, 840, 889, 871, 3550, 996, 1017, 1342]


@pytest.mark.parametrize("table", [name for name in table_names() if not read_once(name).probes])
def test_a_table_without_probes_is_about_a_number_of_its_page(table, tmp_path):
    TableRunner(read_once(table), [], None, tmp_path, tmp_path, "cpu", print)


def test_the_networks_of_every_cell_can_be_built(monkeypatch):
    """The depth of a head, for example, is checked when it is built. On the meta device this is cheap."""
    monkeypatch.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor)  # imports torch's compiler there
    recipes = [read_once(table).recipe(cell) for table in table_names() for cell in read_once(table).run_cells]
    with torch.device("meta"):
        for recipe in {repr((r.encoder, r.head)): replace(r, text=None) for r in recipes}.values():
            build_student(recipe, channels=3)


def test_a_cell_whose_networks_can_not_be_built_is_refused_before_any_training(tmp_path):
    table = table_of("a")
    runner = TableRunner(table, ["head.layers=4"], None, tmp_path, tmp_path, "cpu", print)
    with pytest.raises(UsageError, match=r"table 'made', cell 'a': layers = 4: give a whole number from 1 to 3"):
        runner.plan(table.cells[0], 0)


def test_the_papers_settings_reach_the_cells():
    regular = load_table("cacr-table-2").select(["regular"])
    assert [c.paper for c in regular] == [83.47, 83.39, 83.67, 83.73, 85.54, 86.54]
    figure = load_table("gcl-figure-6")
    bits = [figure.recipe(c).data.random_bits for c in figure.select(["swd"])]
    assert bits == [0, 2, 4, 6, 8, 10, 15]
    assert {figure.recipe(c).encoder.name for c in figure.cells} == {"resnet-18"}
    assert figure.recipe(figure.cells[0]).objective.arguments["reduction"] == "simclr_tf"
    cold = figure.recipe(figure.select(["nt-xent-0.05-4"])[0])
    assert (cold.objective.arguments["temperature"], cold.data.random_bits) == (0.05, 4)
    assert {t.recipe(c).training.epochs for t in [load_table("uniclr-figure-2")] for c in t.cells} == {200}
    sweep = load_table("jcl-moco")
    weights = [sweep.recipe(c).objective.arguments["covariance_weight"] for c in sweep.select(["lambda"])]
    assert weights == [4, 0, 0.2, 1, 2, 10], "the cell with 4 is the method itself"


def test_every_linear_protocol_has_crops():
    from kontrast.probes import PROTOCOLS

    assert set(CROPS) == set(PROTOCOLS)


def test_a_linear_protocol_draws_new_crops_in_every_epoch():
    import torch

    from kontrast.papers.measure import CroppedFeatures, probe_run
    from kontrast.probes import extract_features
    from kontrast.runs.run import Run

    from support.tiny_run import trained

    run, cpu = Run(trained()), torch.device("cpu")
    train, encoder = run.data("train"), run.encoder("cpu")
    made = CroppedFeatures(run, encoder, train, (0.2, 1.0), cpu)
    first = made(0)
    plain = extract_features(encoder, train, run.transform())
    assert first.shape == plain.shape and torch.equal(first, made(0))
    assert not torch.isclose(first, made(1)).all(1).any()
    whole = CroppedFeatures(
        run, encoder, train, (1.0, 1.0), cpu
    )  # the whole image without flips, which this run does not use
    assert torch.isclose(whole(0), plain, atol=1e-4).all()
    assert whole.views.policies[0].flip == 0.0 and made.views.policies[0].crop_scale == (0.2, 1.0)
    found = probe_run(run, ("simclr", "knn"), cpu)
    assert set(found) == {"simclr", "knn"} and found["simclr"]["best"] >= found["simclr"]["accuracy"]


def test_unknown_names_are_refused_with_a_suggestion():
    with pytest.raises(UsageError, match="did you mean 'cacr-table-2'"):
        load_table("cacr-table-22")
    with pytest.raises(UsageError, match="did you mean 'cacr-k4'"):
        load_table("cacr-table-2").select(["cacr-k44"])
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        load_table("nowhere.toml")
    with pytest.raises(UsageError, match="has no 'paper'"):
        read_table("x", {"title": "T"}, "x")
    with pytest.raises(UsageError, match="two cells named 'a'"):
        table_of("a", "a")
    with pytest.raises(UsageError, match="a cell and a group named 'g'"):
        table_of("g")


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("1,4", [1, 4]), ("2,", [2]), ("1", [0]), ("0,", [0])])
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["0", "", "a", "-1", "-1,"])
def test_invalid_seeds_are_refused(text):
    with pytest.raises(UsageError, match="--seeds"):
        parse_seeds(text)


def test_the_page_has_the_largest_peak_memory_of_the_runs_that_stored_it(tmp_path):
    table = table_of("a", "b", "c")
    keep(tmp_path, table, "a", 0, 0.6)
    assert "peak memory" not in (tmp_path / "made.md").read_text()
    for seed, peak in ((0, 3 * 2**30), (1, None)):
        keep(tmp_path, table, "b", seed, 0.6, peak_memory_bytes=peak)
    lines = (tmp_path / "made.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("|  | paper", "| A ", "| B ", "| C "))]
    assert len({len(row) for row in rows}) == 1
    assert [row[-1] for row in rows] == ["peak memory |", " |", "3,072 MiB |", " |"]


def test_the_peak_memory_of_a_training_that_ended_before_is_unknown():
    from kontrast.runs.run import Run
    from kontrast.studies.cells import Cell, finish_run

    from support.tiny_run import trained

    folder = trained()
    run, memory = finish_run(Cell("a", Run(folder).recipe, folder, folder, folder), "cpu", print)
    assert (run.path, memory) == (folder, None)


def test_overrides_of_logging_do_not_make_another_cell():
    table = load_table("cacr-table-2")
    cell = table.cells[0]
    assert table.changed_settings(cell, ["evaluation.every=5", "seed=3", "checkpoints.keep=4"]) == {}
    assert table.changed_settings(cell, ["training.epochs=5", "objective.temperature=0.1"]) == {
        "objective.temperature": 0.1,
        "training.epochs": 5,
    }


def test_seeds_accumulate_and_a_cell_that_was_not_run_is_blank(tmp_path):
    table = table_of("a", "b")
    keep(tmp_path, table, "a", 1, 0.62)
    keep(tmp_path, table, "a", 0, 0.60)
    text = (tmp_path / "made.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| A "))
    assert "| 61.00 | 48.29 to 73.71 (seeds) |" in row and "| 0 1 |" in row and "1.5 min" in row
    blank = next(line for line in text.splitlines() if line.startswith("| B "))
    assert blank.replace("|", "").split() == ["B", "w"]
    keep(tmp_path, table, "a", 1, 0.70)
    (cell,) = json.loads((tmp_path / "made.json").read_text())["cells"]
    assert [run["probes"]["linear"]["accuracy"] for run in cell["runs"]] == [0.6, 0.7]


def swept(**grid):
    tree = {"title": "T", "paper": "P", "about": "A.", "probes": ["linear"], "settings": []}
    cell = {"name": "own", "label": "own", "recipe": "cifar10/jcl"}
    shape = {"key": "objective.covariance_weight", "values": [1.0, 4.0], "label": "λ =", **grid}
    groups = [{"name": "m", "title": "M", "cells": [cell]}]
    groups.append({"name": "s", "title": "S", "recipe": "cifar10/jcl", "grid": shape})
    return read_table("made", {**tree, "groups": groups}, "made")


def test_a_cell_shown_in_two_groups_is_run_once(tmp_path):
    table = swept(same={"4": "own"})
    assert [cell.name for cell in table.select([])] == ["own", "s-1"]
    assert [cell.name for cell in table.select(["s-4"])] == ["own"]
    keep(tmp_path, table, "own", 0, 0.8)
    text = (tmp_path / "made.md").read_text()
    assert text.count("80.00") == 2 and "λ = 4" in text


@pytest.mark.parametrize(
    "same, words",
    [
        ({"1": "own"}, "'own' in objective.covariance_weight"),
        ({"4": "none"}, "'none', which does not exist"),
        ({"3": "own"}, "`same` for 3"),
    ],
)
def test_cells_that_are_not_the_same_are_refused(same, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        swept(same=same)


def test_sweeps_whose_figures_would_have_one_name_are_refused():
    groups = []
    for sign in "ωψ":
        cells = [{"name": f"{sign}{n}", "label": f"{sign} = {n}", "recipe": "quickstart"} for n in (1, 2)]
        groups.append({"name": sign, "title": sign, "where": "w", "cells": cells})
    tree = {"title": "T", "paper": "P", "about": "A.", "probes": ["knn"], "settings": [], "groups": groups}
    with pytest.raises(UsageError, match="sweeps 'ω' and 'ψ', whose figures would have the same name"):
        read_table("made", tree, "made")


def test_results_of_two_machines_merge(tmp_path):
    table = table_of("a", "b")
    keep(tmp_path / "here", table, "a", 0, 0.60)
    keep(tmp_path / "there", table, "a", 1, 0.62)
    keep(tmp_path / "there", table, "b", 0, 0.70)
    assert merge_results(tmp_path / "here", table, tmp_path / "there" / "made.json") == 2
    tree = read_results(tmp_path / "here", table)
    assert [(c["cell"], r["seed"]) for c in tree["cells"] for r in c["runs"]] == [("a", 0), ("a", 1), ("b", 0)]
    keep(tmp_path / "other", table, "a", 2, 0.5, data="else")
    with pytest.raises(UsageError, match="data D -> else"):
        merge_results(tmp_path / "here", table, tmp_path / "other" / "made.json")
    with pytest.raises(UsageError, match="not a results file of made"):
        (tmp_path / "no.json").write_text('{"version": 1, "cells": []}')
        merge_results(tmp_path / "here", table, tmp_path / "no.json")


def test_a_merge_adds_all_runs_or_none(tmp_path):
    """A damaged record or a cell with other settings, after a valid one, leaves all results as they were."""
    table = table_of("a", "b")
    keep(tmp_path / "here", table, "a", 0, 0.60)
    keep(tmp_path / "there", table, "a", 1, 0.62)
    keep(tmp_path / "there", table, "b", 0, 0.70)
    before = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    file = tmp_path / "there" / "made.json"
    good = json.loads(file.read_text())
    halves = [({"seed": 0}, "'kontrast'"), ({}, "'seed'"), ({"failed": "NaN"}, "'seed'")]
    for record, words in halves:
        file.write_text(json.dumps({**good, "cells": [good["cells"][0], {**good["cells"][1], "runs": [record]}]}))
        with pytest.raises(CheckpointError, match=rf"made\.json .*{words}"):
            merge_results(tmp_path / "here", table, file)
    file.write_text(json.dumps({**good, "cells": [good["cells"][0], {"cell": "b", "runs": []}]}))
    with pytest.raises(CheckpointError, match="'changed'"):
        merge_results(tmp_path / "here", table, file)
    other = {**good["cells"][0], "data": "other", "changed": {}}
    file.write_text(json.dumps({**good, "cells": [good["cells"][1], other]}))
    with pytest.raises(UsageError, match="data D -> other"):
        merge_results(tmp_path / "here", table, file)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    with pytest.raises(CheckpointError, match="nowhere"):
        merge_results(tmp_path / "here", table, tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"version": "9"}', '{"version": 1}', '{"version": 1, "cells": [3]}', "{"]
)
def test_a_damaged_results_file_is_refused(content, tmp_path):
    (tmp_path / "made.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"made\.json is damaged"):
        read_results(tmp_path, table_of("a"))


def test_a_results_file_of_a_newer_version_is_refused(tmp_path):
    (tmp_path / "made.json").write_text('{"version": 2, "cells": []}')
    with pytest.raises(UsageError, match="newer kontrast"):
        read_results(tmp_path, table_of("a"))


def test_one_seed_has_the_interval_of_its_images(tmp_path):
    table = table_of("a")
    keep(tmp_path, table, "a", 0, 0.60)
    assert "| 60.00 | 59.00 to 61.00 (images) |" in (tmp_path / "made.md").read_text()


@pytest.mark.parametrize("name", ["methods-cifar10", "methods-digits"])
def test_the_table_of_all_methods_has_one_encoder(name):
    table = read_once(name)
    recipes = [table.recipe(cell) for cell in table.cells]
    assert len({(str(r.encoder), r.data.source) for r in recipes}) == 1
    assert name != "methods-cifar10" or {r.training.epochs for r in recipes} == {200}


def test_other_settings_and_other_data_are_not_mixed(tmp_path):
    table = table_of("a")
    keep(tmp_path, table, "a", 0, 0.60)
    keep(tmp_path, table, "a", 0, 0.50, {"training.epochs": 3})
    tree = read_results(tmp_path, table)
    assert [c["changed"] for c in tree["cells"]] == [{}, {"training.epochs": 3}]
    assert "## With other settings" in (tmp_path / "made.md").read_text()
    with pytest.raises(UsageError, match="data D -> other"):
        keep(tmp_path, table, "a", 1, 0.60, data="other")
    entry = {**tree["cells"][0], "settings": {**tree["cells"][0]["settings"], "training.lr": 9.0}}
    recipe = relevant_settings(table.recipe(table.cells[0]))
    with pytest.raises(UsageError, match=r"training\.lr 9\.0 -> 0\.05"):
        refuse_other_settings(tmp_path, entry, recipe)


def test_a_setting_missing_in_old_results_had_its_default():
    table = table_of("a")
    settings = relevant_settings(table.recipe(table.cells[0]))
    older = {key: value for key, value in settings.items() if key != "training.accumulate"}
    refuse_other_settings(Path("x"), {"cell": "a", "data": "D", "settings": older}, settings)
    with pytest.raises(UsageError, match=r"training\.accumulate 1 -> 2"):
        later = {**settings, "training.accumulate": 2}
        refuse_other_settings(Path("x"), {"cell": "a", "data": "D", "settings": older}, later)


def test_a_setting_missing_in_a_section_of_old_results_had_its_default():
    table = load_table("jcl-moco")
    settings = relevant_settings(table.recipe(table.cells[0]))
    older = {key: value for key, value in settings.items() if key not in ("bank.start", "teacher.result")}
    refuse_other_settings(Path("x"), {"cell": "a", "data": "D", "settings": older}, settings)
    with pytest.raises(UsageError, match=r"bank\.start 0\.0 -> 2\.0"):
        refuse_other_settings(Path("x"), {"cell": "a", "data": "D", "settings": older}, {**settings, "bank.start": 2.0})


def test_results_with_a_removed_setting_that_changes_nothing_can_be_extended():
    table = table_of("a")
    settings = relevant_settings(table.recipe(table.cells[0]))
    older = {**settings, "training.tensorboard": False}
    refuse_other_settings(Path("x"), {"cell": "a", "data": "D", "settings": older}, settings)


def test_autoencoders_do_not_depend_on_the_objective(tmp_path):
    """An autoencoder uses a recipe's images but not its objective."""
    table = load_table("gcl-mnist")
    cell = table.select(["vae-5"])[0]
    assert table.changed_settings(cell, ["objective.temperature=0.7"]) == {}
    assert table.changed_settings(cell, ["data.random_bits=3"]) == {"data.random_bits": 3}
    assert table.changed_settings(table.select(["nt-xent-0.1-5"])[0], ["objective.temperature=0.7"])


def test_a_failed_run_is_listed_but_not_counted(tmp_path):
    table = table_of("a")
    cell = table.cells[0]
    facts = {"changed": {}, "settings": relevant_settings(table.recipe(cell)), "data": "D"}
    add_runs(tmp_path, table, [(cell, facts, {"seed": 0, "failed": "NaN"})])
    text = (tmp_path / "made.md").read_text()
    assert "- a, seed 0: NaN" in text
    assert claims.mean_of(table, read_results(tmp_path, table), "a", "linear") is None


def judgment(out: Path, check: str, metric: str = "linear"):
    table = table_of("a", "b", "c")
    made = claims.Claim("P", "T", "made", (check,), metric)
    return claims.judge_claim(made, table, read_results(out, table))


def test_verdicts_follow_the_numbers(tmp_path):
    table = table_of("a", "b", "c")
    for seed, (a, b) in enumerate([(0.80, 0.70), (0.81, 0.71), (0.80, 0.72)]):
        keep(tmp_path, table, "a", seed, a)
        keep(tmp_path, table, "b", seed, b)
    assert judgment(tmp_path, "a > b").verdict == claims.HOLDS
    assert judgment(tmp_path, "a < b").verdict == claims.FAILS
    assert judgment(tmp_path, "a > b + 0.09").verdict == claims.INCONCLUSIVE
    assert judgment(tmp_path, "a > b + 0.2").verdict == claims.FAILS
    assert judgment(tmp_path, "b < a").verdict == claims.HOLDS
    assert judgment(tmp_path, "a > c").verdict == claims.NOT_RUN
    assert judgment(tmp_path, "a > b > c").verdict == claims.NOT_RUN
    assert judgment(tmp_path, "b > a > c").verdict == claims.FAILS
    assert judgment(tmp_path, "a > 0.5").verdict == claims.HOLDS
    assert judgment(tmp_path, "a - b > b - a").verdict == claims.HOLDS
    assert (
        "margin +9.33 ± " in judgment(tmp_path, "a > b").details and "(3 seeds)" in judgment(tmp_path, "a > b").details
    )


def test_one_seed_is_judged_by_its_images(tmp_path):
    table = table_of("a", "b")
    keep(tmp_path, table, "a", 0, 0.800)
    keep(tmp_path, table, "b", 0, 0.795)
    assert judgment(tmp_path, "a > b").verdict == claims.INCONCLUSIVE  # 10,000 images: half an interval is 1.1 points
    keep(tmp_path, table, "b", 0, 0.75)
    assert judgment(tmp_path, "a > b").verdict == claims.HOLDS


def test_other_numbers_of_one_seed_are_judged_by_their_images(tmp_path):
    """The mean of a curve has the probe's images, other numbers their standard error; else it is inconclusive."""
    table = table_of("a", "b")
    knn = {"knn": {"accuracy": 0.8, "low": 0.79, "high": 0.81, "n": 10_000}}
    for name, area, cosine in (("a", 0.75, 0.70), ("b", 0.70, 0.68)):
        numbers = {"knn_area": area, "positive_cosine": cosine, "best_epoch": 100 * area}
        keep(tmp_path, table, name, 0, 0.8, probes=knn, numbers=numbers, errors={"positive_cosine": 0.005})
    assert "holds, margin +5 ± 1.2 points (1 seed)" in judgment(tmp_path, "a > b", "knn_area").details
    assert "holds, margin +0.02 ± 0.014 (1 seed)" in judgment(tmp_path, "a > b", "positive_cosine").details
    assert judgment(tmp_path, "a > b", "best_epoch").verdict == claims.INCONCLUSIVE


def test_repulsion_is_that_of_the_last_twentieth(tmp_path):
    lines = [json.dumps({"step": step, "repulsion": float(step)}) for step in range(40)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"epoch": 1})]) + "\n")
    numbers, _ = MEASURES["repulsion"](SimpleNamespace(path=tmp_path), torch.device("cpu"), print)
    assert numbers["repulsion"].tolist() == [38.0, 39.0]


def test_mean_and_error_returns_the_standard_error():
    values = torch.tensor([0.0, 1.0] * 200)
    assert mean_and_error(values) == pytest.approx((0.5, 0.025), rel=2e-3)
    assert mean_and_error(values[1:2]) == (1.0, None)


def test_the_end_of_a_curve_is_a_number_of_its_run(tmp_path):
    """The conditional entropy, for example; without an interval one seed settles nothing."""
    table = table_of("a", "b")
    for seed in (0, 1):
        keep(tmp_path, table, "a", seed, 0.8, curves={"conditional_entropy": [(1, 3.0), (2, 5.1 + seed / 100)]})
        keep(tmp_path, table, "b", seed, 0.8, curves={"conditional_entropy": [(1, 4.0), (2, 5.0 + seed / 100)]})
        found = judgment(tmp_path, "a > b", "conditional_entropy")
        assert found.verdict == (claims.HOLDS if seed else claims.INCONCLUSIVE) and "margin +0.1" in found.details


def test_equal_seeds_are_judged_by_paired_differences(tmp_path):
    """The seeds differ a lot, but their differences agree; with other seeds the difference is not significant."""
    table = table_of("a", "b")
    for seed, (a, b) in enumerate([(0.80, 0.77), (0.70, 0.671), (0.60, 0.569)]):
        keep(tmp_path, table, "a", seed, a)
        keep(tmp_path, table, "b", seed, b)
    assert judgment(tmp_path, "a > b").verdict == claims.HOLDS
    assert "margin +3 ± 0.25 points (3 seeds)" in judgment(tmp_path, "a > b").details  # 4.303 * 0.1 / sqrt(3)
    keep(tmp_path, table, "b", 7, 0.67)
    assert judgment(tmp_path, "a > b").verdict == claims.INCONCLUSIVE


def test_welch_of_two_seeds_is_students_t():
    """Equal variances of equally many seeds: Welch's degrees of freedom are 2 (n - 1)."""
    assert claims.quantile([(1.0, 3), (1.0, 3)]) == pytest.approx(2.776, abs=1e-3)
    assert claims.quantile([(1.0, 1)]) == pytest.approx(1.960, abs=1e-3)


def test_claims_within_some_points_are_checked_on_both_sides():
    within = [claim for claim in claims.load_claims() if "within" in claim.text]
    assert within
    for claim in within:
        sides = [pair for check in claim.checks for pair, _ in claims.parse_check(check)]
        for pair in sides:
            mirrored = {cell: factor if cell == "" else -factor for cell, factor in pair.items()}
            assert mirrored in sides, (claim.text, pair)


def test_every_claim_mentions_the_thresholds_of_its_checks():
    for claim in claims.load_claims():
        marks = {abs(pair[""]) for check in claim.checks for pair, _ in claims.parse_check(check) if pair.get("")}
        for mark in marks:
            assert re.search(rf"\b{100 * mark:.0f}\b", claim.text), (claim.text, mark)


def test_every_claim_names_cells_of_its_table(tmp_path):
    papers = set()
    for claim in claims.load_claims():
        table = load_table(claim.table)
        found = claims.judge_claim(claim, table, read_results(tmp_path, table))
        assert found == claims.Judgment(claims.NOT_RUN, ""), claim
        assert claim.metric in ("", *table.probes, *NUMBERS, *CURVES, "knn_area", "linear_area")
        papers.add(claim.paper)
    assert papers == {"CACR", "DCL", "UniCLR", "GCL", "JCL"}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("cacr-table-2", "exponential imbalance (table 2)"),
        ("gcl-figure-a1", "inversely correlated"),
        ("gcl-figure-b1", "saturates with a few bits"),
        ("gcl-figure-5", "batch size has a negligible influence"),
        ("gcl-figure-5", "depth of the head has a negligible influence"),
        ("uniclr-table-1", "repairs whitening"),
        ("uniclr-table-3", "SimAffinity is the best method on CIFAR-10"),
    ],
)
def test_central_claims_are_judged(table, words):
    assert [claim for claim in claims.load_claims() if claim.table == table and words in claim.text]


def test_the_committed_tables_are_up_to_date():
    for name in table_names():
        table, results = load_table(name), REPOSITORY / "results"
        made = make_pages(table, read_results(results, table))
        kept = {path.name for path in results.glob(f"{name}*") if path.suffix in (".md", ".svg")}
        assert kept == set(made), "run kontrast reproduce --docs, and remove what it no longer makes"
        for file, text in made.items():
            assert (results / file).read_text(encoding="utf-8") == text, "run kontrast reproduce --docs"


def test_links_of_the_pages_exist():
    """For example, a table without runs has no JSON file to link to."""
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "results").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))]
    assert links and not [
        found for found in links if "://" not in found[1] and not (found[0].parent / found[1]).exists()
    ]


def test_the_committed_verdicts_are_up_to_date():
    text = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert text == claims.claims_page(REPOSITORY / "results"), "run kontrast reproduce --docs"


def test_data_is_found_as_files_folder_or_archive(tmp_path):
    import tarfile

    with pytest.raises(DataError, match="--data DIR"):
        table_data.find_data("cifar10", str(tmp_path))
    assert table_data.find_data("digits", None) == []
    assert table_data.find_data("imagenet", str(tmp_path)) == [f'data.root="{tmp_path}"']
    for part in ("train", "test"):
        (tmp_path / "cifar10" / part).mkdir(parents=True)
    assert table_data.find_data("cifar10", str(tmp_path)) == [f'data.source="{tmp_path / "cifar10"}"']
    assert table_data.find_data("cifar10", str(tmp_path / "cifar10")) == [f'data.source="{tmp_path / "cifar10"}"']
    packed = tmp_path / "packed"
    packed.mkdir()
    with tarfile.open(packed / "cifar10-jpeg.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "cifar10", "cifar10")
    with pytest.raises(DataError, match="mnist was not found"):
        table_data.find_data("cifar10", str(tmp_path), digits=True)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").touch()
    both = [f'data.source="{tmp_path / "cifar10"}"', f'data.root="{tmp_path}"']
    assert table_data.find_data("cifar10", str(tmp_path), digits=True) == both
    (tmp_path / "cifar-10-batches-bin").mkdir()
    assert table_data.find_data("cifar10", str(tmp_path)) == ["data.source=cifar10", f'data.root="{tmp_path}"']


def test_the_archive_is_unpacked_once(tmp_path, monkeypatch):
    import tarfile

    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path / "cache"))
    for part in ("train", "test"):
        (tmp_path / "cifar10" / part).mkdir(parents=True)
    (tmp_path / "there").mkdir()
    archive = tmp_path / "there" / "cifar10-jpeg.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tmp_path / "cifar10", "cifar10")
    first = table_data.find_data("cifar10", str(archive.parent))
    archive.write_bytes(b"not an archive any more")
    assert table_data.find_data("cifar10", str(archive.parent)) == first and str(tmp_path / "cache") in first[0]
    monkeypatch.setenv("KONTRAST_CACHE", str(tmp_path / "other"))
    with pytest.raises(DataError, match="damaged"):
        table_data.find_data("cifar10", str(archive.parent))
    assert not list((tmp_path / "other" / "unpacked").iterdir())


@pytest.mark.parametrize(
    ("file", "words"), [("a/1.jpg", "CIFAR-10 (JPEG)"), ("a/1.png", "CIFAR-10 (PNG)"), ("train/000", "CIFAR-10")]
)
def test_the_data_is_described_with_its_format(file, words):
    import torch

    from kontrast.data import ImageSet

    images = ImageSet(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), [file])
    assert table_data.describe_data("cifar10", images) == words
    assert table_data.describe_data("/somewhere/photos", images) == "photos"
