"""Opens checkpoints, exports and ONNX files as inference networks with a common interface.

Images and probabilities are NumPy arrays. The input format is defined by the network's `description`, the content of
model.json.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import paddle
from paddle import static
from paddle.base.data_feeder import convert_dtype

from paddle_resnet import resolution
from paddle_resnet.checkpoints import arrays, folders, restore, variables
from paddle_resnet.job import processes
from paddle_resnet.machine import gpus
from paddle_resnet.models import MODELS, build_model, ends, loss_head
from paddle_resnet.models import logits as network_logits
from paddle_resnet.native import build as native
from paddle_resnet.optimizers import amp
from paddle_resnet.passes import folding, quantization
from paddle_resnet.program import compile_prog
from paddle_resnet.serving import onnx_writer, preprocessing
from paddle_resnet.serving.fixed_sizes import Steps
from paddle_resnet.settings import parsing
from paddle_resnet.settings.values import network_name
from paddle_resnet.steps import host_metrics
from utils import errors, files, logger
from utils.checks import is_number, is_table, is_text
from utils.errors import UsageError

NAME = "model"  # file name without suffix: model.pdmodel, model.pdiparams, model.json, model.onnx
SUFFIXES = ("pdmodel", "pdiparams")  # files of Paddle Inference
MAX_ONNX_BYTES = 2**31  # maximum size of a protobuf message


@dataclass
class Model:
    """An inference network that is ready to run.

    Attributes:
        engine: "Executor", "captured step", "paddle.inference" or "onnxruntime".
        description: content of model.json.
        outputs: function from images to [probabilities] or, if the network was opened with logits=True, to
            [probabilities, logits]. description["input"] defines the shape and type of the images. Both outputs are
            float32 [N, classes].
        precision: "float32", "float16", "bfloat16" or "int8".
        steps: fixed_sizes.Steps for the engine "captured step", otherwise None.
    """

    engine: str
    description: dict
    outputs: Callable
    precision: str = "float32"
    steps: Steps | None = None

    def run(self, images):
        return self.outputs(images)[0]

    def submit(self, images):
        """Start inference for a batch of images, which may be an array or the output of a DALI pipeline for this model.

        Returns:
            a value that np.asarray converts to the probabilities. At most one other batch may be submitted before the
            conversion.
        """
        return self.steps.submit(images) if self.steps else self.run(from_dali(self.description, images))

    def host_images(self, images):
        """Return an uninitialized array for a number of images, in the memory from which this engine copies fastest."""
        expected = self.description["input"]
        if self.steps:
            return self.steps.host_images(images)
        return np.empty([images, *expected["shape"][1:]], expected["dtype"])


def from_dali(description, images):
    """Return images as an array with the shape and type of description["input"]."""
    if not isinstance(images, np.ndarray):
        images = np.array(images.as_cpu().as_tensor())
    return images.astype(description["input"]["dtype"], copy=False)


@dataclass
class Network:
    """The inference network of a checkpoint, without masks or optimizer. See load_checkpoint and load_fast.

    Attributes:
        args: flags of the training run, with the device and layout replaced by those of this network.
        meta: content of meta.json.
        program, images, probabilities, logits: static.Program, its input Variable, its output Variable, and the
            Variable that its softmax reads.
        description: content of model.json.
        scope: scope that contains the parameters.
    """

    args: object
    meta: dict
    program: static.Program
    images: object
    probabilities: object
    logits: object
    description: dict
    scope: static.Scope = field(default_factory=static.Scope)

    @property
    def exe(self):
        return static.Executor(processes.place(self.args.device))

    def parameter(self, name):
        return np.array(self.scope.find_var(name).get_tensor())

    def model(self, logits=False):
        """Return a Model that runs in the Executor. The program is compiled as for evaluation."""
        compiled, exe = compile_prog(self.args, self.program, is_train=False), self.exe
        fetched = [self.probabilities, self.logits] if logits else [self.probabilities]

        def outputs(images):
            return exe.run(compiled, feed={self.images.name: images}, fetch_list=fetched, scope=self.scope)

        return Model("Executor", self.description, outputs)


def load_checkpoint(checkpoint, device="cpu", uint8=False, model_arch_name=None, fold=False):
    """Load the inference network of a checkpoint.

    Args:
        checkpoint: folder of a run, or folder of a checkpoint saved at the end of an epoch (see folders.resolve). The
            checkpoint's meta.json contains the architecture, the classes, the image shape, the file names and the
            preprocessing. If meta.json is missing, as in checkpoints of NVIDIA's example, the architecture is inferred
            from the parameter shapes, and the preprocessing of NVIDIA's example is used.
        device: "cpu" or "gpu".
        uint8: if True, the input is uint8 pixels [N, H, W, 3], which the network normalizes; if False, normalized
            float32 images [N, 3, H, W].
        model_arch_name: FILE.py:NAME, if the network is defined in a user's file.
        fold: whether to fold the batch normalizations into the convolutions.
    Returns:
        Network.
    Raises:
        UsageError: the checkpoint does not exist, is damaged or was saved within an epoch; or the user's file that
            defines the network does not exist or is not specified.
    """
    checkpoint, meta, args = _recorded(checkpoint, device, model_arch_name)
    args.set("Python", amp=False, kernels="paddle", data_layout="NCHW", dali_output_fp16=False)
    network = _load(args, meta, checkpoint, 3, uint8=uint8, quantize=args.qat and not fold)
    if fold:
        with static.scope_guard(network.scope):
            folding.fold_batch_norms(network.program, network.exe, 1)
            if args.qat:
                with static.program_guard(network.program, static.Program()):
                    quantization.insert(network.program)
    return network


def load_fast(checkpoint, precision, device="gpu", model_arch_name=None, tta="none"):
    """Load the inference network of a checkpoint in the form that an evaluation would run: with custom kernels, in
    NHWC, with four channels and in the chosen precision. The program ends with an async copy of the probabilities.

    Args:
        checkpoint, device, model_arch_name: see load_checkpoint.
        precision: "float32", "float16" or "bfloat16".
        tta: "flip" averages the probabilities of each image and its mirror image.
    Returns:
        Network. The input is normalized images [N, H, W, 4] in float16 if the precision is float16, otherwise in
        float32.
    Raises:
        native.Unavailable: the custom kernels cannot be built.
        UsageError: see load_checkpoint.
    """
    checkpoint, meta, args = _recorded(checkpoint, device, model_arch_name)
    native.load(paddle.device.cuda.get_device_capability(processes.local_gpu()) if device == "gpu" else None)
    half = {"amp": True, "amp_level": "O2", "amp_dtype": precision} if precision != "float32" else {"amp": False}
    args.set("Python", **half, kernels="native", data_layout="NHWC", dali_output_fp16=precision == "float16")
    args.set("machine", cuda_graph=device == "gpu")
    network = _load(args, meta, checkpoint, 4, quantize=args.qat, mirror=tta == "flip")
    with static.scope_guard(network.scope), static.program_guard(network.program, static.Program()):
        if args.amp:
            float32 = quantization.float32_variables(network.program)
            place = processes.place(device)
            amp.cast_evaluation_program(network.program, place, args.amp_dtype, args.amp_level, float32)
        if device == "gpu" and not args.qat:
            folding.fuse_convolutions(network.program, network.exe)
        with loss_head.scope():
            host_metrics.add_copy([network.probabilities])
    return network


def _recorded(checkpoint, device, model_arch_name):
    """Return (checkpoint folder, content of meta.json, flags of the training run with the device replaced)."""
    checkpoint = resolve(checkpoint)
    meta = _read_meta(checkpoint)
    args = restore.recorded_flags(checkpoint, meta, model_arch_name)
    if model_arch_name is not None:
        args.set("Python", model_arch_name=model_arch_name)
    args.set("Python", fuse_resunit=False, resume=False, profile_steps=None, device=device)
    return checkpoint, meta, args


def _load(args, meta, checkpoint, channels, **options):
    """Return the Network of a checkpoint for images with three or four channels. For options, see _build."""
    paddle.enable_static()
    trained, startup, *_ = _build(args, quantize=args.qat)
    before, args.image_shape = args.image_shape[0], [channels, *args.image_shape[1:]]
    program, _, *outer = _build(args, **options)
    network = Network(args, meta, program, *outer, _describe(args, meta, *outer[:2]))
    place = processes.place(args.device)
    with static.scope_guard(network.scope):
        network.exe.run(startup)
        variables.load(args, checkpoint, trained, place, log=_log)
        if channels != before:
            # The fourth channel of the images is zero, so removing or adding the weights for this channel does not
            # change the output.
            stem = ends(program).first
            filters = network.parameter(stem)[:, :channels]
            filters = np.pad(filters, [(0, 0), (0, channels - filters.shape[1]), (0, 0), (0, 0)])
            network.scope.find_var(stem).get_tensor().set(filters, place)
    return network


def resolve(folder):
    """Return the checkpoint that folders.resolve selects for a folder, and log to stderr."""
    return folders.resolve(folder, log=_log)


def _warn(line):
    _log(f"warning: {line}")


def _log(line):
    """Print a line to stderr, because stdout is reserved for results."""
    logger.write_line(line, sys.stderr)


def _read_meta(checkpoint):
    if not Path(checkpoint).is_dir():
        raise UsageError(f"{checkpoint}: not a folder; choose a checkpoint, such as output/ResNet50/best")
    if not folders.is_checkpoint(checkpoint):
        raise UsageError(
            f"{checkpoint}: contains neither {folders.META} nor parameters; choose a checkpoint, such as "
            "output/ResNet50/best"
        )
    if folders.is_foreign(checkpoint):
        return _meta_of_example(Path(checkpoint))
    try:
        meta = folders.verify(checkpoint)
    except folders.DamagedError as e:
        raise UsageError(f"{checkpoint}: damaged ({e}); choose a different checkpoint") from e
    if meta["step"] is not None:
        raise UsageError(
            f"{checkpoint}: saved after {meta['step']} steps of epoch {meta['epoch']}, before the processes averaged "
            "their BN statistics; choose a checkpoint saved at the end of an epoch"
        )
    return meta


def _meta_of_example(checkpoint):
    """Infer the entries of meta.json that inference needs for a checkpoint of NVIDIA's example, which has no
    meta.json."""
    args = parsing.from_dict({})
    prefix = folders.foreign_prefix(args, checkpoint)
    path = checkpoint / f"{prefix}.pdparams"
    try:
        state = arrays.read_pickle(path)
    except arrays.UnreadableError as e:
        raise UsageError(f"{path}: cannot be read ({e}); choose a different checkpoint") from e
    shapes = {name: array.shape for name, array in state.items() if not name.endswith(variables.MASK)}
    filters, outputs = shapes.get("conv2d_0.w_0", ()), shapes.get("linear_0.b_0", ())
    if len(filters) == 4 and filters[1] in (3, 4) and len(outputs) == 1 and outputs[0] > 0:
        flags = {"model_prefix": prefix, "num_of_class": outputs[0], "image_shape": [filters[1], 224, 224]}
        flags |= {"interp": "triangular"}  # all other preprocessing flags of NVIDIA's example have the default values
        for arch in MODELS:
            flags["model_arch_name"] = arch
            if _parameter_shapes(parsing.from_dict(flags)) == shapes:
                logger.warn(
                    f"{checkpoint}: contains no {folders.META}, so the architecture is inferred from the parameters "
                    f"({arch}), the preprocessing is that of NVIDIA's example, and the classes have no names"
                )
                at = folders.position(checkpoint.resolve().name)
                meta = {"epoch": at and at[0], "step": None, "classes": [], "evaluated": None}
                return {**meta, "arguments": flags}
    raise UsageError(
        f"{checkpoint}: contains no {folders.META}, and its parameters match no supported network; use a checkpoint of "
        f"one of {', '.join(MODELS)}"
    )


def _parameter_shapes(args):
    """Return the shapes of a network's parameters and BN statistics, {name: shape}."""
    paddle.enable_static()
    program, *_ = _build(args)
    parameters = (var for var in program.list_vars() if isinstance(var, paddle.base.framework.Parameter))
    return {var.name: tuple(var.shape) for var in parameters}


