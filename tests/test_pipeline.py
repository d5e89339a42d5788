"""`edm2.pipeline`: the call and the folders that users of diffusers know, and the images of `generate_images`."""

import json
import re

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

import edm2
from edm2.denoisers import Chunked, Folded
from edm2.generate import Batch
from edm2.latents import LatentEncoder
from edm2.pipeline import EDM2Pipeline
from edm2.vae import load_vae
from tests.command_lines import python, without
from tests.conftest import relative_error, tiny_net
from tests.tolerances import SAMPLER
from tests.vae_files import save_tiny


@pytest.fixture()
def pipe() -> EDM2Pipeline:
    """RGB, five classes, with a guide, quiet."""
    return quiet(EDM2Pipeline(tiny_net(img_channels=3), tiny_net(0, img_channels=3), guidance_scale=1.5))


def quiet(pipe: EDM2Pipeline) -> EDM2Pipeline:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generators(seeds) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def generated(pipe: EDM2Pipeline, seeds, **options) -> Batch:
    (batch,) = edm2.generate_images(pipe.net, seeds, pipe.gnet, **options)
    return batch


def test_the_conventional_call(pipe):
    """Each image is that which `generate_images` makes of its generator's seed."""
    assert isinstance(pipe, DiffusionPipeline)
    images = pipe(class_labels=[3, 0], num_inference_steps=3, guidance_scale=2.0, generator=generators([5, 6])).images
    expected = generated(pipe, [5, 6], class_idx=[3, 0], num_steps=3, guidance=2.0)
    assert [(image.size, image.mode) for image in images] == [((8, 8), "RGB")] * 2
    np.testing.assert_array_equal(np.stack([np.asarray(image) for image in images]), expected.images)


def test_one_generator_and_given_noise(pipe):
    """One draws all noise at once, as in diffusers."""
    call = dict(class_labels=torch.tensor([1, 1]), num_inference_steps=2, output_type="latent")
    noise = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    by_seed, given = pipe(**call, generator=torch.Generator().manual_seed(3)).images, pipe(**call, latents=noise).images
    assert torch.equal(by_seed, given)
    plain = edm2.edm_sampler(pipe.net, noise, torch.eye(5)[[1, 1]], pipe.gnet, num_steps=2, guidance=1.5)
    assert relative_error(given, plain) < SAMPLER


def test_output_types(pipe):
    def images(output_type):
        return pipe(class_labels=[2], num_inference_steps=2, generator=generators([0]), output_type=output_type).images

    pil, array, tensor = np.asarray(images("pil")[0]), images("np"), images("pt")
    assert array.shape == (1, 8, 8, 3) and tensor.shape == (1, 3, 8, 8)
    np.testing.assert_array_equal(np.round(255 * array[0]), pil)
    np.testing.assert_array_equal(tensor.permute(0, 2, 3, 1).numpy(), array)
    (alone,) = pipe(class_labels=2, num_inference_steps=2, generator=generators([0]), output_type="np", return_dict=False)
    np.testing.assert_array_equal(alone, array)


def test_options_reach_the_sampler(pipe):
    """The pipeline's own strength is the default."""

    def latents(**options):
        return pipe(class_labels=[2], num_inference_steps=4, generator=generators([0]), output_type="latent", **options).images

    assert torch.equal(latents(), latents(guidance_scale=1.5))
    others = [latents(guidance_scale=1.0), latents(guidance_interval=(1, 100)), latents(sigma_max=40), latents(rho=5), latents()]
    assert all(relative_error(a, b) > 1e-4 for i, a in enumerate(others) for b in others[:i])


def test_each_step_is_seen(pipe):
    seen = []
    call = dict(class_labels=[2], num_inference_steps=3, generator=generators([0]), output_type="latent")
    last = pipe(**call, callback_on_step_end=lambda *step: seen.append(step)).images
    assert [step[:2] for step in seen] == [(pipe, 0), (pipe, 1), (pipe, 2)] and seen[-1][2] == 0
    assert torch.equal(seen[-1][3]["latents"], last)


def test_an_unconditional_network():
    pipe = quiet(EDM2Pipeline(tiny_net(0, img_channels=3)))
    assert len(pipe(batch_size=3, num_inference_steps=1).images) == 3
    with pytest.raises(ValueError, match="class_labels: the network is unconditional"):
        pipe(class_labels=[1])


