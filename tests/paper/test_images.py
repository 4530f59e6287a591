"""Images of digits: those that are there, and those that somebody has."""

import numpy as np
from closeness import assert_close
from refusals import refused

import tnsim
from benchmarks.paper import images


def test_the_scans_are_divided_once():
    shown, tested = (images.load("digits", part) for part in ("train", "test"))
    assert len(shown.x) == 1437 and len(tested.x) == 360 and shown.side == 8
    assert 0 <= shown.x.min() < shown.x.max() == 1 and set(tested.y) == set(range(10))
    assert not (tested.x[:, None] == shown.x[None]).all(2).any()


def test_rendered_digits_are_the_same_at_every_call():
    first, again = images.render(3, seed=1), images.render(3, seed=1)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert 0 <= first[0].min() < first[0].max() <= 1 and first[0].std(1).min() > 0.03


def test_a_folder_of_svhn(tmp_path, rng):
    from scipy.io import savemat

    pixels = rng.integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": np.array([[1], [10], [3], [4], [5]])})
    found = images.load("street", "test", tmp_path)
    assert found.y.tolist() == [1, 0, 3, 4, 5] and found.side == 32
    grey = pixels[4, 7, :, 2] @ np.array([0.299, 0.587, 0.114]) / 255
    assert_close(found.x[2, 4 * 32 + 7], grey, rtol=1e-6, limited_by="float32 pixels")


def test_a_folder_of_arrays(tmp_path, rng):
    with refused(r"cannot be read as images .*train\.npz and test\.npz", tnsim.TnsimError):
        images.load("digits", "train", tmp_path)
    values = rng.random((4, 6, 6))
    np.savez(tmp_path / "train.npz", images=values, labels=np.arange(4))
    found = images.load("digits", "train", tmp_path).x
    expected = values.reshape(4, 36)
    assert_close(found, expected, scale=1.0, rtol=1e-6, limited_by="float32 pixels")
    np.savez(tmp_path / "train.npz", images=255 * values, labels=np.arange(4))
    with refused("from 0 to 1", tnsim.TnsimError):
        images.load("digits", "train", tmp_path)
