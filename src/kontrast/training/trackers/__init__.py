"""Trackers: what a run logs, shown in TensorBoard, Weights & Biases, MLflow or a program of your own.

`training.track` names them. A class of your own is registered in a file that `--import` names:

    from kontrast.training.trackers import TRACKERS, Tracker

    @TRACKERS.register("my-tracker")
    class MyTracker(Tracker):
        def log(self, step, numbers):
            ...

A tracker has a process of its own, which follows metrics.jsonl, so nothing that it does can stop or delay the training.
"""

from kontrast.training.trackers.mlflow_tracker import MLflow as MLflow
from kontrast.training.trackers.run_trackers import RunTrackers as RunTrackers
from kontrast.training.trackers.run_trackers import track_results as track_results
from kontrast.training.trackers.tensorboard_tracker import TensorBoard as TensorBoard
from kontrast.training.trackers.tracker import TRACKERS as TRACKERS
from kontrast.training.trackers.tracker import TrackedRun as TrackedRun
from kontrast.training.trackers.tracker import Tracker as Tracker
from kontrast.training.trackers.tracker import check_trackers as check_trackers
from kontrast.training.trackers.tracker_process import serve as serve
from kontrast.training.trackers.wandb_tracker import WeightsAndBiases as WeightsAndBiases
