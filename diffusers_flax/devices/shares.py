"""What the devices of a group share of the work on an image: branches of guidance, and rows.

All of them have the whole latents and do what is little work: scheduler, guidance, masks. UNet and
VAE compute a part, and the parts of the result are put together:

    apply = shared_apply(layout, unet, num_branches=2, height=64)
    prediction = apply(variables, *arguments).sample

Source: rows, DistriFusion (arXiv 2402.19481); see rows.py.
"""

from typing import NamedTuple

import jax


class Share(NamedTuple):
    """The part of the UNet's batch and rows that a device computes, inside of Layout.map.

    Fields:
        branches: name of the mesh's axis whose devices have equal parts of the branches; None: each
            device computes all.
        rows: name, or names, of the axes whose devices have equal parts of the rows; None: all.
    """

    branches: str | None = None
    rows: str | tuple | None = None

    def take(self, arguments):
        """This device's part of the UNet's arguments.

        Args:
            arguments: sample (branches * B, C, h, w), t, and trees of arrays: (branches * B, ...)
                in the order of the sample's, of four axes if they have rows, (branches * B, h, w,
                C) or (branches * B, 1, 1, C); or scalars, or None.
        """
        (sample, *rest), batch = arguments, len(arguments[0])

        def part(x, is_sample=False):
            if self.branches and x.ndim and len(x) == batch:
                x = part_of(x, self.branches, 0)
            if self.rows and x.ndim == 4 and (is_sample or x.shape[1:3] != (1, 1)):
                x = part_of(x, self.rows, 2 if is_sample else 1)
            return x

        return [part(sample, True), *jax.tree.map(part, rest)]

    def join(self, prediction):
        """The whole prediction, (branches * B, C, h, w), of the devices' parts."""
        if self.rows:
            prediction = jax.lax.all_gather(prediction, self.rows, axis=2, tiled=True)
        if self.branches:
            prediction = jax.lax.all_gather(prediction, self.branches, axis=0, tiled=True)
        return prediction

    def num_branches(self, num_branches):
        """How many of the branches this device computes."""
        return num_branches // (jax.lax.axis_size(self.branches) if self.branches else 1)

    def mean(self, x):
        """The mean of x over the devices that have parts of the branches."""
        return jax.lax.pmean(x, self.branches) if self.branches else x


def check_parallel(layout, unet, branches, height, factor):
    """Raise a ValueError for branches and rows of a Layout that an image cannot be parted into.

    Args:
        layout: Layout.
        unet: FlaxUNet2DConditionModel.
        branches: of guidance, names.
        height: of the image, pixels.
        factor: pixels per latent along a side.
    """
    n, names = layout.branches, ", ".join(branches)
    if len(branches) % n:
        fitting = [i for i in range(1, len(branches) + 1) if len(branches) % i == 0]
        raise ValueError(
            f"--parallel branches={n} does not divide the number of branches of guidance, "
            f"{len(branches)} ({names}); take branches={' or '.join(map(str, fitting))}"
        )
    unit = factor * rows_together(unet) * layout.rows
    if layout.rows > 1 and height % unit:
        near = [k * unit for k in (height // unit, height // unit + 1) if k]
        raise ValueError(
            f"--parallel rows={layout.rows} does not divide a height of {height} pixels, which "
            f"must be a multiple of {unit}; take a height of "
            f"{' or '.join(map(str, near))}, or other rows"
        )


def is_first_of_group():
    """Whether this device is the first of its group, inside of Layout.map."""
    return (jax.lax.axis_index("branches") == 0) & (jax.lax.axis_index("rows") == 0)


def part_of(x, axis_name, axis):
    """The part of an array, along an axis, of this device on one or several axes of the mesh."""
    size = x.shape[axis] // jax.lax.axis_size(axis_name)
    start = jax.lax.axis_index(axis_name) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def share_of(layout, unet, num_branches, height, spread=True):
    """The Share of a call of the UNet.

    Args:
        layout: Layout or None.
        unet: FlaxUNet2DConditionModel.
        num_branches: that the call computes; if the layout's do not divide them, each device
            computes all.
        height: rows of the latents.
        spread: whether devices along the branches may have parts of the rows instead.
    """
    if layout is None:
        return Share()
    if layout.branches > 1 and num_branches % layout.branches == 0:
        return Share("branches", "rows" if layout.rows > 1 else None)
    unit = rows_together(unet)
    names = row_axes(layout, 1 if height % unit else height // unit, spread)
    return Share(None, names)


def shared_apply(layout, unet, num_branches, height):
    """Like unet.apply, but each device of a group computes its Share; arguments as for share_of."""
    share = share_of(layout, unet, num_branches, height)
    unet = unet.clone(rows_axis=share.rows)

    def apply(variables, *arguments, timestep_cond=None):
        *arguments, timestep_cond = share.take((*arguments, timestep_cond))
        output = unet.apply(variables, *arguments, timestep_cond=timestep_cond)
        return output.replace(sample=share.join(output.sample))

    return apply


def rows_together(model):
    """How many rows of its input a UNet reduces to one; a device has a multiple of them."""
    return 2 ** (len(model.block_out_channels) - 1)


def row_axes(layout, height, spread=True):
    """The axes of the mesh, as many devices as possible, whose number divides a height; None: none.

    Args:
        layout: Layout.
        height: number of rows, or of groups of rows that stay together.
        spread: as for share_of.
    """
    candidates = [("rows", layout.rows)]
    if spread:
        candidates += [("branches", layout.branches), (("branches", "rows"), layout.group_size)]
    fitting = [(n, names) for names, n in candidates if n > 1 and height % n == 0]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def num_devices_of_rows(layout, height):
    """How many devices of a group have parts of the rows of a VAE's latents; 1: all have all.

    layout, height: as for row_axes.
    """
    names = row_axes(layout, height)
    return {None: 1, "rows": layout.rows, "branches": layout.branches}.get(names, layout.group_size)


def map_rows(layout, function, model, x, height, axis, out_axis):
    """function(model, x); each device of a group computes a part of the rows, if they divide.

    Args:
        layout: Layout.
        function: (model, a part of x) -> a tree of arrays; it keeps rows in order.
        model: FlaxAutoencoderKL or FlaxAutoencoderTiny; the function gets it with a rows_axis.
        x: array with rows along `axis`.
        height: rows of the latents; x may have several for each.
        axis, out_axis: of the rows of x and of the result.
    """
    if (names := row_axes(layout, height)) is None:
        return function(model, x)
    parts = function(model.clone(rows_axis=names), part_of(x, names, axis))
    return jax.tree.map(lambda y: jax.lax.all_gather(y, names, axis=out_axis, tiled=True), parts)
