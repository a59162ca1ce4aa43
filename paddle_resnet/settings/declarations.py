"""Collect the flags of train.py, which components and groups declare as fields of their Settings, and build the parser.

The kind of a flag determines which runs inherit it from a checkpoint. Evaluation inherits the flags of the kinds
"network" and "preprocessing". Training that loads only the variables of --from-checkpoint inherits the flags of the
kinds "network" and "preprocessing" and, if the run that wrote the checkpoint used --asp, also --asp. Fine-tuning
(--from-pretrained-params) inherits --model-arch-name, --image-shape and the flags of the kind "preprocessing". A
resumed run inherits the flags of the kinds "network", "preprocessing", "recipe" and "saving". No run inherits the flags
of the kinds "loader", "machine" and "output".

The topic of a flag is the part of `--help all` that describes it; `--help` lists only the flags in MAIN, each with its
help text up to the first semicolon.
"""

from paddle_resnet import __version__
from paddle_resnet.components import COMPONENTS
from paddle_resnet.settings.field import flags
from paddle_resnet.settings.groups import GROUPS
from paddle_resnet.settings.values import flag_name
from paddle_resnet.utils.command_line import Parser
from paddle_resnet.utils.errors import SCRIPT, is_installed, program

KINDS = ("network", "preprocessing", "recipe", "saving", "loader", "machine", "output")
EVALUATED = ("network", "preprocessing")
RESUMED = (*EVALUATED, "recipe", "saving")
MODULES = (*GROUPS, *COMPONENTS)  # all modules that declare flags

# {topic of --help: description}
TOPICS = {
    "start": "parts of a run, configuration file, network, and checkpoint to start from",
    "fine-tune": "pretrained weights, frozen layers, learning rates per layer",
    "data": "data set, classes and labels",
    "image": "image size and preprocessing",
    "augment": "random changes of training images",
    "regularize": "label smoothing, weight decay, dropout, averaged weights",
    "distill": "a teacher whose outputs the network learns",
    "optimizer": "update rule and batch size",
    "schedule": "length of the run and learning rate",
    "precision": "mixed precision, memory layout, sparsity, quantization",
    "checkpoints": "saving, evaluation and early end of the run",
    "machine": "device, kernels and loader threads",
    "logs": "report, TensorBoard, HTML page, predictions",
    "benchmark": "measuring and tracing steps",
}
# The flags that a new user needs: {question: flags}.
MAIN = {
    "What to train": (
        *("--image-root", "--config", "--choose-recipe", "--model-arch-name", "--from-pretrained-params"),
        "--num-of-class",
    ),
    "How to train": ("--epochs", "--budget-minutes", "--batch-size", "--lr", "--optimizer", "--crop-size", "--amp"),
    "What to run, and where to save": ("--run-scope", "--from-checkpoint", "--resume", "--output-dir"),
    "Where to run": ("--device", "--seed", "--dry-run"),
}
EXAMPLES = (
    (
        "train on your photos; the run chooses flags for the data and the machine",
        "--choose-recipe --image-root DIR --output-dir output/photos",
    ),
    (
        "train with a recipe; configs/README.md lists all recipes",
        "--config configs/imagenet_resnet50_90epochs.yaml --image-root DIR",
    ),
    (
        "continue after an interruption: repeat the command with --resume",
        "--choose-recipe --image-root DIR --output-dir output/photos --resume",
    ),
    (
        "evaluate the best checkpoint of a run",
        "--run-scope eval_only --from-checkpoint output/ResNet50 --image-root DIR",
    ),
)
# Flags of NVIDIA's RN50v1.5 Paddle example.
_OF_NVIDIA = (
    "amp asp batch-size benchmark benchmark-steps benchmark-warmup-steps bn-weight-decay crop-size dali-num-threads "
    "dali-output-fp16 dali-random-seed data-layout enable-cpu-affinity epochs eval-interval from-checkpoint "
    "from-pretrained-params fuse-resunit image-root image-shape inference-dir label-smoothing last-epoch-of-checkpoint "
    "lr lr-scheduler mask-algo model-arch-name model-prefix momentum normalize-mean normalize-scale normalize-std "
    "num-of-class optimizer output-dir print-interval prune-model qat rand-crop-ratio rand-crop-scale report-file "
    "resize-short run-scope save-interval scale-loss show-config use-dynamic-loss-scaling use-pure-fp16 warmup-epochs "
    "warmup-start-lr weight-decay"
)
NVIDIA = frozenset(f"--{name}" for name in _OF_NVIDIA.split())

