"""What frozen features can do: every probe takes features [N,F] and labels [N] and returns a `ProbeResult`."""

from kontrast.probes.extract import extract_features
from kontrast.probes.few_shot import few_per_class, few_shot
from kontrast.probes.fine_tuning import FineTuner, finetune
from kontrast.probes.finetuning_protocols import FINE_TUNING, FineTuning
from kontrast.probes.knn import knn, nearest_rows
from kontrast.probes.linear import PROTOCOLS, LinearProtocol, linear
from kontrast.probes.logistic import linear_layer, logistic
from kontrast.probes.result import ProbeResult
from kontrast.probes.retrieval import retrieval, retrieval_ranks
from kontrast.probes.zero_shot import class_vectors, zero_shot

__all__ = [
    "FINE_TUNING", "PROTOCOLS", "FineTuner", "FineTuning", "LinearProtocol", "ProbeResult", "class_vectors",
    "extract_features", "few_per_class", "few_shot", "finetune", "knn", "linear", "linear_layer", "logistic",
    "nearest_rows", "retrieval", "retrieval_ranks", "zero_shot",
]  # fmt: skip
