"""Train XResNet50 on Imagenette with PyTorch and fastai's recipe, to compare it with
configs/imagenette_128px_5epochs.yaml.

    python benchmarks/imagenette_torch.py --image-root DIR --epochs 5 --seed 0
    python benchmarks/imagenette_torch.py --image-root DIR --epochs 5 --arch xse_resnext50 --sa
    python benchmarks/imagenette_torch.py --image-root DIR --epochs 5 --arch xse_resnext50 --sa --batch-size 32 \
        --weight-decay 1e-4 --crop square --float32

DIR contains train/CLASS/*.jpg and val/CLASS/*.jpg. The settings are those that fastai's train_imagenette.py used for
the results on the Imagenette leaderboard (https://github.com/fastai/imagenette): Mish, max pooling followed by a blur,
RAdam with lookahead, weight decay 0.01, learning rate 8e-3 with a cosine in the last quarter of the steps, label
smoothing 0.1, batch size 64, and AMP in float16 (in this script, only on a GPU). The second command trains the network
of the leaderboard instead of XResNet50. The third command uses the settings of the leaderboard's best result for 128 px
and 5 epochs.

Three details differ from fastai, and the first two save time:
- All images are decoded once, at the start, and kept in GPU memory. The GPU crops and resizes each batch with the
  weights of Pillow's antialiased bilinear filter, which fastai uses, but does not round the result. Validation images
  are resized once.
- If gradients overflow, the GPU skips the update; the host does not wait to find out. A skipped step counts as a
  training step.
- Self-attention is computed in float32.

Each evaluation prints one line with the seconds since the process started and the top1 accuracy. The last line is a
summary in JSON; "reached" is the first evaluation with a top1 of at least --target, or null.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RATIO = (3 / 4, 4 / 3)  # range of a crop's width divided by its height
ATTEMPTS = 10  # number of random crops to try until one fits into the image
FLAT = 0.75  # fraction of the steps before the learning rate falls
FALL = 1e-5  # final learning rate as a fraction of the first
BETA1, BETA2, EPSILON = 0.95, 0.99, 1e-6
LOOKAHEAD_STEPS, LOOKAHEAD_RATE = 6, 0.5
DEPTHS = (3, 4, 6, 3)  # blocks in each stage
REDUCTION = 16  # ratio of channels to hidden channels in squeeze-and-excitation


def seconds() -> float:
    """Return the seconds since the process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Images:
    """The decoded images of train/ or val/ on a device.

    Attributes:
        labels: class indices [images].
        sizes: heights and widths, a NumPy array [images, 2].
    """

    def __init__(self, folder: Path, workers: int, device: torch.device):
        classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
        with ThreadPoolExecutor(workers) as pool:
            decoded = list(pool.map(_decode, (path for path, _ in files)))
        self.sizes = np.array([pixels.shape[:2] for pixels in decoded])
        self.labels = torch.tensor([label for _, label in files], device=device)
        self._pixels = torch.from_numpy(np.concatenate([pixels.reshape(-1, 3) for pixels in decoded])).to(device)
        self._starts = np.cumsum([0, *self.sizes.prod(1)])[:-1]
        self._mean, self._std = (255 * torch.tensor(values, device=device) for values in (MEAN, STD))

    def crop(
        self, indices: np.ndarray, boxes: np.ndarray, flips: np.ndarray, size: int, margin: int = 0
    ) -> torch.Tensor:
        """Return normalized crops [N, 3, size, size].

        Args:
            indices: indices of N images.
            boxes: top, left, height and width of each crop, [N, 4].
            flips: whether to flip each crop horizontally, [N].
            size: height and width of the result.
            margin: number of pixels to remove from each side of the resized crops.
        """
        host = np.concatenate([self._starts[indices, None], self.sizes[indices], boxes, flips[:, None]], 1)
        host, device = torch.from_numpy(host), self._pixels.device
        host = host.pin_memory() if device.type == "cuda" else host
        start, _, stride, top, left, height, width, flip = host.to(device, non_blocking=True)[:, :, None].unbind(1)
        # Crops are padded to the largest one by repeating the last row and column, whose additional weights are 0.
        y, x = (torch.arange(int(largest), device=device) for largest in boxes[:, 2:].max(0))
        rows, columns = top + torch.minimum(y, height - 1), left + torch.minimum(x, width - 1)
        pixels = self._pixels[(start + rows * stride)[:, :, None] + columns[:, None]].float()
        across = _weights(width, x, size, margin)
        across = torch.where(flip[:, :, None] > 0, across.flip(1), across)
        crops = torch.einsum("nih,nhwc->niwc", _weights(height, y, size, margin), pixels)
        crops = torch.einsum("njw,niwc->nijc", across, crops)
        return ((crops - self._mean) / self._std).permute(0, 3, 1, 2)


