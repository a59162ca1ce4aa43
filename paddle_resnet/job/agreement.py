"""Before step 1, compare flags, versions, source code, data and network between the processes of a job."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import nvidia.dali
import paddle
from paddle import static

from paddle_resnet import graph, utils
from paddle_resnet.data.iterators import EmptyIterator, ShardIterator, SyntheticIterator
from paddle_resnet.job import exchange
from paddle_resnet.job.position import ranks
from paddle_resnet.models import user_file
from paddle_resnet.settings.declarations import FLAGS, RESUMED, of_kinds
from paddle_resnet.settings.values import EXPLICIT, flag_name, text
from paddle_resnet.step import facts as program_facts
from paddle_resnet.utils.errors import UsageError

# Flags that may differ between machines: paths, output flags, and flags that affect only speed.
LOCAL_FLAGS = (
    *("image_root", "skip_list", "allow_outside", "report_file", "show_config", "verbose", "enable_cpu_affinity"),
    *("dali_num_threads", "dali_prefetch", "hw_decoder_load"),
)


def check_start(entry: dict[str, Any]) -> None:
    """Compare flags, versions and source code between all ranks.

    Args:
        entry: result of values.Settings.as_entry.
    Raises:
        UsageError: the ranks differ. Every rank raises this error, and the message lists the values with their ranks.
    """
    facts = {flag_name(name): entry[name] for name in FLAGS if name in entry and name not in LOCAL_FLAGS}
    for name in map(flag_name, (name for name in of_kinds(*RESUMED) if name not in entry[EXPLICIT])):
        facts[name] = f"{text(facts[name])} (default)"  # a checkpoint may replace the default
    facts["file of --model-arch-name (hash)"] = _hash(user_file.sha256(entry["model_arch_name"]))
    facts["Paddle version"] = paddle.__version__
    facts["DALI version"] = nvidia.dali.__version__
    facts["source code of this program (hash)"] = _hash(_sources())
    _compare(facts)


def check_work(
    kernels: str,
    train_loader: ShardIterator | SyntheticIterator | None,
    eval_loader: ShardIterator | EmptyIterator | SyntheticIterator | None,
    program: static.Program,
) -> None:
    """Compare kernels, data sets and networks between all ranks.

    Args:
        kernels: "native" or "paddle".
        train_loader, eval_loader: results of dali.build_dataloader, or None.
        program: training program, or evaluation program if the run does not train.
    Raises:
        UsageError: the ranks differ. See check_start.
    """
    # The kernels of the ranks can differ, for example if only some machines have a compiler.
    facts: dict[str, Any] = {"--kernels (auto depends on the machine, paddle runs on every machine)": kernels}
    if train_loader is not None:
        facts["number of steps per epoch"] = len(train_loader)
    for name, loader in (("training", train_loader), ("validation", eval_loader)):
        if loader is not None:
            facts[f"number of {name} images"] = loader.data_set_size
            facts[f"list of {name} images and labels (hash)"] = loader.digest and loader.digest[:8]
            facts[f"list of {name} classes (hash)"] = _hash(list(loader.classes))
    shapes = {p.name: [*p.shape, str(p.dtype)] for p in graph.block(program).all_parameters()}
    facts["number of parameters"] = len(shapes)
    teacher = program_facts.of(program).teacher
    if teacher is not None:
        facts["weights of --teacher (hash)"] = teacher.sha256[:8]
    facts["shapes of the parameters (hash)"] = _hash(shapes)
    _compare(facts)


def _compare(facts):
    all_ranks = exchange.gather(json.dumps(facts).encode())
    exchange.from_rank_0(lambda: _check_equal([json.loads(data) for data in all_ranks or ()]))


def _check_equal(all_ranks):
    """Raise UsageError if a value differs between ranks. `all_ranks` is [{name: value}], with one entry per rank."""
    differences = []
    for name in dict.fromkeys(name for facts in all_ranks for name in facts):
        where = {}
        for rank, facts in enumerate(all_ranks):
            where.setdefault(text(facts.get(name)), []).append(rank)
        if len(where) > 1:
            differences.append(f"{name} is " + " and ".join(f"{v} on {ranks(who)}" for v, who in where.items()))
    if differences:
        raise UsageError(
            f"job: the processes differ: {', '.join(differences)}; start all processes with the same command, "
            "software and data"
        )


@functools.cache
def _sources():
    root = Path(utils.__file__).parents[2]
    paths = [path for end in ("py", "cc", "h", "cu", "cuh") for path in root.glob(f"paddle_resnet/**/*.{end}")]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def _hash(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