def _build(args, uint8=False, quantize=False, mirror=False):
    """Return (program, startup program, images, probabilities, logits).

    Args:
        args: Settings.
        uint8: see load_checkpoint.
        quantize: whether to insert the fake quantization of --qat.
        mirror: whether to average the probabilities of each image and its mirror image.
    """
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup), paddle.utils.unique_name.guard():
        channels, *size = args.image_shape
        is_nchw = args.data_layout == "NCHW"
        if uint8:
            images = static.data("images", [None, *size, channels], dtype="uint8")
            # Compute (level * scale - mean) / std as one multiplication and one addition.
            factor = np.float64(args.normalize_scale) / args.normalize_std
            shift = -np.divide(args.normalize_mean, args.normalize_std)
            factor, shift = (paddle.to_tensor(x.astype("float32").reshape(1, 3, 1, 1)) for x in (factor, shift))
            normalized = images.astype("float32").transpose([0, 3, 1, 2]) * factor + shift
        else:
            shape = [3, *size] if is_nchw else [*size, 3]
            dtype = "float16" if args.dali_output_fp16 else "float32"
            images = normalized = static.data("images", [None, *shape], dtype=dtype)
        if channels == 4:
            fourth = [0, 0, 0, 1, 0, 0, 0, 0] if is_nchw else [0, 0, 0, 0, 0, 0, 0, 1]
            normalized = paddle.nn.functional.pad(normalized, fourth)
        if mirror:
            normalized = paddle.concat([normalized, paddle.flip(normalized, [3 if is_nchw else 2])])
        model = build_model(args.model_arch_name, args.num_of_class, channels, args.data_layout)
        model.eval()
        logits = network_logits(model, normalized, args.model_arch_name, args.num_of_class)
        if quantize:
            quantization.insert(program, on_gpu=args.device == "gpu")
        with loss_head.scope():  # AMP must not change the precision of the probabilities
            probabilities = paddle.nn.functional.softmax(logits)
            if mirror:
                pairs = paddle.reshape(probabilities, [2, -1, args.num_of_class])
                probabilities = paddle.mean(pairs, axis=0)
        block = program.global_block()
        block._rename_var(probabilities.name, "probabilities")
    return program, startup, images, block.var("probabilities"), logits


