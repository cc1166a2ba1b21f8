"""Trackers get the numbers of metrics.jsonl, each once, and nothing that they do stops a training."""

from __future__ import annotations

import pytest

from kontrast import plugins
from kontrast.config.recipe import read_recipe, to_tree
from kontrast.errors import UsageError
from kontrast.files import read_json

from support.command_line import kontrast, one_line
from support.commands import after_step
from support.tracked_runs import OWN, SHORT, STEPS, kill_after, logged, pretrain, received, recorded, wait_for_trackers


@pytest.fixture(autouse=True)
def own_file(monkeypatch):
    monkeypatch.setenv("KONTRAST_IMPORT", OWN)


def test_a_tracker_gets_the_numbers_the_recipe_and_the_results(tmp_path):
    run, _ = pretrain(tmp_path, "training.track=['recording']", "evaluation.every=1", "evaluation.k=5")
    lines = recorded(run)
    assert received(run) == logged(run) and len(logged(run)) == STEPS // 2
    assert lines[0]["id"] == read_json(run / "run.json")["tracker_id"]
    assert lines[0]["settings"]["training.log_every"] == 2 and lines[0]["settings"]["training.track"] == ["recording"]
    assert lines[-2]["summary"]["best_step"] == STEPS == lines[-2]["at"] and lines[-1] == {"closed": True}


@pytest.mark.parametrize("tracker", ["recording", pytest.param("forgetting", marks=pytest.mark.slow)])
def test_after_a_kill_the_tracker_ends_with_the_numbers_of_metrics_jsonl(tmp_path, tracker):
    """The checkpoint is of another step than the kill, so the run goes back and takes steps again."""
    track = f"training.track=['{tracker}']"
    kill_after(11, tmp_path, track)  # a checkpoint was written after every 8 steps
    kill_after(17, tmp_path, track, "--resume")
    wait_for_trackers(tmp_path / "run", tracker, 2)
    before = [line for line in recorded(tmp_path / "run") if "start" in line]
    run, _ = pretrain(tmp_path, track, "--resume")
    assert received(run, tracker) == logged(run) and [s for s, _ in logged(run)] == list(range(2, STEPS + 1, 2))
    if tracker == "recording":
        assert [line["start"] for line in before] == [0, 8] and len({line["id"] for line in before}) == 1
        assert [line["start"] for line in recorded(run) if "start" in line] == [0, 8, 16]


@pytest.mark.slow
def test_numbers_that_may_be_taken_back_are_held_back(tmp_path):
    """Only a tracker that can forget gets the numbers after the last checkpoint."""
    kill_after(15, tmp_path, "training.track=['recording']")
    assert [step for step, _ in logged(tmp_path / "run")] == [2, 4, 6, 8, 10, 12, 14]
    wait_for_trackers(tmp_path / "run", "recording", 1)
    assert [step for step, _ in received(tmp_path / "run")] == [2, 4, 6, 8]
    assert recorded(tmp_path / "run")[-1] == {"closed": False}


@pytest.mark.slow
def test_a_tracker_that_raises_gets_everything_at_the_end(tmp_path, monkeypatch):
    """It fails until the training is nearly done, and the second try succeeds."""
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setenv("FAILING", "log")
    monkeypatch.setenv("FAILING_WHILE", str(broken))

    def work() -> int:
        from kontrast.cli.main import run
        from kontrast.training.trackers import RunTrackers

        finish = RunTrackers.finish

        def repaired(self, *arguments):
            for process in self.processes:
                process.wait(600)
            broken.unlink()
            finish(self, *arguments)

        RunTrackers.finish = repaired
        return run(["pretrain", "--device", "cpu", "--no-probes", *SHORT, "training.track=['failing']", "--out",
                    str(tmp_path / "run")])  # fmt: skip

    run, said = pretrain(tmp_path, instead=work)
    assert said.count("tracker failing") == 1 and "ConnectionError: no route to the tracker" in said
    assert received(run, "failing") == logged(run) and len(logged(run)) == STEPS // 2
    assert "printed by the tracker" in (run / "trackers" / "failing.log").read_text()
    assert "printed by" not in said


