"""Quantization-aware training (--qat). tests/serving/test_int8_onnx.py tests INT8 exports."""

import pickle
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import static

from conftest import NHWC, assert_one_error, frozen, losses, phase
from paddle_resnet import export, program
from paddle_resnet.components import quantization
from paddle_resnet.models import layers
from paddle_resnet.serving import fixed_sizes, inference, networks

THREE = ["--qat", "--epochs", "3", "--print-interval", "1"]


@pytest.fixture
def trained(one_block, checkpoint, run_train, tmp_path):
    """Train for one epoch with --qat, starting with the weights of a checkpoint, and return (checkpoint, report)."""

    def trained(*flags):
        folder = tmp_path / "qat"
        flags = ["--from-pretrained-params", checkpoint, "--output-dir", folder, *flags]
        code, report = run_train("--qat", *flags)
        assert code == 0
        return folder / "Tiny/0", report

    return trained


def read(folder, suffix="pdparams"):
    return pickle.loads((folder / f"tiny.{suffix}").read_bytes())


def ranges(params):
    return {name: value.item() for name, value in params.items() if quantization.is_range(name)}


def test_weight_of_batch_yields_exponential_moving_average():
    average, values = 0.0, np.random.RandomState(0).uniform(1, 2, 20)
    for batch, value in enumerate(values):
        average += quantization.weight_of_batch(batch) * (value - average)
    weights = 0.9 ** np.arange(20)[::-1]
    assert average == pytest.approx(np.average(values, weights=weights))


def test_zeros_are_quantized_to_zeros():
    levels, scales = quantization.quantized(np.float32([[0, 0], [127, -254]]), 0, 8)
    np.testing.assert_array_equal(levels, [[0, 0], [64, -127]])
    np.testing.assert_allclose(scales, [[1 / 127], [2]])


# {case: (function of two activations and a parameter, each [4, 4], the activations that are quantized)}.
ACTIVATIONS = {
    "addition": (lambda x, y, p: x + y, ["x", "y"]),
    "parameter as first addend": (lambda x, y, p: p + x, []),
    "parameter as second addend": (lambda x, y, p: x + p, []),
    "fully connected layer": (lambda x, y, p: layers.product(x, p), ["x"]),
    "product of activations": (lambda x, y, p: layers.product(x, y), []),
    "fully connected layer in float32": (lambda x, y, p: in_float32(lambda: layers.product(x, p)), []),
}


def in_float32(build):
    with static.name_scope(layers.FLOAT32_SCOPE):
        return build()


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_inputs_of_layers_and_residual_additions_are_quantized(case):
    build, expected = ACTIVATIONS[case]
    main = static.Program()
    with static.program_guard(main, static.Program()):
        build(*(static.data(name, [4, 4]) for name in "xy"), paddle.create_parameter([4, 4], "float32"))
    assert list(quantization.activations(main)) == expected


def test_ranges_follow_largest_values_and_gradients_pass_through(parse):
    """The expected range of the first convolution's input is computed from the images. Ranges are not trained, and the
    gradient of rounding is defined as 1."""
    args = parse("--qat", "--kernels", "paddle", "--cuda-graph", "false")
    main, startup = static.Program(), static.Program()
    fetchs, lr_scheduler, _, _ = program.build(args, main, startup, 3)
    names = quantization.float32_variables(main)
    assert names > {"data.largest", "data.quantized", quantization.range_name(0), "conv2d_0.w_0.quantized"}
    assert not names & {"data", "conv2d_0.w_0", "conv2d_0.tmp_0"}
    exe = static.Executor(paddle.CPUPlace())
    exe.run(startup)
    compiled = program.compile_prog(args, main)
    random, expected = np.random.RandomState(0), 0.0
    gradients = [f"conv2d_0.w_0.quantized{end}" for end in ("", "@GRAD")] + ["conv2d_0.w_0", "conv2d_0.w_0@GRAD"]
    for batch in range(3):
        images = random.randn(8, 3, 32, 32).astype("float32") * (batch + 1)
        labels = random.randint(0, 3, (8, 1))
        compiled.write_scalars()
        before = np.array(static.global_scope().find_var("conv2d_0.w_0").get_tensor())
        quantized, over, _, gradient = exe.run(compiled, {"data": images, "label": labels}, gradients)
        lr_scheduler.batch += 1
        expected += quantization.weight_of_batch(batch) * (np.abs(images).max() - expected)
        actual = np.array(static.global_scope().find_var(quantization.range_name(0)).get_tensor())
        assert actual.item() == pytest.approx(expected, rel=1e-6)
        np.testing.assert_array_equal(over, gradient)
        levels, scales = quantization.quantized(before, 0, 8)
        np.testing.assert_allclose(quantized, levels * scales, rtol=1e-5, atol=1e-7)
        assert len(np.unique(levels)) > 50


