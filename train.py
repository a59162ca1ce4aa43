"""Train, evaluate or benchmark a network from a checkout: `python train.py FLAGS`; see paddle_resnet/train.py."""

import sys

from paddle_resnet.train import main
from paddle_resnet.utils import signals

if __name__ == "__main__":
    sys.exit(signals.leaving(main()))
