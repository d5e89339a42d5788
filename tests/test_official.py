"""The official release's pickles: read as data, refused as programs."""

import io
import os
import pickle
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import edm2
from edm2.latents import LatentEncoder
from edm2.official import (
    Piece,
    Storage,
    _check,
    _config,
    _Persistent,
    _plain,
    _tensor,
    _tensors,
    load_official_snapshot,
    open_official,
    read_official,
)
from edm2.pickled import Object, Refused
from edm2.vae import load_vae
from tests.conftest import GOLDEN, Golden, relative_error, tiny_net
from tests.mutations import mutated, rearranged
from tests.official_files import write_official

ROOT = Path(__file__).parent.parent
FILE = GOLDEN / "official_snapshot.pkl"
ORIGINAL = FILE.read_bytes()
STOP = len(ORIGINAL) - 1


class TestGolden:
    """Its program text raises when it is executed."""

    def test_tensors(self):
        golden, found = Golden("official_snapshot").group("state/"), read_official(FILE).tensors
        assert found.keys() == golden.keys()
        assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype == torch.float16 for name, x in golden.items())

    def test_network(self):
        golden, snapshot = Golden("official_snapshot"), load_official_snapshot(FILE)
        with torch.no_grad():
            denoised = snapshot.net(golden["x"], golden["sigma"].reshape(-1, 1, 1, 1), golden["labels"])
        assert relative_error(denoised, golden["denoised"]) < 1e-5 and not snapshot.net.training
        assert torch.equal(snapshot.net.unet.emb_fourier.freqs, golden["state/unet.emb_fourier.freqs"].float())
        assert edm2.load_official_snapshot is load_official_snapshot

    def test_what_belongs_to_it(self, tmp_path):
        """Encoder, data and loss of its training; time and width by the file's name."""
        path = tmp_path / "edm2-img512-xs-2147483-0.135.pkl"
        path.write_bytes(ORIGINAL)
        snapshot = load_official_snapshot(path)
        assert snapshot.encoder.config() == LatentEncoder().config() and snapshot.config["model_channels"] == 8
        assert snapshot.meta["dataset_kwargs"] == {
            "class_name": "training.dataset.ImageFolderDataset", "path": "datasets/x.zip", "use_labels": True
        }  # fmt: skip
        assert snapshot.meta["loss"] == {"P_mean": -0.4, "P_std": 1.0, "sigma_data": 0.5}
        assert (snapshot.meta["nimg"], snapshot.meta["std"]) == (2147483648, 0.135) and "CC BY-NC-SA" in snapshot.meta["licence"]

    def test_it_becomes_a_snapshot(self, tmp_path):
        found = load_official_snapshot(FILE)
        edm2.save_snapshot(tmp_path / "net.safetensors", found.net, encoder=found.encoder, meta=found.meta)
        again = edm2.load_snapshot(tmp_path / "net.safetensors")
        assert all(torch.equal(x, again.net.state_dict()[name]) for name, x in found.net.state_dict().items())
        assert again.meta == found.meta and again.encoder.config() == found.encoder.config()


def renamed(*pairs: tuple[str, str]) -> bytes:
    """The file with some of its short texts replaced."""
    data = ORIGINAL
    for old, new in pairs:
        a, b = (b"\x8c" + bytes([len(text)]) + text.encode() for text in (old, new))
        assert a in data, old
        data = data.replace(a, b)
    return data


