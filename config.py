"""The name of paddle_resnet.config in NVIDIA's example, for programs that run in a checkout."""

from paddle_resnet.config import parse_args

__all__ = ["parse_args"]
