"""Networks that turn images into probabilities: a checkpoint's, an exported one, an ONNX file. All have one interface.

Images and probabilities are NumPy arrays. `description`, the content of model.json, says which images a network takes.
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

import config
from paddle_resnet import onnx_writer, preprocessing
from paddle_resnet.checkpoints import arrays, folders, restore, variables
from paddle_resnet.job import processes
from paddle_resnet.models import MODELS, build_model, ends
from paddle_resnet.program import compile_prog
from utils import errors, files, logger
from utils.checks import is_number, is_table, is_text
from utils.errors import UsageError

NAME = "model"  # of the files of an export: model.pdmodel, model.pdiparams, model.json, model.onnx
SUFFIXES = ("pdmodel", "pdiparams")  # of Paddle Inference's two files
MAX_ONNX_BYTES = 2**31  # of protobuf


@dataclass
class Model:
    """A network that is ready to run.

    Attributes:
        engine: what runs it: "Executor", "paddle.inference" or "onnxruntime".
        description: content of model.json.
        outputs: function from images (shape and type: description["input"]) to [probabilities], or, if opened with
            logits, [probabilities, logits]; each is float32 [N, classes].
    """

    engine: str
    description: dict
    outputs: Callable

    def run(self, images):
        return self.outputs(images)[0]


@dataclass
class Network:
    """The inference network of a checkpoint: float32, NCHW, three channels, without masks and optimizer.

    Attributes:
        args: flags of the training, for this device and layout.
        meta: content of meta.json.
        program, images, probabilities, logits: static.Program, its input, its output, and the input of its softmax.
        description: content of model.json.
        scope: holds the parameters.
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
        return static.Executor(processes.place(self.args))

    def parameter(self, name):
        return np.array(self.scope.find_var(name).get_tensor())

    def model(self, logits=False):
        """The Model that the Executor runs, compiled as for an evaluation."""
        compiled, exe = compile_prog(self.args, self.program, is_train=False), self.exe
        fetched = [self.probabilities, self.logits] if logits else [self.probabilities]

        def outputs(images):
            return exe.run(compiled, feed={self.images.name: images}, fetch_list=fetched, scope=self.scope)

        return Model("Executor", self.description, outputs)


def load_checkpoint(checkpoint, device="cpu", uint8=False):
    """The inference network of a checkpoint.

    Args:
        checkpoint: folder of a checkpoint at the end of an epoch, or of a run (folders.resolve). Its meta.json has the
            architecture, the classes, the image shape, the names of the files and the preprocessing. NVIDIA's example
            writes none: the shapes of the parameters show the architecture, and the preprocessing is the example's.
        device: "cpu" or "gpu".
        uint8: the network takes pixels, uint8 [N, H, W, 3], and normalises them. Otherwise it takes normalised images,
            float32 [N, 3, H, W].
    Returns:
        Network.
    Raises:
        UsageError: the checkpoint does not exist, is damaged or is of the middle of an epoch.
    """
    checkpoint = resolve(checkpoint)
    meta = _read_meta(checkpoint)
    args = restore.recorded_flags(checkpoint, meta)
    for name, value in {"amp": False, "kernels": "paddle", "fuse_resunit": False, "resume": False}.items():
        setattr(args, name, value)
    args.device, args.data_layout = device, "NCHW"
    paddle.enable_static()
    trained, startup, *_ = _build(args)
    channels, args.image_shape = args.image_shape[0], [3, *args.image_shape[1:]]
    program, _, *outer = _build(args, uint8)
    network = Network(args, meta, program, *outer, _describe(args, meta, *outer[:2]))
    with static.scope_guard(network.scope):
        network.exe.run(startup)
        variables.load(args, checkpoint, trained, processes.place(args))
        if channels > 3:  # the loader's fourth channel is zero, so what the filters make of it is, too
            stem = ends(program).first
            network.scope.find_var(stem).get_tensor().set(
                np.ascontiguousarray(network.parameter(stem)[:, :3]), processes.place(args)
            )
    return network


def resolve(folder):
    """The checkpoint to use for a folder, as folders.resolve. The log line goes to stderr: stdout has the results."""
    return folders.resolve(folder, log=lambda line: logger.write_line(line, sys.stderr))


def _read_meta(checkpoint):
    if not Path(checkpoint).is_dir():
        raise UsageError(f"{checkpoint} is not a folder: choose a checkpoint, such as output/ResNet50/best")
    if not folders.is_checkpoint(checkpoint):
        raise UsageError(
            f"{checkpoint} has neither {folders.META} nor parameters: choose a checkpoint, such as output/ResNet50/best"
        )
    if folders.is_foreign(checkpoint):
        return _meta_of_example(Path(checkpoint))
    try:
        meta = folders.verify(checkpoint)
    except folders.DamagedError as e:
        raise UsageError(f"{checkpoint} is damaged: {e}: name another checkpoint") from e
    if meta["step"] is not None:
        raise UsageError(
            f"{checkpoint} was saved after {meta['step']} steps of epoch {meta['epoch']}, before the processes "
            "averaged their BN statistics: name a checkpoint of the end of an epoch"
        )
    return meta