def _describe(args, meta, images, probabilities):
    dtype = convert_dtype(images.dtype)
    layout = "NHWC" if dtype == "uint8" else args.data_layout
    evaluated, crop = meta["evaluated"], args.image_shape[1:]
    if evaluated:
        evaluated = {name: evaluated[name] for name in ("top1", "top5", "loss")}
        evaluated |= {"tta": args.tta} if args.tta != "none" else {}
    return {
        "arch": network_name(args.model_arch_name),
        "input": {
            **{"name": images.name, "shape": [None, *images.shape[1:]], "dtype": dtype, "layout": layout},
            **{"color": "RGB", "values": "levels from 0 to 255" if dtype == "uint8" else "normalized"},
        },
        "output": {"name": probabilities.name, "shape": [None, args.num_of_class], "values": "probabilities"},
        "preprocessing": {
            "resize_short": args.resize_short,
            "interp": args.interp,
            "center_crop": crop if len(set(crop)) > 1 else crop[0],
            "scale": args.normalize_scale,
            "mean": args.normalize_mean,
            "std": args.normalize_std,
            "conventions": preprocessing.CONVENTIONS,
        },
        "classes": meta.get("class_names", meta["classes"]),
        "epoch": meta["epoch"],
        "evaluated": evaluated,
    }


