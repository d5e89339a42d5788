"""Reference statistics on disk: three forms of files, what they hold, and files that are damaged or hostile."""

import io
import json
import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch

from edm2 import references
from edm2.features import SmallClassifier, SmallFeatures
from edm2.frechet import Gaussian, Moments, frechet_distance
from edm2.measuring import metrics_of
from edm2.metrics import check_features
from edm2.pickled import Refused, read_pickle
from edm2.pickled_arrays import array_names
from edm2.references import Reference, read_reference, write_reference
from tests.dataset_files import fails


def moments(seed: int = 0, d: int = 5, count: int | None = 40) -> Moments:
    gaussian = Gaussian.of(np.random.default_rng(seed).standard_normal((40, d)) + 1)
    return Moments(gaussian.mean, gaussian.covariance, count)


def same(a: Moments, b: Moments) -> bool:
    return np.array_equal(a.mean, b.mean) and np.array_equal(a.covariance, b.covariance) and a.count == b.count


FACTS = {"dataset": "a.zip", "images": 40, "image_shape": [3, 8, 8], "features": {"fid": "abc"}}


@pytest.fixture()
def path(tmp_path):
    torch.manual_seed(0)
    found = {"fid": moments(), "frechet-small": moments(1, 64), "a.b:c": moments(2)}
    write_reference(tmp_path / "ref.npz", Reference(found, FACTS, SmallClassifier((3, 8, 8), 7).eval()))
    return tmp_path / "ref.npz"


class TestOurs:
    def test_round_trip(self, path, tmp_path):
        """To the bit, the classifier too; the same bytes each time."""
        found = read_reference(path)
        assert list(found.moments) == ["fid", "frechet-small", "a.b:c"] and same(found.of("a.b:c"), moments(2))
        assert found.facts.items() >= FACTS.items() and found.name == str(path)
        torch.manual_seed(0)
        images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
        expected = SmallFeatures(SmallClassifier((3, 8, 8), 7))(images)
        np.testing.assert_array_equal(SmallFeatures(found.classifier)(images), expected)
        write_reference(tmp_path / "again.npz", found)
        assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()
        with zipfile.ZipFile(path) as archive:  # the same tomorrow
            assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        with np.load(path, allow_pickle=False) as file:
            np.testing.assert_array_equal(file["fid.mean"], moments().mean)

    def test_what_is_missing_is_named(self, path):
        found = read_reference(path)
        with fails("ref.npz has no statistics of fd_dinov2, but of fid, frechet-small, a.b:c"):
            found.of("fd_dinov2")
        assert metrics_of(found) == ["fid", "frechet-small"]
        with fails("name the --metrics: the reference has statistics of a.b:c"):
            metrics_of(Reference({"a.b:c": moments()}))

    def test_other_weights(self, path):
        found = read_reference(path)
        check_features(found, "fid", "abc")
        check_features(found, "a.b:c", "abc")
        with fails("ref.npz was made with other weights of fid than those here: 'abc' and 'abd'"):
            check_features(found, "fid", "abd")

    def test_where_it_cannot_be_written(self, path):
        found = read_reference(path)
        with fails("cannot create the folder"):
            write_reference(path / "a.npz", found)
        path.with_name("b.npz").mkdir()
        with fails("cannot write"):
            write_reference(path.with_name("b.npz"), found)