def test_it_guides_itself_if_it_was_trained_so(tmp_path):
    """Which its folder remembers."""
    net = tiny_net(img_channels=3)
    call = dict(class_labels=[2], num_inference_steps=2, guidance_scale=2.0, output_type="latent")
    pipe = quiet(EDM2Pipeline(net, label_dropout=0.1))
    itself = pipe(**call, generator=generators([4])).images
    pipe.save_pretrained(tmp_path, dtype=torch.float32)
    again = quiet(EDM2Pipeline.from_pretrained(tmp_path))
    assert torch.equal(itself, again(**call, generator=generators([4])).images)
    (batch,) = edm2.generate_images(net, [4], edm2.Unlabelled(net), [2], guidance=2, num_steps=2)
    assert torch.equal(itself, batch.latents)
    with pytest.raises(ValueError, match="needs a guide network"):
        quiet(EDM2Pipeline(net))(**call)


class TestFolders:
    def test_round_trip(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path / "folder", dtype=torch.float32)
        again = quiet(EDM2Pipeline.from_pretrained(tmp_path / "folder"))
        call = dict(class_labels=[4], num_inference_steps=2, output_type="latent")
        assert torch.equal(again(**call, generator=generators([1])).images, pipe(**call, generator=generators([1])).images)
        assert json.loads((tmp_path / "folder" / "model_index.json").read_text())["guidance_scale"] == 1.5

    def test_a_snapshot_alone(self, net):
        """As training writes it."""
        pipe = quiet(EDM2Pipeline.from_pretrained(net))
        batch = generated(pipe, [9], class_idx=[1], num_steps=2)
        np.testing.assert_array_equal(np.asarray(pipe(1, 2, generator=generators([9])).images[0]), batch.images[0])

    def test_latents_with_their_vae(self, tmp_path):
        """In the folder, and on the way through another one."""
        encoder = LatentEncoder(pixel_range=(-1, 1))
        vae = load_vae(encoder, save_tiny(tmp_path / "vae"))
        network = tiny_net(img_channels=4)
        pipe = quiet(EDM2Pipeline(network, vae=vae.vae, encoder=encoder.config()))
        image = np.asarray(pipe(1, 2, generator=generators([9])).images[0])
        (batch,) = edm2.generate_images(network, [9], class_idx=1, encoder=vae, num_steps=2)
        np.testing.assert_array_equal(image, batch.images[0])
        pipe.save_pretrained(tmp_path / "folder", dtype=torch.float32)
        again = quiet(EDM2Pipeline.from_pretrained(tmp_path / "folder"))
        np.testing.assert_array_equal(image, np.asarray(again(1, 2, generator=generators([9])).images[0]))
        alone = quiet(EDM2Pipeline.from_pretrained(tmp_path / "folder" / "net.safetensors", vae=tmp_path / "vae"))
        np.testing.assert_array_equal(image, np.asarray(alone(1, 2, generator=generators([9])).images[0]))

    def test_what_is_no_folder_of_a_pipeline(self, pipe, tmp_path):
        with pytest.raises(edm2.UserError, match="holds no pipeline$"):
            EDM2Pipeline.from_pretrained(tmp_path)
        edm2.save_snapshot(tmp_path / "network-snapshot-1.safetensors", pipe.net)
        with pytest.raises(edm2.UserError, match=r"holds no pipeline; give one of its networks, e.g. .*/network-snapshot-1.safetensors"):
            EDM2Pipeline.from_pretrained(tmp_path)
        pipe.save_pretrained(tmp_path)
        (tmp_path / "model_index.json").write_text("{}")
        with pytest.raises(edm2.UserError, match="model_index.json is damaged"):
            EDM2Pipeline.from_pretrained(tmp_path)

    def test_a_folder_used_before(self, pipe, tmp_path):
        """What another pipeline left there is no part of this one."""
        pipe.save_pretrained(tmp_path)
        EDM2Pipeline(pipe.net, fast=True).save_pretrained(tmp_path)
        again = EDM2Pipeline.from_pretrained(tmp_path)
        assert again.gnet is None and again.config.fast and not EDM2Pipeline.from_pretrained(tmp_path, fast=False).config.fast


def test_components_may_be_replaced_and_changed(pipe):
    """The next call is that of a pipeline of the new ones."""
    call = dict(class_labels=[2], num_inference_steps=2, output_type="latent", guidance_scale=2.0)

    def current():
        images = pipe(**call, generator=generators([0])).images
        fresh = quiet(EDM2Pipeline(pipe.net, pipe.gnet))(**call, generator=generators([0])).images
        assert torch.equal(images, fresh)
        return images

    seen = [current()]
    pipe.net = tiny_net(img_channels=3, gains=0.3)
    seen.append(current())
    pipe.gnet = tiny_net(img_channels=3, gains=0.1)
    seen.append(current())
    with torch.no_grad():
        pipe.net.unet.out_gain.fill_(0.4)
    seen.append(current())
    assert all(relative_error(a, b) > 1e-4 for i, a in enumerate(seen) for b in seen[:i])