class TestForms:
    def read(self, data: bytes, tmp_path):
        (tmp_path / "a.pkl").write_bytes(data)
        return load_official_snapshot(tmp_path / "a.pkl")

    def test_older_numpy(self, tmp_path):
        assert (
            self.read(renamed(("numpy._core.multiarray", "numpy.core.multiarray")), tmp_path).encoder.config() == LatentEncoder().config()
        )

    @pytest.mark.parametrize("protocol", [2, 3, 5])
    def test_other_protocols(self, protocol, tmp_path):
        """As other versions of Python write them."""
        data = pickletools.optimize(ORIGINAL)
        if protocol != 4:
            data = b"\x80" + bytes([protocol]) + data[2:]
        assert self.read(data, tmp_path).config == load_official_snapshot(FILE).config

    def test_other_encoders(self, tmp_path):
        assert self.read(renamed(("StabilityVAEEncoder", "StandardRGBEncoder")), tmp_path).encoder.kind == "rgb"
        with pytest.raises(edm2.UserError, match="an encoder that this project does not know .StabilityXYZEncoder."):
            self.read(renamed(("StabilityVAEEncoder", "StabilityXYZEncoder")), tmp_path)

    def test_latents(self, tmp_path):
        """Of any VAE, which is not fetched unasked; for a network of as many channels."""
        write_official(tmp_path / "a.pkl", tiny_net(img_channels=4), vae="somebody/else")
        encoder = load_official_snapshot(tmp_path / "a.pkl").encoder
        assert encoder.vae == "somebody/else"
        with pytest.raises(edm2.UserError, match="give that, or a folder that holds it, with --vae"):
            load_vae(encoder)
        write_official(tmp_path / "a.pkl", tiny_net(img_channels=3), vae="somebody/else")
        with pytest.raises(edm2.UserError, match="its encoder is for 4 channels and its network for 3"):
            load_official_snapshot(tmp_path / "a.pkl")

    def test_statistics_of_another_dataset(self, tmp_path):
        scale = np.float32(0.5) / np.array([4.17, 4.62, 3.71, 3.28], np.float32)
        assert ORIGINAL.count(scale.tobytes()) == 1
        found = self.read(ORIGINAL.replace(scale.tobytes(), (scale * 2).tobytes()), tmp_path).encoder
        assert found.raw_std == pytest.approx([2.085, 2.31, 1.855, 1.64], rel=1e-5) and found.raw_mean[0] == pytest.approx(2.905, rel=1e-4)

    @pytest.mark.parametrize(
        ("pairs", "words"),
        [
            ([("conv_res0", "conv_res9")], r"unet.dec.16x16_block0.conv_res0.weight should be \[8, 24, 3, 3\] and is nothing"),
            ([("ema", "emu")], "it holds no network"),
            ([("model_channels", "modelachannels")], "its argument modelachannels is none of such a network"),
            ([("class_name", "klass_name")], "_reconstruct_persistent_obj called with what it does not take .KeyError."),
            ([("class", "madam")], "it carries a module of program text"),
            ([("_parameters", "_permutants_")], "damaged: a Precond without its _parameters"),
        ],
    )
    def test_other_networks(self, pairs, words, tmp_path):
        with pytest.raises(edm2.UserError, match=words):
            self.read(renamed(*pairs), tmp_path)


