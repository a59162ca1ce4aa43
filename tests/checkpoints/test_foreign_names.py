"""Parameter names of other projects: each tensor is assigned to the right parameter, or an error lists the
mismatches. Parameters of this project get the names of timm."""

import contextlib
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import other_projects
import paddle
import pytest
from paddle import static

from paddle_resnet.checkpoints import foreign_files, foreign_names
from paddle_resnet.checkpoints.foreign_names import MismatchError
from paddle_resnet.models import MODELS, build_model, registered


@functools.cache
def network(arch):
    """Build a network of this project for 5 classes and return (program, variable of the logits, parameters). All tests
    share the network. It computes in float64: in float32, a different order of summation can change the sign of some
    ReLU inputs, and later layers amplify the difference."""
    main, dtype = static.Program(), paddle.get_default_dtype()
    paddle.set_default_dtype("float64")
    with static.program_guard(main, static.Program()), paddle.utils.unique_name.guard():
        model = build_model(arch, 5, 3, "NCHW")
        model.eval()
        out = model(static.data("data", [None, 3, None, None], "float64"))
    paddle.set_default_dtype(dtype)
    return main, out, foreign_names.parameters(model)


def own(arch):
    return network(arch)[2]


@contextlib.contextmanager
def dynamic():
    paddle.disable_static()
    try:
        yield
    finally:
        paddle.enable_static()


def of_vision(name, classes=5):
    """Run a paddle.vision network with random BN statistics and return (state, images, logits)."""
    random = np.random.default_rng(0)
    with dynamic():
        network = getattr(paddle.vision.models, name)(num_classes=classes)
        network.eval()
        for key, value in network.state_dict().items():
            if value.ndim == 1 and "fc" not in key and "classifier" not in key:
                value.set_value(random.uniform(0.5, 1.5, value.shape).astype("float32"))
        images = random.standard_normal((2, 3, 32, 32), dtype=np.float32)
        logits = network(paddle.to_tensor(images)).numpy()
        return {key: value.numpy() for key, value in network.state_dict().items()}, images, logits


def as_torch(state, classifier):
    """Convert the state_dict of a network of paddle.vision to PyTorch's names and layout. torchvision uses the same
    layer names as paddle.vision."""
    names = {"_mean": "running_mean", "_variance": "running_var"}
    found = {re.sub(r"_mean$|_variance$", lambda match: names[match[0]], key): value for key, value in state.items()}
    found[f"{classifier}.weight"] = found[f"{classifier}.weight"].T
    counters = [key.replace("running_mean", "num_batches_tracked") for key in found if key.endswith("running_mean")]
    return found | dict.fromkeys(counters, np.array(3))


def logits(arch, params, images):
    main, out, _ = network(arch)
    with static.scope_guard(static.Scope()):
        for name, array in params.items():
            static.global_scope().var(name).get_tensor().set(array.astype("float64"), paddle.CPUPlace())
        return static.Executor().run(main, {"data": images.astype("float64")}, [out])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "vision", "classifier"),
    [
        *(
            ("ResNet18", "resnet18", "fc"),
            ("ResNet50", "resnet50", "fc"),
            ("MobileNetV2", "mobilenet_v2", "classifier.1"),
        ),
        *(("MobileNetV3_Large", "mobilenet_v3_large", None), ("MobileNetV3_Small", "mobilenet_v3_small", None)),
    ],
)
def test_logits_equal_those_of_paddle_vision(arch, vision, classifier):
    """This project's MobileNetV2 uses a different BN epsilon than paddle.vision. The conversion compensates for the
    difference by scaling the BN weights."""
    family = MODELS[arch].module
    state, images, expected = of_vision(vision)
    assert foreign_names.number_of_classes(family, state) == 5
    params, projects = foreign_names.convert(family, state, own(arch))
    assert "paddle.vision" in projects
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits(arch, params, images) / scale, expected / scale, rtol=0, atol=1e-4)
    for prefix in ("", "module.") if classifier else ():  # torchvision's MobileNetV3 uses different names
        torch_state = {prefix + key: value for key, value in as_torch(state, classifier).items()}
        torch_state, removed = foreign_names.without_prefix(family, torch_state)
        assert removed == prefix
        found, _ = foreign_names.convert(family, torch_state, own(arch))
        assert found.keys() == params.keys()
        assert all((found[name] == params[name]).all() for name in params)