class TestOtherForms:
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_mu_and_sigma(self, tmp_path, save):
        expected = moments(count=None)
        save(tmp_path / "a.npz", mu=expected.mean, sigma=expected.covariance.astype(np.float32))
        found = read_reference(tmp_path / "a.npz")
        assert list(found.moments) == ["fid"] and found.facts == {} and found.classifier is None
        np.testing.assert_allclose(found.of("fid").covariance, expected.covariance, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("protocol", [3, 4, 5])
    @pytest.mark.parametrize("before", [False, True], ids=["NumPy 2", "NumPy 1"])
    def test_pickles(self, tmp_path, protocol, before):
        """As the official release writes them, in any order of memory; nothing is called."""
        expected = {"fid": moments(0, 5, None), "fd_dinov2": moments(1, 3, None)}
        data = {m: {"mu": x.mean, "sigma": np.asfortranarray(x.covariance) + 0.0, "n": np.float64(3)} for m, x in expected.items()}
        words = pickle.dumps(data, protocol)
        if before:
            assert b"numpy._core" in words
            words = words.replace(b"numpy._core", b"numpy.core") if protocol < 4 else _renamed(words)
        (tmp_path / "a.pkl").write_bytes(words)
        found = read_reference(tmp_path / "a.pkl")
        assert all(same(found.of(m), x) for m, x in expected.items()) and list(found.moments) == list(expected)

    @pytest.mark.parametrize("protocol", [3, 4, 5])
    def test_arrays_in_pickles(self, protocol):
        """By rows, by columns, of one number, of none."""
        arrays = [
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
            np.array(3),
            np.zeros((0, 2)),
        ]
        words = pickle.dumps(arrays, protocol)
        for expected, found in zip(arrays, read_pickle(io.BytesIO(words), len(words), array_names(100))):
            assert found.array.dtype == expected.dtype
            np.testing.assert_array_equal(found.array, expected)
        with pytest.raises(Refused, match="arrays of more than 70 bytes"):
            read_pickle(io.BytesIO(words), len(words), array_names(70))

    def test_a_pickle_of_one_pair(self, tmp_path):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps({"mu": moments().mean, "sigma": moments().covariance}))
        assert same(read_reference(tmp_path / "a.pkl").of("fid"), moments(count=None))


def _renamed(words: bytes) -> bytes:
    """Names of modules have their lengths before them in protocol 4; frames are left out."""
    for module in (b"numpy._core.multiarray", b"numpy._core.numeric"):
        old = module.replace(b"_core", b"core")
        words = words.replace(bytes([0x8C, len(module)]) + module, bytes([0x8C, len(old)]) + old)
    return words