def open_model(path, device, model_arch_name=None, precision=None, sizes=(32,), tta="none"):
    """Open a checkpoint folder, a run folder, an export folder or an ONNX file as a Model.

    Args:
        path: the folder or ONNX file.
        device: "cpu" or "gpu".
        model_arch_name: see load_checkpoint.
        precision: "float32", "float16", "bfloat16" or "int8". If None, a checkpoint runs in float16 on a GPU with
            Tensor Cores and otherwise in float32, and an export runs in the precision in which it was exported.
        sizes: see fixed_sizes.Steps.
        tta: "flip" averages the probabilities of each image and its mirror image.
    Raises:
        UsageError: the path does not contain a network, a file is damaged, the required engine is not installed, or the
            precision is not supported.
    """
    return _mirrored(_open(Path(path), device, model_arch_name, precision, sizes, tta), tta)


def _mirrored(model, tta):
    """Return a model that averages the probabilities of each image and its mirror image if `tta` is "flip". If the
    engine does this itself, return the model unchanged."""
    if tta == "none" or model.steps:
        return model
    axis = 3 if model.description["input"]["layout"] == "NCHW" else 2

    def outputs(images):
        return [(model.run(images) + model.run(np.ascontiguousarray(np.flip(images, axis)))) / 2]

    return dataclasses.replace(model, outputs=outputs)


