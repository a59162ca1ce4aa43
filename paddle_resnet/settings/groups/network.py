"""The network."""

from dataclasses import dataclass

from paddle_resnet.models import MODELS
from paddle_resnet.settings.field import flag
from paddle_resnet.utils import numbers
from paddle_resnet.utils.errors import command


@dataclass(frozen=True)
class Settings:
    model_arch_name: str = flag(
        "ResNet50",
        f"network, or FILE.py:NAME for your own; the networks are {', '.join(MODELS)}; "
        f"{command('models')} lists their sizes",
        topic="start",
        kind="network",
        metavar="ARCH",
    )
    num_of_class: int | None = flag(
        None,
        "number of network outputs; 1000 if the data defines no classes (default: chosen from the data)",
        topic="data",
        kind="network",
        parse=numbers.num_of_class,
        metavar="N",
        before=1000,
    )
    bn_momentum: float | None = flag(
        None,
        "weight of the previous value in the moving averages of the BN statistics; after B batches, "
        "the initial statistics have a weight of M^B (default: chosen from the network)",
        topic="fine-tune",
        parse=numbers.or_none(numbers.below_one),
        metavar="M",
    )