# These networks are large, and other tests cover the same layer names.
SLOW = ("ResNet18_vd, PaddleClas", "ResNet50_vd, timm", "ResNeXt50_32x4d, PaddleClas", "ResNeXt50_32x4d, torchvision")
QUICK = ("PPLCNet_x1_0, PaddleClas",)


def converted(case):
    """Generate weights for the recorded network of a project, and convert them to parameters of this project."""
    arch, project = case.split(", ")
    shapes, _ = other_projects.recorded()[case]
    params, projects = foreign_names.convert(MODELS[arch].module, other_projects.weights(shapes, arch), own(arch))
    assert project in projects
    return params


@pytest.mark.parametrize(
    "case",
    [
        case if case in QUICK else pytest.param(case, marks=[pytest.mark.slow, *[pytest.mark.soak] * (case in SLOW)])
        for case in other_projects.recorded()
    ],
)
def test_logits_equal_those_recorded_with_other_projects(case):
    expected = other_projects.recorded()[case][1]
    found = logits(case.split(", ")[0], converted(case), other_projects.images())
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("has_classifier", [False, True])
def test_dropout_of_paddleclas_scales_only_the_classifier(has_classifier):
    """The parameters are those of the last layers of PP-LCNet. A file may lack the classifier."""
    state = {"last_conv.weight": np.ones((4, 2, 1, 1), np.float32)}
    expected = {"head.weight": state["last_conv.weight"], "head.bias": np.zeros(4, np.float32)}
    if has_classifier:
        state |= {"fc.weight": np.ones((4, 3), np.float32), "fc.bias": np.ones(3, np.float32)}
        expected |= {"classifier.weight": np.full((4, 3), 0.8, np.float32), "classifier.bias": state["fc.bias"]}
    parameters = {name: foreign_names.Parameter(name, array.shape) for name, array in expected.items()}
    found, projects = foreign_names.convert("pplcnet", state, parameters)
    assert found.keys() == expected.keys() and projects == "PaddleClas"
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    ("family", "conv", "bn", "epsilon"),
    [
        ("mobilenet_v3", "features.0.0", "features.0.1", 1e-3),  # torchvision
        ("mobilenet_v3", "conv_stem", "bn1", 1e-5),  # timm
        ("mobilenet_v3", "conv.0", "conv.1", 1e-3),  # paddle.vision
        ("mobilenet_v2", "features.0.0", "features.0.1", 1e-5),  # torchvision and paddle.vision
        ("ghostnet", "conv_stem", "bn1", 1e-5),  # timm
    ],
)
def test_first_layer_has_the_epsilon_of_its_project(family, conv, bn, epsilon):
    """With a variance of 0, BN divides by the square root of epsilon, which is 4e-5 in this project here."""
    fields = {"weight": 1, "bias": 1, "running_mean": 1, "running_var": 0}
    state = {f"{bn}.{field}": np.full(4, value, np.float32) for field, value in fields.items()}
    state[f"{conv}.weight"] = np.ones((4, 3, 3, 3), np.float32)
    parameters = {f"stem.bn.{field}": foreign_names.Parameter(field, (4,), 4e-5) for field in foreign_names._BN}
    parameters["stem.conv.weight"] = foreign_names.Parameter("filters", (4, 3, 3, 3))
    found, _ = foreign_names.convert(family, state, parameters)
    np.testing.assert_allclose(found["weight"], np.sqrt(4e-5 / epsilon), rtol=1e-6)


