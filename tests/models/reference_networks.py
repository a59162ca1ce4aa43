"""Compute logits and gradients of timm and torchvision networks in a separate process, because importing PyTorch after
Paddle may crash. The arguments are a .npz file to write and a key of REFERENCES.

The file contains these arrays: "images" and "slopes"; "weight.N", the parameters and BN statistics in layer order and
Paddle's layout; "evaluation" and "training", the logits in each mode; "gradient.N", the gradients of the mean of slopes
* logits in training mode, in the order of the parameters.
"""

import sys

import numpy as np
import timm
import torch
import torchvision

REFERENCES = {
    **{f"EfficientNet_Lite{i}": lambda i=i: timm.create_model(f"tf_efficientnet_lite{i}") for i in range(3)},
    "MobileNetV3_Large": torchvision.models.mobilenet_v3_large,
    "MobileNetV3_Small": torchvision.models.mobilenet_v3_small,
    "GhostNet": lambda: timm.create_model("ghostnet_100", drop_rate=0.0),
    "PPLCNet_x1_0": lambda: timm.create_model("lcnet_100"),
    "PPHGNetV2_B0": lambda: timm.create_model("hgnetv2_b0"),
}


def in_layout(tensor):
    """Transpose the weight of a Linear layer from [out, in] to [in, out]. Return other weights unchanged."""
    return (tensor.T if tensor.ndim == 2 else tensor).detach().numpy().copy()


def results(model):
    model = model.double()
    state = model.state_dict(keep_vars=True)
    tensors = [tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")]
    with torch.no_grad():
        for tensor in tensors:
            if tensor.ndim == 1:  # random values, so that swapping scales, shifts or statistics changes the results
                tensor += torch.empty_like(tensor).uniform_(0.1, 0.3)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    random = np.random.RandomState(1)
    arrays = {"images": random.randn(2, 3, 66, 66), "slopes": random.randn(2, 1000)}
    arrays |= {f"weight.{i}": in_layout(tensor) for i, tensor in enumerate(tensors)}
    images = torch.from_numpy(arrays["images"])
    with torch.no_grad():
        arrays["evaluation"] = model.eval()(images).numpy()
    out = model.train()(images)
    (out * torch.from_numpy(arrays["slopes"])).mean().backward()
    arrays["training"] = out.detach().numpy()
    gradients = [tensor.grad for tensor in tensors if tensor.requires_grad]
    return arrays | {f"gradient.{i}": in_layout(gradient) for i, gradient in enumerate(gradients)}


if __name__ == "__main__":
    torch.manual_seed(0)
    np.savez(sys.argv[1], **results(REFERENCES[sys.argv[2]]()))
