"""Names of torch's functions: which work on single pixels, which along channels, which change nothing."""

from __future__ import annotations

# By the name under which torch gives a new tensor.
_ELEMENTWISE = """abs add addcdiv addcmul atan celu clamp clamp_max clamp_min cos detach div elu eq erf exp expm1
floor_divide ge gelu gt hardshrink hardsigmoid hardswish hardtanh le leaky_relu lerp log log1p
log2 logical_and logical_not logical_or logsigmoid lt maximum minimum mish mul ne neg pow prelu
reciprocal relu relu6 rsqrt rsub selu sigmoid sign silu sin softplus softshrink softsign sqrt
square sub tanh tanhshrink threshold where zeros_like ones_like full_like masked_fill nan_to_num
floor ceil round trunc frac fmod remainder logit erfc sinh cosh tan asin acos atan2 asinh
logaddexp hypot xlogy isnan isfinite logical_xor bitwise_and bitwise_or bitwise_not copysign
positive sgn"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_RENAMED = """multiply:mul subtract:sub divide:div true_divide:div negative:neg absolute:abs clip:clamp
special_expit:sigmoid concat:cat concatenate:cat _threshold:threshold data:detach __invert__:bitwise_not
__and__:bitwise_and __or__:bitwise_or __xor__:logical_xor __add__:add __radd__:add __mul__:mul __rmul__:mul"""
RENAMED = dict(pair.split(":") for pair in _RENAMED.split())
REVERSED = {"__rdiv__", "__rsub__", "__rpow__", "__radd__", "__rmul__"}
_ALONG = "softmax log_softmax softmin cumsum sort argsort flip normalize glu"
ALONG_CHANNELS = frozenset(_ALONG.split())
_SAME = """contiguous clone to float double half type type_as alias as_tensor asarray cpu cuda"""
SAME = frozenset(_SAME.split())
UNKNOWN = "may give another result on a part of the image; use one of docs/reference/foreign-networks.md"
ALL_PIXELS = "lets every pixel see every other, of which a tile has a part only; use convolutions, or gates of channels"
_COUNTED = "draws numbers by the order of calls, which tiles change; use Dropout2d"
MULTI_HEAD = "multi_head_attention_forward"
# Why a function that has no handler cannot be exact.
REASONS = {
    **dict.fromkeys(("bmm", "baddbmm"), ALL_PIXELS),
    **dict.fromkeys(("rand_like", "randn_like", "bernoulli", "bernoulli_", "rrelu"), _COUNTED),
    **dict.fromkeys(("unfold", "fold"), "puts the neighbours of a pixel into one dim; use convolutions"),
    **dict.fromkeys(
        ("grid_sample", "gather", "index_select", "take_along_dim"),
        "reads pixels at places that are computed, which may lie outside a tile; resize or crop by fixed numbers",
    ),
    "roll": "moves pixels round the image's end, which a tile has not; pad and crop",
    **dict.fromkeys(
        ("topk", "kthvalue", "median", "quantile", "unique", "histc"),
        "may sort values of the whole image; take means and maxima",
    ),
}
_TRUTHS = """eq ne lt le gt ge isnan isfinite logical_and logical_or logical_not logical_xor bitwise_and
bitwise_or bitwise_not"""
TRUTHS = frozenset(_TRUTHS.split())
# Functions, and which part of what they give, that say where a value is.
PLACES = frozenset([("argmax", 0), ("argmin", 0), ("argsort", 0), ("sort", 1), ("max", 1), ("min", 1)])


def plain(name: str) -> str:
    """Return the name of the function that gives a new tensor: `relu` for `relu_`, `add` for `__iadd__`."""
    if name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"):
        name = name[3:-2]
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return RENAMED.get(name, name)