# These networks differ from other networks only in the number of blocks or channels.
COVERED = {"ResNet34", "ResNet50", "ResNet101", "ResNet152", "XResNet50", "EfficientNet_Lite0", "EfficientNet_Lite2"}
IN_TIMM = [arch for arch, network in MODELS.items() if getattr(network, "timm", None)]
# In timm, the BN layers of these networks have a different epsilon.
WITH_OTHER_EPSILON = ("MobileNetV2", "MobileNetV3_Small")
EACH_IN_TIMM = [
    pytest.param(
        arch, marks=[pytest.mark.slow] * (arch not in WITH_OTHER_EPSILON) + [pytest.mark.soak] * (arch in COVERED)
    )
    for arch in IN_TIMM
]


def random_parameters(arch, parameters):
    """Return {name in this project: random array}, with positive BN scales and variances, and with positive outputs of
    the layer that timm and this project pad differently."""
    arrays = other_projects.weights({name: parameter.shape for name, parameter in parameters.items()}, arch)
    return {name: np.abs(array) if name == "stem.first.lab.bias" else array for name, array in arrays.items()}


@pytest.mark.parametrize("arch", EACH_IN_TIMM)
def test_conversion_to_timm_is_the_inverse_of_the_conversion(arch):
    parameters, family, random = own(arch), MODELS[arch].module, np.random.default_rng(0)
    arrays = {name: random.random(parameter.shape, np.float32) + 0.1 for name, parameter in parameters.items()}
    tensors = foreign_names.to_timm(family, arrays, parameters)
    found, projects = foreign_names.convert(family, tensors, parameters)
    assert "timm" in projects
    assert found.keys() == {parameter.variable for parameter in parameters.values()}
    for name, parameter in parameters.items():
        np.testing.assert_allclose(found[parameter.variable], arrays[name], rtol=1e-6, atol=0, err_msg=name)
    if f"{arch}, timm" in other_projects.recorded():
        shapes, _ = other_projects.recorded()[f"{arch}, timm"]
        is_counter = re.compile("num_batches_tracked$").search
        assert {name: array.shape for name, array in tensors.items()} == {
            name: shape for name, shape in shapes.items() if not is_counter(name)
        }


@pytest.mark.parametrize("arch", EACH_IN_TIMM)
def test_timm_computes_the_same_logits_from_an_exported_file(arch, tmp_path):
    for package in ("timm", "safetensors"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    parameters = own(arch)
    arrays = random_parameters(arch, parameters)
    with open(tmp_path / "model.safetensors", "wb") as file:
        tensors = foreign_names.to_timm(MODELS[arch].module, arrays, parameters)
        foreign_files.write_safetensors(file, tensors, {"format": "pt"})
    np.save(tmp_path / "images.npy", other_projects.images())
    command = [sys.executable, Path(__file__).with_name("timm_logits.py"), MODELS[arch].timm, tmp_path]
    subprocess.run(command, check=True)
    expected = np.load(tmp_path / "logits.npy")
    params = {parameter.variable: arrays[name] for name, parameter in parameters.items()}
    found = logits(arch, params, other_projects.images())
    scale = np.abs(expected).max()
    assert scale > 0.1
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=1e-4)
    print(f"{arch}: largest difference of the logits {np.abs(found - expected).max() / scale:.1e} of the largest logit")


@pytest.mark.parametrize("field", ["scale", "bias"])
def test_negative_values_before_the_pooling_of_timm_cause_a_warning(capsys, field):
    parameters = own("PPHGNetV2_B0")
    arrays = random_parameters("PPHGNetV2_B0", parameters)
    tensors = foreign_names.to_timm("pphgnet_v2", arrays, parameters)
    foreign_names.convert("pphgnet_v2", tensors, parameters)
    assert capsys.readouterr().err == ""
    tensors[f"stem.stem1.lab.{field}"] *= -1
    foreign_names.convert("pphgnet_v2", tensors, parameters)
    foreign_names.to_timm("pphgnet_v2", arrays | {f"stem.first.lab.{field}": np.float32([-1])}, parameters)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    for warning in warnings:
        assert (
            "stem.first.lab: returns negative values, which timm pads with zeros at the bottom and right edge"
            in warning
        )


