"""Fine-tune a run's encoder on a few labels in your own training loop: python examples/fine_tune.py [RUN]"""

import sys
import tempfile
from pathlib import Path

import torch

import kontrast
from kontrast.data import open_data

if len(sys.argv) > 1:
    run = kontrast.Run(sys.argv[1])
else:  # a short run as an example; yours will be longer, on your own images
    folder = tempfile.TemporaryDirectory()
    run = kontrast.pretrain("digits", out=Path(folder.name) / "run", training={"epochs": 4}, evaluation={"every": 0})

train, test = open_data("digits", "train").first(500), open_data("digits", "test")  # 500 labeled images
torch.manual_seed(0)


def finetune(encoder: torch.nn.Module) -> float:
    """Train the encoder with a classifier on top and return the accuracy on the test images."""
    network = torch.nn.Sequential(encoder, torch.nn.Linear(encoder.width, len(train.classes)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    network.train()  # run.encoder() returns it in evaluation mode
    for _ in range(20):
        for rows in torch.randperm(len(train)).split(50):
            images = run.prepare(train[rows])  # uint8 [N,C,H,W] to floats, resized and normalized as in pretraining
            loss = torch.nn.functional.cross_entropy(network(images), train.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        return (network(run.prepare(test.images)).argmax(1) == test.labels).double().mean().item()


print(f"accuracy {finetune(run.encoder()):.3f}  from scratch {finetune(run.encoder(trained=False)):.3f}")
