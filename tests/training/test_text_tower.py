"""Captions as a view: what the learner contrasts, which caption is drawn, and what is saved."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import kontrast
from kontrast.config.recipe import read_recipe, to_toml, to_tree
from kontrast.data import ImageSet
from kontrast.data.captions import Captions
from kontrast.errors import CheckpointError, DataError, UsageError
from kontrast.files import read_json_lines
from kontrast.networks.tokenizers import ByteTokenizer, VocabularyTokenizer
from kontrast.objectives import objective
from kontrast.optim.optimizers import build_optimizer
from kontrast.runs.towers import Towers
from kontrast.training import caption_batches
from kontrast.training.caption_batches import CaptionBatches
from kontrast.training.learner import Learner
from kontrast.training.step import Step
from kontrast.training.step_schedule import Schedule, part_rates
from kontrast.views import Views, keys

from support.doctests import run_examples
from support.made_images import folder_of

TEXT = {"width": 16, "depth": 1, "heads": 2, "length": 12, "dropout": 0.0}
TREE = {
    "objective": {"name": "info-nce", "symmetric": True, "temperature": 0.2},
    "encoder": {"name": "small-conv", "width": 16},
    "head": {"name": "linear", "outputs": 8},
    "views": {"count": 1, "size": 16, "policy": "digits"},
    "text": TEXT,
    "training": {"batch": 8},
}
QUICK = [
    "views.size=16", "encoder.width=16", "head.outputs=8", "evaluation.every=0", "training.batch=8",
    "training.epochs=4", "training.log_every=1", "text.width=16", "text.depth=1", "text.heads=2", "text.length=16",
    "text.dropout=0.1",
]  # fmt: skip


def learner_of(**changes) -> Learner:
    torch.manual_seed(0)
    return Learner(read_recipe({**TREE, **changes}), classes=3).train()


def batch_of(views: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    tokens = ByteTokenizer(12)([f"text {i}" for i in range(8)])
    return torch.randn(views, 8, 3, 16, 16, generator=made), tokens


def test_a_caption_is_the_last_view_of_its_image():
    learner, (views, tokens) = learner_of(), batch_of()
    z = learner(views, with_loss=False, tokens=tokens)
    assert z.shape == (2, 8, 8)
    torch.testing.assert_close(z[1], learner.student.text(tokens))
    loss = learner(views, tokens=tokens).terms.total
    torch.testing.assert_close(loss, objective("info-nce", symmetric=True, temperature=0.2)(*z))


def test_equal_captions_are_no_negatives():
    learner, (views, tokens) = learner_of(), batch_of()
    labels = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])
    z = learner(views, with_loss=False, tokens=tokens)
    found = learner(views, tokens=tokens, labels=labels).terms.total
    expected = objective("info-nce", symmetric=True, temperature=0.2)(*z, labels=labels)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, learner(views, tokens=tokens).terms.total)


def test_a_teacher_has_both_towers():
    learner, (views, tokens) = learner_of(teacher={"momentum": 0.5}), batch_of(2)
    learner.count = 3
    learner.teacher.module.load_state_dict({k: v + 0.1 for k, v in learner.teacher.module.state_dict().items()})
    teacher = copy.deepcopy(learner.teacher)
    z, found = learner(views, with_loss=False, tokens=tokens), learner.teacher_keys(views, None, tokens=tokens)
    assert z.shape == found.shape == (3, 8, 8)
    torch.testing.assert_close(found[2], teacher.module.text(tokens))
    assert not torch.allclose(found[2], z[2])


def test_parts_have_the_gradient_of_the_whole_batch():
    weights = []
    for parts in (1, 4):
        learner = learner_of(encoder={"name": "vit-tiny", "patch": 8}).double()
        views, tokens = batch_of()
        options = {"device": torch.device("cpu"), "accumulate": parts}
        step = Step(learner, build_optimizer(learner, "sgd", 0.1), lambda *_, v=views: v.double(), **options)
        step(torch.empty(8), torch.empty(8), Schedule(lr=0.1, momentum=1.0), tokens=tokens, labels=torch.arange(8) // 2)
        weights.append(learner.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, msg=lambda m, name=name: f"{name}: {m}")
    before = learner_of(encoder={"name": "vit-tiny", "patch": 8}).double().state_dict()
    moved = [n for n, t in weights[0].items() if n.startswith("student.text") and not torch.equal(t, before[n])]
    assert "student.text.encoder.token_embed.weight" in moved and "student.text.head.0.weight" in moved


def test_a_frozen_tower_trains_its_head_alone():
    learner, (views, tokens) = learner_of(text={**TEXT, "frozen": True, "dropout": 0.5}), batch_of()
    learner(views, tokens=tokens).terms.total.backward()
    text = learner.student.text
    assert all(p.grad is None for p in text.encoder.parameters()) and text.head[0].weight.grad is not None
    assert torch.equal(text(tokens), text(tokens))  # in training too, without dropout


def test_the_text_tower_may_have_a_rate_of_its_own():
    recipe = read_recipe({**TREE, "text": {**TEXT, "lr_factor": 0.5}})
    assert part_rates(recipe, 0.2) == {"student.text.": 0.1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bank": {"size": 10}}, "its rows would be of images or of texts"),
        ({"teacher": {"symmetric": False}}, "the student's text tower would not be trained"),
        ({"training": {"labels": True}}, "the labels are those of equal captions"),
        ({"training": {"parallel": "fsdp"}, "encoder": {"name": "vit-tiny"}}, "use 'ddp'"),
        ({"text": {**TEXT, "head": "identity"}}, "width 16, and the head of the images 8; give 'linear'"),
        ({"training": {"accumulate": 2}, "text": {**TEXT, "dropout": 0.1}}, "dropout, which differs"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        learner_of(**changes)


def test_a_recipe_with_text_reads_captions():
    assert read_recipe(TREE).data.captions == "auto"
    assert read_recipe({**TREE, "data": {"captions": "texts.csv"}}).data.captions == "texts.csv"
    assert read_recipe(to_tree(read_recipe(TREE))) == read_recipe(TREE)
    with pytest.raises(UsageError, match=r"text.tokens can't be 'byte': did you mean 'bytes'"):
        read_recipe({**TREE, "text": {"tokens": "byte"}})


def captioned_set(count: int = 40) -> ImageSet:
    captions = Captions.of([[f"{i}", f"other {i}", f"third {i}"][: 1 + i % 3] for i in range(count)])
    return ImageSet(torch.zeros(count, 3, 4, 4, dtype=torch.uint8), [str(i) for i in range(count)], captions=captions)


def test_the_drawn_caption_depends_on_seed_epoch_and_image_alone():
    images = captioned_set()
    batches = CaptionBatches(images, ByteTokenizer(12), seed=3)
    one, part = batches(5, torch.arange(40)), batches(5, torch.tensor([7, 31]))
    assert torch.equal(one.tokens[[7, 31]], part.tokens)
    half = CaptionBatches(images.subset([31, 7, 2]), ByteTokenizer(12), seed=3)  # a subset keeps the images' numbers
    assert torch.equal(half(5, torch.tensor([7, 31])).tokens, part.tokens)
    for other in (batches(6, torch.arange(40)), CaptionBatches(images, ByteTokenizer(12), seed=4)(5, torch.arange(40))):
        assert not torch.equal(other.tokens, one.tokens)
    texts = ["".join(chr(t - 2) for t in row if t > 1) for row in one.tokens.tolist()]
    assert all(text in images.captions.of_image(i) for i, text in enumerate(texts))


def test_every_caption_is_drawn_about_equally_often():
    batches, counts = CaptionBatches(captioned_set(3), ByteTokenizer(12)), {}
    for epoch in range(600):
        row = tuple(batches(epoch, torch.tensor([2])).tokens[0].tolist())
        counts[row] = counts.get(row, 0) + 1
    assert len(counts) == 3 and min(counts.values()) > 150


def test_ids_are_given_only_if_images_share_a_caption():
    assert CaptionBatches(captioned_set(), ByteTokenizer(12))(0, torch.arange(40)).ids is None
    shared = ImageSet(
        torch.zeros(3, 3, 4, 4, dtype=torch.uint8), list("abc"), captions=Captions.of([["x"], ["y"], ["x"]])
    )
    assert CaptionBatches(shared, ByteTokenizer(12))(0, torch.arange(3)).ids.tolist() == [0, 1, 0]


def test_captions_that_are_cut_are_counted():
    said: list[str] = []
    CaptionBatches(captioned_set(6), ByteTokenizer(8), say=said.append)
    assert said == ["6 of 12 captions are cut at 8 tokens (text.length)"]


def test_example():
    run_examples(caption_batches.CaptionBatches)


def captioned_folder(place):
    folder_of(place, 24)
    rows = [f"{i:04d}.png,{text} {i % 5}" for i in range(24) for text in ("a picture of", "one that shows")]
    (place / "captions.csv").write_text("\n".join(["file,caption", *rows]))
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run to the end, and one that stopped in the middle and was resumed."""
    place = tmp_path_factory.mktemp("text")
    images, said = captioned_folder(place / "images"), []
    for name, steps in (("whole", 8), ("halves", 3), ("halves", 8)):
        data = {"data": str(images), "recipe": "digits/clip"} if (name, steps) != ("halves", 8) else {"resume": True}
        options = dict(one.split("=") for one in (*QUICK, f"training.max_steps={steps}"))
        parsed = {key: json.loads(value) for key, value in options.items()}
        if "resume" in data:
            parsed = {"training.max_steps": steps}
        kontrast.pretrain(out=place / name, device="cpu", say=said.append, **data, **parsed)
    return place / "whole", place / "halves"


