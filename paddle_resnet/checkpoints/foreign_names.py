"""Rename weights from torchvision, timm, PaddleClas, paddle.vision, fastai and efficientnet-lite-pytorch to the names
of this project, and weights of this project to the names of timm.

A rule translates the name of a layer. The rule's regular expression captures the numbers that identify the layer's
block, and * in the replacement stands for the corresponding block in this project. Blocks are matched by order: the
block with the n-th lowest numbers corresponds to the n-th block of this project's network. The same rules translate
this project's names into foreign names: a foreign name is valid if the rules translate it into the original name.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paddle_resnet.utils import logger

if TYPE_CHECKING:
    from paddle import nn

# {last component of a tensor name in other projects: last component in this project}. The first line contains the names
# in PyTorch's own layers. Paddle uses "weight" and "bias", too, and "_mean" and "_variance". "scale" is a parameter of
# learnable affine layers in timm and PaddleClas.
_FIELDS = {
    **{"weight": "weight", "bias": "bias", "running_mean": "_mean", "running_var": "_variance"},
    **{"_mean": "_mean", "_variance": "_variance", "scale": "scale"},
}
_FIELDS_OF_TORCH = {
    **{"weight": "weight", "bias": "bias", "_mean": "running_mean", "_variance": "running_var", "scale": "scale"},
}
_BN = ("weight", "bias", "_mean", "_variance")
_COUNTER = "num_batches_tracked"  # counter of PyTorch's BN layers, which this project ignores
_AVERAGED = "n_averaged"  # counter of PyTorch's AveragedModel
_MAX_WRAPPERS = 8  # maximum number of components in a prefix of all tensor names
_CLASSIFIER = "classifier"
_BLOCK = re.compile(r"(?:stages|blocks)\.([0-9_]+)(?=\.)")
_LISTED = 5  # maximum number of names in an error message


class MismatchError(Exception):
    """Raised if tensors cannot be converted to the parameters of a network. The message describes the problem. If the
    message does not list all affected tensors, `lines` lists them."""

    def __init__(
        self, message: str, lines: Iterable[str] = (), remedy: str = "set --arch to the network of the weights"
    ):
        super().__init__(message)
        self.lines, self.remedy = list(lines), remedy


@dataclass(frozen=True)
class Layout:
    """The layer names that other projects use for a family of networks, and how these networks differ from this
    project's: epsilon, gates, dropout and padding.

    Attributes:
        projects: names of the projects.
        rules: ((regular expression, replacement), ...) for layer names; the first matching rule applies.
        epsilon: epsilon of the BN layers in the other projects.
        gate: (slope, offset) of the clipped linear function in squeeze-and-excitation, or None if the function is the
            same as in this project.
        folded: layers that have a bias in this project, but are followed by a BN layer in the other projects.
        zeros: parameters of this project that the other projects lack, which corresponds to zeros.
        dropout: rate of the dropout before the classifier if the other projects multiply its input by 1 - rate in
            evaluation instead of dividing by 1 - rate in training, otherwise 0.
        padded: learnable affine layer whose output the other projects pad with zeros before max pooling, while this
            project ignores pixels beyond the edge, or None.
        convolutions: fully connected layers of this project that are 1x1 convolutions in the other projects.
        stages: number of blocks in each stage of the other projects, if they number the stages from 0, or () if the
            stages are those of this project, numbered from 1.
    """

    projects: str
    rules: tuple
    epsilon: float = 1e-5
    gate: tuple | None = None
    folded: tuple = ()
    zeros: tuple = ()
    dropout: float = 0.0
    padded: str | None = None
    convolutions: tuple = ()
    stages: tuple = ()


def _conv_bn(layer, target, conv=r"\.0", bn=r"\.1"):
    """Return the rules for a convolution and the BN layer that follows it."""
    return (layer + conv, f"{target}.conv"), (layer + bn, f"{target}.bn")


_RESNET = (
    *(("conv1", "stem.0.conv"), ("bn1", "stem.0.bn"), ("fc", "classifier")),
    *((rf"layer(\d+)\.(\d+)\.conv{i + 1}", f"*.branch.{i}.conv") for i in range(3)),
    *((rf"layer(\d+)\.(\d+)\.bn{i + 1}", f"*.branch.{i}.bn") for i in range(3)),
    (r"layer(\d+)\.(\d+)\.downsample\.0", "*.shortcut.conv"),
    (r"layer(\d+)\.(\d+)\.downsample\.1", "*.shortcut.bn"),
)
# In ResNet-D, the stem has three convolutions, and shortcuts have a pooling layer before the convolution.
_RESNET_D_OF_TIMM = (
    *((rf"conv1\.{3 * i}", f"stem.{i}.conv") for i in range(3)),
    *((r"conv1\.1", "stem.0.bn"), (r"conv1\.4", "stem.1.bn"), ("bn1", "stem.2.bn")),
    (r"layer(\d+)\.(\d+)\.downsample\.1", "*.shortcut.conv"),
    (r"layer(\d+)\.(\d+)\.downsample\.2", "*.shortcut.bn"),
    *_RESNET,
)
_RESNET_OF_PADDLECLAS = (
    *((rf"stem\.{i}\.{part}", f"stem.{i}.{part}") for i in range(3) for part in ("conv", "bn")),
    ("fc", "classifier"),
    *((rf"blocks\.(\d+)\.conv{i}\.{part}", f"*.branch.{i}.{part}") for i in range(3) for part in ("conv", "bn")),
    *((rf"blocks\.(\d+)\.short\.{part}", f"*.shortcut.{part}") for part in ("conv", "bn")),
)
# In PaddleClas, the stem of ResNeXt is called "conv", and the stem of SE_ResNet_vd has three convolutions.
_BLOCKS_OF_PADDLECLAS = (
    *((r"conv\._conv", "stem.0.conv"), (r"conv\._batch_norm", "stem.0.bn"), ("out", "classifier")),
    *((rf"conv1_{i + 1}\._conv", f"stem.{i}.conv") for i in range(3)),
    *((rf"conv1_{i + 1}\._batch_norm", f"stem.{i}.bn") for i in range(3)),
    *((rf"bb_(\d+)_(\d+)\.conv{i}\._conv", f"*.branch.{i}.conv") for i in range(3)),
    *((rf"bb_(\d+)_(\d+)\.conv{i}\._batch_norm", f"*.branch.{i}.bn") for i in range(3)),
    (r"bb_(\d+)_(\d+)\.short\._conv", "*.shortcut.conv"),
    (r"bb_(\d+)_(\d+)\.short\._batch_norm", "*.shortcut.bn"),
    (r"bb_(\d+)_(\d+)\.scale\.squeeze", "*.se.reduce"),
    (r"bb_(\d+)_(\d+)\.scale\.excitation", "*.se.expand"),
)
# In a shortcut (idpath), a pooling layer may precede the convolution and its BN. It is numbered, but has no weights.
_XRESNET_OF_FASTAI = (
    *((rf"{i}\.0", f"stem.{i}.conv") for i in range(3)),
    *((rf"{i}\.1", f"stem.{i}.bn") for i in range(3)),
    *((rf"(\d+)\.(\d+)\.convpath\.{i}\.0", f"*.branch.{i}.conv") for i in range(3)),
    *((rf"(\d+)\.(\d+)\.convpath\.{i}\.1", f"*.branch.{i}.bn") for i in range(3)),
    *((r"(\d+)\.(\d+)\.idpath\.[01]\.0", "*.shortcut.conv"), (r"(\d+)\.(\d+)\.idpath\.[01]\.1", "*.shortcut.bn")),
    (r"\d+", "classifier"),
)
_MOBILENET_V2 = (
    *((r"features\.0\.0", "stem.conv"), (r"features\.0\.1", "stem.bn")),
    *((r"features\.\d+\.0", "head.conv"), (r"features\.\d+\.1", "head.bn"), (r"classifier\.1", "classifier")),
    # The first block of MobileNetV2 has no expansion convolution.
    *((r"features\.(1)\.conv\.0\.0", "*.depthwise.conv"), (r"features\.(1)\.conv\.0\.1", "*.depthwise.bn")),
    *((r"features\.(1)\.conv\.1", "*.project.conv"), (r"features\.(1)\.conv\.2", "*.project.bn")),
    *((r"features\.(\d+)\.conv\.0\.0", "*.expand.conv"), (r"features\.(\d+)\.conv\.0\.1", "*.expand.bn")),
    *((r"features\.(\d+)\.conv\.1\.0", "*.depthwise.conv"), (r"features\.(\d+)\.conv\.1\.1", "*.depthwise.bn")),
    *((r"features\.(\d+)\.conv\.2", "*.project.conv"), (r"features\.(\d+)\.conv\.3", "*.project.bn")),
)
_TIMM = (
    *(("conv_stem", "stem.conv"), ("bn1", "stem.bn"), ("conv_head", "head.conv"), ("bn2", "head.bn")),
    ("classifier", "classifier"),
    # In timm's networks, the blocks of the first stage have no expansion convolution.
    *((r"blocks\.(0)\.(\d+)\.conv_dw", "*.depthwise.conv"), (r"blocks\.(0)\.(\d+)\.bn1", "*.depthwise.bn")),
    *((r"blocks\.(0)\.(\d+)\.conv_pw", "*.project.conv"), (r"blocks\.(0)\.(\d+)\.bn2", "*.project.bn")),
    *((r"blocks\.(\d+)\.(\d+)\.conv_pw", "*.expand.conv"), (r"blocks\.(\d+)\.(\d+)\.bn1", "*.expand.bn")),
    *((r"blocks\.(\d+)\.(\d+)\.conv_dw", "*.depthwise.conv"), (r"blocks\.(\d+)\.(\d+)\.bn2", "*.depthwise.bn")),
    *((r"blocks\.(\d+)\.(\d+)\.conv_pwl", "*.project.conv"), (r"blocks\.(\d+)\.(\d+)\.bn3", "*.project.bn")),
)
_LITE = (
    *(("_conv_stem", "stem.conv"), ("_bn0", "stem.bn"), ("_conv_head", "head.conv"), ("_bn1", "head.bn")),
    ("_fc", "classifier"),
    *((r"_blocks\.(\d+)\._expand_conv", "*.expand.conv"), (r"_blocks\.(\d+)\._bn0", "*.expand.bn")),
    *((r"_blocks\.(\d+)\._depthwise_conv", "*.depthwise.conv"), (r"_blocks\.(\d+)\._bn1", "*.depthwise.bn")),
    *((r"_blocks\.(\d+)\._project_conv", "*.project.conv"), (r"_blocks\.(\d+)\._bn2", "*.project.bn")),
)
_MOBILENET_V3_OF_TORCHVISION = (
    *_conv_bn(r"features\.0", "stem"),
    # The first block of MobileNetV3 has no expansion convolution.
    *_conv_bn(r"features\.(1)\.block\.0", "*.depthwise"),
    *_conv_bn(r"features\.(1)\.block\.[12]", "*.project"),
    *_conv_bn(r"features\.(\d+)\.block\.0", "*.expand"),
    *_conv_bn(r"features\.(\d+)\.block\.1", "*.depthwise"),
    *_conv_bn(r"features\.(\d+)\.block\.[23]", "*.project"),
    (r"features\.(\d+)\.block\.[12]\.fc1", "*.se.reduce"),
    (r"features\.(\d+)\.block\.[12]\.fc2", "*.se.expand"),
    *_conv_bn(r"features\.\d+", "expand"),
    *((r"classifier\.0", "head"), (r"classifier\.3", "classifier")),
)
_MOBILENET_V3_OF_PADDLE_VISION = (
    *(*_conv_bn("conv", "stem"), *_conv_bn("lastconv", "expand")),
    *_conv_bn(r"blocks\.(\d+)\.expand_conv", "*.expand"),
    *_conv_bn(r"blocks\.(\d+)\.bottleneck_conv", "*.depthwise"),
    *_conv_bn(r"blocks\.(\d+)\.linear_conv", "*.project"),
    *((r"blocks\.(\d+)\.mid_se\.fc1", "*.se.reduce"), (r"blocks\.(\d+)\.mid_se\.fc2", "*.se.expand")),
    *((r"classifier\.0", "head"), (r"classifier\.3", "classifier")),
)
_SE_OF_TIMM = (
    (r"blocks\.(\d+)\.(\d+)\.se\.conv_reduce", "*.se.reduce"),
    (r"blocks\.(\d+)\.(\d+)\.se\.conv_expand", "*.se.expand"),
)


def _mobilenet_v3_of_timm(last):
    """Return the rules for a network whose last stage, number `last`, contains only the convolution after the
    blocks."""
    ends = *_conv_bn(rf"blocks\.{last}\.0", "expand", r"\.conv", r"\.bn1"), ("conv_head", "head")
    return *ends, *_SE_OF_TIMM, *_TIMM


_GHOSTNET_OF_TIMM = (
    *_conv_bn("", "stem", "conv_stem", "bn1"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)\.ghost1\.primary_conv", "*.expand.primary"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)\.ghost1\.cheap_operation", "*.expand.cheap"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)\.ghost2\.primary_conv", "*.project.primary"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)\.ghost2\.cheap_operation", "*.project.cheap"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)", "*.depthwise", r"\.conv_dw", r"\.bn_dw"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)\.shortcut", "*.shortcut.0"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)\.shortcut", "*.shortcut.1", r"\.2", r"\.3"),
    *_SE_OF_TIMM,
    *_conv_bn(r"blocks\.9\.0", "expand", r"\.conv", r"\.bn1"),
    *(("conv_head", "head"), ("classifier", "classifier")),
)
_GHOSTNET_OF_PADDLECLAS = (
    *_conv_bn("conv1", "stem", r"\._conv", r"\._batch_norm"),
    *(
        rule
        for layer, target in {
            "ghost_module_1.primary_conv": "expand.primary",
            "ghost_module_1.cheap_operation": "expand.cheap",
            "ghost_module_2.primary_conv": "project.primary",
            "ghost_module_2.cheap_operation": "project.cheap",
            **{"depthwise_conv": "depthwise", "shortcut_depthwise": "shortcut.0", "shortcut_conv": "shortcut.1"},
        }.items()
        for rule in _conv_bn(rf"_ghostbottleneck_(\d+)\.{layer}", f"*.{target}", r"\._conv", r"\._batch_norm")
    ),
    (r"_ghostbottleneck_(\d+)\.se_block\.squeeze", "*.se.reduce"),
    (r"_ghostbottleneck_(\d+)\.se_block\.excitation", "*.se.expand"),
    *_conv_bn("conv_last", "expand", r"\._conv", r"\._batch_norm"),
    *((r"fc_0\._conv", "head"), (r"fc_0\._batch_norm", "head.bn"), ("fc_1", "classifier")),
)
_PPLCNET_OF_TIMM = (
    *(("conv_stem", "stem.conv"), ("bn1", "stem.bn"), ("conv_head", "head"), ("classifier", "classifier")),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)", "*.depthwise", r"\.conv_dw", r"\.bn1"),
    *_conv_bn(r"blocks\.(\d+)\.(\d+)", "*.project", r"\.conv_pw", r"\.bn2"),
    *_SE_OF_TIMM,
)
_PPLCNET_OF_PADDLECLAS = (
    *_conv_bn("conv1", "stem", r"\.conv", r"\.bn"),
    *_conv_bn(r"blocks(\d+)\.(\d+)\.dw_conv", "*.depthwise", r"\.conv", r"\.bn"),
    *_conv_bn(r"blocks(\d+)\.(\d+)\.pw_conv", "*.project", r"\.conv", r"\.bn"),
    *((r"blocks(\d+)\.(\d+)\.se\.conv1", "*.se.reduce"), (r"blocks(\d+)\.(\d+)\.se\.conv2", "*.se.expand")),
    *(("last_conv", "head"), ("fc", "classifier")),
)
_UNIT = ("conv", "bn", "lab")


def _pphgnet_v2(aggregations, head):
    """Return the rules for PP-HGNetV2-B0. Each rule contains the numbers of one block, because
    the names of downsampling layers contain only the number of the stage.

    Args:
        aggregations: names of the two layers after the chain in a block.
        head: names of the last convolution, of its learnable affine layer and of the classifier.
    """
    stem = {"stem1": "first", "stem2a": "narrow", "stem2b": "widen", "stem3": "merge", "stem4": "last"}
    layers = {f"stem.{name}": f"stem.{target}" for name, target in stem.items()}
    for n, (stage, i) in enumerate(((0, 0), (1, 0), (2, 0), (2, 1), (3, 0))):
        block, target = f"stages.{stage}.blocks.{i}", f"blocks.{n}"
        layers |= {f"stages.{stage}.downsample": f"{target}.downsample"} if stage and not i else {}
        for k in range(3):
            layers |= {f"{block}.layers.{k}": f"{target}.layers.{k}"}
            layers |= {f"{block}.layers.{k}.conv1": f"{target}.layers.{k}.pointwise"}
            layers |= {f"{block}.layers.{k}.conv2": f"{target}.layers.{k}.depthwise"}
        layers |= {f"{block}.{a}": f"{target}.{b}" for a, b in zip(aggregations, ("squeeze", "excite"), strict=True)}
    names = {f"{name}.{part}": f"{target}.{part}" for name, target in layers.items() for part in _UNIT}
    names |= dict(zip(head, ("head", "lab", "classifier"), strict=True))
    return tuple((re.escape(name), target) for name, target in names.items())


_HEAD = ("head",)
_LITE_OF_TIMM = "timm's tf_efficientnet_lite"  # see look_alikes.py
# The keys of LAYOUTS are the names of the modules in models/ that define the networks.
LAYOUTS = {
    "resnet": (
        Layout("torchvision, timm, paddle.vision", _RESNET),
        Layout("PaddleClas", _RESNET_OF_PADDLECLAS),
        Layout("PaddleClas's ResNeXt and SE_ResNet_vd", _BLOCKS_OF_PADDLECLAS),
        Layout("timm's ResNet-D", _RESNET_D_OF_TIMM),
        Layout("fastai's XResNet", _XRESNET_OF_FASTAI),
    ),
    "mobilenet_v2": (
        Layout("torchvision, paddle.vision", _MOBILENET_V2),
        Layout("timm", _TIMM, stages=(1, 2, 3, 4, 3, 3, 1)),
    ),
    "efficientnet_lite": (
        Layout("efficientnet-lite-pytorch", _LITE, epsilon=1e-3),
        Layout(_LITE_OF_TIMM, _TIMM, epsilon=1e-3, stages=(1, 2, 2, 3, 3, 4, 1)),  # Lite0
        Layout(_LITE_OF_TIMM, _TIMM, epsilon=1e-3, stages=(1, 3, 3, 4, 4, 5, 1)),  # Lite1 and Lite2
    ),
    "mobilenet_v3": (
        Layout("torchvision", _MOBILENET_V3_OF_TORCHVISION, epsilon=1e-3),
        Layout("timm", _mobilenet_v3_of_timm(last=6), convolutions=_HEAD, stages=(1, 2, 3, 4, 2, 3)),  # Large
        Layout("timm", _mobilenet_v3_of_timm(last=5), convolutions=_HEAD, stages=(1, 2, 3, 2, 3)),  # Small
        Layout("paddle.vision", _MOBILENET_V3_OF_PADDLE_VISION, epsilon=1e-3),
    ),
    "ghostnet": (
        Layout("timm", _GHOSTNET_OF_TIMM, stages=(1, 1, 1, 1, 1, 1, 5, 1, 4)),
        Layout("PaddleClas", _GHOSTNET_OF_PADDLECLAS, gate=(1, 0), folded=_HEAD),
    ),
    "pplcnet": (
        Layout("timm", _PPLCNET_OF_TIMM, stages=(1, 2, 2, 2, 4, 2)),
        Layout("PaddleClas", _PPLCNET_OF_PADDLECLAS, zeros=("head.bias",), dropout=0.2),
    ),
    "pphgnet_v2": (
        Layout(
            "timm",
            _pphgnet_v2(("aggregation.0", "aggregation.1"), ("head.last_conv.0", "head.last_conv.2", "head.fc")),
            padded="stem.first.lab",
        ),
        Layout(
            "PaddleClas",
            _pphgnet_v2(("aggregation_squeeze_conv", "aggregation_excitation_conv"), ("last_conv", "lab", "fc")),
        ),
    ),
}


@dataclass(frozen=True)
class Parameter:
    """A parameter or BN statistic of a network in this project.

    Attributes:
        variable: name of the variable in the program.
        shape: shape as a tuple.
        epsilon: epsilon of the layer if it is a BN layer, otherwise None.
    """

    variable: str
    shape: tuple
    epsilon: float | None = None


def parameters(model: "nn.Layer") -> dict[str, Parameter]:
    """Return {name in the model: Parameter} for a static-graph network, in the order of its layers."""
    layers = dict(model.named_sublayers(include_self=True))
    return {
        name: Parameter(p.name, tuple(p.shape), getattr(layers[name.rpartition(".")[0]], "_epsilon", None))
        for name, p in model.named_parameters()
    }


def without_prefix(family: str, tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], str]:
    """Remove the names of wrappers, such as "module." (DataParallel), "_orig_mod." (torch.compile) or "model.", that
    precede the name of every tensor. Also remove the counter of PyTorch's AveragedModel, which adds "module.".

    Args:
        family: a key of LAYOUTS.
        tensors: {name: array}.
    Returns:
        ({name without prefix: array}, the prefix). The prefix is empty unless its removal makes more names known.
    """
    names = [name for name in tensors if name != _AVERAGED]
    if len(names) < len(tensors) and all(name.startswith("module.") for name in names):
        tensors = {name: tensors[name] for name in names}
    components = zip(*(name.split(".", _MAX_WRAPPERS)[:_MAX_WRAPPERS] for name in tensors), strict=False)
    shared = itertools.takewhile(lambda parts: len({*parts}) == 1, components)
    prefixes = itertools.accumulate((f"{parts[0]}." for parts in shared), initial="")

    def known(prefix):
        return len(_translated(family, {name.removeprefix(prefix): None for name in tensors})[1])

    prefix = max(prefixes, key=known)
    return {name.removeprefix(prefix): array for name, array in tensors.items()}, prefix


def number_of_classes(family: str, tensors: dict[str, np.ndarray]) -> int | None:
    """Return the number of outputs of the network to which the tensors belong, or None if there is no classifier.

    Args:
        family: a key of LAYOUTS.
        tensors: {name: array}.
    Raises:
        MismatchError: the names are unknown, or the classifier has no outputs or no bias with a known name.
    """
    _, targets, _ = _translated(family, tensors)
    if targets and not any(is_of_classifier(path) for _, path in targets.values()):
        return None
    biases = [name for name, target in targets.items() if target == ((), f"{_CLASSIFIER}.bias")]
    if len(biases) != 1 or tensors[biases[0]].ndim != 1 or not tensors[biases[0]].size:
        raise MismatchError(f"no classifier bias with a known name ({_some(tensors)})")
    return len(tensors[biases[0]])


def convert(
    family: str, tensors: dict[str, np.ndarray], own: dict[str, Parameter]
) -> tuple[dict[str, np.ndarray], str]:
    """Convert tensors to the parameters of a network in this project.

    Args:
        family: a key of LAYOUTS.
        tensors: {name: array}; all floating-point arrays are float32.
        own: result of parameters().
    Returns:
        ({name of the variable: float32 array}, names of the projects whose layout matched).
    Raises:
        MismatchError: a tensor is missing or unexpected, or has a different shape or type; a variance is negative; or
            a converted value is not finite.
    """
    layout, targets, leftover = _translated(family, tensors)
    shapes = _shapes(layout, own)
    blocks = dict(zip(_sorted_blocks(targets), _own_blocks(own), strict=False))
    sources = {}
    for name, (block, path) in targets.items():
        target = path.replace("*", blocks.get(block, "*"))
        if target not in shapes:  # in ResNet-D, pooling precedes the shortcut convolution
            target = target.replace(".shortcut.", ".shortcut.1.")
        if target not in shapes or target in sources:
            leftover.append(name)
        else:
            sources[target] = name
    is_torch = is_from_torch(tensors)
    missing = [name for name in shapes if name not in sources]
    arrays = {target: _reshaped(tensors[name], shapes[target], is_torch) for target, name in sources.items()}
    if layout.gate:
        _adapt_squeeze_excitation(arrays, shapes, *layout.gate)
    reshaped = [
        f"{sources[name]} is {list(array.shape)}, not {list(shapes[name])}"
        for name, array in arrays.items()
        if array.shape != shapes[name]
    ]
    retyped = [f"{sources[name]} is {array.dtype}" for name, array in arrays.items() if array.dtype != np.float32]
    _check(
        layout, {"unexpected": leftover, "missing": missing, "of a different shape": reshaped, "not float32": retyped}
    )
    for name, array in arrays.items():
        if name.endswith("._variance") and (array < 0).any():
            problem = f"{name.removesuffix('._variance')} has a negative variance"
            raise MismatchError(problem, remedy="use a different file")
    for layer in layout.folded:
        _fold(arrays, layer, layout.epsilon)
    arrays |= {name: np.zeros(own[name].shape, np.float32) for name in layout.zeros}
    _warn_of_padding(layout, arrays)
    if layout.dropout and f"{_CLASSIFIER}.weight" in arrays:
        arrays[f"{_CLASSIFIER}.weight"] = arrays[f"{_CLASSIFIER}.weight"] * np.float32(1 - layout.dropout)
    _adapt_epsilon(arrays, lambda name: layout.epsilon, lambda name: own[name].epsilon)
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            problem = f"{name} is not finite in float32 after the conversion"
            raise MismatchError(problem, remedy="use a different file")
    return {own[name].variable: np.ascontiguousarray(array) for name, array in arrays.items()}, layout.projects


def to_timm(family: str, arrays: dict[str, np.ndarray], own: dict[str, Parameter]) -> dict[str, np.ndarray]:
    """Return the tensors of timm's network with the same outputs: {name in timm: float32 array}.

    Args:
        family: a key of LAYOUTS; timm must have the network.
        arrays: {name in this project: float32 array}, with the names in `own`.
        own: result of parameters().
    """
    layouts = (layout for layout in LAYOUTS[family] if "timm" in layout.projects)
    layout, names = next((layout, names) for layout in layouts if all((names := _timm_names(layout, own)).values()))
    arrays = dict(arrays)
    _warn_of_padding(layout, arrays)
    _adapt_epsilon(arrays, lambda name: own[name].epsilon, lambda name: layout.epsilon)
    found = {}
    for name, array in arrays.items():
        if name.rpartition(".")[0] in layout.convolutions and array.ndim == 2:
            array = array.T[:, :, None, None]
        found[names[name]] = np.ascontiguousarray(array.T if array.ndim == 2 else array)
    return found


def _timm_names(layout, own):
    """Return {name in this project: name in timm, or None if no rule has the name as its target}."""
    blocks = _own_blocks(own)
    sizes = layout.stages or Counter(block.partition("_")[0] for block in blocks).values()
    numbers = [(stage, i) for stage, size in enumerate(sizes, 0 if layout.stages else 1) for i in range(size)]
    by_block = dict(zip(blocks, numbers, strict=False)) if len(numbers) == len(blocks) else {}
    names = {}
    for name in own:
        layer, _, field = name.rpartition(".")
        match = _BLOCK.match(layer)
        targets = [(layer, ())]  # a rule may contain the name of a block instead of *
        if match:
            path, block = f"*{layer[match.end() :]}", by_block.get(match[0], ())
            # In ResNet-D, pooling precedes the shortcut convolution (see convert).
            targets += [(path, block), (path.replace(".shortcut.1.", ".shortcut."), block)]
        found = next(filter(None, (_inverse(layout, *target) for target in targets)), None)
        names[name] = found and f"{found}.{_FIELDS_OF_TORCH[field]}"
    return names


def _inverse(layout, path, block):
    """Return the name of a layer that the rules translate to a path in the block with these numbers, or None."""
    for pattern in (pattern for pattern, replacement in layout.rules if replacement == path):
        name = pattern.replace("\\.", ".")
        for number in block:
            name = re.sub(r"\(.*?\)", str(number), name, count=1)
        if _translate(layout, name) == (block, path):
            return name
    return None


def is_from_torch(tensors: Iterable[str]) -> bool:
    """Return whether the tensors have the names of PyTorch's BN layers."""
    return any(name.endswith(".running_mean") for name in tensors)


