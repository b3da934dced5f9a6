"""A layer as a value, without its weights: it states everything about itself, once.

- Geometry along one dim (kernels are square). `required_input`: the positions of an input that some outputs depend on.
  `output_size`: of an input's size. `output_edge`: where an edge between two ranks' inputs falls among the outputs
  (each to the rank that holds the middle of its input). Positions below 0 or beyond the size are padding.
- Channels: `output_channels`, `parameters`, and `multiply_adds` of an output pixel.
- Statistics: the images or pixels that it measures, if any: a part of the image cannot compute them alone.
- Autograd: what it keeps for the backward pass, what it writes over, and how gradients of its inputs are made.

Methods take one value for each input, in their order. The defaults here hold for a layer of single pixels; the layers
in the files beside this one override them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from tiledseg.geometry.box import Interval

Shape = tuple[int, int, int]  # (channels, height, width)


@dataclass(frozen=True)
class Layer:
    """A layer that works pixel by pixel on one tensor: geometry and channels unchanged, no weights."""

    asks_place: ClassVar[bool] = False  # its weights differ from place to place, so it takes the place of a part
    overwrites: ClassVar[bool] = False  # it can write its output over its input, and then keeps this one tensor
    keeps_output: ClassVar[bool] = False  # the backward pass needs its output
    owns_gradient: ClassVar[bool] = False  # its backward pass makes new gradients of its inputs, which may be added to
    straightens_gradient: ClassVar[bool] = False  # its backward pass copies an output's gradient of another layout
    can_rebuild: ClassVar[bool] = True  # one rank alone can recompute its output; of norms the statistics are kept
    is_flat: ClassVar[bool] = False  # all pixels of its output are one in memory

    @property
    def arity(self) -> int:
        """The number of its inputs."""
        return 1

    # Geometry.

    def required_input(self, out: Interval, index: int = 0) -> Interval:
        """Return the positions of input `index` that the outputs `out` depend on."""
        return out

    def within(self, read: Interval, size: int) -> Interval:
        """Return the part of an input of `size` positions that it takes to read `read`, maybe beyond the ends."""
        return read.clip(Interval(0, size))

    def output_size(self, size: int, *others: int) -> int:
        """Return the number of outputs for inputs of these sizes. Raises GeometryError where these do not fit."""
        return size

    def output_edge(self, edge: int, *others: int) -> int:
        """Return where an edge between two ranks' inputs falls among the outputs."""
        return edge

    @property
    def window_grid(self) -> int:
        """The positions on whose multiples a part of its input has to begin."""
        return 1

    @property
    def usual_grid(self) -> int:
        """The positions on whose multiples tiles lie well, but need not lie."""
        return 1

    def scale(self, *scales: Fraction) -> Fraction:
        """Return the scale of the input that its output lies on; scales are pixels of the image a position."""
        return max(scales)

    def fits_edge(self, *edges: int) -> bool:
        """Return True if inputs cut at these edges need no exchange but the halos of convolutions."""
        return True

    def computed(self, read: int, given: int) -> int:
        """Return the outputs computed from `read` positions of a cut dim; all but `given` are cropped."""
        return given

    @property
    def is_padded(self) -> bool:
        """True if it pads: it then may lose positions at the end of its input, which are padding as well."""
        return False

    @property
    def padding_after(self) -> int:
        """Positions at the end of its output that are nothing but padding: the layer after it may lose as many."""
        return 0

    @property
    def pads_with_zeros(self) -> bool:
        """True if what it reads beyond the tensor's ends is zero, or would be if it padded."""
        return False

    @property
    def clamps(self) -> bool:
        """True if it makes what lies beyond the tensor's ends by itself, of what lies within: it reads no others."""
        return False

    @property
    def keeps_zero(self) -> bool:
        """True if it works pixel by pixel and makes zeros of zeros: it may then come after zero padding."""
        return False

    def crop(self, index: int) -> int:
        """Return the pixels that it cuts from each side of input `index`."""
        return 0

    @property
    def uncropped(self) -> Layer:
        """The layer for inputs from which these have been cut."""
        return self

    # Channels.

    def output_channels(self, channels: int, *others: int) -> int:
        """Return the channels of its output for inputs of these channels: its `out_channels`, if it has that field."""
        made: int = getattr(self, "out_channels", channels)
        return made

    def parameters(self, channels: int) -> int:
        """Count its weights."""
        return 0

    def multiply_adds(self, channels: int) -> int:
        """Count the multiply-adds of an output pixel."""
        return 0

    # Statistics.

    @property
    def statistics(self) -> str | None:
        """The pixels of its statistics: `image`, of each image; `batch`, of all; None: at most a pixel's channels."""
        return None

    @property
    def tracks(self) -> bool:
        """True if training moves running statistics, which are constants where the network is mapped."""
        return False

    @property
    def is_still(self) -> bool:
        """True if running statistics are constants in training too."""
        return False

    @property
    def stilled(self) -> Layer:
        """The layer whose running statistics, if it has some, are constants in training too."""
        return self

    @property
    def needs_pixels(self) -> bool:
        """True if a single pixel of a channel is too little for its statistics."""
        return False

    def in_words(self, module: str | None) -> str:
        """Return what takes statistics, in words: `module` of a foreign network, or (None) a configuration's key."""
        return f"{module or 'the network'} takes statistics"

    @property
    def sees_all(self) -> bool:
        """True if each output takes a product with all positions of the later inputs, which pass from rank to rank."""
        return False

    def shared_values(self, channels: int, ranks: int) -> tuple[int, int]:
        """Count the values of an all-reduce between the ranks of an image, forward and backward."""
        return 0, 0

    # Autograd.

    @property
    def hands_on(self) -> bool:
        """True if its output is its input, the same tensor."""
        return False

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        """The inputs that the backward pass needs."""
        return ()

    @property
    def protects_output(self) -> bool:
        """True if no other layer may write over its output."""
        return self.keeps_output or self.overwrites

    @property
    def gradient(self) -> str:
        """The kind of its inputs' gradients: `new` tensors; `same`, the output's; `parts`, views of it; or `none`."""
        return "new"

    @property
    def returns_view(self) -> bool:
        """True if its output is a view of another tensor: what is written over it is copied in the backward pass."""
        return False

    @property
    def is_cheap(self) -> bool:
        """True if computing it once more takes a few operations a value."""
        return True

    def kept_besides(self, shape: Shape, width: int) -> int:
        """Return the bytes kept besides inputs and output, for an output of `shape`; `width`: of a value."""
        return 0

    def gradient_bytes(self, input_bytes: int, shape: Shape) -> int:
        """Return the bytes that its backward pass takes at once for the new gradient of an input of so many bytes."""
        return input_bytes

    def held_bytes(self, input_bytes: int, shape: Shape) -> int:
        """Return the bytes of a new gradient in memory; `shape`: the output's."""
        return input_bytes

    def transient_bytes(self, inputs: Sequence[int], shape: Shape) -> int:
        """Return the bytes that the backward pass allocates besides, and frees again; `inputs`: bytes of each."""
        return 0

    def unfolded(self, work: int, shape: Shape) -> int:
        """Count the values that a kernel copies to multiply matrices, for `work` multiply-adds, an output `shape`."""
        return 0

    def input_width(self, at_hand: int, width: int) -> int:
        """Return the bytes of a value that it computes from; its input has `at_hand` and the precision `width`."""
        return at_hand

    def output_width(self, at_hand: int, width: int) -> int:
        """Return the bytes of a value of its output."""
        return at_hand