class Evil:
    """Pickled, it asks for a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def hostile(canary: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that would make the file `canary` or worse, and what the refusal names."""
    order = f"touch {canary}"
    system = f"it asks for {os.system.__module__}.system"
    inside = pickle.dumps({"ema": {"deep": [({"x": Evil(os.system, order)},)]}})
    in_state = ORIGINAL[:2] + pickle.dumps(Evil(os.system, order))[2:-1] + b"0" + ORIGINAL[2:]  # called, dropped, all else as it was
    inner = io.BytesIO()
    torch.save(Evil(os.system, order), inner, _use_new_zipfile_serialization=False)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Evil(os.system, order)))
    load = b"\x8c\rtorch.storage\x8c\x10_load_from_bytes\x93"
    start, text, empty = b"\x80\x04", b"\x8c\x01a", b")"

    def storage(data: bytes) -> bytes:
        return start + load + b"B" + len(data).to_bytes(4, "little") + data + b"\x85R."

    return {
        "reduce": (pickle.dumps(Evil(os.system, order)), system),
        "nested": (inside, system),
        "beside the network": (in_state, system),
        "eval": (pickle.dumps(Evil(eval, "1")), "it asks for builtins.eval"),
        "getattr": (start + b"cbuiltins\ngetattr\n.", "it asks for builtins.getattr"),
        "a name of two lines": (start + b"\x8c\x04o\n\x1bs\x8c\x06system\x93.", "it asks for o[?][?]s.system"),
        "a dotted name": (start + b"\x8c\x05torch\x8c\x0b_utils.eval\x93.", "it asks for torch._utils.eval"),
        "an attribute of what is allowed": (start + b"\x8c\x05numpy\x8c\x11ndarray.__class__\x93.", "it asks for numpy.ndarray.__class__"),
        "another import of numpy": (start + b"\x8c\x05numpy\x8c\x04load\x93.", "it asks for numpy.load"),
        "a persistent id": (start + b"P1\n.", "it asks for a persistent id"),
        "a persistent id from the stack": (start + text + b"Q.", "it asks for a persistent id"),
        "extension 1": (start + b"\x82\x01.", "it asks for an extension code"),
        "extension 4": (start + b"\x84\x01\x00\x00\x00.", "it asks for an extension code"),
        "an instance": (start + b"(ios\nsystem\n.", "it asks for an instance by name"),
        "an object": (start + b"(cos\nsystem\no.", "it asks for os.system"),
        "new with keywords": (start + empty + b"}\x92.", "it asks for NEWOBJ_EX"),
        "protocol 0": (b"cos\nsystem\n(S'true'\ntR.", "no pickle of protocol 2 to 5"),
        "memo beyond all": (start + text + b"r\xff\xff\xff\x7f.", "it numbers an object 2147483647 where there are 0"),
        "memo unknown": (start + b"h\x05.", "it refers to object 5, which is not there"),
        "text beyond the file": (start + b"X\xff\xff\xff\xff.", "4294967295 bytes are to follow, and there are 1"),
        "bytes beyond all": (start + b"\x8e" + b"\xff" * 7 + b"\x7f.", "9223372036854775807 bytes are to follow"),
        "an integer beyond all": (start + b"\x8b\xff\xff\xff\x7f.", "an integer of more than 65,536 bytes"),
        "a negative length": (start + b"\x8b\xff\xff\xff\xff.", "an integer of more than 65,536 bytes"),
        "an empty stack": (start + b"R.", "its stack is empty"),
        "a mark as an argument": (start + b"((\x85.", "its stack is empty"),
        "no mark": (start + b"t.", "no mark on its stack"),
        "nothing": (start + b".", "more or less than one object"),
        "too much": (start + text + text + b".", "more or less than one object"),
        "cut off": (ORIGINAL[:60000], "are to follow, and there are"),
        "nothing at all": (b"", "1 bytes are to follow, and there are 0"),
        "a call of data": (start + text + empty + b"R.", "it calls a str"),
        "a call of a result": (start + b"ccollections\nOrderedDict\n)R)R.", "it calls a dict"),
        "a state for a function": (start + b"ctorch.storage\n_load_from_bytes\n}b.", "it sets the state of torch.storage._load_from_bytes"),
        "a state for a dict": (start + b"}}b.", "it sets the state of a dict"),
        "items of a function": (start + b"ctorch.storage\n_load_from_bytes\n" + text + text + b"s.", "it puts items into torch.storage"),
        "an object as a key": (start + b"}cnumpy\ndtype\n" + text + b"s.", "it uses numpy.dtype as a key"),
        "a list of itself as a network": (start + b"}\x94\x8c\x03emah\x00s.", "it holds no network"),
        "a storage that calls": (storage(inner.getvalue()), "a storage cannot be read"),
        "an archive as storage that calls": (storage(archive.getvalue()), "a storage cannot be read"),
        "a storage of nothing": (storage(b""), "a storage cannot be read"),
    }


@pytest.mark.parametrize("name", hostile(Path("x")))
def test_hostile_files_are_refused(name, tmp_path):
    """With one line that names what they ask for; nothing of them is executed."""
    data, words = hostile(tmp_path / "canary")[name]
    path = tmp_path / "evil.pkl"
    path.write_bytes(data)
    with pytest.raises(edm2.UserError, match=words) as error:
        load_official_snapshot(path)
    assert str(path) in str(error.value) and len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500
    assert [x.name for x in tmp_path.iterdir()] == ["evil.pkl"]


def test_modules_in_themselves():
    """And such as are in many others, each in many."""
    module = Object("Block")
    module.build({"_parameters": {}, "_buffers": {}, "_modules": {}})
    for child in (module, Object("Block")):
        module.state["_modules"] = {"a": child, "b": child}
        if child is not module:
            child.build({"_parameters": {}, "_buffers": {}, "_modules": {}})
        with pytest.raises(Refused, match="a module twice"):
            dict(_tensors(module, set()))


