"""Mixed precision (AMP) and loss scaling."""

from collections.abc import Iterator
from dataclasses import dataclass

from paddle_resnet.settings.field import Conflict, flag
from paddle_resnet.settings.values import argument, flag_name
from paddle_resnet.utils import numbers


@dataclass(frozen=True)
class Settings:
    amp: bool = flag(
        False,
        "use mixed precision; GPUs only",
        topic="precision",
    )
    amp_dtype: str = flag(
        "float16",
        "16-bit type of mixed precision; bfloat16 needs no loss scaling",
        topic="precision",
        choices=["float16", "bfloat16"],
        used_by=("amp", (True,)),
    )
    amp_level: str = flag(
        "O1",
        "level of mixed precision; O1: float32 parameters; O2: parameters in --amp-dtype with float32 master copies",
        topic="precision",
        choices=["O1", "O2"],
        used_by=("amp", (True,)),
    )
    scale_loss: float = flag(
        1.0,
        "loss scale; initial value if the scale is dynamic",
        topic="precision",
        parse=numbers.positive_number,
        depends_on=("amp_dtype",),
        used_by=("amp", (True,)),
    )
    use_dynamic_loss_scaling: bool = flag(
        False,
        "adjust the loss scale during training",
        topic="precision",
        depends_on=("amp_dtype",),
        used_by=("amp", (True,)),
    )
    use_pure_fp16: bool = flag(
        False,
        "shorthand for --amp-dtype float16 --amp-level O2",
        topic="precision",
        depends_on=("amp_dtype", "amp_level"),
        used_by=("amp", (True,)),
    )


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield a Conflict for each conflict between the flags of mixed precision."""
    if not settings.amp:
        return
    if settings.use_pure_fp16 and settings.amp_level == "O1":
        yield Conflict(
            "--use-pure-fp16: implies level O2, but --amp-level is O1; remove one of them",
            ("use_pure_fp16", "amp_level"),
            ("use_pure_fp16", "amp_level"),
        )
    if settings.amp_dtype == "float16":
        return
    if settings.use_pure_fp16:
        yield Conflict(
            "--use-pure-fp16: implies float16, but --amp-dtype is bfloat16; use --amp-level O2 instead",
            ("use_pure_fp16", "amp_dtype"),
            ("use_pure_fp16", "amp_dtype"),
        )
    if settings.use_dynamic_loss_scaling or settings.scale_loss != 1:
        name = "use_dynamic_loss_scaling" if settings.use_dynamic_loss_scaling else "scale_loss"
        yield Conflict(
            f"{argument(settings, name)}: bfloat16 needs no loss scaling; remove {flag_name(name)}",
            (name,),
            ("amp_dtype",),
        )
