"""Names of torch's functions: which work on single pixels, which along channels, which change nothing."""

from __future__ import annotations

# By the name under which torch gives a new tensor.
ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "addcdiv",
        "addcmul",
        "atan",
        "celu",
        "clamp",
        "clamp_max",
        "clamp_min",
        "cos",
        "detach",
        "div",
        "elu",
        "eq",
        "erf",
        "exp",
        "expm1",
        "floor_divide",
        "ge",
        "gelu",
        "gt",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "le",
        "leaky_relu",
        "lerp",
        "log",
        "log1p",
        "log2",
        "logical_and",
        "logical_not",
        "logical_or",
        "logsigmoid",
        "lt",
        "maximum",
        "minimum",
        "mish",
        "mul",
        "ne",
        "neg",
        "pow",
        "prelu",
        "reciprocal",
        "relu",
        "relu6",
        "rsqrt",
        "rsub",
        "selu",
        "sigmoid",
        "sign",
        "silu",
        "sin",
        "softplus",
        "softshrink",
        "softsign",
        "sqrt",
        "square",
        "sub",
        "tanh",
        "tanhshrink",
        "threshold",
        "where",
    ]
)
RENAMED = {
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "__rpow__": "__rpow__",
    "__rdiv__": "__rdiv__",
    "__rsub__": "__rsub__",
    "special_expit": "sigmoid",
    "concat": "cat",
    "concatenate": "cat",
    "_threshold": "threshold",
    "data": "detach",
}
REVERSED = {"__rdiv__", "__rsub__", "__rpow__", "__radd__", "__rmul__"}
ALONG_CHANNELS = frozenset(
    ["softmax", "log_softmax", "softmin", "cumsum", "sort", "argsort", "flip", "normalize", "glu"]
)
SAME = frozenset(
    [
        "contiguous",
        "clone",
        "to",
        "float",
        "double",
        "half",
        "type",
        "type_as",
        "alias",
        "as_tensor",
        "asarray",
        "cpu",
        "cuda",
    ]
)
PARTS = frozenset(["chunk", "split", "tensor_split"])


def plain(name: str) -> str:
    """The function that gives a new tensor: `relu` of `relu_`, `add` of `__iadd__`."""
    if name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"):
        name = name[3:-2]
    elif name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    name = {"__add__": "add", "__radd__": "add", "__mul__": "mul", "__rmul__": "mul"}.get(name, name)
    return RENAMED.get(name, name)
