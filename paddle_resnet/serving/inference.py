"""Opens checkpoints, exports and ONNX files as inference networks with a common interface.

Images and probabilities are NumPy arrays. The input format is defined by the network's `description`, the content of
model.json.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import paddle
from paddle import static

from paddle_resnet import resolution
from paddle_resnet.checkpoints import arrays, folders, restore, variables
from paddle_resnet.job import processes
from paddle_resnet.machine import gpus
from paddle_resnet.models import MODELS, build_model, ends
from paddle_resnet.models import logits as network_logits
from paddle_resnet.passes import folding, quantization
from paddle_resnet.program import compile_prog
from paddle_resnet.serving import onnx_writer, preprocessing
from paddle_resnet.settings import parsing
from paddle_resnet.settings.values import network_name
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
        engine: "Executor", "paddle.inference" or "onnxruntime".
        description: content of model.json.
        outputs: function that maps images, whose shape and type description["input"] defines, to [probabilities] or, if
            the network was opened with logits=True, to [probabilities, logits]. Both arrays are float32 [N, classes].
    """

    engine: str
    description: dict
    outputs: Callable

    def run(self, images):
        return self.outputs(images)[0]


@dataclass
class Network:
    """The inference network of a checkpoint: float32, NCHW, three channels, without masks or optimizer.

    Attributes:
        args: flags of the training run, with the device and layout replaced by those of this network.
        meta: content of meta.json.
        program, images, probabilities, logits: static.Program, its input Variable, its output Variable, and the input
            Variable of its softmax.
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
        """Return a Model that runs in the Executor. Its program is compiled like that of an evaluation."""
        compiled, exe = compile_prog(self.args, self.program, is_train=False), self.exe
        fetched = [self.probabilities, self.logits] if logits else [self.probabilities]

        def outputs(images):
            return exe.run(compiled, feed={self.images.name: images}, fetch_list=fetched, scope=self.scope)

        return Model("Executor", self.description, outputs)


def load_checkpoint(checkpoint, device="cpu", uint8=False, model_arch_name=None, fold=False):
    """Load the inference network of a checkpoint.

    Args:
        checkpoint: folder of a run, or of a checkpoint saved at the end of an epoch (folders.resolve). Its meta.json
            contains the architecture, the classes, the image shape, the file names and the preprocessing. If meta.json
            is missing, as in checkpoints of NVIDIA's example, the architecture is inferred from the shapes of the
            parameters, and the preprocessing of the example is used.
        device: "cpu" or "gpu".
        uint8: if True, the input is uint8 pixels [N, H, W, 3], which the network normalizes. If False, the input is
            normalized float32 images [N, 3, H, W].
        model_arch_name: FILE.py:NAME, if the network is defined in a user's file.
        fold: whether to fold the batch normalizations into the convolutions.
    Returns:
        Network.
    Raises:
        UsageError: the checkpoint does not exist, is damaged or was saved within an epoch; or the file that defines its
            network does not exist or is not specified.
    """
    checkpoint = resolve(checkpoint)
    meta = _read_meta(checkpoint)
    args = restore.recorded_flags(checkpoint, meta, model_arch_name)
    if model_arch_name is not None:
        args.set("Python", model_arch_name=model_arch_name)
    overrides = {"amp": False, "kernels": "paddle", "fuse_resunit": False, "resume": False}
    args.set("Python", **overrides, device=device, data_layout="NCHW")
    paddle.enable_static()
    trained, startup, *_ = _build(args, quantize=args.qat)
    channels, args.image_shape = args.image_shape[0], [3, *args.image_shape[1:]]
    program, _, *outer = _build(args, uint8, args.qat and not fold)
    network = Network(args, meta, program, *outer, _describe(args, meta, *outer[:2]))
    with static.scope_guard(network.scope):
        network.exe.run(startup)
        variables.load(args, checkpoint, trained, processes.place(args.device), log=_log)
        if channels > 3:
            # In training, the fourth channel of the images was zero, so removing its filters does not change the
            # output.
            stem = ends(program).first
            network.scope.find_var(stem).get_tensor().set(
                np.ascontiguousarray(network.parameter(stem)[:, :3]), processes.place(args.device)
            )
        if fold:
            folding.fold_batch_norms(program, network.exe, 1)
            if args.qat:
                with static.program_guard(program, static.Program()):
                    quantization.insert(program)
    return network


def resolve(folder):
    """Return the checkpoint to use for a folder, like folders.resolve."""
    return folders.resolve(folder, log=_log)


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
    """Return the entries of meta.json that inference needs, for a checkpoint of NVIDIA's example, which has no
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
        flags |= {"interp": "triangular"}  # otherwise, the example's preprocessing uses the default flags
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
    """Return {name: shape} of a network's parameters and BN statistics."""
    paddle.enable_static()
    program, *_ = _build(args)
    parameters = (var for var in program.list_vars() if isinstance(var, paddle.base.framework.Parameter))
    return {var.name: tuple(var.shape) for var in parameters}