class Evil:
    def __reduce__(self):
        return sys.exit, (3,)


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "neither an .npz file nor a pickle"),
            (b"<html>", "neither an .npz file nor a pickle"),
            (b"PK\x03\x04", "is refused, it is no reference statistics"),
            (pickle.dumps(Evil()), "it asks for sys.exit"),
            (pickle.dumps({"fid": Evil()}), "it asks for sys.exit"),
            (pickle.dumps([1]), "a pickle that holds no statistics"),
            (pickle.dumps({}), "a pickle that holds no statistics"),
            (pickle.dumps({"fid": 3}), "neither facts nor pairs of mu and sigma"),
            (pickle.dumps({"fid": {"mu": [1.0], "sigma": [[1.0]]}}), "statistics that are no numbers"),
            (pickle.dumps({"fid": {"mu": np.zeros(2, object), "sigma": np.eye(2)}}), "an array of other things than numbers"),
            (pickle.dumps({"fid": {"mu": np.zeros(2), "sigma": np.eye(2)}})[:-40], "damaged"),
            (pickle.dumps({"fid\n": {"mu": np.zeros(2), "sigma": np.eye(2)}}), "a metric whose name is none"),
        ],
    )
    def test_files(self, tmp_path, data, words):
        (tmp_path / "a").write_bytes(data)
        with fails(words):
            read_reference(tmp_path / "a")

    @pytest.mark.parametrize(
        ("mean", "covariance", "words"),
        [
            (np.zeros(3), np.eye(2), r"fid has a mean \[3\] and a covariance \[2, 2\]"),
            (np.zeros((2, 2)), np.eye(2), r"fid has a mean \[2, 2\]"),
            (np.zeros(0), np.zeros((0, 0)), r"fid has a mean \[0\]"),
            (np.zeros(9000), np.zeros((1, 1)), r"fid has a mean \[9000\]"),
            (np.array([0, np.nan]), np.eye(2), "numbers that are not finite"),
            (np.zeros(2), np.diag([1, np.inf]), "numbers that are not finite"),
            (np.zeros(2), np.array([[1, 0.5], [0, 1]]), "a covariance that is none"),
            (np.zeros(2), -np.eye(2), "a covariance that is none"),
            (np.zeros(2, np.int64), np.eye(2), "statistics that are no numbers"),
            (np.zeros(2, complex), np.eye(2), "an array of other things than numbers"),
        ],
    )
    def test_statistics(self, tmp_path, mean, covariance, words):
        np.savez(tmp_path / "a.npz", mu=mean, sigma=covariance)
        with fails(words):
            read_reference(tmp_path / "a.npz")

    def test_there_is_none(self, tmp_path):
        for path in (tmp_path / "none", tmp_path):
            with fails("cannot read"):
                read_reference(path)

    def test_arrays_that_promise_more(self, path):
        """Before anything is allocated for them."""
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**50,)})
        with fails("of another length than it says"):
            read_reference(altered(path, {"fid.mean.npy": header.getvalue() + bytes(8)}))
        objects = io.BytesIO()
        np.save(objects, np.array([Evil()]), allow_pickle=True)
        with fails("an array of other things than numbers"):
            read_reference(altered(path, {"fid.mean.npy": objects.getvalue()}))

    def test_a_bomb(self, tmp_path, monkeypatch):
        """A file of little that says it holds much."""
        monkeypatch.setattr(references, "LARGEST", 2**20)
        np.savez_compressed(tmp_path / "a.npz", mu=np.zeros(2**16), sigma=np.zeros((2**8, 2**8)))
        assert (tmp_path / "a.npz").stat().st_size < 2**14
        with fails("it holds more than such a file can"):
            read_reference(tmp_path / "a.npz")

    def test_too_large(self, path, monkeypatch):
        monkeypatch.setattr(references, "LARGEST", 1000)
        with fails("of 0.0 GiB"):
            read_reference(path)

    @pytest.mark.parametrize(
        "change",
        [
            {"classes": -1}, {"classes": 2**40}, {"classes": "many"}, {"image_shape": [3, 8]}, {"image_shape": [3, 2**20, 2**20]},
            {"image_shape": [2**40, 8, 8]}, {"image_shape": None}, {"classes": 8}, {"format": 2}, {"counts": {}}, {"counts": {"fid": 1}},
            {"counts": {"fid": True}}, {"counts": {"other": 5}}, {"counts": []},
        ],
        ids=str,
    )  # fmt: skip
    def test_facts(self, path, change):
        facts = json.loads(bytes(np.load(path)["facts"])) | change
        buffer = io.BytesIO()
        np.save(buffer, np.frombuffer(json.dumps(facts).encode(), np.uint8))
        with fails("is refused, it is no reference statistics"):
            read_reference(altered(path, {"facts.npy": buffer.getvalue()}))

    def test_facts_that_are_none(self, path):
        for data in (b"[" * 100_000, b"[]", b"\xff", b"{}"):
            buffer = io.BytesIO()
            np.save(buffer, np.frombuffer(data, np.uint8))
            with fails("is refused, it is no reference statistics"):
                read_reference(altered(path, {"facts.npy": buffer.getvalue()}))

    def test_a_classifier_that_is_not_finite(self, path):
        buffer = io.BytesIO()
        np.save(buffer, np.array(np.nan, np.float32))
        with fails("a classifier whose weights are not finite"):
            read_reference(altered(path, {"frechet-small.classifier.scale.npy": buffer.getvalue()}))

    @pytest.mark.parametrize("form", ["ours", "pickle"])
    def test_damage(self, path, form, tmp_path):
        """It is read, or refused in one line."""
        if form == "pickle":
            path.write_bytes(pickle.dumps({"fid": {"mu": moments().mean, "sigma": moments().covariance}}))
        data, random, refused = path.read_bytes(), np.random.default_rng(0), 0
        for _ in range(300):
            changed = bytearray(data)
            for at in random.integers(0, len(data), 3):
                changed[at] = random.integers(256)
            (tmp_path / "changed").write_bytes(changed[: random.integers(1, len(data))] if random.random() < 0.3 else changed)
            try:
                read_reference(tmp_path / "changed")
            except references.UserError as e:
                refused += 1
                assert "\n" not in str(e) and str(e).isprintable()
        assert refused > 100


def altered(path, entries: dict[str, bytes]):
    """The same file with other entries."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()} | entries
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def test_distances_from_moments():
    """Are those of the Gaussians."""
    random = np.random.default_rng(0)
    a, b = (Gaussian.of(random.standard_normal((50, 4))) for _ in range(2))
    assert frechet_distance(a, b.moments()) == frechet_distance(a, b) > 0