def _decode(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _weights(lengths, pixels, size, margin):
    """Return the weights [N, size, pixels] with which N rows of pixels are resized to size + 2 * margin pixels, without
    the first and last `margin` pixels."""
    scale = lengths[:, :, None] / (size + 2 * margin)
    centers = (torch.arange(margin, margin + size, device=pixels.device)[:, None] + 0.5) * scale
    weights = 1 - (pixels + 0.5 - centers).abs() / scale.clamp(min=1)
    weights = weights.clamp(min=0) * (pixels < lengths[:, :, None])
    return weights / weights.sum(2, keepdim=True)


def random_boxes(sizes: np.ndarray, min_scale: float, rng: np.random.Generator) -> np.ndarray:
    """Return a random crop (top, left, height, width) of each image, given heights and widths. A crop covers a fraction
    of the image area between min_scale and 1. If no attempt fits, the crop is the largest one with an allowed ratio,
    centered."""
    area = rng.uniform(min_scale, 1, (ATTEMPTS, len(sizes))) * sizes.prod(1)
    ratio = np.exp(rng.uniform(*np.log(RATIO), area.shape))
    boxes = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], 2).round().astype(int)
    fits = (boxes <= sizes).all(2)
    boxes = boxes[fits.argmax(0), np.arange(len(sizes))]
    height, width = sizes.T
    largest = np.stack([np.minimum(height, width / RATIO[0]), np.minimum(width, height * RATIO[1])], 1).astype(int)
    boxes = np.where(fits.any(0)[:, None], boxes, largest)
    corners = np.where(fits.any(0)[:, None], rng.integers(0, sizes - boxes + 1), (sizes - largest) // 2)
    return np.concatenate([corners, boxes], 1)


def square_boxes(sizes: np.ndarray, positions: float | np.ndarray) -> np.ndarray:
    """Return the largest square crop of each image, at a position between 0 (top or left) and 1 (bottom or right)."""
    sides = sizes.min(1, keepdims=True).repeat(2, 1)
    return np.concatenate([(positions * (sizes - sides)).astype(int), sides], 1)


def conv_bn(
    inputs: int, outputs: int, kernel_size: int, stride: int = 1, groups: int = 1, scale: float = 1.0
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
    bn = nn.BatchNorm2d(outputs)
    nn.init.constant_(bn.weight, scale)
    return nn.Sequential(conv, bn)


class MaxBlurPool(nn.Module):
    """Max pooling over 3x3 pixels, a blur, and halving of height and width, like kornia's MaxBlurPool2d, with which the
    leaderboard's results replace all max pooling.

    kornia blurs with [1, 4, 6, 4, 1] / 16, reflecting the border, and averages 2x2 pixels. Together, the filter is [1,
    5, 10, 10, 5, 1] / 32 in both directions. Two matrix products apply the filter, instead of a depthwise convolution.
    """

    FILTER = (1, 5, 10, 10, 5, 1)

    def __init__(self, size):
        super().__init__()
        matrix = torch.zeros(size // 2, size)
        for row in range(size // 2):
            for tap, weight in enumerate(self.FILTER):
                column = abs(2 * row - 2 + tap)
                matrix[row, min(column, 2 * (size - 1) - column)] += weight / sum(self.FILTER)
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(x, 3, 1, 1).permute(0, 2, 3, 1)
        n, size, _, channels = x.shape
        matrix = self.matrix.to(x.dtype)
        x = torch.bmm(matrix.expand(n, -1, -1), x.reshape(n, size, -1))
        x = torch.bmm(matrix.expand(n * (size // 2), -1, -1), x.reshape(-1, size, channels))
        return x.reshape(n, size // 2, size // 2, channels).permute(0, 3, 1, 2)


class SqueezeExcitation(nn.Sequential):
    def __init__(self, channels):
        hidden = math.ceil(channels // REDUCTION / 8) * 8
        expand = nn.Conv2d(hidden, channels, 1)
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, hidden, 1), nn.Mish(), expand, nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * super().forward(x)


class SelfAttention(nn.Module):
    """fastai's SimpleSelfAttention: x + gamma * (x x^T) (W x), where x is the matrix [channels, pixels] of an image.
    The layer computes in float32 (TF32 on a GPU), because the products can overflow or become 0 in float16."""

    def __init__(self, channels):
        super().__init__()
        conv = nn.Conv1d(channels, channels, 1, bias=False)
        nn.init.kaiming_normal_(conv.weight)
        self.conv, self.gamma = spectral_norm(conv), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            rows = x.float().flatten(2)
            y = torch.bmm(torch.bmm(rows, rows.transpose(1, 2)), self.conv(rows))
            return x + (self.gamma * y).view_as(x).to(x.dtype)


class Block(nn.Module):
    def __init__(self, inputs, width, size, stride, is_se_resnext, has_attention):
        super().__init__()
        hidden, outputs = width * (1 + is_se_resnext), 4 * width
        branch = [conv_bn(inputs, hidden, 1), nn.Mish()]
        branch += [conv_bn(hidden, hidden, 3, stride, 32 if is_se_resnext else 1), nn.Mish()]
        branch += [conv_bn(hidden, outputs, 1, scale=0.0)]
        branch += [SqueezeExcitation(outputs)] if is_se_resnext else []
        branch += [SelfAttention(outputs)] if has_attention else []
        shortcut = [MaxBlurPool(size)] if stride == 2 else []
        shortcut += [conv_bn(inputs, outputs, 1)] if inputs != outputs else []
        self.branch, self.shortcut, self.activation = nn.Sequential(*branch), nn.Sequential(*shortcut), nn.Mish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


class XResNet(nn.Sequential):
    """fastai's xresnet50 or xse_resnext50 for images of size x size pixels; self-attention follows the last branch of
    the first stage."""

    def __init__(self, classes, size, is_se_resnext, has_attention):
        layers = []
        for inputs, outputs, stride in ((3, 32, 2), (32, 32, 1), (32, 64, 1)):
            layers += [conv_bn(inputs, outputs, 3, stride), nn.Mish()]
        layers, size = [*layers, MaxBlurPool(size // 2)], size // 4
        inputs = 64
        for stage, depth in enumerate(DEPTHS):
            for i in range(depth):
                stride = 2 if stage and not i else 1
                attends = has_attention and (stage, i) == (0, depth - 1)
                layers.append(Block(inputs, 64 * 2**stage, size, stride, is_se_resnext, attends))
                inputs, size = 4 * 64 * 2**stage, size // stride
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def update(
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    coefficients: tuple[torch.Tensor, ...],
    keeps: torch.Tensor,
    is_rectified: bool,
) -> None:
    """Update parameters and moments in place by one step of RAdam: Liu et al., arXiv:1908.03265, algorithm 2, with
    decoupled weight decay. `keeps` is 0 if the gradients are not finite, otherwise 1."""
    decay, rate, correction = coefficients
    gradients = torch.where(keeps > 0, gradients, 0.0)
    first.lerp_(gradients, (1 - BETA1) * keeps)
    second.lerp_(gradients * gradients, (1 - BETA2) * keeps)
    direction = first / ((second * correction).sqrt() + EPSILON) if is_rectified else first
    parameters.mul_(1 - decay * keeps).sub_(direction * (rate * keeps))


class Ranger:
    """RAdam with lookahead (Zhang et al., arXiv:1907.08610), with one vector for all parameters with weight decay, and
    one for BN parameters and biases, which have no weight decay.

    GradScaler reads param_groups and sets found_inf, as it does for PyTorch's optimizers.
    """

    _step_supports_amp_scaling = True  # GradScaler calls step() even if gradients are not finite

    def __init__(self, model: nn.Module, rates: list[float], weight_decay: float, compiled: bool):
        device, without_decay = next(model.parameters()).device, set()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(module, nn.BatchNorm2d) or name == "bias":
                    without_decay.add(parameter)
        groups = [[p for p in model.parameters() if (p in without_decay) == is_without] for is_without in (False, True)]
        self.param_groups = [{"params": parameters} for parameters in groups]
        self._vectors = [_flatten(parameters) for parameters in groups]
        self._moments = [[torch.zeros_like(vector) for _ in range(2)] for vector in self._vectors]
        self._slow = [vector.clone() for vector in self._vectors]
        rows = [_coefficients(step, rate, decay) for decay in (weight_decay, 0) for step, rate in enumerate(rates, 1)]
        # One value per vector, step and coefficient, on the device, so that a step needs no values from the host.
        self._coefficients = torch.tensor([row[:3] for row in rows], device=device).view(2, len(rates), 3)
        self._is_rectified = [row[3] for row in rows]
        self._update = torch.compile(update) if compiled else update
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        keeps = 1 - getattr(self, "found_inf", torch.zeros(1, device=self._vectors[0].device))
        for i, (group, vector) in enumerate(zip(self.param_groups, self._vectors, strict=True)):
            gradients = torch.cat([_rows(p.grad).reshape(-1) for p in group["params"]])
            coefficients = self._coefficients[i, self._step].unbind()
            self._update(vector, gradients, *self._moments[i], coefficients, keeps, self._is_rectified[self._step])
        self._step += 1
        if self._step % LOOKAHEAD_STEPS == 0:
            for fast, slow in zip(self._vectors, self._slow, strict=True):
                fast.copy_(slow.lerp_(fast, LOOKAHEAD_RATE))

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _rows(tensor):
    """Return a view of a tensor, with the channels of filters last, as in memory."""
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor


def _flatten(parameters):
    """Return a vector with the values of the parameters, which become views of this vector."""
    vector = torch.cat([_rows(p.detach()).reshape(-1) for p in parameters])
    for parameter, values in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        values = values.view(_rows(parameter).shape)
        parameter.data = values.permute(0, 3, 1, 2) if parameter.dim() == 4 else values
    return vector


def _coefficients(step, rate, weight_decay):
    """Return weight decay, rate and correction of the second moment for a step, counted from 1, and whether the second
    moment is used. With BETA2 = 0.99, the second moment is used after 5 steps."""
    correction, longest = 1 - BETA2**step, 2 / (1 - BETA2) - 1
    length = longest - 2 * step * (1 - correction) / correction
    decay, rate, is_rectified = rate * weight_decay, rate / (1 - BETA1**step), length > 5
    if is_rectified:
        rate *= math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
    return decay, rate, 1 / correction, is_rectified


def flat_cosine(rate: float, steps: int) -> list[float]:
    """Return the learning rates of all steps: constant, then a cosine."""
    falls = [max(0.0, (step / steps - FLAT) / (1 - FLAT)) for step in range(steps)]
    return [rate * (FALL + (1 - FALL) * (1 + math.cos(math.pi * fall)) / 2) for fall in falls]


def evaluate(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], amp: Callable) -> float:
    """Return the top1 accuracy over all validation images."""
    model.eval()
    with torch.inference_mode(), amp():
        correct = sum((model(images).argmax(1) == labels).sum() for images, labels in batches)
    return correct.item() / sum(len(labels) for _, labels in batches)


def validation_batches(images: Images, args: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the preprocessed validation images as [(images, labels), ...]. With random crops in training, fastai
    resizes the entire image to a square of about 1.14 times --size, regardless of its shape, and crops the center."""
    if args.crop == "square":
        boxes, margin = square_boxes(images.sizes, 0.5), 0
    else:
        boxes = np.concatenate([0 * images.sizes, images.sizes], 1)
        margin = math.ceil(args.size * 0.14 / 8) * 4
    batches = []
    for indices in np.split(np.arange(len(images.labels)), range(args.batch_size, len(images.labels), args.batch_size)):
        crops = images.crop(indices, boxes[indices], np.zeros(len(indices), int), args.size, margin)
        batches.append((crops, images.labels[torch.from_numpy(indices).to(images.labels.device)]))
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-root", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=128, help="height and width of the crops, a multiple of 32")
    parser.add_argument("--arch", choices=["xresnet50", "xse_resnext50"], default="xresnet50")
    parser.add_argument("--sa", action="store_true", help="self-attention in the first stage")
    parser.add_argument("--crop", choices=["random", "square"], default="random", help="random: random resized crops")
    parser.add_argument("--min-scale", type=float, default=0.35, help="minimum area of random crops (fraction)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--weight-decay", type=float, default=1e-2)
    parser.add_argument("--float32", action="store_true", help="train and evaluate without mixed precision")
    parser.add_argument("--compile", nargs="?", const="default", help="use torch.compile, optionally with a mode")
    parser.add_argument("--eval-every", type=int, default=1, help="epochs between evaluations")
    parser.add_argument("--target", type=float, default=0.925, help="top1 for the summary")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="number of decoding threads")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, val = (Images(args.image_root / name, args.workers, device) for name in ("train", "val"))
    batches = validation_batches(val, args)
    print(f"{len(train.labels)} + {len(val.labels)} images, {seconds():.1f} s", flush=True)

    classes, is_se_resnext = int(train.labels.max()) + 1, args.arch == "xse_resnext50"
    model = XResNet(classes, args.size, is_se_resnext, args.sa).to(device)
    steps = len(train.labels) // args.batch_size  # fastai drops the last, partial batch
    rates = flat_cosine(args.lr, args.epochs * steps)
    optimizer = Ranger(model, rates, args.weight_decay, args.compile)
    is_half = device.type == "cuda" and not args.float32
    scaler = torch.amp.GradScaler(device.type, enabled=is_half)

    def amp():
        return torch.autocast(device.type, torch.float16, enabled=is_half)

    def loss_of(images, labels):
        with amp():
            return F.cross_entropy(model(images).float(), labels, label_smoothing=0.1)

    compute_loss = torch.compile(loss_of, mode=args.compile) if args.compile else loss_of
    top1, reached = 0.0, None
    for epoch in range(1, args.epochs + 1):
        model.train()
        order = rng.permutation(len(train.labels))
        sizes = train.sizes[order]
        if args.crop == "square":
            boxes = square_boxes(sizes, rng.uniform(size=sizes.shape))
        else:
            boxes = random_boxes(sizes, args.min_scale, rng)
        flips, labels = rng.integers(0, 2, len(order)), train.labels[torch.from_numpy(order).to(device)]
        for step in range(steps):
            batch = slice(step * args.batch_size, (step + 1) * args.batch_size)
            images = train.crop(order[batch], boxes[batch], flips[batch], args.size)
            loss = compute_loss(images, labels[batch])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if epoch % args.eval_every == 0 or epoch == args.epochs:
            loss = loss.item()
            top1 = evaluate(model, batches, amp)
            if reached is None and top1 >= args.target:
                reached = {"epoch": epoch, "seconds": round(seconds(), 2)}
            print(f"epoch {epoch} seconds {seconds():.2f} top1 {top1:.4f} loss {loss:.4f}", flush=True)
    flags = {name: value for name, value in vars(args).items() if name not in ("image_root", "workers")}
    result = {"top1": top1, "seconds": round(seconds(), 2), "reached": reached, **flags}
    print(json.dumps({**result, "parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main()
