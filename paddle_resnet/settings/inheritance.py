"""Derive flags from other flags, and inherit flags from an earlier run."""

import re

from paddle_resnet.models import RESIZE_RATIO, registered
from paddle_resnet.settings import durations, values
from paddle_resnet.settings.declarations import DEFAULTS, EVALUATED, FLAGS, RESUMED
from paddle_resnet.settings.values import flag_name, network_name

# Flags whose default has a different effect if it is explicit. For example, an explicit --data-layout NCHW prevents the
# choice of NHWC on a CPU, and an explicit --benchmark-steps without --benchmark triggers a warning.
_DEPENDS_ON_ORIGIN = (
    *("model_prefix", "data_layout", "cuda_graph", "asp"),
    *("show_config", "benchmark_steps", "benchmark_warmup_steps"),
)


def follow(settings: values.Settings) -> None:
    """Set the flags whose values are derived from other flags, unless they are explicit, set by the program, inherited
    or chosen. If --crop-size and --image-shape differ, inherited and chosen values of these two flags also change."""

    def is_free(name):
        return not (settings.is_fixed(name) or settings.is_inherited(name) or settings.is_chosen(name))

    if is_free("model_prefix"):
        settings.resolve("--model-arch-name", model_prefix=_prefix(network_name(settings.model_arch_name)))
    network = registered(settings.model_arch_name)
    if network:
        defaults = dict(network.preprocessing)
        if is_free("image_shape"):
            defaults["crop_size"] = network.image_size
        settings.resolve("--model-arch-name", **{name: value for name, value in defaults.items() if is_free(name)})
    if settings.multi_label and is_free("label_smoothing"):
        settings.resolve("--multi-label", label_smoothing=0.0)
    if is_free("amp_level"):
        settings.resolve("--use-pure-fp16", amp_level="O2" if settings.use_pure_fp16 else "O1")
    if len(settings.image_shape) == 3 and min(settings.image_shape[1:]) != settings.crop_size:
        if not settings.is_fixed("image_shape"):
            shape = [settings.image_shape[0], settings.crop_size, settings.crop_size]
            settings.resolve("--crop-size", image_shape=shape)
        elif not settings.is_fixed("crop_size"):
            settings.resolve("--image-shape", crop_size=min(settings.image_shape[1:]))
    if is_free("resize_short"):
        ratio = network.resize_ratio if network else RESIZE_RATIO
        settings.resolve("--crop-size", resize_short=round(settings.crop_size * ratio))
    if settings.iter_unit == "batch" and settings.num_iter is not None:
        defaults = {"warmup_epochs": 0, "save_interval": settings.num_iter, "eval_interval": settings.num_iter}
        settings.resolve("--iter-unit", **{name: value for name, value in defaults.items() if is_free(name)})


def reset(settings: values.Settings, name: str) -> None:
    """Set a flag to its default, and derive the flags again whose values are derived from other flags."""
    derived = [other for other in FLAGS if settings.origin(other).startswith("--")]
    settings.set("default", **{other: DEFAULTS[other] for other in (*derived, name)})
    follow(settings)


def may_follow(settings: values.Settings, name: str) -> bool:
    """Return whether the run itself may determine the value of a flag that is not explicit: from the checkpoint, the
    data, the network or the machine, or because of --choose-recipe or --budget-minutes."""
    resumes = settings.resume or settings.last_epoch_of_checkpoint is not None
    is_inherited = FLAGS[name].kind in (RESUMED if resumes else EVALUATED)
    is_chosen = settings.choose_recipe or (settings.budget_minutes is not None and name in durations.CHOSEN_FOR_BUDGET)
    return is_inherited or is_chosen or name in _DEPENDS_ON_ORIGIN


def _prefix(arch):
    """Return the prefix of file names for a network, such as resnet_50_paddle for ResNet50, as in NVIDIA's example."""
    return re.sub(r"(?<=\D)(?=\d)", "_", arch).lower() + "_paddle"


def inherit(
    settings: values.Settings, recorded: values.Settings, names: tuple[str, ...], folder: str
) -> tuple[dict, dict]:
    """Set each of the flags `names` that is not explicit to its value from an earlier run, unless it depends on an
    explicit flag whose value differs (depends_on in field.Declaration), and then derive flags again (follow).

    Args:
        settings: Settings; modified in place.
        recorded: Settings of the earlier run.
        names: names of the flags to inherit.
        folder: path of the checkpoint, which is recorded as the origin of the values.
    Returns:
        ({flag: value} for each inherited flag that changed, {flag: (value, recorded value)} for each explicit flag in
        `names` that differs).
    """
    before = settings.copy()
    explicit = [name for name in names if settings.is_explicit(name)]
    differing = [name for name in explicit if getattr(before, name) != getattr(recorded, name)]
    inherited = [n for n in names if n not in explicit and not {*differing} & {*FLAGS[n].depends_on}]
    settings.set(f"checkpoint {folder}", **{name: getattr(recorded, name) for name in inherited})
    follow(settings)
    now = {name: getattr(settings, name) for name in inherited}
    taken = {flag_name(name): value for name, value in now.items() if value != getattr(before, name)}
    return taken, {flag_name(name): (getattr(before, name), getattr(recorded, name)) for name in differing}
