"""Compute logits and gradients of timm networks in a separate process, because importing PyTorch after Paddle crashes.
The arguments are a .npz file to write and names of CASES.

The file contains these arrays for each case: "CASE/images" and "CASE/slopes"; "CASE/weight.N", the parameters and BN
statistics in the order of paddle_resnet.models.resnet; "CASE/evaluation" and "CASE/training", the logits in each mode;
"CASE/gradient.N", the gradients of the mean of slopes * logits in training mode, in the order of the parameters.
"""

import sys
from functools import partial

import numpy as np
import torch
from timm.layers import BlurPool2d, SEModule
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

D = {"stem_type": "deep", "stem_width": 32, "avg_down": True}


class EdgeBlur(BlurPool2d):
    def __init__(self, channels, stride, **kwargs):
        super().__init__(channels, 3, stride, "replicate", **kwargs)


def small_stem():
    net = ResNet(BasicBlock, (1, 2, 1, 1), act_layer=nn.Mish)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return net


def first_projection():
    net = ResNet(BasicBlock, (1, 2, 1, 1), **D)
    net.layer1[0].downsample = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64))
    return net


class SelfAttention(nn.Module):
    """The formula of fastai's SimpleSelfAttention, with gamma divided by the square root of the number of
    pixels."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 1))
        self.bias = nn.Parameter(torch.full([1], 0.7))  # gamma

    def forward(self, images):
        x = images.flatten(2)
        weight = self.weight / torch.linalg.matrix_norm(self.weight[:, :, 0], 2)
        y = torch.bmm(torch.bmm(x, x.transpose(1, 2)), nn.functional.conv1d(x, weight))
        return (x + self.bias / x.shape[2] ** 0.5 * y).reshape(images.shape)


def xse_resnext():
    se = partial(SEModule, act_layer=nn.Mish)
    groups = {"cardinality": 32, "base_width": 4, "act_layer": nn.Mish, "block_args": {"attn_layer": se}}
    net = ResNet(Bottleneck, (1, 2, 1, 1), **groups, **D)
    net.layer1[-1].se = nn.Sequential(net.layer1[-1].se, SelfAttention(256))
    return net


def max_blur():
    net = ResNet(Bottleneck, (1, 2, 1, 1), **D)
    net.maxpool = nn.Sequential(nn.MaxPool2d(3, 1, 1), EdgeBlur(64, 2))
    for stage in (net.layer2, net.layer3, net.layer4):
        downsample = stage[0].downsample
        downsample[0] = nn.Sequential(nn.MaxPool2d(3, 1, 1), EdgeBlur(downsample[1].in_channels, 2))
    return net


CASES = {
    "plain": partial(ResNet, BasicBlock, (1, 2, 1, 1)),
    "D": partial(ResNet, Bottleneck, (1, 2, 1, 1), **D),
    "first projection": first_projection,
    "SE": partial(ResNet, Bottleneck, (1, 2, 1, 1), block_args={"attn_layer": "se"}, **D),
    "groups": partial(ResNet, Bottleneck, (1, 2, 1, 1), cardinality=32, base_width=4),
    "small stem, Mish": small_stem,
    "max-blur": max_blur,
    "SE, groups, Mish, self-attention": xse_resnext,
}


def layers(net):
    """Return all layers with parameters in the order of paddle_resnet.models.resnet."""

    def leaves(*modules):
        kinds = (nn.Conv2d, nn.BatchNorm2d, nn.Linear, SelfAttention)
        return [leaf for module in modules if module for leaf in module.modules() if isinstance(leaf, kinds)]

    yield from leaves(net.conv1, net.bn1)
    for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
        for block in stage:
            for number in "123":
                yield from leaves(getattr(block, f"conv{number}", None), getattr(block, f"bn{number}", None))
            yield from leaves(block.downsample, block.se)
    yield net.fc


def compute(build):
    torch.manual_seed(0)
    random = np.random.RandomState(0)
    net = build().double()
    ordered = list(layers(net))
    for layer in ordered:
        if isinstance(layer, nn.BatchNorm2d):
            for value in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                value.data = torch.from_numpy(random.uniform(0.5, 1.5, value.shape))
    assert sum(p.numel() for layer in ordered for p in layer.parameters()) == sum(p.numel() for p in net.parameters())
    images, slopes = random.randn(4, 3, 44, 44), random.randn(4, 1000)
    weights, parameters = [], []
    for layer in ordered:
        own = [layer.weight] + ([] if layer.bias is None else [layer.bias])
        parameters += [(layer, parameter) for parameter in own]
        weights += own + ([layer.running_mean, layer.running_var] if isinstance(layer, nn.BatchNorm2d) else [])
        if isinstance(layer, nn.Linear):
            weights[-2] = layer.weight.T
    arrays = {"images": images, "slopes": slopes}
    arrays |= {f"weight.{i}": weight.detach().numpy().copy() for i, weight in enumerate(weights)}
    arrays["evaluation"] = net.eval()(torch.from_numpy(images)).detach().numpy()
    logits = net.train()(torch.from_numpy(images))
    (torch.from_numpy(slopes) * logits).mean().backward()
    arrays["training"] = logits.detach().numpy()
    for i, (layer, parameter) in enumerate(parameters):
        is_matrix = isinstance(layer, nn.Linear) and parameter.ndim == 2
        arrays[f"gradient.{i}"] = (parameter.grad.T if is_matrix else parameter.grad).numpy()
    return arrays


if __name__ == "__main__":
    path, *names = sys.argv[1:]
    np.savez(path, **{f"{name}/{key}": array for name in names for key, array in compute(CASES[name]).items()})
