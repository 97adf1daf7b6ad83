# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The pieces of examples/brain_unet: its data, its two networks, a few training steps, Dice, and its pictures."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from flax import nnx

import jax_nki3d


def rngs():
    return nnx.Rngs(jax.random.key(0, impl="rbg"))  # compiles faster


@pytest.fixture(scope="module")
def demo():
    """The demo's modules, which import each other by plain names, as in a user's folder."""
    names = ("data", "linen_model", "model", "train", "pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "examples" / "brain_unet")
        modules = {name: importlib.import_module(name) for name in names}
        for name in names:
            patch.delitem(sys.modules, name)  # what is called `data` elsewhere is another module
    return SimpleNamespace(**modules)


@pytest.fixture(scope="module")
def whole(demo):
    return demo.data.load()


@pytest.fixture(autouse=True)
def _flax_and_optax_promote():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_labels_follow_the_larger_probability(demo):
    grey, white = np.float32([0.9, 0.1, 0.3, 0.6, 0.0]), np.float32([0.1, 0.8, 0.4, 0.3, 0.0])
    assert demo.data.label(grey, white).tolist() == [1, 2, 0, 1, 0]


def test_the_brain_has_plausible_tissues(demo, whole):
    image, labels, brain, _ = whole
    assert image.dtype == np.float32
    assert 0.0 <= image.min() < 0.01 < 0.95 < image.max() <= 1.0
    litres = [(labels == label).sum() * demo.data.RESOLUTION**3 * 1e-6 for label in (1, 2)]
    assert 0.8 < litres[0] < 1.3  # grey matter of an adult
    assert 0.4 < litres[1] < 0.8  # white matter
    # in a T1 image white matter is the brightest, and what lies outside the tissues is fluid or nothing
    background, grey, white = (np.median(image[brain & (labels == label)]) for label in range(3))
    assert background < grey < white


def test_the_template_is_its_own_mirror_image_which_is_why_halves_are_back_and_front(demo, whole):
    np.testing.assert_allclose(demo.data.read("t1")[::-1], demo.data.read("t1"), atol=0)
    back, front = demo.data.halves(whole)
    for half in (back, front):
        assert half.image.shape[0] == whole.image.shape[0]
    assert not np.array_equal(back.labels, front.labels[:, ::-1])


def test_halves_are_disjoint_and_patches_stay_in_theirs(demo, whole):
    place = np.broadcast_to(np.arange(whole.image.shape[1], dtype=np.float32)[:, None], whole.image.shape)
    back, front = demo.data.halves(whole._replace(image=place))
    assert back.image.max() + demo.data.GAP + 1 == front.image.min()
    assert front.first_slice == front.image.min()
    assert not np.shares_memory(back.labels, front.labels)
    image, labels = demo.data.patches(back, 50, 32, np.random.default_rng(0))
    assert image.shape == (50, 32, 32, 32, 1)
    assert labels.shape == (50, 32, 32, 32)
    assert set(np.unique(image)) <= set(np.unique(back.image))


def test_dice_on_known_values(demo):
    truth = np.array([0, 1, 1, 1, 2, 2])
    assert demo.train.dice(truth, truth, 1) == 1.0
    assert demo.train.dice(np.array([0, 1, 1, 2, 2, 2]), truth, 1) == pytest.approx(2 * 2 / (2 + 3))
    assert demo.train.dice(np.array([0, 1, 1, 2, 2, 2]), truth, 2) == pytest.approx(2 * 2 / (3 + 2))
    # what labels everything grey, or nothing, does not pass for a good answer
    assert demo.train.dice(np.ones(6, int), truth, 1) == pytest.approx(6 / 9)
    assert demo.train.dice(np.zeros(6, int), truth, 1) == 0.0


@pytest.fixture(scope="module")
def batch(demo, whole):
    return demo.data.patches(demo.data.halves(whole)[0], 1, 8, np.random.default_rng(0))


def test_both_networks_have_the_same_parameters(demo, batch):
    model = demo.model.UNet(rngs=rngs())
    own = jax.eval_shape(demo.linen_model.UNet().init, jax.random.key(0), batch[0])["params"]
    chex.assert_trees_all_equal_shapes_and_dtypes(own, demo.train.linen_parameters(model))
    assert demo.train.count(own) == demo.train.count(nnx.state(model, nnx.Param))


def test_steps_lower_the_loss_as_in_the_reference(demo, batch):
    model, tx = demo.model.UNet(rngs=rngs()), demo.train.adamw(10)
    parameters = demo.train.linen_parameters(model)
    state, linen_step = tx.init(parameters), demo.train.linen_step(tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses, expected = [], []
    for _ in range(4):
        losses.append(float(demo.train.step(model, optimizer, *batch)))
        parameters, state, loss = linen_step(parameters, state, *batch)
        expected.append(float(loss))
    assert losses[-1] < losses[0]
    # the first compares outputs, the second gradients; later ones amplify rounding
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(losses[1], expected[1], rtol=1e-3)


def test_prediction_keeps_the_size(demo):
    predicted = demo.train.predict(demo.model.UNet(rngs=rngs()), np.zeros((6, 8, 7), np.float32))
    assert predicted.shape == (6, 8, 7)
    assert predicted.min() >= 0
    assert predicted.max() <= 2


def test_two_thresholds_separate_what_intensity_separates(demo):
    truth = np.repeat([0, 1, 2], 100)
    image = truth * 0.3 + np.random.default_rng(0).uniform(0, 0.2, 300)
    guess = np.digitize(image, demo.train.two_thresholds(image, truth))
    assert (guess == truth).mean() > 0.98  # they are among the intensities that occur


def test_pictures_are_written(demo, whole, tmp_path):
    _, front = demo.data.halves(whole)
    demo.pictures.draw_loss([3.0, 2.0, 1.0], tmp_path / "loss.png")
    demo.pictures.draw_labels(front, np.zeros_like(front.labels), [0.9, 0.0, 0.0], tmp_path / "labels.png", slices=1)
    for name in ("loss.png", "labels.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_three_steps_in_the_interpreter_equal_lax(demo):
    """The network of the demo, narrow, on a tiny volume: losses and gradients with the NKI kernels interpreted."""
    rng = np.random.default_rng(0)
    image, labels = rng.random((1, 4, 4, 8, 1), np.float32), rng.integers(0, 3, (1, 4, 4, 8))

    @nnx.jit
    def step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda model: demo.train.loss_of(model(image), labels))(model)
        optimizer.update(model, gradients)
        return loss, gradients

    def train(implementation):
        with jax_nki3d.options(implementation=implementation):
            model = demo.model.UNet(width=4, rngs=rngs())
            optimizer = nnx.Optimizer(model, demo.train.adamw(3), wrt=nnx.Param)
            losses, gradients = zip(*(step(model, optimizer) for _ in range(3)), strict=True)
        return np.stack(losses), [np.concatenate([g.ravel() for g in jax.tree.leaves(nnx.to_pure_dict(g))]) for g in gradients]

    (lax_losses, lax_gradients), (losses, gradients) = train("lax"), train("simulate")
    assert lax_losses[2] < lax_losses[0]
    np.testing.assert_allclose(losses, lax_losses, rtol=1e-4)
    for ours, theirs in zip(gradients, lax_gradients, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-3 * np.linalg.norm(theirs)