@pytest.mark.parametrize("case", ["XResNet50, fastai", "MobileNetV3_Small, timm", "GhostNet, PaddleClas"])
def test_error_contains_missing_and_unexpected_tensors(case):
    arch, shapes = case.split(", ")[0], other_projects.recorded()[case][0]
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    removed = next(name for name in state if name.endswith("bias"))
    del state[removed]
    with pytest.raises(MismatchError, match=r"\(1 unexpected: extra.weight, 1 missing: stem[.0]*\.bn\.bias\)"):
        foreign_names.convert(MODELS[arch].module, state | {"extra.weight": np.zeros(3, np.float32)}, own(arch))


def test_two_tensors_for_one_parameter_are_an_error():
    """In fastai's XResNet, the classifier may be any numbered layer."""
    shapes = other_projects.recorded()["XResNet50, fastai"][0]
    state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    [bias] = (name for name in state if re.fullmatch(r"\d+\.bias", name))
    with pytest.raises(MismatchError, match=r"\(1 unexpected: 99.bias\)"):
        foreign_names.convert(MODELS["XResNet50"].module, state | {"99.bias": state[bias]}, own("XResNet50"))


@pytest.mark.parametrize("case", other_projects.PACKAGES)
def test_installed_package_has_the_recorded_names_and_logits(case):
    package = other_projects.PACKAGES[case]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, other_projects.__file__, case]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (_, (shapes, values)), (recorded_shapes, expected) = other_projects.parsed(output), other_projects.recorded()[case]
    assert shapes == recorded_shapes
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


NAMES = {
    "ResNeXt50_32x4d, torchvision": {
        "conv1.weight": "stem.0.conv.weight",
        "layer1.0.downsample.1.running_var": "stages.0_0.shortcut.bn._variance",
        "layer3.5.conv2.weight": "stages.2_5.branch.1.conv.weight",
        "layer4.2.bn3.bias": "stages.3_2.branch.2.bn.bias",
    },
    "ResNet50, PaddleClas": {
        "stem.0.bn._mean": "stem.0.bn._mean",
        "blocks.3.short.conv.weight": "stages.1_0.shortcut.conv.weight",
        "blocks.13.conv0.bn._variance": "stages.3_0.branch.0.bn._variance",
        "fc.weight": "classifier.weight",
    },
    "ResNet50_vd, PaddleClas": {
        "stem.2.conv.weight": "stem.2.conv.weight",
        "blocks.0.short.bn.weight": "stages.0_0.shortcut.bn.weight",
        "blocks.3.short.conv.weight": "stages.1_0.shortcut.1.conv.weight",
    },
    "ResNet50_vd, timm": {
        "conv1.3.weight": "stem.1.conv.weight",
        "conv1.4.running_mean": "stem.1.bn._mean",
        "bn1.weight": "stem.2.bn.weight",
        "layer2.0.downsample.1.weight": "stages.1_0.shortcut.1.conv.weight",
        "layer2.0.downsample.2.bias": "stages.1_0.shortcut.1.bn.bias",
    },
    "MobileNetV2, timm": {
        "blocks.0.0.conv_dw.weight": "blocks.0.depthwise.conv.weight",
        "blocks.0.0.bn2.bias": "blocks.0.project.bn.bias",
        "blocks.2.1.conv_pw.weight": "blocks.4.expand.conv.weight",
        "bn2.running_mean": "head.bn._mean",
    },
    "EfficientNet_Lite1, efficientnet-lite-pytorch": {
        "_bn0.bias": "stem.bn.bias",
        "_blocks.0._bn2.weight": "blocks.0.project.bn.weight",
        "_blocks.10._depthwise_conv.weight": "blocks.10.depthwise.conv.weight",
        "_bn1.weight": "head.bn.weight",
        "_fc.bias": "classifier.bias",
    },
    "EfficientNet_Lite0, timm": {"blocks.6.0.conv_pwl.weight": "blocks.15.project.conv.weight"},
}