@pytest.mark.parametrize("method", ["log", pytest.param("close", marks=pytest.mark.slow)])
def test_a_tracker_that_always_raises_does_not_stop_the_training(tmp_path, monkeypatch, method):
    monkeypatch.setenv("FAILING", method)
    monkeypatch.setenv("FAILING_WHILE", str(tmp_path))
    run, said = pretrain(tmp_path, "training.track=['failing', 'recording']")
    assert "tracker failing: ConnectionError: no route" in said and "--resume` gives them to it" in said
    assert f"the numbers after step {0 if method == 'log' else STEPS}" in said
    assert (run / "encoder.safetensors").exists() and received(run) == logged(run)


def test_a_tracker_that_hangs_does_not_stop_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("KONTRAST_TRACKER_TIMEOUT", "0.5")
    run, said = pretrain(tmp_path, "training.track=['hanging']")
    assert "tracker hanging: it does not answer for 0.5 s: it lacks the numbers after step 0" in said
    assert (run / "encoder.safetensors").exists()


@pytest.mark.slow
def test_a_signal_stops_the_training_although_a_tracker_hangs(tmp_path, monkeypatch):
    import signal

    from kontrast.cli.main import run
    from kontrast.training.trackers import run_trackers

    monkeypatch.setattr(run_trackers, "STOP_PATIENCE", 0.3)

    def work() -> int:
        after_step(5, lambda: signal.raise_signal(signal.SIGTERM))
        options = [*SHORT, "training.track=['hanging', 'recording']", "--out", str(tmp_path / "run")]
        return run(["pretrain", "--device", "cpu", "--no-probes", *options])

    place, _ = pretrain(tmp_path, code=75, instead=work)
    resumed, _ = pretrain(tmp_path, "training.track=['recording']", "--resume")
    assert received(resumed) == logged(place) and [step for step, _ in logged(place)] == list(range(2, STEPS + 1, 2))


def test_the_results_of_probes_are_tracked(tmp_path):
    out = str(tmp_path / "run")
    argv = [*SHORT, "training.track=['recording']", "evaluation.k=5", "evaluation.linear=false", "evaluation.gallery=0"]
    done = kontrast("pretrain", "--device", "cpu", *argv, "--out", out)
    assert done.returncode == 0, done.stderr
    probed = [line["summary"] for line in recorded(tmp_path / "run") if "summary" in line][-1]
    assert set(probed) == {"probe/knn/trained", "probe/knn/untrained", "probe/knn/pixels"}
    found = {p["features"]: p["accuracy"] for p in read_json(tmp_path / "run" / "probes.json")["probes"]}
    assert {name.rpartition("/")[2]: value for name, value in probed.items()} == found
    assert received(tmp_path / "run") == logged(tmp_path / "run")


@pytest.mark.parametrize(
    ("track", "code", "words"),
    [
        ("['wandbb']", 2, ["unknown tracker 'wandbb'", "did you mean 'wandb'?"]),
        ("wandb", 2, ["training.track must be a list of names", '["wandb"]']),
        ("['lacking']", 6, ["lacking needs the package a_package_that_does_not_exist", "pip install"]),
    ],
)
def test_a_wrong_tracker_is_refused_before_training(tmp_path, track, code, words):
    done = kontrast("pretrain", "--device", "cpu", *SHORT, f"training.track={track}", "--out", str(tmp_path / "run"))
    one_line(done, code, *words)
    assert not (tmp_path / "run").exists()


def test_a_class_that_its_process_cannot_import_is_refused(tmp_path, monkeypatch):
    plugins.import_files()
    monkeypatch.delenv("KONTRAST_IMPORT")
    done = kontrast("pretrain", "--device", "cpu", *SHORT, "training.track=['recording']", "--out", str(tmp_path / "r"))
    one_line(done, 2, "recording is registered in", "--import FILE.py")


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    """A folder that W&B has written is called like its package."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    done = kontrast("pretrain", "--device", "cpu", *SHORT, "training.track=['wandb']", "--out", str(tmp_path / "run"))
    one_line(done, 6, "pip install 'kontrast[wandb]'")


def test_tensorboard_of_older_recipes_is_a_tracker():
    old = to_tree(read_recipe({}))
    del old["training"]["track"]
    for value, track in ((True, ("tensorboard",)), (False, ())):
        assert read_recipe({**old, "training": {**old["training"], "tensorboard": value}}).training.track == track
    both = {"training": {"track": ["wandb"], "tensorboard": True}}
    assert read_recipe(both).training.track == ("wandb", "tensorboard")
    with pytest.raises(UsageError, match="tensorboard"):
        read_recipe({"training": {"tensorboard": 1}})
