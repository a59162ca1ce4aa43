"""Compare the speed of this project with PyTorch on one GPU: training and evaluation, with synthetic images and JPEG
files. --arch selects the networks. Some rows are measured only if --rows names them: "two GPUs" (training), JAX
(training of ResNet50 with synthetic images), reduce-overhead and max-autotune (training with synthetic images).

    python benchmarks/peers.py run --image-root DIR --torch-python PYTHON --output results.jsonl
    python benchmarks/peers.py run --rows synthetic --arch ResNet50 --arch MobileNetV2 --torch-python PYTHON
    python benchmarks/peers.py run --rows "train, synthetic: paddle_resnet" --rows JAX --jax-python PYTHON
    python benchmarks/peers.py table results.jsonl [MORE.jsonl ...]

The script alternates between the measurements and runs each in a separate process: `train.py --benchmark` for this
project, `worker` in this file for PyTorch, jax_resnet50.py for JAX. All processes use the same settings: float16 (AMP
in training) on a GPU and float32 on a CPU, and the channels-last layout; in training, also SGD with momentum 0.875,
weight decay (except for BN), and label smoothing 0.1. Each step computes loss, top1 and top5, which the host reads one
step later. All pending GPU work has finished when the clock starts and when it stops. PyTorch uses its usual settings:
torch.autocast and GradScaler, cuDNN autotuning (cudnn.benchmark) and a fused optimizer. "PyTorch compile" is
torch.compile in its default mode, which does not use CUDA graphs; "PyTorch reduce-overhead" and "PyTorch max-autotune"
use CUDA graphs. torch.compile also compiles the loss and the accuracy. On a GPU, this project and the baselines decode
with DALI's mixed decoder. The decoder of this project interpolates chroma, and the decoder of the baselines repeats
chroma; when only crops were decoded, repetition made training 24 % faster (benchmarks/log/loader_h200.md). The
baselines use the dynamic executor, DALI's default for GPUs; this project uses the older executor (see
paddle_resnet/data/loader.py). This project pads images to 4 channels, as its recipes do; the baselines use 3 channels.
For evaluation on a GPU, the baselines convert all parameters to float16. On two GPUs, the batch size per process is the
same as on one GPU, and baselines train with DistributedDataParallel.

"first step" is the time from the start of the process until the host has read the loss of the first step. The cache of
torch.compile is empty at the start of `run`, and later measurements reuse it. This project uses the machine's existing
cache; filling an empty cache takes about 7 s (docs/kernels.md).

DIR contains train/CLASS/*.jpg and val/CLASS/*.jpg. PYTHON is an interpreter with torch, timm and, for JPEG files,
nvidia-dali, or with jax, flax and optax. PyTorch's networks come from timm.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from nvidia.dali.pipeline import Pipeline

ROOT = Path(__file__).resolve().parent.parent
OWN = "paddle_resnet"
HALF = ["--amp", "--use-pure-fp16", "--scale-loss", "128", "--use-dynamic-loss-scaling", "--dali-output-fp16"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TIMM = {  # {--arch: name of the same network in timm}
    "ResNet18": "resnet18",
    "ResNet34": "resnet34",
    "ResNet50": "resnet50",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "ResNet50_vd": "resnet50d",
    "SE_ResNet50_vd": "seresnet50",  # timm's network lacks the deep stem and the average pooling in the shortcuts
    "ResNeXt50_32x4d": "resnext50_32x4d",
    "MobileNetV2": "mobilenetv2_100",
    "MobileNetV3_Large": "mobilenetv3_large_100",
    "MobileNetV3_Small": "mobilenetv3_small_100",
    "GhostNet": "ghostnet_100",
    "PPLCNet_x1_0": "lcnet_100",
    "PPHGNetV2_B0": "hgnetv2_b0",
    "EfficientNet_Lite0": "efficientnet_lite0",
    "EfficientNet_Lite1": "efficientnet_lite1",
    "EfficientNet_Lite2": "efficientnet_lite2",
}
# {row: (task, trainer, arguments of the worker)}. In each task, the first row measures this project.
ROWS = {
    f"train, synthetic: {OWN}": ("train, synthetic", OWN, []),
    "train, synthetic: PyTorch eager": ("train, synthetic", "torch", []),
    "train, synthetic: PyTorch compile": ("train, synthetic", "torch", ["--compile", "default"]),
    "train, synthetic: PyTorch reduce-overhead": ("train, synthetic", "torch", ["--compile", "reduce-overhead"]),
    "train, synthetic: PyTorch max-autotune": ("train, synthetic", "torch", ["--compile", "max-autotune"]),
    "train, synthetic: JAX": ("train, synthetic", "jax", []),
    f"train, synthetic, two GPUs: {OWN}": ("train, synthetic, two GPUs", OWN, []),
    "train, synthetic, two GPUs: PyTorch compile": ("train, synthetic, two GPUs", "torch", ["--compile", "default"]),
    f"train, JPEG: {OWN}": ("train, JPEG", OWN, []),
    "train, JPEG: PyTorch eager": ("train, JPEG", "torch", []),
    "train, JPEG: PyTorch compile": ("train, JPEG", "torch", ["--compile", "default"]),
    f"train, JPEG, two GPUs: {OWN}": ("train, JPEG, two GPUs", OWN, []),
    "train, JPEG, two GPUs: PyTorch compile": ("train, JPEG, two GPUs", "torch", ["--compile", "default"]),
    f"evaluate, synthetic: {OWN}": ("evaluate, synthetic", OWN, []),
    "evaluate, synthetic: PyTorch compile": ("evaluate, synthetic", "torch", ["--compile", "default"]),
    f"evaluate, JPEG: {OWN}": ("evaluate, JPEG", OWN, []),
    "evaluate, JPEG: PyTorch compile": ("evaluate, JPEG", "torch", ["--compile", "default"]),
}
TWO = "two GPUs"
EXPLICIT = (TWO, "JAX", "reduce-overhead", "max-autotune")  # rows that are measured only if --rows names them
JAX_FLAGS = ("device", "batch_size", "crop_size", "steps", "warmup_steps")
WORKER_FLAGS = ("image_root", "threads", *JAX_FLAGS)


def run(args: argparse.Namespace) -> int:
    """Measure every row --repeats times, alternating between the rows, and append a JSON line to --output for each
    measurement. Return the exit code, 1 if a measurement failed."""
    rows = choose(args.rows)
    if args.image_root is None and any("JPEG" in row for row in rows):
        sys.exit("--image-root: not set; set it to a folder with train/ and val/, or add --rows synthetic")
    results = []
    with tempfile.TemporaryDirectory() as folder, open(args.output, "a", encoding="utf-8") as output:
        for repetition, arch, row in itertools.product(range(args.repeats), args.arch or ["ResNet50"], rows):
            result = {"row": row, "arch": arch, "repetition": repetition, **measure(args, arch, row, Path(folder))}
            results.append(result)
            output.write(json.dumps(result) + "\n")
            output.flush()
            print(f"{repetition} {arch} {row}: {result.get('error') or round(result['ips'])}", flush=True)
    print(table(results))
    return 1 if any("error" in result for result in results) else 0


def choose(wanted: list[str] | None) -> list[str]:
    """Return the rows whose names contain at least one of the `wanted` strings, by default all. A row whose name
    contains a word of EXPLICIT is returned only if a matching string contains that word, too."""

    def matches(row, text):
        return text in row and all(word in text or word not in row for word in EXPLICIT)

    return [row for row in ROWS if any(matches(row, text) for text in wanted or [""])]


def measure(args: argparse.Namespace, arch: str, row: str, folder: Path) -> dict[str, Any]:
    """Measure a row once, in separate processes. Return {"ips": images/s, "first_step_s": seconds, ...} or, if a
    process failed, {"error": last line of the output, ...}."""
    task, trainer, _ = ROWS[row]
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    is_own = trainer == OWN
    command = own_command(args, arch, task, report) if is_own else baseline_command(args, arch, row)
    environment = dict(os.environ)
    if not is_own:
        if args.torch_env_clear:
            environment.pop("PYTHONPATH", None)
            environment.pop("LD_LIBRARY_PATH", None)
        paths = [args.torch_pythonpath if trainer == "torch" else None, environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    start = time.time()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        return {"error": lines[-1], "command": command, "returncode": done.returncode, "stderr": lines[-40:]}
    result = read_report(report) if is_own else json.loads(done.stdout.splitlines()[-1])
    result["first_step_s"] = result.pop("first_step_at") - start
    return {**result, "command": command}


def baseline_command(args: argparse.Namespace, arch: str, row: str) -> list[str]:
    """Return the command that measures a row of PyTorch or JAX."""
    task, trainer, arguments = ROWS[row]
    values = {name: getattr(args, name) for name in (JAX_FLAGS if trainer == "jax" else WORKER_FLAGS)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    if trainer == "jax":
        return [args.jax_python, str(Path(__file__).with_name("jax_resnet50.py")), "--arch", arch, *flags]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if is_for_two(task) else []
    return [args.torch_python, *launcher, __file__, "worker", task, "--arch", arch, *arguments, *flags]


def own_command(args: argparse.Namespace, arch: str, task: str, report: Path) -> list[str]:
    """Return the command that measures a task with this project, and writes the report to the file `report`."""
    scope = "train_only" if task.startswith("train") else "eval_only"
    side, channels = str(args.crop_size), 4 if args.device == "gpu" else 3
    command = [args.paddle_python]
    if is_for_two(task):
        gpus = ",".join(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2])
        command += ["-m", "paddle.distributed.launch", "--log_dir", str(report.with_name("logs"))]
        command += ["--gpus", gpus] if args.device == "gpu" else ["--nproc_per_node", "2"]
    command += ["train.py", "--benchmark", "--run-scope", scope, "--report-file", str(report)]
    command += ["--benchmark-steps", str(args.steps), "--benchmark-warmup-steps", str(args.warmup_steps)]
    command += ["--batch-size", str(args.batch_size), "--data-layout", "NHWC", "--model-arch-name", arch]
    command += ["--crop-size", side, "--image-shape", f"{channels},{side},{side}", "--device", args.device]
    command += ["--interp", "linear"]  # the baselines use the same filter
    command += ["--show-config", "false", "--print-interval", str(10**9)]
    command += HALF if args.device == "gpu" else []
    if "synthetic" in task:
        return [*command, "--data-format", "synthetic"]
    return [*command, "--image-root", args.image_root, "--dali-num-threads", str(args.threads)]


def is_for_two(task: str) -> bool:
    return task.endswith(TWO)


def read_report(path: Path) -> dict[str, Any]:
    """Return some metrics of the summary, which is the last line of a --report-file, the versions, and the time of the
    first step as "first_step_at"."""
    entry = json.loads(path.read_text().splitlines()[-1].removeprefix("DLLL "))
    data = {name.rpartition(".")[2]: value for name, value in entry["data"].items()}
    start = float(entry["timestamp"]) - float(entry["elapsedtime"])
    kept = ("ips", "loss", "steps", "peak_memory_allocated_mib", "versions")
    return {name: data[name] for name in kept if name in data} | {"first_step_at": start + data["first_step_s"]}


def table(results: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the measured rows. Failed measurements are counted, but excluded from the medians."""
    lines = [
        "| network | task | trainer | n | median images/s | lowest to highest | speedup of paddle_resnet | GPU memory, "
        "MiB | first step, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    archs = dict.fromkeys(r.get("arch", "ResNet50") for r in results)
    by_row = {
        (arch, row): [r for r in results if (r.get("arch", "ResNet50"), r["row"]) == (arch, row)]
        for arch, row in itertools.product(archs, ROWS)
    }
    rates = {key: [r["ips"] for r in measured if "error" not in r] for key, measured in by_row.items()}
    for (arch, row), measured in by_row.items():
        if not measured:
            continue
        task, ips = ROWS[row][0], rates[arch, row]
        failed = len(measured) - len(ips)
        n = f"{len(ips)}{f' ({failed} failed)' if failed else ''}"
        cells = [""] * 5
        if ips:
            middle = statistics.median(ips)
            cells[0], cells[1] = f"{middle:,.0f}", f"{min(ips):,.0f} to {max(ips):,.0f}"
            if rates[arch, f"{task}: {OWN}"]:
                cells[2] = f"{statistics.median(rates[arch, f'{task}: {OWN}']) / middle:.3f} x"
            succeeded = [r for r in measured if "error" not in r]
            memory = [r["peak_memory_allocated_mib"] for r in succeeded if "peak_memory_allocated_mib" in r]
            cells[3] = f"{statistics.median(memory):,.0f}" if memory else ""
            waits = [r["first_step_s"] for r in succeeded]
            cells[4] = f"{statistics.median(waits):.1f} ({min(waits):.1f} to {max(waits):.1f})"
        lines.append("| " + " | ".join([arch, task, row.partition(": ")[2], n, *cells]) + " |")
    return "\n".join(lines)


def worker(args: argparse.Namespace) -> None:
    """Measure PyTorch once, and print the result as a JSON line."""
    import timm
    import torch

    training, on_gpu = args.task.startswith("train"), args.device == "gpu"
    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if processes > 1:
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model = timm.create_model(TIMM[args.arch]).to(device, memory_format=torch.channels_last)
    norms = [p for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d) for p in m.parameters()]
    others = [p for p in model.parameters() if all(p is not norm for norm in norms)]
    groups = [{"params": others, "weight_decay": 3.0517578125e-05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.875, fused=on_gpu)
    scaler = torch.amp.GradScaler(device.type, init_scale=128.0, enabled=on_gpu)
    if processes > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if not training:
        model.eval()
        model = model.half() if on_gpu else model

    def forward(images, labels):
        with torch.autocast(device.type, torch.float16, enabled=training and on_gpu):
            out = model(images)
        out = out.float()
        smoothing = 0.1 if training else 0.0
        loss = torch.nn.functional.cross_entropy(out, labels, label_smoothing=smoothing)
        right = out.topk(5).indices == labels[:, None]
        return loss, right[:, :1].sum(), right.sum()

    if args.compile:
        forward = torch.compile(forward, mode=args.compile)

    def step(images, labels):
        if not training:
            with torch.inference_mode():
                return forward(images, labels)
        optimizer.zero_grad(set_to_none=True)
        loss, top1, top5 = forward(images, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), top1, top5

    def synchronize():
        if on_gpu:
            torch.cuda.synchronize()

    batches = iter(torch_batches(args, training, device))
    # Copy the values, because the next replay of the CUDA graph overwrites its outputs.
    previous = [metric.clone() for metric in step(*next(batches))]
    loss, first_step_at = previous[0].item(), time.time()
    for i in range(1, args.warmup_steps + args.steps):
        if i == args.warmup_steps:
            synchronize()
            start = time.perf_counter()
        metrics = [metric.clone() for metric in step(*next(batches))]
        loss, _, _ = (metric.item() for metric in previous)
        previous = metrics
    synchronize()
    ips = processes * args.steps * args.batch_size / (time.perf_counter() - start)
    result = {"ips": ips, "steps": args.steps, "loss": loss, "first_step_at": first_step_at}
    result["versions"] = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if on_gpu:
        result["peak_memory_allocated_mib"] = torch.cuda.max_memory_allocated() / 2**20
        result["versions"] |= {"cudnn": torch.backends.cudnn.version(), "gpu": torch.cuda.get_device_name()}
    if rank == 0:
        print(json.dumps(result))
    if processes > 1:
        torch.distributed.destroy_process_group()


def torch_batches(args: argparse.Namespace, training: bool, device: "torch.device") -> Iterator[tuple]:
    """Yield batches (images [N, 3, H, W] in channels-last layout, labels [N]) endlessly."""
    import torch

    dtype = torch.float16 if device.type == "cuda" else torch.float32
    if "synthetic" in args.task:
        images = torch.randn(args.batch_size, 3, args.crop_size, args.crop_size, device=device, dtype=dtype)
        labels = torch.randint(0, 1000, (args.batch_size,), device=device)
        images = images.contiguous(memory_format=torch.channels_last)
        while True:
            yield images, labels
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    # Because neither a size nor a reader name is set, the iterator never ends an epoch. Like this project's benchmark,
    # the measurement therefore excludes the time between epochs.
    for batch in DALIGenericIterator([dali_pipeline(args, training, device)], ["data", "label"], auto_reset=False):
        yield batch[0]["data"].permute(0, 3, 1, 2), batch[0]["label"][:, 0].long()


def dali_pipeline(args: argparse.Namespace, training: bool, device: "torch.device") -> "Pipeline":
    """Return a pipeline like that of paddle_resnet.data.loader with the flags of own_command; the module's docstring
    lists the differences."""
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = device.type == "cuda"
    decoder = {"device": "cpu"}
    if on_gpu:
        hints = {"preallocate_width_hint": 5980, "preallocate_height_hint": 6430}
        decoder = {"device": "mixed", "hw_decoder_load": 0.9, **hints}

    @pipeline_def(
        batch_size=args.batch_size,
        num_threads=args.threads,
        device_id=device.index,  # None on a CPU
        seed=42,
        prefetch_queue_depth=3,
        exec_dynamic=on_gpu,
    )
    def pipeline():
        folder = Path(args.image_root) / ("train" if training else "val")
        shard = {"shard_id": device.index or 0, "num_shards": int(os.environ.get("WORLD_SIZE", "1"))}
        encoded, labels = fn.readers.file(file_root=str(folder), random_shuffle=training, name="Reader", **shard)
        if training:
            crop = {"random_area": (0.08, 1.0), "random_aspect_ratio": (3 / 4, 4 / 3), "num_attempts": 100}
            images = fn.decoders.image_random_crop(encoded, output_type=types.RGB, **crop, **decoder)
            images = fn.resize(images, resize_x=args.crop_size, resize_y=args.crop_size, antialias=False)
        else:
            images = fn.decoders.image(encoded, output_type=types.RGB, **decoder)
            images = fn.resize(images, resize_shorter=args.crop_size * 256 // 224, antialias=False)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16 if on_gpu else types.FLOAT,
            output_layout="HWC",
            crop=(args.crop_size, args.crop_size),
            mean=[255 * m for m in MEAN],
            std=[255 * s for s in STD],
            mirror=fn.random.coin_flip(probability=0.5) if training else 0,
        )
        return images, labels.gpu() if on_gpu else labels

    return pipeline()


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--image-root", metavar="DIR")
    both.add_argument("--device", default="gpu", choices=["gpu", "cpu"], help="device (cpu: float32, for tests)")
    both.add_argument("--batch-size", type=int, default=256)
    both.add_argument("--crop-size", type=int, default=224)
    both.add_argument("--threads", type=int, default=14, help="number of CPU threads for DALI")
    both.add_argument("--steps", type=int, default=100)
    both.add_argument("--warmup-steps", type=int, default=50)

    run = commands.add_parser("run", parents=[both])
    run.add_argument(
        "--rows",
        action="append",
        metavar="TEXT",
        help=f"text in the names of the rows to measure; all rows: {list(ROWS)}",
    )
    run.add_argument("--arch", action="append", choices=TIMM, help="network (default: ResNet50); may be repeated")
    run.add_argument("--repeats", type=int, default=3)
    run.add_argument("--output", default="peers.jsonl", metavar="FILE", help="file to which JSON lines are appended")
    run.add_argument("--paddle-python", default=sys.executable, metavar="PYTHON")
    run.add_argument("--torch-python", default=sys.executable, metavar="PYTHON")
    run.add_argument("--jax-python", default=sys.executable, metavar="PYTHON")
    run.add_argument("--torch-pythonpath", metavar="DIR", help="folder with nvidia-dali that is added to PYTHONPATH")
    run.add_argument(
        "--torch-env-clear", action="store_true", help="unset PYTHONPATH and LD_LIBRARY_PATH for the baselines"
    )
    worker = commands.add_parser("worker", parents=[both])
    worker.add_argument("task", choices=sorted({task for task, _, _ in ROWS.values()}))
    worker.add_argument("--arch", choices=TIMM, default="ResNet50")
    worker.add_argument("--compile", choices=["default", "reduce-overhead", "max-autotune"])
    commands.add_parser("table").add_argument("files", nargs="+", metavar="FILE")
    args = parser.parse_args(arguments)
    if getattr(args, "warmup_steps", 1) < 1:
        parser.error(f"--warmup-steps {args.warmup_steps}: does not exclude compilation; use 1 or more")
    return args


if __name__ == "__main__":
    args = parse_args()
    if args.command == "worker":
        worker(args)
    elif args.command == "table":
        print(table([json.loads(line) for path in args.files for line in Path(path).read_text().splitlines()]))
    else:
        sys.exit(run(args))
