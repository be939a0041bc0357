"""What Gymnasium's spaces are for the scripts: arrays of one shape, and actions within bounds.

It imports no JAX: processes that step environments (`rows.py`) import it.
"""

import math

import numpy as np
from gymnasium import spaces

WRAPPERS = "gymnasium.wrappers"
AXES = ("HWC", "CHW")


def entries_of(space, path=()) -> list:
    """The `(path, space)` of all arrays in a space; the path has the keys of dictionaries.

    Text is left out, as the "mission" of MiniGrid. Raises ValueError for what is no array.
    """
    if isinstance(space, spaces.Dict):
        entries = []
        for key, entry in space.spaces.items():
            if key != "mission" and not isinstance(entry, spaces.Text):
                entries += entries_of(entry, (*path, key))
        return entries
    kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    if not isinstance(space, kinds):
        raise ValueError(
            f"env_name: observations of {space}{where(path)} are neither arrays nor dictionaries "
            f"of arrays: see {WRAPPERS}.FlattenObservation and TransformObservation"
        )
    return [(path, space)]


def where(path) -> str:
    return f" (entry {'.'.join(map(str, path))})" if path else ""


def is_bytes(space) -> bool:
    """Whether the numbers are brightnesses from 0 to 255, which networks take divided by 255."""
    return space.dtype == np.uint8 and isinstance(space, spaces.Box) and space.high.max() == 255


def axes_of(shape) -> str:
    """HWC or CHW for the shape of an image; empty if it may be both.

    The channels are fewer than rows and columns, or the image is square. If the channels come
    first, it must be both: channels come last by convention.
    """
    if shape[2] < min(shape[:2]):
        return "HWC"
    if shape[0] < shape[1] == shape[2]:
        return "CHW"
    if shape[0] == shape[1] != shape[2]:
        return "HWC"
    return ""


class Observations:
    """Observations of a Gymnasium space as one array.

    The array has `shape` and `dtype`. `num_states` is the size of a discrete space, 0 for arrays.
    `note` says in one sentence what was done to images.

    Images are [H, W, C]. Bytes stay bytes if they are all that is observed. A dictionary becomes a
    vector of float32, with its bytes divided by 255. So does a single number.

    Raises ValueError for spaces that no script takes. `image_axes` is HWC, CHW or empty.
    """

    def __init__(self, space, image_axes: str = ""):
        if image_axes and image_axes not in AXES:
            raise ValueError(f"env_params: image_axes = {image_axes}: must be HWC or CHW")
        self.entries = entries_of(space)
        self.parts = [
            (path, part, math.prod(part.shape), is_bytes(part)) for path, part in self.entries
        ]
        if not self.entries:
            raise ValueError(f"env_name: observations of {space} have no numbers")
        self.num_states = 0
        self.channels_first = False
        self.is_grey = False
        self.note = ""
        is_image = False
        only = self.entries[0][1]
        is_number = only.shape == () and not isinstance(only, spaces.Discrete)
        self.is_vector = len(self.entries) > 1 or is_number
        if self.is_vector:
            self.shape = (sum(size for _, _, size, _ in self.parts),)
            self.dtype = np.dtype(np.float32)
        else:
            is_image = self.alone(only, image_axes)
        if image_axes and not is_image:
            raise ValueError(
                f"env_params: image_axes = {image_axes}: observations of {space} are not images"
            )

    def alone(self, space, image_axes: str) -> bool:
        """The only entry is the observation itself. Returns whether it is an image of channels."""
        self.shape = space.shape
        self.dtype = np.dtype(np.uint8 if is_bytes(space) else np.float32)
        if isinstance(space, spaces.Discrete):
            self.num_states = int(space.n)
            self.dtype = np.dtype(np.int32)
            return False
        if is_bytes(space) and len(space.shape) > 3:
            raise ValueError(
                f"env_name: observations of {space} have more axes than an image [H, W, C]: "
                f"see {WRAPPERS}.GrayscaleObservation and TransformObservation"
            )
        if is_bytes(space) and len(space.shape) == 2:
            self.is_grey = True
            self.shape = (*space.shape, 1)
            self.note = f"grey images [H, W] = {list(space.shape)} are [H, W, 1] here"
        if len(space.shape) != 3:
            return False
        axes = image_axes or axes_of(space.shape)
        if not axes:
            raise ValueError(
                f"env_params: image_axes must be given for observations of shape {space.shape}, "
                "HWC or CHW: it cannot be seen which axis has the channels"
            )
        if axes == "CHW":
            channels, height, width = space.shape
            self.channels_first = True
            self.shape = (height, width, channels)
            self.note = (
                f"images [C, H, W] = {list(space.shape)} are brought to "
                f"[H, W, C] = {list(self.shape)}"
            )
        return True

    def write(self, out, obs) -> None:
        """Write observations into `out` [..., *shape]. `obs` has the same axes in front."""
        if not self.is_vector:
            path, space, *_ = self.parts[0]
            array = np.asarray(look_up(obs, path))
            if hasattr(space, "start"):
                array = array - space.start
            if self.channels_first:
                array = np.moveaxis(array, -3, -1)
            if self.is_grey:
                array = array[..., None]
            out[...] = array
            return
        first = 0
        for path, space, size, is_brightness in self.parts:
            part = np.reshape(look_up(obs, path), (*out.shape[:-1], size))
            if is_brightness:
                part = part / np.float32(255)
            elif hasattr(space, "start"):
                part = part - np.ravel(space.start)
            out[..., first : first + size] = part
            first += size

    def read(self, obs, number: int):
        """Observations of `number` environments, as an array [number, *shape]."""
        out = np.empty((number, *self.shape), self.dtype)
        self.write(out, obs)
        return out

    def check(self, obs) -> None:
        """Raise ValueError if the observation of one environment is not of its space."""
        for path, space in self.entries:
            try:
                array = np.asarray(look_up(obs, path))
            except (KeyError, TypeError, IndexError):
                raise ValueError(
                    f"env_name: an observation lacks what its observation_space has{where(path)}: "
                    f"{space}"
                ) from None
            if array.shape != space.shape or not is_kind_of(array.dtype, space):
                raise ValueError(
                    f"env_name: an observation has shape {array.shape} and dtype {array.dtype}, "
                    f"and its observation_space {space.shape} and {space.dtype}{where(path)}"
                )


