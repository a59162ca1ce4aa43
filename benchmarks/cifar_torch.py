r"""Train ResNet18 on CIFAR-10 with PyTorch, to compare it with this project. These commands train with equal settings:

    python benchmarks/cifar_torch.py --image-root DIR --seed 0
    python train.py --config configs/cifar10_30epochs.yaml --image-root DIR --seed 0 --dali-random-seed 42 \
        --crop-size 32 --sizes None --resize-short 32 --crop-padding 4 --rand-crop-scale 0.08,1 --mixup 0 \
        --bn-weight-decay false

DIR contains train/CLASS/*.jpg and val/CLASS/*.jpg with images of 32x32 pixels. The network is torchvision's ResNet-18
with a 3x3 convolution with stride 1 and no max pooling in the stem. All images are decoded with Pillow at the start.
Training images are padded by four pixels, cropped and flipped at random. The optimizer is SGD with Nesterov momentum, a
one-cycle schedule, weight decay 5e-4 and label smoothing 0.1, in bfloat16 on a GPU.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.models import resnet18

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, PADDING = 32, 4  # pixels


def read(folder: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalized images [N, 3, 32, 32] and class indices [N]."""
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [(path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
    with ThreadPoolExecutor() as pool:
        pixels = np.stack(list(pool.map(_decode, (path for path, _ in files))))
    images = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std, torch.tensor([label for _, label in files], device=device)


def _decode(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def crop(padded: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return random crops [N, 3, 32, 32] of padded images, half of them flipped horizontally."""
    n, device = len(indices), padded.device
    pixels = torch.arange(SIZE, device=device)
    columns = torch.where(torch.rand(n, 1, device=device) < 0.5, pixels, SIZE - 1 - pixels)
    top, left = torch.randint(2 * PADDING + 1, (2, n, 1), device=device)
    rows, columns = (top + pixels)[:, None, :, None], (left + columns)[:, None, None, :]
    return padded[indices[:, None, None, None], torch.arange(3, device=device)[:, None, None], rows, columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (images, labels), (val_images, val_labels) = (read(args.image_root / name, device) for name in ("train", "val"))
    padded = F.pad(images, [PADDING] * 4)

    model = resnet18(num_classes=int(labels.max()) + 1)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()
    model = model.to(device, memory_format=torch.channels_last)
    groups = [[p for p in model.parameters() if (p.ndim > 1) == has_decay] for has_decay in (True, False)]
    groups = [{"params": groups[0], "weight_decay": 5e-4}, {"params": groups[1], "weight_decay": 0}]
    optimizer = torch.optim.SGD(groups, args.lr, momentum=0.9, nesterov=True)
    steps = len(images) // args.batch_size
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.epochs * steps, cycle_momentum=False)
    compiled = torch.compile(model) if device.type == "cuda" else model

    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        model.train()
        correct, order = 0, torch.randperm(len(images), device=device)
        for indices in order[: steps * args.batch_size].split(args.batch_size):
            batch = crop(padded, indices).contiguous(memory_format=torch.channels_last)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = compiled(batch).float()
            F.cross_entropy(logits, labels[indices], label_smoothing=0.1).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            correct += (logits.argmax(1) == labels[indices]).sum()
        if epoch % 10 == 0 or epoch == args.epochs:
            model.eval()
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                answers = torch.cat([model(batch).argmax(1) for batch in val_images.split(1000)])
            top1 = (answers == val_labels).float().mean().item()
            seconds, train_top1 = time.perf_counter() - start, int(correct) / (steps * args.batch_size)
            print(f"epoch {epoch} seconds {seconds:.1f} top1 {top1:.4f} train top1 {train_top1:.4f}", flush=True)


if __name__ == "__main__":
    main()
