"""`kontrast.Encoder` as scikit-learn uses estimators: its checks, a Pipeline, cross-validation, saving."""

from __future__ import annotations

import inspect
import pickle
import warnings

import numpy as np
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks

import kontrast
from kontrast.errors import CheckpointError, DataError, UsageError

from support import tiny_run
from support.doctests import run_examples

TINY = {"encoder.width": 8, "training.batch": 8, "training.max_steps": 2, "views.size": 16}


def encoder(**options) -> kontrast.Encoder:
    return kontrast.Encoder(**{"settings": TINY, "device": "cpu", **options})


def pixels(count: int = 24) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 16, 16), dtype=np.uint8)


class OfRows(kontrast.Encoder):
    """Draws each row of numbers as an image, so that the checks, which know only matrices, can fit and transform."""

    def fit(self, X, y=None):
        return super().fit(drawn(X), y)

    def transform(self, X):
        return super().transform(drawn(X))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags


def drawn(rows):
    """Return the image of each row; what is no matrix is given to the encoder as it is."""
    rows = np.asarray(rows) if isinstance(rows, list) else rows
    if not isinstance(rows, np.ndarray) or rows.ndim != 2:
        return rows
    values = np.stack([np.resize(128 + 40 * row, (1, 16, 16)) for row in rows.astype(np.float64)])
    return np.clip(values, 0, 255).astype(np.uint8).repeat(3, axis=1)


EXCLUDED = {
    "check_n_features_in": "n_features_in_ counts the columns of a matrix; images have channels and sizes",
    "check_n_features_in_after_fitting": "the same",
    "check_complex_data": "wants scikit-learn's own sentences about matrices; ours is about images of uint8",
    "check_dtype_object": "the same",
    "check_estimators_dtypes": "matrices of four float and int types; images are uint8",
    "check_estimators_empty_data_messages": "wants scikit-learn's own sentence about matrices without columns",
    "check_estimators_nan_inf": "uint8 has no NaN",
    "check_fit2d_1sample": "wants scikit-learn's own sentence about one sample",
    "check_fit2d_1feature": "an image is never one column",
    "check_fit2d_predict1d": "wants scikit-learn's own sentence about reshaping",
    "check_transformer_general": "refuses another number of features; images of another size are resized instead",
    "check_positive_only_tag_during_fit": "uint8 has no negative values",
    "check_transformer_data_not_an_array": "lists of lists of numbers are no images",
    "check_array_api_input": "skipped by scikit-learn itself without SCIPY_ARRAY_API",
    "check_f_contiguous_array_estimator": "a matrix in Fortran order",
    "check_readonly_memmap_input": "a matrix on disk; folders and packed stores are for that",
}
"""The checks that make no sense for images, with the reason."""


def name_of(check) -> str:
    return getattr(check, "func", check).__name__


def checks() -> list:
    with warnings.catch_warnings(action="ignore"):
        given = list(estimator_checks.estimator_checks_generator(OfRows(settings=TINY, device="cpu")))
    return [(made, check) for made, check in given if name_of(check) not in EXCLUDED]


@pytest.mark.parametrize(("made", "check"), [pytest.param(*pair, id=name_of(pair[1])) for pair in checks()])
def test_the_checks_of_scikit_learn(made, check):
    with warnings.catch_warnings(action="ignore"):
        check(made)


def test_more_than_twenty_checks_make_sense_and_every_exclusion_is_one_of_scikit_learns():
    assert len(checks()) > 20
    assert all(hasattr(estimator_checks, name) for name in EXCLUDED)


def test_example_and_docstrings():
    run_examples(kontrast.Encoder)
    for name in ("fit", "transform", "fit_transform", "save", "load", "get_params", "set_params", "set_output"):
        method = getattr(kontrast.Encoder, name)
        for argument in inspect.signature(method).parameters:
            if argument not in ("self", "cls", "params"):
                assert f"{argument}: " in method.__doc__


def test_it_works_in_a_pipeline_and_in_cross_validation():
    images = pixels()
    images[::2], images[1::2] = images[::2] // 16, 255 - images[1::2] // 16  # every other image is dark
    y = np.arange(len(images)) % 2
    pipeline = make_pipeline(encoder(settings={**TINY, "encoder.width": 64}), StandardScaler(), LogisticRegression())
    assert pipeline.fit(images, y).score(images, y) == 1.0
    assert cross_val_score(pipeline, images, y, cv=2).shape == (2,)
    assert pipeline.set_params(encoder__random_state=3).get_params()["encoder__random_state"] == 3