def _build(args, uint8=False, quantize=False):
    """Return (program, startup program, images, probabilities, logits)."""
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup), paddle.utils.unique_name.guard():
        channels, *size = args.image_shape
        if uint8:
            images = static.data("images", [None, *size, channels], dtype="uint8")
            # Compute (level * scale - mean) / std as one multiplication and one addition.
            factor = np.float64(args.normalize_scale) / args.normalize_std
            shift = -np.divide(args.normalize_mean, args.normalize_std)
            factor, shift = (paddle.to_tensor(x.astype("float32").reshape(1, 3, 1, 1)) for x in (factor, shift))
            normalized = images.astype("float32").transpose([0, 3, 1, 2]) * factor + shift
        else:
            images = normalized = static.data("images", [None, channels, *size], dtype="float32")
        model = build_model(args.model_arch_name, args.num_of_class, channels, args.data_layout)
        model.eval()
        logits = network_logits(model, normalized, args.model_arch_name, args.num_of_class)
        if quantize:
            quantization.insert(program, on_gpu=args.device == "gpu")
        probabilities = paddle.nn.functional.softmax(logits)
        block = program.global_block()
        block._rename_var(probabilities.name, "probabilities")
    return program, startup, images, block.var("probabilities"), logits


def _describe(args, meta, images, probabilities):
    dtype, layout = ("float32", "NCHW") if images.shape[1] == 3 else ("uint8", "NHWC")
    evaluated, crop = meta["evaluated"], args.image_shape[1:]
    if evaluated:
        evaluated = {name: evaluated[name] for name in ("top1", "top5", "loss")}
        evaluated |= {"tta": args.tta} if args.tta != "none" else {}
    return {
        "arch": network_name(args.model_arch_name),
        "input": {
            **{"name": images.name, "shape": [None, *images.shape[1:]], "dtype": dtype, "layout": layout},
            **{"color": "RGB", "values": "normalized" if dtype == "float32" else "levels from 0 to 255"},
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


def open_model(path, device, model_arch_name=None):
    """Open the folder of a checkpoint or an export, or an ONNX file, as a Model. For model_arch_name, see
    load_checkpoint.

    Raises:
        UsageError: the path does not contain a network, a file is damaged, or the required engine is not installed.
    """
    path = Path(path)
    is_export = path.suffix == ".onnx" or os.path.lexists(path / f"{NAME}.json")
    if is_export and model_arch_name is not None:
        raise UsageError(f"--model-arch-name {model_arch_name}: not supported with the export {path}; remove the flag")
    if path.suffix == ".onnx":
        return open_onnx(path, device)
    if os.path.lexists(path / f"{NAME}.json"):
        return open_paddle(path, device)
    if path.is_dir():
        return load_checkpoint(path, device, model_arch_name=model_arch_name).model()
    raise UsageError(f"{path}: does not exist; choose the folder of a checkpoint or export, or an ONNX file")


def open_paddle(folder, device, logits=False):
    """Open the network in the folder of an export with Paddle Inference. For exceptions, see open_model."""
    from paddle import inference

    description = _read_description(folder)
    paths = [Path(folder) / f"{NAME}.{suffix}" for suffix in SUFFIXES]
    if not is_table(description.get("files"), **{path.name: _is_file for path in paths}):
        raise UsageError(f"{folder}/{NAME}.json: size or sha256 of {NAME}.* missing in files; export it again")
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
    """Add the softmax's input as a second output to a serialized program of an export. Return the serialized result."""
    program = static.deserialize_program(serialized)
    block = program.global_block()
    [logits] = [op.input("X")[0] for op in block.ops if op.type == "softmax"]
    [fetched] = [op.output("Out") for op in block.ops if op.type == "fetch"]
    block.append_op(type="fetch", inputs={"X": [logits]}, outputs={"Out": fetched}, attrs={"col": 1})
    return program.desc.serialize_to_string()


def open_onnx(path, device, logits=False):
    """Open an ONNX file of an export with onnxruntime. For exceptions, see open_model."""
    onnxruntime = onnx_writer.require("onnxruntime")
    try:
        with files.open_regular(path, MAX_ONNX_BYTES) as file:
            data = file.read()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use an ONNX file of an export") from e
    if logits:
        data = onnx_writer.with_logits(data)
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
    return _checked_model(Model("onnxruntime", description, lambda images: session.run(None, {name: images})), path)


def _checked_model(model, path):
    """Return a model after a test run on an image of zeros.

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
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use the folder of an export") from e


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
    """Return "cpu" or "gpu" for "auto", "cpu" or "gpu". Raise UsageError if the device is "gpu" and Paddle cannot use a
    GPU."""
    return gpus.resolve(device, processes.local_gpu(), processes.world_size() > 1)


def loader_args(description, batch_size, device="cpu", threads=4):
    """Return flags for dali.py to produce a network's input images. DALI returns pixels as float32 even if the
    network's input is uint8.

    Args:
        description: content of model.json.
        batch_size: images per batch.
        device: "cpu" or "gpu".
        threads: number of DALI's CPU threads.
    """
    recorded, is_pixels = description["preprocessing"], description["input"]["dtype"] == "uint8"
    crop = preprocessing.sides(recorded)
    values = {
        **{"crop_size": min(crop), "image_shape": [3, *crop], "resize_short": recorded["resize_short"]},
        **{"interp": recorded["interp"], "data_layout": description["input"]["layout"]},
        **{"normalize_scale": 1 if is_pixels else recorded["scale"]},
        **{"normalize_mean": [0, 0, 0] if is_pixels else recorded["mean"]},
        **{"normalize_std": [1, 1, 1] if is_pixels else recorded["std"]},
        **{"batch_size": batch_size, "dali_num_threads": threads, "device": device},
    }
    args = parsing.from_dict(values)
    resolution.resolve_device(args)
    resolution.resolve_loader(args)
    return args
