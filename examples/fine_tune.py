"""A run's encoder in code of your own, fine-tuned on a few labels: python examples/fine_tune.py [RUN]"""

import sys
import tempfile
from pathlib import Path

import torch

import kontrast
from kontrast.data import open_data

if len(sys.argv) > 1:
    run = kontrast.Run(sys.argv[1])
else:  # a short run to begin with; yours is longer, on your own pictures
    folder = tempfile.TemporaryDirectory()
    run = kontrast.pretrain("digits", out=Path(folder.name) / "run", training={"epochs": 4}, evaluation={"every": 0})

train, test = open_data("digits", "train").first(500), open_data("digits", "test")  # labels of 500 images
torch.manual_seed(0)


def fine_tuned(encoder: torch.nn.Module) -> float:
    """Train all of it with a classifier on top; the accuracy on the test images."""
    network = torch.nn.Sequential(encoder, torch.nn.Linear(encoder.width, len(train.classes)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    network.train()  # run.encoder() comes in eval mode
    for _ in range(20):
        for rows in torch.randperm(len(train)).split(50):
            images = run.prepare(train[rows])  # uint8 [N,C,H,W] to the floats, size and colours it was trained with
            loss = torch.nn.functional.cross_entropy(network(images), train.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        return (network(run.prepare(test.images)).argmax(1) == test.labels).double().mean().item()


print(f"accuracy {fine_tuned(run.encoder()):.3f}  from scratch {fine_tuned(run.encoder(trained=False)):.3f}")
