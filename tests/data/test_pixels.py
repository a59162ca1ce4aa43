import numpy as np
import pytest

from paddle_resnet.data import pixels


@pytest.mark.parametrize("data_layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", [3, 4])
def test_normalization_is_reversed(data_layout, channels):
    images = np.random.RandomState(0).randint(0, 256, (2, 5, 6, 3)).astype(np.uint8)
    mean, std = [0.5, 0.25, 0.125], [0.25, 0.5, 1]
    normalized = np.zeros((2, 5, 6, channels), np.float32)
    normalized[..., :3] = (images * np.float32(1 / 255) - mean) / std
    if data_layout == "NCHW":
        normalized = normalized.transpose(0, 3, 1, 2)
    result = pixels.pictures(normalized, data_layout, 1 / 255, mean, std)
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, images)
    extremes = np.float32([[[[-9, 9, 0.499]]]])  # are clipped and rounded
    assert pixels.pictures(extremes, "NHWC", 1, [0] * 3, [1, 100, 1]).tolist() == [[[[0, 255, 0]]]]