def quantized_network(on_gpu=False):
    """Build a convolution with ReLU, pooling and a classifier, quantize them, and return (program, output). All ranges
    are 1."""
    paddle.seed(0)
    main, startup = static.Program(), static.Program()
    with static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x = paddle.nn.functional.relu(paddle.nn.Conv2D(3, 8, 3)(static.data("x", [2, 3, 6, 6])))
        out = paddle.nn.Linear(8, 5)(paddle.flatten(paddle.nn.AdaptiveAvgPool2D(1)(x), 1))
        quantization.insert(main, on_gpu=on_gpu)
    exe = static.Executor(paddle.CPUPlace())
    with static.scope_guard(static.Scope()):
        exe.run(startup)
        for name in quantization.ranges(main):
            static.global_scope().find_var(name).get_tensor().set(np.ones(1, "float32"), exe.place)
        images = np.random.RandomState(0).uniform(-1, 1, (2, 3, 6, 6)).astype("float32")
        return main, exe.run(main, {"x": images}, [out])[0]


def test_weights_are_quantized_along_their_first_axis_on_a_gpu():
    outputs = []
    for on_gpu in (False, True):
        main, out = quantized_network(on_gpu)
        outputs.append(out)
        ops = main.global_block().ops
        assert [op.attr("quant_axis") for op in ops if op.type == quantization.WEIGHT] == [0, 0 if on_gpu else 1]
        assert sum(op.type == "transpose2" for op in ops) == 2 * on_gpu
        assert {op.attr("round_type") for op in ops if "quantize_dequantize" in op.type} == {0}  # ties to even
    assert np.abs(outputs[0]).max() > 0
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-6)


@pytest.mark.parametrize(("engine", "not_negative"), [("onnxruntime", 9), ("tensorrt", 8)])
def test_onnxruntime_uses_all_levels_of_values_that_are_not_negative(engine, not_negative):
    """The images have both signs. Pooling and reshaping do not change the sign."""
    main, _ = quantized_network()
    quantization.use_levels_of(engine, main, weight_bits=7)
    ops = main.global_block().ops
    assert {quantization.bits(op) for op in ops if op.type == quantization.WEIGHT} == {7}
    activations = [quantization.bits(op) for op in ops if op.type == quantization.ACTIVATION]
    assert activations == [8, not_negative, not_negative]
    for kind in ("relu", "relu6", "sigmoid", "hard_sigmoid"):
        assert quantization._is_not_negative({"y": SimpleNamespace(type=kind)}, "y")
    for kind in ("hard_swish", "swish", "silu", "mish", "elementwise_add"):
        assert not quantization._is_not_negative({"y": SimpleNamespace(type=kind)}, "y")


def test_layers_with_their_biases_and_groups():
    """The addition of two activations is not a bias."""
    main = static.Program()
    with static.program_guard(main, static.Program()), paddle.utils.unique_name.guard():
        x = paddle.nn.Conv2D(3, 3, 3, padding=1, groups=3, bias_attr=False)(static.data("x", [2, 3, 6, 6]))
        x = paddle.nn.Conv2D(3, 3, 3, padding=1, bias_attr=False)(x) + x
        x = paddle.nn.Conv2D(3, 3, 1, weight_attr="weight", bias_attr="bias")(x)
        paddle.nn.Linear(108, 5)(paddle.flatten(x, 1))
    layers = [(layer.weight, layer.bias, layer.axis, layer.groups) for layer in quantization.layers(main)]
    convolutions = [("conv2d_0.w_0", None, 0, 3), ("conv2d_1.w_0", None, 0, 1), ("weight", "bias", 0, 1)]
    assert layers == [*convolutions, ("linear_0.w_0", "linear_0.b_0", 1, 1)]