def _open(path, device, model_arch_name, precision, sizes, tta):
    if is_export(path):
        if model_arch_name is not None:
            raise UsageError(
                f"--model-arch-name {model_arch_name}: not supported with the export {path}; remove the flag"
            )
        model = (open_onnx if path.suffix == ".onnx" else open_paddle)(path, device)
        if precision not in (None, model.precision):
            raise UsageError(
                f"--precision {precision}: {path} was exported in {model.precision}; remove the flag, or export the "
                "checkpoint in this precision"
            )
        return model
    if path.is_dir():
        return open_checkpoint(path, device, model_arch_name, precision, sizes, tta)
    problem = "neither a folder nor an ONNX file" if os.path.lexists(path) else "does not exist"
    raise UsageError(f"{path}: {problem}; choose the folder of a checkpoint or export, or an ONNX file")


def is_export(path):
    return path.suffix == ".onnx" or os.path.lexists(path / f"{NAME}.json")


def open_checkpoint(path, device, model_arch_name=None, precision=None, sizes=(32,), tta="none", engine="fastest"):
    """Open a checkpoint as a Model. On a GPU, it runs in captured steps with custom kernels. On a CPU, it runs in
    onnxruntime, if it is installed, because that was faster than the Executor in every measurement.

    Args:
        path: folder of a checkpoint or a run.
        device, model_arch_name, precision, sizes, tta: see open_model.
        engine: "fastest", or "Paddle" for Paddle's fastest engine.
    Raises:
        UsageError: see open_model.
    """
    requested, precision = precision, resolve_precision(precision, device)
    if device == "gpu":
        try:
            network = load_fast(path, precision, device, model_arch_name, tta)
        except native.Unavailable as e:
            problem = f"custom kernels are unavailable ({e})"
            if requested not in (None, "float32"):
                raise UsageError(f"--precision {requested}: {problem}; fix that, or use --precision float32") from e
            _warn(f"--precision float32: {problem}, so the network runs with Paddle's slower kernels")
        else:
            steps = Steps(network, sizes)
            return Model("captured step", network.description, lambda images: [steps(images)], precision, steps)
    elif engine == "fastest" and (model := _open_as_onnx(path, model_arch_name)) is not None:
        return model
    return load_checkpoint(path, device, model_arch_name=model_arch_name).model()


def _open_as_onnx(path, model_arch_name):
    """Convert a checkpoint to ONNX in memory, and open it with onnxruntime. If the conversion is impossible or a
    package is missing, log the reason and return None."""
    try:
        for package in ("onnx", "onnxruntime"):
            onnx_writer.require(package)
    except UsageError as e:
        _log(f"using Paddle instead of onnxruntime, which is faster on a CPU: {e}")
        return None
    network = load_checkpoint(path, model_arch_name=model_arch_name, fold=True)
    if network.args.qat:
        _log("using Paddle, because folding the BN of a network trained with --qat changes its probabilities")
        return None
    ends, text = ([network.images], [network.probabilities]), json.dumps(network.description)
    try:
        data = onnx_writer.to_onnx(network.program, *ends, network.parameter, text).SerializeToString()
    except UsageError as e:
        _log(f"using Paddle instead of onnxruntime: {e}")
        return None
    return _onnx_model(data, path, "cpu")


