"""The command `kontrast transfer`: its arguments, its table and its JSON."""

from __future__ import annotations

import json

from PIL import Image

from support import tiny_run
from support.command_line import kontrast


def command(*words):
    done = kontrast(*map(str, words))
    return done.returncode, done.stdout, done.stderr


def test_transfer_prints_a_table_and_writes_the_report(tmp_path):
    run = tiny_run.copy(tmp_path)
    for color in ("red", "blue"):
        (tmp_path / "colors" / color).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (32, 32), color).save(tmp_path / "colors" / color / f"{i}.png")
    words = ["transfer", run, tmp_path / "colors", "epochs=2", "--task", "classify", "--method", "linear"]
    words += ["--shots", 0, "--no-search", "--seeds", 1, "--device", "cpu"]
    code, text, said = command(*words)
    assert code == 0, said
    assert text.splitlines()[0].split() == ["data", "method", "labels", "encoder", "seeds", "metric", "score"]
    assert "colors  linear  all" in text and "report  " in text
    code, text, _ = command(*words, "--json")
    tree = json.loads(text)
    assert code == 0 and [one["encoder"] for one in tree["results"]] == ["trained", "random"]
    assert tree["results"][0]["facts"]["settings"]["epochs"] == 2 and (run / "report.html").is_file()
    code, _, said = command("transfer", run, "--device", "cpu")  # the encoder of this run is no ResNet
    assert code == 2 and "needs a ResNet, not SmallConv" in said