def test_a_resumed_run_has_the_same_bits(runs):
    whole, halves = runs
    losses = [[line["loss"] for line in read_json_lines(run / "metrics.jsonl") if "loss" in line] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    for name in ("encoder.safetensors", "text.safetensors"):
        assert (whole / name).read_bytes() == (halves / name).read_bytes()
    assert "temperature" in read_json_lines(whole / "metrics.jsonl")[0]


def test_towers_read_what_was_trained_and_notice_damage(runs, tmp_path):
    whole, _ = runs
    trained, untrained = Towers(whole, "cpu"), Towers(whole, "cpu", trained=False)
    saved = load_file(whole / "text.safetensors")
    assert torch.equal(trained.text_tower.head[0].weight, saved["text.head.0.weight"])
    a, b = (towers.texts(["a picture of 3"]) for towers in (trained, untrained))
    torch.testing.assert_close(a.norm(dim=1), torch.ones(1))
    assert not torch.allclose(a, b, atol=1e-4)
    run = kontrast.Run(whole)
    images = run.data("test")
    features = kontrast.probes.extract_features(run.encoder(), images, run.transform())
    torch.testing.assert_close(trained.project(features), trained.images(images))
    content = bytearray((whole / "text.safetensors").read_bytes())
    content[-1] ^= 1
    damaged = tmp_path / "run"
    __import__("shutil").copytree(whole, damaged)
    (damaged / "text.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"text.safetensors is damaged or was changed"):
        Towers(damaged, "cpu")


def test_byte_pairs_are_stored_with_the_run(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra text")
    images = captioned_folder(tmp_path / "images")
    options = {key: json.loads(value) for key, value in (one.split("=") for one in QUICK)}
    options |= {"text.tokens": "bpe", "text.vocabulary": 300, "training.max_steps": 2}
    run = kontrast.pretrain(images, "digits/clip", out=tmp_path / "run", device="cpu", say=lambda _: None, **options)
    known = json.loads((run.path / "vocabulary.json").read_text())
    assert 258 < len(known["model"]["vocab"]) <= 300
    assert Towers(run, "cpu").texts(["a picture of 3"]).shape == (1, 8)
    (run.path / "vocabulary.json").unlink()
    with pytest.raises(CheckpointError, match=r"vocabulary.json is missing"):
        Towers(run, "cpu")


@pytest.mark.slow  # the import of transformers alone takes seconds
def test_a_frozen_encoder_of_hugging_face_is_trained_with_and_read_again(tmp_path):
    package = pytest.importorskip("transformers", reason="needs the extra text")
    images, folder = captioned_folder(tmp_path / "images"), tmp_path / "bert"
    config = package.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    package.BertModel(config).save_pretrained(folder)
    tokenizer = VocabularyTokenizer.learned(["a picture of 1", "one that shows 2"], 300, 16)
    (folder / "tokenizer.json").write_text(tokenizer.vocabulary)
    options = {key: json.loads(value) for key, value in (one.split("=") for one in QUICK if "text." not in one)}
    text = {"name": f"hf:{folder}", "frozen": True, "length": 16}
    recipe = tmp_path / "hf.toml"
    recipe.write_text(to_toml(read_recipe({**TREE, "text": text, "data": {"source": str(images)}})))
    run = kontrast.pretrain(None, str(recipe), out=tmp_path / "run", device="cpu", say=lambda _: None,
                            **{**options, "training.max_steps": 2})  # fmt: skip
    assert (run.path / "vocabulary.json").read_text() == tokenizer.vocabulary
    weights, start = load_file(run.path / "text.safetensors"), load_file(folder / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert torch.equal(weights[f"text.encoder.model.{name}"], start[name])
    towers = Towers(run, "cpu")
    assert towers.texts(["a picture of 3"]).shape == (1, 8)
    untrained = Towers(run, "cpu", trained=False)
    assert not torch.equal(towers.text_tower.head[0].weight, untrained.text_tower.head[0].weight)


def test_changed_captions_are_noticed_on_resuming(runs, tmp_path):
    place = tmp_path / "run"
    __import__("shutil").copytree(runs[0], place)
    captions = runs[0].parent / "images" / "captions.csv"
    before = captions.read_text()
    captions.write_text(before.replace("picture", "photo"))
    try:
        with pytest.raises(DataError, match="the images changed since the run began"):
            kontrast.pretrain(out=place, resume=True, device="cpu", say=lambda _: None)
    finally:
        captions.write_text(before)


def test_views_and_captions_are_drawn_apart():
    """The same keys draw crops and captions, which must not be correlated: their streams differ."""
    drawn = keys(0, 0, torch.arange(4000))
    captions = caption_batches.mix_tensor(drawn ^ caption_batches.DRAW) & 1
    flips = Views("crop-flip", 1, 4)
    assert 0.45 < captions.double().mean() < 0.55 and flips is not None
    assert abs(torch.corrcoef(torch.stack([captions.double(), (drawn & 1).double()]))[0, 1]) < 0.05


@pytest.mark.parametrize("keys_of", ["teacher.momentum=0.5", "training.stop_gradient=true"])
def test_equal_captions_beside_keys_are_reported(tmp_path, keys_of):
    said, options = [], dict(one.split("=") for one in (*QUICK, "training.max_steps=1", keys_of))
    settings = {key: json.loads(value) for key, value in options.items()}
    images = captioned_folder(tmp_path / "images")
    kontrast.pretrain(images, "digits/clip", out=tmp_path / "run", device="cpu", say=said.append, **settings)
    assert sum("same caption are negatives of each other: keys have no labels" in line for line in said) == 1