def resolve_precision(precision, device):
    """Return the precision in which a checkpoint runs on a device. For `precision`, see open_model.

    Raises:
        UsageError: the device does not support the precision.
    """
    if precision == "int8":
        raise UsageError(
            "--precision int8: not supported with a checkpoint; export it with --int8, and use the exported model.onnx"
        )
    if device == "cpu":
        if precision in ("float16", "bfloat16"):
            raise UsageError(f"--precision {precision}: requires a GPU; use --precision float32")
        return "float32"
    major, minor = paddle.device.cuda.get_device_capability(processes.local_gpu())
    if precision == "bfloat16" and major < 8:
        raise UsageError(
            f"--precision bfloat16: requires compute capability 8.0, but this GPU has {major}.{minor}; use --precision "
            "float16"
        )
    return precision or ("float16" if major >= 7 else "float32")


def open_paddle(folder, device, logits=False):
    """Open the network in an export folder with Paddle Inference. For exceptions, see open_model."""
    from paddle import inference

    description = _read_description(folder)
    paths = [Path(folder) / f"{NAME}.{suffix}" for suffix in SUFFIXES]
    if not is_table(description.get("files"), **{path.name: _is_file for path in paths}):
        raise UsageError(f"{folder}/{NAME}.json: `files` lacks the size or sha256 of {NAME}.*; export it again")
    try:  # check sizes and hashes first, because Paddle crashes when it reads a damaged file
        for path in paths:
            folders.verify_file(path, description["files"][path.name], f"{NAME}.json")
    except folders.DamagedError as e:
        raise UsageError(f"{folder}: damaged ({e}); export it again") from e
    program, parameters = (path.read_bytes() for path in paths)  # Paddle cannot open paths that are not valid UTF-8
    program = _with_logits(program) if logits else program
    settings = inference.Config()
    settings.set_model_buffer(program, len(program), parameters, len(parameters))
    settings.disable_glog_info()
    settings.set_cpu_math_library_num_threads(len(os.sched_getaffinity(0)))
    if device == "gpu":
        settings.enable_use_gpu(100, processes.local_gpu())
    else:
        settings.disable_gpu()
    try:
        predictor = inference.create_predictor(settings)
    except (RuntimeError, ValueError) as e:
        reason = str(e).strip().splitlines()[-1]
        raise UsageError(f"{folder}: cannot be opened by Paddle Inference ({reason}); export it again") from e

    def outputs(images):
        predictor.get_input_handle(description["input"]["name"]).copy_from_cpu(np.ascontiguousarray(images))
        predictor.run()
        return [predictor.get_output_handle(name).copy_to_cpu() for name in predictor.get_output_names()]

    return _checked_model(Model("paddle.inference", description, outputs), folder)


def _with_logits(serialized):
    """Add the input of the softmax as a second output to an exported, serialized program. Return the serialized
    result."""
    program = static.deserialize_program(serialized)
    block = program.global_block()
    [logits] = [op.input("X")[0] for op in block.ops if op.type == "softmax"]
    [fetched] = [op.output("Out") for op in block.ops if op.type == "fetch"]
    block.append_op(type="fetch", inputs={"X": [logits]}, outputs={"Out": fetched}, attrs={"col": 1})
    return program.desc.serialize_to_string()


def open_onnx(path, device, logits=False):
    """Open an exported ONNX file with onnxruntime. For exceptions, see open_model."""
    onnx_writer.require("onnxruntime")
    try:
        with files.open_regular(path, MAX_ONNX_BYTES) as file:
            data = file.read()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use an exported ONNX file") from e
    return _onnx_model(onnx_writer.with_logits(data) if logits else data, path, device)


