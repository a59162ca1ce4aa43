"""Logits and gradients of networks compared with independent implementations with the same weights."""

import numpy as np
import paddle
import pytest
from paddle import static

from paddle_resnet.models import MODELS


@pytest.fixture
def float64():
    """In float32, sums in a different order change decisions of ReLU6, which dozens of layers amplify."""
    paddle.set_default_dtype("float64")
    yield
    paddle.set_default_dtype("float32")


def parameters_of(model):
    """Return the tensors of a PyTorch model in the order of their layers, without counters of batches."""
    return [tensor for name, tensor in model.state_dict(keep_vars=True).items() if not name.endswith("batches_tracked")]


def randomized(model):
    """Return a PyTorch model in float64 with BN scales, shifts and statistics that differ from 0 and 1, so that an
    interchange of two of them is an error."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = model.double().train()
    with torch.no_grad():
        for tensor in parameters_of(model):
            if tensor.ndim == 1:
                tensor += torch.empty_like(tensor).uniform_(0.1, 0.3)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    return model


def torch_results(model, images, slopes):
    """Return (logits in evaluation, logits in training, gradients) of a PyTorch model, and its weights before, in the
    layout of Paddle."""
    torch = pytest.importorskip("torch")
    tensors = parameters_of(model)
    weights = [in_layout(tensor.detach().numpy().copy()) for tensor in tensors]
    x = torch.from_numpy(images)
    with torch.no_grad():
        evaluated = model.eval()(x).numpy()
    out = model.train()(x)
    (out * torch.from_numpy(slopes)).mean().backward()
    gradients = [in_layout(tensor.grad.numpy()) for tensor in tensors if tensor.requires_grad]
    return [evaluated, out.detach().numpy(), *gradients], weights


def in_layout(array):
    return array.T if array.ndim == 2 else array  # Linear is [out, in] in PyTorch, [in, out] in Paddle


def results(arch, images, slopes, weights, layout):
    """Return the same as torch_results of a network of the registry."""
    x = images if layout == "NCHW" else images.transpose(0, 2, 3, 1)
    found = []
    for is_train in (False, True):
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup), paddle.utils.unique_name.guard():
            model = MODELS[arch](data_format=layout)
            if not is_train:
                model.eval()
            out = model(static.data("data", [None, *x.shape[1:]], dtype="float64"))
            fetched = [out]
            if is_train:
                loss = paddle.mean(out * static.data("slopes", [None, 1000], dtype="float64"))
                fetched += [gradient for _, gradient in static.append_backward(loss)]
        with static.scope_guard(static.Scope()):
            exe = static.Executor(paddle.CPUPlace())
            exe.run(startup)
            for parameter, array in zip(main.all_parameters(), weights, strict=True):
                assert tuple(parameter.shape) == array.shape
                static.global_scope().find_var(parameter.name).get_tensor().set(array, exe.place)
            found += exe.run(main, {"data": x, "slopes": slopes} if is_train else {"data": x}, fetched)
    return found


def timm_model(name):
    return pytest.importorskip("timm").create_model(name)


REFERENCES = {
    "EfficientNet_Lite0": lambda: timm_model("tf_efficientnet_lite0"),
    "EfficientNet_Lite1": lambda: timm_model("tf_efficientnet_lite1"),
    "EfficientNet_Lite2": lambda: timm_model("tf_efficientnet_lite2"),
}


@pytest.mark.parametrize("layout", [pytest.param("NCHW", marks=pytest.mark.soak), "NHWC"])
@pytest.mark.parametrize("arch", REFERENCES)
def test_logits_and_gradients_equal_those_of_the_reference(float64, arch, layout):
    random = np.random.RandomState(1)
    images, slopes = random.randn(2, 3, 66, 66), random.randn(2, 1000)
    expected, weights = torch_results(randomized(REFERENCES[arch]()), images, slopes)
    found = results(arch, images, slopes, weights, layout)
    worst = 0
    for ours, theirs in zip(found, expected, strict=True):
        if np.abs(theirs).max() > 1e-12:  # below are gradients that are 0, except rounding
            worst = max(worst, np.abs(ours - theirs).max() / np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * np.abs(theirs).max() + 1e-14, rtol=0)
    print(f"{arch} {layout}: largest difference relative to the largest value {worst:.1e}")
