"""Load checkpoints as inference networks: programs that compute class probabilities from images."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet import graph
from paddle_resnet.checkpoints import arrays, contents, restore, run_folders, variables
from paddle_resnet.components import precision, quantization, task
from paddle_resnet.job import processes
from paddle_resnet.models import MODELS, build_model, ends, loss_head
from paddle_resnet.models import logits as network_logits
from paddle_resnet.native import build as native
from paddle_resnet.passes import folding
from paddle_resnet.program import compile_prog
from paddle_resnet.serving import onnx_writer, preprocessing
from paddle_resnet.serving.model import Model
from paddle_resnet.settings import parsing
from paddle_resnet.settings.groups import images as image_flags
from paddle_resnet.settings.values import network_name
from paddle_resnet.step import host_metrics
from paddle_resnet.utils import logger
from paddle_resnet.utils.errors import UsageError, counted

if TYPE_CHECKING:
    from onnx import ModelProto

    from paddle_resnet.settings.values import Settings
    from paddle_resnet.utils.confidence import Temperature


@dataclass(frozen=True, kw_only=True)
class Options(image_flags.Settings, task.Settings):
    """The flags of an inference network: those of the base classes and the following; see `train.py --help all`."""

    dali_device: str
    dali_output_fp16: bool
    data_layout: str
    device: str
    model_arch_name: str
    num_of_class: int


@dataclass
class Network:
    """The inference network of a checkpoint, without pruning masks or an optimizer. See load_checkpoint and load_fast.

    Attributes:
        args: flags of the training run, with the device and layout replaced by those of this network.
        meta: content of meta.json.
        program, images, probabilities, logits: static.Program, its input Variable, its output Variable, and the
            Variable that its softmax or, with --multi-label, its sigmoid reads.
        description: content of model.json.
        scope: scope that contains the parameters.
        features: float32 Variable [N, channels] with the input of the last layer, if the network was loaded with
            features=True, otherwise None.
    """

    args: Settings
    meta: dict[str, Any]
    program: static.Program
    images: static.Variable
    probabilities: static.Variable
    logits: static.Variable
    description: dict[str, Any]
    scope: static.Scope = field(default_factory=static.Scope)
    features: static.Variable | None = None

    @property
    def outputs(self) -> list[static.Variable]:
        """[probabilities] or, if the network was loaded with features=True, [probabilities, features]."""
        return [self.probabilities] if self.features is None else [self.probabilities, self.features]

    @property
    def exe(self) -> static.Executor:
        return static.Executor(processes.place(self.args.device))

    def parameter(self, name: str) -> np.ndarray:
        return np.array(self.scope.find_var(name).get_tensor())

    def model(self, logits: bool = False) -> Model:
        """Return a Model that runs in the Executor. The program is compiled as for evaluation."""
        compiled, exe = compile_prog(self.args, self.program, is_train=False), self.exe
        fetched = [self.probabilities, self.logits] if logits else self.outputs

        def outputs(images):
            return exe.run(compiled, feed={self.images.name: images}, fetch_list=fetched, scope=self.scope)

        return Model("Executor", self.description, outputs)

    def to_onnx(self) -> ModelProto:
        """Translate the network to ONNX, quantized if description["int8"] exists; see onnx_writer.to_onnx."""
        engine, text = self.description.get("int8", {}).get("engine"), json.dumps(self.description)
        return onnx_writer.to_onnx(self.program, [self.images], self.outputs, self.parameter, text, engine)


def load_checkpoint(
    checkpoint: str | Path,
    device: str = "cpu",
    uint8: bool = False,
    model_arch_name: str | None = None,
    fold: bool = False,
    precision: str = "float32",
    as_evaluated: bool = False,
    temperature: Temperature | None = None,
    features: bool = False,
) -> Network:
    """Load the inference network of a checkpoint.

    Args:
        checkpoint: folder of a run or of a checkpoint, see run_folders.resolve. The checkpoint's meta.json contains the
            architecture, the classes, the image shape, the file names and the preprocessing. If meta.json is missing,
            as in checkpoints of NVIDIA's example, the architecture is inferred from the parameter shapes, and the
            preprocessing of NVIDIA's example is used.
        device: "cpu" or "gpu".
        uint8: if True, the input is uint8 pixels [N, H, W, 3], which the network normalizes; if False, normalized
            float32 images [N, 3, H, W].
        model_arch_name: FILE.py:NAME, if the network is defined in a user's file.
        fold: whether to fold the BN layers into the convolutions.
        precision: "float32", or "float16" for a network that runs only on a GPU. With float16, the types of input and
            output do not change, and the BN parameters and the softmax remain float32.
        as_evaluated: whether to keep the layout, the number of channels and the kernels of the run's evaluations, so
            that the results have the rounding errors of these evaluations, if the evaluations were in float32. With
            as_evaluated, the input has the layout of the evaluations, but always three channels.
        temperature: temperature by which to divide the logits, or None. The parameters of the last layer are divided by
            the temperature, so that the network needs no further operator.
        features: whether the network also returns the input of its last layer.
    Returns:
        the inference Network.
    Raises:
        UsageError: the checkpoint does not exist, is damaged, contains values that are not finite or was saved before
            the processes averaged their BN statistics; the user's file that defines the network does not exist or is
            not specified; meta.json is missing, and the parameters match no supported network; or, with `features`,
            the last layer does not read one vector per image.
        native.Unavailable: with as_evaluated, the run used custom kernels, and they cannot be built.
    """
    checkpoint, meta, args = _recorded(checkpoint, device, model_arch_name)
    args.set("internal", amp=False, dali_output_fp16=False)
    if not as_evaluated:
        args.set("internal", kernels="paddle", data_layout="NCHW")
    elif args.kernels == "native":
        native.load()
    channels = args.image_shape[0] if as_evaluated else 3
    options = {"uint8": uint8, "quantize": args.qat and not fold, "features": features}
    network = _load(args, meta, checkpoint, channels, **options)
    if temperature is not None:
        _divide_logits(network, temperature.value)
        network.description["temperature"] = temperature._asdict()
    if fold:
        with static.scope_guard(network.scope):
            folding.fold_batch_norms(network.program, network.exe, 1)
            if args.qat:
                with static.program_guard(network.program, static.Program()):
                    quantization.insert(network.program)
    if precision == "float16":
        _cast(network, precision, "O2", for_gpu=True)
    network.description["precision"] = precision
    return network


def load_fast(
    checkpoint: str | Path,
    precision: str,
    device: str = "gpu",
    model_arch_name: str | None = None,
    tta: str = "none",
    features: bool = False,
) -> Network:
    """Load the inference network of a checkpoint with custom kernels, in NHWC, with four channels and in the chosen
    precision. The program ends with an async copy of the outputs.

    Args:
        checkpoint, device, model_arch_name: see load_checkpoint.
        precision: "float32", "float16" or "bfloat16".
        tta: "none", or "flip" to average the probabilities of each image and its mirror image.
        features: see load_checkpoint; not with tta "flip".
    Returns:
        Network. The input is normalized images [N, H, W, 3] in float16 if the precision is float16, otherwise in
        float32. The network adds the fourth channel, so that the host copies fewer bytes to the GPU.
    Raises:
        native.Unavailable: the custom kernels cannot be built.
        UsageError: see load_checkpoint.
    """
    checkpoint, meta, args = _recorded(checkpoint, device, model_arch_name)
    native.load(paddle.device.cuda.get_device_capability(processes.local_gpu()) if device == "gpu" else None)
    half = {"amp": True, "amp_level": "O2", "amp_dtype": precision} if precision != "float32" else {"amp": False}
    args.set("internal", **half, kernels="native", data_layout="NHWC", dali_output_fp16=precision == "float16")
    args.set("machine", cuda_graph=device == "gpu")
    network = _load(args, meta, checkpoint, 4, quantize=args.qat, mirror=tta == "flip", features=features)
    if args.amp:
        _cast(network, args.amp_dtype, args.amp_level)
    with static.scope_guard(network.scope), static.program_guard(network.program, static.Program()):
        folding.fuse_stem(network.program)
        if precision == "float32":
            folding.replace_convolutions(network.program, network.exe)
        elif precision == "float16" and not args.qat:
            folding.fuse_convolutions(network.program, network.exe)
        with loss_head.scope():
            host_metrics.add_copy(network.outputs)
    return network


def _divide_logits(network, temperature):
    """Divide the logits of a Network in float32 by a number, in the parameters of its last layer."""
    for name in ends(network.program).last:
        divided = (network.parameter(name) / np.float64(temperature)).astype(np.float32)
        network.scope.find_var(name).get_tensor().set(divided, processes.place(network.args.device))


def _cast(network, dtype, level, for_gpu=False):
    """Convert a network in place to half precision. See precision.cast_evaluation_program."""
    program, place = network.program, processes.place(network.args.device)
    float32 = quantization.float32_variables(program)
    with static.scope_guard(network.scope), static.program_guard(program, static.Program()):
        precision.cast_evaluation_program(program, place, dtype, level, float32, for_gpu)


def _recorded(checkpoint, device, model_arch_name):
    """Return (checkpoint folder, content of meta.json, flags of the training run adapted to inference on the device).
    For exceptions, see load_checkpoint."""
    checkpoint = resolve(checkpoint)
    meta = _read_meta(checkpoint)
    args = restore.recorded_flags(checkpoint, meta, model_arch_name)
    if model_arch_name is not None:
        args.set("command line", model_arch_name=model_arch_name)
    args.set("internal", resume=False, profile_steps=None, device=device)
    return checkpoint, meta, args


def _load(args, meta, checkpoint, channels, **options):
    """Return the Network of a checkpoint for images with three or four channels. For options, see _build; for
    exceptions, see load_checkpoint."""
    paddle.enable_static()
    trained, startup, *_ = _build(args.part(Options), quantize=args.qat)
    before = args.image_shape[0]
    args.set("internal", image_shape=[channels, *args.image_shape[1:]])
    program, _, *outer, features = _build(args.part(Options), **options)
    description = _describe(args.part(Options), meta, *outer[:2])
    network = Network(args, meta, program, *outer, description, features=features)
    place = processes.place(args.device)
    with static.scope_guard(network.scope):
        network.exe.run(startup)
        variables.load(args.part(variables.LoadOptions), checkpoint, trained, place, log=log)
        for name in _parameter_names(program):
            if not np.isfinite(network.parameter(name)).all():
                raise UsageError(f"{checkpoint}: {name} has values that are not finite; choose a different checkpoint")
        if channels != before:
            # The fourth channel of the images is zero, so removing or adding the weights for this channel does not
            # change the output.
            stem = ends(program).first
            filters = network.parameter(stem)[:, :channels]
            filters = np.pad(filters, [(0, 0), (0, channels - filters.shape[1]), (0, 0), (0, 0)])
            network.scope.find_var(stem).get_tensor().set(filters, place)
    return network


def resolve(folder: str | Path) -> Path:
    """Return the checkpoint that run_folders.resolve selects for a folder, and log the choice to stderr. For
    exceptions, see run_folders.resolve."""
    return run_folders.resolve(folder, log=log)


def log(line: str) -> None:
    """Print a line to stderr, because stdout is reserved for results."""
    logger.write_line(line, sys.stderr)


def _read_meta(checkpoint):
    if not Path(checkpoint).is_dir():
        raise UsageError(f"{checkpoint}: not a folder; choose the folder of a run or of a checkpoint")
    if not run_folders.is_checkpoint(checkpoint):
        raise UsageError(
            f"{checkpoint}: contains neither {contents.META} nor parameters; choose the folder of a run or of a "
            "checkpoint"
        )
    if contents.is_foreign(checkpoint):
        return _meta_of_example(Path(checkpoint))
    try:
        meta = contents.verify(checkpoint)
    except contents.DamagedError as e:
        raise UsageError(f"{checkpoint}: unusable ({e}); choose a different checkpoint") from e
    # BN statistics are averaged at the end of an epoch, before each evaluation and at the end of the run. Checkpoints
    # of earlier versions lack the key "bn_averaged".
    is_averaged = meta["step"] is None or meta["trained"] is not None or meta["evaluated"] is not None
    is_averaged = is_averaged or meta.get("bn_averaged") is True
    if not is_averaged and meta["world_size"] > 1:
        raise UsageError(
            f"{checkpoint}: saved after {counted(meta['step'], 'step')} of epoch {meta['epoch']}, before the processes "
            "averaged their BN statistics; choose a checkpoint saved at the end of an epoch or after an evaluation"
        )
    return meta


def _meta_of_example(checkpoint):
    """Infer the entries of meta.json that inference needs for a checkpoint of NVIDIA's example, which has no meta.json.
    Raise UsageError if the parameters cannot be read or match no supported network."""
    prefix = contents.foreign_prefix(checkpoint, parsing.from_dict({}).flag_value("model_prefix"))
    path = checkpoint / f"{prefix}.pdparams"
    try:
        state = arrays.read_pickle(path)
    except arrays.UnreadableError as e:
        raise UsageError(f"{path}: cannot be read ({e}); choose a different checkpoint") from e
    shapes = {name: array.shape for name, array in state.items() if not name.endswith(variables.MASK)}
    filters, outputs = shapes.get("conv2d_0.w_0", ()), shapes.get("linear_0.b_0", ())
    if len(filters) == 4 and filters[1] in (3, 4) and len(outputs) == 1 and outputs[0] > 0:
        flags = {"model_prefix": prefix, "num_of_class": outputs[0], "image_shape": [filters[1], 224, 224]}
        flags |= {"interp": "triangular"}  # all other preprocessing flags equal this project's defaults
        for arch in MODELS:
            flags["model_arch_name"] = arch
            if _parameter_shapes(parsing.from_dict(flags).part(Options)) == shapes:
                logger.warn(
                    f"{checkpoint}: contains no {contents.META}, so the network ({arch}) is inferred from the "
                    "parameters, the preprocessing is that of NVIDIA's example, and the classes have no names; check "
                    "network and preprocessing"
                )
                at = run_folders.position(checkpoint.resolve().name)
                meta = {"epoch": at and at[0], "step": None, "classes": [], "evaluated": None}
                return {**meta, "arguments": flags}
    raise UsageError(
        f"{checkpoint}: contains no {contents.META}, and its parameters match no supported network; use a checkpoint "
        f"of one of {', '.join(MODELS)}"
    )


def _parameter_shapes(options):
    """Return the shapes of a network's parameters and BN statistics, {name: shape}."""
    paddle.enable_static()
    program, *_ = _build(options)
    return {name: tuple(graph.block(program).var(name).shape) for name in _parameter_names(program)}