def test_neither_mixing_of_images_nor_teacher_is_quantized(one_block, parse, checkpoint):
    found = []
    for flags in ([], ["--mixup", "0.2"], ["--teacher", checkpoint]):
        main = static.Program()
        program.build(frozen(parse("--qat", *flags)), main, static.Program(), 3)
        weights = [op.input("X") for op in main.global_block().ops if op.type == quantization.WEIGHT]
        found.append((quantization.ranges(main), weights))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_qat_keeps_accuracy_of_float_network_and_can_be_exported(run_train, photos, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    code, report = run_train("--epochs", "8", "--save-interval", "8", "--eval-interval", "8")
    assert code == 0 and phase(report, [7], "val.")["top1"] == 1
    flags = ["--lr", "0.005", "--from-pretrained-params", tmp_path / "output/Tiny/7"]
    code, report = run_train("--qat", *flags, "--output-dir", tmp_path / "qat")
    assert code == 0 and phase(report, [0], "val.")["top1"] == 1
    checkpoint = tmp_path / "qat/Tiny/0"
    for engine in ("onnxruntime", "tensorrt"):
        capsys.readouterr()
        export.export(checkpoint, tmp_path / engine, int8=engine, verify=photos)
        out = capsys.readouterr().out
        assert f"model.onnx: INT8 for {engine}, ranges from --qat" in out
        assert "onnxruntime: top1 1, " in out
    network = networks.load_checkpoint(checkpoint)
    images = np.random.RandomState(0).uniform(-2, 2, (8, 3, 32, 32)).astype("float32")
    _, expected = network.model(logits=True).outputs(images)
    # If all values have int8 levels, the ONNX model differs from the evaluated program only in rounding.
    _, actual = inference.open_onnx(tmp_path / "tensorrt/model.onnx", "cpu", logits=True).outputs(images)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.03 * np.abs(expected).max())
    _, paddle_inference = inference.open_paddle(tmp_path / "tensorrt", "cpu", logits=True).outputs(images)
    np.testing.assert_allclose(paddle_inference, expected, rtol=0, atol=0.03 * np.abs(expected).max())
    # With --onnx, but without --int8, the export also contains the quantized network.
    description = export.export(checkpoint, tmp_path / "onnx", onnx=True, uint8=True)
    assert (tmp_path / "onnx/model.onnx").stat().st_size < (tmp_path / "onnx/model.pdiparams").stat().st_size
    assert "int8" not in description
    capsys.readouterr()
    model = inference.open_model(checkpoint, "cpu")
    assert model.engine == "Executor"
    assert "onnxruntime: not used, because folding the BN of a network trained with --qat" in capsys.readouterr().err
    np.testing.assert_array_equal(model.run(images), network.model().run(images))
    steps = fixed_sizes.Steps(networks.load_fast(checkpoint, "float32", "cpu"), [8])
    np.testing.assert_allclose(steps(images.transpose(0, 2, 3, 1)), model.run(images), rtol=0, atol=0.03)


@pytest.mark.slow
def test_qat_resumes_bit_identically(one_block, checkpoint, losses_with_a_resume, tmp_path):
    flags = [*THREE, "--from-pretrained-params", checkpoint, "--ema", "0.9"]
    expected, actual = losses_with_a_resume("1_1", *flags)
    assert actual == expected
    for suffix in ("pdparams", "pdema"):
        expected, actual = (read(tmp_path / name, suffix) for name in ("uninterrupted/2", "output/Tiny/2"))
        assert len(ranges(expected)) == 7
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(
            ["--mixup", "0.4", "--dropout", "0.2", "--drop-path", "0.2", "--asp", "--prune-model"],
            marks=pytest.mark.slow,
        ),
        ["--accumulate-steps", "2", "--sizes", "24:0,32:1", "--epochs", "2"],
    ],
    ids=["mixup and asp", "stages"],
)
def test_evaluation_of_checkpoint_matches_that_of_training(trained, run_train, photos, tmp_path, flags):
    """Training, evaluation and export round activations in the same way."""
    pytest.importorskip("onnxruntime")
    checkpoint, report = trained(*flags)
    checkpoint = sorted(checkpoint.parent.glob("[0-9]"))[-1]
    expected = phase(report, [int(checkpoint.name)], "val.")
    code, report = run_train("--run-scope", "eval_only", "--from-checkpoint", checkpoint)
    assert code == 0
    assert phase(report, [], "val.")["loss"] == expected["loss"]
    export.export(checkpoint, tmp_path / "exported", verify=photos)


def test_features_are_those_of_the_quantized_network(trained):
    checkpoint, _ = trained("--run-scope", "train_only")
    images = np.random.RandomState(0).uniform(-2, 2, (8, 3, 32, 32)).astype("float32")
    probabilities, _ = networks.load_checkpoint(checkpoint, features=True).model().outputs(images)
    np.testing.assert_array_equal(probabilities, networks.load_checkpoint(checkpoint).model().run(images))