def is_of_classifier(name: str) -> bool:
    """Return whether a parameter of this project's networks belongs to the classifier."""
    return name.startswith(f"{_CLASSIFIER}.")


def _shapes(layout, own):
    """Return {name in this project: shape} for the tensors of a layout."""
    shapes = {name: parameter.shape for name, parameter in own.items() if name not in layout.zeros}
    for layer in layout.folded:
        shapes |= dict.fromkeys((f"{layer}.bn.{field}" for field in _BN), shapes.pop(f"{layer}.bias"))
    return shapes


def _reshaped(array, shape, is_torch):
    """Convert the weight of a fully connected layer to the layout of Paddle's Linear, [in, out], or to that of a 1x1
    convolution, [out, in, 1, 1], depending on the number of dimensions of `shape`. Return other arrays unchanged."""
    if array.ndim == 4 and array.shape[2:] == (1, 1) and len(shape) == 2:
        return array[:, :, 0, 0].T
    if array.ndim == 2:
        array = array.T if is_torch else array
        return array.T[:, :, None, None] if len(shape) == 4 else array
    return array


def _translated(family, tensors):
    """Translate names with the layout that matches the most names. Return (Layout, {name: (numbers of the block,
    path)}, names that match no rule). PyTorch's num_batches_tracked is omitted."""
    results = []
    for layout in LAYOUTS[family]:
        targets, leftover = {}, []
        for name in tensors:
            layer, _, field = name.rpartition(".")
            target = _translate(layout, layer)
            if target is None or field not in (*_FIELDS, _COUNTER):
                leftover.append(name)
            elif field != _COUNTER:
                block, path = target
                targets[name] = block, f"{path}.{_FIELDS[field]}"
        results.append((layout, targets, leftover))
    return max(results, key=lambda result: len(result[1]))