def test_features_are_those_of_the_run_and_survive_saving(tmp_path):
    images = pixels()
    fitted = encoder(out=tmp_path / "run").fit(images)
    features = fitted.transform(images)
    run = kontrast.Run(tmp_path / "run")
    assert np.allclose(features, run.encoder()(run.prepare(images)).detach().numpy(), atol=1e-5)
    fitted.save(tmp_path / "saved")
    loaded = kontrast.Encoder.load(tmp_path / "saved")
    assert loaded.get_params()["settings"] == TINY
    for other in (loaded, kontrast.Encoder.load(tmp_path / "run"), pickle.loads(pickle.dumps(fitted))):
        assert np.array_equal(other.set_params(device="cpu").transform(images), features)
    out = kontrast.embed(tmp_path / "saved", tiny_run.images(), tmp_path / "v.npy", device="cpu", say=str)
    vectors = np.load(out.path)
    assert np.allclose(loaded.transform(tiny_run.images()), vectors, atol=1e-5)  # the same images, from a folder
    with pytest.raises(UsageError, match="already exists"):
        fitted.save(tmp_path / "saved")


def test_no_images_have_no_features():
    found = encoder().fit(pixels()).transform(pixels(0))
    assert found.shape == (0, 8) and found.dtype == np.float32


def test_numbers_of_numpy_survive_saving(tmp_path):
    given = {"settings": {**TINY, "training.lr": np.float32(0.5)}, "random_state": np.int64(3)}
    fitted = encoder(**given).fit(pixels())
    loaded = kontrast.Encoder.load(fitted.save(tmp_path / "saved")).set_params(device="cpu")
    assert loaded.get_params()["settings"] == {**TINY, "training.lr": 0.5} and loaded.get_params()["random_state"] == 3
    assert np.array_equal(loaded.fit(pixels()).transform(pixels()), fitted.transform(pixels()))


def test_features_come_in_a_data_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    pipeline = make_pipeline(encoder(), StandardScaler()).set_output(transform="pandas")
    names = [f"encoder{n}" for n in range(8)]
    for made in (pipeline, clone(pipeline)):
        frame = made.fit(pixels()).transform(pixels())
        assert isinstance(frame, pandas.DataFrame) and list(frame) == names
    fitted = pipeline[0]
    features = fitted.set_output(transform="default").transform(pixels())
    assert isinstance(features, np.ndarray)
    with config_context(transform_output="pandas"):
        assert isinstance(fitted.transform(pixels()), np.ndarray)
        del fitted._sklearn_output_config
        assert np.array_equal(fitted.transform(pixels()), features) and list(fitted.transform(pixels(0))) == names
    with pytest.raises(UsageError, match="did you mean 'pandas'"):
        fitted.set_output(transform="panda")


def test_fit_transform_is_fit_and_then_transform():
    assert np.array_equal(encoder().fit_transform(pixels()), encoder().fit(pixels()).transform(pixels()))


def test_a_clone_is_not_fitted_and_the_seed_decides():
    fitted = encoder().fit(pixels())
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    with pytest.raises(NotFittedError, match="call fit"):
        copy.transform(pixels())
    assert np.array_equal(copy.fit(pixels()).transform(pixels()), fitted.transform(pixels()))
    other = encoder(random_state=1).fit(pixels())
    assert not np.array_equal(other.transform(pixels()), fitted.transform(pixels()))


def test_minutes_are_passed_on(monkeypatch):
    given = {}

    def pretrain(data, recipe, **options):
        given.update(options, recipe=recipe)
        return kontrast.Run(tiny_run.trained())

    monkeypatch.setattr(kontrast, "pretrain", pretrain)
    encoder(recipe="quickstart", minutes=3.5).fit(pixels())
    assert given["minutes"] == 3.5 and given["recipe"] == "quickstart"
    given.clear()
    encoder().fit(pixels())
    assert "minutes" not in given


def test_repr_names_what_was_changed():
    assert repr(kontrast.Encoder()) == "Encoder()"
    assert repr(kontrast.Encoder(minutes=5, device="cpu")) == "Encoder(minutes=5, device='cpu')"


def test_bad_images_and_parameters_are_one_clear_line(tmp_path):
    fitted = encoder().fit(pixels())
    with pytest.raises(DataError, match=r"can't encode float64 \[2, 3, 16, 16\]: give uint8 images"):
        fitted.transform(np.zeros((2, 3, 16, 16)))
    with pytest.raises(DataError, match="4 channels"):
        fitted.transform(np.zeros((2, 4, 16, 16), dtype=np.uint8))
    (tmp_path / "broken.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"can't read broken\.png .*every image needs a row"):
        fitted.transform(tmp_path)
    with pytest.raises(UsageError, match="Invalid parameter 'minuts' for estimator Encoder"):
        fitted.set_params(minuts=3)
    fitted.save(tmp_path / "saved")
    (tmp_path / "saved" / "estimator.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        kontrast.Encoder.load(tmp_path / "saved")