# The order of the flags in `--help TOPIC`, --print-config and meta.json. Flags that ORDER does not contain come last.
ORDER = (
    "config run-scope resume overwrite from-checkpoint last-epoch-of-checkpoint from-pretrained-params "
    "pretrained-mismatch choose-recipe dry-run model-arch-name num-of-class image-shape qat crop-size resize-short "
    "interp normalize-scale normalize-mean normalize-std batch-size data-layout dali-output-fp16 dali-random-seed "
    "multi-label label-offset balanced-sampling rand-crop-scale rand-crop-ratio crop-padding auto-augment "
    "auto-augment-magnitude color-jitter lighting rotate-degrees iter-unit num-iter epochs budget-minutes "
    "accumulate-steps seed label-smoothing asymmetric-loss class-weights teacher distill-weight "
    "distill-temperature max-bad-steps freeze unfreeze-at optimizer "
    "momentum beta1 beta2 opt-epsilon lookahead weight-decay clip-grad-norm sizes mixup cutmix dropout drop-path "
    "bn-momentum ema bn-weight-decay lr warmup-epochs lr-decay-by-layer classifier-lr-factor warmup-start-lr "
    "lr-scheduler min-lr "
    "lr-decay-epochs lr-decay-factor lr-power lr-rise lr-flat amp amp-dtype amp-level scale-loss "
    "use-dynamic-loss-scaling use-pure-fp16 asp prune-model mask-algo fuse-resunit save-interval "
    "save-interval-steps keep-checkpoints patience checkpoint-commit model-prefix eval-interval tta image-root "
    "data-format skip-list allow-empty-classes allow-one-class allow-outside dali-device dali-num-threads "
    "dali-prefetch hw-decoder-load device kernels program-representation cuda-graph enable-cpu-affinity "
    "comm-timeout-s output-dir inference-dir report-file tensorboard-dir report-html predictions print-interval "
    "show-config verbose print-config benchmark benchmark-steps benchmark-warmup-steps profile-steps"
)


def _collect():
    """Return {name: Flag} for all flags, in the order of the help."""
    found = {name: declared for module in MODULES for name, declared in flags(module.Settings).items()}
    order = {name.replace("-", "_"): i for i, name in enumerate(ORDER.split())}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _build_parser():
    parser = Parser(
        prog="train",
        description="Train, evaluate or benchmark an image classifier with Paddle and NVIDIA DALI.",
        # Omit the example with a recipe if paddle-resnet is installed, because a wheel does not contain configs/.
        examples=[example for example in EXAMPLES if "configs/" not in example[1] or not is_installed()],
        main=MAIN,
        epilog=f"{program('train')} --print-config FLAGS prints the values as a file for --config, except those that "
        "you do not set and that the run can determine, for example from a checkpoint, the data or the network. In the "
        "file and on the command line, `false` turns off a switch. (N): flag of NVIDIA's RN50v1.5 Paddle example.",
    )
    for name, declared in _FLAGS.items():
        action = parser.add_argument(flag_name(name), default=declared.default, **declared.options)
        action.mark = " (N)" if flag_name(name) in NVIDIA else ""  # pyright: ignore[reportAttributeAccessIssue]
    parser.add_argument("--version", action="version", version=f"{SCRIPT} {__version__}", help="print the version")
    parser.topics = {
        topic: (description, [flag_name(name) for name, declaration in FLAGS.items() if declaration.topic == topic])
        for topic, description in TOPICS.items()
    }
    return parser


_FLAGS = _collect()
FLAGS = {name: declared.declaration for name, declared in _FLAGS.items()}  # {name: Declaration}
DEFAULTS = {name: declared.default for name, declared in _FLAGS.items()}
PARSER = _build_parser()
ACTIONS = {action.dest: action for action in PARSER._actions if action.dest in FLAGS}  # {name: argparse action}


def of_kinds(*kinds: str) -> tuple[str, ...]:
    """Return the names of all flags whose kind is in `kinds`."""
    return tuple(name for name, declaration in FLAGS.items() if declaration.kind in kinds)