def _onnx_model(data, path, device):
    onnxruntime = onnx_writer.require("onnxruntime")
    preferred = ["CUDAExecutionProvider"] * (device == "gpu") + ["CPUExecutionProvider"]
    providers = [name for name in preferred if name in onnxruntime.get_available_providers()]

    def open_session(**config):
        options = onnxruntime.SessionOptions()
        for key, value in config.items():
            options.add_session_config_entry(f"session.{key}", value)
        return onnxruntime.InferenceSession(data, options, providers=providers)

    try:
        session = open_session()
        text = session.get_modelmeta().custom_metadata_map.get(onnx_writer.METADATA, "")
    except Exception as e:  # the errors of onnxruntime have no common base class
        reason = str(e).strip().splitlines()[-1]
        raise UsageError(f"{path}: cannot be opened by onnxruntime ({reason}); export it again") from e
    description = _checked_description(text, path)
    if is_table(description.get("int8"), weight_bits=lambda bits: bits == 8):
        # x64quantprecision prevents overflows with 8-bit weights on x86 CPUs without VNNI instructions.
        session = open_session(x64quantprecision="1")
    name = description["input"]["name"]
    precision = "int8" if "int8" in description else "float32"
    model = Model("onnxruntime", description, lambda images: session.run(None, {name: images}), precision)
    return _checked_model(model, path)


def _checked_model(model, path):
    """Test a model on an image of zeros, and return the model.

    Raises:
        UsageError: the network does not match its description.
    """
    image, expected = model.description["input"], [1, *model.description["output"]["shape"][1:]]
    try:
        shape = list(model.run(np.zeros([1, *image["shape"][1:]], image["dtype"])).shape)
    except Exception as e:  # the errors of the engines have no common base class
        reason = errors.core(e)
        raise UsageError(f"{path}: the network does not match its description ({reason}); export it again") from e
    if shape != expected:
        raise UsageError(f"{path}: the network's output has shape {shape} instead of {expected}; export it again")
    return model


def _read_description(folder):
    path = Path(folder) / f"{NAME}.json"
    try:
        with files.open_regular(path, preprocessing.MAX_JSON_BYTES) as f:
            return _checked_description(f.read(), path)
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use an export folder") from e


def _checked_description(text, path):
    try:
        description = json.loads(text)
        problem = preprocessing.problem(description)
    except (ValueError, RecursionError) as e:
        problem = str(e)
    if problem:
        raise UsageError(f"{path}: not a valid description of a network ({problem}); export it again")
    return description


def _is_file(value):
    return is_table(value, size=is_number, sha256=is_text)


def resolve_device(device):
    """Resolve "auto" to "cpu" or "gpu", and return "cpu" and "gpu" unchanged. Raise UsageError if the device is "gpu"
    and Paddle cannot use a GPU."""
    return gpus.resolve(device, processes.local_gpu(), processes.world_size() > 1)


def loader_args(description, batch_size, device="cpu", threads=4):
    """Return the flags with which dali.py loads images in a network's input format. DALI returns pixels as float32 even
    if the network's input is uint8.

    Args:
        description: content of model.json.
        batch_size: images per batch.
        device: "cpu" or "gpu".
        threads: number of DALI's CPU threads.
    """
    recorded, expected = description["preprocessing"], description["input"]
    is_pixels = expected["dtype"] == "uint8"
    crop = preprocessing.sides(recorded)
    channels = expected["shape"][1 if expected["layout"] == "NCHW" else 3]
    values = {
        **{"crop_size": min(crop), "image_shape": [channels, *crop], "resize_short": recorded["resize_short"]},
        **{"interp": recorded["interp"], "data_layout": expected["layout"]},
        **{"dali_output_fp16": expected["dtype"] == "float16"},
        **{"normalize_scale": 1 if is_pixels else recorded["scale"]},
        **{"normalize_mean": [0, 0, 0] if is_pixels else recorded["mean"]},
        **{"normalize_std": [1, 1, 1] if is_pixels else recorded["std"]},
        **{"batch_size": batch_size, "dali_num_threads": threads, "device": device},
    }
    args = parsing.from_dict(values)
    resolution.resolve_device(args)
    resolution.resolve_loader(args)
    return args
