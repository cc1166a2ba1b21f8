"""training.stop = "auto": when a run ends, which checkpoint it keeps, and that a resumed run decides the same."""

from __future__ import annotations

import pytest
import torch

from kontrast.config.recipe import Recipe, read_recipe
from kontrast.data import ImageSet
from kontrast.errors import CheckpointError, UsageError
from kontrast.files import read_json_lines
from kontrast.training import checkpoints
from kontrast.training.loop import Loop, is_state
from kontrast.training.pretrain import pretrain
from kontrast.training.run_folder import RunFolder
from kontrast.training.signals import StopSignals
from kontrast.training.stopping_rule import StoppingRule

from support import tiny_run


def recipe(epochs: int = 20, stop: str = "auto", **sections) -> Recipe:
    training = {"batch": 8, "epochs": epochs, "lr": 0.1, "log_every": 4, "stop": stop, "max_steps": 0}
    tree = {
        "encoder": {"name": "small-conv", "width": 8},
        "head": {"name": "simclr", "outputs": 8},
        "views": {"count": 2, "size": 16, "policy": "digits"},
        "evaluation": {"every": 1},
        **sections,
    }
    return read_recipe({**tree, "training": {**training, **sections.get("training", {})}})


def rule(ranks: list[float], entropies: list[float] | None = None, epochs: int = 20, **training) -> StoppingRule:
    made = StoppingRule(recipe(epochs, training=training), epochs)
    for epoch, (rank, h) in enumerate(zip(ranks, entropies or [4.0] * len(ranks)), 1):
        made.add(epoch, {"rankme": rank, "conditional_entropy": h, "knn": 0.5})
    return made


def test_both_measures_must_be_flat_for_a_tenth_of_the_training():
    assert rule([10, 20, 20.1, 20.2]).flat
    assert not rule([10, 20, 20.1]).flat  # flat for one epoch of twenty
    assert not rule([10, 20, 20.1, 20.6]).flat  # 3% apart
    assert not rule([10, 20, 20.1, 20.2], [4.0, 4.0, 4.05, 4.1]).flat
    assert not rule([10, 20, 20.1, 20.2], epochs=100).flat and rule([10] + [20.0] * 11, epochs=100).flat


def test_the_signal_of_lidar_must_be_flat_if_it_is_measured():
    made = StoppingRule(recipe(), 20)
    for epoch, signal in enumerate([2.0, 3.0, 3.1, 3.2, 3.2, 3.2], 1):
        made.add(epoch, {"rankme": 20.0, "conditional_entropy": 4.0, "lidar_signal": signal})
        assert made.flat == (epoch == 6)


def test_at_least_three_evaluations_count():
    made = StoppingRule(recipe(20), 20)
    for epoch, rank in ((5, 10.0), (10, 20.0), (15, 20.0)):
        made.add(epoch, {"rankme": rank, "conditional_entropy": 4.0})
    assert not made.flat
    made.add(20, {"rankme": 20.0, "conditional_entropy": 4.0})
    assert made.flat


def test_the_warm_up_does_not_count():
    assert not rule([20.0] * 5, warmup=4).flat and rule([20.0] * 6, warmup=4).flat


def test_it_needs_both_measures_and_evaluations_and_to_be_asked():
    assert not rule([20.0] * 6, stop="end").flat
    made = StoppingRule(recipe(), 20)
    for epoch in range(6):
        made.add(epoch, {"rankme": 5.0})
    assert not made.flat
    with pytest.raises(UsageError, match=r"evaluation\.every=1"):
        StoppingRule(recipe(evaluation={"every": 0}), 20)


def test_a_fall_of_rankme_by_a_fifth_is_told_once():
    made = StoppingRule(recipe(), 20)
    said = [made.add(epoch, {"rankme": rank}) for epoch, rank in enumerate([10.0, 20.0, 16.1, 15.9, 15.0, 19.0, 12.0])]
    assert [bool(text) for text in said] == [False, False, False, True, False, False, True]
    assert "from 20.0 to 15.9 at epoch 3" in said[3]


def pictures() -> ImageSet:
    pixels = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ImageSet(pixels, names=[str(n) for n in range(40)])


RANKS = [10.0, 20.0, 20.1, 20.2, 20.2, 20.2]
SIGNALS = [1.0, 2.52, 2.5, 2.5, 2.5, 2.5]


def measure(made: Loop):
    def of(student) -> dict[str, float]:
        place = made.position.step // made.position.per_epoch - 1
        facts = {"rankme": RANKS[place], "conditional_entropy": 4.0, "lidar_signal": SIGNALS[place], "knn": place / 10}
        return {"effective_rank": 4.0, **facts}

    return of


