# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scan, its labels, the two halves and the patches to train on.

The scan is the MNI152 template (ICBM 152 nonlinear symmetric 2009a): the average of the T1 images of 152 people, in the version
that the nilearn package ships, which is skull-stripped. The probability maps of grey and white matter come with it.

That template is symmetric: its right half is the mirror image of its left half, voxel by voxel. A network that is trained on one
and tested on the other has all but seen the answers. So the halves here are the back and the front of the brain.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np

CLASSES = ("background", "grey matter", "white matter")
RESOLUTION = 2  # mm
AXIS = 1  # of the volume: 0 left to right, 1 back to front, 2 bottom to top
GAP = 4  # voxels between the halves that belong to neither


class Volume(NamedTuple):
    """A scan and its labels.

    Attributes:
        image: [X, Y, Z] float32, T1 intensity from 0, outside the brain, to 1.
        labels: [X, Y, Z] int32, an index into CLASSES.
        brain: [X, Y, Z] bool, where the template has a brain.
        first_slice: the place of the first slice along AXIS in the whole volume.
    """

    image: np.ndarray
    labels: np.ndarray
    brain: np.ndarray
    first_slice: int = 0


def load() -> Volume:
    """The whole template at RESOLUTION, from the files in the nilearn package: nothing is downloaded."""
    t1, grey, white = (_coarse(read(name)) for name in ("t1", "gm", "wm"))
    return Volume(t1, label(grey, white), t1 > 0.05)


def label(grey: np.ndarray, white: np.ndarray) -> np.ndarray:
    """The tissue whose probability is the larger and above one half, or background: fluid, no brain, or undecided."""
    tissue = np.where(grey >= white, 1, 2)
    return np.where(np.maximum(grey, white) > 0.5, tissue, 0).astype(np.int32)


def halves(whole: Volume) -> tuple[Volume, Volume]:
    """The back half to train on and the front half to test on, with GAP voxels between them."""
    size = whole.image.shape[AXIS]
    middle = size // 2
    return _part(whole, 0, middle - GAP // 2), _part(whole, middle - GAP // 2 + GAP, size)


def patches(volume: Volume, count: int, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random cubes that lie in the volume, around voxels of the brain: [count, size, size, size, 1] and their labels."""
    centres = np.argwhere(volume.brain)
    corners = centres[rng.integers(len(centres), size=count)] - size // 2
    corners = np.clip(corners, 0, np.array(volume.image.shape) - size)
    cubes = [tuple(slice(c, c + size) for c in corner) for corner in corners]
    return np.stack([volume.image[c] for c in cubes])[..., None], np.stack([volume.labels[c] for c in cubes])


def _part(whole: Volume, start: int, stop: int) -> Volume:
    cut = [slice(None)] * 3
    cut[AXIS] = slice(start, stop)
    return Volume(*(array[tuple(cut)] for array in whole[:3]), first_slice=start)


def read(name: str) -> np.ndarray:
    """One image at 1 mm, from 0 to 1. The package is located but not imported, which takes seconds."""
    package = importlib.util.find_spec("nilearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("The demo reads its scan from the nilearn package: pip install nilearn.")
    file = Path(package.origin).parent / "datasets" / "data" / f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz"
    return np.asarray(nibabel.load(file).dataobj, np.float32) / 255  # all three are stored as bytes


def _coarse(image: np.ndarray) -> np.ndarray:
    """Means over cubes of RESOLUTION voxels; what is left over at the end of an axis is empty and falls away."""
    x, y, z = (n // RESOLUTION for n in image.shape)
    cut = image[: x * RESOLUTION, : y * RESOLUTION, : z * RESOLUTION]
    return cut.reshape(x, RESOLUTION, y, RESOLUTION, z, RESOLUTION).mean((1, 3, 5))