def test_int8_export_keeps_the_8_bits_of_the_weights(trained, tmp_path):
    """Without --qat, weights for onnxruntime have 7 bits. The zero points are those of the engine. The network for
    TensorRT reads uint8 images."""
    onnx = pytest.importorskip("onnx")
    checkpoint, _ = trained("--run-scope", "train_only")
    zero_points = {"onnxruntime": {("uint8", 0), ("uint8", 128)}, "tensorrt": {("int8", 0)}}
    for engine, expected in zero_points.items():
        export.export(checkpoint, tmp_path / engine, int8=engine, uint8=engine == "tensorrt")
        model = inference.open_model(tmp_path / engine / "model.onnx", "cpu")
        assert model.description["int8"] == {"engine": engine, "weight_bits": 8}
        graph = onnx.load(tmp_path / engine / "model.onnx").graph
        image_type = onnx.helper.tensor_dtype_to_np_dtype(graph.input[0].type.tensor_type.elem_type)
        assert image_type == (np.uint8 if engine == "tensorrt" else np.float32)
        assert "BatchNormalization" not in {node.op_type for node in graph.node}  # BN is folded into the convolutions
        constants = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        weights = [each for each in constants.values() if each.dtype == np.int8 and each.ndim == 4]
        assert max(np.abs(np.int32(each)).max() for each in weights) == 127
        zeros = [constants[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"]
        assert {(zero.dtype.name, zero.item()) for zero in zeros} == expected


@pytest.mark.slow
def test_captured_step_matches_uncaptured_step(one_block, run_train, tmp_path, fake):
    flags = [*THREE, *NHWC, "--kernels", "native"]
    code, expected = run_train(*flags, "--cuda-graph", "false")
    assert code == 0
    code, report = run_train(*flags, "--output-dir", tmp_path / "captured")
    assert code == 0 and fake.made[0].launches > 0
    assert losses(report) == losses(expected)
    expected, actual = (read(tmp_path / name / "Tiny/2") for name in ("output", "captured"))
    assert ranges(actual) == ranges(expected)


@pytest.mark.soak
def test_two_processes_average_ranges(launch, tmp_path):
    """Each process tracks the ranges of its own images. Checkpoints contain the mean over the processes."""
    launch(2, "--qat", "--batch-size", "4", "--parameters", tmp_path)
    first, second = (dict(np.load(tmp_path / f"epoch0_rank{rank}.npz")) for rank in range(2))
    assert len(ranges(first)) == 14 and ranges(first) == ranges(second) == ranges(read(tmp_path / "output/Tiny/0"))


def test_weights_without_ranges_are_an_error_unless_training_starts(checkpoint, run_train, capsys):
    evaluation = ["--run-scope", "eval_only"]
    for start, *flags in (
        ("--from-checkpoint", checkpoint, *evaluation),
        ("--from-checkpoint", checkpoint, "--last-epoch-of-checkpoint", "None"),
        ("--from-pretrained-params", checkpoint, *evaluation),
    ):
        assert run_train("--qat", start, *flags, "--overwrite")[0] == 2
        message = "was trained without --qat; use --from-pretrained-params to train with --qat, or remove --qat"
        assert_one_error(capsys.readouterr().err, [str(checkpoint), message])


def test_checkpoint_of_qat_run_trains_without_qat_but_cannot_be_calibrated(
    trained, run_train, photos, tmp_path, capsys
):
    folder, _ = trained()
    code, _ = run_train("--from-pretrained-params", folder)
    assert code == 0
    capsys.readouterr()
    flags = ["--int8", "--calibrate", str(photos)]
    assert export.main([str(folder), str(tmp_path / "exported"), *flags]) == 2
    assert "already has activation ranges from --qat; remove --calibrate" in capsys.readouterr().err
    assert export.main([str(folder), str(tmp_path / "exported"), "--onnx", "--precision", "float16"]) == 2
    problem = "--precision float16: not supported with --onnx for a checkpoint trained with --qat; remove one"
    assert problem in capsys.readouterr().err


def test_weights_of_linear_layers_are_quantized_alike_on_gpus(parse):
    """On a GPU, the weights of linear layers are transposed. The test runs the programs of both devices on the CPU."""
    results = []
    images, labels = np.random.RandomState(0).randn(4, 3, 32, 32).astype("float32"), [[0], [1], [2], [0]]
    for on_gpu in (False, True):
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup), paddle.utils.unique_name.guard(), static.scope_guard(static.Scope()):
            data, label = static.data("images", [None, 3, 32, 32]), static.data("label", [None, 1], "int64")
            out = paddle.nn.Linear(32 * 3 * 32, 3)(paddle.flatten(data, 1))
            quantization.insert(main, on_gpu=on_gpu)
            loss = paddle.mean(paddle.nn.functional.cross_entropy(out, label))
            [(weight, gradient), *_] = static.append_backward(loss)
            exe = static.Executor(paddle.CPUPlace())
            paddle.seed(0)
            exe.run(startup)
            values = {weight.name: np.random.RandomState(1).randn(*weight.shape), quantization.range_name(0): [3.0]}
            for name, value in values.items():
                tensor = static.global_scope().find_var(name).get_tensor()
                tensor.set(np.asarray(value, np.float32), paddle.CPUPlace())
            results.append(exe.run(main, {"images": images, "label": np.array(labels)}, [out, gradient]))
    for first, second in zip(*results, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
        assert np.abs(first).max() > 0