def _meta_of_example(checkpoint):
    """The part of a meta.json that an inference needs, for a checkpoint of NVIDIA's example, which has none."""
    args = config.from_dict({})
    prefix = folders.foreign_prefix(args, checkpoint)
    path = checkpoint / f"{prefix}.pdparams"
    try:
        state = arrays.read_pickle(path)
    except arrays.UnreadableError as e:
        raise UsageError(f"{path} cannot be read ({e}): choose a different checkpoint") from e
    shapes = {name: array.shape for name, array in state.items() if not name.endswith(variables.MASK)}
    filters, outputs = shapes.get("conv2d_0.w_0", ()), shapes.get("linear_0.b_0", ())
    if len(filters) == 4 and filters[1] in (3, 4) and len(outputs) == 1 and outputs[0] > 0:
        flags = {"model_prefix": prefix, "num_of_class": outputs[0], "image_shape": [filters[1], 224, 224]}
        flags |= {"interp": "triangular"}  # the rest of the example's preprocessing is the default
        for arch in MODELS:
            flags["model_arch_name"] = arch
            if _parameter_shapes(config.from_dict(flags)) == shapes:
                logger.warn(
                    f"{checkpoint} has no {folders.META}: its parameters are those of {arch}; the preprocessing is "
                    "that of NVIDIA's example, and classes are numbers"
                )
                at = folders.position(checkpoint.resolve().name)
                meta = {"epoch": at and at[0], "step": None, "classes": [], "evaluated": None}
                return {**meta, "arguments": flags}
    raise UsageError(
        f"{checkpoint} has no {folders.META}, and its parameters are not those of a network here: use one of "
        f"{', '.join(MODELS)}"
    )


def _parameter_shapes(args):
    """{name: shape} of a network's parameters and BN statistics."""
    paddle.enable_static()
    program, *_ = _build(args)
    parameters = (var for var in program.list_vars() if isinstance(var, paddle.base.framework.Parameter))
    return {var.name: tuple(var.shape) for var in parameters}


def _build(args, uint8=False):
    """(program, its start-up program, images, probabilities, logits)"""
    program, startup = static.Program(), static.Program()
    with static.program_guard(program, startup), paddle.utils.unique_name.guard():
        channels, *size = args.image_shape
        if uint8:
            images = static.data("images", [None, *size, channels], dtype="uint8")
            # (level * scale - mean) / std, as one multiplication and one addition
            factor = np.float64(args.normalize_scale) / args.normalize_std
            shift = -np.divide(args.normalize_mean, args.normalize_std)
            factor, shift = (paddle.to_tensor(x.astype("float32").reshape(1, 3, 1, 1)) for x in (factor, shift))
            normalised = images.astype("float32").transpose([0, 3, 1, 2]) * factor + shift
        else:
            images = normalised = static.data("images", [None, channels, *size], dtype="float32")
        model = build_model(args)
        model.eval()
        logits = model(normalised)
        probabilities = paddle.nn.functional.softmax(logits)
        block = program.global_block()
        block._rename_var(probabilities.name, "probabilities")
    return program, startup, images, block.var("probabilities"), logits


def _describe(args, meta, images, probabilities):
    dtype, layout = ("float32", "NCHW") if images.shape[1] == 3 else ("uint8", "NHWC")
    evaluated = meta["evaluated"]
    return {
        "arch": args.model_arch_name,
        "input": {
            **{"name": images.name, "shape": [None, *images.shape[1:]], "dtype": dtype, "layout": layout},
            **{"color": "RGB", "values": "normalised" if dtype == "float32" else "levels from 0 to 255"},
        },
        "output": {"name": probabilities.name, "shape": [None, args.num_of_class], "values": "probabilities"},
        "preprocessing": {
            "resize_short": args.resize_short,
            "interp": args.interp,
            "center_crop": args.crop_size,
            "scale": args.normalize_scale,
            "mean": args.normalize_mean,
            "std": args.normalize_std,
            "conventions": preprocessing.CONVENTIONS,
        },
        "classes": meta.get("class_names", meta["classes"]),
        "epoch": meta["epoch"],
        "evaluated": evaluated and {name: evaluated[name] for name in ("top1", "top5", "loss")},
    }


def open_model(path, device):
    """Open a checkpoint's folder, an export's folder or an ONNX file.

    Raises:
        UsageError: it is none of these, is damaged, or its engine is not installed.
    """
    path = Path(path)
    if path.suffix == ".onnx":
        return open_onnx(path, device)
    if os.path.lexists(path / f"{NAME}.json"):
        return open_paddle(path, device)
    if path.is_dir():
        return load_checkpoint(path, device).model()
    raise UsageError(f"{path} does not exist: name the folder of a checkpoint or of an export, or an ONNX file")