def run_until(folder: RunFolder, chosen: Recipe, resume: bool, fails_after: int = 0) -> Loop:
    made = Loop(chosen, folder, pictures(), torch.device("cpu"), lambda _: None)
    if resume:
        made.restore()
    if fails_after:
        step = made.take_step

        def take_step(batch):
            if made.position.step == fails_after:
                raise KeyboardInterrupt
            step(batch)

        made.take_step = take_step  # type: ignore[method-assign]
    made.run(measure(made), StopSignals(), "")
    return made


def content(folder: RunFolder) -> tuple[list, dict, bytes]:
    tensors, state, _ = checkpoints.newest(folder / "checkpoints")
    lines = read_json_lines(folder / "metrics.jsonl")
    return lines, state, b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


@pytest.mark.parametrize("fails_after", [7, 16, 19])
def test_a_resumed_run_stops_at_the_same_step_with_the_same_bits(tmp_path, fails_after):
    whole, broken = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "broken")
    for folder in (whole, broken):
        folder.create()
    made = run_until(whole, recipe(), resume=False)
    assert made.position.stopped and made.position.step == 20 and made.position.total == 100
    assert made.best == {"step": 10, "lidar_signal": 2.52}
    with pytest.raises(KeyboardInterrupt):
        run_until(broken, recipe(), resume=False, fails_after=fails_after)
    again = run_until(broken, recipe(), resume=True)
    assert again.position.step == 20 and content(broken) == content(whole)
    kept = [path.name for path in checkpoints.checkpoints(whole / "checkpoints")]
    assert kept == ["step-00000010", "step-00000015", "step-00000020"]  # the best, and the two newest
    done = run_until(broken, recipe(), resume=True)  # nothing is left to train
    assert done.position.stopped and done.position.step == 20 and content(broken) == content(whole)


def test_the_reason_names_epochs_and_the_best_checkpoint(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    made = run_until(folder, recipe(), resume=False)
    measures = "RankMe, the conditional entropy and LiDAR's signal"
    assert (
        made.stopping.reason() == f"stopped at epoch 4 of 20: {measures} stayed within 2% for a tenth of the training"
    )
    kept, last = "epoch 2, kept as checkpoints/step-00000010", "encoder.safetensors has the last epoch, 4"
    assert made.stopping.kept(made.best, made.position.per_epoch) == f"best by LiDAR's signal: {kept}; {last}"
    assert (folder / "checkpoints" / "step-00000010").is_dir()


def test_a_measure_that_was_not_taken_was_not_flat():
    """LiDAR, if there are fewer images than the projections are wide."""
    made = rule([10, 20, 20.1, 20.2])
    assert made.flat and ": RankMe and the conditional entropy stayed within" in made.reason()
    assert made.reason().endswith("; LiDAR was not measured, which needs more images than the projections are wide")
    assert rule([10.0]).kept({}, 5) == ""


def test_hostile_measures_in_a_checkpoint_are_refused():
    good = {"step": 1, "names": [], "count": 0, "best": {"step": 1, "lidar_signal": 2.0}}
    assert is_state(good) and is_state({**good, "measures": [{"epoch": 1.0, "rankme": 2.0}], "stopped": True})
    for bad in ({"measures": {}}, {"measures": [{"rankme": 1.0}]}, {"measures": [{"epoch": "1"}]}, {"stopped": 1}):
        assert not is_state({**good, **bad})
    assert not is_state({**good, "best": {"step": 1, "knn": "x"}})


def test_a_real_run_logs_the_measures(tmp_path):
    overrides = {"training": {"epochs": 2, "batch": 64, "stop": "auto"}, "encoder.width": 32, "head.outputs": 16}
    overrides |= {"evaluation": {"every": 1, "gallery": 0, "k": 5}}
    lines: list[str] = []
    run = pretrain(
        tiny_run.images(), recipe="quickstart", overrides=overrides, out=tmp_path / "r", device="cpu", say=lines.append
    )
    assert lines[-1].startswith("best by LiDAR's signal: epoch ") and lines[-1].endswith("has the last epoch, 2")
    found = [line for line in read_json_lines(run / "metrics.jsonl") if "knn" in line]
    assert len(found) == 2
    for record in found:
        assert 1 <= record["rankme"] <= 16 and 1 <= record["lidar"] <= 16 and record["lidar_signal"] > 0
        assert {"rankme_uncentered", "alpha_req", "lidar_above_noise"} <= set(record)


def test_a_checkpoint_with_wrong_measures_is_an_error(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    made = run_until(folder, recipe(), resume=False)
    made.stopping.measures = [{"rankme": 1.0}]
    made.log.open(made.recipe, made.position.step)
    made.save()
    with pytest.raises(CheckpointError, match=r"state\.json has wrong entries"):
        run_until(folder, recipe(), resume=True)