def is_kind_of(dtype, space) -> bool:
    """Whether numbers of a dtype can be given for a space without a change of their meaning.

    Numbers may be more or less precise, and whole numbers may be given as floats of a Box. Bytes
    are given for bytes alone, because networks take them divided by 255.
    """
    if dtype.kind not in "biuf":
        return False
    if is_bytes(space):
        return dtype == np.uint8
    if space.dtype.kind == "f":
        return dtype != np.uint8
    return dtype.kind != "f"


def look_up(obs, path):
    """The entry of nested dictionaries."""
    for key in path:
        obs = obs[key]
    return obs


class Actions:
    """Actions of the scripts as actions of a Gymnasium space.

    Raises ValueError for actions that no script has. `num_actions` is 0 for continuous actions,
    which lie between `low` and `high`. Bounds near the largest float of the space are infinite.
    """

    def __init__(self, space):
        self.space = space
        self.num_actions = 0
        if isinstance(space, spaces.Discrete):
            self.num_actions = int(space.n)
            return
        if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
            raise ValueError(
                f"env_name: actions of {space} are neither one number nor a vector of real "
                f"numbers: see {WRAPPERS}.TransformAction"
            )
        largest = np.finfo(space.low.dtype).max / 2
        with np.errstate(over="ignore"):
            low = np.asarray(space.low, np.float32)
            high = np.asarray(space.high, np.float32)
        self.low = np.where(space.low <= -largest, -np.float32(np.inf), low)
        self.high = np.where(space.high >= largest, np.float32(np.inf), high)

    def __call__(self, actions):
        """Actions [n, ...] in the dtype and in the bounds of the space."""
        space = self.space
        if self.num_actions:
            return (actions + space.start).astype(space.dtype)
        # after the cast: a bound such as 0.7 is another number in float64
        return np.clip(actions.astype(space.dtype), space.low, space.high)