def open_paddle(folder, device, logits=False):
    """The network of an export's folder, run by Paddle Inference; errors of open_model."""
    from paddle import inference

    description = _read_description(folder)
    paths = [Path(folder) / f"{NAME}.{suffix}" for suffix in SUFFIXES]
    if not is_table(description.get("files"), **{path.name: _is_file for path in paths}):
        raise UsageError(f"{folder}/{NAME}.json: files has no size and sha256 of {NAME}.*; export it again")
    try:  # Paddle reads a damaged file into a crash
        for path in paths:
            folders.verify_file(path, description["files"][path.name], f"{NAME}.json")
    except folders.DamagedError as e:
        raise UsageError(f"{folder} is damaged: {e}: export it again") from e
    program, parameters = (path.read_bytes() for path in paths)  # Paddle opens only names in UTF-8
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

    return _tried(Model("paddle.inference", description, outputs), folder)


def _with_logits(serialized):
    """A program of an export whose second output is the input of its softmax; in and out as the bytes of a file."""
    program = static.deserialize_program(serialized)
    block = program.global_block()
    [logits] = [op.input("X")[0] for op in block.ops if op.type == "softmax"]
    [fetched] = [op.output("Out") for op in block.ops if op.type == "fetch"]
    block.append_op(type="fetch", inputs={"X": [logits]}, outputs={"Out": fetched}, attrs={"col": 1})
    return program.desc.serialize_to_string()


def open_onnx(path, device, logits=False):
    """The network of an ONNX file that the export wrote, run by onnxruntime; errors of open_model."""
    onnxruntime = onnx_writer.require("onnxruntime")
    try:
        with files.open_regular(path, MAX_ONNX_BYTES) as file:
            data = file.read()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read ({e.strerror}); use an ONNX file of an export") from e
    if logits:
        data = onnx_writer.with_logits(data)
    wanted = ["CUDAExecutionProvider"] * (device == "gpu") + ["CPUExecutionProvider"]
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()]
    try:
        session = onnxruntime.InferenceSession(data, providers=providers)
        text = session.get_modelmeta().custom_metadata_map.get(onnx_writer.METADATA, "")
    except Exception as e:  # onnxruntime's errors have no common class
        reason = str(e).strip().splitlines()[-1]
        raise UsageError(f"{path}: cannot be opened by onnxruntime ({reason}); export it again") from e
    description = _checked_description(text, path)
    name = description["input"]["name"]
    return _tried(Model("onnxruntime", description, lambda images: session.run(None, {name: images})), path)


def _tried(model, path):
    """A model, after one image of zeros has shown that the network fits its description.

    Raises:
        UsageError: it does not.
    """
    taken, given = model.description["input"], model.description["output"]
    try:
        found = list(model.run(np.zeros([1, *taken["shape"][1:]], taken["dtype"])).shape)
    except Exception as e:  # the engines' errors have no common class
        reason = errors.core(e)
        raise UsageError(f"{path}: the network does not fit its description ({reason}); export it again") from e
    if found != [1, given["shape"][1]]:
        raise UsageError(
            f"{path}: the output of the network is {found}, not {[1, *given['shape'][1:]]}; export it again"
        )
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
        raise UsageError(f"{path}: does not describe a network of this program ({problem}); export it again")
    return description


def _is_file(value):
    return is_table(value, size=is_number, sha256=is_text)


def resolve_device(wanted):
    """ "cpu" or "gpu" for "auto", "cpu" or "gpu"; raises UsageError where there is no GPU."""
    args = config.from_dict({"device": wanted})
    processes.resolve_devices(args)
    return args.device


def loader_args(description, batch_size, device="cpu", threads=4):
    """The flags with which dali.py makes the images that a network takes, but for their type: levels are float32.

    Args:
        description: content of model.json.
        batch_size: images a batch.
        device: "cpu" or "gpu".
        threads: of DALI.
    """
    told, is_levels = description["preprocessing"], description["input"]["dtype"] == "uint8"
    crop = told["center_crop"]
    values = {
        **{"crop_size": crop, "image_shape": [3, crop, crop], "resize_short": told["resize_short"]},
        **{"interp": told["interp"], "data_layout": description["input"]["layout"]},
        **{"normalize_scale": 1 if is_levels else told["scale"]},
        **{"normalize_mean": [0, 0, 0] if is_levels else told["mean"]},
        **{"normalize_std": [1, 1, 1] if is_levels else told["std"]},
        **{"batch_size": batch_size, "dali_num_threads": threads, "device": device},
    }
    args = config.from_dict(values)
    processes.resolve_devices(args)
    return args