def _parameter_names(program):
    return [var.name for var in program.list_vars() if isinstance(var, paddle.base.framework.Parameter)]


def _build(options, uint8=False, quantize=False, mirror=False, features=False):
    """Return (program, startup program, images, probabilities, logits, features or None).

    Args:
        options: Options.
        uint8: see load_checkpoint.
        quantize: whether to insert the fake quantization of --qat.
        mirror: whether to average the probabilities of each image and its mirror image; requires the layout NHWC.
        features: whether to return a float32 copy of the input of the last layer. For UsageError, see load_checkpoint.
    """
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup), paddle.utils.unique_name.guard():
        channels, *size = options.image_shape
        is_nchw = options.data_layout == "NCHW"
        if uint8:
            images = static.data("images", [None, *size, channels], dtype="uint8")
            # Compute (level * scale - mean) / std as one multiplication and one addition.
            factor = np.float64(options.normalize_scale) / options.normalize_std
            shift = -np.divide(options.normalize_mean, options.normalize_std)
            factor, shift = (paddle.to_tensor(x.astype("float32").reshape(1, 3, 1, 1)) for x in (factor, shift))
            normalized = images.astype("float32").transpose([0, 3, 1, 2]) * factor + shift
        else:
            shape = [3, *size] if is_nchw else [*size, 3]
            dtype = "float16" if options.dali_output_fp16 else "float32"
            images = normalized = static.data("images", [None, *shape], dtype=dtype)
        if mirror:
            normalized = paddle.concat([normalized, paddle.flip(normalized, [2])])
        if channels == 4:
            fourth = [0, 0, 0, 1, 0, 0, 0, 0] if is_nchw else [0, 0, 0, 0, 0, 0, 0, 1]
            normalized = paddle.nn.functional.pad(normalized, fourth)
        model = build_model(options.model_arch_name, options.num_of_class, channels, options.data_layout)
        model.eval()
        logits = network_logits(model, normalized, options.model_arch_name, options.num_of_class)
        last = _features(program, options.model_arch_name) if features else None
        if quantize:
            quantization.insert(program, on_gpu=options.device == "gpu")
        with loss_head.scope():  # AMP must not change the precision of the probabilities
            probabilities = options.task(options.num_of_class).probabilities(logits)
            if mirror:
                pairs = paddle.reshape(probabilities, [2, -1, options.num_of_class])
                probabilities = paddle.mean(pairs, axis=0)
            if last is not None:
                last = loss_head.add_logits(last)
        block = graph.block(program)
        graph.rename(block, probabilities.name, "probabilities")
    return program, startup, images, block.var("probabilities"), logits, last