def _translate(layout, layer):
    for pattern, replacement in layout.rules:
        if match := re.fullmatch(pattern, layer, re.ASCII):
            return tuple(map(int, match.groups())), replacement
    return None


def _sorted_blocks(targets):
    return sorted({block for block, _ in targets.values() if block})


def _own_blocks(own):
    """Return the name prefixes of the blocks, in network order."""
    return list(dict.fromkeys(match[0] for match in map(_BLOCK.match, own) if match))


def _check(layout, problems):
    if not any(problems.values()):
        return
    counts = ", ".join(f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names)
    lines = [f"{what}: {', '.join(names)}" for what, names in problems.items() if len(names) > _LISTED]
    raise MismatchError(
        f"the tensors, interpreted as weights of {layout.projects}, do not match the network ({counts})", lines
    )


def _some(names):
    names = list(names)
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def _adapt_squeeze_excitation(arrays, shapes, slope, offset):
    """Scale the second layer of squeeze-and-excitation, so that clip(x / 6 + 0.5, 0, 1) has the same output as
    clip(slope * x + offset, 0, 1) in the other project. If the other project does not round up the number of hidden
    channels, add channels with zero weights."""
    for layer in (name.removesuffix(".reduce.weight") for name in shapes if name.endswith(".se.reduce.weight")):
        weight, bias = f"{layer}.expand.weight", f"{layer}.expand.bias"
        if weight in arrays and bias in arrays:
            arrays[weight], arrays[bias] = arrays[weight] * (6 * slope), arrays[bias] * (6 * slope) + (6 * offset - 3)
        hidden, channels = shapes[f"{layer}.reduce.weight"][:2]
        axes = {f"{layer}.reduce.weight": 0, f"{layer}.reduce.bias": 0, weight: 1}
        if all(
            name in arrays and arrays[name].shape[axis : axis + 1] == (channels // 4,) for name, axis in axes.items()
        ):
            for name, axis in axes.items():
                padding = [(0, hidden - channels // 4 if i == axis else 0) for i in range(arrays[name].ndim)]
                arrays[name] = np.pad(arrays[name], padding)


def _fold(arrays, layer, epsilon):
    """Fold the BN layer after a convolution into the filters and a bias."""
    scale, shift, mean, variance = (arrays.pop(f"{layer}.bn.{field}").astype(np.float64) for field in _BN)
    factor = scale / np.sqrt(variance + epsilon)
    arrays[f"{layer}.weight"] = (arrays[f"{layer}.weight"] * factor[:, None, None, None]).astype(np.float32)
    arrays[f"{layer}.bias"] = (shift - mean * factor).astype(np.float32)


def _warn_of_padding(layout, arrays):
    """Warn if the layer `layout.padded`, the input of a max pooling layer, can return negative values, because the
    output of max pooling then depends on the padding."""
    if layout.padded and min(arrays[f"{layout.padded}.{field}"][0] for field in ("scale", "bias")) < 0:
        logger.warn(
            f"{layout.padded}: returns negative values, which {layout.projects} pads with zeros at the bottom and "
            "right edge before max pooling, so the logits of this project differ slightly; compare the accuracies"
        )


def _adapt_epsilon(arrays, before, after):
    """Scale the BN weights, so that BN with the epsilon after(name) has the same output as BN with the epsilon
    before(name), where `name` is the name of the variance."""
    for name in [name for name in arrays if name.endswith("._variance") and before(name) != after(name)]:
        weight, variance = f"{name.removesuffix('._variance')}.weight", arrays[name].astype(np.float64)
        factor = np.sqrt((variance + after(name)) / (variance + before(name)))
        arrays[weight] = (arrays[weight] * factor).astype(np.float32)