@pytest.mark.parametrize(
    ("offset", "size", "stride", "words"),
    [
        (0, (2, 3), (1, 2), "not contiguous"),
        (0, (2**40, 2), (0, 0), "not contiguous"),
        (1, (2, 3), (3, 1), "beyond its storage"),
        (-1, (2,), (1,), "sizes that are none"),
        (0, (2, True), (1, 1), "sizes that are none"),
        (0, (2**50,), (1,), "sizes that are none"),
    ],
)
def test_tensors_that_are_none(offset, size, stride, words):
    storage = Storage(np.arange(6, dtype=np.float32).tobytes(), 0, torch.float32, 6)
    with pytest.raises(Refused, match=words):
        _tensor(storage, offset, size, stride, False, {})
    found = _tensor(storage, 2, (2, 1, 2), (2, 7, 1), False, {})
    assert found.shape == (2, 1, 2) and torch.equal(found.read(), torch.arange(2.0, 6)) and found.read(1, 2).tolist() == [3, 4]


def test_the_canary_sings(tmp_path):
    """Python's own reader executes these files."""
    data, _ = hostile(tmp_path / "canary")["nested"]
    pickle.loads(data)
    assert (tmp_path / "canary").exists()


def legacy(*parts: bytes) -> bytes:
    """A pickle of one storage, a file in the file of these parts."""
    data = b"".join(parts)
    return b"\x80\x04\x8c\rtorch.storage\x8c\x10_load_from_bytes\x93B" + len(data).to_bytes(4, "little") + data + b"\x85R."


MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([b"\x80\x02}N" + b"\x85" * 50_000 + b"Ns."], "it uses a tuple as a key"),
        ([b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\xd0\xed\x90\x2e\x85R."], "it asks for builtins.bytearray"),
        ([b"PK\x03\x04", b"0" * 100], "no pickle of protocol 2 to 5"),
        ([MAGIC, b"\x80\x02M\xe9\x03."], "1 bytes are to follow, and there are 0"),
        ([MAGIC, b"\x80\x02M\xe9\x03.", b"\x80\x02}X\r\x00\x00\x00little_endian\x89s."], "it is of another kind"),
        ([MAGIC, b"\x80\x02K\x05."], "it is of another kind"),
    ],
    ids=["a nested key", "a call", "an archive", "cut off", "big-endian", "another version"],
)
def test_storages_that_are_none(parts, words, tmp_path):
    """Of which PyTorch's own reader would take much memory, or crash."""
    (tmp_path / "a.pkl").write_bytes(legacy(*parts))
    with pytest.raises(edm2.UserError, match=f"a storage cannot be read .*{words}"):
        load_official_snapshot(tmp_path / "a.pkl")


def bomb(name: str) -> bytes:
    """Small files that mean much."""
    start, text = b"\x80\x04", b"\x8c\x01a"
    if name == "shared dictionaries":
        inner, data = b"}\x940", start
        for level in range(5):
            items = b"".join(b"\x8c\x02" + f"{i:02}".encode() + b"h" + bytes([level]) for i in range(100))
            data += (b"}\x940" if level == 0 else b"") + b"}(" + items + b"u\x940"
        return ORIGINAL[:2] + data[2:] + b"N." if not inner else data + b"}\x8c\x03emah\x05s."
    if name == "arrays":
        dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x85R(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        state = b"(K\x01M\xff\x3f\x85" + dtype + b"\x89B" + (2**16 - 4).to_bytes(4, "little") + bytes(2**16 - 4) + b"t\x940"
        return start + b"cnumpy.core.multiarray\n_reconstruct\n\x940" + state + b"h\x00)Rh\x01b0" * 1000 + b"N."
    if name == "keys that collide":
        keys = b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(10000))
        return start + b"}(" + keys + b"u."
    return start + b"\x8f0" * 1_500_000 + text + b"."


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shared dictionaries", "it holds no network"),
        ("keys that collide", "it uses a int as a key"),
        ("arrays", "arrays of more than 65,536 bytes"),
        ("instructions", "it has more than 2,097,152 instructions"),
    ],
)
def test_bombs(name, words, tmp_path):
    (tmp_path / "a.pkl").write_bytes(bomb(name))
    with pytest.raises(edm2.UserError, match=words):
        load_official_snapshot(tmp_path / "a.pkl")


