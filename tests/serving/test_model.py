import numpy as np

from paddle_resnet.serving.model import Model, top


def test_top_returns_the_five_most_probable_classes():
    rows = np.array([[0.1, 0.3, 0.1, 0.2, 0.1, 0.1, 0.1], [0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1], [0, 0, 0, 0, 0, 0, 1]])
    labels, probabilities = top(rows)
    assert labels.tolist() == [[1, 3, 0, 2, 4], [0, 1, 2, 3, 4], [6, 0, 1, 2, 3]]
    np.testing.assert_array_equal(probabilities, np.take_along_axis(rows, labels, axis=1))


def test_classes_without_a_name_are_named_by_their_label():
    model = Model("", {"output": {"shape": [None, 3]}, "classes": ["a", "b"]}, None)
    [image] = model.predicted_classes(np.array([[0.1, 0.3, 0.6]]))
    expected = [(2, "2", 0.6), (1, "b", 0.3), (0, "a", 0.1)]
    assert image == [{"label": label, "class": name, "probability": p} for label, name, p in expected]


def test_probability_equal_to_the_threshold_is_sufficient():
    description = {"output": {"shape": [None, 3]}, "classes": [], "multi_label": {"thresholds": [0.5, 0.25, 0.75]}}
    [image] = Model("", description, None).predicted_classes(np.array([[0.5, 0.75, 0.5]]))
    assert [(entry["label"], entry["threshold"]) for entry in image] == [(1, 0.25), (0, 0.5)]
