"""Branch and spatial parallelism: the devices of a group share the work on an image.

Each device holds the whole latents and repeats what is little work: scheduler, guidance, masks.
UNet and VAE compute some branches of guidance or some rows, and the results are gathered:

    apply = parallel_apply(choose_axes(layout, unet, num_branches=2, height=64), unet)
    prediction = apply(variables, *arguments).sample

models/spatial_parallelism.py has the exchanges between rows inside the models.
"""

from typing import NamedTuple

import jax


class ParallelAxes(NamedTuple):
    """The mesh's axes along which the UNet's work is split, inside of Layout.map.

    Fields:
        branches: axis along which the branches of guidance are split; None: each device computes
            all of them.
        rows: axis, or tuple of axes, along which the rows are split; None: each device has all.
    """

    branches: str | None = None
    rows: str | tuple | None = None

    def split(self, arguments):
        """This device's slices of the UNet's arguments.

        They are the sample (branches * B, C, h, w), t, and trees of arrays: (branches * B, ...) in
        the order of the sample's, of four axes if they have rows; or scalars, or None.
        """
        (sample, *others), batch = arguments, len(arguments[0])

        def local(x, is_sample=False):
            if x.ndim and len(x) == batch:
                x = self.local_branches(x)
            if self.rows and x.ndim == 4 and (is_sample or x.shape[1:3] != (1, 1)):
                x = local_slice(x, self.rows, 2 if is_sample else 1)
            return x

        return [local(sample, True), *jax.tree.map(local, others)]

    def local_branches(self, x):
        """This device's branches of x, (branches * B, ...)."""
        return local_slice(x, self.branches, 0) if self.branches else x

    def gather(self, prediction):
        """The whole prediction, (branches * B, C, h, w), from the devices' slices."""
        if self.rows:
            prediction = jax.lax.all_gather(prediction, self.rows, axis=2, tiled=True)
        if self.branches:
            prediction = jax.lax.all_gather(prediction, self.branches, axis=0, tiled=True)
        return prediction

    def num_local_branches(self, num_branches):
        """How many of the branches this device computes."""
        return num_branches // (jax.lax.axis_size(self.branches) if self.branches else 1)

    def mean_of_branches(self, x):
        """The mean of x over the devices among which the branches are split."""
        return jax.lax.pmean(x, self.branches) if self.branches else x


def check_parallel(layout, unet, branches, height, factor):
    """Raise a ValueError unless the layout divides an image's branches and rows evenly.

    Args:
        layout: Layout.
        unet: FlaxUNet2DConditionModel.
        branches: of guidance, names.
        height: of the image, pixels.
        factor: pixels per latent along a side.
    """
    if len(branches) % layout.branches:
        raise ValueError(
            f"branches={layout.branches} does not divide the number of branches of guidance, "
            f"{len(branches)} ({', '.join(branches)})"
        )
    unit = factor * row_multiple(unet) * layout.rows
    if layout.rows > 1 and height % unit:
        raise ValueError(
            f"rows={layout.rows} does not divide a height of {height} pixels; take a multiple of "
            f"{unit}, or other rows"
        )


def is_first_of_group():
    """Whether this device is the first of its group, inside of Layout.map."""
    return (jax.lax.axis_index("branches") == 0) & (jax.lax.axis_index("rows") == 0)


def local_slice(x, axis_name, axis):
    """This device's slice of x along an axis; axis_name: the mesh's axis, or a tuple of axes."""
    size = x.shape[axis] // jax.lax.axis_size(axis_name)
    start = jax.lax.axis_index(axis_name) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def choose_axes(layout, unet, num_branches, height, rows_on_branches=True):
    """The ParallelAxes of a call of the UNet.

    Args:
        layout: Layout or None.
        unet: FlaxUNet2DConditionModel.
        num_branches: that the call computes; if the layout's do not divide them, each device
            computes all.
        height: rows of the latents.
        rows_on_branches: whether rows may be split along the axis of branches instead.
    """
    if layout is None:
        return ParallelAxes()
    if layout.branches > 1 and num_branches % layout.branches == 0:
        return ParallelAxes("branches", "rows" if layout.rows > 1 else None)
    unit = row_multiple(unet)
    names = row_axes(layout, 1 if height % unit else height // unit, rows_on_branches)
    return ParallelAxes(None, names)


def parallel_apply(axes, unet):
    """Like unet.apply, but each device of a group computes its share, by ParallelAxes."""
    unet = unet.clone(rows_axis=axes.rows)

    def apply(variables, *arguments, timestep_cond=None):
        *arguments, timestep_cond = axes.split((*arguments, timestep_cond))
        output = unet.apply(variables, *arguments, timestep_cond=timestep_cond)
        return output.replace(sample=axes.gather(output.sample))

    return apply


def row_multiple(unet):
    """The factor by which a UNet divides heights; each device has a multiple of it in rows."""
    return 2 ** (len(unet.block_out_channels) - 1)


def row_axes(layout, height, rows_on_branches=True):
    """The mesh's axes with the most devices among which rows can be split evenly; None: none.

    height: number of rows, or of groups of rows that stay together.
    """
    candidates = [("rows", layout.rows)]
    if rows_on_branches:
        candidates += [("branches", layout.branches), (("branches", "rows"), layout.group_size)]
    fitting = [(n, names) for names, n in candidates if n > 1 and height % n == 0]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def num_row_devices(layout, height):
    """Among how many devices of a group the rows of a VAE's latents are split; see row_axes."""
    names = row_axes(layout, height)
    return {None: 1, "rows": layout.rows, "branches": layout.branches}.get(names, layout.group_size)


def map_rows(layout, function, model, x, height, axis, out_axis):
    """function(model, x), with the rows split among the devices of a group if they divide them.

    Args:
        layout: Layout.
        function: (model, rows of x) -> a tree of arrays; it keeps rows in order.
        model: FlaxAutoencoderKL or FlaxAutoencoderTiny; the function gets it with a rows_axis.
        x: array with rows along `axis`.
        height: rows of the latents; x may have several for each.
        axis, out_axis: of the rows of x and of the result.
    """
    if (names := row_axes(layout, height)) is None:
        return function(model, x)
    local = function(model.clone(rows_axis=names), local_slice(x, names, axis))
    return jax.tree.map(lambda y: jax.lax.all_gather(y, names, axis=out_axis, tiled=True), local)