def _features(program, arch):
    """Return the input of the last layer, [N, channels].

    Raises:
        UsageError: the last layer is used several times, or does not read one vector per image.
    """
    block, weight = graph.block(program), ends(program).last[1]
    inputs = [block.var(op.input("X")[0]) for op in block.ops if op.type == "matmul_v2" and op.input("Y") == [weight]]
    if [len(each.shape) for each in inputs] != [2]:
        raise UsageError(
            f"{network_name(arch)}: features require that the last layer reads one vector per image, once; choose a "
            "checkpoint of such a network"
        )
    return inputs[0]


def _describe(options, meta, images, probabilities):
    dtype = convert_dtype(images.dtype)
    layout = "NHWC" if dtype == "uint8" else options.data_layout
    evaluated, crop = meta["evaluated"], options.image_shape[1:]
    if evaluated:
        evaluated = {
            name: evaluated[name] for name in ("top1", "top5", "map", "map_micro", "loss") if name in evaluated
        }
        evaluated |= {"tta": options.tta} if options.tta != "none" else {}
        evaluated |= {"decoder": options.dali_device} if options.dali_device != "auto" else {}
    return {
        "arch": network_name(options.model_arch_name),
        "input": {
            **{"name": images.name, "shape": [None, *images.shape[1:]], "dtype": dtype, "layout": layout},
            **{"color": "RGB", "values": "levels from 0 to 255" if dtype == "uint8" else "normalized"},
        },
        "output": {"name": probabilities.name, "shape": [None, options.num_of_class], "values": "probabilities"},
        "preprocessing": {
            "resize_short": options.resize_short,
            "interp": options.interp,
            "center_crop": crop if len(set(crop)) > 1 else crop[0],
            "scale": options.normalize_scale,
            "mean": options.normalize_mean,
            "std": options.normalize_std,
            "conventions": preprocessing.CONVENTIONS,
        },
        **options.task(options.num_of_class).describe(meta),
        "classes": meta.get("class_names", meta["classes"]),
        "epoch": meta["epoch"],
        "evaluated": evaluated,
    }