def test_churn_draws_from_the_generators_too(pipe):
    """As `generate_images` does."""
    call = dict(class_labels=[3], num_inference_steps=3, S_churn=10, output_type="latent")
    expected = generated(pipe, [5], class_idx=3, num_steps=3, guidance=1.5, S_churn=10)
    for _ in range(2):
        assert torch.equal(pipe(**call, generator=generators([5])).images, expected.latents)
    one, two = (pipe(**call, generator=torch.Generator().manual_seed(5)).images for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("fast", [False, True])
def test_fast_or_the_same_bits(fast):
    pipe = quiet(EDM2Pipeline(tiny_net(img_channels=3), fast=fast))
    one, eight = (pipe(1, 2, generator=generators(range(n)), batch_size=n, output_type="latent").images for n in (1, 8))
    assert type(pipe._made["denoiser"][1]) is (Folded if fast else Chunked)
    assert fast or torch.equal(one[0], eight[0])


def test_it_moves():
    pipe = EDM2Pipeline(tiny_net(img_channels=3), tiny_net(0, img_channels=3)).to("meta")
    assert pipe.device.type == pipe.net.device.type == pipe.gnet.device.type == "meta"


def test_a_vae_without_an_encoder_decodes_latents(tmp_path):
    """Those of the official statistics; `components` make a pipeline, as those of diffusers do."""
    pipe = EDM2Pipeline(tiny_net(img_channels=4), vae=load_vae(LatentEncoder(), save_tiny(tmp_path)).vae)
    again = quiet(EDM2Pipeline(**pipe.components))
    assert again(1, 1).images[0].size == (32, 32) and again.vae is pipe.vae
    again.to(torch.bfloat16)(1, 1)
    assert {p.dtype for p in pipe.vae.parameters()} == {torch.float32}


def test_types_are_what_networks_compute_in(pipe):
    """Their parameters stay fp32, and images change by roundings."""
    call = dict(class_labels=[2], num_inference_steps=2, output_type="latent")
    before = pipe(**call, generator=generators([0])).images
    assert pipe.dtype == torch.float32
    assert pipe.to(torch.bfloat16) is pipe and pipe.dtype == torch.bfloat16 and pipe.to("cpu", dtype=torch.bfloat16) is pipe
    after = pipe(**call, generator=generators([0])).images
    assert {p.dtype for p in pipe.net.parameters()} == {torch.float32} and after.dtype == torch.float32
    assert 1e-5 < relative_error(after, before) < 0.1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "class_labels: the network needs a class for each image"),
        ({"class_labels": [5]}, r"class_labels: expected integers from 0 to 4, got \[5\]"),
        ({"class_labels": []}, "class_labels: expected integers"),
        ({"class_labels": [0.5]}, "class_labels: expected integers"),
        ({"class_labels": [1], "latents": torch.zeros(2, 3, 8, 8)}, r"latents: expected \[1, 3, 8, 8\], got \[2, 3, 8, 8\]"),
        ({"class_labels": [1, 2], "batch_size": 4}, "batch_size: there are 2 class_labels, got 4"),
        ({"class_labels": [1], "output_type": "jpeg"}, "output_type: expected one of pil, np, pt, latent, got 'jpeg'"),
        ({"class_labels": [1], "num_inference_steps": 0}, "num_steps must be at least 1"),
    ],
)
def test_bad_calls(pipe, call, words):
    with pytest.raises(ValueError, match=words):
        pipe(**call)


def test_without_diffusers():
    """One line says what to install."""
    code = "try: import edm2.pipeline\nexcept ImportError as e: print(e)"
    told = python(without("diffusers") + code)
    assert re.fullmatch(r"edm2.pipeline needs diffusers \(.*\): pip install 'edm2-triton\[vae\]'\n", told)


def test_latents_without_a_vae():
    pipe = quiet(EDM2Pipeline(tiny_net(img_channels=4), encoder=LatentEncoder().config()))
    assert pipe(1, 1, output_type="latent").images.shape == (1, 4, 8, 8)
    with pytest.raises(ValueError, match="the pipeline has no VAE"):
        pipe(1, 1)
    with pytest.raises(ValueError, match="4 channels are no pixels"):
        quiet(EDM2Pipeline(tiny_net(img_channels=4)))(1, 1)