def test_what_is_told_is_bounded():
    """However often parts of it are shared."""
    shared: dict = {}
    for _ in range(6):
        shared = {f"{i:03}": shared for i in range(200)}
    assert len(str(_plain(shared))) < 100_000


def test_numbers(tmp_path):
    """Finite, and each tensor its own."""
    with open_official(FILE) as found:
        tensors = found.tensors | {"unet.emb_fourier.freqs": found.tensors["unet.emb_fourier.phases"]}
        with pytest.raises(Refused, match="share their numbers"):
            _check(found.config, tensors)
        weight = found.tensors["unet.out_conv.weight"]
        tensors = found.tensors | {"unet.emb_fourier.freqs": Piece(weight.storage, 1, found.tensors["unet.emb_fourier.freqs"].shape)}
        with pytest.raises(Refused, match="share their numbers"):
            _check(found.config, tensors)
        numbers = found.tensors["unet.out_conv.weight"].read().numpy().tobytes()
    assert ORIGINAL.count(numbers) == 1
    (tmp_path / "a.pkl").write_bytes(ORIGINAL.replace(numbers, numbers[:-2] + b"\x00\x7e"))
    with pytest.raises(edm2.UserError, match="a.pkl is refused: damaged: numbers that are not finite"):
        load_official_snapshot(tmp_path / "a.pkl")


@pytest.mark.parametrize(
    ("name", "value"),
    [("img_resolution", 0), ("num_blocks", 33), ("channel_mult", {"1": 2}), ("channel_mult", [1] * 9), ("label_balance", float("nan")),
     ("use_fp16", "x"), ("sigma_data", None), ("dropout", "x"), ("attn_balance", None), ("resample_filter", ["a"]),
     ("resample_filter", [1]), ("resample_filter", []), ("resample_filter", [1, -1]), ("dtype", "x")],
)  # fmt: skip
def test_arguments_of_another_kind(name, value):
    with pytest.raises(Refused, match=f"its argument {name} is none of such a network"):
        _config(_Persistent({"type": "class", "class_name": "Precond", "state": {"_init_kwargs": {name: value}}}))


def test_facts_that_are_no_numbers():
    assert _plain({"a": float("nan"), "b": [float("inf"), 1.5, True, 2**70]}) == {"a": None, "b": [None, 1.5, True, None]}


def test_a_storage_counts_once(tmp_path):
    """A small file that has the same bytes loaded again and again."""
    start = ORIGINAL.index(b"\x8c\x10_load_from_bytes")
    at = ORIGINAL.index(b"B", start)
    length = int.from_bytes(ORIGINAL[at + 1 : at + 5], "little")
    data = b"\x80\x04\x8c\rtorch.storage" + ORIGINAL[start : start + 18] + b"\x93q\x00" + ORIGINAL[at : at + 5 + length] + b"q\x010"
    (tmp_path / "a.pkl").write_bytes(data + b"h\x00h\x01\x85R0" * 1000 + b"N.")
    with pytest.raises(edm2.UserError, match="more tensors than there is room for"):
        load_official_snapshot(tmp_path / "a.pkl")


def test_not_there(tmp_path):
    with pytest.raises(edm2.UserError, match="cannot read .*none.pkl: No such file"):
        load_official_snapshot(tmp_path / "none.pkl")


@pytest.mark.parametrize("count", [300, pytest.param(10000, marks=pytest.mark.torture)])
def test_mutated_files(count):
    """In a process of its own, watched: each is read as a network of the same form, or refused; nothing else happens."""
    result = subprocess.run([sys.executable, "-m", "tests.mutations", str(count)], cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr[-2000:]
    equal, numbers, settings, refused = map(int, result.stdout.split())
    assert equal + numbers + settings + refused == count and settings < count / 1000
    assert equal > count / 50 and numbers > count / 50 and refused > count / 4


def test_mutations_differ():
    for mutate in (mutated, rearranged):
        assert len({mutate(ORIGINAL, seed) for seed in range(100)}) > 95