@pytest.mark.parametrize("case", NAMES)
def test_names_of_other_projects_are_recognized(case):
    """The state contains only the tensors of the test case and one tensor per block, so the error message lists missing
    tensors but no unexpected ones."""
    parameters = own(case.split(", ")[0])
    family = registered(case.split(", ")[0]).module
    state = {
        name: np.full(parameters[target].shape, i + 1, np.float32)
        for i, (name, target) in enumerate(NAMES[case].items())
    }
    with pytest.raises(MismatchError) as error:
        foreign_names.convert(family, state | blocks_of(case), parameters)
    assert "unexpected" not in str(error.value)
    missing = next(line for line in error.value.lines if line.startswith("missing: "))
    assert not {*NAMES[case].values()} & {*missing.removeprefix("missing: ").split(", ")}


def test_weights_of_efficientnet_lite_are_not_scaled():
    """efficientnet-lite-pytorch and timm use the same BN epsilon as this project."""
    parameters = own("EfficientNet_Lite0")
    bn = {"expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}
    renames = {"stem.conv": "_conv_stem", "stem.bn": "_bn0", "head.conv": "_conv_head", "head.bn": "_bn1"}
    renames |= {"classifier": "_fc", "blocks": "_blocks"}
    renames |= {f"{part}.conv": f"_{part}_conv" for part in bn} | {f"{part}.bn": name for part, name in bn.items()}
    state = {}
    for name, parameter in parameters.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        state[name] = np.full(parameter.shape, 0.5, np.float32)
    params, _ = foreign_names.convert("efficientnet_lite", state, parameters)
    assert all((array == 0.5).all() for array in params.values())
    assert {layout.epsilon for layout in foreign_names.LAYOUTS["efficientnet_lite"]} == {1e-3}


def blocks_of(case):
    """Return one tensor per block, with the tensor names of the project in the test case."""
    depths = {"ResN": (3, 4, 6, 3), "Mobi": (1, 2, 3, 4, 3, 3, 1), "Effi": (1, 2, 2, 3, 3, 4, 1)}[case[:4]]
    each = [(stage, i) for stage, depth in enumerate(depths) for i in range(depth)]
    if case.endswith("PaddleClas"):
        return {f"blocks.{n}.conv1.bn.bias": np.zeros(0, np.float32) for n in range(len(each))}
    if case.endswith("-pytorch"):
        return {f"_blocks.{n}._bn1.bias": np.zeros(0, np.float32) for n in range(19)}
    name = "layer{}.{}.bn1.bias" if case.startswith("ResN") else "blocks.{}.{}.bn1.bias"
    first = 1 if case.startswith("ResN") else 0
    return {name.format(stage + first, i): np.zeros(0, np.float32) for stage, i in each}


@pytest.fixture(scope="module")
def tiny():
    """Return the state of paddle.vision's ResNet18 and the parameters of this project's ResNet18."""
    paddle.enable_static()
    return of_vision("resnet18")[0], own("ResNet18")


def changed(state, **changes):
    state = dict(state)
    for name, value in changes.items():
        name = name.replace("__", ".")
        state.pop(name) if value is None else state.update({name: value})
    return state


MISMATCHES = {
    "1 unexpected: layer1.0.conv3.weight": {"layer1__0__conv3__weight": np.zeros((64, 64, 1, 1), np.float32)},
    "1 unexpected: aux.weight": {"aux__weight": np.zeros(3, np.float32)},
    "1 unexpected: bn1.scale": {"bn1__scale": np.zeros(64, np.float32)},
    "1 unexpected: layer4.2.bn1.weight": {"layer4__2__bn1__weight": np.zeros(512, np.float32)},
    "1 missing: stages.1_0.shortcut.conv.weight": {"layer2__0__downsample__0__weight": None},
    "1 of a different shape: conv1.weight is [64, 4, 7, 7], not [64, 3, 7, 7]": {
        "conv1__weight": np.zeros((64, 4, 7, 7), np.float32)
    },
    "1 not float32: fc.bias is int64": {"fc__bias": np.zeros(5, np.int64)},
    "stem.0.bn has a negative variance": {"bn1___variance": np.full(64, -1, np.float32)},
    "classifier.bias is not finite in float32 after the conversion": {"fc__bias": np.full(5, np.inf, np.float32)},
}


@pytest.mark.parametrize("message", MISMATCHES)
def test_mismatched_tensors_are_rejected(tiny, message):
    state, parameters = tiny
    with pytest.raises(MismatchError, match=re.escape(message)):
        foreign_names.convert("resnet", changed(state, **MISMATCHES[message]), parameters)


def test_variance_of_a_dead_channel_is_accepted(tiny):
    state, parameters = tiny
    foreign_names.convert("resnet", changed(state, bn1___variance=np.zeros(64, np.float32)), parameters)


def test_incomplete_squeeze_excitation_is_not_adapted():
    """The error message must then list the tensors that are missing or have a different shape."""
    shapes = {"reduce.weight": (6, 24, 1, 1), "reduce.bias": (6,), "expand.weight": (24, 6, 1, 1), "expand.bias": (24,)}
    padded = {"reduce.weight": (8, 24, 1, 1), "reduce.bias": (8,), "expand.weight": (24, 8, 1, 1), "expand.bias": (24,)}

    def adapted(shapes):
        """Return ({name: shape}, {names of scaled tensors})."""
        arrays = {f"0.se.{name}": np.ones(shape) for name, shape in shapes.items()}
        foreign_names._adapt_squeeze_excitation(arrays, {"0.se.reduce.weight": (8, 24, 1, 1)}, 0.2, 0.5)
        arrays = {name.removeprefix("0.se."): array for name, array in arrays.items()}
        assert {array.flat[0] for array in arrays.values()} <= {1, 0.2 * 6}
        return {name: array.shape for name, array in arrays.items()}, {n for n, a in arrays.items() if a.flat[0] != 1}

    expand = {"expand.weight", "expand.bias"}
    assert adapted(shapes) == (padded, expand)
    for name in shapes:
        rest = {other: shape for other, shape in shapes.items() if other != name}
        is_padded = name == "expand.bias"  # the only shape that does not depend on the number of hidden channels
        expected = {other: (padded if is_padded else shapes)[other] for other in rest}
        assert adapted(rest) == (expected, set() if name in expand else expand)
        if not is_padded:
            wrong = shapes | {name: (5, *shapes[name][1:]) if name != "expand.weight" else (24, 5, 1, 1)}
            assert adapted(wrong) == (wrong, expand)


def test_error_lines_list_all_tensors(tiny):
    state, parameters = tiny
    extra = {f"extra{i}.weight": np.zeros(1, np.float32) for i in range(7)}
    with pytest.raises(MismatchError, match=r"7 unexpected: extra0.weight.*extra4.weight, \.\.\.\)") as error:
        foreign_names.convert("resnet", state | extra, parameters)
    assert error.value.lines == [f"unexpected: {', '.join(extra)}"]


def test_up_to_five_tensors_are_listed_in_the_message():
    layout = foreign_names.LAYOUTS["resnet"][0]
    for names, shown, lines in (
        ("abcde", "a, b, c, d, e)", []),
        ("abcdef", "a, b, c, d, e, ...)", ["missing: a, b, c"]),
    ):
        with pytest.raises(MismatchError) as error:
            foreign_names._check(layout, {"missing": list(names), "unexpected": []})
        assert str(error.value).endswith(f"do not match the network ({len(names)} missing: {shown}")
        assert [line[:16] for line in error.value.lines] == lines
    foreign_names._check(layout, {"missing": [], "unexpected": []})


def test_prefix_is_removed_only_from_all_names_and_if_it_is_unknown():
    names = {"module.conv1.weight": 0, "module.bn1.weight": 0, "module.bn1.num_batches_tracked": 0}
    state, prefix = foreign_names.without_prefix("resnet", names)
    assert (state.keys(), prefix) == ({"conv1.weight", "bn1.weight", "bn1.num_batches_tracked"}, "module.")
    for state in (names | {"conv1.weight": 0}, {"other.model.weight": 0}, {}):
        assert foreign_names.without_prefix("resnet", state) == (state, "")
    # All names of a part of torchvision's MobileNetV2 begin with "features.".
    state = {"features.0.0.weight": 0, "features.0.1.bias": 0}
    assert foreign_names.without_prefix("mobilenet_v2", state) == (state, "")
    state = {"a." * 9 + "conv1.weight": 0}
    assert foreign_names.without_prefix("resnet", state) == (state, "")
    state = {"a.module.conv1.weight": 0, "n_averaged": 0}
    assert foreign_names.without_prefix("resnet", state) == (state, "")


@pytest.mark.parametrize("is_torch", [True, False])
def test_fully_connected_layers_have_the_layout_of_this_project(is_torch):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    of_linear = array.T if is_torch else array  # [in, out]
    np.testing.assert_array_equal(foreign_names._reshaped(array, of_linear.shape, is_torch), of_linear)
    of_conv = foreign_names._reshaped(array, (*of_linear.T.shape, 1, 1), is_torch)
    np.testing.assert_array_equal(of_conv, of_linear.T[:, :, None, None])
    np.testing.assert_array_equal(foreign_names._reshaped(array[:, :, None, None], (3, 2), is_torch), array.T)
    filters = np.zeros((2, 3, 3, 3), np.float32)
    assert foreign_names._reshaped(filters, (3, 2), is_torch) is filters


def test_bn_with_different_epsilon_has_the_same_output():
    random = np.random.RandomState(0)
    arrays = {
        f"{layer}.{field}": random.uniform(0.5, 2, 4).astype(np.float32)
        for layer in "ab"
        for field in ("weight", "bias", "_mean", "_variance")
    }
    before, own = (
        dict(arrays),
        {"a._variance": SimpleNamespace(epsilon=1e-3), "b._variance": SimpleNamespace(epsilon=1)},
    )
    foreign_names._adapt_epsilon(arrays, lambda name: 1, lambda name: own[name].epsilon)
    changed = {name for name, array in arrays.items() if not np.array_equal(array, before[name])}
    assert changed == {"a.weight"}
    outputs = [state["a.weight"] / np.sqrt(before["a._variance"] + e) for state, e in ((arrays, 1e-3), (before, 1))]
    np.testing.assert_allclose(*outputs, rtol=1e-6)


def test_folded_bn_has_the_same_output():
    random = np.random.RandomState(0)
    filters, images = random.standard_normal((4, 3, 1, 1)), random.standard_normal((5, 3))
    fields = {field: random.uniform(0.5, 2, 4) for field in ("weight", "bias", "_mean", "_variance")}
    state = {"x.weight": filters} | {f"x.bn.{field}": value for field, value in fields.items()}
    foreign_names._fold(state, "x", 0.1)
    normalized = (images @ filters[:, :, 0, 0].T - fields["_mean"]) / np.sqrt(fields["_variance"] + 0.1)
    expected = normalized * fields["weight"] + fields["bias"]
    assert state.keys() == {"x.weight", "x.bias"}
    np.testing.assert_allclose(images @ state["x.weight"][:, :, 0, 0].T + state["x.bias"], expected, rtol=1e-5)


def test_shortcut_missing_in_this_project_is_reported(tiny):
    """The first shortcut of ResNet18 contains a projection in PaddleClas, but not in this project."""
    _, parameters = tiny
    state = {"blocks.0.short.conv.weight": np.zeros((64, 64, 1, 1), np.float32)}
    state |= {f"blocks.{n}.conv0.bn.bias": np.zeros(64, np.float32) for n in range(8)}
    with pytest.raises(MismatchError, match=r"weights of PaddleClas.*1 unexpected: blocks.0.short.conv.weight"):
        foreign_names.convert("resnet", state, parameters)


BIAS = np.zeros(3, np.float32)


@pytest.mark.parametrize("state", [{}, {"a": BIAS}, {"fc.bias": BIAS[0]}, {"fc.bias": BIAS[:0]}])
def test_file_without_classifier_is_rejected(state):
    with pytest.raises(MismatchError, match=rf"^no classifier bias with a known name \({', '.join(state)}\)$"):
        foreign_names.number_of_classes("resnet", state)
