"""What must be the same on all processes of a job, compared before step 1."""

import hashlib
import json
from pathlib import Path

import nvidia.dali
import paddle

import config
from paddle_resnet.job import exchange
from paddle_resnet.job.position import ranks
from utils.errors import UsageError

# Flags that may differ between machines: paths, and the speed of the loader.
LOCAL_FLAGS = (
    *("image_root", "skip_list", "allow_outside", "report_file", "show_config", "verbose", "enable_cpu_affinity"),
    *("dali_num_threads", "dali_prefetch", "hw_decoder_load"),
)


def check_start(args):
    """Compare flags, versions and sources.

    Raises:
        UsageError: on every rank; names what differs and on which ranks.
    """
    facts = {config.flag(name): v for name, v in config.as_dict(args).items() if name not in LOCAL_FLAGS}
    for name in map(config.flag, {*config.RESUMED} - args.given):
        facts[name] = f"{facts[name]} (default)"  # which a checkpoint may replace
    facts["the version of Paddle"] = paddle.__version__
    facts["the version of DALI"] = nvidia.dali.__version__
    facts["this program (hash of its sources)"] = _hash(_sources())
    _compare(facts)


def check_work(args, train_loader, eval_loader, program):
    """Compare kernels, data sets and network, like check_start.

    Args:
        args: flags, with resolved --kernels.
        train_loader, eval_loader: results of dali.build_dataloader, or None.
        program: training program, or evaluation program if nothing is trained.
    """
    # One machine may have a compiler and another none.
    facts = {"--kernels (auto follows the machine, paddle runs on all)": args.kernels}
    if train_loader is not None:
        facts["the number of steps per epoch"] = len(train_loader)
    for name, loader in (("training", train_loader), ("validation", eval_loader)):
        if loader is not None:
            facts[f"the number of {name} images"] = loader.data_set_size
            facts[f"the list of {name} images and labels (hash)"] = loader.digest and loader.digest[:8]
            facts[f"the list of classes of the {name} images (hash)"] = _hash(list(loader.classes))
    shapes = {p.name: [*p.shape, str(p.dtype)] for p in program.global_block().all_parameters()}
    facts["the number of parameters"] = len(shapes)
    facts["the shapes of the parameters (hash)"] = _hash(shapes)
    _compare(facts)


def _compare(facts):
    everyone = exchange.gather(json.dumps(facts).encode())
    exchange.from_rank_0(lambda: _refuse_differences([json.loads(data) for data in everyone]))


def _refuse_differences(everyone):
    """Raise UsageError if a fact differs between ranks; everyone: [{name: value} of each rank]."""
    differences = []
    for name in dict.fromkeys(name for facts in everyone for name in facts):
        values = {}
        for rank, facts in enumerate(everyone):
            values.setdefault(str(facts.get(name)), []).append(rank)
        if len(values) > 1:
            differences.append(f"{name} is " + " and ".join(f"{v} on {ranks(who)}" for v, who in values.items()))
    if differences:
        raise UsageError(
            f"the processes of the job do not agree: {'; '.join(differences)}: start each with the same command, "
            "program and data"
        )


def _sources():
    root = Path(config.__file__).parent
    paths = [root / "config.py", root / "train.py", *root.glob("utils/*.py")]  # in site-packages, there are others
    paths += [path for end in ("py", "cc", "h", "cu", "cuh") for path in root.glob(f"paddle_resnet/**/*.{end}")]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def _hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
